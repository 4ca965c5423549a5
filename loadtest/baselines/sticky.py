"""Sticky sessions: a session stays on the node that served it first (`manual` of SGLang Model Gateway 0.3.2).

Rules that hold here
- A session keeps its prefill node while this node prefills; when it no longer does, the session is new.
- A new session takes the next node in turn: the peer's default is a random one, and both spread sessions evenly.
- Decode nodes come by round robin, bound at routing as in SGLang's PD mode.
"""

from __future__ import annotations

import msgspec

from loadtest.baselines.policy import Arrival, ClusterView, Placement, Router
from loadtest.baselines.round_robin import Rotation
from shared.messages import Phase


class StickySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """There is nothing to set."""


class Sticky(Router):
    binds_at_routing = True

    def __init__(self, settings: StickySettings | None = None) -> None:
        self._prefill = Rotation()
        self._decode = Rotation()
        self._nodes: dict[str, str] = {}  # session -> prefill node

    def __len__(self) -> int:
        """Sessions that have a node."""
        return len(self._nodes)

    def place(self, arrival: Arrival, view: ClusterView, now: float) -> Placement:
        node = self._nodes.get(arrival.session)
        if node is None or node not in view.prefill_nodes:
            node = self._prefill.next(view.prefill_nodes)
            self._nodes[arrival.session] = node
        return Placement(node)

    def bind(self, arrival: Arrival, prefill_node: str, view: ClusterView, now: float) -> str:
        return self._decode.next(view.decode_nodes)

    def session_ended(self, session: str, now: float) -> None:
        self._nodes.pop(session, None)

    def node_changed(self, node: str, phase: Phase | None, now: float) -> None:
        if phase is None or not phase.prefills:
            self._nodes = {session: kept for session, kept in self._nodes.items() if kept != node}
