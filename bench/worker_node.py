"""Asking a worker that a benchmark started."""

from __future__ import annotations

import asyncio
import time

import aiohttp

READY_S = 30.0


async def ready(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until the worker serves; ends the benchmark when it does not."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            async with http.get(url + "/readyz") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit(f"{url} is not ready after {READY_S:g} s")


async def metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Its samples, by name and labels as they are written."""
    async with http.get(url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}
