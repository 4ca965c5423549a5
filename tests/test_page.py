"""The live page in a real browser: it shows the cluster, follows it, says when the connection is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from services.telemetry.cluster import ClusterView
from tests.browser import browser_page, chromium
from tests.conftest import eventually
from tests.page_server import app, made_up
from tests.planner_cases import D, P, node_info

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")


@contextlib.asynccontextmanager
async def serving(view: ClusterView, port: int = 0) -> AsyncIterator[int]:
    """The page with `view` behind it; yields the port. Its connections are cut at the end."""
    runner = web.AppRunner(app(view), shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    try:
        yield site._server.sockets[0].getsockname()[1]
    finally:
        await runner.cleanup()


async def test_the_page_shows_and_follows_the_cluster_and_survives_a_lost_connection():
    view = made_up(9, names="node-{}")
    hostile = '<img src=x onerror="document.title=1">'
    infos = dict(view._infos) | {hostile: node_info(hostile, D)}
    view.nodes(infos)
    async with browser_page() as page:

        async def text(selector: str) -> str:
            return str(await page.evaluate(f"document.querySelector('{selector}').textContent"))

        async def names() -> list[str]:
            script = "[...document.querySelectorAll('.group:not([hidden]) h3')].map(e => e.textContent)"
            return list(await page.evaluate(script))

        async def is_live() -> bool:
            return await text("#linktext") == "live"

        async with serving(view) as port:
            address = f"http://127.0.0.1:{port}/"
            await page.open(address)
            await eventually(is_live, timeout_s=30.0)
            assert sorted(await names()) == sorted([f"node-{i}" for i in range(1, 10)] + [hostile])
            assert await page.evaluate("document.images.length") == 0
            assert await text("#split") == view.summary(0.0).split
            assert "5.0" in await text(".tile dd")
            # Six charts, each drawn, each with its newest values in words.
            labels = await page.evaluate(
                "[...document.querySelectorAll('.plot')].map(e => e.getAttribute('aria-label'))"
            )
            assert len(labels) == 6 and all("collecting" not in label for label in labels)
            assert await page.evaluate("document.querySelectorAll('.plot svg path').length") >= 6
            tags = "[...document.querySelectorAll('.tag:not([hidden])')].map(e => e.textContent).sort()"
            assert await page.evaluate(tags) == ["no state yet", "silent", "to decode"]
            assert await page.evaluate("document.querySelectorAll('.marker').length") == 6
            # It follows without a reload.
            await page.evaluate("window.kept = 1")
            view.nodes({"fresh": node_info("fresh", P)})

            async def followed() -> bool:
                return await names() == ["fresh"]

            await eventually(followed)
            assert await page.evaluate("window.kept") == 1

        async def is_lost() -> bool:
            return await text("#linktext") == "connection lost"

        await eventually(is_lost)
        assert await page.evaluate("document.getElementById('banner').hidden") is False
        assert "lost" in await text("#banner")
        async with serving(view, port):
            await eventually(is_live, timeout_s=30.0)
            assert await page.evaluate("document.getElementById('banner').hidden") is True
            assert await page.evaluate("window.kept") == 1
        asked = {url.removeprefix(address) for url in page.requests if not url.startswith("data:")}
        assert asked == {"", "events"}
        assert not [error for error in page.errors if "ERR_" not in error]


async def test_the_page_says_that_it_is_lost_when_events_stop_coming():
    stuck = asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        if not stuck.is_set():
            await answer.write(b"event: points\ndata: []\n\n")
        stuck.set()
        await asyncio.sleep(3600)
        return answer

    made = web.Application()
    page_routes = app(made_up(4))
    made.router.add_get("/events", silent)
    made.router.add_get(
        "/", next(r.handler for r in page_routes.router.routes() if r.resource.canonical == "/")
    )
    runner = web.AppRunner(made, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        async with browser_page() as page:
            await page.open(f"http://127.0.0.1:{port}/")

            async def link() -> str:
                return str(await page.evaluate("document.getElementById('linktext').textContent"))

            async def lost() -> bool:
                return await link() == "connection lost"

            await eventually(stuck.is_set, timeout_s=30.0)
            await eventually(lost, timeout_s=20.0)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("width", [360, 1400])
async def test_96_nodes_fit_every_width(width):
    async with serving(made_up(96)) as port, browser_page() as page:
        await page.open(f"http://127.0.0.1:{port}/", width=width, dark=width < 500)

        async def shown() -> bool:
            return await page.evaluate("document.querySelectorAll('.node').length") == 96

        await eventually(shown, timeout_s=30.0)
        wide = await page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide == 0
        assert page.errors == []
