"""`evolving up`: a whole cluster on one machine, one process a part, watched by this one.

Rules that hold here
- A child that ends on its own is reported with the end of its log and started again, with a wait that doubles
  up to `RESTART_MOST_S` and is forgotten once the child has lived for `SETTLED_S`.
- One Ctrl-C (or SIGTERM) stops everything: the router first, Redis last; what does not end in `STOP_S` is
  killed. If this process is killed, the kernel ends its children.
- Children write their logs to files in one folder; this process prints only what an operator must see.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec

from shared.bus import Bus
from shared.config import ConfigError, Doc, Settings, file_in, load
from shared.embedded import EmbeddedError, EmbeddedRedis, free_port
from shared.redis_client import redis_url, safe_url
from shared.split import parse_split
from shared.streams import BusError
from shared.timing import profile

STOP_S = 10.0
READY_S = 60.0
EXIT_BAD_SETTINGS = 2
SETTLED_S = 20.0
RESTART_FIRST_S, RESTART_MOST_S = 0.5, 15.0
_REDIS_VARIABLE = re.compile("EI_(.*_)?REDIS(_USERNAME|_PASSWORD|_PASSWORD_FILE)?")

# part -> where its settings are
PARTS = {
    "router": ("services.router.settings", "RouterSettings"),
    "directory": ("services.directory.settings", "DirectorySettings"),
    "planner": ("services.planner.settings", "PlannerSettings"),
    "telemetry": ("services.telemetry.settings", "TelemetrySettings"),
    "worker": ("worker.agent.settings", "WorkerSettings"),
}


class UpSettings(Settings, kw_only=True):
    redis: Annotated[str, Doc("Redis URL; empty starts an embedded one")] = ""
    nodes: Annotated[int, Doc("simulated workers")] = 4
    split: Annotated[str, Doc("split after the warm-up, such as 2P2D; empty for half and half")] = ""
    speedup: Annotated[float, Doc("simulated seconds per wall second")] = 20.0
    port: Annotated[int, Doc("port of the router, 0 for a free one")] = 8000
    page_port: Annotated[int, Doc("port of the live page, 0 for a free one")] = 8080
    profile: Annotated[str, Doc("timing profile of the workers")] = "glm-5.2-4xgb300"
    model: Annotated[str, Doc("name of the served model")] = "glm-5.2"
    warmup_s: Annotated[float, Doc("cluster seconds of collocated warm-up")] = 1800.0
    window_s: Annotated[float, Doc("cluster seconds of a planning window")] = 600.0
    slice_s: Annotated[float, Doc("cluster seconds of a slice of the window")] = 60.0
    logs: Annotated[str, Doc("folder for the children's logs; empty for a temporary one")] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        profile(self.profile)
        if not 1 <= self.nodes <= 64:
            raise ValueError(f"nodes must be 1 to 64, not {self.nodes}")
        if self.split:
            prefill, decode = parse_split(self.split)
            if prefill + decode != self.nodes:
                raise ValueError(
                    f"split {self.split} has {prefill + decode} nodes, but nodes is {self.nodes}"
                )


class _Child(msgspec.Struct):
    name: str
    argv: list[str]
    log: Path
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0


def _die_with_parent() -> None:
    """In the child: have the kernel send SIGTERM when the supervisor dies (Linux)."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class Supervisor:
    """Use `start`, then `wait` until stopped, then `stop`; `url` and `page` are the addresses."""

    def __init__(self, settings: UpSettings, *, config: str | None = None, quiet: bool = False) -> None:
        self.settings = settings
        self._config = config  # file that the children read too
        self._quiet = quiet
        self._redis: EmbeddedRedis | None = None
        self._children: list[_Child] = []
        self._watchers: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.stop_requested = asyncio.Event()
        self._own_logs = not settings.logs
        self.logs = Path(settings.logs or tempfile.mkdtemp(prefix="evolving-logs-"))
        self.redis_url = redis_url(settings)
        self.url = self.page = ""
        self._ready = False
        self._refused = ""  # why a child ended at once: another start would not help

    def say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)

    async def start(self) -> None:
        """Everything up and ready. Raises ConfigError, BusError or EmbeddedError."""
        s = self.settings
        self.logs.mkdir(parents=True, exist_ok=True)
        port = _claim_port(s.host, s.port, "port")
        page_port = _claim_port(s.host, s.page_port, "page-port")
        self.url, self.page = f"http://{s.host}:{port}", f"http://{s.host}:{page_port}/"
        if not self.redis_url:
            self._redis = await asyncio.to_thread(EmbeddedRedis().start)
            self.redis_url = self._redis.url
            self._watch(self._watch_redis(self._redis), "watch redis")
        bus = await Bus.connect(self.redis_url, s.cluster)
        await bus.close()
        common = [
            "--cluster", s.cluster, "--speedup", str(s.speedup), "--log-level", s.log_level,
            "--log-format", s.log_format,
        ]  # fmt: skip
        # Beyond loopback only the router, which asks for keys, and the page: not what asks nobody.
        open_to_all = ["--host", s.host]
        inner = ["--host", "::1" if ":" in s.host else "127.0.0.1"]
        if self._config:
            common += ["--config", self._config]
        self._add("directory", "services.directory", [*common, *inner, "--port", "0"])
        self._add("telemetry", "services.telemetry", [
            *common, *open_to_all, "--port", str(page_port), "--slice-s", str(s.slice_s),
        ])  # fmt: skip
        slices = max(2, round(s.window_s / s.slice_s))
        planner = [
            *common, *inner, "--port", "0", "--warmup-s", str(s.warmup_s), "--window-s", str(s.window_s),
            "--slices", str(slices),
        ]  # fmt: skip
        if s.split:
            planner += ["--initial-split", s.split.upper()]
        self._add("planner", "services.planner", planner)
        self._add("router", "services.router", [*common, *open_to_all, "--port", str(port)])
        for i in range(1, s.nodes + 1):
            self._add(f"worker-{i}", "worker.agent", [
                *common, *inner, "--port", "0", "--node", f"n{i}", "--profile", s.profile, "--model", s.model,
            ])  # fmt: skip
        for child in self._children:
            self._watch(self._run(child), f"run {child.name}")
        await self._until_ready()

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        why = "not started"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as http:
            while time.monotonic() < deadline:
                if self.stop_requested.is_set():
                    return
                if self._refused:
                    raise ConfigError(self._refused)
                try:
                    async with http.get(self.url + "/ei/v1/cluster") as answer:
                        closed = answer.status in (401, 403, 404)  # with keys, or an admin port
                        nodes = 0 if closed else len((await answer.json())["nodes"])
                    if closed:
                        async with http.get(self.url + "/readyz") as answer:
                            nodes = self.settings.nodes if answer.status == 200 else 0
                    async with http.get(self.page + "healthz") as answer:
                        page = answer.status == 200
                    if nodes == self.settings.nodes and page:
                        self._ready = True
                        return
                    why = f"{nodes} of {self.settings.nodes} workers registered"
                except (aiohttp.ClientError, OSError, TimeoutError, KeyError, ValueError) as error:
                    why = f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.1)
        raise ConfigError(f"the cluster was not ready after {READY_S:g} s ({why}); logs: {self.logs}")

    def _add(self, name: str, module: str, flags: list[str]) -> None:
        argv = [sys.executable, "-m", module, *flags]
        self._children.append(_Child(name, argv, self.logs / f"{name}.log"))

    def _watch(self, coro: object, name: str) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coro, name=name)  # type: ignore[arg-type]
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _run(self, child: _Child) -> None:
        wait_s = RESTART_FIRST_S
        while not self._stopping.is_set():
            started = time.monotonic()
            with child.log.open("ab") as log:
                begin = log.tell()
                child.process = await asyncio.create_subprocess_exec(
                    *child.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                    env=_child_environment(self.redis_url),
                )
            code = await child.process.wait()
            if self._stopping.is_set():
                return
            if code == EXIT_BAD_SETTINGS and not self._ready:
                told = _tail(child.log, begin)
                why = told[-1].removeprefix("evolving: ") if told else f"see {child.log}"
                self._refused = f"{child.name} refuses its settings: {why}"
                return
            if time.monotonic() - started > SETTLED_S:
                wait_s = RESTART_FIRST_S
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self.say(f"{child.name} ended ({how}); starting it again in {wait_s:g} s")
            for line in _tail(child.log, begin):
                self.say(f"    {line}")
            child.restarts += 1
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, RESTART_MOST_S)

    async def _watch_redis(self, server: EmbeddedRedis) -> None:
        while not self._stopping.is_set():
            await asyncio.sleep(0.5)
            if not server.running and not self._stopping.is_set():
                self.say("redis ended; starting it again")
                try:
                    await asyncio.to_thread(server.start)
                except EmbeddedError as error:
                    self.say(f"    {error}")
                    await asyncio.sleep(2.0)

    def pid(self, name: str) -> int | None:
        """Process id of a child, None while it is not running."""
        for child in self._children:
            if child.name == name and child.process is not None and child.process.returncode is None:
                return child.process.pid
        return None

    async def stop(self) -> None:
        self._stopping.set()
        order = sorted(self._children, key=lambda c: (c.name != "router", not c.name.startswith("worker")))
        for child in order:
            if child.process is not None and child.process.returncode is None:
                child.process.terminate()
                if child.name == "router":
                    await self._ended([child], STOP_S)
        await self._ended(order, STOP_S)
        for task in list(self._watchers):
            task.cancel()
        if self._watchers:
            await asyncio.wait(self._watchers)
        if self._redis is not None:
            await asyncio.to_thread(self._redis.stop)
        if self._own_logs:
            shutil.rmtree(self.logs, ignore_errors=True)

    async def _ended(self, children: list[_Child], timeout_s: float) -> None:
        waits = [c.process.wait() for c in children if c.process is not None]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*waits)
        except TimeoutError:
            for child in children:
                if child.process is not None and child.process.returncode is None:
                    self.say(f"{child.name} did not stop in {timeout_s:g} s; killing it")
                    child.process.kill()
                    await child.process.wait()


def _child_environment(redis: str) -> dict[str, str]:
    """This process's environment: a part's own settings in it hold where no flag is given. With the URL of Redis,
    which is no flag: it may hold a password, and every user sees the flags of a process."""
    kept = {name: value for name, value in os.environ.items() if not _REDIS_VARIABLE.fullmatch(name)}
    kept["EI_REDIS"] = redis
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        kept.setdefault(name, "1")
    return kept


def _claim_port(host: str, port: int, flag: str) -> int:
    """The port, or a free one for 0. Raises ConfigError when it is taken."""
    if port == 0:
        return free_port(host)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --{flag}, 0 for a free one"
            ) from None
    return port


def _tail(log: Path, begin: int, lines: int = 5) -> list[str]:
    """The last lines of the log after byte `begin`."""
    try:
        return log.read_bytes()[begin:].decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


async def _up(settings: UpSettings, config: str | None) -> int:
    supervisor = Supervisor(settings, config=config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.stop_requested.set)
    code = 0
    try:
        await supervisor.start()
        if not supervisor.stop_requested.is_set():
            print(f"router     {supervisor.url}/v1  (OpenAI API; model {settings.model})")
            print(f"live page  {supervisor.page}")
            print(f"redis      {safe_url(supervisor.redis_url)}")
            print(f"logs       {supervisor.logs}")
            print(
                f"{settings.nodes} nodes ready, {settings.speedup:g} times faster than their model. Ctrl-C stops."
            )
            sys.stdout.flush()
        await supervisor.stop_requested.wait()
        print("stopping", flush=True)
    except (ConfigError, BusError, EmbeddedError) as error:
        print(f"evolving: {error}", file=sys.stderr)
        code = 2
    finally:
        await supervisor.stop()
    return code


def check_parts(argv: list[str]) -> str | None:
    """The settings file of `argv`, every part's settings in it and in the environment checked.

    Raises ConfigError: better here, in one line, than by a child that ends again and again.
    """
    file = file_in(argv)
    for name in PARTS:
        module, struct = PARTS[name]
        load(getattr(importlib.import_module(module), struct), name, ["--config", file] if file else [])
    return file


def main(argv: list[str]) -> int:
    settings = load(
        UpSettings, "up", argv, summary="Run a whole cluster with simulated workers on this machine."
    )
    return asyncio.run(_up(settings, check_parts(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
