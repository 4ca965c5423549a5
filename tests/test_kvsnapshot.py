"""A node's snapshot over HTTP: whole or an error, in pieces while others are served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from shared import kvsnapshot
from shared.kvsnapshot import CHUNK_BYTES, SnapshotError, fetch_snapshot, send_snapshot
from shared.messages import KvSnapshot, NodeInfo, Phase, pack_pages
from tests.directory_oracle import node_info

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def sending(sent: KvSnapshot) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await send_snapshot(request, sent)

    return handler


def snapshot(l1_pages: int, l2_pages: int) -> KvSnapshot:
    rng = np.random.default_rng(1)
    l1, l2 = (pack_pages(rng.integers(-(2**63), 2**63 - 1, n)) for n in (l1_pages, l2_pages))
    return KvSnapshot("n1", "n1.0", 17, l1, l2)


@contextlib.asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, NodeInfo]]:
    app = web.Application()
    app.router.add_get(kvsnapshot.PATH, handler)
    app.router.add_get("/other", _other)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as http:
            yield http, node_info("n1", "n1.0", Phase.BOTH, url=f"http://127.0.0.1:{port}")
    finally:
        await runner.cleanup()


async def _other(_: web.Request) -> web.Response:
    return web.Response(text="ok")


@pytest.mark.parametrize("pages", [(0, 0), (1, 0), (0, 3), (CHUNK_BYTES // 8, CHUNK_BYTES // 8 + 1)])
async def test_comes_back_as_it_was_sent(pages: tuple[int, int]) -> None:
    sent = snapshot(*pages)
    async with served(sending(sent)) as (http, info):
        assert await fetch_snapshot(http, info) == sent


async def test_others_are_served_between_its_pieces() -> None:
    sent = snapshot(0, 180_000)
    async with served(sending(sent)) as (http, info), http.get(info.url + kvsnapshot.PATH) as slow:
        await slow.content.readexactly(10)
        async with http.get(info.url + "/other") as answer:
            assert await answer.text() == "ok"
        assert len(await slow.read()) > 8 * 180_000


async def cut_off(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    answer.content_length = 10_000
    await answer.prepare(request)
    await answer.write(b"\x10\x00\x00\x00123")
    assert request.transport is not None
    request.transport.close()
    return answer


async def of_another_kind(_: web.Request) -> web.Response:
    return web.Response(body=b"<html>" * 100)


async def of_nonsense(_: web.Request) -> web.Response:
    return web.Response(body=b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1")


async def too_short(_: web.Request) -> web.Response:
    return web.Response(body=b"\x04")


async def failing(_: web.Request) -> web.Response:
    return web.Response(status=500)


async def too_big(request: web.Request) -> web.StreamResponse:
    return await send_snapshot(request, snapshot(0, 200_000))


@pytest.mark.parametrize("handler", [cut_off, of_another_kind, of_nonsense, too_short, failing, too_big])
async def test_anything_else_is_an_error_of_one_line(handler: Handler) -> None:
    async with served(handler) as (http, info):
        with pytest.raises(SnapshotError) as caught:
            await fetch_snapshot(http, info)
    assert info.url in str(caught.value) and "\n" not in str(caught.value)


async def test_silent_and_absent_nodes_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvsnapshot, "READ_S", 0.1)

    async def silent(_: web.Request) -> web.Response:
        await asyncio.sleep(5.0)
        return web.Response()

    async with served(silent) as (http, info):
        with pytest.raises(SnapshotError):
            await fetch_snapshot(http, info)
        with pytest.raises(SnapshotError):
            await fetch_snapshot(http, node_info("n", "n.0", Phase.BOTH, url="http://127.0.0.1:1"))
