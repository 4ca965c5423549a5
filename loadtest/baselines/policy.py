"""What a simulated cluster asks of a policy, and what it tells it: the shape that every policy has.

Rules that hold here
- A policy does no I/O, has no clock and no randomness: time is an argument, in seconds of the simulated cluster.
  The same calls in the same order give the same answers. Where a rule leaves a tie, the node that comes first in
  the view's order wins.
- A policy sees what its real counterpart sees: the view, its own notices, and nothing of the future.
  `Arrival.output_tokens` is there for the engine, so no policy reads it.
- A request's calls come in this order: `place` until it answers with a placement, `bind`, `prefill_started`,
  `prefill_done`, `ended`. `bind` comes right after the placement when `binds_at_routing`, otherwise when the prefill
  starts. `ended` may come at any time after `place`, once: the request ended, or its client or its node
  left. After it the request counts nowhere, and it may be placed again.
- The view lists at least one node of a phase when a node of this phase is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from shared.messages import NodeState, PageArray, Phase, Slice
from shared.timing import Profile


class Arrival(msgspec.Struct, frozen=True):
    """A request as it reaches the router."""

    rid: str
    session: str  # the agent: a sticky router's session, ThunderAgent's program
    branch: str
    path: PageArray  # int64[n]: the full pages of the prompt
    prompt_tokens: int
    output_tokens: int  # for the engine only


class Placement(msgspec.Struct, frozen=True):
    """Where a request is prefilled.

    The node fetches pages [own_pages, own_pages + fetch_pages) of the path from `source`, which is None when there
    is nothing to fetch.
    """

    node: str
    own_pages: int = 0
    fetch_pages: int = 0
    source: str | None = None
    predicted_ttft_s: float | None = None  # of routers that predict one


class ClusterView(Protocol):
    """The cluster as a policy sees it now. Nodes that drain or relaunch are in neither phase."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""

    @property
    def prefill_nodes(self) -> Sequence[str]:
        """Nodes that take prefills, in an order that only a move changes."""

    @property
    def decode_nodes(self) -> Sequence[str]:
        """Nodes that take decodes, in an order that only a move changes."""

    @property
    def moving(self) -> Sequence[str]:
        """Nodes that are on their way to another phase."""

    def leading(self, path: PageArray) -> Mapping[str, int]:
        """Leading pages of the path that each node can read in GPU or host memory; only nodes with some."""

    def leading_l1(self, path: PageArray) -> Mapping[str, int]:
        """Leading pages of the path that each node holds in GPU memory; only nodes with some."""

    def profile(self, node: str) -> Profile:
        """The node's models and capacities."""

    def state(self, node: str) -> NodeState | None:
        """The node's state as it last reported it."""

    def queued_prefill_tokens(self, node: str) -> int:
        """Prompt tokens, cached ones included, of requests whose prefill has not started on the node."""

    def decode_kv_tokens(self, node: str) -> int:
        """Context tokens of the requests that decode on the node or wait there for room."""

    def decode_requests(self, node: str) -> int:
        """How many requests these are."""


class Router(Protocol):
    """Chooses nodes for requests. A router implements `place` and `bind`, and the notices that it needs.

    `binds_at_routing`: the decode node is bound, and its memory reserved, when the request is routed; otherwise when
    its prefill starts. `fetches_inline`: a fetch begins with the prefill and delays it; otherwise it begins with the
    placement. `tick_s`: seconds between calls of `tick`, None for none.
    """

    binds_at_routing: bool
    fetches_inline: bool = False
    tick_s: float | None = None

    def place(self, arrival: Arrival, view: ClusterView, now: float) -> Placement | None:
        """The prefill node. None holds the request back: it is placed again when `tick` names it."""

    def bind(self, arrival: Arrival, prefill_node: str, view: ClusterView, now: float) -> str:
        """The decode node; asked again for a request that the first one handed back."""

    def prefill_started(self, rid: str, now: float) -> None:
        """The first chunk of the request is launched."""
        return None

    def prefill_done(self, rid: str, now: float) -> None:
        """The prefill is finished."""
        return None

    def ended(self, rid: str, context_tokens: int, now: float) -> None:
        """The request ended with so many tokens of prompt and output, or lost its node."""
        return None

    def session_ended(self, session: str, now: float) -> None:
        """The session sent its last request, which ended."""
        return None

    def node_changed(self, node: str, phase: Phase | None, now: float) -> None:
        """The node serves in this phase from now on, or in none (it drains, relaunches or is gone)."""
        return None

    def reported(self, state: NodeState, now: float) -> None:
        """A node's state came."""
        return None

    def fetched(self, node: str, profile: Profile, tokens: int, seconds: float) -> None:
        """A node's fetch from another one ended."""
        return None

    def tick(self, view: ClusterView, now: float) -> Sequence[str]:
        """Called every `tick_s`. Returns held requests that are to be placed again, in this order."""
        return ()


class KvAfterMove(StrEnum):
    """What becomes of the KV of a node that changes its phase."""

    KEPT = "kept"  # in both tiers, readable by every node
    UNREACHABLE = "unreachable"  # it keeps its room, but nobody reads it while the node is in the other phase
    EMPTY = "empty"  # the cache starts empty


class Moving(msgspec.Struct, frozen=True):
    """How a planner changes the phase of a node."""

    drains: bool  # requests on the node finish first; otherwise they are cut off and routed again
    out_s: tuple[float, float]  # seconds out of service after that: from, to
    kv: KvAfterMove


class Moves(msgspec.Struct, frozen=True):
    """A planner's decision: nodes and the phase that each is to serve."""

    phases: dict[str, Phase]
    reason: str


class Planner(Protocol):
    """Decides on the split. A planner implements `decide`, and the notices that it needs.

    `period_s`: seconds between calls of `decide`, None for none. `moving`: how its moves are done.
    """

    period_s: float | None
    moving: Moving

    def decide(self, view: ClusterView, now: float) -> Moves | None:
        """Nodes to move now; None for none."""

    def placed(self, placement: Placement, now: float) -> None:
        """The router placed a request."""
        return None

    def measured(self, part: Slice, now: float) -> None:
        """A slice of the workload was measured."""
        return None

    def moved(self, node: str, phase: Phase, now: float) -> None:
        """A node that was to move serves in its new phase."""
        return None
