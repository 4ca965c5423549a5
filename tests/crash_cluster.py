"""A small cluster of real processes that lose members, and agents that go on all the same.

What the directory has in the end is compared with a directory that reads the same streams in one go, without a
crash, and with `evolving directory verify`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec

from services.directory.core import Directory
from services.directory.leader import in_order_key
from services.directory.verify import verify
from shared.bus import Bus
from shared.embedded import free_port
from shared.kvsnapshot import fetch_snapshot
from shared.messages import NodeState, unpack_pages
from shared.store import DirectoryStore
from shared.streams import Event, read_entry
from tests.conftest import eventually

NODES = {"n1": "prefill", "n2": "prefill", "n3": "decode", "n4": "decode"}
LEASE_S = 1.0


class Process:
    def __init__(self, name: str, folder: Path, port: int, *words: str) -> None:
        self.name, self.port = name, port
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        self._words = words

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *self._words, "--port", str(self.port), stderr=log, stdout=log
            )

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def ready(self, http: aiohttp.ClientSession) -> bool:
        assert self.alive, f"{self.name} ended: {self.log.read_text()[-2000:]}"
        try:
            async with http.get(self.url + "/readyz") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


class CrashCluster:
    """Two directories, two routers and four nodes over one Redis."""

    def __init__(
        self, redis_url: str, name: str, folder: Path, bus: Bus, http: aiohttp.ClientSession
    ) -> None:
        self.redis_url, self.name, self.bus, self.http = redis_url, name, bus, http
        # A directory that reads everything that was ever sent, in one go whenever all is quiet.
        self._without_crash = Directory(1e9, 1e9)
        self._unapplied: list[Event] = []
        self._positions: dict[str, str] = {}
        self._seen: dict[tuple[str, str], int] = {}
        common = ("--redis", redis_url, "--cluster", name, "--speedup", "20")

        def make(part: str, module: str, *words: str) -> Process:
            return Process(part, folder, free_port(), module, *common, *words)

        self.directories = [
            make(
                f"directory-{i}", "services.directory", "--lease-ttl-s", str(LEASE_S), "--node-grace-s", "60"
            )
            for i in (1, 2)
        ]
        self.routers = [make(f"router-{i}", "services.router") for i in (1, 2)]
        # Host memory for about a third of what the agents have: pages leave all the time.
        self.workers = [
            make(
                f"worker-{node}", "worker.agent", "--node", node, "--phase", phase, "--profile", "tiny",
                "--l1-tokens", "4096", "--l2-tokens", "8192",
            )
            for node, phase in NODES.items()
        ]  # fmt: skip

    @property
    def processes(self) -> list[Process]:
        return [*self.directories, *self.routers, *self.workers]

    async def start(self) -> None:
        await asyncio.gather(*(process.start() for process in self.processes))
        await self.wait_ready()

    async def wait_ready(self) -> None:
        for process in self.processes:
            await eventually(lambda p=process: p.ready(self.http), 60.0)

    async def stop(self) -> None:
        for process in self.processes:
            await process.kill()

    async def leader(self) -> Process | None:
        for process in self.directories:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self.http.get(process.url + "/metrics") as answer:
                    if "ei_directory_leader 1.0" in await answer.text():
                        return process
        return None

    # ------------------------------------------------------------------ what must hold in the end

    async def check(self, command: bool) -> None:
        """Once all is quiet: no difference, the counts of a run without a crash, and the workers know them.

        `command`: let `evolving directory verify` look, too.
        """
        deadline = time.monotonic() + 30.0
        differs: str | None = "messages still come"
        while differs is not None:
            assert time.monotonic() < deadline, f"{differs}\n{self._logs()}"
            await asyncio.sleep(0.1)
            if not await self._read():
                differs = await self._differs()
        if not command:
            return
        verified = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli", "directory", "verify",
            "--redis", self.redis_url, "--cluster", self.name,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output = (await verified.communicate())[0].decode()
        assert verified.returncode == 0, output
        assert "no difference" in output

    def _logs(self) -> str:
        return "\n".join(p.log.read_text()[-3000:] for p in self.directories)

    async def _differs(self) -> str | None:
        """What is not as it should be."""
        for event in sorted(self._unapplied, key=in_order_key):
            self._without_crash.apply(event, 0.0)
        self._unapplied = []
        wanted = self._without_crash
        assert not wanted.unsynced(), wanted.unsynced()
        stored = await DirectoryStore(self.bus).load_at_once()
        positions = msgspec.msgpack.decode(stored.state.get("streams", b"\x80"), type=dict[str, str])
        for stream in ("branch", "roles"):
            for event in await self.bus.last(stream, 1):
                if positions.get(stream) != event.position:
                    return f"{stream} is read to {positions.get(stream)}, its end is {event.position}"
        tables = {
            node: dict(zip(found.pages.tolist(), found.counts.tolist(), strict=True))
            for node, found in stored.counts.items()
            if found.pages.size
        }
        should = {node: wanted.counts.table(node) for node in wanted.counts.nodes()}
        if tables != should:
            return f"counts differ: {difference(tables, should)}"
        if set(stored.branches) != {branch.name for branch in wanted.table}:
            return f"branches differ: {set(stored.branches) ^ {branch.name for branch in wanted.table}}"
        infos = await self.bus.nodes()
        if set(infos) != set(NODES):
            return f"registered: {set(infos)}"
        snapshots = {node: await fetch_snapshot(self.http, info) for node, info in infos.items()}
        report = verify(stored, snapshots)
        if report.differences:
            return f"verify says: {report.differences[:5]}"
        for node, snapshot in snapshots.items():
            l2 = set(unpack_pages(snapshot.l2).tolist())
            (state,) = await self.bus.last(f"state:{node}", 1)
            assert isinstance(state.message, NodeState)
            known, right = state.message.l2_counted_pages, len(l2 & set(tables.get(node, {})))
            if known != right:
                return f"{node} knows of {known} counted pages in its host memory, it has {right}"
        return None

    async def _read(self) -> int:
        """Read what was sent since the last time; how many messages that were."""
        before = len(self._unapplied)
        for stream in ("branch", "roles", "resync", *(f"kv:{node}" for node in NODES)):
            first = f"({self._positions[stream]}" if stream in self._positions else "-"
            for entry_id, fields in await self.bus.redis.xrange(self.bus.key("stream", stream), min=first):
                self._positions[stream] = entry_id.decode()
                event = read_entry(stream, entry_id, fields)
                assert event is not None
                key = (stream, event.producer)
                last = self._seen.get(key, 0)
                assert event.seq <= last + 1, f"{key}: message {last + 1} was lost, {event.seq} came"
                if event.seq > last:
                    self._seen[key] = event.seq
                    self._unapplied.append(event)
        return len(self._unapplied) - before


def difference(found: dict[str, dict[int, int]], should: dict[str, dict[int, int]]) -> str:
    parts = []
    for node in sorted({*found, *should}):
        pages = found.get(node, {}).items() ^ should.get(node, {}).items()
        if pages:
            parts.append(f"{node}: {len(pages)} of {len(should.get(node, {}))}")
    return ", ".join(parts)


class Agent:
    """One branch after the other: steps that append, now and then a compaction, sub-agents that fork."""

    def __init__(self, cluster: CrashCluster, name: str, seed: int) -> None:
        self._cluster, self._name = cluster, name
        self._rng = random.Random(seed)
        self._number = 0
        self.answered = self.tries = 0
        self._system = [7 + i % 50 for i in range(96)]

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._number += 1
            branch = f"{self._name}.{self._number}"
            prompt = self._system + self._text(64)
            steps = self._rng.randint(2, 8)
            for step in range(steps):
                if stop.is_set():
                    return  # the branch stays active
                if self._rng.random() < 0.15:
                    prompt = self._system + self._text(48)  # compaction
                if self._rng.random() < 0.15:
                    await self._ask(branch + ".sub", prompt[:128] + self._text(32), True, stop)
                last = step == steps - 1
                prompt = prompt + await self._ask(branch, prompt, last, stop) + self._text(40)
                await asyncio.sleep(self._rng.uniform(0.0, 0.05))

    def _text(self, tokens: int) -> list[int]:
        return [self._rng.randrange(100, 20_000) for _ in range(tokens)]

    async def _ask(self, branch: str, prompt: list[int], final: bool, stop: asyncio.Event) -> list[int]:
        """The answer's length in made-up tokens. Asks until some router answers."""
        headers = {"X-EI-Branch": branch} | ({"X-EI-Branch-Final": "1"} if final else {})
        body = {"model": "glm-5.2", "prompt": prompt, "max_tokens": 16}
        async with asyncio.timeout(90.0):
            while True:
                router = self._rng.choice(self._cluster.routers)
                self.tries += 1
                try:
                    async with self._cluster.http.post(
                        router.url + "/v1/completions", json=body, headers=headers,
                        timeout=aiohttp.ClientTimeout(total=20.0),
                    ) as answer:  # fmt: skip
                        if answer.status == 200:
                            await answer.read()
                            self.answered += 1
                            return self._text(16)
                        assert answer.status >= 429, await answer.text()
                except (aiohttp.ClientError, TimeoutError, OSError):
                    pass
                if stop.is_set():
                    return []
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def crash_cluster(redis_url: str, name: str, folder: Path) -> AsyncIterator[CrashCluster]:
    bus = await Bus.connect(redis_url, name)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as http:
        cluster = CrashCluster(redis_url, name, folder, bus, http)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()
            await bus.close()


async def trial(
    cluster: CrashCluster,
    seed: int,
    strike: Callable[[random.Random], object],
    *,
    command: bool = False,
    agents: int = 4,
) -> int:
    """Agents work, `strike` hits at a random moment, agents go on; then all must be right. Returns requests served."""
    rng = random.Random(seed)
    stop = asyncio.Event()
    team = [Agent(cluster, f"t{seed}a{i}", seed * 100 + i) for i in range(agents)]
    working = [asyncio.ensure_future(agent.run(stop)) for agent in team]
    await asyncio.sleep(rng.uniform(0.1, 1.2))
    result = strike(rng)
    if asyncio.iscoroutine(result):
        await result
    await cluster.wait_ready()
    before = [agent.answered for agent in team]
    await eventually(lambda: all(a.answered >= n + 2 for a, n in zip(team, before, strict=True)), 60.0)
    stop.set()
    await asyncio.gather(*working)
    await cluster.check(command)
    return sum(agent.answered for agent in team)
