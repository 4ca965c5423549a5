"""A cluster of real processes in which something breaks all the time, and agents that work through it.

Agents are what harnesses are: the official clients of OpenAI and Anthropic behind a TCP load balancer over two
routers. A client repeats by itself what failed before its answer began (`RETRIES` times); an agent asks once more when
a stream broke in its middle. Whatever else goes wrong is a failure, and so is an attempt beyond `ATTEMPT_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from shared.embedded import free_port
from tests.chaos_agents import FREEZE_S, MODEL, RETRIES, Agent, Asked, Clients, Happened, Said
from tests.conftest import eventually
from tests.crash_cluster import Process

NODES = ("n1", "n2", "n3", "n4")
READY_S = 90.0  # on a machine that has much else to do


class ChaosProcess(Process):
    starts = 0
    back = True  # nothing is wrong with it

    async def start(self) -> None:
        await super().start()
        self.starts += 1

    @property
    def pid(self) -> int:
        return self._process.pid

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def rss_mb(self) -> float | None:
        """None while it does not run."""
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1000
        return None


class LoadBalancer:
    """Passes connections on to the routers in turn, to the next one when one refuses."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._turn = itertools.count()
        self._pipes: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LoadBalancer:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._pipes:
            task.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._pass_on(reader, writer))
        self._pipes.add(task)
        task.add_done_callback(self._pipes.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            turn = next(self._turn)
            for number in range(len(self._ports)):
                with contextlib.suppress(OSError):
                    port = self._ports[(turn + number) % len(self._ports)]
                    up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
                    break
            else:
                return
            try:
                ways = [
                    asyncio.ensure_future(self._pipe(reader, up_writer)),
                    asyncio.ensure_future(self._pipe(up_reader, writer)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
            finally:
                up_writer.close()
        finally:
            writer.close()

    @staticmethod
    async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()


class ChaosCluster:
    """Two routers, two directories, planner, telemetry and four nodes over one Redis."""

    def __init__(self, redis_url: str, name: str, folder: Path, http: aiohttp.ClientSession) -> None:
        self.redis_url, self.name, self.http = redis_url, name, http

        def make(part: str, module: str, *words: str, cluster: str = name) -> ChaosProcess:
            # Slow enough that streams last for seconds, so that they break.
            common = ("--redis", redis_url, "--cluster", cluster, "--speedup", "0.25")
            return ChaosProcess(part, folder, free_port(), module, *common, *words)

        worker = ("--profile", "tiny", "--model", MODEL, "--l2-tokens", "16384")
        self.routers = [make(f"router-{i}", "services.router") for i in (1, 2)]
        self.directories = [make(f"directory-{i}", "services.directory") for i in (1, 2)]
        self.planner = make("planner", "services.planner", "--warmup-s", "1", "--initial-split", "2P2D")
        self.telemetry = make("telemetry", "services.telemetry")
        self.workers = [make(f"worker-{node}", "worker.agent", "--node", node, *worker) for node in NODES]
        # Stands alone, and nothing happens to it.
        self.reference = make(
            "reference", "worker.agent", "--node", "r", *worker, "--speedup", "50", cluster=name + "r"
        )

    @property
    def processes(self) -> list[ChaosProcess]:
        return [*self.routers, *self.directories, self.planner, self.telemetry, *self.workers]

    async def start(self) -> None:
        await asyncio.gather(*(process.start() for process in [*self.processes, self.reference]))
        await self.wait_ready()
        await eventually(lambda: self.reference.ready(self.http), READY_S)

    async def wait_ready(self) -> None:
        """All processes are, and each router knows all nodes."""
        for process in self.processes:
            await eventually(lambda p=process: p.ready(self.http), READY_S)
        for router in self.routers:
            await eventually(lambda r=router: self._knows_all(r), READY_S)

    async def _knows_all(self, router: Process) -> bool:
        async with self.http.get(router.url + "/ei/v1/cluster") as answer:
            return len((await answer.json())["nodes"]) == len(NODES)

    async def stop(self) -> None:
        for process in [*self.processes, self.reference]:
            if process.starts:
                await process.kill()

    async def leader(self) -> ChaosProcess:
        async def found() -> ChaosProcess | None:
            for process in self.directories:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    if (await self.metrics(process)).get("ei_directory_leader"):
                        return process
            return None

        process = await eventually(found, READY_S)
        assert isinstance(process, ChaosProcess)
        return process

    async def metrics(self, process: Process) -> dict[str, float]:
        """Sums over all labels."""
        sums: Counter[str] = Counter()
        async with self.http.get(process.url + "/metrics") as answer:
            for family in text_string_to_metric_families(await answer.text()):
                for sample in family.samples:
                    sums[sample.name] += sample.value
        return dict(sums)

    async def left_over(self) -> list[str]:
        """What there is and should not be while no request is in flight."""
        wrong = []
        for processes, names in (
            (self.routers, ("ei_router_in_flight", "ei_router_waiting")),
            (
                self.workers,
                (
                    "ei_worker_requests", "ei_worker_queued_requests", "ei_worker_kv_pinned_pages",
                    "ei_worker_kv_reserved_pages", "ei_worker_lent_pages",
                ),
            ),
        ):  # fmt: skip
            for process in processes:
                metrics = await self.metrics(process)
                wrong += [f"{process.name}: {name} is {metrics[name]:g}" for name in names if metrics[name]]
        return wrong

    async def verify(self) -> tuple[int, str]:
        """Exit code and output of `evolving directory verify`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli", "directory", "verify",
            "--redis", self.redis_url, "--cluster", self.name,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    def complaints(self) -> list[str]:
        """Lines in the logs that no crash of another process excuses."""
        words = ("Traceback", "request_failed", "task_failed", "never retrieved")
        found = []
        for process in [*self.processes, self.reference]:
            lines = process.log.read_text(errors="replace").splitlines()
            for number, line in enumerate(lines):
                # A traceback ends with the error: that a caller hung up is nobody's fault here.
                ends = next((end for end in lines[number + 1 :] if not end.startswith(" ")), "")
                if any(word in line for word in words) and "ClientConnectionResetError" not in ends:
                    found.append(f"{process.name}: {line[:300]} {ends[:300]}")
        return found


# ---------------------------------------------------------------------- what breaks


KINDS = (
    "worker killed", "router killed", "leader killed", "worker frozen", "planner killed", "telemetry killed",
    "router frozen",
)  # fmt: skip


class Fault(msgspec.Struct):
    kind: str
    victim: str
    at: float
    back_s: float = 0.0  # until it was ready again


class Chaos:
    """Something breaks every `every_s`, in turn; but never two of a kind at a time, for which there are but two.

    The first router and the nodes n1 and n3 are killed; the others are frozen only, so that a process of each kind
    lives from the beginning to the end and would show what it leaks.
    """

    def __init__(self, cluster: ChaosCluster, every_s: float) -> None:
        self._cluster, self._every_s = cluster, every_s
        self.faults: list[Fault] = []

    async def run(self, until: float) -> None:
        """The last thing breaks before that time of the monotonic clock; returns when all is ready again."""
        cluster = self._cluster
        killed = itertools.cycle((cluster.workers[0], cluster.workers[2]))
        frozen = itertools.cycle((cluster.workers[1], cluster.workers[3]))
        async with asyncio.TaskGroup() as recoveries:
            for kind in itertools.cycle(KINDS):
                part, how = kind.split()
                peers = {
                    "worker": cluster.workers,
                    "router": cluster.routers,
                    "leader": cluster.directories,
                    "planner": [cluster.planner],
                    "telemetry": [cluster.telemetry],
                }[part]
                for process in peers:
                    await eventually(lambda p=process: p.back and p.ready(cluster.http), READY_S, 0.1)
                at = time.monotonic()
                if at >= until:
                    break
                if part == "worker":
                    victim = next(killed if how == "killed" else frozen)
                elif part == "router":
                    victim = cluster.routers[how == "frozen"]
                else:
                    victim = await cluster.leader() if part == "leader" else peers[0]
                fault = Fault(kind, victim.name, time.monotonic())
                self.faults.append(fault)
                victim.back = False
                recoveries.create_task(self._strike(victim, fault))
                await asyncio.sleep(max(0.0, at + self._every_s - time.monotonic()))

    async def _strike(self, victim: ChaosProcess, fault: Fault) -> None:
        if fault.kind.endswith("killed"):
            await victim.kill()
            await victim.start()
        else:
            victim.freeze()
            try:
                await asyncio.sleep(FREEZE_S)
            finally:
                victim.thaw()
        await eventually(lambda: victim.ready(self._cluster.http), READY_S, 0.1)
        fault.back_s = time.monotonic() - fault.at
        victim.back = True


# ---------------------------------------------------------------------- what is measured


class Memory:
    """Resident memory of every process, once a second."""

    def __init__(self, processes: Sequence[ChaosProcess]) -> None:
        self._processes = processes
        self._seen: dict[str, list[tuple[float, float]]] = {process.name: [] for process in processes}
        self.names = list(self._seen)

    async def watch(self) -> None:
        while True:
            for process in self._processes:
                rss_mb = process.rss_mb()
                if rss_mb is not None:
                    self._seen[process.name].append((time.monotonic(), rss_mb))
            await asyncio.sleep(1.0)

    def between(self, name: str, begin: float, end: float) -> float:
        """The median, in MB."""
        return statistics.median([mb for at, mb in self._seen[name] if begin <= at <= end] or [0.0])


class Outcome(NamedTuple):
    begun: float
    ended: float
    faults: list[Fault]
    agents: list[Agent]
    memory: Memory

    @property
    def answers(self) -> list[tuple[Asked, Said]]:
        return [pair for agent in self.agents for pair in agent.answers]

    @property
    def failures(self) -> list[str]:
        """Each with the fault before it."""
        found = sorted(failure for agent in self.agents for failure in agent.failures)
        return [f"{at - self.begun:.1f} s, {self._after(at)}: {why}" for at, why in found]

    @property
    def happened(self) -> list[Happened]:
        return sorted(happened for agent in self.agents for happened in agent.happened)

    def _after(self, at: float) -> str:
        before = [fault for fault in self.faults if fault.at <= at]
        return (
            f"{at - before[-1].at:.1f} s after {before[-1].kind} ({before[-1].victim})"
            if before
            else "before all"
        )

    def table(self) -> str:
        took_s = [took for agent in self.agents for took in agent.took_s]
        happened = Counter(one.what for one in self.happened)
        streams = sum(asked.stream for asked, _ in self.answers)
        lines = [
            f"{len(self.answers)} requests in {self.ended - self.begun:.0f} s, {streams} of them streams; "
            f"{len(self.failures)} failed",
            f"{happened['retry']} repeated by the clients, {happened['event'] + happened['cut']} streams broken "
            f"({happened['event']} with an error event, {happened['cut']} cut)",
            f"slowest request {max((took for _, took in took_s), default=0.0):.1f} s, longest attempt "
            f"{max(agent.longest_attempt_s for agent in self.agents):.1f} s",
            "",
            f"{'fault':<18}{'times':>6}{'ready after s':>15}{'repeated':>10}{'events':>8}{'cuts':>6}{'slowest s':>11}",
        ]
        for kind in dict.fromkeys(fault.kind for fault in self.faults):
            # What came until the next fault is this one's.
            spans = [
                (fault.at, after.at if after else self.ended)
                for fault, after in itertools.zip_longest(self.faults, self.faults[1:])
                if fault.kind == kind
            ]

            def within(at: float, spans: list[tuple[float, float]] = spans) -> bool:
                return any(begin <= at < end for begin, end in spans)

            whats = Counter(one.what for one in self.happened if within(one.at))
            back_s = statistics.mean(fault.back_s for fault in self.faults if fault.kind == kind)
            slowest_s = max((took for at, took in took_s if within(at)), default=0.0)
            lines.append(
                f"{kind:<18}{len(spans):>6}{back_s:>15.1f}{whats['retry']:>10}{whats['event']:>8}{whats['cut']:>6}"
                f"{slowest_s:>11.1f}"
            )
        lines += ["", f"{'memory':<18}{'after a fifth MB':>18}{'at the end MB':>15}"]
        lines += [f"{name:<18}{first:>18.1f}{last:>15.1f}" for name, first, last in self.grown()]
        return "\n".join(lines)

    def grown(self) -> list[tuple[str, float, float]]:
        """Process, MB after the first fifth, MB at the end. One that had just been started then is compared with
        what its peers had."""
        fifth = self.begun + (self.ended - self.begun) / 5
        names = self.memory.names
        first = {name: self.memory.between(name, fifth - 3.0, fifth + 3.0) for name in names}
        return [
            (
                name,
                max(first[peer] for peer in names if peer.split("-")[0] == name.split("-")[0]),
                self.memory.between(name, self.ended - 5.0, self.ended),
            )
            for name in names
        ]


async def through_chaos(
    cluster: ChaosCluster, seconds: float, every_s: float, *, agents: int = 10, retries: int = RETRIES
) -> Outcome:
    """Agents work for so long while things break; what came of it, once they have their last answers."""
    begun = time.monotonic()
    stop = asyncio.Event()
    chaos = Chaos(cluster, every_s)
    memory = Memory(cluster.processes)
    watching = asyncio.ensure_future(memory.watch())
    async with LoadBalancer([router.port for router in cluster.routers]) as balancer:
        team = [Agent(number, balancer.url, retries) for number in range(agents)]
        working = [asyncio.ensure_future(agent.run(stop)) for agent in team]
        try:
            await asyncio.sleep(every_s)
            await chaos.run(begun + seconds - 2 * every_s)
            await asyncio.sleep(every_s)  # of peace
            await asyncio.sleep(max(0.0, begun + seconds - time.monotonic()))
            stop.set()
            await asyncio.gather(*working)
        finally:
            for task in [*working, watching]:
                task.cancel()
            await asyncio.gather(*working, watching, return_exceptions=True)
    return Outcome(begun, time.monotonic(), chaos.faults, team, memory)


async def wrong_answers(url: str, answers: Sequence[tuple[Asked, Said]], at_once: int = 16) -> list[str]:
    """What an undisturbed worker says otherwise."""
    wrong = []
    left = iter(answers)

    async def compare() -> None:
        clients = Clients(url, RETRIES)
        try:
            for asked, said in left:
                should = await clients.ask(asked._replace(stream=False), {})
                if said != should:
                    wrong.append(f"{asked} got {said}, should be {should}")
        finally:
            await clients.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(compare())
    return wrong


@contextlib.asynccontextmanager
async def chaos_cluster(redis_url: str, name: str, folder: Path) -> AsyncIterator[ChaosCluster]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as http:
        cluster = ChaosCluster(redis_url, name, folder, http)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()
