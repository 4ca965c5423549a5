"""Workers in this process, and what must hold of them after each test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from shared.messages import PrefillCall, PrefillEvent
from tests.conftest import eventually, running
from worker.agent.service import WorkerService
from worker.agent.settings import WorkerSettings

_events = msgspec.json.Decoder(PrefillEvent)


@contextlib.asynccontextmanager
async def node(
    redis_url: str, cluster: str, name: str = "n1", **settings: Any
) -> AsyncIterator[WorkerService]:
    """A worker with the `tiny` profile, ten times as fast as it; afterwards nothing may be left on it."""
    base: dict[str, Any] = {
        "profile": "tiny", "model": "m", "speedup": 10.0, "grace_s": 0.1, "transport": "tcp", "page_bytes": 256
    }  # fmt: skip
    service = WorkerService(WorkerSettings(redis=redis_url, cluster=cluster, node=name, **(base | settings)))
    async with running(service):
        yield service
        await check_empty(service)


async def check_empty(service: WorkerService) -> None:
    """No request, no pin and no promised page; free + indexed pages = all pages."""
    cache = service.cache
    await eventually(lambda: not service.scheduler.requests and not service.engine.running)
    # Loans end when the peer has said so, a little later than its request.
    await eventually(lambda: cache.l1_pinned == cache.l1_room == cache.l2_pinned == 0)
    assert not service.fetcher.pages_in_flight
    for pool in (cache._l1, cache._l2):
        assert not pool.order._pins.any() and not pool.taken_slots
    assert cache.l1_free + cache.l1_used == cache.l1_pages


async def prefill(http: aiohttp.ClientSession, url: str, call: PrefillCall) -> list[PrefillEvent]:
    """All events of a prefill call."""
    async with http.post(url + "/ei/v1/prefill", data=msgspec.msgpack.encode(call)) as answer:
        assert answer.status == 200, await answer.text()
        return [_events.decode(line) async for line in answer.content]
