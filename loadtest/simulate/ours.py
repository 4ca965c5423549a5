"""Our own policy for the simulated cluster: the router's placement and the planner's core, as the services run them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from loadtest.baselines.policy import Arrival, ClusterView, Placement, Router
from services.router.fetch_times import FetchTimes
from services.router.placement import (
    DEFAULT_OUTPUT_TOKENS,
    START_RESTORED_FRACTION,
    Costs,
    DecodeNode,
    Prefill,
    PrefillNode,
    bind_decode,
    candidates,
)
from shared.messages import NodeState, Slice
from shared.timing import PrefillModel, Profile

MAX_STATE_AGE_S = 5.0
NEVER_TOKENS = 2**60  # of a least fetch: more than any prompt has


class OurRouter(Router):
    """Section 5.3 and the inner loop of Algorithm E.3: predicted TTFT over nodes that fetch from each other.

    `late` binds the decode node when the prefill starts, `pool` lets nodes fetch from each other.
    """

    fetches_inline = False
    tick_s = None

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        *,
        late: bool = True,
        pool: bool = True,
        copy_s_per_token: float = 1e-6,
    ) -> None:
        self.binds_at_routing = not late
        self._pool, self._copy_s = pool, copy_s_per_token
        self._prefill = {
            name: PrefillNode(name, p.prefill, p.chunk_tokens, p.idle_gap_s, START_RESTORED_FRACTION)
            for name, p in profiles.items()
        }
        self._decode = {name: DecodeNode(name, p.l1_tokens) for name, p in profiles.items()}
        self._fetch_times = {p.name: FetchTimes(p.fetch) for p in profiles.values()}
        self._where: dict[str, tuple[str, str]] = {}  # request -> prefill node, decode node

    def place(self, arrival: Arrival, view: ClusterView, now: float) -> Placement:
        nodes = [self._prefill[name] for name in view.prefill_nodes]
        holders = view.leading(arrival.path)
        fetch = self._fetch_times[view.profile(nodes[0].node).name].model
        if not self._pool:
            fetch = msgspec.structs.replace(fetch, min_tokens=NEVER_TOKENS)
        costs = Costs(fetch, self._copy_s, MAX_STATE_AGE_S)
        best = candidates(arrival.prompt_tokens, view.page_size, holders, nodes, costs, now, arrival.rid)[0]
        work = Prefill(arrival.rid, arrival.prompt_tokens - best.cached_tokens, best.cached_tokens)
        self._prefill[best.node].send(work)
        self._where[arrival.rid] = best.node, ""
        return Placement(best.node, best.own_pages, best.fetch_pages, best.source, best.ttft_s)

    def bind(self, arrival: Arrival, prefill_node: str, view: ClusterView, now: float) -> str:
        needed = arrival.prompt_tokens + DEFAULT_OUTPUT_TOKENS
        nodes = [self._decode[name] for name in view.decode_nodes]
        chosen = bind_decode(needed, nodes, MAX_STATE_AGE_S, now, prefer=prefill_node)
        assert chosen is not None
        before = self._where.get(arrival.rid, ("", ""))[1]
        if before:  # that node handed it back
            self._decode[before].finished(arrival.rid)
        self._decode[chosen].send(arrival.rid, needed)
        self._where[arrival.rid] = prefill_node, chosen
        return chosen

    def prefill_done(self, rid: str, now: float) -> None:
        self._prefill[self._where[rid][0]].finished(rid)

    def ended(self, rid: str, context_tokens: int, now: float) -> None:
        prefill, decode = self._where.pop(rid, ("", ""))
        if prefill:
            self._prefill[prefill].finished(rid)
        if decode:
            self._decode[decode].finished(rid)

    def reported(self, state: NodeState, now: float) -> None:
        self._prefill[state.node].report(state)
        self._decode[state.node].report(state)

    def fetched(self, node: str, profile: Profile, tokens: int, seconds: float) -> None:
        if tokens >= profile.fetch.min_tokens:
            self._fetch_times[profile.name].observed(tokens, seconds)

    def fitted(self, models: Mapping[str, PrefillModel]) -> None:
        """The planner has fitted these nodes' models (section 5.1)."""
        for name, model in models.items():
            self._prefill[name].predict_with(model)

    def measured(self, part: Slice) -> None:
        """f of the nodes that prefilled in the slice."""
        for one in part.nodes:
            if one.iterations:
                self._prefill[one.node].predict_with(restored_fraction=min(1.0, max(0.0, one.f)))
