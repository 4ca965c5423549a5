"""The telemetry process: feeds slices and the live picture from the streams, and serves both.

Rules that hold here
- A slice is published once: the end of the last one in the stream is where a restart begins.
- A restart within `CATCH_UP_S` reads the streams again from a position before the first unpublished slice, so
  that this slice is whole; after a longer absence the slices in between are not made.
- The picture is put together only while a page is open or somebody asks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec
import prometheus_client
from aiohttp import web

from services.telemetry.cluster import ClusterView, Point
from services.telemetry.metrics import ClusterCollector, RequestMeters
from services.telemetry.settings import TelemetrySettings
from services.telemetry.windows import SliceBuilder
from shared.messages import Iterations, NodeState, RequestDone, RoleAck, RolePlan, Slice
from shared.service import Service
from shared.streams import BusError, Event, Reader

TICK_S = 1.0
CATCH_UP_S = 120.0  # wall seconds
RECENT_REQUESTS = 10_000
RECENT_ROLES = 2_000
WRITE_TIMEOUT_S = 10.0
EVENTS_AT_ONCE = 1_000  # before others get the loop
MARKS_A_SLICE = 32  # stream positions remembered while a slice is open
BEHIND = 500  # events in one read that show that there are more

PAGE = Path(__file__).parent / "page" / "index.html"
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'"
    ),
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
}


class Saved(msgspec.Struct):
    """Records of slices from `open_t` on lie behind `positions`."""

    speedup: float
    t: float
    open_t: float
    positions: dict[str, str]


class _Mark(NamedTuple):
    t: float
    positions: dict[str, str]


class History(msgspec.Struct, frozen=True):
    """First event of a live page: what its charts show. A point's values are those of `fields`, in order."""

    fields: tuple[str, ...]
    points: list[Point]


class TelemetryService(Service):
    name = "telemetry"

    def __init__(self, settings: TelemetrySettings) -> None:
        super().__init__(settings)
        self.telemetry_settings = settings
        self.view = ClusterView(
            cluster=settings.cluster, speedup=settings.speedup, point_every_s=max(10.0, settings.speedup)
        )
        self._meters = RequestMeters(self.metrics)
        self.metrics.register(ClusterCollector(self.view, self.clock.now))
        self._published = prometheus_client.Counter("ei_slices", "Slices published", registry=self.metrics)
        prometheus_client.Gauge(
            "ei_records_dropped", "Records that came after their slice was closed", registry=self.metrics
        ).set_function(lambda: self._builder.dropped)
        self._marks: deque[_Mark] = deque(maxlen=2 * MARKS_A_SLICE)
        self._listeners = 0
        self._news = asyncio.Event()
        self._summary = b""
        self._leaving = False

    # ------------------------------------------------------------------ life

    async def startup(self) -> None:
        self._page = await asyncio.to_thread(PAGE.read_bytes)
        self._out = self.bus.publisher("windows", self.instance, maxlen=10_000)
        self.spawn(self._out.run(), "publish windows")
        now = self.clock.now()
        live = await self.bus.nodes()
        self.view.nodes(live)
        start_t, positions = await self._resume(now)
        settings = self.telemetry_settings
        self._builder = SliceBuilder(
            start_t=start_t,
            slice_s=settings.slice_s,
            grace_s=settings.grace_s * settings.speedup,
            stale_s=settings.max_state_age_s * settings.speedup,
        )
        requests = await self.bus.last("requests", RECENT_REQUESTS)
        for event in requests:
            if isinstance(event.message, RequestDone):
                self.view.request(event.message)
                self._builder.request(event.message)
        roles = await self.bus.last("roles", RECENT_ROLES)
        for event in roles:
            self._role(event.message)
        saved = {"iterations", *(f"state:{node}" for node in live)} & positions.keys()
        wanted = {stream: positions[stream] for stream in saved}
        wanted["requests"] = requests[-1].position if requests else "0"
        wanted["roles"] = roles[-1].position if roles else "0"
        self._reader: Reader = self.bus.reader(wanted)
        await self._reader.follow("iterations")
        await self._follow({f"state:{node}" for node in live})

    async def _resume(self, now: float) -> tuple[float, dict[str, str]]:
        """Where slices begin, and the stream positions from which to read for them."""
        published = await self.bus.last("windows", 1)
        last = published[-1].message if published else None
        # A slice that ends in the future was made under another speed-up.
        done_t = last.t1 if isinstance(last, Slice) and last.t1 <= now else 0.0
        blob = await self.bus.load("telemetry")
        try:
            saved = msgspec.msgpack.decode(blob, type=Saved) if blob else None
        except msgspec.DecodeError as error:
            self.log.error("saved_state_unreadable", error=error)
            saved = None
        if saved is None or saved.speedup != self.settings.speedup:
            return max(now, done_t), {}
        absent_s = self.clock.wall_s(now - saved.t)
        if not 0 <= absent_s <= CATCH_UP_S:
            self.log.info("too_long_away", wall_s=absent_s)
            return max(now, done_t), {}
        self.log.info("catching_up", wall_s=absent_s, from_t=saved.open_t)
        return max(saved.open_t, done_t), saved.positions

    async def main_loop(self) -> None:
        # No slice is closed before what came while this process was away has been read.
        while await self._read(0.05) >= BEHIND:
            pass
        tick_at = time.monotonic()
        while True:
            await self._read(max(0.01, tick_at - time.monotonic()))
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + TICK_S
                await self._tick()

    async def shutdown(self) -> None:
        self._leaving = True
        self._news.set()
        await self._out.flush()

    # ------------------------------------------------------------------ records in

    async def _read(self, wait_s: float) -> int:
        """Take in what has come; returns how many records."""
        events = await self._reader.read(wait_s)
        for first in range(0, len(events), EVENTS_AT_ONCE):
            for event in events[first : first + EVENTS_AT_ONCE]:
                self._event(event)
            await asyncio.sleep(0)
        return len(events)

    def _event(self, event: Event) -> None:
        message = event.message
        if isinstance(message, NodeState):
            self.view.state(message)
            self._builder.state(message)
        elif isinstance(message, Iterations):
            self._builder.iterations(message)
        elif isinstance(message, RequestDone):
            self.view.request(message)
            self._builder.request(message)
            self._meters.count(message)
        else:
            self._role(message)

    def _role(self, message: object) -> None:
        if isinstance(message, RolePlan):
            self.view.planned(message)
        elif isinstance(message, RoleAck):
            self.view.ack(message)

    # ------------------------------------------------------------------ once a second

    async def _tick(self) -> None:
        now = self.clock.now()
        try:
            live = await self.bus.nodes()
            self.view.nodes(live)
            await self._follow({f"state:{node}" for node in live})
        except BusError as error:
            self.log.warning("registry_failed", error=error)
        if not self._marks or now - self._marks[-1].t >= self._builder.slice_s / MARKS_A_SLICE:
            self._marks.append(_Mark(now, dict(self._reader.positions)))
        slices = self._builder.close(now)
        if slices:
            await self._publish(slices, now)
        self.view.take_point(now)
        if self._listeners:
            self._summary = msgspec.json.encode(self.view.summary(now))
            self._news.set()
            self._news = asyncio.Event()

    async def _follow(self, wanted: set[str]) -> None:
        followed = {stream for stream in self._reader.positions if stream.startswith("state:")}
        for stream in wanted - followed:
            # from the newest state on, that one included: an idle node's next may be a second away
            last = await self.bus.last(stream, 2)
            self._reader.add(stream, last[0].position if len(last) == 2 else "0")
        for stream in followed - wanted:
            self._reader.remove(stream)

    async def _publish(self, slices: list[Slice], now: float) -> None:
        for one in slices:
            self._out.publish(one)
            self._published.inc()
        self.log.debug("slices", n=len(slices), until_t=slices[-1].t1, requests=slices[-1].requests)
        try:
            await self._out.flush()
            await self._save(now)
        except (BusError, TimeoutError) as error:
            self.log.warning("slices_wait", error=error)

    async def _save(self, now: float) -> None:
        """Save the newest positions that lie before all that the open slices need."""
        need_t = self._builder.open_t - self._builder.stale_s
        while len(self._marks) > 1 and self._marks[1].t <= need_t:
            self._marks.popleft()
        saved = Saved(self.settings.speedup, now, self._builder.open_t, self._marks[0].positions)
        await self.bus.save("telemetry", msgspec.msgpack.encode(saved))

    # ------------------------------------------------------------------ HTTP

    def routes(self, app: web.Application) -> None:
        app.router.add_get("/", self._index)
        app.router.add_get("/v1/summary", self._get_summary)
        app.router.add_get("/events", self._events)

    async def _index(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=PAGE_HEADERS)

    async def _get_summary(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self.view.summary(self.clock.now()))
        return web.Response(body=body, content_type="application/json")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: `history` once, then `points` as they come and a `summary` every second."""
        if self._listeners >= self.telemetry_settings.max_listeners:
            return web.Response(status=503, text="too many live pages are open\n")
        answer = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        self._listeners += 1
        try:
            await answer.prepare(request)
            points = list(self.view.points)
            shown_t = points[-1].t if points else 0.0
            summary = msgspec.json.encode(self.view.summary(self.clock.now()))
            history = msgspec.json.encode(History(Point._fields, points))
            await self._send(answer, _sse("history", history) + _sse("summary", summary))
            while not self._leaving:
                await self._news.wait()
                fresh = [point for point in self.view.points if point.t > shown_t]
                shown_t = fresh[-1].t if fresh else shown_t
                data = _sse("points", msgspec.json.encode(fresh)) if fresh else b""
                await self._send(answer, data + _sse("summary", self._summary))
        except (ConnectionError, TimeoutError):
            pass  # the page is gone
        finally:
            self._listeners -= 1
        return answer

    async def _send(self, answer: web.StreamResponse, data: bytes) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await answer.write(data)


def _sse(event: str, data: bytes) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"
