"""Engines for `bench/router.py`: they answer at once, speak the routers' sides of both contracts, and cost little.

Rules that hold here
- A fake answers every request in one write, or streams as `Fakes` says; what it answers is known beforehand, so
  that a client can check it.
- Nothing is parsed but heads: a router is measured, not a worker. Tokens are five bytes of the prompt's JSON each,
  and only the appended ones are sent to a router that knows the rest, as the contract says.
- What a real worker tells Redis (registration, states, stored pages) comes from a process of its own (`tell`): it
  follows the routers' placements and stores what they place, once per iteration.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from shared.bus import Bus
from shared.clock import Clock
from shared.messages import (
    BranchPlaced,
    BranchRequest,
    NodeInfo,
    NodeState,
    PagesStored,
    Phase,
    PrefillCall,
    Tier,
)
from shared.timing import GLM_52_4XGB300

MODEL = "m"
TOKEN_BYTES = 5
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1767225600,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
USAGE = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1767225600,"model":"m",'
    b'"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8,"decode_iterations":4}}\n\n'
)
DONE = b"data: [DONE]\n\n"
ANSWER = (
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1767225600,"model":"m","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":" word word word word word"},"logprobs":null,'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8,'
    b'"decode_iterations":4}}'
)
_SSE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_LINES = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
_STARTED, _ENDED = b'{"event":"started","t":1.0}\n', b'{"event":"done","cached_tokens":64}\n'
_END = b"0\r\n\r\n"
_KEPT_PROMPTS = 128
_prefill = msgspec.msgpack.Decoder(PrefillCall)


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _reply(body: bytes, kind: bytes = b"application/json", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b" % (
        kind, len(body), more, body,
    )  # fmt: skip


_CHUNK, _LAST = framed(CHUNK), framed(USAGE) + framed(DONE) + _END
_ANSWER = _reply(ANSWER)
_PREFILLED = _LINES + framed(_STARTED)
# What sglang-router asks its workers before it uses them.
_INFO = json.dumps(
    {"model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL, "tp_size": 1, "dp_size": 1,
     "is_generation": True, "disaggregation_mode": "null", "max_total_num_tokens": 2_000_000, "version": "0.5.0"}
).encode()  # fmt: skip
_MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()


class Tokenizer:
    """The ids of a chat body; a prompt that goes on from a known one costs what it appended."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[bytes, int, Any]] = OrderedDict()

    def reply(self, head: bytes, body: bytes) -> bytes:
        """The whole HTTP answer to `/v1/tokenize`."""
        text = body[: body.rindex(b"]")]
        count = len(text) // TOKEN_BYTES
        begin, hasher = 0, None
        at = head.find(b"x-ei-known-digest: ")
        if at >= 0:
            known = self._known.pop(head[at + 19 : at + 51], None)
            if known is not None and text.startswith(known[0]):
                begin, hasher = known[1], known[2]
        ids = self.ids(text, begin, count).tobytes()
        hasher = hasher or blake2b(digest_size=16)
        hasher.update(ids)
        self._known[hasher.hexdigest().encode()] = text[: count * TOKEN_BYTES], count, hasher
        if len(self._known) > _KEPT_PROMPTS:
            self._known.popitem(last=False)
        return _reply(ids, b"application/octet-stream", b"X-EI-From: %d\r\n" % begin if begin else b"")

    @staticmethod
    def ids(text: bytes, begin: int, end: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Tokens [begin, end): the first four of every five bytes."""
        at = begin * TOKEN_BYTES
        part = np.frombuffer(text, np.uint8, (end - begin) * TOKEN_BYTES, at).reshape(-1, TOKEN_BYTES)
        return np.ascontiguousarray(part[:, :4]).view("<i4")[:, 0] & 0xFFFFF


class _Connection(asyncio.Protocol):
    """One router's connection to one fake."""

    transport: asyncio.Transport

    def __init__(self, fakes: Fakes, node: str) -> None:
        self.fakes, self.node = fakes, node
        self._parts: list[bytes] = []
        self._missing = 0  # bytes until the request is whole; 0 in a head
        self._held = False  # a prefill's pages, until the router closes the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, error: Exception | None) -> None:
        self.fakes.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing <= 0:
                data = b"".join(self._parts)
                self._parts.clear()
                self._missing = 0
                self._request(data, data.index(b"\r\n\r\n") + 4)
            return
        if self._parts:
            data = b"".join((*self._parts, data))
            self._parts.clear()
        end = data.find(b"\r\n\r\n") + 4
        if end == 3:
            self._parts.append(data)
            return
        head = data[:end].lower()
        at = head.find(b"\r\ncontent-length:")
        length = int(head[at + 17 : head.index(b"\r", at + 2)]) if at >= 0 else 0
        missing = end + length - len(data)
        if missing > 0:
            self._parts.append(data)
            self._missing = missing
        else:
            self._request(data, end)

    def _request(self, data: bytes, end: int) -> None:
        fakes = self.fakes
        target = data[data.index(b" ") + 1 : data.index(b" HTTP/", 0, end)]
        if target == b"/v1/chat/completions" or target == b"/generate":
            fakes.calls[self.node] = fakes.calls.get(self.node, 0) + 1
            if fakes.streaming:
                self._stream()
            else:
                self.transport.write(_ANSWER)
        elif target == b"/ei/v1/prefill":
            fakes.calls[self.node] = fakes.calls.get(self.node, 0) + 1
            _prefill.decode(data[end:])
            self.transport.write(_PREFILLED)
            self.transport.write(framed(_ENDED) + _END)
        elif target == b"/v1/tokenize":
            self.transport.write(fakes.tokenizer.reply(data[:end].lower(), data[end:]))
        elif target == b"/ei/v1/kv/snapshot":
            head = msgspec.msgpack.encode([self.node, f"boot-{self.node}", 0, 0, 0])
            body = len(head).to_bytes(4, "little") + head
            self.transport.write(_reply(body, b"application/octet-stream"))
        elif target == b"/v1/models":
            self.transport.write(_reply(_MODELS))
        else:
            self.transport.write(_reply(_INFO))

    def _stream(self) -> None:
        fakes = self.fakes
        self.transport.write(_SSE)
        if fakes.paced:
            fakes.streams[self] = None
        else:  # as an engine does: the head when the request is taken, a chunk once there is a token
            asyncio.get_running_loop().call_later(0.001, self._one_chunk)

    def _one_chunk(self) -> None:
        self.transport.write(_CHUNK)
        self.transport.write(_LAST)

    def chunk(self) -> None:
        self.transport.write(_CHUNK)

    def end(self) -> None:
        self.transport.write(_LAST)


class Fakes:
    """Engines on loopback ports; `streaming` and `paced` say how the next requests are answered."""

    def __init__(self, nodes: list[str]) -> None:
        self.nodes = nodes
        self.urls: dict[str, str] = {}
        self.tokenizer = Tokenizer()
        self.calls: dict[str, int] = {}
        self.streaming = self.paced = False
        self.streams: dict[_Connection, None] = {}  # those that wait for chunks
        self.sent = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for node in self.nodes:
            server = await loop.create_server(
                lambda n=node: _Connection(self, n), "127.0.0.1", 0, backlog=512
            )  # type: ignore[misc]
            self.urls[node] = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def pace(self, rate: float, seconds: float) -> None:
        """Write `rate` chunks a second, one at a time over all streams in turn; then end them all."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self.sent = 0
        streams = list(self.streams)
        most = max(1, len(streams) // 8)  # at a time, before what came in is looked at
        while (passed := loop.time() - begun) < seconds:
            due = min(int(rate * passed) - self.sent, most)
            for _ in range(due):
                streams[self.sent % len(streams)].chunk()
                self.sent += 1
            await asyncio.sleep(0 if due == most else 0.0005)
        for stream in streams:
            stream.end()
        self.streams.clear()


# ------------------------------------------------------------------------------------- what workers tell Redis


async def tell(redis: str, cluster: str, urls: dict[str, str]) -> None:
    """Register the nodes, report their states, and store the pages that routers place on them; until cancelled."""
    bus = await Bus.connect(redis, cluster)
    clock = Clock()
    profile = GLM_52_4XGB300
    phases = {node: Phase.PREFILL if node.startswith("p") else Phase.DECODE for node in urls}
    states = {node: bus.publisher(f"state:{node}", f"boot-{node}", maxlen=1000, keep=False) for node in urls}
    pages = {node: bus.publisher(f"kv:{node}", f"boot-{node}") for node in urls}
    async with asyncio.TaskGroup() as group:
        for publisher in (*states.values(), *pages.values()):
            group.create_task(publisher.run())
        for node, url in urls.items():
            info = NodeInfo(
                node, url, f"boot-{node}", MODEL, profile.name, profile.page_size, profile.max_context, profile.l1_tokens,
                profile.l2_tokens, profile.chunk_tokens, phases[node],
            )  # fmt: skip
            await bus.register_node(info, 3600.0)
        group.create_task(_follow(bus, pages))
        while True:
            for node, phase in phases.items():
                states[node].publish(
                    NodeState(node, clock.now(), phase, 0, False, 0.0, [], [], [], 0, profile.l1_tokens)
                )
            await asyncio.sleep(0.1)


async def _follow(bus: Bus, out: dict[str, Any]) -> None:
    reader = bus.reader({})
    await reader.follow("branch")
    paths: OrderedDict[str, bytes] = OrderedDict()
    while True:
        stored: dict[str, list[bytes]] = {}
        for event in await reader.read(1.0):
            message = event.message
            if isinstance(message, BranchRequest):
                paths[message.branch] = message.pages
                if len(paths) > 10_000:
                    paths.popitem(last=False)
            elif isinstance(message, BranchPlaced) and paths.get(message.branch):
                stored.setdefault(message.node, []).append(paths[message.branch])
        for node, lists in stored.items():
            for tier in (Tier.L1, Tier.L2):
                out[node].publish(PagesStored(tier, b"".join(lists)))
        await asyncio.sleep(0.02)


def main(argv: list[str]) -> None:
    """`REDIS CLUSTER {node: url}`"""
    redis, cluster, urls = argv
    asyncio.run(tell(redis, cluster, json.loads(urls)))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
