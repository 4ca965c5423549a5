"""An answer's way to the client: comments while it waits, one beginning, errors in the API's shape; what workers answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.answer import COMMENT, Answering
from services.router.exchange import Exchange
from services.router.http_messages import Head, header_lines
from services.router.upstream import Usage, relayed, usage_in
from shared.api_errors import error_event
from shared.openai import PATHS, ApiError
from tests.conftest import eventually

OWN = [(b"X-Request-Id", b"r-1")]
ENGINE = [(b"Content-Type", b"text/event-stream"), (b"X-Engine", b"e")]
ERROR = ApiError(502, "node n1 failed", type="server_error", code="node_failed")


class Wire:
    """The connection below an exchange: what the client would get, and whether it was cut off."""

    def __init__(self) -> None:
        self.peer, self.write_paused, self.closing = ("127.0.0.1", 1), False, False
        self.transport = self.server = self
        self.sent = b""
        self.is_cut = False

    def write(self, data: bytes) -> None:
        assert not self.is_cut
        self.sent += data

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.write(b"".join(parts))

    def soon(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)

    def cut(self, reset: bool) -> None:
        self.is_cut = True


class Client:
    """A request of a client, and what came back."""

    def __init__(self, path: str = "/v1/chat/completions") -> None:
        self.wire = Wire()
        head = Head(f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n".encode(), 100)
        self.exchange = Exchange(self.wire, head, b"{}")

    def answering(self, *, streams: bool = True, keepalive_s: float = 0.0) -> Answering:
        return Answering(self.exchange, streams=streams, keepalive_s=keepalive_s, headers=OWN)

    @property
    def head(self) -> str:
        head, end, _ = self.wire.sent.partition(b"\r\n\r\n")
        assert end, "no head was sent"
        assert self.wire.sent.count(b"HTTP/1.1 ") == 1
        return head.decode().lower()

    @property
    def status(self) -> int:
        return int(self.head.split()[1])

    @property
    def body(self) -> bytes:
        """What came so far, without its chunks; `ended` when it is whole."""
        rest = self.wire.sent.partition(b"\r\n\r\n")[2]
        if "chunked" not in self.head:
            return rest
        data = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            if not length:
                assert rest == b"\r\n"
                break
            data += rest[:length]
            assert rest[length : length + 2] == b"\r\n"
            rest = rest[length + 2 :]
        return data

    @property
    def ended(self) -> bool:
        if "chunked" in self.head:
            return self.wire.sent.endswith(b"0\r\n\r\n")
        (length,) = [line for line in self.head.split("\r\n") if line.startswith("content-length")]
        return len(self.body) == int(length.split(":")[1])


async def test_nothing_is_sent_before_the_answer_begins():
    client = Client()
    answering = client.answering(keepalive_s=10.0)
    await asyncio.sleep(0.01)
    assert client.wire.sent == b"" and not client.exchange.started
    answering.close()


async def test_a_stream_that_waits_gets_comments():
    client = Client()
    answering = client.answering(keepalive_s=0.02)
    assert client.wire.sent == b""
    await eventually(lambda: client.wire.sent.count(COMMENT) >= 2)
    assert client.status == 200 and answering.streaming
    assert "content-type: text/event-stream" in client.head and "x-request-id: r-1" in client.head
    assert client.body.count(COMMENT) >= 2 and client.body.replace(COMMENT, b"") == b""
    answering.close()


@pytest.mark.parametrize(("streams", "keepalive_s"), [(False, 0.01), (True, 0.0), (False, 0.0)])
async def test_who_does_not_stream_or_wants_none_gets_no_comments(streams, keepalive_s):
    client = Client()
    answering = client.answering(streams=streams, keepalive_s=keepalive_s)
    await asyncio.sleep(0.05)
    assert client.wire.sent == b"" and not answering.streaming


async def test_comments_are_no_beginning_and_the_answer_follows_them():
    client = Client()
    answering = client.answering(keepalive_s=0.01)
    await eventually(lambda: client.wire.sent)
    before = client.body
    answering.begin(200, header_lines(ENGINE), length=None, streaming=True)
    client.exchange.write(b"data: 1\n\n")
    await asyncio.sleep(0.05)  # no comment in the middle of it
    client.exchange.end(b"data: [DONE]\n\n")
    assert client.body == before + b"data: 1\n\ndata: [DONE]\n\n" and client.ended
    assert "x-engine" not in client.head  # too late for these


async def test_the_answer_begins_once_with_both_headers():
    client = Client()
    answering = client.answering(keepalive_s=0.02)
    answering.begin(201, header_lines(ENGINE), length=None, streaming=True)
    answering.begin(500, header_lines([(b"X-Other", b"o")]), length=5, streaming=False)
    client.exchange.write(b"data: 1\n\n")
    await asyncio.sleep(0.05)
    assert client.status == 201 and answering.streaming
    assert (
        "x-engine: e" in client.head and "x-request-id: r-1" in client.head and "x-other" not in client.head
    )
    assert client.body == b"data: 1\n\n"


async def test_a_whole_answer_has_its_length():
    client = Client()
    client.answering(streams=False).begin(200, header_lines([]), length=3, streaming=False)
    client.exchange.end(b"abc")
    assert client.body == b"abc" and client.ended and "content-length: 3" in client.head


# ---------------------------------------------------------------------- errors


def shape_of(path: str, body: bytes) -> tuple[str, str, str]:
    """Kind, message and code (Anthropic's shape has none) of an error's JSON."""
    said = msgspec.json.decode(body)
    if path.startswith("/v1/messages"):
        assert said["type"] == "error" and said["request_id"].startswith("req_")
        assert set(said["error"]) == {"type", "message"}
        return said["error"]["type"], said["error"]["message"], ""
    assert set(said) == {"error"} and set(said["error"]) == {"message", "type", "param", "code"}
    return said["error"]["type"], said["error"]["message"], said["error"]["code"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [True, False])
async def test_an_error_before_the_beginning_is_a_status_and_a_body(path, streams):
    client = Client(path)
    answering = client.answering(streams=streams, keepalive_s=0.01)
    answering.fail(ApiError(429, "slow down", type="rate_limit_error", code="overloaded", retry_after_s=7))
    await asyncio.sleep(0.03)
    assert client.status == 429 and client.ended
    assert "retry-after: 7" in client.head and "content-type: application/json" in client.head
    assert "x-request-id: r-1" in client.head
    kind, message, code = shape_of(path, client.body)
    assert (kind, message) == ("rate_limit_error", "slow down") and code in ("", "overloaded")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("begun_by", ["comment", "answer"])
async def test_an_error_within_a_stream_is_its_last_event(path, begun_by):
    client = Client(path)
    answering = client.answering(keepalive_s=0.01 if begun_by == "comment" else 0.0)
    if begun_by == "comment":
        await eventually(lambda: client.wire.sent)
    else:
        answering.begin(200, header_lines(ENGINE), length=None, streaming=True)
        client.exchange.write(b'data: {"a": 1}\n\ndata: {"cut off')
    before = client.body
    answering.fail(ERROR)
    await asyncio.sleep(0.03)
    assert client.status == 200 and client.ended and not client.wire.is_cut
    last = client.body[len(before) :]
    assert last.startswith(b"\n\n")  # what was cut off before is an event of its own
    name, _, data = last.strip().rpartition(b"data: ")
    if path == "/v1/responses":
        said = msgspec.json.decode(data)
        assert name == b"event: error\n" and said["type"] == "error"
        assert (said["code"], said["message"]) == ("node_failed", "node n1 failed")
        assert last.strip() == error_event(ERROR, path).strip()
    else:
        assert name == (b"event: error\n" if path == "/v1/messages" else b"")
        assert shape_of(path, data)[1] == "node n1 failed"


@pytest.mark.parametrize("length", [None, 100])
async def test_a_whole_answer_that_breaks_is_cut(length):
    client = Client()
    answering = client.answering(streams=False)
    answering.begin(
        200, header_lines([(b"Content-Type", b"application/json")]), length=length, streaming=False
    )
    client.exchange.write(b'{"half": ')
    answering.fail(ERROR)
    assert client.wire.is_cut and not client.ended
    assert client.body == b'{"half": '


@pytest.mark.parametrize(
    "streaming",
    [
        False,
        True,
    ],
)
async def test_an_error_after_the_end_changes_nothing(streaming):
    """A deadline may pass, or a node go down, in the tick in which the answer ended."""
    client = Client()
    answering = client.answering(streams=streaming)
    answering.begin(200, header_lines(ENGINE), length=None, streaming=streaming)
    client.exchange.end(b"data: [DONE]\n\n")
    sent = client.wire.sent
    answering.fail(ERROR)
    assert client.wire.sent == sent and not client.wire.is_cut


async def test_after_an_error_before_the_beginning_another_changes_nothing():
    client = Client()
    answering = client.answering()
    answering.fail(ERROR)
    sent = client.wire.sent
    answering.fail(ApiError(500, "again"))
    assert client.wire.sent == sent


# ---------------------------------------------------------------------- the client goes


@pytest.mark.parametrize("when", ["before", "commented", "begun"])
async def test_a_client_that_is_gone_gets_nothing_more(when):
    client = Client()
    answering = client.answering(keepalive_s=0.01)
    if when == "commented":
        await eventually(lambda: client.wire.sent)
    if when == "begun":
        answering.begin(200, header_lines(ENGINE), length=None, streaming=True)
        client.exchange.write(b"data: 1\n\n")
    client.exchange.lose()
    sent = client.wire.sent
    await asyncio.sleep(0.03)
    answering.begin(200, header_lines(ENGINE), length=None, streaming=True)
    answering.fail(ERROR)
    await asyncio.sleep(0.03)
    assert client.wire.sent == sent and not client.wire.is_cut


async def test_closing_ends_the_comments():
    client = Client()
    answering = client.answering(keepalive_s=0.01)
    await eventually(lambda: client.wire.sent)
    answering.close()
    answering.close()
    sent = client.wire.sent
    await asyncio.sleep(0.04)
    assert client.wire.sent == sent != b""


# ---------------------------------------------------------------------- what workers answer


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b"", Usage()),
        (b'data: {"choices":[]}\n\ndata: [DONE]\n\n', Usage()),
        (  # chat and completions
            b'{"usage":{"prompt_tokens":5,"completion_tokens":42,"total_tokens":47,'
            b'"completion_tokens_details":{"reasoning_tokens":3}},"ei":{"decode_iterations":21}}',
            Usage(42, 21),
        ),
        (
            b'data: {"usage":{"completion_tokens": 1}}\n\ndata: {"usage":{"completion_tokens": 17}}\n\ndata: [DONE]\n\n',
            Usage(17),
        ),
        (  # messages
            b'event: message_start\ndata: {"message":{"usage":{"input_tokens":9,"output_tokens":1}}}\n\n'
            b'event: message_delta\ndata: {"usage":{"output_tokens":33}}\n\nevent: message_stop\ndata: {}\n\n',
            Usage(33),
        ),
        (  # responses
            b'{"type":"response.completed","response":{"usage":{"input_tokens":1,"output_tokens":8,'
            b'"output_tokens_details":{"reasoning_tokens":2},"total_tokens":9}}}',
            Usage(8),
        ),
        (  # generate
            b'{"text":"x","meta_info":{"prompt_tokens":3,"completion_tokens":12,"decode_iterations": 12}}',
            Usage(12, 12),
        ),
        (b'tokens":5,"completion_tokens":6}', Usage(6)),  # a tail begins anywhere
        (b'{"prompt_tokens":5,"cached_output_tokens":6,"completion_tokens":null}', Usage()),
        # What the model says of tokens is text.
        (
            msgspec.json.encode({"text": '{"completion_tokens": 999}', "usage": {"completion_tokens": 4}}),
            Usage(4),
        ),
        (msgspec.json.encode({"usage": {"output_tokens": 4}, "text": '"output_tokens": 999'}), Usage(4)),
    ],
)
def test_usage_is_what_an_answer_says_last(tail, usage):
    assert usage_in(tail) == usage


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 10**9 - 1))
def test_usage_in_anything(noise, n):
    assert usage_in(noise).output >= 0
    assert usage_in(noise + b'{"completion_tokens":%d}' % n).output == n


@pytest.mark.parametrize(
    ("status", "body", "message", "type_", "param", "code"),
    [
        (  # OpenAI's shape
            400,
            b'{"error":{"message":"m","type":"invalid_request_error","param":"p","code":"c"}}',
            "m",
            "invalid_request_error",
            "p",
            "c",
        ),
        (429, b'{"error":{"message":"m","type":"t","param":null,"code":null}}', "m", "t", None, None),
        (  # Anthropic's
            529,
            b'{"type":"error","error":{"type":"overloaded_error","message":"busy"},"request_id":"req_1"}',
            "busy",
            "overloaded_error",
            None,
            None,
        ),
        (500, b'{"error":{}}', "", "server_error", None, None),
        (502, b"", "a worker answered 502", "server_error", None, None),
        (502, b"<html>bad gateway</html>", "<html>bad gateway</html>", "server_error", None, None),
        (500, b"\xff\xfe", "\ufffd\ufffd", "server_error", None, None),
        (422, b'{"detail":"no"}', '{"detail":"no"}', "server_error", None, None),
        (500, b'{"error":"text"}', '{"error":"text"}', "server_error", None, None),
        (500, b"x" * 10_000, "x" * 200, "server_error", None, None),
    ],
)
def test_a_workers_error_is_relayed(status, body, message, type_, param, code):
    error = relayed(status, body)
    assert (error.status, error.message, error.type) == (status, message, type_)
    assert (error.param, error.code) == (param, code)


def test_an_error_whose_code_is_a_number_keeps_its_message():
    """As SGLang and vLLM write it."""
    error = relayed(400, b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}')
    assert error.message == "too long"


@settings(deadline=None)
@given(st.integers(400, 599), st.binary(max_size=300))
def test_any_body_is_an_error(status, body):
    error = relayed(status, body)
    assert error.status == status
    assert msgspec.json.decode(error.body())["error"]["message"] == error.message


@pytest.mark.parametrize("mark", [b"[", b'{"a":'])
def test_a_body_that_is_nested_too_deeply_is_an_error_too(mark):
    assert relayed(500, b'{"other":' + mark * 100_000).status == 500
