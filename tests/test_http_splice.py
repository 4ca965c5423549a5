"""Answers of the router's nodes that are spliced to its clients."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest

from services.router.exchange import Exchange
from services.router.http import Handler, HttpLimits, HttpServer
from services.router.upstream_answer import (
    ConnectError,
    UpstreamClosed,
    UpstreamError,
    UpstreamTimeout,
)
from services.router.upstream_http import Upstream, UpstreamLimits
from tests.conftest import eventually

# ruff: noqa: SIM117  (what is inside ends first)
from tests.test_http_client import CHUNKED, INNER, OK, WHOLE, Peer, RawServer, answering, call, pool, raw
from tests.test_http_server import FAST, get, serving, talk
from tests.test_http_server import event_loop_policy as event_loop_policy

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


# ---------------------------------------------------------------------- splice


def beside(
    handler: Handler, limits: HttpLimits = FAST
) -> contextlib.AbstractAsyncContextManager[tuple[HttpServer, int]]:
    """A server for clients; what is left behind is found when the engine's side is closed."""
    return serving(handler, limits, alone=False)


def through(upstream: Upstream, url: str, ends: list[object], **options: object) -> Handler:
    """A handler that passes an answer on, and notes how that ended."""

    async def handler(exchange: Exchange) -> None:
        try:
            answer = await call(upstream, url, body=exchange.body)
            first = lambda: exchange.start(answer.status, answer.raw_headers, answer.length)  # noqa: E731
            ends.append(await answer.splice(exchange, on_first=first, **options))  # type: ignore[arg-type]
            if not exchange.started:
                exchange.reply(answer.status, answer.raw_headers, b"")
        except UpstreamError as error:
            ends.append(error)
            if not exchange.started:
                exchange.reply(502, (), b"failed")
            else:
                exchange.end(b"data: error\n\n")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    return handler


@pytest.mark.parametrize("size", [0, 1, 5, 100])
@pytest.mark.parametrize("case", [*WHOLE, "ends with its connection"])
async def test_a_spliced_answer_is_the_same(case: str, size: int) -> None:
    data, body, _ = WHOLE.get(case) or (OK + b"\r\n" + INNER, INNER, False)
    then = "wait" if case in WHOLE else "close"
    ends: list[object] = []
    async with raw(answering(data, size=size, then=then)) as (_, url), pool() as upstream:
        async with (
            beside(through(upstream, url, ends, keep_tail=7)) as (_, port),
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
        ):
            for _ in range(2):
                async with client.post("/", data=b"x") as answer:
                    assert await answer.read() == body
            assert ends == [(body[-7:], len(body))] * 2


async def test_parts_that_came_before_the_splice_are_passed_on() -> None:
    data = CHUNKED + b"5\r\nhello\r\n5\r\nworld\r\n0\r\n\r\n"
    for size in (0, 3):
        async with raw(answering(data, size=size)) as (_, url), pool() as upstream:

            async def handler(exchange: Exchange, url: str = url, upstream: Upstream = upstream) -> None:
                answer = await call(upstream, url)
                await asyncio.sleep(0.1)
                first = await answer.chunk()
                exchange.start(200, ())
                exchange.write(first)
                tail, count = await answer.splice(exchange, end=False)
                assert count == len(tail) == 10 - len(first) and not exchange.ended
                exchange.end(b"!")

            async with beside(handler) as (_, port):
                answer = await talk(port, get())
                assert answer.endswith(b"1\r\n!\r\n0\r\n\r\n")
                async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}") as got:
                    assert await got.read() == b"helloworld!"


async def test_an_answer_that_breaks_leaves_the_exchange_open() -> None:
    for how in ("close", "reset"):
        for data in (
            CHUNKED + b"5\r\nhello\r\n3\r\nab",
            OK + b"\r\nhelloab" if how == "reset" else CHUNKED + b"7\r\nhelloab\r\nX",
        ):
            ends: list[object] = []
            async with raw(answering(data, then=how)) as (_, url), pool() as upstream:
                async with (
                    beside(through(upstream, url, ends)) as (_, port),
                    aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
                    client.post("/") as answer,
                ):
                    assert (await answer.read()) == b"helloabdata: error\n\n"
            assert isinstance(ends[0], UpstreamError)


async def test_an_answer_that_breaks_before_its_first_byte_leaves_the_exchange_unstarted() -> None:
    ends: list[object] = []
    async with raw(answering(CHUNKED, then="close")) as (_, url), pool() as upstream:
        async with beside(through(upstream, url, ends)) as (_, port):
            answer = await talk(port, get())
        assert answer.startswith(b"HTTP/1.1 502") and isinstance(ends[0], UpstreamClosed)


async def test_a_failing_first_call_fails_the_splice() -> None:
    async def handler(exchange: Exchange) -> None:
        answer = await call(upstream, url)

        def first() -> None:
            raise LookupError("mine")

        with pytest.raises(LookupError):
            await answer.splice(exchange, on_first=first)
        answer = await call(upstream, url)
        exchange.start(200, (), 3)  # shorter than what comes
        with pytest.raises(ValueError):
            await answer.splice(exchange)

    async with (
        raw(answering(CHUNKED + b"5\r\nhello\r\n")) as (server, url),
        pool() as upstream,
        beside(handler) as (_, port),
    ):
        assert b"content-length: 3" in await talk(port, get())
        await eventually(lambda: not server.open, 2)


@pytest.mark.parametrize("slow", [False, True])
async def test_a_client_that_goes_away_ends_the_call_at_once(slow: bool) -> None:
    ends: list[object] = []

    def endless(server: RawServer) -> Peer:
        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(CHUNKED)
            while True:
                writer.write(b"5\r\nhello\r\n" * (10000 if slow else 1))
                await writer.drain()
                await asyncio.sleep(0 if slow else 0.01)

        return peer

    async with (
        raw(endless) as (server, url),
        pool() as upstream,
        beside(through(upstream, url, ends)) as (_, port),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get())
        await reader.readuntil(b"hello")
        await asyncio.sleep(0.3)
        writer.transport.abort()
        await eventually(lambda: not server.open and not upstream.connections, 2)
        await eventually(lambda: ends == ["cancelled"], 2)


async def test_a_slow_client_stops_its_engine_and_loses_nothing() -> None:
    count, sent = 3000, 0

    def big(server: RawServer) -> Peer:
        async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            await server.head(reader)
            writer.write(CHUNKED)
            for i in range(count):
                writer.write(b"2710\r\n" + b"%010d" % i * 1000 + b"\r\n")
                await writer.drain()
                sent += 1
            writer.write(b"0\r\n\r\n")
            await reader.read(-1)

        return peer

    ends: list[object] = []
    async with raw(big) as (_, url), pool(UpstreamLimits(tick_s=0.02, read_idle_s=0.2)) as upstream:
        async with (
            beside(through(upstream, url, ends)) as (server, port),
            aiohttp.ClientSession(f"http://127.0.0.1:{port}", read_bufsize=1000) as client,
            client.get("/") as answer,
        ):
            await asyncio.sleep(0.8)  # longer than the engine may be silent: it is not the one who is
            assert sent < count * 0.9
            (connection,) = server.connections
            assert connection.transport.get_write_buffer_size() < 2_000_000
            body = await answer.read()
        assert body == b"".join(b"%010d" % i * 1000 for i in range(count))
        assert ends == [(body[-4096:], len(body))]


async def test_a_silent_engine_is_cut_within_a_splice() -> None:
    ends: list[object] = []
    limits = UpstreamLimits(tick_s=0.02, read_idle_s=0.1)
    async with raw(answering(CHUNKED + b"5\r\nhello\r\n")) as (_, url), pool(limits) as upstream:
        async with beside(through(upstream, url, ends), HttpLimits(tick_s=0.02)) as (_, port):
            assert b"hello" in await talk(port, get())
        assert isinstance(ends[0], UpstreamTimeout)


async def test_closing_the_pool_ends_its_calls() -> None:
    async with raw(answering(CHUNKED + b"5\r\nhello\r\n")) as (server, url), pool() as upstream:
        answer = await call(upstream, url)
        await upstream.close()
        assert await answer.chunk() == b"hello"
        with pytest.raises(UpstreamClosed):
            await answer.chunk()
        with pytest.raises(ConnectError):
            await call(upstream, url)
        await eventually(lambda: not server.open, 2)


async def test_a_client_that_goes_away_ends_the_call_though_its_handler_stays() -> None:
    stay = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        answer = await call(upstream, url)
        spliced = answer.splice(exchange, on_first=lambda: exchange.start(200, ()))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(spliced)
        await stay.wait()
        assert spliced.cancelled()

    data = CHUNKED + b"5\r\nhello\r\n"
    async with raw(answering(data)) as (server, url), pool() as upstream, beside(handler) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get())
        await reader.readuntil(b"hello")
        writer.close()
        await eventually(lambda: not server.open and not upstream.connections, 2)
        stay.set()
