"""The client side of the router's HTTP: an aiohttp server and raw servers as counterparts, answers spliced to clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from services.router.upstream_answer import (
    Answer,
    BadAnswer,
    ConnectError,
    UpstreamClosed,
    UpstreamError,
    UpstreamTimeout,
)
from services.router.upstream_http import Upstream, UpstreamLimits
from tests.conftest import eventually
from tests.test_http_server import event_loop_policy as event_loop_policy
from tests.test_http_server import nothing_left

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")
LIMITS = UpstreamLimits(tick_s=0.02)
Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def pool(limits: UpstreamLimits = LIMITS) -> AsyncIterator[Upstream]:
    upstream = Upstream(limits)
    try:
        yield upstream
    finally:
        await upstream.close()
        assert not upstream.connections


class RawServer:
    """Gives each connection to `peer`; counts them and the requests (`heads`)."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.connections, self.heads = peer, 0, 0
        self.open = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self.peer(reader, writer)
        finally:
            self.tasks.discard(task)
            self.open -= 1
            writer.close()

    async def head(self, reader: asyncio.StreamReader) -> bytes:
        """The next request, read whole."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads += 1
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await reader.readexactly(int(line[15:]))
        return head


@contextlib.asynccontextmanager
async def raw(peer: Callable[[RawServer], Peer]) -> AsyncIterator[tuple[RawServer, str]]:
    async with nothing_left():
        server = RawServer(lambda reader, writer: peer(server)(reader, writer))
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        try:
            yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        finally:
            listening.close()
            for task in list(server.tasks):
                task.cancel()
            await asyncio.gather(*server.tasks, return_exceptions=True)


def answering(data: bytes, *, size: int = 0, then: str = "wait") -> Callable[[RawServer], Peer]:
    """A peer that answers each request with `data`, in pieces of `size`, and then waits, closes or resets."""

    def make(server: RawServer) -> Peer:
        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await server.head(reader)
                for i in range(0, len(data), size or len(data) or 1):
                    writer.write(data[i : i + size] if size else data)
                    if size:
                        await writer.drain()
                        await asyncio.sleep(0)
                if then == "close":
                    return
                if then == "reset":
                    await writer.drain()
                    await asyncio.sleep(0.05)
                    reset(writer)
                    return

        return peer

    return make


def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def call(
    upstream: Upstream, url: str, method: str = "POST", body: bytes = b"{}", **timeouts: float
) -> Answer:
    return await upstream.request(
        url,
        method,
        b"/path?q=1",
        ((b"X-One", b"1"), (b"Host", b"dropped"), (b"Content-Length", b"99")),
        body,
        connect_timeout_s=timeouts.get("connect_timeout_s", 3.0),
        head_timeout_s=timeouts.get("head_timeout_s", 3.0),
    )


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
INNER = b"0\r\n\r\nHTTP/1.1 500 no\r\n\r\n"  # a body that looks like framing


async def test_an_aiohttp_server_understands_and_is_understood() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/p/stream":
            answer = web.StreamResponse()
            await answer.prepare(request)
            for _ in range(10):
                await answer.write(body)
            return answer
        assert "Host" in request.headers and len(request.headers.getall("Host")) == 1
        return web.json_response(
            {"bytes": len(body), "one": request.headers.get("X-One"), "path": request.raw_path}
        )

    async with nothing_left():
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{tail:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://localhost:{runner.addresses[0][1]}/p"
        async with pool() as upstream:
            for size in (0, 1, 10_000, 3_000_000):
                answer = await call(upstream, url, body=b"x" * size)
                expected = b'{"bytes": %d, "one": "1", "path": "/p/path?q=1"}' % size
                assert answer.status == 200 and await answer.read(1000) == expected
                assert answer.headers["content-type"].startswith("application/json")
            for method in ("HEAD", "GET", "DELETE"):
                answer = await call(upstream, url, method, b"")
                assert (await answer.read(1000) == b"") == (method == "HEAD")
            answer = await upstream.request(
                url, "POST", b"/stream", (), b"y" * 100_000, connect_timeout_s=3, head_timeout_s=3
            )
            assert len(await answer.read(2_000_000)) == 1_000_000
            assert len(upstream.connections) == 1
        await runner.cleanup()


WHOLE: dict[str, tuple[bytes, bytes, bool]] = {  # what is sent, the body that it is, whether the connection is kept
    "length": (OK + b"Content-Length: %d\r\n\r\n" % len(INNER) + INNER, INNER, True),
    "no body": (OK + b"Content-Length: 0\r\n\r\n", b"", True),
    "chunked": (CHUNKED + b"5\r\nhello\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER), b"hello" + INNER, True),
    "extensions and trailers": (CHUNKED + b'5;a="b";c\r\nhello\r\n0;x\r\nA: b\r\nC: d\r\n\r\n', b"hello", True),
    "empty chunked": (CHUNKED + b"0\r\n\r\n", b"", True),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nA: b\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok",
                b"ok", True),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    "204 with a length": (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", b"", True),
    "304": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", True),
    "close": (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", b"ok", False),
    "1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok", False),
    "1.0 kept": (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", b"ok", True),
    "something after it": (OK + b"Content-Length: 2\r\n\r\nok" + OK, b"ok", False),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", b"ok", True),
}  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, 5])
@pytest.mark.parametrize("case", WHOLE)
async def test_whole_answers_in_any_pieces(case: str, size: int) -> None:
    data, body, kept = WHOLE[case]
    async with raw(answering(data, size=size)) as (server, url), pool() as upstream:
        for _ in range(2):
            answer = await call(upstream, url)
            assert await answer.read(1000) == body and answer.complete
            await asyncio.sleep(0.02 if size else 0)
        if not (case == "something after it" and size):  # it may come when the next was asked
            assert server.connections == (1 if kept else 2)
        assert server.heads == 2


@pytest.mark.parametrize("size", [0, 1])
async def test_an_answer_may_end_with_its_connection(size: int) -> None:
    async with (
        raw(answering(OK + b"A: b\r\n\r\n" + INNER, size=size, then="close")) as (_, url),
        pool() as upstream,
    ):
        answer = await call(upstream, url)
        assert answer.length is None and await answer.read(1000) == INNER
    async with raw(answering(OK + b"\r\n" + INNER, size=size, then="reset")) as (_, url), pool() as upstream:
        answer = await call(upstream, url)
        with pytest.raises(UpstreamClosed):
            await answer.read(1000)


async def test_an_answer_to_head_has_no_body() -> None:
    async with raw(answering(OK + b"Content-Length: 500\r\n\r\n")) as (server, url), pool() as upstream:
        for _ in range(2):
            answer = await call(upstream, url, "HEAD", b"")
            assert answer.length == 500 and await answer.read(10) == b""
        assert server.connections == 1


BROKEN: dict[str, tuple[bytes, type[UpstreamError]]] = {
    "nothing": (b"", UpstreamClosed),
    "half a head": (OK + b"Content-", UpstreamClosed),
    "only interim": (b"HTTP/1.1 100 Continue\r\n\r\n", UpstreamClosed),
    "short": (OK + b"Content-Length: 5\r\n\r\nhell", UpstreamClosed),
    "no last chunk": (CHUNKED + b"5\r\nhello\r\n", UpstreamClosed),
    "within a chunk": (CHUNKED + b"5\r\nhel", UpstreamClosed),
    "within the trailers": (CHUNKED + b"0\r\nA: b\r\n", UpstreamClosed),
    "garbage": (b"\x00\x01\x02garbage", BadAnswer),
    "garbage head": (b"garbage\r\n\r\n", BadAnswer),
    "long chunk": (CHUNKED + b"5\r\nhelloX\r\n", BadAnswer),
    "bad size": (CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n", BadAnswer),
    "two framings": (OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", BadAnswer),
    "two lengths": (OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!", BadAnswer),
    "other coding": (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", BadAnswer),
    "unknown coding": (OK + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n", BadAnswer),
    "folded": (OK + b"A: b\r\n c\r\n\r\n", BadAnswer),
    "bare LF": (b"HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n", BadAnswer),
    "HTTP/2": (b"HTTP/2.0 200 OK\r\n\r\n", BadAnswer),
    "no status": (b"HTTP/1.1 000 OK\r\n\r\n", BadAnswer),
    "switch": (b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", BadAnswer),
    "long head": (OK + b"A: " + b"b" * 70000 + b"\r\n\r\n", BadAnswer),
    "endless head": (OK + b"A: " + b"b" * 70000, BadAnswer),
}


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("case", BROKEN)
async def test_broken_answers_raise(case: str, how: str) -> None:
    data, kind = BROKEN[case]
    async with raw(answering(data, then=how)) as (server, url), pool() as upstream:
        with pytest.raises(kind):
            await (await call(upstream, url)).read(10**6)
        assert server.heads == 1
        await eventually(lambda: not upstream.connections, 2)


async def test_no_connection() -> None:
    async with nothing_left(), pool() as upstream:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConnectError):
            await call(upstream, url)
        with socket.socket() as full:  # nobody accepts, and the queue is full
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            holding = [socket.socket() for _ in range(3)]
            for sock in holding:
                sock.setblocking(False)
                sock.connect_ex(full.getsockname())
            with pytest.raises((ConnectError, UpstreamTimeout)):
                await call(upstream, url, connect_timeout_s=0.1, head_timeout_s=0.1)
            for sock in holding:
                sock.close()
        for url in ("https://x", "http://", "x", "http://h?q"):
            with pytest.raises(ConnectError):
                await call(upstream, url)


async def test_what_cannot_be_sent_is_not() -> None:
    async with raw(answering(OK + b"Content-Length: 0\r\n\r\n")) as (server, url), pool() as upstream:
        for method, target, headers in (
            ("GET", b"/a b", ()),
            ("GET", b"/a\r\nB: c", ()),
            ("GET", b"a", ()),
            ("G T", b"/", ()),
            ("GET", b"/", ((b"A", b"b\r\nC: d"),)),
            ("GET", b"/", ((b"A\n", b"b"),)),
        ):
            with pytest.raises(ValueError):
                await upstream.request(url, method, target, headers, connect_timeout_s=1, head_timeout_s=1)
        assert server.heads == 0


async def test_a_stale_connection_is_replaced_once() -> None:
    def flaky(server: RawServer) -> Peer:
        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            mine = server.connections
            await server.head(reader)
            writer.write(OK + b"Content-Length: 2\r\n\r\nok")
            await server.head(reader)  # and ends without an answer
            if mine == 3:
                writer.write(b"HTTP/1.1 2")
                await writer.drain()
                await asyncio.sleep(0.05)

        return peer

    async with raw(flaky) as (server, url), pool() as upstream:
        assert await (await call(upstream, url)).read(10) == b"ok"
        assert await (await call(upstream, url)).read(10) == b"ok"
        assert (server.connections, server.heads) == (2, 3)
        assert await (await call(upstream, url)).read(10) == b"ok"
        assert (server.connections, server.heads) == (3, 5)
        with pytest.raises(UpstreamClosed):  # a byte had come
            await call(upstream, url)
        assert (server.connections, server.heads) == (3, 6)


async def test_a_fresh_connection_that_fails_is_not_replaced() -> None:
    async with raw(answering(b"", then="close")) as (server, url), pool() as upstream:
        with pytest.raises(UpstreamClosed):
            await call(upstream, url)
        assert (server.connections, server.heads) == (1, 1)


async def test_idle_connections_end_when_either_side_wants() -> None:
    data = OK + b"Content-Length: 2\r\n\r\nok"

    def closing(server: RawServer) -> Peer:
        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(data)
            await asyncio.sleep(0.1)

        return peer

    def chatty(server: RawServer) -> Peer:
        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.write(data)
            await reader.read(-1)

        return peer

    for peer in (closing, chatty):
        async with raw(peer) as (_, url), pool() as upstream:
            assert await (await call(upstream, url)).read(10) == b"ok"
            assert len(upstream.connections) == 1
            await eventually(lambda: not upstream.connections, 2)
            assert upstream._origins[url].idle == []
    limits = UpstreamLimits(tick_s=0.02, idle_timeout_s=0.2, max_idle=2)
    async with raw(answering(data)) as (_, url), pool(limits) as upstream:
        for answer in await asyncio.gather(*(call(upstream, url) for _ in range(5))):
            assert await answer.read(10) == b"ok"
        await eventually(lambda: len(upstream.connections) == 2, 2)
        await eventually(lambda: not upstream.connections, 2)


async def test_silence_is_cut() -> None:
    async with raw(answering(b"")) as (server, url), pool() as upstream:
        with pytest.raises(UpstreamTimeout):
            await call(upstream, url, head_timeout_s=0.1)
        await eventually(lambda: not server.open, 2)
    async with raw(answering(CHUNKED + b"5\r\nhello\r\n")) as (server, url), pool() as upstream:
        answer = await call(upstream, url)
        answer.read_idle_s = 0.1
        assert await answer.chunk() == b"hello"
        with pytest.raises(UpstreamTimeout):
            await answer.chunk()
        await eventually(lambda: not server.open, 2)


async def test_a_call_that_is_given_up_ends_its_connection() -> None:
    async with raw(answering(b"")) as (server, url), pool() as upstream:
        task = asyncio.create_task(call(upstream, url, head_timeout_s=30))
        await eventually(lambda: server.heads, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: not server.open, 2)
    async with raw(answering(CHUNKED + b"5\r\nhello\r\n")) as (server, url), pool() as upstream:
        with await call(upstream, url) as answer:
            assert await answer.chunk() == b"hello"
        await eventually(lambda: not server.open, 2)
        with pytest.raises(UpstreamClosed):
            await answer.chunk()


async def test_read_is_bounded_and_an_unread_answer_stops_its_engine() -> None:
    async with raw(answering(OK + b"Content-Length: 5\r\n\r\nhello")) as (_, url), pool() as upstream:
        with pytest.raises(BadAnswer):
            await (await call(upstream, url)).read(4)
        assert await (await call(upstream, url)).read(5) == b"hello"

    sent = 0

    def endless(server: RawServer) -> Peer:
        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await server.head(reader)
            writer.write(CHUNKED)
            while True:
                writer.write(b"2710\r\n" + b"x" * 10000 + b"\r\n")
                await writer.drain()
                sent += 10000

        return peer

    async with raw(endless) as (server, url), pool() as upstream:
        answer = await call(upstream, url)
        await asyncio.sleep(0.4)
        held = answer._queued
        assert held < 2_000_000 and sent < 20_000_000
        found = 0
        while found < 30_000_000:
            found += len(await answer.chunk())
        answer.close()
        await eventually(lambda: not server.open, 2)
        with pytest.raises(BadAnswer):
            await (await call(upstream, url)).read(1_000_000)
        await eventually(lambda: not server.open, 2)
