"""What a router knows of its cluster: other routers' work, nodes that fail or go, and the calls to them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.router.cluster import MISSING_S, REPORTED_S, Cluster, Node, NodeDown, unusable
from services.router.health import FAILURES, SUCCESSES, SUSPECT_S, Fitness
from services.router.placement import Prefill
from shared.clock import Clock
from shared.messages import (
    BranchPlaced,
    NodeInfo,
)
from tests.planner_cases import BOTH, D, P, node_info, node_state


class Stopped(Clock):
    """A clock that goes when it is told to. `t`: wall seconds."""

    def __init__(self, t: float = 1000.0, speedup: float = 1.0) -> None:
        super().__init__(speedup)
        self.t = t

    def now(self) -> float:
        return self.t * self.speedup


def router_view(*nodes: NodeInfo, speedup: float = 1.0) -> tuple[Cluster, Stopped]:
    clock = Stopped(speedup=speedup)
    c = Cluster(clock)
    c.registered({info.node: info for info in nodes})
    return c, clock


def sent(c: Cluster) -> dict[str, list[Prefill]]:
    return {found.node: list(found.sent.values()) for found in c.prefill_nodes("m")}


def bound(c: Cluster) -> dict[str, dict[str, int]]:
    return {found.node: dict(found.sent) for found in c.decode_nodes("m")}


def test_what_another_router_placed_counts_until_the_node_has_reported():
    c, clock = router_view(node_info("n1"), node_info("n2"))
    c.nodes["n1"].prefill.send(Prefill("own", 10, 0))
    c.nodes["n1"].decode.send("own-d", 70)
    c.placed(BranchPlaced("b", "n1", P, 1000.0, "r1", 500, 64))
    c.placed(BranchPlaced("b", "n1", D, 1000.0, "r2", 900))
    assert sent(c) == {"n1": [Prefill("own", 10, 0), Prefill("r1", 500, 64)], "n2": []}
    assert bound(c) == {"n1": {"own-d": 70, "r2": 900}, "n2": {}}
    # Too early: the node may not have heard of it when it sent this.
    c.reported(node_state("n1", 1000.5, phase=BOTH))
    assert [p.rid for p in sent(c)["n1"]] == ["own", "r1"] and "r2" in bound(c)["n1"]
    c.reported(node_state("n2", 1002.0, phase=BOTH))  # another node's report says nothing of it
    assert [p.rid for p in sent(c)["n1"]] == ["own", "r1"]
    c.reported(node_state("n1", 1000.0 + REPORTED_S, phase=BOTH))
    assert sent(c)["n1"] == [Prefill("own", 10, 0)] and bound(c)["n1"] == {"own-d": 70}
    clock.t += 10
    assert c.nodes["n1"].foreign == {}


def test_what_was_placed_since_stays_after_a_report():
    c, _ = router_view(node_info("n1"))
    for i in range(5):
        c.placed(BranchPlaced("b", "n1", D, 1000.0 + i, f"r{i}", i))
    c.reported(node_state("n1", 1003.5, phase=BOTH))
    assert bound(c)["n1"] == {"r3": 3, "r4": 4}


def test_a_report_is_as_late_as_the_clusters_speed_says():
    c, _ = router_view(node_info("n1"), speedup=20.0)
    c.placed(BranchPlaced("b", "n1", D, 20_000.0, "r", 5))
    c.reported(node_state("n1", 20_000.0 + 19 * REPORTED_S, phase=BOTH))
    assert bound(c)["n1"] == {"r": 5}
    c.reported(node_state("n1", 20_000.0 + 20 * REPORTED_S, phase=BOTH))
    assert bound(c)["n1"] == {}


@pytest.mark.parametrize("decode_node", ["n1", "n2"])
def test_a_decode_that_is_bound_ends_the_prefill(decode_node):
    c, _ = router_view(node_info("n1"), node_info("n2"))
    c.placed(BranchPlaced("b", "n1", P, 1000.0, "r", 500, 64))
    c.placed(BranchPlaced("b", decode_node, D, 1001.0, "r", 900))
    assert sent(c) == {"n1": [], "n2": []}
    assert bound(c) == {"n1": {}, "n2": {}} | {decode_node: {"r": 900}}


def test_placements_that_name_no_request_or_no_node_do_nothing():
    c, _ = router_view(node_info("n1"))
    c.placed(BranchPlaced("b", "n1", P, 1000.0))
    c.placed(BranchPlaced("b", "gone", P, 1000.0, "r", 5, 0))
    c.placed(BranchPlaced("b", "gone", D, 1000.0, "r", 5))
    assert sent(c) == {"n1": []} and bound(c) == {"n1": {}}


def test_a_node_that_restarts_has_nothing_of_its_earlier_life():
    c, _ = router_view(node_info("n1"))
    c.placed(BranchPlaced("b", "n1", D, 1000.0, "r", 5))
    c.nodes["n1"].decode.send("x", 5)
    for _ in range(FAILURES):
        c.failed("n1")
    new, gone = c.registered({"n1": node_info("n1", incarnation="again")})
    assert [info.incarnation for info in new] == ["again"] and gone == []
    assert bound(c) == {"n1": {}}
    assert [node.info.node for node in c.live()] == ["n1"]


def test_nodes_share_nothing():
    c, _ = router_view(node_info("n1"), node_info("n2"))
    for field in ("prefill", "decode", "foreign", "calls", "breaker"):
        assert getattr(c.nodes["n1"], field) is not getattr(c.nodes["n2"], field)


def test_doubtful_nodes_are_silent_suspect_or_on_trial():
    c, clock = router_view(node_info("n1"), node_info("n2"), node_info("n3"), speedup=10.0)

    def doubtful() -> list[str]:
        return [node.info.node for node in c.doubtful(2.0)]

    assert doubtful() == []
    clock.t += 2.0
    assert doubtful() == []
    clock.t += 0.1
    assert doubtful() == ["n1", "n2", "n3"]
    c.reported(node_state("n1", clock.now(), phase=BOTH))
    c.answered("n2")
    assert doubtful() == ["n3"]
    c.reported(node_state("n3", clock.now(), phase=BOTH))
    c.failed("n1")  # it reports, and does not answer
    assert doubtful() == ["n1"]
    c.answered("n1")
    for _ in range(FAILURES):
        c.failed("n1")
    assert doubtful() == []  # down: it is left alone for a while
    c.reported(node_state("n1", clock.now(), phase=BOTH))
    assert doubtful() == ["n1"] and c.nodes["n1"].breaker.fitness is Fitness.TRIAL
    clock.t += 1.9
    c.reported(node_state("n3", 1.0, phase=BOTH))  # older than what is known: not news
    clock.t += 0.2
    assert doubtful() == ["n1", "n2", "n3"]
    c.registered({"n4": node_info("n4")})
    assert "n4" not in doubtful()  # it has just come
    c.answered("n1")  # gone


def test_a_node_that_fails_gets_nothing_until_its_trial():
    c, clock = router_view(node_info("n1"), node_info("n2"))
    assert not c.failed("n1")
    assert set(sent(c)) == set(bound(c)) == {"n2"}  # the retry goes elsewhere
    clock.t += SUSPECT_S
    assert set(sent(c)) == {"n1", "n2"}
    assert [c.failed("n1") for _ in range(FAILURES - 1)] == [False] * (FAILURES - 2) + [True]
    clock.t += 1.0
    assert set(sent(c)) == set(bound(c)) == {"n2"}
    assert c.nodes["n1"].breaker.fitness is Fitness.TRIAL
    assert [c.answered("n1") for _ in range(SUCCESSES)] == [False] * (SUCCESSES - 1) + [True]
    assert set(sent(c)) == {"n1", "n2"}
    assert not c.failed("gone") and not c.answered("gone")


def test_a_node_that_answers_no_call_goes_down_though_it_reports():
    """It reaches Redis, and this router does not reach it."""
    c, clock = router_view(node_info("n1"), node_info("n2"))
    went = False
    for _ in range(2 * FAILURES):
        clock.t += 0.1
        went |= c.failed("n1")
        c.reported(node_state("n1", clock.now(), phase=BOTH))
        assert set(sent(c)) == {"n2"}
    assert went


def test_fetches_teach_the_profile():
    c, _ = router_view(node_info("n1"), node_info("n2"))
    least = c.nodes["n1"].profile.fetch.min_tokens
    before = c.fetch_model(c.nodes["n2"])
    c.fetched("n1", least - 1, 100.0)
    c.fetched("gone", 10_000, 100.0)
    assert c.fetch_model(c.nodes["n2"]) == before
    c.fetched("n1", 10_000, 100.0)
    assert c.fetch_model(c.nodes["n2"]).seconds(10_000) > before.seconds(10_000)


# ---------------------------------------------------------------------- calls to a node


class Caller:
    """A task that works on a call to a node."""

    def __init__(self, node: Node, *, timeout_s: float | None = None) -> None:
        self.ended = "not yet"
        self.cancelling = -1
        self.go_on = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run(node, timeout_s))

    async def _run(self, node: Node, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                with node.calling():
                    await self.go_on
            self.ended = "well"
        except NodeDown:
            self.ended = "node down"
        except TimeoutError:
            self.ended = "too late"
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        task = asyncio.current_task()
        assert task is not None
        self.cancelling = task.cancelling()
        await asyncio.sleep(0)  # a cancellation that is left over would end it here
        await asyncio.sleep(0)

    async def result(self) -> str:
        await asyncio.wait([self.task], timeout=2.0)
        assert self.task.done()
        if not self.task.cancelled():
            self.task.result()
            assert self.cancelling == 0
        return self.ended


async def started(c: Cluster, name: str = "n1", **more: float) -> Caller:
    caller = Caller(c.nodes[name], **more)
    await asyncio.sleep(0)
    assert len(c.nodes[name].calls) >= 1
    return caller


def goes_down(c: Cluster, name: str = "n1") -> None:
    for _ in range(FAILURES):
        c.failed(name)


def leaves(c: Cluster) -> None:
    rest = {"n2": c.nodes["n2"].info}
    c.registered(rest)
    c._clock.t += MISSING_S + 1
    c.registered(rest)


def restarts(c: Cluster) -> None:
    c.registered({"n1": node_info("n1", incarnation="again"), "n2": c.nodes["n2"].info})


HAPPENINGS = pytest.mark.parametrize("happens", [goes_down, leaves, restarts])


@HAPPENINGS
async def test_who_works_on_a_node_is_told_that_it_does_not(happens):
    c, _ = router_view(node_info("n1"), node_info("n2"))
    callers = [await started(c) for _ in range(3)]
    other = await started(c, "n2")
    node = c.nodes["n1"]
    happens(c)
    assert [await caller.result() for caller in callers] == ["node down"] * 3
    assert node.calls == set()
    assert not other.task.done()
    other.go_on.set_result(None)
    assert await other.result() == "well" and c.nodes["n2"].calls == set()


async def test_a_call_that_ends_well_is_not_told_later():
    c, _ = router_view(node_info("n1"), node_info("n2"))
    caller = await started(c)
    caller.go_on.set_result(None)
    assert await caller.result() == "well"
    goes_down(c)
    await asyncio.sleep(0)
    assert c.nodes["n1"].calls == set()


async def test_fewer_failures_wake_nobody():
    c, _ = router_view(node_info("n1"), node_info("n2"))
    caller = await started(c)
    for _ in range(10):
        for _ in range(FAILURES - 1):
            c.failed("n1")
        c.answered("n1")
        await asyncio.sleep(0)
    assert not caller.task.done()
    caller.go_on.set_result(None)
    assert await caller.result() == "well"


async def test_a_cancellation_is_one():
    c, _ = router_view(node_info("n1"), node_info("n2"))
    caller = await started(c)
    caller.task.cancel()
    assert await caller.result() == "cancelled" and caller.task.cancelled()
    assert c.nodes["n1"].calls == set()


@HAPPENINGS
@pytest.mark.parametrize("first", ["node", "client"])
async def test_a_client_that_goes_as_the_node_goes_ends_the_request(first, happens):
    c, _ = router_view(node_info("n1"), node_info("n2"))
    caller = await started(c)
    acts = [lambda: happens(c), caller.task.cancel]
    for act in acts if first == "node" else reversed(acts):
        act()
    assert await caller.result() == "cancelled" and caller.task.cancelled()


async def test_a_deadline_is_one():
    c, _ = router_view(node_info("n1"), node_info("n2"))
    assert await (await started(c, timeout_s=0.01)).result() == "too late"
    assert c.nodes["n1"].calls == set()


@HAPPENINGS
@pytest.mark.parametrize("first", ["node", "deadline"])
async def test_a_deadline_that_passes_as_the_node_goes_is_no_cancellation(first, happens, monkeypatch):
    """Both in one tick of the loop, in either order: whatever is told, the task is not left cancelled."""
    c, _ = router_view(node_info("n1"), node_info("n2"))
    expired = asyncio.Timeout._on_timeout

    def both(self: asyncio.Timeout) -> None:
        for act in [lambda: happens(c), lambda: expired(self)][:: 1 if first == "node" else -1]:
            act()

    monkeypatch.setattr(asyncio.Timeout, "_on_timeout", both)
    assert await (await started(c, timeout_s=0.02)).result() == "too late"
    assert [node for node in c.live() if node.calls] == []


async def test_a_node_that_goes_twice_at_once_is_gone_once():
    c, _ = router_view(node_info("n1"), node_info("n2"))
    caller = await started(c)
    goes_down(c)
    leaves(c)
    assert await caller.result() == "node down"


async def test_a_call_that_makes_an_error_of_its_own_of_it_leaves_no_cancellation():
    c, _ = router_view(node_info("n1"))
    left = -1

    async def call() -> None:
        nonlocal left
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(ConnectionError), c.nodes["n1"].calling():
            try:
                await asyncio.sleep(5.0)
            except asyncio.CancelledError:
                raise ConnectionError("closed") from None
        left = task.cancelling()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    goes_down(c)
    await task
    assert left == 0


async def test_a_result_that_comes_as_the_node_goes_leaves_no_cancellation():
    c, _ = router_view(node_info("n1"), node_info("n2"))
    caller = await started(c)
    caller.go_on.set_result(None)
    goes_down(c)
    assert await caller.result() == "node down"


def test_a_node_that_the_registry_lost_stays_while_it_answers():
    """Redis was away, and came back empty."""
    c, clock = router_view(node_info("n1"), node_info("n2"))
    infos = {name: node.info for name, node in c.nodes.items()}
    assert c.registered({}) == ([], [])
    assert set(sent(c)) == {"n1", "n2"}  # there is nothing else
    assert [node.info.node for node in c.doubtful(2.0)] == ["n1", "n2"]
    c.registered({"n2": infos["n2"]})
    assert set(sent(c)) == {"n2"}
    clock.t += MISSING_S / 2
    c.registered(infos)
    clock.t += MISSING_S
    assert c.registered(infos) == ([], []) and set(sent(c)) == {"n1", "n2"}
    c.registered({"n2": infos["n2"]})
    assert c.registered({"n2": infos["n2"]}) == ([], [])
    c.failed("n1")
    assert c.registered({"n2": infos["n2"]}) == ([], ["n1"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "https://h:1"}, {"url": ""}, {"url": "http://[::1"}, {"url": "http://127.0.0.1:99999"},
        {"url": "http://127.0.0.1:1/a b"}, {"url": "http://h\u00e9:80/"}, {"page_size": 0}, {"max_context": -1},
    ],
)  # fmt: skip
def test_registrations_that_cannot_be_used(wrong):
    info = node_info("n1")
    assert unusable(info) == ""
    assert unusable(msgspec.structs.replace(info, **wrong))
