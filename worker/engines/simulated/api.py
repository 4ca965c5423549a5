"""HTTP of the simulated engine: the APIs of OpenAI, Anthropic and SGLang, and the router's prefill call.

Rules that hold here
- Every error has the shape of the API that was called. A request that the node hands back is 503 with code
  `moved` and the header `X-EI-Moved: 1`, before any byte of an answer: the router sends it elsewhere.
- A call with `X-EI-Request-Id` comes from a router; any other is a client's own and served in every phase.
- A handler that ends, however it ends, leaves nothing of its call on the node. A closed connection cancels it.
"""

from __future__ import annotations

import uuid
from hashlib import blake2b

import msgspec
import numpy as np
from aiohttp import web

from shared.api_errors import error_event, is_anthropic, new_request_id
from shared.messages import PrefillCall, PrefillEvent
from shared.openai import (
    PATHS,
    ApiError,
    Kind,
    TokenArray,
    check_length,
    parse_call,
    read_json,
    unknown_model,
)
from shared.pages import PathHasher
from worker.engines.simulated import tokenizer
from worker.engines.simulated.engine import Call, Engine
from worker.engines.simulated.forms import Form, Job
from worker.engines.simulated.phase import Kind as Work
from worker.engines.simulated.requests import NeverFits, Request, Source
from worker.engines.simulated.wire import FORMS, job_of, prompt_of
from worker.kv.path import EMPTY, Path

REQUEST_ID = "X-EI-Request-Id"
KV_SOURCE = "X-EI-KV-Source"
CACHED_TOKENS = "X-EI-Cached-Tokens"
SALT = "X-EI-Salt"  # of the tenant, with which its page hashes begin
API_PATH = "X-EI-Path"  # of /v1/tokenize: the path that the body is meant for
KNOWN_TOKENS = "X-EI-Known-Tokens"  # of /v1/tokenize: so many leading ids need not be sent
KNOWN_DIGEST = "X-EI-Known-Digest"  # if this is their `known_digest`
FROM = "X-EI-From"  # of its answer: the number of ids that were left out
COUNT_TOKENS = "/v1/messages/count_tokens"
CREATED = 1_767_225_600  # 2026-01-01: the model's, which OpenAI's clients expect to be told


class _Rid(msgspec.Struct):
    rid: str | None = None


_rid_decoder = msgspec.json.Decoder(_Rid)
_rids_decoder = msgspec.msgpack.Decoder(list[str])
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
        for path in PATHS:
            app.router.add_post(path, self.generate)
        app.router.add_post(COUNT_TOKENS, self.count_tokens)
        app.router.add_post("/v1/tokenize", self.tokenize)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/ei/v1/prefill", self.prefill)
        app.router.add_post("/ei/v1/release", self.release)

    # ------------------------------------------------------------------------------ clients

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
        """The prompt's ids, exactly those that the call of the same body uses."""
        body = await _body(request)
        path = request.headers.get(API_PATH, "")
        kind: Kind = "chat" if b'"messages"' in body else "completion"
        if path and path != COUNT_TOKENS and path not in PATHS:
            raise ApiError(400, f"{API_PATH} {path!r} is no API here.", param=API_PATH)
        if path:
            kind = PATHS.get(path, "messages")
        tokens = self._prompt(body, kind)
        if "application/octet-stream" not in request.headers.get("Accept", ""):
            return _json(
                {"tokens": tokens.tolist(), "count": tokens.size, "max_model_len": self._max_context}
            )
        known = _number(request.headers.get(KNOWN_TOKENS), 0)
        if (
            known > tokens.size
            or known_digest(tokens[:known]) != request.headers.get(KNOWN_DIGEST, "").lower()
        ):
            known = 0
        return web.Response(
            body=tokens[known:].astype("<i4", copy=False).tobytes(),
            content_type="application/octet-stream",
            headers={FROM: str(known)},
        )

    async def count_tokens(self, request: web.Request) -> web.Response:
        tokens = self._prompt(await _body(request), "messages")
        answer = _json({"input_tokens": tokens.size})
        answer.headers["request-id"] = new_request_id()
        return answer

    def _prompt(self, body: bytes, kind: Kind) -> TokenArray:
        call = parse_call(body, kind, counting=True)
        self._check_model(call.model, kind)
        return prompt_of(call, kind).tokens

    async def abort(self, request: web.Request) -> web.Response:
        """Free the calls of a request id at once."""
        try:
            rid = msgspec.json.decode(await request.read(), type=dict[str, str])["rid"]
        except (msgspec.DecodeError, KeyError):
            raise ApiError(400, 'The body must be {"rid": "..."}.', param="rid") from None
        return _json({"rid": rid, "aborted": self.engine.abort_rid(rid)})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A call of any of the APIs, which its path names."""
        kind = PATHS[request.path]
        body = await _body(request)
        parsed = parse_call(body, kind)
        self._check_model(parsed.model, kind)
        job = job_of(parsed, kind, body, self._max_context)
        rid = request.headers.get(REQUEST_ID, "")
        source = request.headers.get(KV_SOURCE, "").rstrip("/")
        path, tail = self._path(job, request.headers.get(SALT, ""))
        work = Request(
            rid or (kind == "generate" and _rid_in(body)) or uuid.uuid4().hex,
            Work.GENERATE,
            job.tokens.size,
            path,
            tail=tail,
            output=job.output_tokens,
            room_tokens=job.room_tokens,
            routed=bool(rid),
            source=Source(source, job.tokens.size // self._page_size) if source else None,
        )
        call = self._submit(work, "max_tokens")
        try:
            await self._first_token(call)
            cached = _number(request.headers.get(CACHED_TOKENS), work.cached)
            form = FORMS[kind](work.rid, self._model, job, cached, body, routed=bool(rid))
            if parsed.stream:
                return await self._stream(request, call, form)
            while not call.ended:
                await call.news()
            if call.aborted:
                raise _aborted()
            return web.Response(
                body=form.whole(work.iterations), content_type="application/json", headers=_headers(request)
            )
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
            headers=_headers(request)
            | {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        try:
            await answer.prepare(request)
        except ConnectionError:
            return answer  # the client has gone
        sent = 0
        while True:
            produced, done = call.produced, call.ended_t is not None
            if call.aborted:
                await answer.write(error_event(_aborted(), request.path, form.events_sent))
                break
            if produced > sent or done:
                data = form.chunk(form.job.output_tokens if done else produced)
                sent = produced
                if done:
                    data += form.end(call.request.iterations)
                if data:
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
        kept = False
        try:
            try:
                await answer.prepare(request)
            except ConnectionError:
                return answer  # the caller has gone
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
            await answer.write_eof()
            if wanted.keep:
                kept = True
                self.engine.keep(call)
            return answer
        finally:
            self.engine.abort(call)
            if not kept:
                self.engine.let_go(call)

    async def release(self, request: web.Request) -> web.Response:
        """The kept pages of these requests (msgpack list of their ids) are not needed any more."""
        try:
            rids = _rids_decoder.decode(await request.read())
        except msgspec.DecodeError as error:
            raise ApiError(400, f"The body is no list of request ids: {error}") from None
        return _json({"released": self.engine.release(rids)})

    # ------------------------------------------------------------------------------ helpers

    def _check_model(self, model: str, kind: Kind) -> None:
        if model != self._model and not (kind == "generate" and not model):
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

    def _path(self, job: Job, salt: str) -> tuple[Path, Path]:
        """The full pages of prompt and output together, and the tail of the prompt."""
        hasher = PathHasher(self._page_size, salt)
        hasher.extend(job.tokens)
        tail = _tail(hasher)
        for answer in job.answers:
            hasher.extend(answer.ids)
        return Path.of_digests(hasher.digests), tail


def known_digest(tokens: TokenArray) -> str:
    """What `X-EI-Known-Digest` says of leading ids that the caller has."""
    return blake2b(tokens.astype("<i4", copy=False).tobytes(), digest_size=16).hexdigest()


def _tail(hasher: PathHasher) -> Path:
    """The partial last page of the path so far: one page or none."""
    digest = hasher.tail_digest()
    return Path.of_digests([digest]) if digest is not None else EMPTY


async def _body(request: web.Request) -> bytes:
    body = await request.read()
    if not body:
        raise ApiError(400, "The request body is empty; send a JSON object.")
    return body


def _headers(request: web.Request) -> dict[str, str]:
    """What Anthropic's clients want to be told with every answer."""
    return {"request-id": new_request_id()} if is_anthropic(request.path) else {}


def _rid_in(body: bytes) -> str:
    """The request id of a call of SGLang's API; empty when it has none."""
    return read_json(_rid_decoder, body).rid or ""


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
        fetch_s=work.ready_t - work.pull_t if work.fetched and work.pull_t else 0.0,
    )


def _number(text: str | None, default: int) -> int:
    """A header's number; `default` when there is none or it is no number of at least 0."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else default
