"""Clients for `bench/router.py`: raw, kept alive, and they check what they get.

Rules that hold here
- An answer counts when its status is 200 and its body is the fake's, whole; anything else ends the benchmark.
- One request at a time on a connection; a connection is never opened within a measurement.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import time
from collections.abc import Callable

from process import cpu_s
from router_fakes import ANSWER, CHUNK, MODEL, TOKEN_BYTES

_DATA = b"data: {"


class BadAnswer(Exception):
    """Not what the fakes answered."""


class Client(asyncio.Protocol):
    """A kept-alive connection to one address."""

    transport: asyncio.Transport

    def __init__(self, host: str, port: int) -> None:
        self.address = f"{host}:{port}"
        self._buffer = b""
        self._need = 0
        self._lengthless = False
        self._expect = b""
        self._begun = 0.0
        self._whole: Callable[[float], None] | None = None
        self.first_s = 0.0  # from the request to the first chunk
        self.chunks = 0  # streamed ones
        self.error: Exception | None = None

    @classmethod
    async def open(cls, url: str) -> Client:
        host, _, port = url.removeprefix("http://").partition(":")
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: cls(host, int(port)), host, int(port)
        )
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, error: Exception | None) -> None:
        if self._whole is not None:
            self._fail(f"{self.address} closed the connection within an answer")

    def close(self) -> None:
        self._whole = None
        self.transport.abort()

    def _fail(self, why: str) -> None:
        self.error = BadAnswer(why)
        whole, self._whole = self._whole, None
        if whole is not None:
            whole(-1.0)

    # -- one request

    def send(self, request: bytes, expect: bytes, whole: Callable[[float], None]) -> None:
        """Send; `whole(seconds)` is called at the answer's end, with a negative number when it is wrong."""
        self._buffer, self._need, self._lengthless = b"", 0, False
        self._expect, self._whole = expect, whole
        self.first_s, self.chunks = 0.0, 0
        self._begun = time.perf_counter()
        self.transport.write(request)

    async def ask(self, request: bytes, expect: bytes = ANSWER) -> float:
        """Seconds from the request to the answer's end. Raises BadAnswer."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.send(request, expect, future.set_result)
        seconds = await future
        if self.error is not None:
            raise self.error
        return seconds

    def data_received(self, data: bytes) -> None:
        if self._lengthless:
            self.chunks += (self._buffer[1 - len(_DATA) :] + data).count(_DATA)
            if not self.first_s and self.chunks:
                self.first_s = time.perf_counter() - self._begun
            self._buffer = tail = (self._buffer + data)[-2048:]
            if tail.endswith(b"0\r\n\r\n"):
                self._end(tail)
            return
        buffer = self._buffer = self._buffer + data if self._buffer else data
        if not self._need:
            end = buffer.find(b"\r\n\r\n") + 4
            if end == 3:
                return
            head = buffer[:end].lower()
            if not head.startswith(b"http/1.1 200"):
                self._fail(f"{self.address} answered {buffer[:400]!r}")
                return
            at = head.find(b"\r\ncontent-length:")
            if at < 0:
                self._lengthless = True
                self._buffer = b""
                self.data_received(buffer[end:])
                return
            self._need = end + int(head[at + 17 : head.index(b"\r", at + 2)])
        if len(buffer) >= self._need:
            self._end(buffer)

    def _end(self, seen: bytes) -> None:
        seconds = time.perf_counter() - self._begun
        if self._expect not in seen or (not self._lengthless and len(seen) != self._need):
            self._fail(f"{self.address}: another answer than the fakes': {seen[-400:]!r}")
            return
        whole, self._whole = self._whole, None
        if whole is not None:
            whole(seconds)


# ------------------------------------------------------------------------------------- requests


def post(path: str, body: bytes, more: bytes = b"") -> bytes:
    head = (
        b"POST %b HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
        % (
            path.encode(),
            more,
            len(body),
        )
    )
    return head + body


def words(size: int) -> bytes:
    """Words of four letters, so each with its blank is a token; text that never comes twice."""
    return os.urandom(2 * (size // TOKEN_BYTES)).hex(" ", 2).encode()


SHORT = (
    b'{"model":"%b","messages":[{"role":"user","content":"What is the capital of France?"}],"max_tokens":5}'
)


class Short:
    """A question of a few tokens; as ids (`/generate`, two hops) or as a chat, which has to be tokenized first."""

    def __init__(self, chat: bool, stream: bool = False) -> None:
        flag = b',"stream":true}' if stream else b"}"
        if chat:
            self._request = post("/v1/chat/completions", (SHORT % MODEL.encode())[:-1] + flag)
        else:
            ids = b",".join(b"%d" % i for i in range(1000, 1012))
            body = b'{"input_ids":[%b],"sampling_params":{"max_new_tokens":5}' % ids
            self._request = post("/generate", body + flag)

    def next(self) -> bytes:
        return self._request


class Agent:
    """Chat requests that grow by `step` tokens, from `first` to `last` of them; then another conversation begins.

    With `last` 0 every request begins one.
    """

    def __init__(self, first: int, last: int, step: int, named: bool = True) -> None:
        self._sizes = first * TOKEN_BYTES, last * TOKEN_BYTES, step * TOKEN_BYTES
        self._named = named
        self._name = b""
        self._text = b""
        self.fresh = True  # the last request began a conversation

    def next(self) -> bytes:
        first, last, step = self._sizes
        self.fresh = not self._text or len(self._text) >= last
        if self.fresh:
            name = os.urandom(8).hex().encode()
            self._name = b"x-ei-branch: agent-%b\r\n" % name if self._named else b""
            start = b'{"model":"%b","messages":[{"role":"system","content":"%b ' % (MODEL.encode(), name)
            self._text = start + words(first - len(start)) + b'"}'
        else:
            half = (step - 60) // 2
            self._text += b',{"role":"assistant","content":"%b"},{"role":"user","content":"%b"}' % (
                words(half), words(half),
            )  # fmt: skip
        return post("/v1/chat/completions", self._text + b'],"max_tokens":5}', self._name)


# ------------------------------------------------------------------------------------- loads


async def closed_loop(
    url: str, pid: int, sources: list[Short] | list[Agent], seconds: float, expect: bytes = ANSWER
) -> tuple[float, float]:
    """Requests a second of so many clients, each with its next request as soon as the last was answered, and CPU
    milliseconds of the process `pid` for each."""
    clients = [await Client.open(url) for _ in sources]
    loop = asyncio.get_running_loop()
    finished = loop.create_future()
    done = 0
    failed: Exception | None = None
    running = len(clients)
    begun = until = 0.0

    def start(client: Client, source: Short | Agent) -> None:
        def whole(took: float) -> None:
            nonlocal done, running, failed
            if took < 0:
                failed = client.error
            done += 1
            if failed is None and time.perf_counter() < until:
                client.send(source.next(), expect, whole)
            else:
                running -= 1
                if not running and not finished.done():
                    finished.set_result(time.perf_counter())

        client.send(source.next(), expect, whole)

    for _ in range(2):  # before the clock runs
        await asyncio.gather(*(c.ask(s.next(), expect) for c, s in zip(clients, sources, strict=True)))
    cpu = cpu_s(pid)
    begun = time.perf_counter()
    until = begun + seconds
    for client, source in zip(clients, sources, strict=True):
        start(client, source)
    ended = await finished
    cpu = cpu_s(pid) - cpu
    for client in clients:
        client.close()
    if failed is not None:
        raise failed
    return done / (ended - begun), 1e3 * cpu / done


async def streams(url: str, count: int) -> tuple[list[Client], list[asyncio.Future[float]]]:
    """So many clients, each with a stream under way, and what ends with each stream."""
    clients = [await Client.open(url) for _ in range(count)]
    request = Short(chat=True, stream=True).next()
    ends: list[asyncio.Future[float]] = [asyncio.get_running_loop().create_future() for _ in clients]
    for client, end in zip(clients, ends, strict=True):
        client.send(request, b"[DONE]", end.set_result)
    return clients, ends


def median(values: list[float]) -> float:
    return statistics.median(values)


assert CHUNK.startswith(_DATA)
