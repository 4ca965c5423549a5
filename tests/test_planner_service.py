"""The planner process against a real Redis: warm-up to switch, restarts, stand-by, operators."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest

from services.planner.service import PlannerService
from services.planner.settings import PlannerSettings
from shared.bus import Bus
from shared.config import ConfigError, load
from shared.messages import Iterations, Models, NodeInfo, Phase, RoleAck, RolePlan, RoleStage, SplitWanted
from shared.timing import PROFILES
from tests.conftest import end, eventually, running
from tests.planner_cases import BOTH, D, P, decode_record, node_info, prefill_record, slice_

GLM = PROFILES["glm-5.2-4xgb300"]
LONG_S = 1e9  # a warm-up or a window that does not end within a test
AGENTS = {"t_uc": 4600.0, "t_c": 120_000.0, "pairs": 6e8, "t_out": 440.0, "t_acc": 1.4, "in_decode": 60.0}


class Nodes:
    """Workers as the planner sees them: registry entries, plans obeyed, acknowledgements, records."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.plans: list[RolePlan] = []
        self.models: list[Models] = []
        self.infos: dict[str, NodeInfo] = {}
        self.silent: set[str] = set()
        self.roles = bus.publisher("roles", "nodes")
        self.iterations = bus.publisher("iterations", "nodes")
        self.windows = bus.publisher("windows", "nodes")

    async def join(self, node: str, phase: Phase = BOTH) -> None:
        self.infos[node] = node_info(node, phase, profile=GLM.name)
        await self.bus.register_node(self.infos[node], 600.0)

    async def leave(self, node: str) -> None:
        del self.infos[node]
        await self.bus.unregister_node(node)

    async def follow(self) -> None:
        reader = self.bus.reader({"roles": "0"})
        while True:
            for event in await reader.read(1.0):
                if isinstance(event.message, Models):
                    self.models.append(event.message)
                if isinstance(event.message, RolePlan):
                    self.plans.append(event.message)
                    for node in set(event.message.phases) & self.infos.keys() - self.silent:
                        await self._obey(node, event.message)

    async def _obey(self, node: str, plan: RolePlan) -> None:
        phase = plan.phases[node]
        before = self.infos[node]
        self.infos[node] = msgspec.structs.replace(before, phase=phase, epoch=plan.epoch)
        await self.bus.register_node(self.infos[node], 600.0)
        if before.phase is not phase:
            self.roles.publish(RoleAck(node, plan.epoch, phase, RoleStage.DRAINED, 0.0, 1.5))
            self.roles.publish(RoleAck(node, plan.epoch, phase, RoleStage.SWITCHED, 0.0, 1.5, 0.7))

    def serve(self, seed: int = 1) -> None:
        """Iterations from which models can be fitted."""
        rng = random.Random(seed)
        for node in self.infos:
            for _ in range(60):
                prefill = prefill_record(GLM.prefill, rng.randint(1, 8192), rng.randint(0, 100_000))
                decode = decode_record(GLM.decode, rng.randint(1, 40))
                self.iterations.publish(Iterations(node, 1.0, BOTH, [prefill, decode]))

    def split(self) -> tuple[int, int]:
        of = list(self.plans[-1].phases.values()) if self.plans else []
        return of.count(P), of.count(D)

    def obeyed(self, *split: int) -> bool:
        """Whether the newest plan has this split and every node is in its phase."""
        if self.split() != split:
            return False
        phases = self.plans[-1].phases
        return all(phases.get(node) is info.phase for node, info in self.infos.items())


@pytest.fixture
async def nodes(redis_url: str, cluster_name: str) -> AsyncIterator[Nodes]:
    bus = await Bus.connect(redis_url, cluster_name)
    made = Nodes(bus)
    runs = (made.follow(), made.roles.run(), made.iterations.run(), made.windows.run())
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        yield made
    finally:
        await end(tasks)
        await bus.close()


@pytest.fixture
def settings(redis_url: str, cluster_name: str) -> dict[str, object]:
    return {"redis": redis_url, "cluster": cluster_name, "warmup_s": LONG_S, "window_s": LONG_S}


async def plan_of(service: PlannerService) -> dict[str, object]:
    async with service.http.get(service.url + "/v1/plan") as answer:
        assert answer.status == 200 and answer.content_type == "application/json"
        return msgspec.json.decode(await answer.read())


async def metric(service: PlannerService, name: str) -> float:
    async with service.http.get(service.url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name + " ")))


async def models_kept(service: PlannerService, n: int) -> bool:
    view = await plan_of(service)
    records = view["warmup"]["records"] if view["active"] else {}
    return len(records) == n and all(min(kept) >= 20 for kept in records.values())


async def test_from_the_warm_up_to_a_switch_of_its_own(nodes, settings):
    for i in range(1, 5):
        await nodes.join(f"n{i}")
    settings |= {"warmup_s": 3.0, "window_s": 600.0, "skip_s": 0.0, "initial_split": "1P3D"}
    async with running(PlannerService(PlannerSettings(**settings))) as planner:
        await eventually(lambda: nodes.plans)
        assert nodes.plans[0].epoch == 1 and set(nodes.plans[0].phases.values()) == {BOTH}
        nodes.serve()
        await eventually(lambda: nodes.obeyed(1, 3))
        view = await eventually(lambda: _when(planner, lambda v: not v["draining"]))
        assert (view["life"], view["split"], view["target"], view["hold"]) == ("split", "1P3D", "1P3D", False)
        assert view["warmup"]["progress"] == 1.0
        fit = view["models"]["n2"]
        assert fit["prefill_source"] == "own" and fit["prefill_records"] >= 20
        assert fit["models"]["prefill"]["c1"] == pytest.approx(GLM.prefill.c1, rel=0.05)
        await eventually(lambda: nodes.models)
        assert {m.node for m in nodes.models[-1].models} == set(nodes.infos)
        assert nodes.models[-1].models[0].c1 == pytest.approx(GLM.prefill.c1, rel=0.05)
        t0 = planner.clock.now() + 1.0
        for i in range(10):
            part = slice_(t0 + 60 * i, nodes.plans[-1].phases, t_bar=4000.0, **AGENTS)
            nodes.windows.publish(part)
        await eventually(lambda: nodes.split() not in ((0, 0), (1, 3)))
        assert "is predicted to serve" in nodes.plans[-1].reason
        await eventually(lambda: nodes.obeyed(*nodes.split()))
        view = await eventually(lambda: _when(planner, lambda v: not v["draining"]))
        decision = view["decision"]
        assert decision["slices"] == 10 and len(decision["candidates"]) == 2
        for term in ("mean_gain", "standard_error", "qualifies", "refusal", "moves", "req_per_s"):
            assert term in decision["candidates"][0]
        assert await metric(planner, 'ei_planner_decisions_total{outcome="switch"}') == 1
        assert await metric(planner, "ei_planner_switch_seconds_count") >= 4


async def _when(service: PlannerService, condition) -> dict[str, object] | None:
    view = await plan_of(service)
    return view if condition(view) else None


async def test_a_restart_keeps_epoch_phases_and_models(nodes, settings):
    for i in range(1, 4):
        await nodes.join(f"n{i}")
    async with running(PlannerService(PlannerSettings(**settings))) as planner:
        await eventually(lambda: nodes.plans)
        nodes.serve()
        await eventually(lambda: models_kept(planner, 3))
        nodes.roles.publish(SplitWanted(1, 2))
        nodes.roles.publish(SplitWanted(2, 1, hold=True))
        await eventually(lambda: nodes.obeyed(2, 1))
        before = await eventually(lambda: _when(planner, lambda v: not v["draining"]))
        assert len(before["models"]) == 3
    plans = len(nodes.plans)
    async with running(PlannerService(PlannerSettings(**settings))) as planner:
        after = await eventually(lambda: _when(planner, lambda v: v["active"] and v["models"]))
        for kept in ("epoch", "phases", "life", "target", "hold", "models", "next_decision_t"):
            assert after[kept] == before[kept]
        await asyncio.sleep(1.2)  # a look at the registry later
        assert len(nodes.plans) == plans
        # No wish was read twice, and the next plan goes on from the epoch.
        nodes.roles.publish(SplitWanted(1, 2))
        await eventually(lambda: nodes.obeyed(1, 2))
        assert nodes.plans[-1].epoch == before["epoch"] + 1


async def test_a_restart_in_the_warm_up_keeps_its_time_and_samples(nodes, settings):
    await nodes.join("n1")
    await nodes.join("n2")
    async with running(PlannerService(PlannerSettings(**settings))) as planner:
        await eventually(lambda: nodes.plans)
        nodes.serve()
        await eventually(lambda: models_kept(planner, 2))
        before = await plan_of(planner)
    async with running(PlannerService(PlannerSettings(**settings))) as planner:
        await eventually(lambda: models_kept(planner, 2))
        after = await plan_of(planner)
        assert after["life"] == "warmup" and after["epoch"] == before["epoch"]
        began = after["t"] + after["warmup"]["left_s"]
        assert began == pytest.approx(before["t"] + before["warmup"]["left_s"], abs=1e-3)
        assert after["warmup"]["records"] == before["warmup"]["records"]


async def test_a_plan_that_was_saved_but_not_published_is_published_by_the_next_planner(nodes, settings):
    await nodes.join("n1")
    await nodes.join("n2")
    async with running(PlannerService(PlannerSettings(**settings))) as planner:
        await eventually(lambda: nodes.plans)
        planner._out.publish = lambda message: 0  # it "dies" between the two
        nodes.roles.publish(SplitWanted(1, 1))
        await eventually(lambda: _when(planner, lambda v: v["split"] == "1P1D"))
    assert nodes.split() == (0, 0)
    async with running(PlannerService(PlannerSettings(**settings))):
        await eventually(lambda: nodes.obeyed(1, 1))
        assert nodes.plans[-1].epoch > nodes.plans[0].epoch + 1
        assert "took over" in nodes.plans[-1].reason


async def test_epochs_rise_even_when_the_state_was_lost(nodes, settings):
    await nodes.join("n1")
    nodes.roles.publish(RolePlan(41, {"n1": BOTH}, "of a planner whose state is gone", 0.0))
    await nodes.roles.flush()
    async with running(PlannerService(PlannerSettings(**settings))):
        await eventually(lambda: len(nodes.plans) > 1)
        assert nodes.plans[-1].epoch == 42


async def test_another_speed_up_starts_the_warm_up_anew_with_higher_epochs(nodes, settings):
    await nodes.join("n1")
    async with running(PlannerService(PlannerSettings(**settings))):
        await eventually(lambda: nodes.plans)
    async with running(PlannerService(PlannerSettings(**settings, speedup=7.0))) as planner:
        await eventually(lambda: len(nodes.plans) > 1)
        assert nodes.plans[-1].epoch == nodes.plans[0].epoch + 1
        view = await plan_of(planner)
        assert view["life"] == "warmup" and view["warmup"]["progress"] < 0.01


async def test_a_stand_by_takes_over_from_a_planner_that_was_killed(nodes, settings, cluster_name, redis_url):
    for i in range(1, 4):
        await nodes.join(f"n{i}")
    flags = ["--redis", redis_url, "--cluster", cluster_name, "--port", "0", "--warmup-s", "0"]
    flags += ["--window-s", str(LONG_S), "--initial-split", "2P1D"]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.planner", *flags, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await eventually(lambda: nodes.obeyed(2, 1))
        async with running(PlannerService(PlannerSettings(**settings))) as standby:
            await eventually(lambda: standby.ready() is None)
            assert (await plan_of(standby))["active"] is False
            epoch = nodes.plans[-1].epoch
            os.kill(child.pid, signal.SIGKILL)
            view = await eventually(lambda: _when(standby, lambda v: v["active"]))
            assert (view["epoch"], view["split"], view["life"]) == (epoch, "2P1D", "split")
            nodes.roles.publish(SplitWanted(1, 2))
            await eventually(lambda: nodes.obeyed(1, 2))
            assert nodes.plans[-1].epoch == epoch + 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def test_a_planner_that_lost_its_lease_publishes_nothing(nodes, settings):
    await nodes.join("n1")
    await nodes.join("n2")
    async with running(PlannerService(PlannerSettings(**settings))) as planner:
        await eventually(lambda: nodes.plans)
        await nodes.bus.redis.set(nodes.bus.key("lease", "planner"), "999 another", px=60_000)
        await eventually(lambda: not planner._lease.held)
        plans = len(nodes.plans)
        nodes.roles.publish(SplitWanted(1, 1))
        await eventually(lambda: _when(planner, lambda v: not v["active"]))
        assert len(nodes.plans) == plans
        await nodes.bus.redis.delete(nodes.bus.key("lease", "planner"))
        # Leading again, it reads the wish that it could not act on.
        await eventually(lambda: nodes.obeyed(1, 1))


async def test_an_impossible_wish_is_refused_and_said(nodes, settings):
    await nodes.join("n1")
    await nodes.join("n2")
    async with running(PlannerService(PlannerSettings(**settings))) as planner:
        await eventually(lambda: nodes.plans)
        nodes.roles.publish(SplitWanted(5, 5))
        view = await eventually(lambda: _when(planner, lambda v: v["refusal"]))
        assert view["refusal"]["reason"] == "5P5D needs 10 nodes, not 2"
        assert view["life"] == "warmup" and len(nodes.plans) == 1


async def test_nodes_join_leave_and_disobey(nodes, settings):
    await nodes.join("n1")
    await nodes.join("n2")
    settings |= {"warmup_s": 0.0, "drain_timeout_s": 1.5}
    async with running(PlannerService(PlannerSettings(**settings))) as planner:
        await eventually(lambda: nodes.obeyed(1, 1))
        nodes.silent.add("n3")
        await nodes.join("n3")
        await eventually(lambda: nodes.plans[-1].reason == "no acknowledgement from n3")
        await eventually(lambda: _when(planner, lambda v: v["draining"].get("n3", {}).get("late")))
        assert await metric(planner, "ei_planner_late_nodes") == 1
        nodes.silent.clear()
        await eventually(lambda: _when(planner, lambda v: not v["draining"]))
        gone = next(node for node, phase in nodes.plans[-1].phases.items() if phase is D)
        await nodes.leave(gone)
        await eventually(lambda: nodes.obeyed(1, 1))
        assert gone not in nodes.plans[-1].phases
    epochs = [plan.epoch for plan in nodes.plans]
    assert epochs == sorted(set(epochs))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--initial-split", "2D1P"], "is not a split"),
        (["--initial-split", "0P1D"], "without a node"),
        (["--window-s", "0"], "window_s"),
        (["--warmup-s", "-1"], "warmup_s"),
        (["--slices", "1"], "slices must be 2 to 1000"),
    ],
)
def test_bad_settings_are_one_clear_line(flags, words):
    with pytest.raises(ConfigError, match=words) as raised:
        load(PlannerSettings, "planner", flags, environ={})
    assert "\n" not in str(raised.value)
