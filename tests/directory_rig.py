"""Routers, workers and Redis as directory processes see them, and the oracle of what these should say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from shared.bus import Bus
from shared.clock import Clock
from shared.embedded import free_port
from shared.kvsnapshot import send_snapshot
from shared.messages import (
    CountsChanged,
    CountsFull,
    KvSnapshot,
    NodeInfo,
    PathWanted,
    Phase,
    RoleAck,
    RoleStage,
    StreamMessage,
    Tier,
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
