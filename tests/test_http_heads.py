"""Heads that are kept read: what is found in them is what reading them anew finds."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router import http_messages
from services.router.exchange import Exchange
from services.router.http_messages import BadRequest, Head, Heads, header_lines
from services.router.upstream_answer import UpstreamClosed
from tests.conftest import eventually
from tests.test_http_client import OK, answering, call, pool, raw
from tests.test_http_server import event_loop_policy as event_loop_policy
from tests.test_http_server import get, serving, talk

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")
LINES = (
    b"Host: h", b"Host: other", b"Content-Length: 5", b"content-length:17", b"CONTENT-LENGTH: 17", b"Content-Length: 0x5",
    b"Content-Length:  5", b"Content-Length: 5 ", b"Transfer-Encoding: chunked", b"X-A: content-length: 9",
    b"Connection: close", b"Expect: 100-continue", b"X-B: ",
)  # fmt: skip


def shown(head: Head) -> dict[str, object]:
    return {name: getattr(head, name) for name in Head.__slots__ if name != "derived"}


def read(heads: Heads | None, data: bytes) -> object:
    try:
        return shown(heads.read(data) if heads is not None else Head(data, 16))
    except BadRequest as error:
        return error.status, error.message


@given(
    st.lists(
        st.tuples(st.sampled_from([b"GET /a", b"POST /b", b"POST /c?d"]), st.sampled_from([b"1.1", b"1.0"]),
                  st.lists(st.sampled_from(LINES), max_size=5)),
        min_size=1, max_size=8,
    )
)  # fmt: skip
def test_a_head_that_was_kept_reads_as_if_anew(requests):
    heads = Heads(16)
    for line, version, lines in requests + requests:
        data = b"\r\n".join([line + b" HTTP/" + version, *lines, b"", b""])
        assert read(heads, data) == read(None, data)


def test_what_is_derived_is_shared_by_heads_of_another_length_only():
    heads = Heads(16)
    one, two, other = (
        heads.read(b"POST / HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\n\r\n" % pair)
        for pair in ((b"h", 5), (b"h", 77), (b"i", 5))
    )
    assert (one.length, two.length, two.fields["content-length"]) == (5, 77, "77")
    one.derived["x"] = header_lines([(b"A", b"1"), (b"B", b"2")])
    assert two.derived["x"] == (b"A: 1\r\nB: 2\r\n", 2) and not other.derived
    one.keep_alive = False
    assert heads.read(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\n\r\n").keep_alive


def test_few_heads_are_kept(monkeypatch):
    monkeypatch.setattr(http_messages, "MOST_KEPT_HEADS", 3)
    heads = Heads(16)
    for i in range(10):
        assert (
            heads.read(b"POST /%d HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n" % i).target == b"/%d" % i
        )
        assert 1 <= len(heads._kept) <= 3
    long = b"POST / HTTP/1.1\r\nHost: h\r\nX: %b\r\nContent-Length: 5\r\n\r\n" % (b"x" * 5000)
    before = len(heads._kept)
    assert heads.read(long).length == 5 and len(heads._kept) == before


async def test_a_line_break_among_ready_lines_is_refused() -> None:
    async def handler(exchange: Exchange) -> None:
        lines = header_lines([(b"X-A", b"1\r\nX-Evil: 2")])
        with pytest.raises(ValueError, match="line break"):
            exchange.start(200, [], length=2, lines=lines)
        exchange.start(200, [(b"X-B", b"3")], length=2, lines=header_lines([(b"X-A", b"1")]))
        exchange.end(b"ok")

    async with serving(handler) as (_, port):
        answer = await talk(port, get(close=True))
    assert b"X-A: 1\r\n" in answer and b"X-B: 3\r\n" in answer and b"Evil" not in answer


# ---------------------------------------------------------------------- Answer.listen


def lines_until(last: bytes, seen: list[bytes]):
    def heard(data: bytes) -> bool:
        seen.append(data)
        return last in b"".join(seen)

    return heard


@pytest.mark.parametrize("size", [0, 1, 7])
async def test_listening_ends_with_what_was_wanted_and_the_connection_is_used_again(size: int) -> None:
    data = OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\none\n\r\n4\r\ntwo\n\r\n5\r\nrest\n\r\n0\r\n\r\n"
    async with raw(answering(data, size=size)) as (server, url), pool() as upstream:
        for _ in range(3):
            seen: list[bytes] = []
            answer = await call(upstream, url)
            assert await answer.listen(lines_until(b"two\n", seen))
            assert b"".join(seen).startswith(b"one\ntwo\n")
            await eventually(lambda answer=answer: answer.complete)
        assert server.connections == 1


async def test_listening_to_the_end_in_vain() -> None:
    data = OK + b"Content-Length: 4\r\n\r\none\n"
    async with raw(answering(data)) as (_, url), pool() as upstream:
        answer = await call(upstream, url)
        assert not await answer.listen(lines_until(b"two\n", []))
        later = await call(upstream, url)
        await eventually(lambda: later.complete)
        assert not await later.listen(lines_until(b"two\n", []))


async def test_what_the_listener_raises_is_raised_and_ends_the_connection() -> None:
    def refuse(_data: bytes) -> bool:
        raise KeyError("no")

    data = OK + b"Content-Length: 400\r\n\r\none\n"
    async with raw(answering(data)) as (server, url), pool() as upstream:
        answer = await call(upstream, url)
        with pytest.raises(KeyError):
            await answer.listen(refuse)
        await eventually(lambda: not server.open)


@pytest.mark.parametrize("then", ["close", "reset"])
async def test_an_answer_that_breaks_off_is_heard_of(then: str) -> None:
    data = OK + b"Content-Length: 400\r\n\r\none\n"
    async with raw(answering(data, then=then)) as (_, url), pool() as upstream:
        answer = await call(upstream, url)
        with pytest.raises(UpstreamClosed):
            await answer.listen(lines_until(b"two\n", []))


async def test_a_peer_that_goes_on_for_ever_after_what_was_wanted_is_cut() -> None:
    data = OK + b"Content-Length: 40000000\r\n\r\none\n" + b"x" * 2**20
    async with raw(answering(data)) as (server, url), pool() as upstream:
        answer = await call(upstream, url)
        assert await answer.listen(lambda data: True)
        await eventually(lambda: not server.open)


async def test_an_answer_without_its_end_is_given_up_after_a_while() -> None:
    data = OK + b"Content-Length: 400\r\n\r\none\n"
    async with raw(answering(data)) as (server, url), pool() as upstream:
        answer = await call(upstream, url)
        assert await answer.listen(lambda data: True)
        answer.read_idle_s = 0.1
        await eventually(lambda: not server.open)


async def test_a_cancelled_listener_closes_the_answer_when_told() -> None:
    data = OK + b"Content-Length: 400\r\n\r\none\n"
    async with raw(answering(data)) as (server, url), pool() as upstream:
        answer = await call(upstream, url)
        task = asyncio.ensure_future(answer.listen(lambda data: False))
        await asyncio.sleep(0)
        task.cancel()
        answer.close()
        await eventually(lambda: not server.open)
