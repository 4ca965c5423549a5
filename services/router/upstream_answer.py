"""The answer to a call of `upstream_http.py`: read it, or splice it to a client of the router.

Rules that hold here
- A spliced answer goes from `data_received` to the client's transport with no task in between. While the client is
  slow, its engine is not read; once the client is gone, its engine is told at once, by the connection's end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import httptools

from services.router.exchange import Exchange
from services.router.http_messages import HeaderLines, HeadSink, folded, tokens_of

if TYPE_CHECKING:
    from services.router.upstream_http import _Connection

MOST_DROPPED_BYTES = 2**16  # of an answer that goes on after what was wanted of it
QUEUE_BYTES = 2**18  # of an answer that is not spliced and not read; above it the engine is not read


class UpstreamError(Exception):
    """The call, or its answer, did not come to its end."""


class ConnectError(UpstreamError):
    """No connection came about: the request was not sent."""


class UpstreamClosed(UpstreamError):
    """The connection ended before the answer did."""


class UpstreamTimeout(UpstreamError):
    """The head, or the answer's next bytes, did not come in time."""


class BadAnswer(UpstreamError):
    """Not an HTTP/1.1 answer, or one that is too long for its reader."""


class AnswerHead:
    """An answer's head that passed every check.

    `length`: as announced, None otherwise. `chunked`: how the body is framed. `reusable`: the connection stays open.
    Equal heads may be one object: nothing of it is changed.
    """

    __slots__ = ("chunked", "derived", "fields", "length", "raw", "reusable", "status")

    def __init__(self, data: bytes) -> None:
        """`data` ends with its empty line. Raises BadAnswer."""
        self.derived: dict[str, HeaderLines] = {}  # as `Head.derived`
        sink = HeadSink()
        parser = httptools.HttpResponseParser(sink)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise BadAnswer("the answer changes the protocol") from None
        except httptools.HttpParserError as error:
            raise BadAnswer(f"the answer is not valid HTTP/1.1: {error}") from None
        self.status = status = parser.get_status_code()
        if data[:7] != b"HTTP/1." or data[7] not in b"01" or not sink.complete or not 100 <= status <= 599:
            raise BadAnswer("the answer is not HTTP/1.1")
        if status == 101:
            raise BadAnswer("the answer changes the protocol")
        self.raw = sink.headers(data)
        self.fields = fields = folded(self.raw)  # lower-case names, equal ones joined by ", "
        self.length: int | None = None
        self.chunked = False
        if status < 200:
            return
        http11 = data[7] == 49
        options = tokens_of(fields.get("connection", ""))
        self.reusable = "close" not in options and (http11 or "keep-alive" in options)
        length, coding = fields.get("content-length"), fields.get("transfer-encoding")
        if length is not None:
            if coding is not None or not (length.isascii() and length.isdigit() and len(length) < 19):
                raise BadAnswer("the answer's length is ambiguous")
            self.length = int(length)
        if coding is not None:
            if coding.lower() != "chunked" or not http11:
                raise BadAnswer(f"Transfer-Encoding: {coding} is not supported")
            self.chunked = True


class Answer:
    """An answer whose head has come. Read it (`read`, `chunk`), `listen` to it or `splice` it, one at a time; then
    `close` it.
    """

    __slots__ = (
        "_complete", "_conn", "_end", "_error", "_exchange", "_heard", "_keep_tail", "_listening", "_on_first",
        "_parts", "_queued", "_spliced", "_tail", "_tail_bytes", "_total", "_waiter", "head", "headers", "length",
        "raw_headers", "read_idle_s", "status",
    )  # fmt: skip

    def __init__(self, conn: _Connection, head: AnswerHead, idle_s: float) -> None:
        self.head = head
        self.status = head.status
        self.raw_headers = head.raw
        self.headers = head.fields
        self.length = head.length  # as announced, of an answer to HEAD too; None otherwise
        self.read_idle_s = idle_s
        self._conn = conn
        self._complete = False
        self._error: UpstreamError | None = None
        self._parts: deque[bytes] = deque()
        self._queued = 0
        self._waiter: asyncio.Future[None] | None = None
        self._exchange: Exchange | None = None
        self._spliced: asyncio.Future[tuple[bytes, int]] | None = None
        self._heard: Callable[[bytes], bool] | None = None
        self._listening: asyncio.Future[bool] | None = None

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def complete(self) -> bool:
        """All of it has come."""
        return self._complete

    def close(self) -> None:
        """No more of it is wanted: ends the connection unless the answer is complete. May be called again."""
        if not self._complete and self._error is None:
            self._conn.fail(UpstreamClosed("the answer was closed by its reader"))
        self._parts.clear()

    async def chunk(self) -> bytes:
        """The next bytes as they came, b"" at the end. Raises UpstreamError."""
        parts = self._parts
        while not parts:
            if self._complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._more()
        data = parts.popleft()
        self._queued -= len(data)
        if self._queued < QUEUE_BYTES and not self._complete:
            self._conn.resume()
        return data

    async def read(self, limit: int) -> bytes:
        """All that is left of it. Raises UpstreamError, BadAnswer if that is more than `limit` bytes."""
        found: list[bytes] = []
        left = limit if self.length is None or self.length <= limit or self._complete else -1
        while left >= 0:
            data = await self.chunk()
            if not data:
                return found[0] if len(found) == 1 else b"".join(found)
            found.append(data)
            left -= len(data)
        self.close()
        raise BadAnswer(f"the answer is longer than {limit} bytes")

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def listen(self, heard: Callable[[bytes], bool]) -> asyncio.Future[bool]:
        """Call `heard` with the bytes as they come, until it says that it has enough: then True, else False at the end.

        Raises what `heard` raises, and UpstreamError when the answer breaks off. What comes after enough is dropped.
        """
        assert self._exchange is None and self._waiter is None
        self._listening = listening = asyncio.get_running_loop().create_future()
        self._heard = heard
        parts, self._parts = self._parts, deque()
        self._queued = 0
        for data in parts:
            self._hear(data)
        if self._complete:
            self.finish()
        elif self._error is not None:
            self.break_off(self._error)
        else:
            self._conn.resume()
        return listening

    def _hear(self, data: bytes) -> None:
        listening, heard = self._listening, self._heard
        assert listening is not None and heard is not None
        if listening.done():
            self._queued += len(data)
            if self._queued > MOST_DROPPED_BYTES:
                self._conn.fail(UpstreamClosed("the answer went on after what was wanted of it"))
            return
        try:
            enough = heard(data)
        except Exception as error:
            listening.set_exception(error)
            self._conn.fail(UpstreamClosed("the answer was closed by its reader"))
            return
        if enough:
            listening.set_result(True)

    def splice(
        self,
        exchange: Exchange,
        *,
        on_first: Callable[[], None] | None = None,
        keep_tail: int = 4096,
        end: bool = True,
    ) -> asyncio.Future[tuple[bytes, int]]:
        """Pass the body to the client as it comes; the result is its last `keep_tail` bytes and its length.

        `on_first` is called before the first byte is passed on (never for an empty body), and may start the
        exchange. At the answer's end the exchange is ended too, unless `end` is False or it has not started. Raises
        UpstreamError when the answer breaks off; the exchange is then as it was, and open. Cancelling the future
        closes the answer, and a client that goes away cancels it.
        """
        assert self._exchange is None and self._waiter is None
        spliced = asyncio.get_running_loop().create_future()
        self._spliced = spliced
        self._exchange = exchange
        self._on_first = on_first
        self._keep_tail = keep_tail
        self._end = end
        self._tail: deque[bytes] = deque()
        self._tail_bytes = self._total = 0
        if exchange.gone:
            spliced.cancel()
            self.close()
            return spliced
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._queued = 0
            self.take(data)
        if self._complete:
            self._end_splice()
        elif self._error is not None:
            self._break_splice(self._error)
        elif not spliced.done():
            exchange.on_gone(self._client_gone)
            spliced.add_done_callback(self._on_spliced)
            if not exchange.blocked:
                self._conn.resume()
        return spliced

    def _on_spliced(self, spliced: asyncio.Future[tuple[bytes, int]]) -> None:
        if spliced.cancelled():
            self.close()

    def _client_gone(self) -> None:
        assert self._spliced is not None
        self._spliced.cancel()
        self.close()

    def _end_splice(self) -> None:
        exchange, spliced = self._exchange, self._spliced
        assert exchange is not None and spliced is not None
        if spliced.done():
            return
        exchange.on_gone(None)
        exchange.on_writable(None)
        if self._end and exchange.started:
            exchange.end()
        tail = b"".join(self._tail)
        self._tail.clear()
        spliced.set_result((tail[-self._keep_tail :] if self._keep_tail else b"", self._total))

    def _break_splice(self, error: BaseException) -> None:
        exchange, spliced = self._exchange, self._spliced
        assert exchange is not None and spliced is not None
        if not spliced.done():
            exchange.on_gone(None)
            exchange.on_writable(None)
            spliced.set_exception(error)

    # -- for the connection

    def take(self, data: bytes, last: bool = False) -> None:
        """More of the body; the connection calls `finish` next if it is the last."""
        exchange = self._exchange
        size = len(data)
        if exchange is None:
            if self._listening is not None:
                self._hear(data)
                return
            self._parts.append(data)
            self._queued += size
            if self._queued >= QUEUE_BYTES:
                self._conn.pause()
            waiter = self._waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            return
        spliced = self._spliced
        assert spliced is not None
        if spliced.done():  # cancelled just now
            return
        try:
            if not self._total and self._on_first is not None:
                self._on_first()
            self._total += size
            tail = self._tail
            tail.append(data)
            kept = self._tail_bytes + size
            keep = self._keep_tail
            while kept - len(tail[0]) >= keep and len(tail) > 1:
                kept -= len(tail.popleft())
            self._tail_bytes = kept
            if last and self._end:
                exchange.end(data)  # all in one write
            else:
                exchange.write(data)
        except Exception as error:  # the caller's: on_first raised, or the exchange is not one to write to
            self._break_splice(error)
            self._conn.fail(UpstreamClosed("the answer was closed by its reader"))
            return
        if exchange.blocked:
            self._conn.pause()
            exchange.on_writable(self._conn.resume)

    def finish(self) -> None:
        self._complete = True
        if self._exchange is not None:
            self._end_splice()
        elif self._listening is not None:
            if not self._listening.done():
                self._listening.set_result(False)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def break_off(self, error: UpstreamError) -> None:
        self._error = error
        if self._exchange is not None:
            self._break_splice(error)
        elif self._listening is not None:
            if not self._listening.done():
                self._listening.set_exception(error)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
