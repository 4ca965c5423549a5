"""Workers among each other and on Redis: registry, KV events, pulls, phase changes, counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from shared.bus import Bus
from shared.kvfollow import Follow, KvFollower
from shared.kvindex import KvIndex
from shared.kvsnapshot import fetch_snapshot
from shared.messages import (
    CountsChanged,
    CountsFull,
    CountsWanted,
    FetchPlan,
    Iterations,
    NodeState,
    PageArray,
    PagesCleared,
    Phase,
    PrefillCall,
    RoleAck,
    RolePlan,
    RoleStage,
    StreamMessage,
    Tier,
    pack_pages,
)
from shared.pages import page_hashes
from shared.streams import BusError, Event
from tests.conftest import eventually
from tests.worker_nodes import check_empty, node, prefill
from worker.agent.follow import Follower
from worker.agent.settings import WorkerSettings
from worker.engines.simulated import engine

PAGE = 16
PROMPT = np.arange(1000, 1330, dtype=np.int32)  # 20 full pages and a tail of 10
PATH = page_hashes(PROMPT, PAGE).tolist()


def call(rid: str, tokens: np.ndarray[Any, np.dtype[np.int32]] = PROMPT, **fields: Any) -> PrefillCall:
    return PrefillCall(rid, "b", tokens.astype("<i4").tobytes(), **fields)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def bus(redis_url: str, cluster_name: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(redis_url, cluster_name)
    yield bus
    await bus.close()


@contextlib.asynccontextmanager
async def sending(bus: Bus, stream: str, producer: str = "tester") -> AsyncIterator[Any]:
    """A publisher whose messages go out."""
    out = bus.publisher(stream, producer)
    task = asyncio.create_task(out.run())
    yield out
    await out.flush()
    task.cancel()


async def heard(bus: Bus, stream: str, kind: type[StreamMessage]) -> list[Any]:
    return [e.message for e in await bus.last(stream, 10_000) if isinstance(e.message, kind)]


async def generate(
    http: aiohttp.ClientSession, url: str, headers: dict[str, str], max_tokens: int = 20
) -> tuple[int, dict[str, Any], Any]:
    body = {"model": "m", "prompt": PROMPT.tolist(), "max_tokens": max_tokens, "ignore_eos": True}
    async with http.post(url + "/v1/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers


# ------------------------------------------------------------------------------------- registry, events


async def test_a_worker_registers_reports_and_leaves(
    redis_url: str, cluster_name: str, bus: Bus, http: aiohttp.ClientSession
) -> None:
    async with node(redis_url, cluster_name, "w7", l1_tokens=1024, l2_tokens=1600, capacity_scale=0.5) as w:
        await eventually(lambda: bus.nodes())
        info = (await bus.nodes())["w7"]
        assert (info.url, info.incarnation, info.model, info.profile) == (w.url, w.instance, "m", "tiny")
        assert (info.page_size, info.l1_tokens, info.l2_tokens, info.max_context) == (16, 512, 800, 512)
        assert (info.phase, info.epoch, info.engine) == (Phase.BOTH, 0, "simulated")
        events = await prefill(http, w.url, call("a"))
        assert [e.event for e in events] == ["started", "done"]
        assert events[0].t < events[1].t and events[1].cached_tokens == 0
        (_, again) = await prefill(http, w.url, call("b"))
        assert (again.cached_tokens, again.restored_tokens, again.fetched_tokens) == (320, 0, 0)
        await eventually(lambda: heard(bus, "iterations", Iterations))
        (report, *_) = await heard(bus, "iterations", Iterations)
        assert report.node == "w7" and report.phase is Phase.BOTH
        assert (report.records[0].t_uc, report.records[0].begun) == (256, 1)

        async def state() -> Any:
            states = await heard(bus, "state:w7", NodeState)
            return states[-1] if states and states[-1].l1_pages == 20 else None

        last: Any = await eventually(state)
        assert (last.queue, last.decodes, last.l1_free_tokens) == ([], [], 512)
    assert await bus.nodes() == {}


async def test_kv_events_and_snapshot_tell_what_the_node_holds(
    redis_url: str, cluster_name: str, bus: Bus, http: aiohttp.ClientSession
) -> None:
    async with node(redis_url, cluster_name, l1_tokens=640, l2_tokens=960) as w:
        for number in range(6):
            await prefill(http, w.url, call(f"r{number}", PROMPT + 400 * number))
        await w._kv_out.flush()
        events = await bus.last("kv:n1", 10_000)
        assert isinstance(events[0].message, PagesCleared) and {e.producer for e in events} == {w.instance}
        follower = KvFollower(KvIndex())
        assert all(follower.feed(event) is Follow.OK for event in events)
        for tier in Tier:
            assert set(follower.index.pages("n1", tier).tolist()) == set(w.cache.pages(tier))
        snapshot = await fetch_snapshot(http, (await bus.nodes())["n1"])
        assert (snapshot.node, snapshot.incarnation, snapshot.seq) == ("n1", w.instance, events[-1].seq)
        assert set(np.frombuffer(snapshot.l2, "<i8").tolist()) == set(w.cache.pages(Tier.L2))
        assert len(w.cache.pages(Tier.L2)) + w.cache.evicted[Tier.L2, False] == 120


# ------------------------------------------------------------------------------------- transfers


async def test_decode_pulls_from_prefill_and_the_next_prefill_from_decode(
    redis_url: str, cluster_name: str, http: aiohttp.ClientSession
) -> None:
    async with (
        node(redis_url, cluster_name, "p", phase=Phase.PREFILL) as p,
        node(redis_url, cluster_name, "d", phase=Phase.DECODE) as d,
    ):
        await prefill(http, p.url, call("r1"))
        headers = {"X-EI-Request-Id": "r1", "X-EI-KV-Source": p.url, "X-EI-Cached-Tokens": "77"}
        status, answer, _ = await generate(http, d.url, headers, 60)
        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 77
        assert (d.engine.tokens[Phase.PREFILL], d.engine.tokens[Phase.DECODE]) == (0, 60)
        assert answer["usage"]["decode_iterations"] == 60
        assert d.fetcher.counts.pages == 21 and p.page_service.lent_pages == 21  # the tail is one of them
        # The next step: the prefill node lacks what was decoded, the decode node has it.
        step = np.concatenate([PROMPT, np.frombuffer(answer["choices"][0]["text"].encode(), np.uint8)])
        longer = np.concatenate([step, np.arange(50)]).astype(np.int32)
        full = (step.size - 1) // PAGE
        (_, done) = await prefill(http, p.url, call("r2", longer, fetch=FetchPlan(d.url, 20, full)))
        assert (done.cached_tokens, done.fetched_tokens) == (full * PAGE, (full - 20) * PAGE)
        assert p.scheduler.recomputed == d.scheduler.recomputed == dict.fromkeys(p.scheduler.recomputed, 0)


async def test_a_peer_that_is_gone_means_recompute(
    redis_url: str, cluster_name: str, http: aiohttp.ClientSession
) -> None:
    async with node(redis_url, cluster_name, "d", phase=Phase.DECODE) as d:
        for number in range(3):
            headers = {"X-EI-Request-Id": f"r{number}", "X-EI-KV-Source": "http://127.0.0.1:9"}
            status, answer, _ = await generate(http, d.url, headers)
            assert status == 200 and answer["usage"]["completion_tokens"] == 20
        # The first computes all, the others only the tail, which their peer cannot give.
        assert d.scheduler.recomputed["peer_failed"] == 330 + 10 + 10
        assert d.peers.failures == 1  # the others did not ask again so soon
        async with http.get(d.url + "/metrics") as metrics:
            assert 'ei_worker_recomputed_tokens_total{reason="peer_failed"} 350.0' in await metrics.text()


async def test_a_peer_that_holds_less_or_hangs_means_recompute(
    redis_url: str, cluster_name: str, http: aiohttp.ClientSession
) -> None:
    hanging = await asyncio.start_server(lambda _r, _w: asyncio.sleep(3600), "127.0.0.1", 0)
    silent = f"http://127.0.0.1:{hanging.sockets[0].getsockname()[1]}"
    async with (
        node(redis_url, cluster_name, "p") as p,
        node(redis_url, cluster_name, "q", peer_timeout_s=0.2) as q,
    ):
        await prefill(http, p.url, call("a", PROMPT[:160]))
        (_, done) = await prefill(http, q.url, call("b", fetch=FetchPlan(p.url, 0, 20)))
        assert (done.cached_tokens, done.fetched_tokens) == (160, 160)
        assert q.scheduler.recomputed["peer_missing"] == 160
        (_, done) = await prefill(http, q.url, call("c", PROMPT + 5000, fetch=FetchPlan(silent, 0, 20)))
        assert (done.cached_tokens, done.fetched_tokens) == (0, 0)
        assert q.scheduler.recomputed["peer_failed"] == 320
    hanging.close()


# ------------------------------------------------------------------------------------- phases


async def test_a_phase_change_moves_the_queue_and_is_acknowledged(
    redis_url: str, cluster_name: str, bus: Bus, http: aiohttp.ClientSession
) -> None:
    async with (
        node(redis_url, cluster_name, phase=Phase.PREFILL, speedup=0.02) as w,
        sending(bus, "roles") as out,
    ):
        running = asyncio.ensure_future(prefill(http, w.url, call("runs", PROMPT[:256])))
        await eventually(lambda: w.scheduler.requests == 1)
        queued = asyncio.ensure_future(prefill(http, w.url, call("queued", PROMPT + 5000)))
        await eventually(lambda: w.scheduler.queued_prefills == 1)
        out.publish(RolePlan(3, {"n1": Phase.DECODE, "other": Phase.PREFILL}, "test"))
        assert [e.event for e in await queued] == ["moved"]
        assert [e.event for e in await prefill(http, w.url, call("late"))] == ["moved"]
        status, answer, headers = await generate(http, w.url, {"X-EI-Request-Id": "early"})
        assert (status, answer["error"]["code"], headers["X-EI-Moved"]) == (503, "moved", "1")
        assert [e.event for e in await running] == ["started", "done"]
        await eventually(lambda: w.scheduler.role.phase is Phase.DECODE)

        async def acks() -> list[Any]:
            heard_acks = await heard(bus, "roles", RoleAck)
            return heard_acks if len(heard_acks) == 2 else []

        found: Any = await eventually(acks)
        drained, switched = found
        assert (drained.node, drained.stage, drained.epoch, drained.phase) == (
            "n1",
            "drained",
            3,
            Phase.DECODE,
        )
        assert switched.stage is RoleStage.SWITCHED and switched.switch_s == 0.05 and drained.drain_s > 0
        assert set(page_hashes(PROMPT[:256], PAGE).tolist()) <= set(w.cache.pages(Tier.L1))
        await eventually(lambda: _registered(bus, "n1", Phase.DECODE, 3))


async def _registered(bus: Bus, name: str, phase: Phase, epoch: int) -> bool:
    info = (await bus.nodes()).get(name)
    return info is not None and (info.phase, info.epoch) == (phase, epoch)


async def test_a_worker_that_starts_takes_the_phase_of_the_last_plan(
    redis_url: str, cluster_name: str, bus: Bus
) -> None:
    async with sending(bus, "roles") as out:
        out.publish(RolePlan(4, {"n1": Phase.PREFILL}, "old"))
        out.publish(RolePlan(9, {"n1": Phase.DECODE}, "new"))
        out.publish(RolePlan(10, {"n2": Phase.PREFILL}, "not about it"))
        await out.flush()
        async with node(redis_url, cluster_name) as w:
            assert (w.scheduler.role.phase, w.scheduler.role.epoch) == (Phase.DECODE, 9)
            await eventually(lambda: heard(bus, "roles", RoleAck))
            out.publish(RolePlan(11, {"n1": Phase.PREFILL}, "next"))
            await eventually(lambda: w.scheduler.role.phase is Phase.PREFILL)


async def test_a_direct_call_is_served_in_any_phase(
    redis_url: str, cluster_name: str, http: aiohttp.ClientSession
) -> None:
    async with node(redis_url, cluster_name, phase=Phase.PREFILL) as w:
        status, answer, _ = await generate(http, w.url, {})
        assert status == 200 and answer["usage"]["completion_tokens"] == 20


async def test_a_worker_that_stops_hands_back_its_queue_and_ends_what_runs(
    redis_url: str, cluster_name: str, http: aiohttp.ClientSession
) -> None:
    async with node(redis_url, cluster_name, speedup=0.02, grace_s=10.0) as w:
        running = asyncio.ensure_future(prefill(http, w.url, call("runs", PROMPT[:256])))
        await eventually(lambda: w.scheduler.requests == 1)
        queued = asyncio.ensure_future(prefill(http, w.url, call("queued", PROMPT + 5000)))
        await eventually(lambda: w.scheduler.queued_prefills == 1)
        w.stop()
        assert [e.event for e in await queued] == ["moved"]
        assert [e.event for e in await running] == ["started", "done"]


async def test_a_worker_that_stops_takes_nothing_new_and_ends_well_without_redis(
    redis_url: str, cluster_name: str, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(redis_url, cluster_name, speedup=0.02, grace_s=10.0) as w:
        running = asyncio.ensure_future(generate(http, w.url, {}, 1))
        await eventually(lambda: w.scheduler.requests == 1)

        async def gone(_: str) -> None:
            raise BusError("Redis is gone")

        monkeypatch.setattr(w.bus, "unregister_node", gone)
        w.stop()
        await eventually(lambda: w.engine._stopping)
        status, answer, _ = await generate(http, w.url, {})
        assert (status, answer["error"]["code"]) == (503, "moved")
        assert (await running)[0] == 200


async def test_a_prefill_nodes_pages_stay_until_its_decode_has_them(
    redis_url: str, cluster_name: str, http: aiohttp.ClientSession
) -> None:
    async with node(redis_url, cluster_name, l1_tokens=480, l2_tokens=960) as w:
        await prefill(http, w.url, call("a", keep=True))
        assert w.cache.l2_pinned == 21  # 20 pages and the tail
        for number in range(1, 5):
            await prefill(http, w.url, call(f"r{number}", PROMPT + 400 * number))
        assert w.cache.held(np.array(PATH)) == 20
        # More than half of host memory is not kept.
        await prefill(http, w.url, call("b", PROMPT + 9, keep=True))
        assert w.cache.l2_pinned == 21
        for rids, released in ((["b", "nobody"], 1), (["a"], 1), (["a"], 0)):
            body = msgspec.msgpack.encode(rids)
            async with http.post(w.url + "/ei/v1/release", data=body) as answer:
                assert (await answer.json())["released"] == released
        assert not w.cache.l2_pinned
        async with http.post(w.url + "/ei/v1/release", data=b"?") as answer:
            assert answer.status == 400
        for number in range(5, 9):
            await prefill(http, w.url, call(f"r{number}", PROMPT + 400 * number))
        assert w.cache.held(np.array(PATH)) == 0


async def test_a_fetch_ends_with_its_call(
    redis_url: str, cluster_name: str, http: aiohttp.ClientSession
) -> None:
    hanging = await asyncio.start_server(lambda _r, _w: asyncio.sleep(3600), "127.0.0.1", 0)
    silent = f"http://127.0.0.1:{hanging.sockets[0].getsockname()[1]}"
    async with node(redis_url, cluster_name, peer_timeout_s=60.0, fetch_timeout_s=60.0) as w:
        body = msgspec.msgpack.encode(call("a", fetch=FetchPlan(silent, 0, 20)))
        answer = await http.post(w.url + "/ei/v1/prefill", data=body)
        await eventually(lambda: w.fetcher.pages_in_flight == 20)
        answer.close()
        await eventually(lambda: not w.fetcher.pages_in_flight)
    hanging.close()


async def test_a_closed_prefill_call_frees_its_place(
    redis_url: str, cluster_name: str, http: aiohttp.ClientSession
) -> None:
    async with node(redis_url, cluster_name, speedup=0.02) as w:
        for rid in ("first", "second"):
            answer = await http.post(w.url + "/ei/v1/prefill", data=msgspec.msgpack.encode(call(rid)))
            await eventually(lambda: w.scheduler.requests == 1)
            answer.close()
            await check_empty(w)


# ------------------------------------------------------------------------------------- counts


async def test_counts_reach_the_eviction_order_and_gaps_are_mended(
    redis_url: str, cluster_name: str, bus: Bus, http: aiohttp.ClientSession
) -> None:
    async with node(redis_url, cluster_name) as w, sending(bus, "counts:n1", "directory-1") as out:
        await eventually(lambda: heard(bus, "resync", CountsWanted))
        out.publish(CountsFull(pack_pages(PATH[:5])))
        await prefill(http, w.url, call("a"))
        await eventually(lambda: w.cache.l2_counted == 5)
        out.publish(CountsChanged(pack_pages(PATH[5:10]), pack_pages(PATH[:1])))
        await eventually(lambda: w.cache.l2_counted == 9)
        async with sending(bus, "counts:n1", "directory-2") as other:
            # A new leader that is heard for the first time may have said more before.
            other.publish(CountsChanged(pack_pages(PATH[10:11]), b""))
            await eventually(lambda: w.cache.l2_counted == 10)
            await eventually(lambda: _asked(bus, 2))
            other.publish(CountsFull(pack_pages(PATH[:3])))
            await eventually(lambda: w.cache.l2_counted == 3)
        async with http.get(w.url + "/metrics") as metrics:
            assert 'ei_worker_kv_pages{count="positive",tier="l2"} 3.0' in await metrics.text()


async def _asked(bus: Bus, times: int) -> bool:
    return len(await heard(bus, "resync", CountsWanted)) >= times


class _Heard:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def set_role(self, epoch: int, phase: Phase) -> None:
        self.calls.append((epoch, phase))

    def set_counts(self, positive: PageArray, zero: PageArray) -> None:
        self.calls.append((positive.tolist(), zero.tolist()))

    def set_all_counts(self, positive: PageArray) -> None:
        self.calls.append((positive.tolist(),))


def test_all_counts_are_asked_for_until_they_come_and_after_a_gap() -> None:
    heard = _Heard()
    follower = Follower("n1", heard)

    def event(seq: int, message: StreamMessage, producer: str = "d") -> Event:
        return Event("counts:n1", f"{seq}-0", producer, seq, message)

    changed = CountsChanged(pack_pages([1]), pack_pages([2]))
    assert [follower.wants_counts(t) for t in (0.0, 1.0, 2.0, 3.0, 6.0)] == [True, False, True, False, True]
    follower.feed(event(5, CountsFull(pack_pages([7, 8]))))
    assert not follower.wants_counts(1e6)
    follower.feed(event(6, changed))
    assert not follower.wants_counts(1e6) and follower.gaps == 0
    follower.feed(event(8, changed))
    assert follower.wants_counts(1e6) and follower.gaps == 1
    follower.feed(event(9, CountsFull(b"")))
    follower.feed(event(1, changed, "another"))
    assert follower.wants_counts(2e6) and follower.gaps == 2
    follower.feed(event(1, RolePlan(2, {"n2": Phase.DECODE}, "")))
    follower.feed(event(2, RolePlan(3, {"n1": Phase.DECODE}, "")))
    assert heard.calls == [([7, 8],), ([1], [2]), ([1], [2]), ([],), ([1], [2]), (3, Phase.DECODE)]


# ------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"profile": "none"}, "no timing profile 'none'"),
        ({"l1_tokens": -1}, "l1_tokens must be at least 0"),
        ({"capacity_scale": 0.0}, "capacity_scale must be above 0"),
        ({"ttl_s": 0.5}, "ttl_s must be at least 1.5"),
        ({"node": "a:b"}, "without braces"),
        ({"model": ""}, "model must not be empty"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        WorkerSettings(**fields)


async def test_a_node_without_a_name_takes_its_address(redis_url: str, cluster_name: str, bus: Bus) -> None:
    async with node(redis_url, cluster_name, "") as w:
        await eventually(lambda: bus.nodes())
        assert list(await bus.nodes()) == [w.node] == [w.url.removeprefix("http://").replace(":", "-")]


async def test_kept_pages_go_after_a_while_and_with_the_node(
    redis_url: str, cluster_name: str, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(redis_url, cluster_name) as w:
        monkeypatch.setattr(engine, "KEEP_S", 0.2)
        await prefill(http, w.url, call("a", keep=True))
        await eventually(lambda: not w.cache.l2_pinned)
        monkeypatch.setattr(engine, "KEEP_S", 60.0)
        await prefill(http, w.url, call("b", keep=True))
        assert w.cache.l2_pinned == 21
        await w.engine.stop(0.1)
        assert not w.cache.l2_pinned
