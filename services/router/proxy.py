"""One request's way through the router: branch, prefill node, decode node, and the answer's bytes.

Rules that hold here
- The client's request goes to the decode node as it came; its answer goes back as it comes. Only the tail of
  an answer is looked at, for accounting.
- A prefill that ends without `done`, and a decode call that fails before its first byte, is tried on another
  node; each request at most `max_attempts` times a phase.
- Whatever happens, the request leaves the books of its nodes, and one record of it is published.
- A client that goes away cancels the handler, which closes the call to the node, which frees everything there.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import numpy as np
import prometheus_client
from aiohttp import web

from services.router.flight import Flight
from services.router.placement import Candidate, Costs, Prefill, bind_decode, candidates
from services.router.upstream import NETWORK_ERRORS, Moved, ask_any, relayed, usage_in
from shared.messages import BranchPlaced, FetchPlan, Outcome, Phase, PrefillCall, PrefillEvent
from shared.openai import (
    ApiError,
    Call,
    Kind,
    TokenArray,
    check_length,
    parse_call,
    prompt_ids,
    unknown_model,
)
from shared.pages import page_hashes
from shared.timing import GLM_52_4XGB300

if TYPE_CHECKING:
    from services.router.identity import Identity
    from services.router.service import RouterService
    from shared.messages import PageArray

TAIL_BYTES = 4096
DEFAULT_OUTPUT_TOKENS = 512  # room to look for when the client sets no limit
CHUNK_BYTES = 2**16
_PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_HOP_HEADERS = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "content-length", "expect",
}  # fmt: skip
# Between router and worker only: a client's own are dropped. So is its content-encoding: the body is decoded here.
_INTERNAL_HEADERS = {"x-ei-request-id", "x-ei-kv-source", "x-ei-cached-tokens", "content-encoding"}
_events = msgspec.json.Decoder(PrefillEvent)
_body_encoder = msgspec.msgpack.Encoder()


def api_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


class Proxy:
    def __init__(self, service: RouterService) -> None:
        self._s = service
        self._settings = service.router_settings
        self._cluster = service.cluster
        self._clock = service.clock
        self.in_flight = 0
        registry = service.metrics
        self._done = prometheus_client.Counter(
            "ei_router_requests", "Requests by outcome", ["outcome"], registry=registry
        )
        self._retries = prometheus_client.Counter(
            "ei_router_retries", "Work sent to another node", ["phase"], registry=registry
        )
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 120, 300)
        self._ttft = prometheus_client.Histogram(
            "ei_router_ttft_seconds", "Time to first token", buckets=buckets, registry=registry
        )

    # ------------------------------------------------------------------ entry points

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        """Pass `/v1/tokenize` to a worker."""
        body = await _read(request)
        call = parse_call_loosely(body)
        self._check_model(call)
        status, content_type, answer = await self._tokenize(
            call.model, body, request.headers.get("Accept", "")
        )
        return web.Response(body=answer, status=status, content_type=content_type)

    async def handle(self, request: web.Request, kind: Kind) -> web.StreamResponse:
        t_arrive = self._clock.now()
        if self.in_flight >= self._settings.max_requests:
            raise ApiError(
                429,
                f"{self.in_flight} requests are in flight here already; try again soon.",
                type="rate_limit_error",
                code="too_many_requests",
                retry_after_s=1,
            )
        self.in_flight += 1
        try:
            return await self._serve(request, kind, t_arrive)
        finally:
            self.in_flight -= 1

    async def _serve(self, request: web.Request, kind: Kind, t_arrive: float) -> web.StreamResponse:
        body = await _read(request)
        call = parse_call(body, kind)
        self._check_model(call)
        tokens = await self._tokens(call, kind, body)
        info = self._cluster.models()[call.model]
        check_length(tokens.size, info.max_context)
        limit = call.output_limit
        if limit is not None and tokens.size + limit > info.max_context:
            raise ApiError(
                400,
                f"This model's maximum context length is {info.max_context} tokens; the prompt has "
                f"{tokens.size} and max_tokens asks for {limit} more.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        path = page_hashes(tokens, info.page_size)
        identity = self._s.identifier.identify(request.headers, path, t_arrive)
        self._s.branch_out.publish(
            self._s.branches.request(identity.branch, identity.parent, identity.tagged, path, t_arrive)
        )
        flight = Flight(f"r-{uuid.uuid4().hex}", identity.branch, t_arrive, tokens.size)
        try:
            answer = await self._route(request, call, kind, body, tokens, path, flight)
            refused = 400 <= answer.status < 500
            flight.outcome = Outcome.REJECTED if refused else Outcome.FAILED if flight.error else Outcome.OK
            return answer
        except ApiError as error:
            flight.outcome = Outcome.REJECTED if error.status < 500 else Outcome.FAILED
            flight.error = error.message
            raise
        except (asyncio.CancelledError, ConnectionError):
            flight.outcome = Outcome.CLIENT_GONE
            raise
        finally:
            self._finish(flight, identity)

    def _finish(self, flight: Flight, identity: Identity) -> None:
        flight.let_pages_go()
        for name in (flight.prefill_node, flight.decode_node):
            node = self._cluster.nodes.get(name)
            if node is not None:
                node.prefills.pop(flight.rid, None)
                node.decodes.pop(flight.rid, None)
        if identity.final:
            self._s.end_branch(identity.branch)
        self._done.labels(flight.outcome.value).inc()
        if flight.t_first_token:
            self._ttft.observe(flight.t_first_token - flight.t_arrive)
        self._s.requests_out.publish(flight.record(self._clock.now()))

    def _check_model(self, call: Call) -> None:
        known = self._cluster.models()
        if call.model not in known:
            if not known:
                raise ApiError(
                    503,
                    "No worker has registered yet.",
                    type="server_error",
                    code="no_worker",
                    retry_after_s=1,
                )
            raise unknown_model(call.model, sorted(known))

    # ------------------------------------------------------------------ tokens

    async def _tokens(self, call: Call, kind: Kind, body: bytes) -> TokenArray:
        if kind == "completion":
            ids = prompt_ids(call.prompt)
            if ids is not None:
                return ids
        status, _, data = await self._tokenize(call.model, body, "application/octet-stream")
        if status != 200:
            raise relayed(status, data)
        return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)

    async def _tokenize(self, model: str, body: bytes, accept: str) -> tuple[int, str, bytes]:
        return await ask_any(self._cluster, self._s.http, model, "/v1/tokenize", body, accept)

    # ------------------------------------------------------------------ the two phases

    async def _route(
        self,
        request: web.Request,
        call: Call,
        kind: Kind,
        body: bytes,
        tokens: TokenArray,
        path: PageArray,
        flight: Flight,
    ) -> web.StreamResponse:
        needed = tokens.size + (call.output_limit or DEFAULT_OUTPUT_TOKENS)
        await self._prefill_somewhere(call.model, tokens, path, flight, needed)
        tried: set[str] = set()
        for _ in range(self._settings.max_attempts):
            if not flight.decode_node:
                await self._bind(call.model, flight, needed, tried)
            try:
                return await self._decode(request, kind, body, flight)
            except Moved as error:
                self._retries.labels("decode").inc()
                self._s.log.info("decode_moved", rid=flight.rid, node=flight.decode_node, why=str(error))
                tried.add(flight.decode_node)
                node = self._cluster.nodes.get(flight.decode_node)
                if node is not None:
                    node.decodes.pop(flight.rid, None)
                flight.decode_node = ""
        raise _gave_up("decode", self._settings.max_attempts)

    async def _prefill_somewhere(
        self, model: str, tokens: TokenArray, path: PageArray, flight: Flight, needed: int
    ) -> None:
        """Compute the prompt's KV on the node with the shortest predicted TTFT (section 5.3)."""
        data = tokens.astype("<i4", copy=False).tobytes()
        tried: set[str] = set()
        for _ in range(self._settings.max_attempts):
            choice = await self._place(model, tokens.size, path, flight.rid, tried)
            node = self._cluster.nodes.get(choice.node)
            if node is None:
                continue
            flight.prefill_node = choice.node
            node.prefills[flight.rid] = Prefill(
                flight.rid, tokens.size - choice.cached_tokens, choice.cached_tokens
            )
            self._s.branch_out.publish(
                BranchPlaced(flight.branch, choice.node, Phase.PREFILL, self._clock.now())
            )
            source = self._cluster.nodes.get(choice.source) if choice.source else None
            fetch = (
                FetchPlan(source.info.url, choice.own_pages, choice.own_pages + choice.fetch_pages)
                if source is not None
                else None
            )
            plan = self._cluster.plan
            prefill = PrefillCall(
                flight.rid, flight.branch, data, fetch=fetch, epoch=plan.epoch if plan else 0, keep=True
            )
            try:
                async with asyncio.timeout(self._settings.prefill_timeout_s):
                    await self._prefill(node.info.url, model, prefill, flight, needed)
                return
            except Moved as error:
                why = str(error)
            except NETWORK_ERRORS as error:
                why = f"{type(error).__name__}: {error}"
                self._cluster.suspect(choice.node)
            finally:
                node.prefills.pop(flight.rid, None)
            tried.add(choice.node)
            self._retries.labels("prefill").inc()
            self._s.log.info("prefill_moved", rid=flight.rid, node=choice.node, why=why)
        raise _gave_up("prefill", self._settings.max_attempts)

    async def _place(
        self, model: str, prompt_tokens: int, path: PageArray, rid: str, tried: set[str]
    ) -> Candidate:
        """The best prefill node; waits for one while none can take the request."""
        deadline = asyncio.get_running_loop().time() + self._settings.place_timeout_s
        while True:
            nodes = self._cluster.prefill_nodes(model, tried)
            if nodes:
                node = self._cluster.nodes[nodes[0].node]
                costs = Costs(
                    fetch=node.profile.fetch if node.profile else GLM_52_4XGB300.fetch,
                    copy_s_per_token=self._settings.copy_s_per_token,
                    max_state_age_s=self._settings.max_state_age_s * self._clock.speedup,
                )
                holders = self._cluster.index.match(path)
                return candidates(
                    prompt_tokens, node.info.page_size, holders, nodes, costs, self._clock.now(), rid
                )[0]
            tried.clear()  # nobody is left: a node that was tried may do by now
            await self._wait_for_change(deadline, "prefill")

    async def _bind(self, model: str, flight: Flight, needed: int, tried: set[str]) -> None:
        """Choose the decode node and place the branch there (E.3, line 13)."""
        deadline = asyncio.get_running_loop().time() + self._settings.place_timeout_s
        while True:
            nodes = self._cluster.decode_nodes(model, tried)
            chosen = bind_decode(
                needed,
                nodes,
                self._settings.max_state_age_s * self._clock.speedup,
                self._clock.now(),
                prefer=flight.prefill_node,
            )
            if chosen is not None:
                flight.decode_node = chosen
                self._cluster.nodes[chosen].decodes[flight.rid] = needed
                self._s.branch_out.publish(
                    BranchPlaced(flight.branch, chosen, Phase.DECODE, self._clock.now())
                )
                view = self._s.branches.get(flight.branch)
                if view is not None:
                    view.prefill_node, view.decode_node = flight.prefill_node, chosen
                return
            tried.clear()
            await self._wait_for_change(deadline, "decode")

    async def _wait_for_change(self, deadline: float, phase: str) -> None:
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise ApiError(
                503,
                f"No node can take {phase} work; waited {self._settings.place_timeout_s:g} s.",
                type="server_error",
                code="no_node",
                retry_after_s=1,
            )
        try:
            async with asyncio.timeout(min(left, 0.25)):
                await self._cluster.changed()
        except TimeoutError:
            pass

    async def _prefill(self, url: str, model: str, prefill: PrefillCall, flight: Flight, needed: int) -> None:
        """Raises Moved, or a network error, when the node does not finish it."""
        answer = await self._s.http.post(
            url + "/ei/v1/prefill",
            data=_body_encoder.encode(prefill),
            headers={"Content-Type": "application/msgpack"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=3.0, sock_read=None),
        )
        try:
            if answer.status != 200:
                error = relayed(answer.status, await answer.read())
                if answer.status < 500 and answer.status != 429:
                    raise error
                raise Moved(error.message)
            async for line in answer.content:
                event = _events.decode(line)
                if event.event == "started":
                    flight.t_prefill_start = self._clock.now()
                    if not flight.decode_node:
                        await self._bind(model, flight, needed, set())
                elif event.event == "done":
                    flight.t_prefill_end = self._clock.now()
                    flight.cached_tokens = event.cached_tokens
                    flight.fetched_tokens = event.fetched_tokens
                    flight.restored_tokens = event.restored_tokens
                    flight.prefilled = answer
                    return
                elif event.event == "moved":
                    raise Moved("the node changes its phase")
                elif event.event == "failed":
                    raise Moved(event.error)
        finally:
            if flight.prefilled is not answer:
                answer.close()
        raise Moved("the node closed the connection before the prefill was done")

    async def _decode(
        self, request: web.Request, kind: Kind, body: bytes, flight: Flight
    ) -> web.StreamResponse:
        node = self._cluster.nodes.get(flight.decode_node)
        if node is None:
            raise Moved("the node left")
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in _HOP_HEADERS and name.lower() not in _INTERNAL_HEADERS
        }
        headers["X-EI-Request-Id"] = flight.rid
        headers["X-EI-Branch"] = flight.branch
        headers["X-EI-Cached-Tokens"] = str(flight.cached_tokens)
        source = self._cluster.nodes.get(flight.prefill_node)
        if source is not None and flight.prefill_node != flight.decode_node:
            headers["X-EI-KV-Source"] = source.info.url
        try:
            answer = await self._s.http.post(
                node.info.url + _PATHS[kind],
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=3.0, sock_read=self._settings.stream_timeout_s
                ),
            )
        except NETWORK_ERRORS as error:
            self._cluster.suspect(flight.decode_node)
            raise Moved(f"{type(error).__name__}: {error}") from None
        async with answer:
            if answer.status in (502, 503):
                raise Moved(relayed(answer.status, await answer.read()).message)
            return await self._pass_through(request, answer, flight)

    async def _pass_through(
        self, request: web.Request, answer: aiohttp.ClientResponse, flight: Flight
    ) -> web.StreamResponse:
        streams = answer.content_type == "text/event-stream"
        out = web.StreamResponse(status=answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in _HOP_HEADERS:
                out.headers[name] = value
        out.headers["X-EI-Request-Id"] = flight.rid
        out.headers["X-EI-Prefill-Node"] = flight.prefill_node
        out.headers["X-EI-Decode-Node"] = flight.decode_node
        if not streams and answer.content_length is not None:
            out.content_length = answer.content_length
        tail = b""
        try:
            first = await answer.content.readany()
        except NETWORK_ERRORS as error:
            self._cluster.suspect(flight.decode_node)
            raise Moved(f"{type(error).__name__}: {error}") from None
        flight.t_first_token = self._clock.now()
        flight.let_pages_go()
        await out.prepare(request)
        chunk = first
        while chunk:
            await out.write(chunk)
            tail = (tail + chunk)[-TAIL_BYTES:]
            try:
                chunk = await answer.content.readany()
            except NETWORK_ERRORS as error:
                flight.error = (
                    f"node {flight.decode_node} failed while streaming: {error or type(error).__name__}"
                )
                self._cluster.suspect(flight.decode_node)
                break
        flight.usage = usage_in(tail)
        if flight.error:
            await self._end_broken(out, streams, flight)
            return out
        if answer.status >= 400:
            flight.error = f"the engine answered {answer.status}"
        await out.write_eof()
        return out

    async def _end_broken(self, out: web.StreamResponse, streams: bool, flight: Flight) -> None:
        """End an answer whose node died: an error event in a stream, a cut connection otherwise."""
        self._s.log.warning("stream_broken", rid=flight.rid, node=flight.decode_node, error=flight.error)
        if streams:
            error = ApiError(502, flight.error, type="server_error", code="node_failed")
            await out.write(b"\n\ndata: " + error.body() + b"\n\n")
            await out.write_eof()
        elif out._req is not None and out._req.transport is not None:
            out._req.transport.abort()


async def _read(request: web.Request) -> bytes:
    body = await request.read()
    if not body:
        raise ApiError(400, "The request body is empty; send a JSON object.")
    return body


def parse_call_loosely(body: bytes) -> Call:
    """A tokenize request: either `prompt` or `messages`."""
    call = parse_call(body, "chat" if b'"messages"' in body else "completion")
    return call


def _gave_up(phase: str, attempts: int) -> ApiError:
    return ApiError(
        503,
        f"{attempts} nodes did not finish the {phase} of this request.",
        type="server_error",
        code="no_node",
        retry_after_s=1,
    )
