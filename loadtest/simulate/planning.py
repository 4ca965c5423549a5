"""Our planner over the simulated cluster: the telemetry service's slices into the planner service's core."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from loadtest.baselines.policy import Router
from loadtest.simulate.cluster import Cluster
from loadtest.simulate.flight import Flight
from loadtest.simulate.loop import Loop
from loadtest.simulate.ours import OurRouter
from services.planner.core import PlannerCore, Rules
from services.telemetry.windows import SliceBuilder
from shared.messages import Iterations, NodeInfo, Outcome, Phase, RequestDone, RoleAck, RolePlan
from shared.split import Split
from shared.timing import Profile
from worker.engines.simulated.phase import Ack

LOOK_S = 1.0
GRACE_S, STALE_S = 2.0, 5.0  # of slices, as the telemetry service has them


class OurPlanner:
    def __init__(
        self,
        loop: Loop,
        cluster: Cluster,
        router: Router,
        profiles: Mapping[str, Profile],
        initial: Split,
        warmup_s: float,
        settings: Mapping[str, object],
    ) -> None:
        """`settings` change `Rules` by name. Raises ValueError."""
        self._loop, self._cluster = loop, cluster
        self._router = router if isinstance(router, OurRouter) else None
        self.rules = msgspec.convert(
            {"initial": initial, "warmup_s": warmup_s, **settings}, Rules, strict=False
        )
        self.core = PlannerCore(self.rules)
        self._slices = SliceBuilder(
            start_t=0.0, slice_s=self.rules.window_s / self.rules.slices, grace_s=GRACE_S, stale_s=STALE_S
        )
        self._infos = {
            name: NodeInfo(
                node=name, url=f"http://{name}", incarnation=name, model="m", profile=profile.name,
                page_size=profile.page_size, max_context=profile.max_context, l1_tokens=profile.l1_tokens,
                l2_tokens=profile.l2_tokens, chunk_tokens=profile.chunk_tokens, phase=Phase.BOTH,
            )
            for name, profile in profiles.items()
        }  # fmt: skip
        cluster.on_iterations = self._iterations
        cluster.on_state = self._slices.state
        cluster.on_ack = self._acked
        loop.at(0.0, self._look)

    def _iterations(self, message: Iterations) -> None:
        self._slices.iterations(message)
        if self.core.learning:
            self.core.iterations(message)

    def finished(self, flight: Flight) -> None:
        decode = flight.decode
        self._slices.request(
            RequestDone(
                rid=flight.arrival.rid, branch=flight.arrival.branch, outcome=Outcome.OK, t_arrive=flight.t_arrive,
                t_prefill_start=flight.t_prefill_start, t_prefill_end=flight.t_prefill_end,
                t_first_token=flight.t_first, t_end=flight.t_end, prompt_tokens=flight.prompt_tokens,
                cached_tokens=flight.cached_tokens, fetched_tokens=flight.fetched_tokens,
                restored_tokens=flight.restored_tokens, output_tokens=flight.output_tokens,
                decode_iterations=decode.iterations if decode is not None else 0,
                prefill_node=flight.prefill_node, decode_node=flight.decode_node,
            )
        )  # fmt: skip

    def _acked(self, name: str, ack: Ack) -> None:
        info = self._infos[name]
        self._infos[name] = msgspec.structs.replace(info, phase=ack.phase, epoch=ack.epoch)
        self.core.ack(
            self._loop.now, RoleAck(name, ack.epoch, ack.phase, ack.stage, ack.t, ack.drain_s, ack.switch_s)
        )

    def _look(self) -> None:
        now, core = self._loop.now, self.core
        for part in self._slices.close(now):
            core.slice(part)
            if self._router is not None:
                self._router.measured(part)
        if core.fit_wanted(now) and core.fit(now) and self._router is not None:
            self._router.fitted({name: models.prefill for name, models in core.models().items()})
        live = {name: info for name, info in self._infos.items() if self._cluster.nodes[name].up}
        outcome = core.step(now, live)
        if outcome.plan is not None:
            self._apply(outcome.plan)
        self._loop.after(LOOK_S, self._look)

    def _apply(self, plan: RolePlan) -> None:
        self._cluster.plan(plan.epoch, plan.phases)
