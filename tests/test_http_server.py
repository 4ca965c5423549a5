"""The server side of the router's HTTP: real sockets, an aiohttp client and raw clients, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
import uvloop

from services.router.exchange import Exchange
from services.router.http import Handler, HttpLimits, HttpServer
from services.router.http_messages import BadFraming, Dechunk
from tests.conftest import eventually

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")
FAST = HttpLimits(tick_s=0.02, linger_s=0.3)


@pytest.fixture(params=["uvloop", pytest.param("asyncio", marks=pytest.mark.long)])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


def open_sockets() -> int:
    gc.collect()
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return found


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Fails if a task, a socket or a complaint to the loop outlives the block."""
    loop = asyncio.get_running_loop()
    complaints: list[object] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    tasks, sockets = len(asyncio.all_tasks()), open_sockets()
    yield
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks, 5)
    await eventually(lambda: open_sockets() <= sockets, 5)
    assert complaints == []


@contextlib.asynccontextmanager
async def serving(
    handler: Handler, limits: HttpLimits = FAST, *, alone: bool = True, **hooks: Callable[..., object]
) -> AsyncIterator[tuple[HttpServer, int]]:
    """`alone`: what is left behind is the server's fault."""
    async with nothing_left() if alone else contextlib.nullcontext():
        server = HttpServer(handler, limits=limits, **hooks)  # type: ignore[arg-type]
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        await server.start(sock)
        try:
            yield server, port
        finally:
            await server.close(0.5)
            assert not server.connections


async def echo(exchange: Exchange) -> None:
    seen = {
        "method": exchange.method, "path": exchange.path, "query": exchange.query, "bytes": len(exchange.body),
        "body": exchange.body[:100].decode("latin-1"), "headers": exchange.headers,
    }  # fmt: skip
    exchange.reply(200, ((b"Content-Type", b"application/json"),), json.dumps(seen).encode())


async def talk(port: int, *pieces: bytes, pause_s: float = 0.02, timeout_s: float = 5.0) -> bytes:
    """All that the server sends until it closes; what is to be sent stops there, too."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(reader.read(-1))
    try:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                if reading.done():
                    break
                writer.write(piece)
                await writer.drain()
                if len(pieces) > 1:
                    await asyncio.sleep(pause_s)
        async with asyncio.timeout(timeout_s):
            return await reading
    finally:
        reading.cancel()
        writer.close()


def get(
    path: str = "/", *headers: str, close: bool = True, method: str = "GET", version: str = "1.1"
) -> bytes:
    lines = [
        f"{method} {path} HTTP/{version}",
        "Host: h",
        *headers,
        *(["Connection: close"] if close else []),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


async def test_an_aiohttp_client_gets_its_answers() -> None:
    async def handler(exchange: Exchange) -> None:
        if exchange.path != "/stream":
            return await echo(exchange)
        exchange.start(200, ((b"content-type", b"text/event-stream"), (b"Transfer-Encoding", b"gzip")))
        for i in range(5):
            exchange.write(b"data: %d\n\n" % i)
            await exchange.drain()
            await asyncio.sleep(0)
        exchange.end()

    async with serving(handler) as (_, port), aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        big = b"x" * 3_000_000
        for _ in range(2):
            async with client.post("/a%20b/c%2Fd?q=1&r=%20", data=big, headers={"X-One": "1"}) as answer:
                seen = await answer.json()
            assert seen["path"] == "/a b/c%2Fd" and seen["query"] == "q=1&r=%20" and seen["bytes"] == len(big)
            assert seen["headers"]["x-one"] == "1" and "Date" in answer.headers
        async with client.get("/stream") as answer:
            assert await answer.read() == b"".join(b"data: %d\n\n" % i for i in range(5))
            assert answer.headers["Transfer-Encoding"] == "chunked"
        async with client.head("/x") as answer:
            assert answer.status == 200 and int(answer.headers["Content-Length"]) > 50
            assert await answer.read() == b""

        async def pieces() -> AsyncIterator[bytes]:
            for i in range(50):
                yield b"%04d" % i * 300

        async with client.post("/chunked", data=pieces(), expect100=True) as answer:
            assert (await answer.json())["bytes"] == 50 * 1200


@pytest.mark.parametrize("size", [1, 5, 17, 4096])
async def test_a_request_may_come_in_any_pieces(size: int) -> None:
    body = b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n" * 3
    chunked = b"5;ext=1\r\nhello\r\n%x\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(body), body)
    sent = get("/one", f"Content-Length: {len(body)}", method="POST", close=False) + body
    sent += get("/two", "Transfer-Encoding: chunked", method="POST", close=False) + chunked
    sent += get("/three")
    async with serving(echo) as (_, port):
        pieces = [sent[i : i + size] for i in range(0, len(sent), size)]
        answer = await talk(port, *pieces, pause_s=0)
    seen = [json.loads(part.partition(b"\r\n\r\n")[2]) for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert [(s["path"], s["body"]) for s in seen] == [
        ("/one", body.decode()[:100]),
        ("/two", ("hello" + body.decode())[:100]),
        ("/three", ""),
    ]


async def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    running = 0

    async def handler(exchange: Exchange) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0.001 if exchange.path != "/0" else 0.05)
        exchange.reply(200, (), exchange.path.encode() + b"\n")
        running -= 1

    limits = HttpLimits(tick_s=0.02, pipeline_bytes=500)
    async with serving(handler, limits) as (_, port):
        answer = await talk(port, b"".join(get(f"/{i}", close=i == 99) for i in range(100)))
    assert [line for line in answer.split(b"\n") if line.startswith(b"/")] == [b"/%d" % i for i in range(100)]


async def test_pipelined_bytes_are_bounded() -> None:
    go = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        await go.wait()
        exchange.reply(200, (), b"")

    limits = HttpLimits(tick_s=0.02, pipeline_bytes=1000, max_body=2**26)
    async with serving(handler, limits) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/", close=False) + get("/", "Content-Length: 30000000", method="POST"))
        writer.write(b"x" * 30_000_000)
        await asyncio.sleep(0.3)
        (connection,) = server.connections
        assert len(connection._held) < 2**20
        go.set()
        assert (await reader.read(-1)).count(b"200 OK") == 2
        writer.close()


BAD: dict[str, tuple[bytes, int]] = {
    "two framings": (get("/", "Content-Length: 3", "Transfer-Encoding: chunked", method="POST"), 400),
    "two framings, other order": (
        get("/", "Transfer-Encoding: chunked", "Content-Length: 3", method="POST"),
        400,
    ),
    "two lengths": (get("/", "Content-Length: 3", "Content-Length: 4", method="POST"), 400),
    "two equal lengths": (get("/", "Content-Length: 3", "Content-Length: 3", method="POST"), 400),
    "a list of lengths": (get("/", "Content-Length: 3, 3", method="POST"), 400),
    "signed length": (get("/", "Content-Length: +3", method="POST"), 400),
    "negative length": (get("/", "Content-Length: -3", method="POST"), 400),
    "hexadecimal length": (get("/", "Content-Length: 0x3", method="POST"), 400),
    "superscript length": (get("/", "Content-Length: \xb2", method="POST"), 400),
    "endless length": (get("/", "Content-Length: " + "9" * 30, method="POST"), 400),
    "empty length": (get("/", "Content-Length: ", method="POST"), 400),
    "other coding": (get("/", "Transfer-Encoding: gzip, chunked", method="POST"), 501),
    "unknown coding": (get("/", "Transfer-Encoding: xchunked", method="POST"), 400),
    "identity": (get("/", "Transfer-Encoding: identity", method="POST"), 400),
    "chunked twice": (
        get("/", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked", method="POST"),
        400,
    ),
    "chunked 1.0": (get("/", "Transfer-Encoding: chunked", method="POST", version="1.0"), 400),
    "vertical tab": (get("/", "Transfer-Encoding: \x0bchunked", method="POST"), 400),
    "folded": (get("/", "A: b", " c"), 400),
    "folded first": (b"GET / HTTP/1.1\r\n Host: h\r\n\r\n", 400),
    "folded with a tab": (get("/", "Transfer-Encoding:", "\tchunked"), 400),
    "space before colon": (get("/", "Content-Length : 3", method="POST"), 400),
    "no colon": (get("/", "nonsense"), 400),
    "bare LF": (b"GET / HTTP/1.1\r\nHost: h\nContent-Length: 3\r\n\r\n", 400),
    "bare CR": (get("/", "A: b\rContent-Length: 3"), 400),
    "NUL": (get("/", "A: b\0c"), 400),
    "no host": (b"GET / HTTP/1.1\r\nA: b\r\n\r\n", 400),
    "two hosts": (get("/", "Host: other"), 400),
    "HTTP/2": (get(version="2.0"), 505),
    "HTTP/0.9": (b"GET /\r\n\r\n", 505),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "RTSP": (b"DESCRIBE / RTSP/1.0\r\n\r\n", 505),
    "no method": (b"FOO / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "lower-case method": (b"get / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "two spaces": (b"GET  / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "a space in the target": (get("/a b"), 400),
    "a fragment": (get("/a#b"), 400),
    "a control in the target": (get("/a\x01b"), 400),
    "latin-1 in the target": (get("/\xe9"), 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "CONNECT": (b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n", 405),
    "unknown expectation": (get("/", "Expect: tea"), 417),
    "many headers": (get("/", *(f"A{i}: b" for i in range(200))), 431),
    "long head": (get("/", "A: " + "b" * 40000), 431),
    "long head, unfinished": (get("/", "A: " + "b" * 40000)[:-2], 431),
    "long body": (get("/", "Content-Length: 100000001", method="POST"), 413),
}


@pytest.mark.parametrize("case", BAD)
async def test_what_is_no_request_is_refused_in_openais_shape(case: str) -> None:
    sent, status = BAD[case]
    called = []

    async def handler(exchange: Exchange) -> None:
        called.append(exchange)
        exchange.reply(200, (), b"")

    async with serving(handler) as (_, port):
        # What follows would be served if the connection went on.
        answer = await talk(port, sent + get("/smuggled") * (not case.endswith("unfinished")))
    assert status_of(answer) == status and answer.count(b"HTTP/1.1 ") == 1, answer
    assert json.loads(body_of(answer))["error"]["message"]
    assert not called


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n", b"-1\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n", b"5_0\r\n", b" 5\r\nhello\r\n0\r\n\r\n", b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloX\r\n", b"5\r\nhello\n0\r\n\r\n", b"\r\n", b"1" * 2000, b"5;a=\0\r\n", b"5;" + b"x" * 2000 + b"\r\n",
        b"0\r\nA: b\n\r\n", b"0\r\nno colon\r\n\r\n", b"0\r\nA: " + b"x" * 9000 + b"\r\n\r\n", b"0\r\n A: b\r\n\r\n",
        b"ffffffffffffffff\r\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("apart", [False, True])
async def test_bad_chunked_framing_is_refused(body: bytes, apart: bool) -> None:
    head = get("/", "Transfer-Encoding: chunked", method="POST")
    async with serving(echo) as (_, port):
        answer = await (talk(port, head, body[:1], body[1:]) if apart else talk(port, head + body))
    assert status_of(answer) == 400


@pytest.mark.parametrize("how", ["length", "one chunk", "many chunks"])
async def test_a_body_that_is_too_long_is_refused_at_once(how: str) -> None:
    limits = HttpLimits(tick_s=0.02, max_body=1000)
    if how == "length":
        sent = get("/", "Content-Length: 1001", method="POST")
    else:
        size = 1001 if how == "one chunk" else 400
        sent = get("/", "Transfer-Encoding: chunked", method="POST")
        sent += b"%x\r\n" % size if how == "one chunk" else (b"%x\r\n" % size + b"x" * size + b"\r\n") * 3
    async with serving(echo, limits) as (_, port):
        assert status_of(await talk(port, sent)) == 413


async def test_a_refusal_is_readable_by_a_client_that_still_sends() -> None:
    async with serving(echo, HttpLimits(tick_s=0.02, max_body=1000)) as (_, port):
        body = b"x" * 5_000_000
        answer = await talk(port, get("/", f"Content-Length: {len(body)}", method="POST") + body)
    assert status_of(answer) == 413 and json.loads(body_of(answer))


async def test_limits_hold_exactly() -> None:
    async with serving(echo, HttpLimits(tick_s=0.02, max_body=1000)) as (_, port):
        answer = await talk(port, get("/", "Content-Length: 1000", method="POST"), b"x" * 1000)
        assert status_of(answer) == 200
        sent = (
            get("/", "Transfer-Encoding: chunked", method="POST")
            + b"3e8\r\n"
            + b"x" * 1000
            + b"\r\n0\r\n\r\n"
        )
        assert status_of(await talk(port, sent)) == 200


async def test_expect_100_continue() -> None:
    async with serving(echo) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/", "Expect: 100-continue", "Content-Length: 3", method="POST"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert status_of(await reader.read(-1)) == 200
        writer.close()


async def test_http_1_0() -> None:
    async def handler(exchange: Exchange) -> None:
        if exchange.path == "/whole":
            exchange.reply(200, (), b"whole")
        else:
            exchange.start(200, ())
            exchange.write(b"part ")
            await asyncio.sleep(0.01)
            if exchange.path == "/cut":
                return exchange.abort()
            exchange.end(b"part")

    async with serving(handler) as (_, port):
        answer = await talk(port, b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert answer.endswith(b"\r\n\r\npart part")
        assert b"connection: close" in answer and b"chunked" not in answer
        answer = await talk(
            port, b"GET /whole HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /whole HTTP/1.0\r\n\r\n"
        )
        assert answer.count(b"\r\n\r\nwhole") == 2 and answer.count(b"connection: keep-alive") == 1
        with pytest.raises(ConnectionResetError):  # an end would be the answer's own
            await talk(port, b"GET /cut HTTP/1.0\r\n\r\n")


async def test_bodyless_answers() -> None:
    async def handler(exchange: Exchange) -> None:
        status = int(exchange.path[1:])
        if exchange.query:
            exchange.start(status, ())
            exchange.end(b"dropped")
        else:
            exchange.reply(status, (), b"dropped")

    async with serving(handler) as (_, port):
        for path in ("/204", "/204?s", "/304", "/304?s"):
            answer = await talk(port, get(path, close=False) + get(path))
            assert (
                answer.count(b"HTTP/1.1") == 2
                and b"dropped" not in answer
                and b"content-length" not in answer
            )
        for path in ("/200", "/200?s"):
            answer = await talk(port, get(path, method="HEAD", close=False) + get(path, method="HEAD"))
            assert answer.count(b"HTTP/1.1 200") == 2 and b"dropped" not in answer


async def test_an_answer_that_cannot_be_completed_never_looks_complete() -> None:
    told: list[str] = []

    async def handler(exchange: Exchange) -> None:
        path = exchange.path
        if path == "/raises":
            raise LookupError("before the start")
        if path == "/silent":
            return
        exchange.start(200, (), 10 if path in ("/short", "/long") else None)
        exchange.write(b"12345")
        if path == "/short":
            exchange.end()
        elif path == "/long":
            exchange.write(b"123456")
        elif path == "/late":
            raise LookupError("after the start")
        elif path == "/abort":
            exchange.abort()
        # and /open returns

    async with (
        serving(handler, on_error=lambda _, error: told.append(str(error))) as (_, port),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        for path in ("/raises", "/silent"):
            async with client.get(path) as answer:
                assert answer.status == 500 and "message" in (await answer.json())["error"]
        for path in ("/short", "/long", "/late", "/abort", "/open"):
            with pytest.raises(aiohttp.ClientPayloadError):
                async with client.get(path) as answer:
                    assert answer.status == 200
                    await answer.read()
    assert told == ["before the start", "the answer is longer than its length", "after the start"]


async def test_the_error_hook_may_answer() -> None:
    async def handler(exchange: Exchange) -> None:
        raise LookupError("what")

    def on_error(exchange: Exchange, error: BaseException) -> None:
        exchange.reply(418, (), str(error).encode())

    async with serving(handler, on_error=on_error) as (_, port):
        answer = await talk(port, get(close=False) + get())
    assert answer.count(b"HTTP/1.1 418") == 2


async def test_a_header_cannot_smuggle_another() -> None:
    async def handler(exchange: Exchange) -> None:
        with pytest.raises(ValueError):
            exchange.reply(200, ((b"a", b"b\r\nc: d"),), b"")
        with pytest.raises(ValueError):
            exchange.start(200, ((b"a\n", b"b"),))
        with pytest.raises(ValueError):
            exchange.reply(100, (), b"")
        exchange.reply(200, ((b"a", b"b"),), b"fine")
        with pytest.raises(RuntimeError):
            exchange.reply(200, (), b"")
        with pytest.raises(RuntimeError):
            exchange.write(b"more")

    async with serving(handler) as (_, port):
        assert status_of(await talk(port, get())) == 200


@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
async def test_a_client_that_goes_away_cancels_its_handler(how: str) -> None:
    begun, cancelled, gone = asyncio.Event(), asyncio.Event(), []

    async def handler(exchange: Exchange) -> None:
        exchange.on_gone(lambda: gone.append(exchange.gone))
        begun.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            exchange.start(200, ())
            exchange.write(b"nobody reads this")
            exchange.end()
            cancelled.set()
            raise

    async with serving(handler) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get())
        await begun.wait()
        if how == "half-close":
            writer.write_eof()
            assert await reader.read(-1) == b""
        elif how == "reset":
            writer.transport.abort()
        writer.close()
        async with asyncio.timeout(2):
            await cancelled.wait()
        assert gone == [True]
        await eventually(lambda: not server.connections, 2)


async def test_a_handler_that_has_ended_its_answer_is_left_alone() -> None:
    done = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        exchange.reply(200, (), b"x")
        await asyncio.sleep(0.1)
        done.set()

    async with serving(handler) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get())
        await reader.readuntil(b"x")
        writer.close()
        async with asyncio.timeout(2):
            await done.wait()


async def test_drain_waits_for_a_slow_client_and_ends_with_it() -> None:
    written = 0
    failed = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        nonlocal written
        exchange.start(200, ())
        try:
            while True:
                exchange.write(b"x" * 10000)
                written += 10000
                await exchange.drain()
        except (ConnectionResetError, asyncio.CancelledError):
            failed.set()
            raise

    async with serving(handler) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(get())
        await asyncio.sleep(0.3)
        before = written
        assert before < 20_000_000
        (connection,) = server.connections
        assert connection.transport.get_write_buffer_size() < 200_000
        for _ in range(100):
            await reader.read(2**17)
        await eventually(lambda: written > before, 2)
        writer.transport.abort()
        async with asyncio.timeout(2):
            await failed.wait()


@pytest.mark.parametrize("how", ["streamed", "in one"])
async def test_a_client_that_does_not_read_is_cut(how: str) -> None:
    async def handler(exchange: Exchange) -> None:
        if how == "in one":
            return exchange.reply(200, (), b"x" * 30_000_000)
        exchange.start(200, ())
        while True:
            exchange.write(b"x" * 10000)
            await exchange.drain()

    limits = HttpLimits(tick_s=0.02, write_timeout_s=0.3, idle_timeout_s=0.3)
    async with serving(handler, limits) as (server, port):
        sock = socket.socket()
        sock.connect(("127.0.0.1", port))
        sock.send(get(close=False))
        await eventually(lambda: server.connections, 2)
        await eventually(lambda: not server.connections, 3)
        sock.close()


async def test_a_client_that_reads_slowly_is_not_cut() -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.reply(200, (), b"x" * 8_000_000)

    limits = HttpLimits(tick_s=0.02, write_timeout_s=0.4, idle_timeout_s=0.4)
    async with serving(handler, limits) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(get())
        found = 0
        for _ in range(10):
            found += len(await reader.readexactly(500_000))
            await asyncio.sleep(0.1)
        found += len(await reader.read(-1))
        assert found > 8_000_000
        writer.close()


async def test_slow_requests_are_cut() -> None:
    limits = HttpLimits(tick_s=0.02, head_timeout_s=0.2, body_idle_s=0.2, idle_timeout_s=0.2, linger_s=0.1)
    async with serving(echo, limits) as (_, port):
        assert await talk(port) == b""
        drip = [bytes([byte]) for byte in get("/", "A: " + "b" * 100)]
        assert status_of(await talk(port, *drip, pause_s=0.02)) == 408
        answer = await talk(port, get("/", "Content-Length: 10", method="POST") + b"x")
        assert status_of(answer) == 408
        answer = await talk(port, get("/", "Transfer-Encoding: chunked", method="POST") + b"5\r\nhe")
        assert status_of(answer) == 408
        answer = await talk(port, get(close=False))  # then idle
        assert status_of(answer) == 200 and answer.count(b"HTTP/1.1") == 1
        answer = await talk(port, get(close=False) + b"GET /")
        assert answer.count(b"HTTP/1.1") == 2 and b"HTTP/1.1 408" in answer
        # A body that goes on is not slow.
        pieces = [get("/", "Content-Length: 20", method="POST"), *[b"x"] * 20]
        assert status_of(await talk(port, *pieces, pause_s=0.03)) == 200


async def test_a_body_that_trickles_for_ever_is_cut() -> None:
    async with serving(echo, FAST) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/", "Content-Length: 1000", method="POST") + b"x")
        await eventually(lambda: [c for c in server.connections if c._body_until < 1e300], 2)
        (connection,) = server.connections
        assert connection._body_until - server.now() > 59
        connection._body_until = server.now()
        writer.write(b"x")
        assert status_of(await reader.read()) == 408
        writer.close()
        await eventually(lambda: not server.connections, 2)
        assert server.body_bytes == 0


async def test_bodies_that_arrive_have_a_limit_together() -> None:
    async with serving(echo, HttpLimits(tick_s=0.02, max_body=1000, max_bodies=1500)) as (server, port):
        held = await asyncio.open_connection("127.0.0.1", port)
        held[1].write(get("/", "Content-Length: 1000", method="POST") + b"x")
        await eventually(lambda: server.body_bytes == 1000, 2)
        answer = await talk(port, get("/", "Content-Length: 900", method="POST") + b"x")
        assert status_of(answer) == 503 and server.body_bytes == 1000
        held[1].write(b"x" * 999)
        await held[0].readuntil(b"\r\n\r\n")
        assert server.body_bytes == 0
        held[1].close()


async def test_connections_beyond_the_cap_are_told() -> None:
    async with serving(echo, HttpLimits(tick_s=0.02, max_connections=2)) as (server, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await eventually(lambda: len(server.connections) == 2, 2)
        answer = await talk(port)
        assert status_of(answer) == 503 and json.loads(body_of(answer))["error"]
        held[0][1].close()
        await eventually(lambda: len(server.connections) == 1, 2)
        assert status_of(await talk(port, get())) == 200
        held[1][1].close()


@pytest.mark.parametrize("grace_s", [5.0, 0.1])
async def test_close_lets_what_runs_end_and_then_cuts_it(grace_s: float) -> None:
    cancelled = []

    async def handler(exchange: Exchange) -> None:
        try:
            await asyncio.sleep(0.4)
        except asyncio.CancelledError:
            cancelled.append(exchange)
            raise
        exchange.reply(200, (), b"done")

    async with serving(handler) as (server, port):
        idle = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get(close=False))
        await eventually(lambda: server._tasks, 2)
        closing = asyncio.create_task(server.close(grace_s))
        assert await idle[0].read(-1) == b""
        answer = await reader.read(-1)
        await closing
        if grace_s > 1:
            assert answer.endswith(b"done") and b"connection: close" in answer and not cancelled
        else:
            assert answer == b"" and cancelled
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        idle[1].close()
        writer.close()


async def test_odd_but_valid_requests() -> None:
    async with serving(echo) as (_, port):
        for sent, path in (
            (b"\r\n\r\n" + get("/x"), "/x"),
            (get("http://h:80/abs?q"), "/abs"),
            (get("http://h"), "/"),
            (get("*", method="OPTIONS"), "*"),
            (get("/up", "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings"), "/up"),
            (get("/%zz%C3%A9%ff"), "/%zz\xe9\N{REPLACEMENT CHARACTER}"),
        ):
            answer = await talk(port, sent)
            assert status_of(answer) == 200 and json.loads(body_of(answer))["path"] == path
        answer = await talk(port, get("/", "X-A:  one \t", "x-a: two", "X-B: \xe9"))
        headers = json.loads(body_of(answer))["headers"]
        assert headers["x-a"] == "one, two" and headers["x-b"] == "\xe9"


def test_dechunk_is_told_apart_from_its_rest() -> None:
    dechunk = Dechunk()
    assert dechunk.feed(b"5\r\nhello\r\n3\r\nabc\r\n0\r\n\r\nGET") == b"helloabc"
    assert dechunk.done and dechunk.rest == b"GET"
    with pytest.raises(BadFraming):
        Dechunk().feed(b"5\r\nhello0\r\n\r\n")
