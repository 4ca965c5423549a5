"""Where a request's two phases run: `placement` over what the cluster knows now, and the waiting for a node.

Rules that hold here
- While no node can take the work, the request waits for a change, `place_timeout_s` at most; then it is a 503.
- A node that was tried in vain is asked again only when nobody else is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

from services.router.explain import explained
from services.router.flight import Flight
from services.router.placement import Candidate, Costs, bind_decode, candidates
from services.router.tokens import Known
from shared.messages import BranchPlaced, Phase
from shared.openai import ApiError

if TYPE_CHECKING:
    from services.router.service import RouterService


class Placer:
    def __init__(self, service: RouterService) -> None:
        self._s = service
        self._settings = service.router_settings
        self._cluster = service.cluster
        self._clock = service.clock
        self._placements = 0

    async def prefill_node(self, model: str, prompt: Known, flight: Flight, tried: set[str]) -> Candidate:
        """The best prefill node; waits for one while none can take the request."""
        deadline = 0.0
        while True:
            nodes = self._cluster.prefill_nodes(model, tried)
            if nodes:
                node = self._cluster.nodes[nodes[0].node]
                costs = Costs(
                    fetch=self._cluster.fetch_model(node),
                    copy_s_per_token=self._settings.copy_s_per_token,
                    max_state_age_s=self._settings.max_state_age_s * self._clock.speedup,
                )
                holders = self._cluster.index.match(prompt.hashes)
                now = self._clock.now()
                found = candidates(
                    flight.prompt_tokens, node.info.page_size, holders, nodes, costs, now, flight.rid
                )
                flight.candidates = found
                flight.to_pull = (
                    flight.prompt_tokens - self._cluster.mean_held(model, holders) * node.info.page_size
                )
                flight.predicted_ttft_s = (
                    now - flight.t_arrive + found[0].ttft_s + self._cluster.handoff_s(flight.to_pull)
                )
                self._placements += 1
                rate = self._settings.decision_log_rate
                if int(self._placements * rate) != int((self._placements - 1) * rate):
                    self._s.log.info(
                        "placed", rid=flight.rid, branch=flight.branch, candidates=explained(flight)
                    )
                return found[0]
            tried.clear()  # nobody is left: a node that was tried may do by now
            deadline = deadline or self._deadline()
            await self._wait_for_change(deadline, "prefill")

    async def bind(self, model: str, flight: Flight, needed: int, tried: set[str]) -> None:
        """Choose the decode node and place the branch there (E.3, line 13); waits while there is none."""
        deadline = 0.0
        while not self.bind_now(model, flight, needed, tried):
            deadline = deadline or self._deadline()
            tried.clear()
            await self._wait_for_change(deadline, "decode")

    def bind_now(self, model: str, flight: Flight, needed: int, tried: Collection[str] = ()) -> bool:
        """The same, if there is a node now."""
        now = self._clock.now()
        max_age_s = self._settings.max_state_age_s * self._clock.speedup
        nodes = self._cluster.decode_nodes(model, tried)
        chosen = bind_decode(needed, nodes, max_age_s, now, prefer=flight.prefill_node)
        if chosen is None:
            return False
        flight.decode_node = chosen
        self._cluster.nodes[chosen].decode.send(flight.rid, needed)
        self._s.branch_out.publish(BranchPlaced(flight.branch, chosen, Phase.DECODE, now, flight.rid, needed))
        view = self._s.branches.get(flight.branch)
        if view is not None:
            view.prefill_node, view.decode_node = flight.prefill_node, chosen
        return True

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._settings.place_timeout_s

    async def _wait_for_change(self, deadline: float, phase: str) -> None:
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise ApiError(
                503,
                f"No {phase} node is ready; waited {self._settings.place_timeout_s:g} s.",
                type="server_error",
                code=f"no_{phase}_node",
                retry_after_s=1,
            )
        try:
            async with asyncio.timeout(min(left, 0.25)):
                await self._cluster.changed()
        except TimeoutError:
            pass
