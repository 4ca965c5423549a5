"""The directory as processes over a real Redis: what it writes and sends, and what its death does to that."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from shared.bus import Bus
from shared.embedded import EmbeddedRedis, free_port
from shared.messages import (
    BranchEnded,
    CountsWanted,
    KvSnapshot,
    PagesStored,
    Tier,
    encode,
)
from shared.store import DirectoryStore
from tests.conftest import eventually
from tests.directory_oracle import (
    begun,
    node_info,
    page_names,
    stored,
)
from tests.directory_rig import NODES, P, Process, Rig, processes


@pytest.fixture
async def rig(redis_url: str, cluster_name: str) -> AsyncIterator[Rig]:
    bus = await Bus.connect(redis_url, cluster_name)
    found = Rig(bus)
    await found.start()
    yield found
    await found.stop()
    await bus.close()


async def test_counts_land_in_redis_and_at_the_workers(rig: Rig, redis_url: str, cluster_name: str) -> None:
    async with processes(redis_url, cluster_name, 1) as (directory,):
        await eventually(directory.leads)
        path = page_names("system-and-one")
        await rig.serve("one", path, "P1", "D1")
        await rig.serve("two/sub agent", page_names("system-and-two"), "P1")
        await rig.agrees()
        assert rig.counts["P1"].positive and rig.counts["D1"].positive

        status, text = await directory.get("/v1/branches/one")
        assert status == 200
        shown = msgspec.json.decode(text)
        assert (shown["version"], shown["path_pages"]) == (1, len(path))
        assert shown["nodes"] == {"D1": len(path), "P1": len(path)}
        assert (await directory.get("/v1/branches/two%2Fsub%20agent"))[0] == 200
        status, text = await directory.get("/v1/branches/none")
        assert status == 404 and msgspec.json.decode(text)["error"]["code"] == "branch_not_found"
        status, text = await directory.get("/v1/branches?limit=1")
        listed = msgspec.json.decode(text)
        assert [b["branch"] for b in listed["branches"]] == ["two/sub agent"] and listed["total"] == 2
        assert (await directory.get("/v1/branches?limit=-1"))[0] == 400

        # Moves, compaction, eviction, ends, and a phase change.
        await rig.serve("one", page_names("system-and-one-more"), "P2")
        await rig.serve("one", page_names("syst-compacted"), "P2", "D2")
        await rig.evict("P1", page_names("system")[3:5])
        await rig.switch("D1", P)
        await rig.end("two/sub agent")
        await rig.agrees()
        metrics = (await directory.get("/metrics"))[1]
        assert "ei_directory_branches 1.0" in metrics
        assert 'ei_directory_happenings_total{kind="request_rewritten"} 1.0' in metrics
        assert all(worker.gaps == 0 for worker in rig.counts.values())
        assert await directory.stop() == 0


async def test_full_set_and_whole_path_on_demand(rig: Rig, redis_url: str, cluster_name: str) -> None:
    async with processes(redis_url, cluster_name, 1) as (directory,):
        await eventually(directory.leads)
        await rig.serve("one", page_names("abc"), "P1")
        await rig.agrees()
        before = rig.counts["P1"].full_sets
        await rig.publish("resync", "P1", CountsWanted("P1"))
        await rig.publish("resync", "P1", CountsWanted("never-seen"))
        await eventually(lambda: rig.counts["P1"].full_sets == before + 1)

        await rig.publish("branch", "router", rig.router.request("two", page_names("pqrs")))
        rig.router.paths["three"] = page_names("pq")  # the directory has never heard of it
        await rig.publish("branch", "router", rig.router.request("three", page_names("pqrst")))
        await eventually(lambda: rig.wanted == ["three"])
        rig.oracle.request("two", page_names("pqrs"))
        await rig.agrees()


async def test_restarted_and_lost_nodes(rig: Rig, redis_url: str, cluster_name: str) -> None:
    async with processes(redis_url, cluster_name, 1) as (directory,):
        await eventually(directory.leads)
        path = page_names("abcdef")
        await rig.serve("one", path, "P1", "D1")
        await rig.agrees()
        await rig.restart("P1")
        await rig.agrees()
        await eventually(lambda: rig.counts["P1"].full_sets == 1)
        await rig.serve("one", path, "P1")
        await rig.agrees()
        del rig.infos["D1"]
        await rig.bus.unregister_node("D1")
        rig.oracle.lose("D1")
        await eventually(rig.in_redis)
        assert (await DirectoryStore(rig.bus).load()).state.keys() >= {"node:P1"}
        assert "node:D1" not in (await DirectoryStore(rig.bus).load()).state


async def test_gap_in_kv_events_is_closed_by_a_snapshot(rig: Rig, redis_url: str, cluster_name: str) -> None:
    async with processes(redis_url, cluster_name, 1) as (directory,):
        await eventually(directory.leads)
        path = page_names("abcdef")
        await rig.serve("one", path, "P1")
        await rig.agrees()
        assert rig.snapshots == 0
        # An event that Redis never gets.
        rig.oracle.remove("P1", Tier.L2, path[4:])
        rig._publishers["kv:P1", "P1.0"]._seq += 1
        rig.sent["P1"] += 1
        await rig.evict("P1", path[3:4])
        await rig.agrees()
        assert rig.snapshots == 1
        await rig.evict("P1", path[:1])
        await rig.agrees()


async def test_killed_mid_stream_it_continues_with_the_same_counts(
    rig: Rig, redis_url: str, cluster_name: str
) -> None:
    rng = random.Random(20261130)
    async with processes(redis_url, cluster_name, 1) as (directory,):
        await eventually(directory.leads)
        for trial in range(5):
            for _ in range(rng.randint(5, 15)):
                await rig.something(rng)
            # It dies while events come, some of them written and not yet sent.
            death = asyncio.ensure_future(_later(rng.uniform(0.0, 0.2), directory.kill))
            for _ in range(rng.randint(5, 20)):
                await rig.something(rng)
            await death
            await directory.start()
            if trial % 2:
                await rig.agrees()
        for _ in range(20):
            await rig.something(rng)
        await rig.agrees()
        assert sum(len(rig.oracle.table(node)) for node in NODES) > 20, "the history was too tame"


async def test_long_backlog_is_applied_in_the_order_of_all_streams(
    rig: Rig, redis_url: str, cluster_name: str
) -> None:
    async with processes(redis_url, cluster_name, 1) as (directory,):
        await eventually(directory.leads)
        path = page_names("abcde")
        await rig.serve("one", path, "P1")
        await rig.agrees()
        await directory.kill()
        # More events of one stream than a read returns; what counts last was placed after all of them.
        for i in range(300):
            page = (path[i % len(path)],)
            await rig.evict("P1", page)
            await rig.store("P1", page)
            if i % 50 == 49:
                await rig.place("one", "P1")
        await rig.evict("P1", path[:1])
        await directory.start()
        await rig.agrees()
        assert len(rig.oracle.table("P1")) == len(path) - 1


async def test_stand_by_takes_over(rig: Rig, redis_url: str, cluster_name: str) -> None:
    rng = random.Random(7)
    async with processes(redis_url, cluster_name, 2) as both:
        for process in both:
            await eventually(process.ready)

        async def leaders() -> list[Process]:
            return [process for process in both if await process.leads()]

        (first,) = await eventually(leaders)  # type: ignore[misc]
        second = both[1 - both.index(first)]
        assert (await second.get("/v1/branches"))[0] == 503
        for _ in range(15):
            await rig.something(rng)
        await first.kill()
        for _ in range(15):
            await rig.something(rng)
        await eventually(second.leads)
        await rig.agrees()

        # A leader that was stopped for longer than its lease is deposed, and writes nothing after it.
        await first.start()
        await eventually(first.ready)
        second.signal(signal.SIGSTOP)
        for _ in range(10):
            await rig.something(rng)
        await eventually(first.leads)
        await rig.agrees()
        second.signal(signal.SIGCONT)
        for _ in range(10):
            await rig.something(rng)
        await eventually(lambda: _not(second.leads()))
        await rig.agrees()
        assert await first.leads()


async def _not(question: Awaitable[bool]) -> bool:
    return not await question


async def _later(wait_s: float, act: Callable[[], Awaitable[object]]) -> None:
    await asyncio.sleep(wait_s)
    await act()


async def test_redis_restarts_under_it(cluster_name: str) -> None:
    rng = random.Random(3)
    with EmbeddedRedis() as server:
        bus = await Bus.connect(server.url, cluster_name)
        rig = Rig(bus)
        await rig.start()
        async with processes(server.url, cluster_name, 1) as (directory,):
            await eventually(directory.leads)
            for _ in range(10):
                await rig.something(rng)
            server.kill()
            server.start()
            for _ in range(10):
                await rig.something(rng)
            await rig.agrees(30.0)
        await rig.stop()
        await bus.close()


async def test_what_a_failover_took_back_is_written_again(
    rig: Rig, redis_url: str, cluster_name: str
) -> None:
    """The state in Redis goes back to an earlier one under a leader, as when a replica that lagged takes over."""
    rng = random.Random(11)
    redis = rig.bus.redis
    async with processes(redis_url, cluster_name, 1) as (directory,):
        await eventually(directory.leads)
        for _ in range(10):
            await rig.something(rng)
        await rig.agrees()
        names = ("commit", "directory", "branches", "segments", "counted", "count:*", "pages:*")
        earlier = {
            key: await redis.dump(key)
            for name in names
            for key in [key async for key in redis.scan_iter(rig.bus.key(name))]
        }
        for _ in range(15):
            await rig.something(rng)
        await rig.agrees()
        later = {key for name in names async for key in redis.scan_iter(rig.bus.key(name))}
        # At once, as a failover does it: a leader between the two would write, and find its state mixed.
        async with redis.pipeline(transaction=True) as failover:
            failover.delete(*later)
            for key, blob in earlier.items():
                failover.restore(key, 0, blob)
            await failover.execute()
        await rig.agrees(20.0)
        for _ in range(10):
            await rig.something(rng)
        await rig.agrees()
        assert directory.running


async def test_node_that_restarts_while_no_directory_runs(
    rig: Rig, redis_url: str, cluster_name: str
) -> None:
    rng = random.Random(12)
    async with processes(redis_url, cluster_name, 1) as (directory,):
        await eventually(directory.leads)
        for _trial in range(4):
            for _ in range(12):
                await rig.something(rng)
            await directory.kill()
            for _ in range(6):
                await rig.something(rng)
            await rig.restart(rng.choice(sorted(NODES)))
            for _ in range(6):
                await rig.something(rng)
            await directory.start()
            await rig.agrees()


async def test_junk_stops_nothing(rig: Rig, redis_url: str, cluster_name: str) -> None:
    """Entries, registrations and streams that no part of the cluster would make."""
    rng = random.Random(13)
    redis, key = rig.bus.redis, rig.bus.key
    good = encode(BranchEnded("b"))
    async with processes(redis_url, cluster_name, 1) as (directory,):
        await eventually(directory.leads)
        for _ in range(5):
            await rig.something(rng)
        for number in (10**30, 2**63, 0, -1):
            await redis.xadd(key("stream", "branch"), {"v": 1, "p": "junk", "n": number, "m": good})
        await redis.set(key("node", "nx"), b"\xc1")
        await redis.sadd(key("nodes"), "nx")
        # A node at an address that cannot be one, whose pages are wanted.
        far = node_info("far", "far.0", P, url="http://" + "a" * 70 + ".x:80")
        await rig.bus.register_node(far, 60.0)
        await rig.publish("kv:far", "far.0", begun(P))
        rig._publishers["kv:far", "far.0"]._seq += 1
        await rig.publish("kv:far", "far.0", stored(Tier.L2, (1,)))
        await rig.publish("kv:far", "far.0", PagesStored(Tier.L2, b"123"))
        for _ in range(10):
            await rig.something(rng)
        await rig.agrees()
        # An id that is ahead of Redis' clock, as after a failover to a server whose clock is behind.
        await redis.xadd(
            key("stream", "branch"),
            {"v": 1, "p": "ahead", "n": 1, "m": encode(BranchEnded("nobody"))},
            id=f"{int(time.time() * 1000) + 3_600_000}-0",
        )
        await rig.request("ahead", page_names("later"))
        await asyncio.sleep(0.5)  # the order among streams is not known there: one after the other, then
        await rig.place("ahead", "P1")
        await rig.agrees()
        assert directory.running


async def test_snapshots_that_do_not_fit_are_asked_for_again(
    rig: Rig, redis_url: str, cluster_name: str
) -> None:
    async with processes(redis_url, cluster_name, 1) as (directory,):
        await eventually(directory.leads)
        path = page_names("abcdef")
        await rig.serve("one", path, "P1")
        rig.wrong_snapshots = [
            KvSnapshot("P1", "P1.older", 3, b"", b""),
            KvSnapshot("P2", "P2.0", 3, b"", b""),
            KvSnapshot("P1", "P1.0", 2**64 - 1, b"", b""),
        ]
        rig.oracle.remove("P1", Tier.L2, path[4:])
        rig._publishers["kv:P1", "P1.0"]._seq += 1
        rig.sent["P1"] += 1
        await rig.evict("P1", path[3:4])
        await rig.agrees(20.0)
        assert not rig.wrong_snapshots and directory.running


async def test_unreachable_redis_is_one_line_and_exit_code_2() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.directory", "--redis", f"redis://127.0.0.1:{free_port()}/0",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await asyncio.wait_for(process.communicate(), 20.0)
    assert process.returncode == 2
    assert len(errors.decode().strip().splitlines()) == 1
