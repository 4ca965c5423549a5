"""The bus against a real Redis: order, no loss over a restart or a failover, leases, the registry."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from shared import messages as m
from shared.bus import Bus
from shared.embedded import EmbeddedRedis
from shared.streams import BusError
from tests.conftest import eventually


async def _drain(reader, want: int, timeout_s: float = 20.0) -> list:
    found: list = []
    async with asyncio.timeout(timeout_s):
        while len(found) < want:
            found += await reader.read(0.2)
    return found


@contextlib.asynccontextmanager
async def _running(publisher):
    task = asyncio.create_task(publisher.run())
    try:
        yield
    finally:
        task.cancel()


async def test_messages_arrive_once_numbered_and_in_order(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    publisher = bus.publisher("branch", "r1")
    reader = bus.reader({"branch": "0"})
    async with _running(publisher):
        sent = [m.BranchEnded(f"b{i}") for i in range(1200)]
        assert [publisher.publish(message) for message in sent] == list(range(1, 1201))
        got = await _drain(reader, 1200)
    assert [event.message for event in got] == sent
    assert [event.seq for event in got] == list(range(1, 1201))
    again = bus.reader({"branch": got[599].position})
    assert [event.seq for event in await _drain(again, 600)] == list(range(601, 1201))
    assert [event.seq for event in await bus.last("branch", 3)] == [1198, 1199, 1200]
    await bus.close()


async def test_follow_reads_only_what_comes_and_misses_nothing_before_the_first_read(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    publisher = bus.publisher("branch", "r1")
    async with _running(publisher):
        publisher.publish(m.BranchEnded("old"))
        await publisher.flush()
        reader = bus.reader({})
        await reader.follow("branch")
        publisher.publish(m.BranchEnded("new"))
        await publisher.flush()
        assert [event.message for event in await reader.read(1.0)] == [m.BranchEnded("new")]
    await bus.close()


async def test_unknown_tag_and_newer_schema_are_skipped(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    key = bus.key("stream", "branch")
    good = m.encode(m.BranchEnded("b"))
    for fields in (
        {"v": m.SCHEMA + 1, "p": "r", "n": 1, "m": good},
        {"v": m.SCHEMA, "p": "r", "n": 2, "m": b"\x91\xa3zzz"},
        {"v": m.SCHEMA, "p": "r", "n": 3, "m": b"\xc1"},
        {"x": "y"},
        {"v": m.SCHEMA, "p": "r", "n": 4, "m": good},
    ):
        await bus.redis.xadd(key, fields)
    reader = bus.reader({"branch": "0"})
    got = await _drain(reader, 1)
    assert [(event.seq, event.message) for event in got] == [(4, m.BranchEnded("b"))]
    assert await reader.read(0.05) == []
    await bus.close()


async def test_nothing_is_lost_when_redis_is_killed_and_comes_back(cluster_name):
    server = EmbeddedRedis().start()
    try:
        bus = await Bus.connect(server.url, cluster_name)
        publisher = bus.publisher("branch", "r1")
        reader = bus.reader({"branch": "0"})
        async with _running(publisher):
            for i in range(100):
                publisher.publish(m.BranchEnded(f"{i}"))
            await publisher.flush()
            got = await _drain(reader, 100)
            # appendfsync everysec: let what was answered reach the file before the kill
            await eventually(lambda: _fsynced(bus))
            server.kill()
            for i in range(100, 200):
                publisher.publish(m.BranchEnded(f"{i}"))
            server.start()
            got += await _drain(reader, 100)
        assert [event.message.branch for event in got] == [str(i) for i in range(200)]
        await bus.close()
    finally:
        server.stop()


async def _fsynced(bus) -> bool:
    info = await bus.redis.info("persistence")
    return info["aof_pending_bio_fsync"] == 0 and info["aof_buffer_length"] == 0


async def test_a_full_publisher_drops_the_oldest_and_the_reader_sees_the_gap(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    publisher = bus.publisher("branch", "r1", capacity=10)
    for i in range(25):
        publisher.publish(m.BranchEnded(f"{i}"))
    async with _running(publisher):
        got = await _drain(bus.reader({"branch": "0"}), 10)
    assert [event.seq for event in got] == list(range(16, 26))
    assert publisher.dropped == 15
    await bus.close()


async def test_lease_has_one_holder_and_growing_tokens(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    one, two = bus.lease("directory", "one", 0.3), bus.lease("directory", "two", 0.3)
    first = await one.acquire()
    assert first is not None
    assert await one.acquire() == first
    assert await two.acquire() is None
    assert 0.0 < two.free_in_s <= 0.3
    assert await one.renew()
    await eventually(two.acquire, 5.0)
    assert two.token is not None and two.token > first
    assert not await one.renew()
    assert one.token is None
    await two.release()
    assert (await one.acquire() or 0) > two.ttl_s
    await bus.close()


async def lose_tail(bus, stream, producer, kept):
    """As a failover to a replica that lagged: the stream's newest messages and the producer's number go back."""
    key = bus.key("stream", stream)
    for entry_id, fields in await bus.redis.xrange(key):
        if fields[b"p"] == producer.encode() and int(fields[b"n"]) > kept:
            await bus.redis.xdel(key, entry_id)
    if kept:
        await bus.redis.set(bus.key("number", stream, producer), kept)
    else:
        await bus.redis.delete(bus.key("number", stream, producer))


@pytest.mark.parametrize("kept", [0, 7, 19])
@pytest.mark.parametrize("idle", [True, False])
async def test_a_tail_that_redis_lost_is_sent_again_once(redis_url, cluster_name, kept, idle):
    bus = await Bus.connect(redis_url, cluster_name)
    publisher = bus.publisher("branch", "r1")
    early, sent = bus.reader({"branch": "0"}), [m.BranchEnded(f"{i}") for i in range(20)]
    async with _running(publisher):
        for message in sent:
            publisher.publish(message)
        await publisher.flush()
        assert [event.message for event in await _drain(early, 20)] == sent
        await lose_tail(bus, "branch", "r1", kept)
        if not idle:
            sent.append(m.BranchEnded("next"))
            publisher.publish(sent[-1])
        late = bus.reader({"branch": "0"})
        assert [event.message for event in await _drain(late, len(sent))] == sent
        assert await late.read(0.05) == []
        # One that had seen them sees them no second time.
        assert [event.message for event in await early.read(0.05)] == sent[20:]
    assert publisher.repeated == 20 - kept
    assert [int(f[b"n"]) for _, f in await bus.redis.xrange(bus.key("stream", "branch"))] == [
        *range(1, len(sent) + 1)
    ]
    await bus.close()


async def test_a_message_sent_twice_is_in_the_stream_once(redis_url, cluster_name):
    """Redis took it, but the answer was lost."""
    bus = await Bus.connect(redis_url, cluster_name)
    publisher = bus.publisher("branch", "r1")
    for i in range(5):
        publisher.publish(m.BranchEnded(f"{i}"))
    waiting = list(publisher._waiting)
    await publisher._send()
    publisher._kept.clear()
    publisher._waiting.extend(waiting)
    async with _running(publisher):
        publisher.publish(m.BranchEnded("5"))
        await publisher.flush()
    got = await _drain(bus.reader({"branch": "0"}), 6)
    assert [event.message.branch for event in got] == ["0", "1", "2", "3", "4", "5"]
    assert await bus.redis.xlen(bus.key("stream", "branch")) == 6
    await bus.close()


async def test_messages_are_forgotten_once_they_are_safe(redis_url, cluster_name, monkeypatch):
    monkeypatch.setattr("shared.streams.SAFE_S", 0.2)
    monkeypatch.setattr("shared.streams.PROBE_S", 0.05)
    bus = await Bus.connect(redis_url, cluster_name)
    kept = bus.publisher("branch", "r1")
    at_once = bus.publisher("state:n1", "n1", keep=False)
    async with _running(kept), _running(at_once):
        for publisher in (kept, at_once):
            publisher.publish(m.BranchEnded("b"))
            await publisher.flush()
        assert (kept.kept, at_once.kept) == (1, 0)
        await eventually(lambda: kept.kept == 0, 5.0)
    await bus.close()


async def test_kept_messages_make_room_before_waiting_ones(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    publisher = bus.publisher("branch", "r1", capacity=10)
    async with _running(publisher):
        for i in range(30):
            publisher.publish(m.BranchEnded(f"{i}"))
            await publisher.flush()
    assert (publisher.kept, publisher.dropped) == (10, 0)
    await bus.close()


async def test_registry_lists_only_the_living(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    info = m.NodeInfo("n1", "http://x", "i", "m", "tiny", 16, 100, 10, 40, 8, m.Phase.BOTH)
    await bus.register_node(info, 0.2)
    assert await bus.nodes() == {"n1": info}
    await eventually(lambda: _none(bus), 5.0)
    service = m.ServiceInfo("router", "r1", "http://y")
    await bus.register_service(service, 5.0)
    assert await bus.services() == [service]
    await bus.unregister_service("r1")
    assert await bus.services() == []
    assert await bus.load("planner") is None
    await bus.save("planner", b"x")
    assert await bus.load("planner") == b"x"
    await bus.close()


async def _none(bus) -> bool:
    return await bus.nodes() == {}


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "nonsense", "http://127.0.0.1:1"])
async def test_unreachable_redis_is_one_line(url):
    with pytest.raises(BusError) as caught:
        await Bus.connect(url)
    assert url in str(caught.value) and "\n" not in str(caught.value)
