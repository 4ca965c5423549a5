"""A small OpenAI-compatible server that keeps what reached it, for the load test's tests."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import numpy.typing as npt
from aiohttp import web

from shared.pages import page_hashes

Tokens = npt.NDArray[np.int32]


@dataclass
class Seen:
    """One request as it arrived; `end` is taken before its last bytes are written."""

    prompt: Tokens
    body: dict[str, object]
    headers: dict[str, str]
    arrived: float
    end: float = 0.0
    output: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    answered: bool = False

    @property
    def branch(self) -> str:
        return self.headers["X-EI-Branch"]


class FakeServer:
    """Answers with random printable bytes, as long as asked for. Its cache of pages has no end.

    delay_s: from a request's arrival to its first chunk. token_ids: whether chunks carry them.
    refusals: answers given instead, in order, before any is served. broken: streams that stop in the middle.
    raw: what to stream instead, in these writes.
    """

    def __init__(self, *, delay_s: float = 0.0, token_ids: bool = True, page_size: int = 64) -> None:
        self.delay_s = delay_s
        self.token_ids = token_ids
        self.page_size = page_size
        self.refusals: list[tuple[int, dict[str, str]]] = []
        self.broken = 0
        self.raw: list[bytes] | None = None
        self.cluster: dict[str, object] | None = None
        self.requests: list[Seen] = []
        self.ended: list[str] = []
        self.url = ""
        self.arrival = asyncio.Event()
        self._pages: set[int] = set()
        self._random = np.random.default_rng(7)
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeServer:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/ei/v1/cluster", self._cluster)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_delete("/v1/branches/{branch:.+}", self._end_branch)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def branch(self, name: str) -> list[Seen]:
        return [seen for seen in self.requests if seen.branch == name]

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": "fake", "object": "model", "max_model_len": 1 << 20, "page_size": self.page_size}
        return web.json_response({"object": "list", "data": [entry]})

    async def _cluster(self, request: web.Request) -> web.Response:
        if self.cluster is None:
            raise web.HTTPNotFound
        return web.json_response(self.cluster)

    async def _end_branch(self, request: web.Request) -> web.Response:
        self.ended.append(request.match_info["branch"])
        return web.json_response({})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        arrived = time.monotonic()
        body = json.loads(await request.read())
        if self.refusals:
            status, headers = self.refusals.pop(0)
            error = {"message": "not now", "type": "overloaded", "param": None, "code": None}
            return web.json_response({"error": error}, status=status, headers=headers)
        prompt = np.array(body.pop("prompt"), dtype=np.int32)
        seen = Seen(prompt, body, dict(request.headers), arrived)
        self.requests.append(seen)
        self.arrival.set()
        hashes = page_hashes(prompt, self.page_size).tolist()
        held = next((i for i, page in enumerate(hashes) if page not in self._pages), len(hashes))
        cached = min(held, (prompt.size - 1) // self.page_size) * self.page_size
        self._pages.update(hashes)
        await asyncio.sleep(self.delay_s)
        output = self._random.integers(32, 127, body["max_tokens"]).astype(np.int32)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.raw is not None:
            for piece in self.raw:
                await response.write(piece)
            await response.write_eof()
            return response
        for part in np.array_split(output, min(3, output.size)):
            choice: dict[str, object] = {"index": 0, "text": bytes(part.tolist()).decode()}
            if self.token_ids:
                choice["token_ids"] = part.tolist()
            await response.write(_event({"choices": [choice]}))
            if self.broken:
                self.broken -= 1
                assert request.transport is not None
                request.transport.close()
                return response
        self._pages.update(page_hashes(np.concatenate((prompt, output)), self.page_size).tolist())
        seen.output, seen.answered = output, True
        await response.write(
            _event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            + _event(
                {
                    "choices": [],
                    "usage": {
                        "prompt_tokens": prompt.size,
                        "completion_tokens": output.size,
                        "total_tokens": prompt.size + output.size,
                        "prompt_tokens_details": {"cached_tokens": cached},
                    },
                }
            )
        )
        seen.end = time.monotonic()
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _event(value: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def common_prefix(a: Tokens, b: Tokens) -> int:
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n
