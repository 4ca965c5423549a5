"""A worker that speaks the router's side of the contract and fails on demand: for tests of the router alone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from shared.bus import Bus
from shared.kvsnapshot import send_snapshot
from shared.messages import KvSnapshot, NodeInfo, NodeState, Phase, PrefillCall


class FakeWorker:
    def __init__(self, bus: Bus, node: str, phase: Phase = Phase.BOTH) -> None:
        self.bus, self.node, self.phase = bus, node, phase
        self.prefill_script: list[str] = []  # done (default), moved, failed, close, hang, silent, garbage
        self.decode_script: list[str] = []  # ok (default), moved, die, hang, error, silent
        self.prefills: list[PrefillCall] = []
        self.decodes: list[tuple[dict[str, str], bytes]] = []
        self.cancelled = 0
        self.others: list[
            tuple[str, str, bytes]
        ] = []  # method, path with query, body of calls of no known API
        self.chunks = 5
        self.released: list[str] = []  # request ids
        self.other_status = 202
        self.tokenizer_says: tuple[int, bytes] | None = None
        self.frozen = False  # nothing is answered, as by a stopped process
        self.sent_tokens: list[int] = []  # ids in each answer of the tokenizer
        self.resume = asyncio.Event()

    async def __aenter__(self) -> FakeWorker:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/ei/v1/prefill", self._prefill)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"):
            app.router.add_post(path, self._decode)
        app.router.add_post("/v1/tokenize", self._tokenize)
        app.router.add_get("/ei/v1/kv/snapshot", self._snapshot)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_post("/ei/v1/release", self._release)
        app.router.add_route("*", "/v1/{rest:.*}", self._other)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        self.info = NodeInfo(
            self.node, f"http://127.0.0.1:{port}", f"boot-{self.node}", "m", "tiny", 16, 8192, 8192, 32768, 256,
            self.phase,
        )  # fmt: skip
        await self.bus.register_node(self.info, 3600.0)
        self._state_out = self.bus.publisher(f"state:{self.node}", self.info.incarnation)
        self._sender = asyncio.create_task(self._state_out.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._sender.cancel()
        await self.bus.unregister_node(self.node)
        await self._runner.cleanup()

    def state(self, t: float, **fields: object) -> None:
        base = NodeState(self.node, t, self.phase, 0, False, 0.0, [], [], [], 0, 8192)
        self._state_out.publish(msgspec.structs.replace(base, **fields))

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        return await send_snapshot(request, KvSnapshot(self.node, self.info.incarnation, 0, b"", b""))

    async def _release(self, request: web.Request) -> web.Response:
        self.released += msgspec.msgpack.decode(await request.read(), type=list[str])
        return web.json_response({})

    async def _healthz(self, request: web.Request) -> web.Response:
        if self.frozen:
            await asyncio.Event().wait()
        return web.Response(text="ok\n")

    async def _other(self, request: web.Request) -> web.Response:
        self.others.append((request.method, request.path_qs, await request.read()))
        return web.json_response({"node": self.node, "method": request.method}, status=self.other_status)

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.tokenizer_says:
            status, data = self.tokenizer_says
            return web.Response(status=status, body=data)
        body = json.loads(await request.read())
        text = body.get("prompt") or body.get("text") or json.dumps(body.get("messages") or body.get("input"))
        data = _ids(text)
        known = 4 * int(request.headers.get("X-EI-Known-Tokens", 0))
        if hashlib.blake2b(data[:known], digest_size=16).hexdigest() != request.headers.get(
            "X-EI-Known-Digest"
        ):
            known = 0
        self.sent_tokens.append(len(data[known:]) // 4)
        headers = {"X-EI-From": str(known // 4)}
        return web.Response(body=data[known:], content_type="application/octet-stream", headers=headers)

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        call = msgspec.msgpack.decode(await request.read(), type=PrefillCall)
        self.prefills.append(call)
        how = self.prefill_script.pop(0) if self.prefill_script else "done"
        await self._silent(how)
        answer = web.StreamResponse()
        await answer.prepare(request)
        if how in ("done", "hang", "close", "failed"):
            await answer.write(b'{"event":"started","t":1.0}\n')
        try:
            if how == "hang":
                await self.resume.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if how == "close":
            request.transport.abort()
        elif how == "garbage":
            await answer.write(b"\xff no event\n")
        elif how == "moved":
            await answer.write(b'{"event":"moved"}\n')
        elif how == "failed":
            await answer.write(b'{"event":"failed","error":"out of memory"}\n')
        else:
            await answer.write(b'{"event":"done","cached_tokens":32}\n')
        return answer

    async def _silent(self, how: str) -> None:
        if how == "silent":
            try:
                await self.resume.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.decodes.append((dict(request.headers), body))
        how = self.decode_script.pop(0) if self.decode_script else "ok"
        await self._silent(how)
        if how == "moved":
            return web.json_response({"error": {"message": "moving", "code": "moved"}}, status=503)
        if how == "error":
            return web.json_response(
                {"error": {"message": "bad tool", "type": "invalid_request_error"}}, status=400
            )
        usage = {"prompt_tokens": 3, "completion_tokens": self.chunks, "decode_iterations": 4}
        if not json.loads(body).get("stream"):
            return web.json_response({"choices": [{"text": "abc"}], "usage": usage})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            for i in range(self.chunks):
                if i == 2 and how == "die":
                    request.transport.abort()
                    return answer
                if i == 2 and how == "hang":
                    await self.resume.wait()
                await answer.write(b'data: {"choices":[{"text":"%d"}]}\n\n' % i)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await answer.write(
            b'data: {"choices":[],"usage":' + json.dumps(usage).encode() + b"}\n\ndata: [DONE]\n\n"
        )
        return answer


def _ids(text: str) -> bytes:
    return b"".join(byte.to_bytes(4, "little") for byte in text.encode())


@contextlib.asynccontextmanager
async def workers(bus: Bus, *specs: tuple[str, Phase]) -> AsyncIterator[list[FakeWorker]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeWorker(bus, node, phase)) for node, phase in specs]
