"""Telling prefill nodes that the pages of finished prefills need not be kept any longer.

Rules that hold here
- What is released within `LINGER_S` goes to a node in one call.
- Nothing waits for it and nothing is repeated: a node lets pages go by itself after a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from services.router.upstream_answer import UpstreamError
from services.router.upstream_http import Upstream
from shared.log import get_logger

LINGER_S = 0.005
TIMEOUT_S = 3.0
_encoder = msgspec.msgpack.Encoder()
log = get_logger("router")


class Releases:
    def __init__(self, upstream: Upstream, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        self._upstream, self._spawn = upstream, spawn
        self._waiting: dict[str, list[str]] = {}  # node's URL -> request ids

    def release(self, url: str, rid: str) -> None:
        """The pages that the node at `url` keeps for that request are not needed any more."""
        waiting = self._waiting.get(url)
        if waiting is not None:
            waiting.append(rid)
            return
        self._waiting[url] = [rid]
        self._spawn(self._send(url), "release pages")

    async def _send(self, url: str) -> None:
        await asyncio.sleep(LINGER_S)
        body = _encoder.encode(self._waiting.pop(url))
        try:
            answer = await self._upstream.request(
                url, "POST", b"/ei/v1/release", [(b"Content-Type", b"application/msgpack")], body,
                connect_timeout_s=TIMEOUT_S, head_timeout_s=TIMEOUT_S,
            )  # fmt: skip
            with answer:
                await answer.read(2**16)
        except UpstreamError as error:
            log.info("release_failed", url=url, error=error)
