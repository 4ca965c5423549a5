"""HTTP/1.1 for the router's clients, on a raw asyncio protocol (uvloop's or asyncio's own).

How messages are read is the business of `http_messages.py`: a head once it is whole, bodies with a Content-Length by hand,
chunked ones through `Dechunk`.

Rules that hold here
- The handler runs once head and whole body have arrived, as a task of its connection. One request at a time:
  what a client pipelines waits in a buffer, and reading is paused while that is full.
- A client that ends its side of the connection is gone, also if it could still read: it looks exactly like one that
  was killed, and holding GPU memory for that one costs more. Its handler is cancelled, unless it has ended its answer.
  Nothing is read, hence no end seen, of a client that pipelined more than the buffer holds.
- An answer that cannot be completed never looks complete to its client.
- Whoever stops sending or reading is cut: every state of a connection has a deadline. One timer watches them all,
  so a deadline costs its connection an assignment and is met up to `tick_s` late.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import cast

import msgspec

from services.router.exchange import STATUS_LINES, Exchange, date_line
from services.router.http_messages import (
    BadFraming,
    BadRequest,
    Dechunk,
    Head,
    Heads,
)
from shared.openai import ApiError

FRAGMENT_BYTES = 4096  # fragments of a body below this are gathered, not kept one by one
LINGER_BYTES = 16 * 2**20
_NEVER = math.inf
_METHOD_START = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset

# What a connection does; _BUSY is a handler that runs.
_HEAD, _BODY, _CHUNKED, _BUSY, _LINGER, _CLOSED = range(6)


class HttpLimits(msgspec.Struct, frozen=True):
    """Bounds of a server; times are wall seconds."""

    max_body: int = 64 * 2**20
    max_bodies: int = 2**30  # of bodies that are still arriving, all together
    max_head: int = 32768
    max_headers: int = 128
    max_connections: int = 16384
    pipeline_bytes: int = 65536  # of requests that wait behind a running one
    write_buffer: int = 65536  # above it a client counts as slow (`Exchange.blocked`)
    head_timeout_s: float = 30.0  # from a head's first byte, or a new connection, to its end
    body_idle_s: float = 30.0
    body_bytes_s: float = 65536.0  # at which a whole body must arrive, after a minute
    idle_timeout_s: float = 75.0  # between requests
    write_timeout_s: float = 60.0  # in which a slow client must have taken something
    linger_s: float = 2.0  # after a refusal, so that it is read before the connection's end
    tick_s: float = 0.25


def openai_error(status: int, message: str) -> bytes:
    return ApiError(status, message, type="invalid_request_error" if status < 500 else "server_error").body()


Handler = Callable[[Exchange], Coroutine[object, object, None]]


class _Connection(asyncio.Protocol):
    __slots__ = (
        "_body_until", "_dechunk", "_exchange", "_gathered", "_head", "_held", "_left", "_parts", "_read_paused",
        "_reserved", "_seen", "_state", "_task", "_unsent", "deadline", "peer", "server", "transport",
        "write_deadline", "write_paused",
    )  # fmt: skip
    transport: asyncio.Transport

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.peer = ""
        self.deadline = self.write_deadline = _NEVER
        self.write_paused = False
        self._read_paused = False
        self._state = _HEAD
        self._held = bytearray()  # of a head that has not ended, or of what was pipelined
        self._head: Head | None = None
        self._parts: list[bytes | bytearray] = []
        self._gathered = bytearray()
        self._left = 0  # of a body with a length; of a chunked one, of what it may still have
        self._reserved = 0  # bytes of the server's room for bodies
        self._body_until = _NEVER
        self._dechunk: Dechunk | None = None
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._seen = False  # a byte of the head that is awaited
        self._unsent = -1  # when a write deadline was set

    # -- from the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        server = self.server
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        no_delay(transport)
        transport.set_write_buffer_limits(high=server.limits.write_buffer)
        full = len(server.connections) >= server.limits.max_connections
        server.connections.add(self)
        self.deadline = server.now() + server.limits.head_timeout_s
        if server.closing:
            self.close()
        elif full:
            self._write_refusal(503, "This server has all the connections that it may have; try again soon.")
            self.close()

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state == _HEAD:
            self._take_head(data)
        elif state == _BODY:
            self._take_body(data)
        elif state == _CHUNKED:
            self._take_chunks(data)
        elif state == _BUSY:
            self._pipeline(data)
        elif state == _LINGER:
            self._left -= len(data)
            if self._left < 0:
                self._pause_reading()

    def eof_received(self) -> None:
        """The transport closes itself after this, once what was written is sent."""
        exchange = self._exchange
        unfinished = exchange is not None and not exchange.ended
        self._lose()
        if unfinished:
            self.transport.abort()
        else:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._state = _CLOSED
        self.deadline = self.write_deadline = _NEVER
        self._held.clear()
        self._parts.clear()
        self._release()
        self._lose()
        self.server.forget(self)

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._exchange is not None:
            self._exchange.blocked = True
        self._unsent = self.transport.get_write_buffer_size()
        self.write_deadline = self.server.now() + self.server.limits.write_timeout_s

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._state != _CLOSED:
            self.write_deadline = _NEVER
        if self._exchange is not None:
            self._exchange.unblock()

    # -- a request's bytes

    def _take_head(self, data: bytes) -> None:
        held = self._held
        if held:
            begin = max(0, len(held) - 3)
            held += data
            end = held.find(b"\r\n\r\n", begin)
            if end >= 0:
                data = bytes(held)
                held.clear()
        else:
            if data[0] == 13 or data[0] == 10:  # an empty line before a request is skipped
                data = data.lstrip(b"\r\n")
                if not data:
                    return
            if data[0] not in _METHOD_START:
                self.refuse(400, "The request is not HTTP/1.1.")
                return
            end = data.find(b"\r\n\r\n")
            if end < 0:
                held += data
        limit = self.server.limits.max_head
        if (end + 4 if end >= 0 else len(held)) > limit:
            self.refuse(431, f"The request's head is longer than {limit} bytes.")
            return
        if end < 0:
            if not self._seen:
                self._seen = True
                self.deadline = self.server.now() + self.server.limits.head_timeout_s
            return
        end += 4
        try:
            head = self.server.heads.read(data[:end])
            self._begin_body(head, data[end:])
        except BadRequest as error:
            self.refuse(error.status, error.message)

    def _begin_body(self, head: Head, rest: bytes) -> None:
        limits = self.server.limits
        length = head.length
        if length is not None:
            if length > limits.max_body:
                raise BadRequest(413, f"The request's body is longer than {limits.max_body} bytes.")
            have = len(rest)
            if have == length:
                self._dispatch(head, rest, b"")
                return
            if have > length:
                self._dispatch(head, rest[:length], rest[length:])
                return
        # What has no length is taken to be of middling size.
        self._reserved = length if length is not None else limits.max_body // 8
        if self.server.body_bytes + self._reserved > limits.max_bodies:
            self._reserved = 0
            raise BadRequest(503, "Too many request bodies are arriving at once; try again soon.")
        self.server.body_bytes += self._reserved
        self._head = head
        now = self.server.now()
        self._body_until = now + 60.0 + self._reserved / limits.body_bytes_s
        self.deadline = now + limits.body_idle_s
        if head.expects and not rest:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if length is not None:
            self._state, self._left = _BODY, length
            if rest:
                self._take_body(rest)
        else:
            self._state, self._left = _CHUNKED, limits.max_body
            self._dechunk = Dechunk()
            if rest:
                self._take_chunks(rest)

    def _keep(self, data: bytes) -> None:
        if len(data) < FRAGMENT_BYTES:
            self._gathered += data
        else:
            if self._gathered:
                self._parts.append(self._gathered)
                self._gathered = bytearray()
            self._parts.append(data)

    def _release(self) -> None:
        self.server.body_bytes -= self._reserved
        self._reserved = 0

    def _end_body(self, rest: bytes) -> None:
        self._release()
        if self._gathered:
            self._parts.append(self._gathered)
            self._gathered = bytearray()
        body = b"".join(self._parts)
        self._parts.clear()
        head = self._head
        self._head = self._dechunk = None
        assert head is not None
        self._dispatch(head, body, rest)

    def _take_body(self, data: bytes) -> None:
        left = self._left
        have = len(data)
        if have < left:
            self._left = left - have
            self._keep(data)
            self.deadline = min(self.server.now() + self.server.limits.body_idle_s, self._body_until)
            return
        rest = b""
        if have > left:
            data, rest = data[:left], data[left:]
        self._keep(data)
        self._end_body(rest)

    def _take_chunks(self, data: bytes) -> None:
        dechunk = self._dechunk
        assert dechunk is not None
        try:
            data = dechunk.feed(data)
        except BadFraming as error:
            self.refuse(400, f"The request's body is not valid: {error}.")
            return
        self._left -= len(data)
        if self._left < dechunk.announced:
            limit = self.server.limits.max_body
            self.refuse(413, f"The request's body is longer than {limit} bytes.")
            return
        if data:
            self._keep(data)
        if dechunk.done:
            self._end_body(dechunk.rest)
        else:
            self.deadline = min(self.server.now() + self.server.limits.body_idle_s, self._body_until)

    # -- a request

    def _dispatch(self, head: Head, body: bytes, rest: bytes) -> None:
        self._state = _BUSY
        self.deadline = _NEVER
        if rest:
            self._pipeline(rest)
        self._exchange = exchange = Exchange(self, head, body)
        self._task = self.server.run(self, exchange)

    def _pipeline(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > self.server.limits.pipeline_bytes:
            self._pause_reading()

    def over(self, exchange: Exchange) -> None:
        """The handler has returned and the answer has ended: on to the next request."""
        self._exchange = self._task = None
        if self._state != _BUSY:
            return
        if not exchange.head.keep_alive or self.server.closing:
            if self._held:
                self._linger()
            else:
                self.close()
            return
        self._state = _HEAD
        self._seen = False
        self._unsent = -1
        self.deadline = self.server.now() + self.server.limits.idle_timeout_s
        if self._held:
            data = bytes(self._held)
            self._held.clear()
            self._take_head(data)
        if len(self._held) <= self.server.limits.pipeline_bytes:
            self._resume_reading()

    # -- ends

    def _pause_reading(self) -> None:
        if not self._read_paused and not self.transport.is_closing():
            self._read_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._read_paused and not self.transport.is_closing():
            self._read_paused = False
            self.transport.resume_reading()

    def _lose(self) -> None:
        exchange = self._exchange
        if exchange is not None and not exchange.gone:
            exchange.lose()
            if not exchange.ended and self._task is not None:
                self._task.cancel()

    def _write_refusal(self, status: int, message: str) -> None:
        body = self.server.on_bad(status, message)
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        self.transport.write(b"%b%b%b\r\n%b" % (line, head, date_line(), body))

    def refuse(self, status: int, message: str) -> None:
        """Answer what is no request, or not one to be served, and end the connection."""
        self._write_refusal(status, message)
        self._linger()

    def _linger(self) -> None:
        """Close, but read on for a while: data that nobody reads would reset the answer away from the client."""
        self._held.clear()
        self._parts.clear()
        self._gathered.clear()
        self._head = self._dechunk = None
        self._state, self._left = _LINGER, LINGER_BYTES
        self.deadline = self.server.now() + self.server.limits.linger_s
        if not self.transport.is_closing():
            self._resume_reading()
            self.transport.write_eof()

    def close(self) -> None:
        """End the connection once what was written is sent."""
        self._state = _CLOSED
        self.deadline = _NEVER
        self._unsent = self.transport.get_write_buffer_size()
        self.write_deadline = self.server.now() + self.server.limits.write_timeout_s
        self.transport.close()

    def cut(self, reset: bool) -> None:
        """End the connection within an answer; with a reset where its plain end would complete the answer."""
        if reset:
            sock = self.transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._state = _CLOSED
            self.transport.abort()
        else:
            self.close()

    def retire(self) -> None:
        """The server closes: end the connection unless a request is under way."""
        if self._state == _HEAD and not self._held:
            self.close()

    def check(self, now: float) -> None:
        """Called after `deadline` or `write_deadline`."""
        limits = self.server.limits
        if now >= self.write_deadline:
            unsent = self.transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._unsent = unsent
                self.write_deadline = now + limits.write_timeout_s
            else:
                self._state = _CLOSED
                self.transport.abort()
        elif self._state == _HEAD:
            unsent = self.transport.get_write_buffer_size()
            if self._seen:
                self.refuse(408, f"The request's head did not arrive within {limits.head_timeout_s:g} s.")
            elif unsent and unsent != self._unsent:  # the last answer is still on its way
                self._unsent = unsent
                self.deadline = now + limits.write_timeout_s
            else:
                self.close()
                if unsent:
                    self.transport.abort()
        elif self._state == _LINGER:
            self._state = _CLOSED
            self.transport.abort()
        else:
            self.refuse(408, f"No byte of the request's body arrived for {limits.body_idle_s:g} s.")


def no_delay(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class HttpServer:
    """Serves `handler`; see the module for what it is promised.

    `on_bad(status, message)` gives the JSON body of what is answered without a handler; `on_error(exchange, error)`
    is told what a handler raised and may answer it. What it leaves unanswered becomes a 500, and an answer that
    has begun is cut.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        limits: HttpLimits | None = None,
        on_bad: Callable[[int, str], bytes] = openai_error,
        on_error: Callable[[Exchange, BaseException], None] | None = None,
    ) -> None:
        self.handler, self.on_bad, self.on_error = handler, on_bad, on_error
        self.limits = limits or HttpLimits()
        self.heads = Heads(self.limits.max_headers)
        self.connections: set[_Connection] = set()
        self.closing = False
        self.body_bytes = 0  # that connections have room for while they arrive
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None

    async def start(self, sock: socket.socket, backlog: int = 1024) -> None:
        """Serve on a bound socket, which is the server's from now on. May be called for several."""
        self._loop = loop = asyncio.get_running_loop()
        self.now, self.soon = loop.time, loop.call_soon
        server = await loop.create_server(lambda: _Connection(self), sock=sock, backlog=backlog)
        self._servers.append(server)
        if self._timer is None:
            self._watch()

    async def close(self, grace_s: float) -> None:
        """Accept nothing more, let what runs end within `grace_s`, then cut it."""
        self.closing = True
        for server in self._servers:
            server.close()
        for connection in list(self.connections):
            connection.retire()
        await self._empty(grace_s)
        for connection in list(self.connections):
            connection.transport.abort()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._empty(1.0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _empty(self, timeout_s: float) -> None:
        """Wait until no connection and no handler is left."""
        if self.connections or self._tasks:
            self._emptied = self._loop.create_future()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._emptied
            except TimeoutError:
                pass
            finally:
                self._emptied = None

    def _watch(self) -> None:
        now = self.now()
        for connection in list(self.connections):
            if now >= connection.deadline or now >= connection.write_deadline:
                connection.check(now)
        self._timer = self._loop.call_later(self.limits.tick_s, self._watch)

    # -- for connections

    def run(self, connection: _Connection, exchange: Exchange) -> asyncio.Task[None]:
        task = self._loop.create_task(self.handler(exchange))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ran(task, connection, exchange))
        return task

    def _ran(self, task: asyncio.Task[None], connection: _Connection, exchange: Exchange) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and self.on_error is not None:
            try:
                self.on_error(exchange, error)
            except Exception as failed:
                self._loop.call_exception_handler({"message": "on_error failed", "exception": failed})
        elif error is not None and not exchange.gone:
            self._loop.call_exception_handler({"message": "a handler failed", "exception": error})
        if not exchange.started and not exchange.ended:
            body = self.on_bad(500, "The server failed to answer this request.")
            exchange.reply(500, ((b"content-type", b"application/json"),), body)
        exchange.abort()
        connection.over(exchange)
        self._told()

    def forget(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        self._told()

    def _told(self) -> None:
        done = self._emptied
        if done is not None and not self.connections and not self._tasks and not done.done():
            done.set_result(None)
