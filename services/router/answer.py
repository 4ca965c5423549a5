"""The answer on its way to the client: keep-alive comments while the request queues, one beginning, errors in shape.

Rules that hold here
- Nothing is written before the decode node's first byte, unless a streaming client has waited `keepalive_s`: then the
  stream is begun with a comment, repeated as long as it waits. A comment is no byte of an answer: the request may
  still move to another node.
- What goes wrong after that is an error event in the API's own shape; before, a status and a body.
- An answer that is no stream and breaks in its middle is cut, so that the client sees that it is incomplete.
"""

from __future__ import annotations

import asyncio

from services.router.exchange import Exchange
from services.router.http_messages import HeaderLines
from shared.api_errors import error_body, error_event, is_anthropic, new_request_id
from shared.openai import ApiError

COMMENT = b": waiting\n\n"
Headers = list[tuple[bytes, bytes]]
_STREAM: Headers = [
    (b"Content-Type", b"text/event-stream; charset=utf-8"),
    (b"Cache-Control", b"no-cache"),
    (b"X-Accel-Buffering", b"no"),
]


class Answering:
    """One exchange's. `headers` go with whatever is answered."""

    def __init__(self, exchange: Exchange, *, streams: bool, keepalive_s: float, headers: Headers) -> None:
        self.exchange = exchange
        self.headers = headers
        self.streaming = False  # an event stream was begun
        self._streams = streams
        self._keepalive_s = keepalive_s
        self._timer: asyncio.TimerHandle | None = None
        if streams and keepalive_s > 0:
            self._timer = asyncio.get_running_loop().call_later(keepalive_s, self._wait_on)

    def _wait_on(self) -> None:
        if self.exchange.gone:
            return
        if not self.exchange.started:
            self.exchange.start(200, _STREAM + self.headers)
            self.streaming = True
        self.exchange.write(COMMENT)
        self._timer = asyncio.get_running_loop().call_later(self._keepalive_s, self._wait_on)

    def begin(self, status: int, lines: HeaderLines, *, length: int | None, streaming: bool) -> None:
        """The decode node's answer begins; `lines` are as `Exchange.start` wants them."""
        self.close()
        if not self.exchange.started:
            self.exchange.start(status, self.headers, length=length, lines=lines)
            self.streaming = streaming

    def fail(self, error: ApiError) -> None:
        """End with an error, in the shape that what was sent so far allows."""
        self.close()
        exchange = self.exchange
        if exchange.gone or exchange.ended:
            return
        if not exchange.started:
            headers, body = error_answer(error, exchange.path)
            exchange.reply(error.status, headers + self.headers, body)
        elif self.streaming:
            exchange.write(b"\n\n" + error_event(error, exchange.path))
            exchange.end()
        else:
            exchange.abort()

    def close(self) -> None:
        """No more comments."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def error_answer(error: ApiError, path: str) -> tuple[Headers, bytes]:
    """Headers and body of an error, in the shape of the path's API."""
    headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
    headers.append((b"Content-Type", b"application/json"))
    request_id = ""
    if is_anthropic(path):  # where its clients look for it
        request_id = new_request_id()
        headers.append((b"request-id", request_id.encode()))
    return headers, error_body(error, path, request_id)
