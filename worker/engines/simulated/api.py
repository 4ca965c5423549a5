"""HTTP of the simulated engine: OpenAI's API, and the router's prefill call.

Rules that hold here
- Every error is OpenAI's shape. A request that the node hands back is 503 with code `moved` and the header
  `X-EI-Moved: 1`, before any byte of an answer: the router sends it elsewhere.
- A call with `X-EI-Request-Id` comes from a router; any other is a client's own and served in every phase.
- A handler that ends, however it ends, leaves nothing of its call on the node. A closed connection cancels it.
"""

from __future__ import annotations

import uuid

import msgspec
import numpy as np
from aiohttp import web

from shared.messages import PrefillCall, PrefillEvent
from shared.openai import ApiError, Kind, TokenArray, check_length, parse_call, unknown_model
from shared.pages import PathHasher
from worker.engines.simulated import tokenizer
from worker.engines.simulated.engine import Call, Engine
from worker.engines.simulated.phase import Kind as Work
from worker.engines.simulated.requests import NeverFits, Request, Source
from worker.engines.simulated.wire import Form, Job, job_of, prompt_of
from worker.kv.path import EMPTY, Path

REQUEST_ID = "X-EI-Request-Id"
KV_SOURCE = "X-EI-KV-Source"
CACHED_TOKENS = "X-EI-Cached-Tokens"
CREATED = 1_767_225_600  # 2026-01-01: the model's, which OpenAI's clients expect to be told
_prefill_decoder = msgspec.msgpack.Decoder(PrefillCall)


class Api:
    """The handlers of one node. They answer 503 until `start` was called."""

    def __init__(self, model: str, page_size: int, max_context: int) -> None:
        self._model = model
        self._page_size = page_size
        self._max_context = max_context
        self._engine: Engine | None = None

    def start(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """Raises ApiError 503 before `start`."""
        if self._engine is None:
            raise ApiError(
                503, "This worker is starting.", type="server_error", code="starting", retry_after_s=1
            )
        return self._engine

    def routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completion)
        app.router.add_post("/v1/tokenize", self.tokenize)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/ei/v1/prefill", self.prefill)

    # ------------------------------------------------------------------------------ OpenAI

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "completion")

    async def models(self, _: web.Request) -> web.Response:
        entry = {
            "id": self._model,
            "object": "model",
            "created": CREATED,
            "owned_by": "evolving-infra",
            "max_model_len": self._max_context,
            "page_size": self._page_size,
        }
        return _json({"object": "list", "data": [entry]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        kind: Kind = "chat" if b'"messages"' in body else "completion"
        call = parse_call(body, kind)
        self._check_model(call.model)
        tokens = prompt_of(call, kind)
        if "application/octet-stream" in request.headers.get("Accept", ""):
            data = tokens.astype("<i4", copy=False).tobytes()
            return web.Response(body=data, content_type="application/octet-stream")
        return _json({"tokens": tokens.tolist(), "count": tokens.size, "max_model_len": self._max_context})

    async def abort(self, request: web.Request) -> web.Response:
        """Free the calls of a request id at once."""
        try:
            rid = msgspec.json.decode(await request.read(), type=dict[str, str])["rid"]
        except (msgspec.DecodeError, KeyError):
            raise ApiError(400, 'The body must be {"rid": "..."}.', param="rid") from None
        return _json({"rid": rid, "aborted": self.engine.abort_rid(rid)})

    async def _generate(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        body = await _body(request)
        parsed = parse_call(body, kind)
        self._check_model(parsed.model)
        job = job_of(parsed, kind, body, self._max_context)
        rid = request.headers.get(REQUEST_ID, "")
        source = request.headers.get(KV_SOURCE, "").rstrip("/")
        path, tail = self._path(job)
        work = Request(
            rid or uuid.uuid4().hex,
            Work.GENERATE,
            job.tokens.size,
            path,
            tail=tail,
            output=len(job.answer.ids),
            room_tokens=job.room_tokens,
            routed=bool(rid),
            source=Source(source, job.tokens.size // self._page_size) if source else None,
        )
        call = self._submit(work, "max_tokens")
        try:
            await self._first_token(call)
            cached = _number(request.headers.get(CACHED_TOKENS), work.cached)
            usage = parsed.stream_options is not None and parsed.stream_options.include_usage
            form = Form(kind, work.rid, self._model, job, cached, with_usage=usage, routed=bool(rid))
            if parsed.stream:
                return await self._stream(request, call, form)
            while not call.ended:
                await call.news()
            if call.aborted:
                raise _aborted()
            return web.Response(body=form.whole(work.iterations), content_type="application/json")
        finally:
            self.engine.abort(call)

    async def _first_token(self, call: Call) -> None:
        """Return once the answer can begin; raise ApiError when there will be none."""
        while not call.produced and not call.ended:
            await call.news()
        if call.moved:
            raise ApiError(
                503,
                "This node changes its phase or stops; send the request to another one.",
                type="server_error",
                code="moved",
                retry_after_s=1,
            )
        if call.aborted:
            raise _aborted()

    async def _stream(self, request: web.Request, call: Call, form: Form) -> web.StreamResponse:
        answer = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await answer.prepare(request)
        sent = 0
        while True:
            produced, done = call.produced, call.ended_t is not None
            if call.aborted:
                await answer.write(b"data: " + _aborted().body() + b"\n\n")
                break
            if produced > sent or done:
                data = form.chunk(produced, done=done)
                sent = produced
                if done:
                    data += form.end(call.request.iterations)
                await answer.write(data)
            if done:
                break
            await call.news()
        await answer.write_eof()
        return answer

    # ------------------------------------------------------------------------------ the router's call

    async def prefill(self, request: web.Request) -> web.StreamResponse:
        """Compute the KV of a prompt; lines of `PrefillEvent`."""
        try:
            wanted = _prefill_decoder.decode(await request.read())
            tokens = np.frombuffer(wanted.tokens, dtype="<i4").astype(np.int32, copy=False)
        except (msgspec.DecodeError, ValueError) as error:
            raise ApiError(400, f"The body is no PrefillCall: {error}") from None
        tokenizer.check_ids(tokens)
        check_length(tokens.size, self._max_context)
        hasher = PathHasher(self._page_size, wanted.salt)
        hasher.extend(tokens)
        path, tail = Path.of_digests(hasher.digests), _tail(hasher)
        fetch = wanted.fetch
        source = Source(fetch.url.rstrip("/"), fetch.last) if fetch is not None else None
        work = Request(
            wanted.rid, Work.PREFILL, tokens.size, path,
            tail=tail, routed=True, source=source, keep=wanted.keep,
        )  # fmt: skip
        call = self._submit(work, "prompt")
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            await answer.prepare(request)
            while not call.ended and call.started_t is None:
                await call.news()
            if call.started_t is not None:
                await answer.write(_line(_prefill_event("started", call.started_t, work)))
            while not call.ended:
                await call.news()
            if call.moved:
                await answer.write(_line(PrefillEvent("moved")))
            elif call.aborted:
                await answer.write(_line(PrefillEvent("failed", error="the request was aborted")))
            else:
                await answer.write(_line(_prefill_event("done", call.ended_t or 0.0, work)))
                if wanted.keep:
                    await self.engine.keep()
            await answer.write_eof()
            return answer
        finally:
            self.engine.abort(call)
            self.engine.let_go(call)

    # ------------------------------------------------------------------------------ helpers

    def _check_model(self, model: str) -> None:
        if model != self._model:
            raise unknown_model(model, [self._model])

    def _submit(self, work: Request, param: str) -> Call:
        try:
            return self.engine.submit(work)
        except NeverFits as error:
            raise ApiError(
                400,
                f"This can never run here: {error}.",
                param=param,
                code="context_length_exceeded",
            ) from None

    def _path(self, job: Job) -> tuple[Path, Path]:
        """The full pages of prompt and output together, and the tail of the prompt."""
        hasher = PathHasher(self._page_size)
        hasher.extend(job.tokens)
        tail = _tail(hasher)
        output: TokenArray = np.frombuffer(job.answer.ids, dtype=np.uint8).astype(np.int32)
        hasher.extend(output)
        return Path.of_digests(hasher.digests), tail


def _tail(hasher: PathHasher) -> Path:
    """The partial last page of the path so far: one page or none."""
    digest = hasher.tail_digest()
    return Path.of_digests([digest]) if digest is not None else EMPTY


async def _body(request: web.Request) -> bytes:
    body = await request.read()
    if not body:
        raise ApiError(400, "The request body is empty; send a JSON object.")
    return body


def _aborted() -> ApiError:
    return ApiError(499, "The request was aborted.", type="server_error", code="aborted")


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _line(event: PrefillEvent) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def _prefill_event(event: str, t: float, work: Request) -> PrefillEvent:
    return PrefillEvent(
        event,
        t=t,
        cached_tokens=work.cached,
        fetched_tokens=work.fetched,
        restored_tokens=work.restored,
    )


def _number(text: str | None, default: int) -> int:
    """A header's number; `default` when there is none or it is no number of at least 0."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else default
