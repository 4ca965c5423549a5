"""Nodes that are lost, join, change their phase in place or are relaunched while agents work."""

from __future__ import annotations

import msgspec
import pytest

from loadtest.baselines.policy import KvAfterMove, Moves, Moving
from loadtest.simulate.cluster import Cluster
from loadtest.simulate.run import ROUTER_NAMES
from shared.messages import Phase, RoleStage, Tier
from shared.timing import TINY
from tests.test_simulate_cluster import SMALL, Run, system
from worker.engines.simulated.phase import Ack

ROUTERS = ["ours", "dynamo-pool", "arrow", "thunder-agent"]
IN_PLACE = Moving(drains=True, out_s=(0.0, 0.0), kv=KvAfterMove.KEPT)
RELAUNCH = Moving(drains=False, out_s=(0.0, 0.0), kv=KvAfterMove.EMPTY)
UNREACHABLE = Moving(drains=True, out_s=(0.0, 0.0), kv=KvAfterMove.UNREACHABLE)
# Prefills take long enough for the moments to fall into one.
SLOW = msgspec.structs.replace(
    SMALL, prefill=msgspec.structs.replace(TINY.prefill, c1=1e-4), link_bytes_per_s=2e6
)


def phase_of(cluster: Cluster, name: str) -> str:
    return cluster.nodes[name].phase.value


@pytest.mark.parametrize("lost", ["n001", "n003"])
@pytest.mark.parametrize("router", ROUTERS)
def test_a_lost_node_loses_no_request(router: str, lost: str) -> None:
    run = Run(system(router), agents=16, seconds=2.0, profile=SLOW)
    cluster, loop = run.cluster, run.simulation.loop
    phase = cluster.nodes[lost].phase
    on_it: list[int] = []

    def fail() -> None:
        on_it.append(sum(lost in (f.prefill_node, f.decode_node) for f in cluster.flights.values()))
        cluster.fail(lost)
        assert lost not in [*cluster.prefill_nodes, *cluster.decode_nodes] and cluster.state(lost) is None
        assert all(lost not in cluster.leading(f.pages.context) for f in cluster.flights.values())

    for number in range(12):
        loop.at(0.1037 + 0.13 * number, fail)
        loop.at(0.1737 + 0.13 * number, cluster.join, lost, phase)
    run.play()
    assert sum(on_it) > 3
    assert run.router.heard["held"] > run.simulation.result.requests  # some were placed again
    run.stop().check()


@pytest.mark.parametrize("router", ["ours", "round-robin"])
def test_requests_wait_while_a_phase_has_no_node_and_end_when_it_has(router: str) -> None:
    run = Run(system(router), agents=8, seconds=2.0, profile=SLOW)
    cluster, loop = run.cluster, run.simulation.loop
    for t, name, phase in ((0.3, "n001", Phase.PREFILL), (0.31, "n003", Phase.DECODE), (0.32, "n004", Phase.DECODE),
                           (0.5, "n002", Phase.PREFILL)):  # fmt: skip
        loop.at(t, cluster.fail, name)
        loop.at(1.1 + t, cluster.join, name, phase)
    loop.run(0.0)
    run.simulation.run()
    begun = [f.t_arrive for f in run.answered]
    assert len(set(begun)) > 10
    run.stop().check()
    assert any(f.t_arrive < 0.5 and f.t_end > 1.4 for f in run.answered)
    assert not any(0.6 < f.t_end < 1.4 for f in run.answered)


def test_a_decode_that_has_begun_survives_the_loss_of_its_prefill_node() -> None:
    run = Run(system("ours"), agents=8, seconds=0.5)
    cluster, loop = run.cluster, run.simulation.loop
    running: dict[str, int] = {}

    def fail() -> None:
        for flight in cluster.flights.values():
            if flight.prefill_node == "n001" and flight.t_first and flight.decode_node != "n001":
                running[flight.arrival.rid] = flight.attempts
        cluster.fail("n001")

    loop.at(0.25, fail)
    run.play().stop().check()
    assert running
    assert {f.arrival.rid: f.attempts for f in run.answered if f.arrival.rid in running} == running


@pytest.mark.parametrize("router", ROUTER_NAMES)
def test_a_phase_switch_in_place_loses_no_request(router: str) -> None:
    run = Run(system(router), agents=20, seconds=1.5, profile=SLOW)
    cluster, loop = run.cluster, run.simulation.loop
    acks: list[tuple[str, Ack]] = []
    cluster.on_ack = lambda name, ack: acks.append((name, ack))
    told: list[tuple[str, float, float]] = []
    cluster.on_switch = lambda *one: told.append(one)
    busy: list[int] = []

    def plan(epoch: int, **phases: Phase) -> None:
        busy.append(sum(cluster.nodes[name].scheduler.requests for name in phases))
        cluster.plan(epoch, phases)
        for name in phases:
            assert name not in [*cluster.prefill_nodes, *cluster.decode_nodes]

    loop.at(0.41, lambda: plan(1, n002=Phase.DECODE))
    loop.at(0.83, lambda: plan(2, n002=Phase.PREFILL, n003=Phase.PREFILL))
    loop.at(1.27, lambda: plan(3, n001=Phase.DECODE, n003=Phase.DECODE))
    run.play()
    run.stop().check()
    assert sum(busy) > 3
    by_node = [(name, ack) for name, ack in acks]
    assert [stage for _, (stage, *_) in by_node].count(RoleStage.SWITCHED) == 5
    for name in ("n001", "n002", "n003"):
        mine = [ack for each, ack in acks if each == name]
        for drained, switched in zip(mine[::2], mine[1::2], strict=True):
            assert (drained.stage, switched.stage) == (RoleStage.DRAINED, RoleStage.SWITCHED)
            assert switched.t == pytest.approx(drained.t + SLOW.switch_s, abs=1e-9)
            assert switched.drain_s == pytest.approx(drained.drain_s) and switched.switch_s == SLOW.switch_s
    assert [name for name, _, _ in told] == [n for n, ack in acks if ack.stage is RoleStage.SWITCHED]
    assert (cluster.prefill_nodes, cluster.decode_nodes) == (["n002"], ["n001", "n003", "n004"])


def test_a_plan_that_is_taken_back_serves_on() -> None:
    run = Run(system("ours"), agents=4, seconds=0.5, profile=SLOW)
    cluster = run.cluster

    def there_and_back() -> None:
        if not cluster.nodes["n001"].scheduler._computing:  # it would have nothing to drain
            run.simulation.loop.after(0.003, there_and_back)
            return
        tried.append(run.simulation.loop.now)
        cluster.plan(1, {"n001": Phase.DECODE})
        cluster.plan(2, {"n001": Phase.PREFILL})
        assert cluster.split == (2, 2)

    tried: list[float] = []
    run.simulation.loop.at(0.2, there_and_back)
    run.play()
    assert tried
    assert cluster.nodes["n001"].phase is Phase.PREFILL and run.simulation.result.switches == 0
    run.stop().check()


def test_a_node_that_joins_follows_the_next_plan() -> None:
    run = Run(system("ours"), agents=0, seconds=1.0)
    cluster, loop = run.cluster, run.simulation.loop
    cluster.plan(3, {"n001": Phase.DECODE})
    loop.run(1.0)
    for _ in range(5):
        cluster.fail("n001")
        cluster.join("n001", Phase.DECODE)
    cluster.plan(3, {"n001": Phase.PREFILL})  # an old one
    loop.run(2.0)
    assert phase_of(cluster, "n001") == "decode"
    cluster.plan(4, {"n001": Phase.PREFILL})
    loop.run(3.0)
    assert phase_of(cluster, "n001") == "prefill"


@pytest.mark.parametrize("router", ROUTERS)
def test_a_relaunch_empties_the_cache_and_takes_its_time(router: str) -> None:
    run = Run(system(router), agents=8, seconds=1.0, profile=SLOW)
    cluster, loop = run.cluster, run.simulation.loop
    node = cluster.nodes["n002"]

    def move() -> None:
        assert node.cache.l1_used > 0
        cluster.move(Moves({"n002": Phase.DECODE}, ""), RELAUNCH, 0.4)
        assert list(cluster.moving) == ["n002"] and not node.up
        assert cluster.known.index.count("n002", Tier.L1) == cluster.known.index.count("n002", Tier.L2) == 0

    loop.at(0.5, move)
    loop.at(0.8999, lambda: seen.append((node.up, "n002" in cluster.decode_nodes)))
    loop.at(0.9001, lambda: seen.append((node.up, "n002" in cluster.decode_nodes, node.cache.l2_used)))
    seen: list[tuple[object, ...]] = []
    run.play()
    assert seen == [(False, False), (True, True, 0)]
    assert node.phase is Phase.DECODE and cluster.split == (1, 3)
    assert run.simulation.result.switch_s == [0.4]
    run.stop().check()


@pytest.mark.parametrize(("moving", "readable"), [(IN_PLACE, True), (UNREACHABLE, False)])
def test_what_a_node_holds_may_be_unreachable_while_it_decodes(moving: Moving, readable: bool) -> None:
    run = Run(system("ours"), agents=8, seconds=1.0)
    cluster, loop = run.cluster, run.simulation.loop
    node = cluster.nodes["n002"]

    def held() -> tuple[set[int], ...]:
        return tuple(set(cluster.known.index.pages("n002", tier).tolist()) for tier in Tier)

    loop.at(0.3, cluster.move, Moves({"n002": Phase.DECODE}, ""), moving, 0.0)
    run.play().stop()
    cached = tuple(set(node.cache.pages(tier).tolist()) for tier in Tier)
    assert phase_of(cluster, "n002") == "decode" and all(cached)
    assert held() == (cached if readable else (set(), set()))
    # Back in prefill all that it kept can be read again.
    cluster.move(Moves({"n002": Phase.PREFILL}, ""), moving, 0.0)
    loop.run(loop.now + 1.0)
    assert phase_of(cluster, "n002") == "prefill"
    assert held() == tuple(set(node.cache.pages(tier).tolist()) for tier in Tier) == cached
    run.check()


@pytest.mark.parametrize("router", ["ours", "dynamo"])
def test_a_node_is_lost_and_joins_in_and_after_our_planners_warm_up(router: str) -> None:
    run = Run(system(router, "ours"), agents=8, seconds=1.5, warmup_s=0.6)
    cluster, loop = run.cluster, run.simulation.loop

    def fail() -> None:
        phase = cluster.nodes["n002"].phase
        cluster.fail("n002")
        loop.after(0.25, cluster.join, "n002", phase)
        loop.after(0.24, lambda: listed.append("n002" in [*cluster.prefill_nodes, *cluster.decode_nodes]))

    listed: list[bool] = []
    for t in (0.2, 0.9, 1.5):
        loop.at(t, fail)
    run.play().stop().check()
    assert listed == [False, False, False]
