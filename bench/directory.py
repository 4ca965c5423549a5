"""What the directory's counting costs: in memory, through Redis, and while a leader dies.

    python bench/directory.py [--seconds 10] [--json FILE] [--check]

Every placement is one agent step: a request that appends 100 pages to its branch, and the placement of its path on
the branch's prefill node. The pages of the step before arrive there as a kv event.

| row | what is measured | bound (--check) |
|---|---|---|
| memory | steps a second of the decision code alone, with `take` after every 20 | >= 2,000 placements/s |
| redis | steps a second of one directory process, from a backlog in Redis until its counts are stored | >= 500 |
| lag | from publishing a placement to its batch being stored, at 200 placements/s | p99 < 50 ms |
| start | a directory process that finds 1 M counted pages: until it leads | < 10 s |
| takeover | gap in the counts sent to workers when the leader is killed beside a stand-by | < 2 lease periods |
| pages | RSS of the directory's state after 10 M pages stored, counted, released and removed | <= 1.2 x start |
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
from agents import BRANCHES, NODES, STEP_PAGES, Agents, Feed, begin
from aiohttp import web
from process import cpu_s, rss_mb

from services.directory.core import Directory
from shared.bus import Bus
from shared.embedded import EmbeddedRedis, free_port
from shared.kvsnapshot import PATH, send_snapshot
from shared.messages import (
    Began,
    BranchEnded,
    BranchPlaced,
    BranchRequest,
    KvSnapshot,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    Phase,
    StreamMessage,
    Tier,
    pack_pages,
)
from shared.service import give_back_memory
from shared.store import DirectoryStore
from shared.streams import Publisher

LEASE_S = 2.0


# ------------------------------------------------------------------------------------ in memory


def in_memory(seconds: float) -> dict[str, float]:
    directory, agents, feed = Directory(7200.0, 10.0), Agents(), Feed()
    begin(directory, agents, feed)
    steps, spent = 0, 0.0
    changed = 0
    while spent < seconds:
        events = [
            feed.event(stream, message)
            for number in range(steps, steps + 20)
            for stream, message in agents.step(number)
        ]
        started = time.perf_counter()
        for event in events:
            directory.apply(event, 0.0)
        batch = directory.take()
        spent += time.perf_counter() - started
        if steps >= 2 * BRANCHES:
            changed += sum(found.pages.size for found in batch.changes.values())
        else:
            spent = 0.0  # warm-up: every branch has a path
        steps += 20
    steps -= 2 * BRANCHES
    return {"placements_per_s": steps / spent, "changed_pages_per_placement": changed / steps}


# ------------------------------------------------------------------------------------ through Redis


class DirectoryProcess:
    def __init__(self, url: str, cluster: str) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "services.directory", "--redis", url, "--cluster", cluster,
                "--port", str(self.port), "--lease-ttl-s", str(LEASE_S), "--log-level", "error",
            ]
        )  # fmt: skip
        self.pid = self._process.pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class Cluster:
    """Redis, and the streams of a router and of workers, written as these write them."""

    def __init__(self, bus: Bus, url: str) -> None:
        self.bus, self.url = bus, url
        self.agents = Agents()
        self._publishers: dict[str, Publisher] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._held: dict[str, list[bytes]] = {}

    async def begin(self) -> None:
        app = web.Application()
        app.router.add_get("/{node}" + PATH, self._snapshot)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        for node in self.agents._nodes:
            await self.bus.register_node(self.agents.info(node, f"http://127.0.0.1:{port}/{node}"), 3600.0)
            self.publish(f"kv:{node}", PagesCleared(began=Began(Phase.PREFILL)))
        await self.flush()

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        node = request.match_info["node"]
        seq = self._publishers[f"kv:{node}"].seq
        return await send_snapshot(
            request, KvSnapshot(node, f"{node}.0", seq, b"", b"".join(self._held[node]))
        )

    def publish(self, stream: str, message: StreamMessage) -> None:
        if isinstance(message, PagesStored):
            self._held.setdefault(stream.removeprefix("kv:"), []).append(message.pages)
        out = self._publishers.get(stream)
        if out is None:
            producer = f"{stream.removeprefix('kv:')}.0" if stream.startswith("kv:") else "router"
            out = self._publishers[stream] = self.bus.publisher(stream, producer, maxlen=1_000_000)
            self._tasks.append(asyncio.ensure_future(out.run()))
        out.publish(message)

    async def flush(self) -> None:
        for out in self._publishers.values():
            await out.flush(60.0)

    async def warm_up(self) -> None:
        """Two steps of every branch: the prompt that all share, and the first of their own."""
        for number in range(2 * BRANCHES):
            for stream, message in self.agents.step(number, time.time()):
                self.publish(stream, message)
        await self.flush()
        await self.until_stored()

    async def stored(self) -> tuple[str, int]:
        """Position on `branch` and number of the batch that Redis has."""
        directory = (await self.bus.redis.hget(self.bus.key("directory"), "streams")) or b""
        positions = msgspec.msgpack.decode(directory, type=dict[str, str]) if directory else {}
        return positions.get("branch", "0"), await DirectoryStore(self.bus).committed()

    async def until_stored(self, timeout_s: float = 120.0) -> None:
        (last,) = await self.bus.last("branch", 1)
        async with asyncio.timeout(timeout_s):
            while (await self.stored())[0] != last.position:
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=2.0)
        await self._runner.cleanup()


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    with EmbeddedRedis() as server:
        bus = await Bus.connect(server.url, "bench")
        found = Cluster(bus, server.url)
        try:
            await found.begin()
            yield found
        finally:
            await found.stop()
            await bus.close()


async def leads(port: int) -> bool:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session,
            session.get(f"http://127.0.0.1:{port}/metrics") as answer,
        ):
            return "ei_directory_leader 1.0" in await answer.text()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def until_leads(process: DirectoryProcess, timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await leads(process.port):
            await asyncio.sleep(0.01)


async def through_redis(steps: int) -> dict[str, float]:
    """A backlog of steps, then the time until a directory has stored it all."""
    async with cluster() as c:
        directory = DirectoryProcess(c.url, "bench")
        try:
            await until_leads(directory)
            await c.warm_up()
            os.kill(directory.pid, signal.SIGSTOP)
            for number in range(2 * BRANCHES, 2 * BRANCHES + steps):
                for stream, message in c.agents.step(number, time.time()):
                    c.publish(stream, message)
                if number % 200 == 0:
                    await asyncio.sleep(0)
            await c.flush()
            before = (await c.stored())[1]
            started = time.perf_counter()
            os.kill(directory.pid, signal.SIGCONT)
            await c.until_stored()
            spent = time.perf_counter() - started
            batches = (await c.stored())[1] - before
            return {
                "placements_per_s": steps / spent, "steps_per_batch": steps / max(1, batches),
                "directory_rss_mb": rss_mb(directory.pid),
            }  # fmt: skip
        finally:
            directory.kill()


async def lag(seconds: float, rate: float = 200.0) -> dict[str, float]:
    """From publishing a placement to its being stored, seen by a reader of the counts that are sent after."""
    async with cluster() as c:
        directory = DirectoryProcess(c.url, "bench")
        try:
            await until_leads(directory)
            await c.warm_up()
            reader = c.bus.reader({})
            await reader.follow(*(f"counts:{node}" for node in c.agents._nodes))
            sent: dict[int, float] = {}
            found: list[float] = []

            async def listen() -> None:
                while True:
                    for event in await reader.read(0.5):
                        now = time.perf_counter()
                        pages = np.frombuffer(getattr(event.message, "positive", b""), dtype="<i8")
                        for page in pages.tolist():
                            at = sent.pop(page, None)
                            if at is not None:
                                found.append(now - at)

            listening = asyncio.ensure_future(listen())
            cpu, begun, own = cpu_s(directory.pid), time.perf_counter(), time.process_time()
            total = int(seconds * rate)
            for i in range(total):
                number = 2 * BRANCHES + i
                messages = c.agents.step(number, time.time())
                # The last page of the step is new on its node: its count tells when the step was stored.
                request = messages[0][1]
                assert isinstance(request, BranchRequest)
                page = int(np.frombuffer(request.pages, dtype="<i8")[-1])
                for stream, message in messages:
                    c.publish(stream, message)
                sent[page] = time.perf_counter()
                await asyncio.sleep(max(0.0, begun + (i + 1) / rate - time.perf_counter()))
            passed = time.perf_counter() - begun
            used, own = (cpu_s(directory.pid) - cpu) / passed, (time.process_time() - own) / passed
            async with asyncio.timeout(10.0):
                while sent:
                    await asyncio.sleep(0.01)
            listening.cancel()
            ms = np.array(found) * 1000
            return {
                "p50_ms": float(np.percentile(ms, 50)), "p99_ms": float(np.percentile(ms, 99)),
                "max_ms": float(ms.max()), "placements": float(len(found)), "directory_cores": used,
                "load_cores": own,
            }  # fmt: skip
        finally:
            directory.kill()


async def start(pages: int = 1_000_000) -> dict[str, float]:
    """A million counted pages: written by one directory, found by the next."""
    async with cluster() as c:
        first = DirectoryProcess(c.url, "bench")
        try:
            await until_leads(first)
            steps = pages // STEP_PAGES + BRANCHES
            for number in range(steps):
                for stream, message in c.agents.step(number, time.time()):
                    c.publish(stream, message)
                if number % 1000 == 999:
                    await c.flush()
                    await c.until_stored()
            await c.flush()
            await c.until_stored()
        finally:
            first.kill()
        counted = sum([await c.bus.redis.hlen(c.bus.key("count", node)) for node in c.agents._nodes])
        await c.bus.redis.delete(c.bus.key("lease", "directory"))
        started = time.perf_counter()
        second = DirectoryProcess(c.url, "bench")
        try:
            await until_leads(second)
            spent = time.perf_counter() - started
            return {"seconds": spent, "counted_pages": float(counted), "rss_mb": rss_mb(second.pid)}
        finally:
            second.kill()


async def takeover(trials: int = 3) -> dict[str, float]:
    """The longest time without count updates when the leader is killed, in lease periods."""
    gaps: list[float] = []
    async with cluster() as c:
        running = [DirectoryProcess(c.url, "bench")]
        try:
            await until_leads(running[0])
            await c.warm_up()
            reader = c.bus.reader({})
            await reader.follow(*(f"counts:{node}" for node in c.agents._nodes))
            stamps: list[float] = []
            steps = 2 * BRANCHES
            stop = asyncio.Event()

            async def load() -> None:
                nonlocal steps
                while not stop.is_set():
                    for stream, message in c.agents.step(steps, time.time()):
                        c.publish(stream, message)
                    steps += 1
                    await asyncio.sleep(0.02)

            async def listen() -> None:
                while True:
                    if await reader.read(0.5):
                        stamps.append(time.perf_counter())

            tasks = [asyncio.ensure_future(load()), asyncio.ensure_future(listen())]
            for _ in range(trials):
                running.append(DirectoryProcess(c.url, "bench"))
                await asyncio.sleep(3.0)
                killed = time.perf_counter()
                running.pop(0).kill()
                await until_leads(running[0])
                await asyncio.sleep(1.0)
                before = max(at for at in stamps if at <= killed)
                after = min(at for at in stamps if at > killed + 0.2)
                gaps.append(after - before)
            stop.set()
            for task in tasks:
                task.cancel()
        finally:
            for process in running:
                process.kill()
    return {"worst_gap_s": max(gaps), "lease_periods": max(gaps) / LEASE_S}


# ------------------------------------------------------------------------------------ memory


def _churn(pages: int, out: multiprocessing.connection.Connection) -> None:
    """Store, count, release and remove pages in a directory; the resident set along the way."""
    directory, feed = Directory(1e9, 10.0), Feed()
    agents = Agents(branches=1)
    begin(directory, agents, feed)
    rng = np.random.default_rng(2)
    size = 10_000

    def branch(number: int) -> np.ndarray:
        return np.random.default_rng(number).integers(-(2**63), 2**63 - 1, size, dtype=np.int64)

    del rng
    steps: list[Callable[[int], list[tuple[str, StreamMessage]]]] = [
        lambda i: [
            ("branch", BranchRequest(f"b{i}", 0, 0, pack_pages(branch(i)), t=1.0 + i)),
            ("branch", BranchPlaced(f"b{i}", f"n{i % NODES}", Phase.PREFILL, 1.0 + i)),
            (f"kv:n{i % NODES}", PagesStored(Tier.L2, pack_pages(branch(i)))),
        ],
        lambda i: [("branch", BranchEnded(f"b{i}", 2.0 + i))],
        lambda i: [(f"kv:n{i % NODES}", PagesRemoved(Tier.L2, pack_pages(branch(i))))],
    ]
    for i in range(20):  # what the code itself needs
        for step in steps:
            for stream, message in step(i):
                directory.apply(feed.event(stream, message), 0.0)
            directory.take()
    gc.collect()
    give_back_memory()  # as every service does once a minute
    begun = rss_mb()
    most = begun
    for step in steps:
        for i in range(100, 100 + pages // size):
            for stream, message in step(i):
                directory.apply(feed.event(stream, message), 0.0)
            directory.take()
        most = max(most, rss_mb())
        if step is steps[0]:
            held = len(directory.index), sum(directory.counts.counted_pages(f"n{k}") for k in range(NODES))
            assert held == (pages, pages), held
    gc.collect()
    give_back_memory()
    assert len(directory.index) == 0 and not directory.counts.nodes()
    out.send((begun, most, rss_mb()))


def churn(pages: int = 10_000_000) -> dict[str, float]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_churn, args=(pages, there))
    process.start()
    begun, most, ended = here.recv()
    process.join()
    return {
        "start_mb": begun, "most_mb": most, "end_mb": ended, "end_over_start": ended / begun,
        "bytes_a_page": (most - begun) * 1e6 / pages,
    }  # fmt: skip


# ------------------------------------------------------------------------------------ table

BOUNDS: dict[str, tuple[str, str, float]] = {
    "memory": ("placements_per_s", ">=", 2000.0),
    "redis": ("placements_per_s", ">=", 500.0),
    "lag": ("p99_ms", "<", 50.0),
    "start": ("seconds", "<", 10.0),
    "takeover": ("lease_periods", "<", 2.0),
    "pages": ("end_over_start", "<=", 1.2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="What the directory's counting costs.")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", choices=list(BOUNDS), action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    runs: dict[str, Callable[[], dict[str, float]]] = {
        "memory": lambda: in_memory(args.seconds),
        "redis": lambda: asyncio.run(through_redis(int(600 * args.seconds))),
        "lag": lambda: asyncio.run(lag(args.seconds)),
        "start": lambda: asyncio.run(start()),
        "takeover": lambda: asyncio.run(takeover()),
        "pages": churn,
    }
    found: dict[str, dict[str, float]] = {}
    missed: list[str] = []
    for name in args.only or list(BOUNDS):
        found[name] = runs[name]()
        field, sign, bound = BOUNDS[name]
        value = found[name][field]
        good = {">=": value >= bound, "<": value < bound, "<=": value <= bound}[sign]
        if not good:
            missed.append(name)
        rest = "  ".join(f"{key} {number:,.4g}" for key, number in found[name].items() if key != field)
        print(
            f"{name:9} {field} {value:,.4g} ({sign} {bound:g}{'' if good else ', MISSED'})  {rest}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.check and missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
