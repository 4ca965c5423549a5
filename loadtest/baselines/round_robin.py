"""Round robin: the next node of the phase (`round_robin` of SGLang Model Gateway 0.3.2).

Rules that hold here
- Prefills and decodes are counted apart. A count goes on when the nodes of the phase change.
- As in SGLang's PD mode, a request goes to its prefill and its decode node at once, and the decode node reserves
  memory for it before the prefill (paper, Appendix A.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadtest.baselines.policy import Arrival, ClusterView, Placement, Router


class RoundRobinSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """There is nothing to set."""


class Rotation:
    """Nodes in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def next(self, nodes: Sequence[str]) -> str:
        """The next node. Raises ValueError without any."""
        if not nodes:
            raise ValueError("no node serves this phase")
        node = nodes[self._turn % len(nodes)]
        self._turn += 1
        return node


class RoundRobin(Router):
    binds_at_routing = True

    def __init__(self, settings: RoundRobinSettings | None = None) -> None:
        self._prefill = Rotation()
        self._decode = Rotation()

    def place(self, arrival: Arrival, view: ClusterView, now: float) -> Placement:
        return Placement(self._prefill.next(view.prefill_nodes))

    def bind(self, arrival: Arrival, prefill_node: str, view: ClusterView, now: float) -> str:
        return self._decode.next(view.decode_nodes)
