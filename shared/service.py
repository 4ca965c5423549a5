"""The life that all five processes share: startup, main loop, shutdown.

Rules that hold here
- The HTTP server listens before `startup`, so `/healthz` answers at once; `/readyz` says 503 with the reason
  until `ready()` returns None.
- SIGINT and SIGTERM end the main loop once; `shutdown` then has `shutdown_s` seconds. A second signal ends the
  process at once.
- Every task is owned: `spawn` keeps it, and one that fails stops the service with exit code 1 and its
  traceback, rather than leaving half a service running.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import aiohttp
import prometheus_client
from aiohttp import web

from shared import config
from shared import log as logging
from shared.bus import Bus
from shared.clock import Clock
from shared.config import ConfigError, Settings
from shared.messages import ServiceInfo
from shared.redis_client import redis_url
from shared.streams import Backoff, BusError

SHUTDOWN_S = 10.0
GC_OBJECTS = 20_000  # made between two looks for cycles: at 700 a busy service looks all the time
MEMORY_S = 60.0  # between returns of freed memory
REGISTER_TTL_S = 5.0
MAX_BODY_BYTES = 64 * 2**20


def give_back_memory() -> None:
    """Return freed memory to the system, which the C library keeps where something small lies behind it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def http_client(timeout_s: float = 10.0, connections: int = 256) -> aiohttp.ClientSession:
    """The one way to make an HTTP client: bounded connections and time limits on everything but a stream's end."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, limit_per_host=0, ttl_dns_cache=30),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=3.0),
        read_bufsize=2**18,
        auto_decompress=False,
    )


class Listener(Protocol):
    """What serves HTTP until `cleanup`."""

    async def cleanup(self) -> None: ...


class Service:
    """Base of router, directory, planner, telemetry and worker."""

    name: ClassVar[str] = "service"
    bus: Bus
    http: aiohttp.ClientSession
    url: str

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = Clock(settings.speedup)
        self.instance = f"{self.name}-{uuid.uuid4().hex[:8]}"
        self.log = logging.get_logger(self.name)
        self.metrics = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.metrics)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._started = False
        self.shutdown_s = SHUTDOWN_S

    # ------------------------------------------------------------------ what a service overrides

    async def startup(self) -> None:
        """Load state and begin; `bus`, `http` and `url` exist."""

    async def main_loop(self) -> None:
        """Work until cancelled."""
        await self._stop.wait()

    async def shutdown(self) -> None:
        """Leave cleanly; `bus` and `http` still work."""

    def routes(self, app: web.Application) -> None:
        """Add routes beside /healthz, /readyz and /metrics."""

    def ready(self) -> str | None:
        """None when requests can be served, else the reason why not."""
        return None

    async def register(self) -> None:
        """List this process in the registry; called every second."""
        info = ServiceInfo(self.name, self.instance, self.url, self._started_t)
        await self.bus.register_service(info, REGISTER_TTL_S)

    async def unregister(self) -> None:
        await self.bus.unregister_service(self.instance)

    # ------------------------------------------------------------------ what a service uses

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `coro` as an owned task. Its failure stops the service; its end does not."""
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def stop(self) -> None:
        """End the service as SIGTERM would."""
        self._stop.set()

    async def _cancel(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Cancel and wait, SHUTDOWN_S at most. Again every second: before Python 3.12 `asyncio.wait_for`, which
        redis-py uses, loses a cancellation that comes as the awaited call ends."""
        deadline = time.monotonic() + SHUTDOWN_S
        while tasks and time.monotonic() < deadline:
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=1.0)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._failure is None:
            self._failure = task.exception()
            self.log.error("task_failed", task=task.get_name(), error=self._failure)
            self._stop.set()

    # ------------------------------------------------------------------ HTTP

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)

        async def healthz(_: web.Request) -> web.Response:
            return web.Response(text="ok\n")

        async def readyz(_: web.Request) -> web.Response:
            reason = self.ready() if self._started else "starting"
            return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200)

        async def metrics(_: web.Request) -> web.Response:
            body = prometheus_client.generate_latest(self.metrics)
            return web.Response(
                body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
            )

        app.router.add_get("/healthz", healthz)
        app.router.add_get("/readyz", readyz)
        app.router.add_get("/metrics", metrics)
        self.routes(app)
        return app

    async def _listen(self) -> Listener:
        """Serve HTTP from now on; sets `url`. Raises ConfigError when the address cannot be used."""
        sock = self._bind(self.settings.host, self.settings.port)
        self.url = self._url_of(sock)
        return await self._serve_app(sock)

    async def _serve_app(self, sock: socket.socket) -> web.AppRunner:
        runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
        await runner.setup()
        await web.SockSite(runner, sock, backlog=1024).start()
        return runner

    @staticmethod
    def _bind(host: str, port: int) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            sock.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        return sock

    def _url_of(self, sock: socket.socket) -> str:
        return f"http://{self._advertised_host()}:{sock.getsockname()[1]}"

    def _advertised_host(self) -> str:
        if self.settings.advertise:
            return self.settings.advertise
        if self.settings.host in ("0.0.0.0", "::"):
            return socket.gethostname()
        return f"[{self.settings.host}]" if ":" in self.settings.host else self.settings.host

    # ------------------------------------------------------------------ life

    async def serve(self) -> int:
        """Run to the end; returns the exit code. Raises ConfigError or BusError when it cannot start."""
        loop = asyncio.get_running_loop()
        listener = await self._listen()
        self._started_t = self.clock.now()
        try:
            self.bus = await Bus.connect(redis_url(self.settings), self.settings.cluster)
        except (BusError, ConfigError):
            await listener.cleanup()
            raise
        self.http = http_client()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            await self.startup()
            # What the imports left is not looked at again by every collection.
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_OBJECTS)
            self._started = True
            self.spawn(self._keep_registered(), "register")
            self.spawn(self._keep_small(), "memory")
            self.log.info("started", url=self.url, cluster=self.settings.cluster, pid=os.getpid())
            main = self.spawn(self.main_loop(), "main_loop")
            stopped = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait({main, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            self._started = False
            await self._cancel({main})
            with contextlib.suppress(BusError, TimeoutError):
                async with asyncio.timeout(self.shutdown_s):
                    await self.shutdown()
                    await self.unregister()
        finally:
            await self._cancel(set(self._tasks))
            await listener.cleanup()
            await self.http.close()
            await self.bus.close()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        self.log.info("stopped", ok=self._failure is None)
        if self._failure is not None:
            traceback.print_exception(self._failure)
            self.log.error("failed", error=self._failure)
            return 1
        return 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            os._exit(130)
        self._stop.set()

    async def _keep_small(self) -> None:
        while True:
            await asyncio.sleep(MEMORY_S)
            give_back_memory()

    async def _keep_registered(self) -> None:
        backoff = Backoff(first_s=0.2)
        while True:
            try:
                await self.register()
            except BusError as error:
                self.log.warning("register_failed", error=error)
                await backoff.wait()
                continue
            backoff.reset()
            await asyncio.sleep(1.0)


def run(make: Callable[[], Service]) -> int:
    """Run the service that `make` returns; 0 after a clean stop, 1 after a failure, 2 for what an operator must
    mend (a setting, a Redis that does not answer)."""

    async def main() -> int:
        service = make()
        logging.setup(service.settings.log_level, service.settings.log_format)
        return await service.serve()

    try:
        import uvloop

        runner: Callable[[Coroutine[Any, Any, int]], int] = uvloop.run
    except ImportError:
        runner = asyncio.run
    try:
        return runner(main())
    except (ConfigError, BusError) as error:
        print(f"evolving: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


S = TypeVar("S", bound=Settings)


def run_with_settings(
    make: Callable[[S], Service], settings: type[S], argv: Sequence[str], summary: str
) -> int:
    """Read the settings of the part that `make` is named after (`Service.name`) and run it."""
    section: str = make.name  # type: ignore[attr-defined]
    try:
        loaded = config.load(settings, section, argv, summary=summary)
    except ConfigError as error:
        print(f"evolving: {error}", file=sys.stderr)
        return 2
    return run(lambda: make(loaded))
