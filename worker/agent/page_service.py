"""The page service: a peer asks for pages by key, is told where they lie, reads them, and says so (section 4.2).

Rules that hold here
- Pages are pinned before the answer says where they are, and until the peer says that it has read them or its time
  is over.
- The answer names this life of the node and the boot of its transport; a release that names another life changes
  nothing.
- A caller of another version, or with pages of another size, gets 409; one that comes while as many pages are
  on loan as may be gets 429.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
from aiohttp import web

from shared.openai import ApiError
from worker.kv.cache import NodeCache
from worker.kv.loans import Loans, TooManyLoans
from worker.kv.memory import PageMemory
from worker.kv.path import Path
from worker.transport.base import Transport
from worker.transport.peers import PIN_PATH, RELEASE_PATH, VERSION, PinAnswer, PinCall, ReleaseCall

MOST_BAD = 16  # pages of a release that are looked at again
_pins = msgspec.msgpack.Decoder(PinCall)
_releases = msgspec.msgpack.Decoder(ReleaseCall)
_encoder = msgspec.msgpack.Encoder()


class PageService:
    """Answers 503 until `start` was called."""

    def __init__(self, cache: NodeCache, memory: PageMemory, incarnation: str, most_pages: int) -> None:
        self._cache, self._memory = cache, memory
        self._transport: Transport | None = None
        self._incarnation = incarnation
        self.loans = Loans(cache, most_pages)
        self.lent_pages = 0  # since the start

    def start(self, transport: Transport) -> None:
        self._transport = transport

    def routes(self, app: web.Application) -> None:
        app.router.add_post(PIN_PATH, self._pin)
        app.router.add_post(RELEASE_PATH, self._release)

    def expire(self) -> None:
        """End the loans whose time is over; to be called now and then."""
        self.loans.expire(time.monotonic())

    async def _pin(self, request: web.Request) -> web.Response:
        try:
            call = _pins.decode(await request.read())
            path = Path.of_keys(call.keys)
        except (msgspec.DecodeError, ValueError) as error:
            raise ApiError(400, f"The body is no PinCall: {error}") from None
        if self._transport is None:
            raise ApiError(
                503, "This worker is starting.", type="server_error", code="starting", retry_after_s=1
            )
        page_bytes = self._memory.arena.page_bytes
        if call.version != VERSION or call.page_bytes != page_bytes:
            raise ApiError(
                409,
                f"This node speaks version {VERSION} of the page service and has pages of {page_bytes} bytes, not "
                f"version {call.version} and {call.page_bytes} bytes.",
                code="page_service_mismatch",
            )
        if not len(path) or np.unique(path.pages).size != len(path):
            raise ApiError(400, "keys must name at least one page, and none twice.", param="keys")
        if not call.hold_s > 0:
            raise ApiError(400, f"hold_s must be above 0, not {call.hold_s}.", param="hold_s")
        now = time.monotonic()
        try:
            loan = self.loans.lend(path, call.hold_s, now)
        except TooManyLoans as error:
            raise ApiError(
                429, f"{error}.", type="rate_limit_error", code="too_many_loans", retry_after_s=1
            ) from None
        self.lent_pages += loan.lent.size
        sums = self._memory.checksums[loan.slots]
        answer = PinAnswer(
            VERSION,
            self._incarnation,
            loan.number,
            self._transport.endpoint,
            # What is gone stays below 0.
            (loan.slots * page_bytes).astype("<i8").tobytes(),
            sums.astype("<u8").tobytes(),
            loan.until - now,
            loan.cut,
        )
        return web.Response(body=_encoder.encode(answer), content_type="application/msgpack")

    async def _release(self, request: web.Request) -> web.Response:
        try:
            call = _releases.decode(await request.read())
            bad = Path.of_keys(call.bad)
        except (msgspec.DecodeError, ValueError) as error:
            raise ApiError(400, f"The body is no ReleaseCall: {error}") from None
        loan = self.loans.end(call.loan) if call.incarnation == self._incarnation else None
        if loan is not None and len(bad):
            # Only what it had on loan, and no more than it can have seen: a fetch ends with the first bad page.
            self._cache.recheck(np.intersect1d(bad.pages, loan.pages)[:MOST_BAD])
        return web.json_response({"released": loan is not None})
