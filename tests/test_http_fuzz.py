"""Random requests, answers, garbage and fragments: where a stream is cut never matters, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
from collections.abc import AsyncIterator, Coroutine

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router.exchange import Exchange
from services.router.http import HttpLimits
from services.router.http_messages import BadFraming, Dechunk
from services.router.upstream_answer import Answer, UpstreamError
from services.router.upstream_http import Upstream, UpstreamLimits
from tests.test_http_server import echo, nothing_left, serving, talk

FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SERVER = HttpLimits(
    tick_s=0.02, linger_s=0.2, head_timeout_s=0.3, body_idle_s=0.3, idle_timeout_s=0.3, max_body=5000
)


def run(main: Coroutine[object, object, None], fast: bool) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if fast else asyncio.new_event_loop) as runner:
        runner.run(main)


TRICKY = [
    b"0\r\n\r\n",
    b"\r\n",
    b"\r",
    b"\n",
    b"5\r\nhello\r\n",
    b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
    b"\0\xff",
    b"",
]
bodies = st.one_of(
    st.binary(max_size=300), st.lists(st.sampled_from(TRICKY), max_size=6).map(b"".join), st.just(b"x" * 4500)
)
cuts = st.lists(st.integers(0, 10_000), max_size=12)


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    found, at = [], 0
    while at < len(body):
        size = draw(st.integers(1, len(body) - at))
        extension = draw(st.sampled_from([b"", b";a", b';a="b c"', b" ;a=b"]))
        found.append(b"%x%b\r\n%b\r\n" % (size, extension, body[at : at + size]))
        at += size
    last = draw(st.sampled_from([b"0", b"000", b"0;x"]))
    return (
        b"".join(found)
        + last
        + b"\r\n"
        + draw(st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC:\r\n"]))
        + b"\r\n"
    )


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, tuple[str, str, int]]:
    method = draw(st.sampled_from(["GET", "POST", "PUT"]))
    path = draw(st.sampled_from(["/", "/a/b", "/a%20b", "/x?y=z"]))
    body = draw(bodies)
    head = f"{method} {path} HTTP/1.1\r\nHost: h\r\n"
    head += draw(st.sampled_from(["", "A: b\r\n", "Accept:  */* \t\r\nX-Y: " + "z" * 500 + "\r\n"]))
    lead = draw(st.sampled_from([b"", b"\r\n"]))
    if draw(st.booleans()):
        sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    else:
        sent = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + draw(chunked(body))
    return lead + sent, (method, body[:100].decode("latin-1"), len(body))


def cut(data: bytes, at: list[int]) -> list[bytes]:
    points = [0, *sorted({point % (len(data) + 1) for point in at}), len(data)]
    return [data[a:b] for a, b in zip(points, points[1:], strict=False) if a < b]


def every(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


LAST = b"GET /last HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


@pytest.mark.long
@FUZZ
@given(st.lists(requests(), max_size=5), cuts, st.booleans(), st.sampled_from([0, 0, 0, 1, 5]))
def test_requests_do_not_depend_on_their_fragments(
    sent: list[tuple[bytes, tuple[str, str, int]]], at: list[int], fast: bool, size: int
) -> None:
    data = b"".join(request for request, _ in sent)[: 3000 if size else None]
    whole = len(data) == sum(len(request) for request, _ in sent)
    data += LAST if whole else b""

    async def main() -> None:
        async with serving(echo, SERVER) as (_, port):
            first = await talk(port, data)
            second = await talk(port, *(every(data, size) if size else cut(data, at)), pause_s=0)
            assert statuses(first) == statuses(second)
            assert seen(first) == seen(second)
            if whole:
                assert seen(first)[:-1] == [expected for _, expected in sent]
                assert statuses(first) == [b"200"] * (len(sent) + 1)

    run(main(), fast)


def statuses(answers: bytes) -> list[bytes]:
    return [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:] if b"\r\ndate: " in part]


def seen(answers: bytes) -> list[tuple[str, str, int]]:
    found = []
    for part in answers.split(b'{"method": ')[1:]:
        answer = json.JSONDecoder().raw_decode('{"method": ' + part.decode("latin-1"))[0]
        found.append((answer["method"], answer["body"], answer["bytes"]))
    return found


@pytest.mark.long
@FUZZ
@given(
    st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([*TRICKY, LAST, b"POST / HTTP/1.1\r\n", b"Host: h\r\n",
        b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"A: b\r\n", b" ", b"Expect: 100-continue\r\n"])),
        max_size=20).map(b"".join),
    cuts,
    st.booleans(),
)  # fmt: skip
def test_garbage_is_answered_or_cut_but_never_raises(data: bytes, at: list[int], fast: bool) -> None:
    async def main() -> None:
        async with serving(echo, SERVER) as (server, port):  # complaints to the loop fail it
            with contextlib.suppress(ConnectionError):
                await talk(port, *cut(data, at), pause_s=0)
            assert (await talk(port, LAST)).startswith(b"HTTP/1.1 200")

    run(main(), fast)


@given(bodies.flatmap(lambda body: st.tuples(st.just(body), chunked(body))), st.binary(max_size=20), cuts)
@settings(max_examples=100, deadline=None)
def test_dechunk_does_not_depend_on_fragments(both: tuple[bytes, bytes], after: bytes, at: list[int]) -> None:
    body, framed = both
    for pieces in (cut(framed + after, at), every(framed + after, 1), every(framed + after, 5)):
        dechunk, found, rest = Dechunk(), b"", b""
        for piece in pieces:
            if dechunk.done:
                rest += piece
            else:
                found += dechunk.feed(piece)
        assert dechunk.done and found == body and dechunk.rest + rest == after


@given(
    st.lists(st.one_of(st.binary(max_size=8), st.sampled_from([*TRICKY, b"5", b"5\r\n", b"hello", b"a: b"])), max_size=12)
    .map(b"".join),
    cuts,
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_dechunk_judges_garbage_the_same_in_any_fragments(data: bytes, at: list[int]) -> None:
    def judge(pieces: list[bytes]) -> tuple[bytes, bool] | str:
        dechunk, found = Dechunk(), b""
        for piece in pieces:
            try:
                found += dechunk.feed(piece)
            except BadFraming:
                return "bad"
            if dechunk.done:
                break
        return found, dechunk.done

    assert judge([data] if data else []) == judge(cut(data, at)) == judge(every(data, 1))


# ---------------------------------------------------------------------- answers


@st.composite
def answers(draw: st.DrawFn) -> tuple[bytes, bytes, bool]:
    """Bytes, the body that they are, whether the connection's end is the body's."""
    body = draw(bodies)
    head = draw(
        st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 E\r\nLink: x\r\n\r\n"])
    )
    head += b"HTTP/1.1 200 OK\r\nA: " + b"b" * draw(st.integers(0, 100)) + b"\r\n"
    how = draw(st.sampled_from(["length", "chunked", "close"]))
    if how == "length":
        return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body), body, False
    if how == "chunked":
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + draw(chunked(body)), body, False
    return head + b"\r\n" + body, body, True


@contextlib.asynccontextmanager
async def engine(pieces: list[bytes], close: bool) -> AsyncIterator[str]:
    """Answers each connection's requests with `pieces`."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    if random.random() < 0.3:
                        await asyncio.sleep(0)
                if close:
                    break
        writer.close()
        tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask(upstream: Upstream, url: str) -> Answer:
    return await upstream.request(url, "GET", b"/", (), connect_timeout_s=3, head_timeout_s=0.3)


POOL = UpstreamLimits(tick_s=0.02, read_idle_s=0.3)


@pytest.mark.long
@FUZZ
@given(answers(), cuts, st.booleans(), st.sampled_from([0, 0, 0, 1, 5]))
def test_answers_do_not_depend_on_their_fragments(
    answer: tuple[bytes, bytes, bool], at: list[int], fast: bool, size: int
) -> None:
    data, body, close = answer
    if size and len(data) > 3000:
        return

    async def main() -> None:
        upstream = Upstream(POOL)
        ends: list[object] = []

        async def handler(exchange: Exchange) -> None:
            got = await ask(upstream, url)
            first = functools.partial(exchange.start, got.status, got.raw_headers, got.length)
            ends.append(await got.splice(exchange, on_first=first, keep_tail=50))
            if not exchange.started:
                exchange.reply(got.status, got.raw_headers, b"")

        async with nothing_left(), engine(every(data, size) if size else cut(data, at), close) as url:
            for _ in range(2):
                assert await (await ask(upstream, url)).read(10_000) == body
            reading = Upstream(POOL)
            async with serving(handler, SERVER, alone=False) as (_, port):
                got = await reading.request(
                    f"http://127.0.0.1:{port}", "GET", b"/", (), connect_timeout_s=3, head_timeout_s=3
                )
                assert await got.read(10_000) == body
            assert ends == [(body[-50:], len(body))]
            await reading.close()
            await upstream.close()

    run(main(), fast)


@pytest.mark.long
@FUZZ
@given(
    st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([*TRICKY, b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 C\r\n\r\n",
        b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"hello", b"HTTP/1.1 204 N\r\n\r\n"])), max_size=15)
    .map(b"".join),
    cuts,
    st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_garbage_for_an_answer_is_an_upstream_error(
    data: bytes, at: list[int], close: bool, fast: bool
) -> None:
    async def main() -> None:
        upstream = Upstream(POOL)
        async with nothing_left(), engine(cut(data, at), close) as url:
            for _ in range(2):
                with contextlib.suppress(UpstreamError):
                    await (await ask(upstream, url)).read(10_000)
            await upstream.close()
            assert not upstream.connections

    run(main(), fast)
