"""A real headless Chromium, driven over its DevTools protocol: for tests of pages."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec

from tests.conftest import eventually


def chromium() -> str | None:
    """Path of an installed browser."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, object]]] = {}
        self.requests: list[str] = []  # URLs that the page asked for
        self.errors: list[str] = []  # exceptions and refused loads

    async def listen(self) -> None:
        async for message in self._socket:
            event = msgspec.json.decode(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.errors.append(event["params"]["entry"]["text"])

    async def call(self, method: str, **params: object) -> dict[str, object]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        reply = await asyncio.wait_for(answer, 30.0)
        if "error" in reply:
            raise AssertionError(f"{method}: {reply['error']}")
        return reply["result"]

    async def open(self, url: str, *, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.size(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call("Page.navigate", url=url)
        there = "document.readyState === 'complete' && location.protocol === 'http:'"
        await eventually(lambda: self.evaluate(there), timeout_s=30.0)

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def evaluate(self, script: str) -> object:
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def screenshot(self) -> bytes:
        """PNG of the whole page."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(str(shot["data"]))


@contextlib.asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    binary = chromium()
    assert binary is not None
    folder = Path(tempfile.mkdtemp(prefix="evolving-browser-"))
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
    )
    process = await asyncio.create_subprocess_exec(
        binary,
        *flags,
        "--disable-dev-shm-usage",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        ready = folder / "DevToolsActivePort"
        await eventually(lambda: ready.exists() and len(ready.read_text().split()) == 2, timeout_s=60.0)
        port = ready.read_text().split()[0]
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                target = next(t for t in await answer.json() if t["type"] == "page")
            async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**26) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                try:
                    yield page
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
    finally:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 10.0)
        if process.returncode is None:
            process.kill()
            await process.wait()
        shutil.rmtree(folder, ignore_errors=True)
