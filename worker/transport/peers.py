"""Asking other workers for pages: `POST /ei/v1/pages/pin`, and `/release` when they were read.

Rules that hold here
- A peer answers within `timeout_s` or counts as failed: None, never an exception, so the caller recomputes.
- A peer that failed is left alone for a while that doubles with each failure in a row; until then it answers
  None at once, so that one dead peer does not delay every request that would ask it. A transfer that failed counts,
  too.
- A peer that has lent as much as it may is asked again for up to BUSY_S: it is well.
- An answer of another version, for pages of another size, or that speaks of places outside of the peer's arena is a
  failure.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict

import aiohttp
import msgspec
import numpy as np

from shared.log import get_logger
from worker.kv.memory import Checksums
from worker.kv.path import Path
from worker.transport.base import Endpoint, Offsets

VERSION = 1
PIN_PATH = "/ei/v1/pages/pin"
RELEASE_PATH = "/ei/v1/pages/release"
BUSY_S, BUSY_PAUSE_S = 3.0, 0.05
FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 10.0
MAX_PEERS = 4096
MOST_HEAD = 4096  # bytes of an answer besides 16 for each page
MOST_REFUSAL = 65_536
log = get_logger("worker")


class PinCall(msgspec.Struct, frozen=True, array_like=True):
    """Pin these pages and say where they lie."""

    version: int
    page_bytes: int
    keys: bytes  # 32 a page, in path order
    hold_s: float  # wall seconds that the pages should stay


class PinAnswer(msgspec.Struct, frozen=True, array_like=True):
    version: int
    incarnation: str
    loan: int
    endpoint: Endpoint
    offsets: bytes  # int64 a page: where it lies in the arena, -1 for what is gone
    checksums: bytes  # uint64 a page
    hold_s: float  # granted
    cut: bool = (
        False  # it tells of the first pages only, for it has no more to lend now: ask for the rest afterwards
    )


class ReleaseCall(msgspec.Struct, frozen=True, array_like=True):
    """The pages were read. `bad`: the keys of those whose bytes did not agree with their checksum."""

    loan: int
    incarnation: str
    bad: bytes = b""


class Pinned(msgspec.Struct, frozen=True):
    """Pages that a peer holds for us: the leading ones of those that were asked for."""

    url: str
    loan: int
    incarnation: str
    endpoint: Endpoint
    offsets: Offsets
    checksums: Checksums
    until: float  # monotonic wall seconds: what is read later may be something else
    cut: bool  # of the pages after these it has not said anything


class _Health(msgspec.Struct):
    failures: int
    until: float  # monotonic wall seconds


_answers = msgspec.msgpack.Decoder(PinAnswer)
_encoder = msgspec.msgpack.Encoder()


class PeerClient:
    """Borrows pages from peers. `session` stays the caller's to close."""

    def __init__(self, session: aiohttp.ClientSession, page_bytes: int, timeout_s: float = 1.0) -> None:
        self._session = session
        self._page_bytes = page_bytes
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._unwell: OrderedDict[str, _Health] = OrderedDict()
        self.failures = 0

    async def pin(self, url: str, path: Path, hold_s: float) -> Pinned | None:
        """Have the leading pages of `path` that the worker at `url` holds pinned; None when it cannot."""
        health = self._unwell.get(url)
        if health is not None and time.monotonic() < health.until:
            return None
        body = _encoder.encode(PinCall(VERSION, self._page_bytes, path.keys.tobytes(), hold_s))
        begun = time.monotonic()
        pause_s = BUSY_PAUSE_S
        try:
            while True:
                asked = time.monotonic()
                async with self._session.post(
                    url + PIN_PATH, data=body, timeout=self._timeout, allow_redirects=False
                ) as answer:
                    if answer.status not in (200, 429):
                        raise ValueError(f"HTTP {answer.status}: {_said(await _read(answer, MOST_REFUSAL))}")
                    if answer.status == 200:
                        told = _answers.decode(await _read(answer, MOST_HEAD + 16 * len(path)))
                        return _pinned(url, told, len(path), self._page_bytes, asked)
                if asked - begun > BUSY_S:
                    return None
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(0.5, pause_s * 2)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, msgspec.DecodeError) as error:
            self.failed(url, error)
            return None

    async def release(self, pinned: Pinned, bad: Path | None = None) -> None:
        """Say that pages were read; when this cannot be said, their time at the peer runs out."""
        call = ReleaseCall(pinned.loan, pinned.incarnation, bad.keys.tobytes() if bad is not None else b"")
        try:
            async with self._session.post(
                pinned.url + RELEASE_PATH,
                data=_encoder.encode(call),
                timeout=self._timeout,
                allow_redirects=False,
            ) as answer:
                await _read(answer, MOST_REFUSAL)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.info("release_failed", url=pinned.url, error=error)

    def well(self, url: str) -> None:
        """Pages came from there."""
        self._unwell.pop(url, None)

    def failed(self, url: str, error: Exception) -> None:
        """The peer, or what was read from it, failed: leave it alone for a while."""
        self.failures += 1
        health = self._unwell.pop(url, None) or _Health(0, 0.0)
        health.failures += 1
        pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(health.failures - 1, 16))
        health.until = time.monotonic() + pause_s
        self._unwell[url] = health
        if len(self._unwell) > MAX_PEERS:
            self._unwell.popitem(last=False)
        log.warning("peer_failed", url=url, failures=health.failures, pause_s=pause_s, error=error)


async def _read(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The body. Raises ValueError when it has more than `most` bytes."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > most:
            raise ValueError(f"it answered with more than {most} bytes")
    return bytes(body)


class _Detail(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Detail


def _said(body: bytes) -> str:
    """What an error answer says, in one line."""
    try:
        return msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        return " ".join(body[:200].decode(errors="replace").split())


def _pinned(url: str, answer: PinAnswer, pages: int, page_bytes: int, asked: float) -> Pinned:
    """Raises ValueError for an answer that cannot be meant."""
    if answer.version != VERSION:
        raise ValueError(f"it speaks version {answer.version} of the page service, this node {VERSION}")
    offsets = np.frombuffer(answer.offsets, dtype="<i8")
    checksums = np.frombuffer(answer.checksums, dtype="<u8")
    told = offsets.size
    if checksums.size != told or (not 0 < told < pages if answer.cut else told != pages):
        raise ValueError(f"it told of {told} places and {checksums.size} checksums for {pages} pages")
    gone = (offsets < 0).nonzero()[0]
    held = int(gone[0]) if gone.size else told
    offsets = offsets[:held]
    if held and int(offsets.max()) + page_bytes > answer.endpoint.nbytes:
        raise ValueError(f"it told of a page at {int(offsets.max())}, beyond its arena")
    # Counted from before the question: what the answer took on its way is then not missing at the end.
    until = asked + answer.hold_s
    cut = answer.cut and held == told
    return Pinned(
        url, answer.loan, answer.incarnation, answer.endpoint, offsets, checksums[:held], until, cut
    )
