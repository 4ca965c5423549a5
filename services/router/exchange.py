"""One request of a client and its answer, on a connection of `http.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING

from services.router.http_messages import Head, HeaderLines, Headers, check_head, safe_path

if TYPE_CHECKING:
    from services.router.http import _Connection

JOIN_BYTES = 16384  # a head and a body up to this are copied into one write
FRAMING = frozenset((b"content-length", b"transfer-encoding", b"connection", b"keep-alive"))

# How an answer's end is told.
_NOTHING, _LENGTH, _CHUNKS, _CLOSE = range(4)

_NO_LINES = HeaderLines()
STATUS_LINES = {int(s): b"HTTP/1.1 %d %b\r\n" % (s, s.phrase.encode()) for s in HTTPStatus}
_date_of = 0
_date = b""


def date_line() -> bytes:
    global _date_of, _date
    now = int(time.time())
    if now != _date_of:
        _date_of, _date = now, b"date: %b\r\n" % formatdate(now, usegmt=True).encode()
    return _date


class Exchange:
    """A request that has arrived and its answer.

    Either `reply`, or `start`, any number of `write` and `end`, or `abort`. Headers that frame the message
    (`FRAMING`) are the server's; a caller's are dropped. Once the client is `gone`, what is written is dropped.
    """

    __slots__ = (
        "_conn", "_left", "_mode", "_on_gone", "_on_writable", "_unsent", "_waiters", "blocked", "body", "ended",
        "gone", "head", "method", "path", "peer", "query", "raw_headers", "started", "target",
    )  # fmt: skip

    def __init__(self, conn: _Connection, head: Head, body: bytes) -> None:
        self._conn = conn
        self.head = head
        self.method = head.method
        self.target = target = head.target  # as it came
        if target[0] != 47 and b"://" in target:  # an absolute form: its host is the Host header's business
            _, _, after = target.partition(b"://")
            slash = after.find(b"/")
            target = after[slash:] if slash >= 0 else b"/"
            self.target = target
        path, _, query = target.partition(b"?")
        self.path = safe_path(path)
        self.query = query.decode("latin-1")
        self.raw_headers = head.raw
        self.body = body
        self.peer = conn.peer
        self.started = self.ended = self.gone = False
        self.blocked = conn.write_paused  # the client reads slower than it is written to
        self._mode = _NOTHING
        self._left = 0
        self._unsent = b""  # the head, until the first write
        self._on_writable: Callable[[], None] | None = None
        self._on_gone: Callable[[], None] | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def headers(self) -> dict[str, str]:
        """By lower-case name, equal names joined by ", "."""
        return self.head.fields

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole answer. Raises RuntimeError after a start, ValueError for a header with a line break."""
        bodyless = status == 204 or status == 304
        head = self._head(status, headers, b"" if bodyless else b"content-length: %d\r\n" % len(body))
        self.started = self.ended = True
        if self.gone:
            return
        if bodyless or not body or self.method == "HEAD":
            self._conn.transport.write(head)
        elif len(body) <= JOIN_BYTES:
            self._conn.transport.write(head + body)
        else:
            self._conn.transport.writelines((head, body))

    def start(
        self, status: int, headers: Headers, length: int | None = None, lines: HeaderLines = _NO_LINES
    ) -> None:
        """Send the head. Without a length the body is chunked, or ends with the connection for HTTP/1.0.

        `lines`: headers that are ready to be sent, none of them of `FRAMING`, nor a date.
        """
        mode, framing = _NOTHING, b""
        if status == 204 or status == 304:
            pass
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
            if self.method != "HEAD":
                mode, self._left = _LENGTH, length
        elif self.method != "HEAD":
            if self.head.http11:
                mode, framing = _CHUNKS, b"transfer-encoding: chunked\r\n"
            else:
                mode, self.head.keep_alive = _CLOSE, False
        head = self._head(status, headers, framing, lines)
        self.started = True
        self._mode = mode
        if not self.gone:  # to be sent with the first bytes, if they are written at once
            self._unsent = head
            self._conn.server.soon(self._flush)

    def _flush(self) -> None:
        head, self._unsent = self._unsent, b""
        if head and not self.gone:
            self._conn.transport.write(head)

    def _head(self, status: int, headers: Headers, framing: bytes, ready: HeaderLines = _NO_LINES) -> bytes:
        if self.started:
            raise RuntimeError("the answer has begun already")
        if status < 200:
            raise ValueError("an interim answer is not a handler's")
        parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        dated = False
        for name, value in headers:
            lower = name.lower()
            if lower in FRAMING:
                continue
            if lower == b"date":
                dated = True
            parts += (name, b": ", value, b"\r\n")
        lines = len(parts) // 4 + 2 + ready.lines
        parts.append(ready.text)
        if framing:
            parts.append(framing)
            lines += 1
        if not dated:
            parts.append(date_line())
            lines += 1
        if not self.head.keep_alive or self._conn.server.closing:
            self.head.keep_alive = False
            parts.append(b"connection: close\r\n\r\n")
            lines += 1
        elif not self.head.http11:
            parts.append(b"connection: keep-alive\r\n\r\n")
            lines += 1
        else:
            parts.append(b"\r\n")
        head = b"".join(parts)
        check_head(head, lines)
        return head

    def write(self, data: bytes) -> None:
        """Raises RuntimeError outside start and end, ValueError (and cuts the client) beyond the length."""
        self._write(data, b"")

    def end(self, data: bytes = b"") -> None:
        """Write `data`, as `write` does, and complete the answer; cuts the client if its length is not reached."""
        if self.ended:
            return
        if self._mode == _CHUNKS:
            self._write(data, b"0\r\n\r\n")
            self.ended = True
            return
        self._write(data, b"")
        if self._mode == _LENGTH and self._left:
            self.abort()
            return
        if self._unsent:
            self._flush()
        self.ended = True

    def _write(self, data: bytes, after: bytes) -> None:
        if not self.started or self.ended:
            raise RuntimeError("the answer is not under way")
        size = len(data)
        if self.gone or not (size or after):
            return
        mode = self._mode
        if mode == _NOTHING:
            return
        if mode == _LENGTH:
            if size > self._left:
                self.abort()
                raise ValueError("the answer is longer than its length")
            self._left -= size
        head = self._unsent
        if head:
            self._unsent = b""
        transport = self._conn.transport
        if mode != _CHUNKS:
            if not head:
                transport.write(data)
            elif size <= JOIN_BYTES:
                transport.write(head + data)
            else:
                transport.writelines((head, data))
        elif not size:
            transport.write(head + after)
        elif size <= JOIN_BYTES:
            transport.write(b"%b%x\r\n%b\r\n%b" % (head, size, data, after))
        else:
            transport.writelines((b"%b%x\r\n" % (head, size), data, b"\r\n" + after))

    def abort(self) -> None:
        """Cut the client off: what it has of the answer, if any, does not look complete."""
        if not self.ended:
            self.ended = True
            if not self.gone:
                self._flush()
                self._conn.cut(reset=self._mode == _CLOSE)

    async def drain(self) -> None:
        """Wait until the client has taken enough to be written to. Raises ConnectionResetError if it is gone."""
        if not self.gone and self._conn.transport.is_closing():
            await asyncio.sleep(0)  # a failed write blocks nobody, and its report is yet to come
        if self.gone:
            raise ConnectionResetError("the client is gone")
        if self.blocked:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def on_writable(self, call: Callable[[], None] | None) -> None:
        """Call it once when the client is not `blocked` any more; for use while it is. None takes it back."""
        self._on_writable = call

    def on_gone(self, call: Callable[[], None] | None) -> None:
        """Call it when the client goes away before the answer's end. None takes it back."""
        self._on_gone = call

    # -- for the connection

    def unblock(self) -> None:
        self.blocked = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        call, self._on_writable = self._on_writable, None
        if call is not None:
            call()

    def lose(self) -> None:
        self.gone, self.blocked = True, False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(ConnectionResetError("the client is gone"))
        call, self._on_gone, self._on_writable = self._on_gone, None, None
        if call is not None:
            call()
