"""The worker process: bridges one engine to Redis and to the other processes (section 4.1, 4.2).

Rules that hold here
- The node's incarnation is new at every start and numbers all that it publishes. Its first KV event clears
  both tiers, so every reader learns of a restart.
- KV events are published in the order in which pages moved; a snapshot says after which of them it was taken.
- State goes out within STATE_S of a change that routing should know of, every DECODE_STATE_S while tokens are
  produced, every IDLE_STATE_S otherwise. All three are wall seconds.
- A worker that stops hands queued work back to the routers first, then lets running work end for a while.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from aiohttp import web

from shared import kvsnapshot
from shared.api_errors import openai_errors
from shared.config import ConfigError
from shared.kvsnapshot import send_snapshot
from shared.messages import (
    Began,
    CountsWanted,
    Iterations,
    KvSnapshot,
    NodeInfo,
    PageArray,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    Phase,
    RoleAck,
    RolePlan,
    RoleStage,
    Tier,
    pack_pages,
)
from shared.service import SHUTDOWN_S, Service
from shared.streams import BusError, Event
from worker.agent.follow import Follower
from worker.agent.metrics import WorkerMetrics
from worker.agent.page_service import PageService
from worker.agent.settings import WorkerSettings
from worker.engines.simulated.api import Api
from worker.engines.simulated.engine import Engine
from worker.engines.simulated.kv_bytes import SimulatedMemory
from worker.engines.simulated.phase import Ack
from worker.engines.simulated.scheduler import Scheduler
from worker.kv.arena import Arena
from worker.kv.cache import KvChange, NodeCache
from worker.transport.base import TransportMissing
from worker.transport.choose import make_transport
from worker.transport.fetch import Fetcher
from worker.transport.peers import PeerClient

STATE_S = 0.02
DECODE_STATE_S = 0.1
IDLE_STATE_S = 1.0
RECORDS_S = 0.5
LEAVE_S = 1.0  # for Redis to take the node out of the registry when it stops
LOANS_S = 0.5  # between two looks for loans whose time is over
EVENT_PAGES = 8192  # pages in one KV event, at most
_PLANS = 256  # newest messages on `roles` among which the last plan is looked for


class WorkerService(Service):
    name = "worker"

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self.shutdown_s = settings.grace_s + SHUTDOWN_S
        self.worker_settings = settings
        self.hardware = settings.hardware()
        self.node = settings.node
        page = self.hardware.page_size
        l1_pages, l2_pages = self.hardware.l1_tokens // page, self.hardware.l2_tokens // page
        self.arena = Arena(l1_pages + l2_pages, settings.page_bytes, huge_pages=settings.huge_pages)
        self.memory = SimulatedMemory(self.arena)
        self.cache = NodeCache(l1_pages, l2_pages, eviction=settings.eviction, memory=self.memory)
        self.page_service = PageService(
            self.cache, self.memory, self.instance, max(1, int(l2_pages * settings.lend_share))
        )
        self._api = Api(settings.model, page, self.hardware.max_context)
        self._stopping = False

    # ------------------------------------------------------------------------------ life

    async def startup(self) -> None:
        if not self.node:
            self.node = self.url.removeprefix("http://").replace("[", "").replace("]", "").replace(":", "-")
        await self._start_transport()
        events = await self.bus.last("roles", _PLANS)
        epoch, phase = self._planned(events)
        self.scheduler = Scheduler(self.hardware, self.cache, phase=phase, epoch=epoch, now=self.clock.now())
        self._kv_out = self.bus.publisher(f"kv:{self.node}", self.instance, maxlen=50_000)
        self._state_out = self.bus.publisher(
            f"state:{self.node}", self.instance, maxlen=1000, capacity=100, keep=False
        )
        self._iterations_out = self.bus.publisher("iterations", self.instance)
        self._roles_out = self.bus.publisher("roles", self.instance, maxlen=10_000)
        self._resync_out = self.bus.publisher("resync", self.instance, maxlen=10_000, capacity=10)
        for publisher in (
            self._kv_out, self._state_out, self._iterations_out, self._roles_out, self._resync_out
        ):  # fmt: skip
            self.spawn(publisher.run(), "publish")
        self._kv_out.publish(PagesCleared(began=Began(phase, epoch, self._started_t)))
        settings = self.worker_settings
        self.peers = PeerClient(self.http, settings.page_bytes, settings.peer_timeout_s)
        self.fetcher = Fetcher(
            self.cache, self.memory, self.transport, self.peers, self.spawn,
            timeout_s=settings.fetch_timeout_s, on_pages=lambda: self.engine.tell_pages(),
        )  # fmt: skip
        self.engine = Engine(
            self.scheduler,
            self.clock,
            self.fetcher,
            self.spawn,
            on_kv=self._moved_pages,
            on_ack=self._acknowledge,
        )
        self.worker_metrics = WorkerMetrics(
            self.metrics, self.scheduler, self.engine, self.fetcher, self.peers, self.page_service
        )
        self._api.start(self.engine)
        self._follower = Follower(self.node, self)
        self._reader = self.bus.reader({"roles": events[-1].position if events else "0"})
        await self._reader.follow(f"counts:{self.node}")
        self.spawn(self.engine.run(), "engine")
        self.spawn(self._report_state(), "state")
        self.spawn(self._report_iterations(), "iterations")
        self.spawn(self._end_loans(), "loans")
        if epoch:
            # The planner may be waiting for an earlier life of this node.
            self._acknowledge(Ack(RoleStage.SWITCHED, epoch, phase, self.clock.now(), 0.0, 0.0))
        self.log.info(
            "node", node=self.node, profile=self.hardware.name, phase=phase, epoch=epoch,
            l1_pages=self.cache.l1_pages, l2_pages=self.cache.l2_pages,
            page_bytes=self.arena.page_bytes, huge_pages=self.arena.huge_pages,
            transport=self.transport.name, transport_address=self.transport.endpoint.address,
        )  # fmt: skip

    async def _start_transport(self) -> None:
        settings = self.worker_settings
        host = settings.transport_host or urlsplit(self.url).hostname or "127.0.0.1"
        bind = "" if settings.host in ("0.0.0.0", "::") else settings.transport_host or settings.host
        try:
            self.transport = await make_transport(
                settings.transport, self.arena, host,
                protocol=settings.protocol, devices=settings.rdma_devices, interface=bind,
            )  # fmt: skip
        except (TransportMissing, OSError) as error:
            raise ConfigError(f"cannot serve KV pages on {host}: {error}") from None
        self.page_service.start(self.transport)

    async def main_loop(self) -> None:
        while True:
            if self._follower.wants_counts(time.monotonic()):
                self._resync_out.publish(CountsWanted(self.node))
            for event in await self._reader.read(1.0):
                self._follower.feed(event)

    async def shutdown(self) -> None:
        self._stopping = True
        try:
            async with asyncio.timeout(LEAVE_S):
                await self.bus.unregister_node(self.node)
        except (BusError, TimeoutError) as error:
            # Its lease ends by itself; running requests end well all the same.
            self.log.warning("not_unregistered", error=error)
        await self.engine.stop(self.worker_settings.grace_s)
        self.fetcher.close()
        await self.transport.close()
        self.arena.close()
        await self._kv_out.flush(1.0)
        await self._roles_out.flush(1.0)

    async def register(self) -> None:
        if not self._stopping:
            await self.bus.register_node(self._info(), self.worker_settings.ttl_s)

    async def unregister(self) -> None:
        await self.bus.unregister_node(self.node)

    def ready(self) -> str | None:
        return "stopping" if self._stopping else None

    def _info(self) -> NodeInfo:
        return NodeInfo(
            node=self.node,
            url=self.url,
            incarnation=self.instance,
            model=self.worker_settings.model,
            profile=self.hardware.name,
            page_size=self.hardware.page_size,
            max_context=self.hardware.max_context,
            l1_tokens=self.hardware.l1_tokens,
            l2_tokens=self.hardware.l2_tokens,
            chunk_tokens=self.hardware.chunk_tokens,
            phase=self.scheduler.role.phase,
            epoch=self.scheduler.role.epoch,
            started_t=self._started_t,
        )

    def _planned(self, events: list[Event]) -> tuple[int, Phase]:
        """Epoch and phase of the newest plan that names this node; 0 and the setting when none does."""
        epoch, phase = 0, self.worker_settings.phase
        for event in events:
            message = event.message
            if isinstance(message, RolePlan) and message.epoch > epoch and self.node in message.phases:
                epoch, phase = message.epoch, message.phases[self.node]
        return epoch, phase

    # ------------------------------------------------------------------------------ heard from the cluster

    def set_role(self, epoch: int, phase: Phase) -> None:
        before = self.scheduler.role.phase
        if epoch > self.scheduler.role.epoch and phase is not before:
            self.log.info("phase_change", epoch=epoch, before=before, after=phase)
        self.engine.set_role(epoch, phase)

    def set_counts(self, positive: PageArray, zero: PageArray) -> None:
        self.cache.set_counts(positive, zero)

    def set_all_counts(self, positive: PageArray) -> None:
        self.cache.set_all_counts(positive)

    # ------------------------------------------------------------------------------ told to the cluster

    def _moved_pages(self, changes: list[KvChange]) -> None:
        for stored, tier, pages in changes:
            for at in range(0, pages.size, EVENT_PAGES):
                packed = pack_pages(pages[at : at + EVENT_PAGES])
                self._kv_out.publish(PagesStored(tier, packed) if stored else PagesRemoved(tier, packed))

    def _acknowledge(self, ack: Ack) -> None:
        self._roles_out.publish(
            RoleAck(self.node, ack.epoch, ack.phase, ack.stage, ack.t, ack.drain_s, ack.switch_s)
        )
        if ack.stage is RoleStage.SWITCHED:
            self.worker_metrics.switched(ack)
        self.log.info(
            str(ack.stage), epoch=ack.epoch, phase=ack.phase, drain_s=ack.drain_s, switch_s=ack.switch_s
        )

    async def _report_state(self) -> None:
        while True:
            # Cleared first: a change that the report itself brings about is worth another one.
            self.engine.changed.clear()
            self._state_out.publish(self.engine.now_state(self.node))
            await asyncio.sleep(STATE_S)
            rest_s = (DECODE_STATE_S if self.engine.busy else IDLE_STATE_S) - STATE_S
            try:
                async with asyncio.timeout(rest_s):
                    await self.engine.changed.wait()
            except TimeoutError:
                pass

    async def _end_loans(self) -> None:
        while True:
            await asyncio.sleep(LOANS_S)
            self.page_service.expire()

    async def _report_iterations(self) -> None:
        while True:
            await asyncio.sleep(RECORDS_S)
            records = self.engine.take_records()
            if records:
                phase = self.scheduler.role.phase
                self._iterations_out.publish(Iterations(self.node, self.clock.now(), phase, records))

    # ------------------------------------------------------------------------------ HTTP

    def routes(self, app: web.Application) -> None:
        app.middlewares.append(openai_errors)
        app.router.add_get(kvsnapshot.PATH, self._get_snapshot)
        self.page_service.routes(app)
        self._api.routes(app)

    async def _get_snapshot(self, request: web.Request) -> web.StreamResponse:
        self._api.engine.flush()
        # Nothing is awaited between these, so the pages are those just after event `seq`.
        snapshot = KvSnapshot(
            node=self.node,
            incarnation=self.instance,
            seq=self._kv_out.seq,
            l1=pack_pages(self.cache.pages(Tier.L1)),
            l2=pack_pages(self.cache.pages(Tier.L2)),
        )
        return await send_snapshot(request, snapshot)
