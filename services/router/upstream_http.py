"""HTTP/1.1 calls to engines and workers, on a raw asyncio protocol, with answers spliced to the router's clients.

Rules that hold here
- A kept-alive connection that ends before a byte of its answer is stale: the request goes out once more, on a fresh
  one. Nothing else is ever sent twice.
- A connection goes back to its pool only after a whole answer, with nothing after it and nothing left to send.
- An answer is whole, or raises: an end within a body, chunk or head is an error, and so is silence (`read_idle_s`,
  not counted while reading is paused on behalf of the reader).
- Heads and chunked framing are read as strictly as a client's (`services.router.http`).
"""

from __future__ import annotations

import asyncio
import math
import urllib.parse
from typing import cast

import msgspec

from services.router.exchange import FRAMING, JOIN_BYTES
from services.router.http import no_delay
from services.router.http_messages import (
    BadFraming,
    Dechunk,
    HeaderLines,
    Headers,
    check_head,
)
from services.router.upstream_answer import (
    Answer,
    AnswerHead,
    BadAnswer,
    ConnectError,
    UpstreamClosed,
    UpstreamError,
    UpstreamTimeout,
)

_OWN = FRAMING | {b"host"}
_BODY_METHODS = frozenset(("POST", "PUT", "PATCH"))
_NEVER = math.inf
_NO_LINES = HeaderLines()
MOST_KEPT_HEADS, MOST_KEPT_HEAD = 256, 1024  # answers' heads that are kept read, and bytes of one

# What a connection does.
_IDLE, _HEAD, _BODY, _CLOSED = range(4)
# How an answer's end is told.
_LENGTH, _CHUNKS, _CLOSE = range(3)


class UpstreamLimits(msgspec.Struct, frozen=True):
    """Bounds of a pool; times are wall seconds."""

    max_head: int = 65536
    max_idle: int = 256  # connections that are kept for each host
    idle_timeout_s: float = 30.0  # for which one is kept; less than the other side's
    read_idle_s: float = 300.0  # of silence within an answer; `Answer.read_idle_s` sets another
    tick_s: float = 0.25


class _Origin:
    """A base URL, taken apart, and its kept-alive connections, latest last."""

    __slots__ = ("authority", "host", "idle", "port", "prefix")

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is no base URL: http://host[:port][/prefix]")
        self.host, self.port = parts.hostname, parts.port or 80
        self.authority = parts.netloc.rpartition("@")[2].encode("ascii")
        self.prefix = parts.path.rstrip("/").encode("ascii")
        self.idle: list[_Connection] = []


class _Connection(asyncio.Protocol):
    __slots__ = (
        "_answer", "_answered", "_dechunk", "_head_request", "_held", "_left", "_mode", "_now", "_origin",
        "_paused", "_pool", "_read_at", "_reusable", "_state", "_until", "touched", "transport",
    )  # fmt: skip

    def __init__(self, pool: Upstream, origin: _Origin) -> None:
        self._pool, self._origin = pool, origin
        self._now = asyncio.get_running_loop().time
        self.transport: asyncio.Transport | None = None
        self._state = _IDLE
        self._held = b""  # of a head
        self._answer: Answer | None = None
        self._answered: asyncio.Future[Answer] | None = None
        self._dechunk: Dechunk | None = None
        self._mode = _LENGTH
        self._left = 0
        self._paused = False
        self._reusable = False
        self._head_request = False
        self.touched = False  # a byte of the present answer has come
        self._read_at = self._now()
        self._until = _NEVER

    @property
    def usable(self) -> bool:
        return self._state == _IDLE and self.transport is not None and not self.transport.is_closing()

    def exchange(
        self, head: bytes, body: bytes, head_request: bool, timeout_s: float | None
    ) -> asyncio.Future[Answer]:
        """Send a request. Its future raises UpstreamError; cancelling it ends the connection."""
        transport = self.transport
        assert transport is not None
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answered = answered
        self._state = _HEAD
        self._head_request = head_request
        self.touched = False
        self._read_at = now = self._now()
        self._until = _NEVER if timeout_s is None else now + timeout_s
        if not body:
            transport.write(head)
        elif len(body) <= JOIN_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        return answered

    # -- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._pool.connections.add(self)
        if self._state == _CLOSED:
            transport.abort()
        else:
            no_delay(transport)

    def data_received(self, data: bytes) -> None:
        self._read_at = self._now()
        if self._state == _BODY:
            self._take_body(data)
        elif self._state == _HEAD:
            self._take_head(data)
        else:  # nothing was asked
            self.fail(UpstreamClosed("bytes came that nobody asked for"))

    def eof_received(self) -> None:
        """The transport closes itself after this."""
        if self._state == _BODY and self._mode == _CLOSE:
            self._complete(b"")
        else:
            self.fail(self._closed(None))

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(self._closed(error))
        self._pool.forget(self)

    def _closed(self, error: Exception | None) -> UpstreamClosed:
        why = f": {error}" if error is not None else ""
        where = "within its answer" if self._state == _BODY else "before its answer's head"
        return UpstreamClosed(f"{self._origin.host}:{self._origin.port} closed the connection {where}{why}")

    # -- an answer's bytes

    def _take_head(self, data: bytes) -> None:
        self.touched = True
        if self._held:
            begin = max(0, len(self._held) - 3)
            data = self._held + data
            end = data.find(b"\r\n\r\n", begin)
        else:
            end = data.find(b"\r\n\r\n")
        limit = self._pool.limits.max_head
        if (end + 4 if end >= 0 else len(data)) > limit:
            self.fail(BadAnswer(f"the answer's head is longer than {limit} bytes"))
            return
        if end < 0:
            if not b"HTTP/1.".startswith(data[:7]):
                self.fail(BadAnswer("the answer is not HTTP/1.1"))
                return
            self._held = data
            return
        end += 4
        try:
            rest = self._begin(data[:end], data[end:])
        except BadAnswer as error:
            self.fail(error)
            return
        if rest is not None:
            self._held = b""
            if rest:
                self._take_head(rest)

    def _begin(self, data: bytes, rest: bytes) -> bytes | None:
        """Take a whole head; what follows it if it was interim, else None. Raises BadAnswer."""
        head = self._pool.head(data)
        if head.status < 200:
            return rest
        answer = Answer(self, head, self._pool.limits.read_idle_s)
        self._reusable = head.reusable
        if self._head_request or head.status == 204 or head.status == 304:
            self._mode, self._left = _LENGTH, 0
        elif head.chunked:
            self._mode, self._dechunk = _CHUNKS, Dechunk()
        elif head.length is not None:
            self._mode, self._left = _LENGTH, head.length
        else:
            self._mode, self._reusable = _CLOSE, False
        self._held = b""
        self._answer = answer
        self._state = _BODY
        answered, self._answered = self._answered, None
        assert answered is not None
        if answered.cancelled():
            self.fail(UpstreamClosed("the call was cancelled"))
            return None
        answered.set_result(answer)
        if rest or (self._mode == _LENGTH and not self._left):
            self._take_body(rest)
        return None

    def _take_body(self, data: bytes) -> None:
        answer = self._answer
        assert answer is not None
        mode = self._mode
        if mode == _CHUNKS:
            dechunk = self._dechunk
            assert dechunk is not None
            try:
                data = dechunk.feed(data)
            except BadFraming as error:
                self.fail(BadAnswer(f"the answer's body is not valid: {error}"))
                return
            if data:
                answer.take(data, dechunk.done)
            if dechunk.done:
                self._complete(dechunk.rest)
        elif mode == _LENGTH:
            left = self._left - len(data)
            if left > 0:
                self._left = left
                answer.take(data)
                return
            rest = b""
            if left < 0:
                data, rest = data[:left], data[left:]
            self._left = 0
            if data:
                answer.take(data, True)
            self._complete(rest)
        else:
            answer.take(data)

    def _complete(self, rest: bytes) -> None:
        """The answer has come to its end; `rest` came after it."""
        answer = self._answer
        if answer is None or self._state != _BODY:  # its reader closed it meanwhile
            return
        self._answer = self._dechunk = None
        transport = self.transport
        assert transport is not None
        reusable = self._reusable and not rest and not transport.is_closing()
        if reusable and not transport.get_write_buffer_size() and self._pool.keeps(self._origin):
            self._state = _IDLE
            if self._paused:
                self._paused = False
                transport.resume_reading()
            self._origin.idle.append(self)
        else:
            self._state = _CLOSED
            transport.abort()
        answer.finish()

    # -- for the answer and the pool

    def pause(self) -> None:
        transport = self.transport
        if not self._paused and self._state == _BODY and transport is not None and not transport.is_closing():
            self._paused = True
            transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._state == _BODY and self.transport is not None:
            self._paused = False
            self._read_at = self._now()
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def fail(self, error: UpstreamError) -> None:
        """End the connection, and what runs on it with `error`."""
        if self._state == _CLOSED:
            return
        if self._state == _IDLE and self in self._origin.idle:
            self._origin.idle.remove(self)
        self._state = _CLOSED
        if self.transport is not None:
            self.transport.abort()
        answered, self._answered = self._answered, None
        answer, self._answer = self._answer, None
        if answered is not None and not answered.done():
            answered.set_exception(error)
        if answer is not None:
            self._answer = None
            answer.break_off(error)

    def check(self, now: float) -> None:
        if self._state == _HEAD:
            if now >= self._until:
                self.fail(UpstreamTimeout(f"{self._origin.host}:{self._origin.port} did not answer in time"))
        elif self._state == _BODY:
            assert self._answer is not None
            if not self._paused and now - self._read_at >= self._answer.read_idle_s:
                silent_s = self._answer.read_idle_s
                who = f"{self._origin.host}:{self._origin.port}"
                self.fail(UpstreamTimeout(f"{who} was silent for {silent_s:g} s within its answer"))
        elif self._state == _IDLE and now - self._read_at >= self._pool.limits.idle_timeout_s:
            self.fail(UpstreamClosed("idle"))


class Upstream:
    """A pool of connections. To be used and closed in one event loop."""

    def __init__(self, limits: UpstreamLimits | None = None) -> None:
        self.limits = limits or UpstreamLimits()
        self.connections: set[_Connection] = set()
        self._origins: dict[str, _Origin] = {}
        self._heads: dict[
            bytes, AnswerHead
        ] = {}  # an engine's heads differ in little but the second of their date
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def request(
        self,
        url_base: str,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes = b"",
        *,
        connect_timeout_s: float,
        head_timeout_s: float | None,
        lines: HeaderLines = _NO_LINES,
    ) -> Answer:
        """Send a request; return once its answer's head is there.

        Host and the framing headers are set here, a caller's are dropped. `lines`: headers that are ready to be sent,
        none of them of these. Raises UpstreamError, also for an
        address that is none, and ValueError for what cannot be sent.
        """
        try:
            origin = self._origins.get(url_base) or self._origin(url_base)
        except ValueError as error:
            raise ConnectError(str(error)) from None
        head = _request_head(origin, method, target, headers, body, lines)
        head_request = method == "HEAD"
        idle = origin.idle
        while idle:
            conn = idle.pop()
            if conn.usable:
                try:
                    return await self._answer(conn, head, body, head_request, head_timeout_s)
                except UpstreamClosed:
                    if conn.touched or self._closed:
                        raise
                break
        conn = await self._connect(origin, connect_timeout_s)
        return await self._answer(conn, head, body, head_request, head_timeout_s)

    async def close(self) -> None:
        """End every connection, and the calls on them with UpstreamClosed."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for conn in list(self.connections):
            conn.fail(UpstreamClosed("the pool is closed"))
        for _ in range(100):
            if not self.connections:
                break
            await asyncio.sleep(0)

    async def _answer(
        self, conn: _Connection, head: bytes, body: bytes, head_request: bool, timeout_s: float | None
    ) -> Answer:
        answered = conn.exchange(head, body, head_request, timeout_s)
        try:
            return await answered
        except asyncio.CancelledError:
            conn.fail(UpstreamClosed("the call was cancelled"))
            raise

    async def _connect(self, origin: _Origin, timeout_s: float) -> _Connection:
        self._check_open()
        loop = asyncio.get_running_loop()
        conn = _Connection(self, origin)
        where = f"{origin.host}:{origin.port}"
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: conn, origin.host, origin.port)
            self._check_open()
        except TimeoutError:
            conn.fail(UpstreamClosed("not connected in time"))
            raise ConnectError(f"no connection to {where} within {timeout_s:g} s") from None
        except OSError as error:
            conn.fail(UpstreamClosed("not connected"))
            raise ConnectError(f"no connection to {where}: {error}") from None
        except BaseException:
            conn.fail(UpstreamClosed("the call was cancelled"))
            raise
        if not conn.usable:
            raise UpstreamClosed(f"{where} closed the connection at once")
        return conn

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectError("the pool is closed")

    def _origin(self, url: str) -> _Origin:
        if self._timer is None and not self._closed:
            self._watch()
        origin = self._origins[url] = _Origin(url)
        return origin

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for conn in list(self.connections):
            conn.check(now)
        self._timer = loop.call_later(self.limits.tick_s, self._watch)

    # -- for connections

    def head(self, data: bytes) -> AnswerHead:
        """A whole head, read. Raises BadAnswer."""
        head = self._heads.get(data)
        if head is None:
            head = AnswerHead(data)
            if len(data) <= MOST_KEPT_HEAD:
                if len(self._heads) >= MOST_KEPT_HEADS:
                    self._heads.clear()
                self._heads[data] = head
        return head

    def keeps(self, origin: _Origin) -> bool:
        return not self._closed and len(origin.idle) < self.limits.max_idle

    def forget(self, conn: _Connection) -> None:
        self.connections.discard(conn)


def _request_head(
    origin: _Origin, method: str, target: bytes, headers: Headers, body: bytes, ready: HeaderLines
) -> bytes:
    target = origin.prefix + target
    if not method.isalpha() or not target.startswith(b"/") or b" " in target:
        raise ValueError(f"{method} {target!r} is no request")
    parts = [
        b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" % (method.encode("ascii"), target, origin.authority, ready.text)
    ]
    lines = 3 + ready.lines
    for name, value in headers:
        if name.lower() not in _OWN:
            parts += (name, b": ", value, b"\r\n")
            lines += 1
    if body or method in _BODY_METHODS:
        parts.append(b"content-length: %d\r\n\r\n" % len(body))
        lines += 1
    else:
        parts.append(b"\r\n")
    head = b"".join(parts)
    check_head(head, lines)
    return head
