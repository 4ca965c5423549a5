"""The directory as processes over a real Redis: what it writes and sends, and what its death does to that."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import msgspec
import pytest
from aiohttp import web

from shared.bus import Bus
from shared.clock import Clock
from shared.embedded import EmbeddedRedis, free_port
from shared.kvsnapshot import send_snapshot
from shared.messages import (
    BranchEnded,
    CountsChanged,
    CountsFull,
    CountsWanted,
    KvSnapshot,
    NodeInfo,
    PagesStored,
    PathWanted,
    Phase,
    RoleAck,
    RoleStage,
    StreamMessage,
    Tier,
    encode,
    unpack_pages,
)
from shared.store import DirectoryStore, NodeCounts
from shared.streams import BusError, Event, Publisher
from tests.conftest import end, eventually
from tests.directory_oracle import (
    Oracle,
    Path,
    RouterSide,
    begun,
    ended,
    node_info,
    page_names,
    placed,
    removed,
    snapshot_of,
    stored,
)

P, D = Phase.PREFILL, Phase.DECODE
NODES = {"P1": P, "P2": P, "D1": D, "D2": D}
NODE_TTL_S = 3.0


class Rig:
    """Routers, workers and Redis as the directory sees them, and the oracle of what it should say.

    Each message is in Redis before the next, and a millisecond of Redis' clock apart from it: so the oracle
    knows the order that the directory is to follow.
    """

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.oracle = Oracle()
        self.oracle.phase = dict(NODES)
        self.router = RouterSide()
        self.clock, self.epoch = Clock(), 0
        self.infos: dict[str, NodeInfo] = {}
        self.lives = dict.fromkeys(NODES, 0)
        self.sent: dict[str, int] = dict.fromkeys(NODES, 0)  # kv events of the node's present life
        self.lost_events: set[str] = set()
        self.snapshots = 0
        self.wrong_snapshots: list[KvSnapshot] = []  # sent before right ones
        self.counts = {node: WorkerSide() for node in NODES}
        self.wanted: list[str] = []
        self._publishers: dict[tuple[str, str], Publisher] = {}
        self._reader = bus.reader({"resync": "0"} | {f"counts:{node}": "0" for node in NODES})
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{node}/ei/v1/kv/snapshot", self._snapshot)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        for node in NODES:
            await self.register(node)
            await self.kv(node, begun(self.oracle.phase[node]))
        self._tasks.append(asyncio.ensure_future(self._listen()))
        self._tasks.append(asyncio.ensure_future(self._stay_registered()))

    async def stop(self) -> None:
        await end(self._tasks)
        await self._runner.cleanup()

    async def register(self, node: str) -> None:
        self.infos[node] = node_info(
            node, f"{node}.{self.lives[node]}", self.oracle.phase[node], epoch=self.epoch,
            url=f"http://127.0.0.1:{self._port}/{node}",
        )  # fmt: skip
        await self.bus.register_node(self.infos[node], NODE_TTL_S)

    async def _stay_registered(self) -> None:
        while True:
            await asyncio.sleep(0.3)
            for info in list(self.infos.values()):
                with contextlib.suppress(Exception):  # Redis may be away
                    await self.bus.register_node(info, NODE_TTL_S)

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        node = request.match_info["node"]
        self.snapshots += 1
        if self.wrong_snapshots:
            return await send_snapshot(request, self.wrong_snapshots.pop(0))
        snapshot = snapshot_of(self.oracle, node, f"{node}.{self.lives[node]}", self.sent[node])
        return await send_snapshot(request, snapshot)

    async def _listen(self) -> None:
        while True:
            for event in await self._reader.read(0.5):
                if isinstance(event.message, PathWanted):
                    self.wanted.append(event.message.branch)
                elif event.stream.startswith("counts:"):
                    self.counts[event.stream.removeprefix("counts:")].feed(event)

    # ------------------------------------------------------------------ what happens

    async def publish(self, stream: str, producer: str, message: StreamMessage) -> None:
        publisher = self._publishers.get((stream, producer))
        if publisher is None:
            publisher = self._publishers[stream, producer] = self.bus.publisher(stream, producer)
            self._tasks.append(asyncio.ensure_future(publisher.run()))
        publisher.publish(message)
        await publisher.flush(20.0)
        await asyncio.sleep(0.002)

    async def kv(self, node: str, message: StreamMessage) -> None:
        self.sent[node] += 1
        await self.publish(f"kv:{node}", f"{node}.{self.lives[node]}", message)

    async def request(self, branch: str, path: Path) -> None:
        self.oracle.request(branch, path)
        await self.publish("branch", "router", self.router.request(branch, path, self.clock.now()))

    async def place(self, branch: str, node: str) -> None:
        phase = self.oracle.phase[node]
        self.oracle.place(branch, node, phase)
        await self.publish("branch", "router", placed(branch, node, phase, self.clock.now()))

    async def end(self, branch: str) -> None:
        self.router.paths.pop(branch, None)
        self.oracle.end(branch)
        await self.publish("branch", "router", ended(branch, self.clock.now()))

    async def store(self, node: str, pages: Path, tier: Tier = Tier.L2) -> None:
        new = [page for page in pages if page not in self.oracle.tiers.get((node, tier), set())]
        # A snapshot taken meanwhile says what its number says.
        self.oracle.store(node, tier, new)
        await self.kv(node, stored(tier, new))

    async def evict(self, node: str, pages: Path, tier: Tier = Tier.L2) -> None:
        held = [page for page in pages if page in self.oracle.tiers.get((node, tier), set())]
        self.oracle.remove(node, tier, held)
        await self.kv(node, removed(tier, held))

    async def switch(self, node: str, phase: Phase) -> None:
        self.epoch += 1
        self.oracle.switch(node, phase)
        ack = RoleAck(node, self.epoch, phase, RoleStage.SWITCHED, self.clock.now())
        await self.publish("roles", node, ack)
        await self.register(node)

    async def restart(self, node: str) -> None:
        self.lives[node] += 1
        self.sent[node] = 0
        self.oracle.lose(node)
        self.counts[node] = WorkerSide()
        await self.kv(node, begun(self.oracle.phase[node], self.epoch, self.clock.now()))
        await self.register(node)

    async def serve(self, branch: str, path: Path, *nodes: str) -> None:
        await self.request(branch, path)
        for node in nodes:
            await self.place(branch, node)
            await self.store(node, path)

    async def something(self, rng: random.Random) -> None:
        """A random step of a cluster's life."""
        branch = rng.choice("abcdefgh")
        node = rng.choice(sorted(NODES))
        kind = rng.random()
        if kind < 0.45:
            context = "".join(rng.choice("xy") for _ in range(rng.randint(1, 12)))
            nodes = rng.sample(sorted(NODES), rng.randint(1, 2))
            await self.serve(branch, page_names(context), *nodes)
        elif kind < 0.6:
            await self.place(branch, node)
        elif kind < 0.7:
            await self.end(branch)
        elif kind < 0.95:
            tier = rng.choice(list(Tier))
            held = sorted(self.oracle.tiers.get((node, tier), set()))
            await self.evict(node, tuple(page for page in held if rng.random() < 0.3), tier)
        else:
            await self.switch(node, rng.choice((P, D)))

    # ------------------------------------------------------------------ what should be seen

    async def in_redis(self) -> bool:
        try:
            found = (await DirectoryStore(self.bus).load()).counts
        except BusError:
            return False  # this test's own connection, from before a restart of Redis
        return all(as_table(found.get(node)) == self.oracle.table(node) for node in NODES)

    def at_workers(self) -> bool:
        told = self.counts
        return all(
            told[node].complete and told[node].positive == set(self.oracle.table(node)) for node in NODES
        )

    async def agrees(self, timeout_s: float = 15.0) -> None:
        """Redis and the workers have the oracle's counts. Fails with what differs."""
        try:
            await eventually(self.in_redis, timeout_s)
            await eventually(self.at_workers, timeout_s)
        except AssertionError:
            found = (await DirectoryStore(self.bus).load()).counts
            differs = {
                node: (
                    as_table(found.get(node)).items() ^ self.oracle.table(node).items(),
                    self.counts[node].positive ^ set(self.oracle.table(node)),
                )
                for node in NODES
            }
            raise AssertionError(f"in Redis and at the workers differs: {differs}") from None


def as_table(counts: NodeCounts | None) -> dict[int, int]:
    if counts is None:
        return {}
    return dict(zip(counts.pages.tolist(), counts.counts.tolist(), strict=True))


class WorkerSide:
    """A worker's view of its counts: what it was told, and whether it missed something."""

    def __init__(self) -> None:
        self.positive: set[int] = set()
        self.full_sets = 0
        self.gaps = 0
        self.complete = False  # nothing was missed since a full set
        self._producer, self._seq = "", 0

    def feed(self, event: Event) -> None:
        message = event.message
        if isinstance(message, CountsFull):
            self.positive = set(unpack_pages(message.positive).tolist())
            self.full_sets += 1
            self.complete = True
        elif isinstance(message, CountsChanged):
            if (event.producer, event.seq) != (self._producer, self._seq + 1):
                self.gaps += 1
                self.complete = False
            self.positive |= set(unpack_pages(message.positive).tolist())
            self.positive -= set(unpack_pages(message.zero).tolist())
        self._producer, self._seq = event.producer, event.seq


class Process:
    """One directory process."""

    def __init__(self, redis_url: str, cluster: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            sys.executable, "-m", "services.directory", "--redis", redis_url, "--cluster", cluster,
            "--port", str(self.port), "--lease-ttl-s", "1", "--node-grace-s", "2",
        ]  # fmt: skip

    async def start(self) -> Process:
        self._process = await asyncio.create_subprocess_exec(*self._command)
        return self

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def stop(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        return await asyncio.wait_for(self._process.wait(), 15.0)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    async def get(self, path: str) -> tuple[int, str]:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session,
                session.get(self.url + path) as answer,
            ):
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, str(error)

    async def leads(self) -> bool:
        return "ei_directory_leader 1.0" in (await self.get("/metrics"))[1]

    async def ready(self) -> bool:
        return (await self.get("/readyz"))[0] == 200


@contextlib.asynccontextmanager
async def processes(redis_url: str, cluster: str, count: int) -> AsyncIterator[list[Process]]:
    found = [Process(redis_url, cluster) for _ in range(count)]
    try:
        for process in found:
            await process.start()
        yield found
    finally:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                await process.kill()


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
        for name in names:
            for key in [key async for key in redis.scan_iter(rig.bus.key(name))]:
                await redis.delete(key)
        for key, blob in earlier.items():
            await redis.restore(key, 0, blob)
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
