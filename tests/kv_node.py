"""A node's KV without an engine: cache, bytes, page service and fetcher, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import aiohttp
from aiohttp import web

from shared.api_errors import openai_errors
from shared.messages import PageArray
from worker.agent.page_service import PageService
from worker.engines.simulated.kv_bytes import SimulatedMemory
from worker.kv.arena import Arena
from worker.kv.cache import NodeCache
from worker.kv.path import Path
from worker.transport.fetch import Fetcher
from worker.transport.peers import PeerClient
from worker.transport.tcp import TcpTransport

PAGE_BYTES = 4096


def path(first: int, pages: int) -> Path:
    return Path.bare(range(first, first + pages))


class KvNode:
    def __init__(self, name: str, l1_pages: int, l2_pages: int, page_bytes: int) -> None:
        self.name = name
        self.memory = SimulatedMemory(Arena(l1_pages + l2_pages, page_bytes, huge_pages=False))
        self.cache = NodeCache(l1_pages, l2_pages, memory=self.memory)
        self.transport = TcpTransport()
        self.service = PageService(self.cache, self.memory, name, max(1, l2_pages // 2))
        self.tasks: set[asyncio.Task[Any]] = set()
        self.url = ""

    async def start(self, timeout_s: float, peer_timeout_s: float) -> None:
        await self.transport.start(self.memory.arena, "127.0.0.1")
        self.service.start(self.transport)
        app = web.Application(middlewares=[openai_errors])
        self.service.routes(app)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.http = aiohttp.ClientSession()
        self.peers = PeerClient(self.http, self.memory.arena.page_bytes, peer_timeout_s)
        self.fetcher = Fetcher(
            self.cache, self.memory, self.transport, self.peers, self.spawn, timeout_s=timeout_s
        )

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        # What fails stays, and `stop` raises it.
        if task.cancelled() or task.exception() is None:
            self.tasks.discard(task)

    async def quiet(self) -> None:
        """Nothing is under way any more; what failed is raised."""
        while self.tasks:
            for task in self.tasks:
                if task.done():
                    task.result()
            await asyncio.wait(self.tasks)
            await asyncio.sleep(0)

    async def stop(self) -> None:
        await self.quiet()
        self.fetcher.close()
        await self.transport.close()
        await self.http.close()
        await self._runner.cleanup()
        self.memory.arena.close()

    def compute(self, pages: Path) -> None:
        """The node computes the KV of a path."""
        lease = self.cache.lease(pages.pages, len(pages))
        assert lease is not None
        self.cache.write(lease, pages[lease.cached_pages :])
        self.cache.release(lease)

    def sound(self, pages: PageArray) -> bool:
        """Whether L2 holds all of these pages with the bytes that they must have."""
        slots, lent = self.cache.lend(Path.bare(pages.tolist()))
        self.cache.end_loan(lent)
        return bool(lent.size == pages.size and (slots >= self.cache.l1_pages).all()) and bool(
            self.memory.sound(lent, pages).all()
        )


@contextlib.asynccontextmanager
async def kv_nodes(
    count: int = 2,
    *,
    l1_pages: int = 600,
    l2_pages: int = 2400,
    page_bytes: int = PAGE_BYTES,
    timeout_s: float = 10.0,
    peer_timeout_s: float = 1.0,
) -> AsyncIterator[list[KvNode]]:
    """Nodes that fetch from each other; afterwards nothing may be pinned or under way."""
    nodes = [KvNode(f"n{number}", l1_pages, l2_pages, page_bytes) for number in range(count)]
    for node in nodes:
        await node.start(timeout_s, peer_timeout_s)
    try:
        yield nodes
        for node in nodes:
            await node.quiet()
        for node in nodes:
            assert node.cache.l2_pinned == node.cache.l1_pinned == 0, node.name
            assert not node.service.loans.pages and not node.fetcher.pages_in_flight
    finally:
        for node in nodes:
            await node.stop()
