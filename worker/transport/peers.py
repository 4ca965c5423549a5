"""Asking other workers which pages they hold.

Rules that hold here
- A peer answers within `timeout_s` or counts as failed: None, never an exception, so the caller recomputes.
- A peer that failed is left alone for a while that doubles with each failure in a row; until then it answers
  None at once, so that one dead peer does not delay every request that would ask it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

import aiohttp
import msgspec

from shared.log import get_logger
from shared.messages import pack_pages

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 10.0
MAX_PEERS = 4096
log = get_logger("worker")


class Lookup(msgspec.Struct):
    """Answer of `POST /ei/v1/pages/lookup`."""

    held: int  # leading ones of the pages asked for
    incarnation: str


class _Health(msgspec.Struct):
    failures: int
    until: float  # monotonic wall seconds


_answers = msgspec.json.Decoder(Lookup)


class PeerClient:
    """Looks pages up on peers. `session` stays the caller's to close."""

    def __init__(self, session: aiohttp.ClientSession, timeout_s: float = 1.0) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._unwell: OrderedDict[str, _Health] = OrderedDict()
        self.failures = 0

    async def held(self, url: str, pages: Sequence[int]) -> int | None:
        """Leading ones of `pages` that the worker at `url` holds; None when it cannot say."""
        health = self._unwell.get(url)
        if health is not None and time.monotonic() < health.until:
            return None
        try:
            async with self._session.post(
                url + "/ei/v1/pages/lookup", data=pack_pages(list(pages)), timeout=self._timeout
            ) as answer:
                answer.raise_for_status()
                held = _answers.decode(await answer.read()).held
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, msgspec.DecodeError) as error:
            self._failed(url, error)
            return None
        self._unwell.pop(url, None)
        return max(0, min(held, len(pages)))

    def _failed(self, url: str, error: Exception) -> None:
        self.failures += 1
        health = self._unwell.pop(url, None) or _Health(0, 0.0)
        health.failures += 1
        pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** (health.failures - 1))
        health.until = time.monotonic() + pause_s
        self._unwell[url] = health
        if len(self._unwell) > MAX_PEERS:
            self._unwell.popitem(last=False)
        log.warning("peer_failed", url=url, failures=health.failures, pause_s=pause_s, error=error)
