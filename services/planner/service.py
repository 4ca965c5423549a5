"""The planner process: feeds `PlannerCore` from Redis and publishes its plans.

Rules that hold here
- One planner acts, the one that holds the lease; others stand by and take over from the saved state.
- State is saved before a plan that follows from it is published, and both only while the lease is held. A new
  leader publishes its plan again when the last one in the stream is not the saved one.
- Routers are told the fitted models when they change, and again with every plan, so that one that starts late
  finds them near the end of the stream.
- Slices are not saved: a new leader reads the newest ones from the stream again.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import prometheus_client
from aiohttp import web

from services.planner.core import CoreState, Outcome, PlannerCore
from services.planner.fitting import NodeSamples
from services.planner.roles import Life
from services.planner.settings import PlannerSettings
from services.planner.view import plan_view
from shared.messages import Iterations, Models, NodeModel, RoleAck, RolePlan, RoleStage, Slice, SplitWanted
from shared.service import Service
from shared.split import split_text
from shared.streams import Backoff, BusError, Event, Reader

LEASE_S = 3.0
LOOK_S = 1.0  # between two looks at the registry
STANDBY_S = 0.5
SAMPLES_S = 10.0  # between two saves of what is being learned
RECENT_ROLES = 256


class Saved(msgspec.Struct):
    speedup: float
    roles_position: str
    core: CoreState


class SavedSamples(msgspec.Struct):
    iterations_position: str
    samples: dict[str, NodeSamples]


class LeaseLost(Exception):
    """Another planner may act now."""


class PlannerService(Service):
    name = "planner"

    def __init__(self, settings: PlannerSettings) -> None:
        super().__init__(settings)
        self._rules = settings.rules()
        self.core: PlannerCore | None = None  # None while standing by
        self._saved = b""
        self._told: list[NodeModel] = []  # models that the routers were told
        self._asked = False
        self._samples_due = 0.0
        registry = self.metrics
        self._active = prometheus_client.Gauge("ei_planner_active", "1 when it acts", registry=registry)
        self._epoch = prometheus_client.Gauge(
            "ei_planner_epoch", "Epoch of the plan in force", registry=registry
        )
        self._nodes = prometheus_client.Gauge(
            "ei_planner_nodes", "Nodes by planned phase", ["phase"], registry=registry
        )
        self._waiting = prometheus_client.Gauge(
            "ei_planner_draining_nodes", "Nodes that have not reached their planned phase", registry=registry
        )
        self._late = prometheus_client.Gauge(
            "ei_planner_late_nodes", "Nodes that drain for longer than the time limit", registry=registry
        )
        self._modelled = prometheus_client.Gauge(
            "ei_planner_modelled_nodes", "Nodes with fitted iteration-time models", registry=registry
        )
        self._predicted = prometheus_client.Gauge(
            "ei_planner_predicted_req_per_second",
            "Predicted throughput of the split in force",
            registry=registry,
        )
        self._decisions = prometheus_client.Counter(
            "ei_planner_decisions", "Planning windows by outcome", ["outcome"], registry=registry
        )
        self._plans = prometheus_client.Counter("ei_planner_plans", "Plans published", registry=registry)
        spans = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
        self._drain = prometheus_client.Histogram(
            "ei_planner_drain_seconds", "Cluster seconds a node drained", buckets=spans, registry=registry
        )
        self._switch = prometheus_client.Histogram(
            "ei_planner_switch_seconds", "Cluster seconds of a drained node's switch", buckets=spans,
            registry=registry,
        )  # fmt: skip

    # ------------------------------------------------------------------ life

    async def startup(self) -> None:
        self._out = self.bus.publisher("roles", self.instance, maxlen=10_000)
        self.spawn(self._out.run(), "publish roles")
        self._lease = self.bus.lease("planner", self.instance, LEASE_S)

    async def main_loop(self) -> None:
        backoff = Backoff()
        while True:
            try:
                token = await self._lease.acquire()
                self._asked = True
                if token is None:
                    await asyncio.sleep(STANDBY_S)
                    continue
                self.log.info("leading", token=token)
                await self._lead()
            except LeaseLost:
                self.log.warning("lease_lost")
            except BusError as error:
                self.log.warning("redis_failed", error=error)
                await backoff.wait()
                continue
            finally:
                self.core = None
                self._active.set(0)
            backoff.reset()

    async def shutdown(self) -> None:
        await self._out.flush()
        await self._lease.release()

    def ready(self) -> str | None:
        return None if self._asked else "has not asked for the lease yet"

    # ------------------------------------------------------------------ leading

    async def _lead(self) -> None:
        """Act until the lease is lost (LeaseLost) or Redis fails (BusError)."""
        core, reader = await self._take_over()
        self.core = core
        self._active.set(1)
        keeper = self.spawn(self._keep_lease(), "keep lease")
        try:
            await self._look(core, reader)
            look_at = time.monotonic() + LOOK_S
            while True:
                for event in await reader.read(max(0.01, look_at - time.monotonic())):
                    await self._event(core, reader, event)
                if time.monotonic() >= look_at:
                    await self._look(core, reader)
                    look_at = time.monotonic() + LOOK_S
        finally:
            keeper.cancel()

    async def _keep_lease(self) -> None:
        """Renew while fits and slow commands run elsewhere; whether it is held is asked before each write."""
        while self._lease.held:
            try:
                await self._lease.renew()
            except BusError as error:
                self.log.warning("renew_failed", error=error)
            await asyncio.sleep(LEASE_S / 3)

    async def _take_over(self) -> tuple[PlannerCore, Reader]:
        saved, samples = await self._load()
        core = PlannerCore(self._rules, saved.core if saved else None, samples.samples if samples else None)
        recent = await self.bus.last("roles", RECENT_ROLES)
        live = await self.bus.nodes()
        plans = [event.message for event in recent if isinstance(event.message, RolePlan)]
        known = core.roles.state.epoch
        published = max((plan.epoch for plan in plans), default=0)
        core.roles.raise_epoch(max([published, *(info.epoch for info in live.values())]))
        slices = await self.bus.last("windows", self._rules.slices)
        for event in slices:
            if isinstance(event.message, Slice):
                core.slice(event.message)
        reader = self.bus.reader(
            {
                "roles": saved.roles_position if saved else (recent[-1].position if recent else "0"),
                "windows": slices[-1].position if slices else "0",
            }
        )
        if core.learning:
            newest = await self.bus.last("iterations", 1)
            at = samples.iterations_position if samples else (newest[-1].position if newest else "0")
            reader.add("iterations", at)
        self._saved, self._told, self._samples_due = b"", [], 0.0
        if core.roles.phases and published != known:
            await self._publish(core, reader, core.roles.announce(self.clock.now(), "a planner took over"))
        self.log.info(
            "took_over",
            epoch=core.roles.state.epoch,
            life=core.roles.state.life,
            nodes=len(core.roles.phases),
        )
        return core, reader

    async def _load(self) -> tuple[Saved | None, SavedSamples | None]:
        blob, sample_blob = await self.bus.load("planner"), await self.bus.load("planner-samples")
        try:
            saved = msgspec.msgpack.decode(blob, type=Saved) if blob else None
            samples = msgspec.msgpack.decode(sample_blob, type=SavedSamples) if sample_blob else None
        except msgspec.DecodeError as error:
            self.log.error("saved_state_unreadable", error=error)
            return None, None
        if saved is not None and saved.speedup != self.settings.speedup:
            # Every saved time is in seconds of the other clock.
            self.log.warning("speedup_changed", before=saved.speedup, now=self.settings.speedup)
            return None, None
        return saved, samples

    async def _event(self, core: PlannerCore, reader: Reader, event: Event) -> None:
        message = event.message
        if isinstance(message, Iterations):
            core.iterations(message)
        elif isinstance(message, Slice):
            core.slice(message)
        elif isinstance(message, RoleAck):
            self._acknowledged(core, message)
        elif isinstance(message, SplitWanted):
            await self._wished(core, reader, message, event)
        elif isinstance(message, RolePlan) and event.producer != self.instance:
            core.roles.raise_epoch(message.epoch)

    def _acknowledged(self, core: PlannerCore, ack: RoleAck) -> None:
        expected = core.ack(self.clock.now(), ack)
        self.log.info(
            "acknowledged", node=ack.node, epoch=ack.epoch, phase=ack.phase, stage=ack.stage, expected=expected,
            drain_s=ack.drain_s, switch_s=ack.switch_s,
        )  # fmt: skip
        if ack.stage is RoleStage.SWITCHED:
            self._drain.observe(ack.drain_s)
            self._switch.observe(ack.switch_s)

    async def _wished(self, core: PlannerCore, reader: Reader, wish: SplitWanted, event: Event) -> None:
        if core.roles.state.life is Life.WARMUP and not wish.release:
            await self._fit(core)
        answer = core.wish(self.clock.now(), wish)
        if answer.refusal:
            self.log.warning("wish_refused", reason=answer.refusal, by=event.producer)
        else:
            self.log.info(
                "wish", prefill=wish.prefill, decode=wish.decode, hold=wish.hold, release=wish.release,
                by=event.producer,
            )  # fmt: skip
        if answer.plan is not None:
            await self._publish(core, reader, answer.plan)

    async def _look(self, core: PlannerCore, reader: Reader) -> None:
        live = await self.bus.nodes()
        if core.fit_wanted(self.clock.now()):
            await self._fit(core)
        outcome = core.step(self.clock.now(), live)
        self._report(outcome)
        if outcome.plan is not None:
            await self._publish(core, reader, outcome.plan)
        if core.learning and "iterations" not in reader.positions:
            await reader.follow("iterations")
        elif not core.learning and "iterations" in reader.positions:
            reader.remove("iterations")
        await self._save(core, reader)
        models = core.told_models(self.clock.now())
        if models.models != self._told:
            self._tell(models)
        self._measure(core)

    async def _fit(self, core: PlannerCore) -> None:
        fitted = await asyncio.to_thread(core.fit, self.clock.now())
        if fitted:
            fits = [core.learner.state.fits[node] for node in fitted]
            self.log.info(
                "fitted",
                nodes=len(fitted),
                pooled=sum(fit.prefill_source == "pooled" or fit.decode_source == "pooled" for fit in fits),
                worst_prefill_error=max(fit.prefill_error for fit in fits),
                worst_decode_error=max(fit.decode_error for fit in fits),
            )

    def _report(self, outcome: Outcome) -> None:
        for event, nodes in (("joined", outcome.joined), ("left", outcome.left), ("late", outcome.late)):
            if nodes:
                self.log.info(f"nodes_{event}", nodes=",".join(nodes))
        decision = outcome.decision
        if decision is not None:
            moved = decision.phases is not None
            self._decisions.labels("switch" if moved else "stay").inc()
            self._predicted.set(decision.req_per_s)
            self.log.info("decided", switch=moved, reason=decision.reason, slices=decision.slices)

    # ------------------------------------------------------------------ writing

    async def _publish(self, core: PlannerCore, reader: Reader, plan: RolePlan) -> None:
        await self._save(core, reader)
        self._out.publish(plan)
        self._plans.inc()
        self.log.info("plan", epoch=plan.epoch, split=split_text(plan.phases), reason=plan.reason)

        models = core.told_models(plan.t)
        if models.models:
            self._tell(models)

    def _tell(self, models: Models) -> None:
        self._told = models.models
        self._out.publish(models)

    async def _save(self, core: PlannerCore, reader: Reader) -> None:
        """Save what changed. Raises LeaseLost when another may act, BusError."""
        if not self._lease.held:
            raise LeaseLost
        saved = Saved(self.settings.speedup, reader.positions["roles"], core.state)
        blob = msgspec.msgpack.encode(saved)
        if blob != self._saved:
            await self.bus.save("planner", blob)
            self._saved = blob
        if "iterations" in reader.positions and time.monotonic() >= self._samples_due:
            kept = SavedSamples(reader.positions["iterations"], core.learner.samples)
            await self.bus.save("planner-samples", msgspec.msgpack.encode(kept))
            self._samples_due = time.monotonic() + SAMPLES_S

    # ------------------------------------------------------------------ showing

    def _measure(self, core: PlannerCore) -> None:
        roles = core.roles
        self._epoch.set(roles.state.epoch)
        phases = list(roles.phases.values())
        for phase in ("prefill", "decode", "both"):
            self._nodes.labels(phase).set(sum(p.value == phase for p in phases))
        self._waiting.set(len(roles.draining))
        self._late.set(sum(pending.late for pending in roles.state.pending.values()))
        self._modelled.set(len(core.models()))

    def routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/plan", self._plan)

    async def _plan(self, _: web.Request) -> web.Response:
        body: object = {"active": False, "instance": self.instance}
        if self.core is not None:
            body = plan_view(self.core, self.instance, self.clock.now())
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")
