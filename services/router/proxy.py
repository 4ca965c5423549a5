"""One request's way through the router: branch, prefill node, decode node, and the answer's bytes.

Rules that hold here
- The client's request goes to the decode node as it came; its answer goes back as it comes. Only the tail of
  an answer is looked at, for accounting.
- A prefill that ends without `done`, and a decode call that fails before its first byte, is tried on another
  node; each request at most `max_attempts` times a phase. A node that goes down lets go of the calls to it at once.
- Whatever happens, the request leaves the books of its nodes, its key's limits and its branch, and one record of it
  is published.
- A client that goes away cancels the handler, which closes the calls to the nodes, which frees everything there.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import msgspec
import prometheus_client

from services.router.answer import Answering, Headers
from services.router.calls import Api, Call, plain_body, read_call
from services.router.claims import said_yes
from services.router.cluster import Node, NodeDown
from services.router.explain import explained
from services.router.flight import Flight
from services.router.http_messages import HeaderLines, header_lines
from services.router.placement import DEFAULT_OUTPUT_TOKENS, Prefill
from services.router.placing import Placer
from services.router.tenants import own_name, qualified
from services.router.upstream import Moved, relayed, usage_in
from services.router.upstream_answer import BadAnswer, UpstreamError
from shared.messages import BranchPlaced, FetchPlan, NodeInfo, Outcome, Phase, PrefillCall, PrefillEvent
from shared.openai import ApiError, unknown_model

if TYPE_CHECKING:
    from services.router.access import KeyEntry
    from services.router.exchange import Exchange
    from services.router.limits import Ticket
    from services.router.service import RouterService
    from services.router.tokens import Known
    from services.router.upstream_answer import Answer

CONNECT_S = 3.0
MOST_ERROR_BYTES, MOST_LINE_BYTES = 2**20, 2**16
READ_OUT_S = 0.2  # of silence before the end of an answer of which all that was wanted has come
# Between router and worker only, or about one connection only: a client's own are dropped. The key stays here.
_DROPPED = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"host", b"content-length", b"expect", b"authorization", b"x-api-key", b"api-key", b"cookie",
    b"content-encoding",
}  # fmt: skip
_OURS = (b"x-ei-", b"x_ei_")
_TRACE = (b"traceparent", b"tracestate")
_NOT_PASSED_BACK = {
    b"connection",
    b"keep-alive",
    b"transfer-encoding",
    b"content-length",
    b"upgrade",
    b"trailer",
    b"server",
    b"date",
    b"x-request-id",
    b"x-ei-branch",
    b"x-ei-explain",
}
_MSGPACK: Headers = [(b"Content-Type", b"application/msgpack")]
_events = msgspec.json.Decoder(PrefillEvent)
_body_encoder = msgspec.msgpack.Encoder()


class Proxy:
    def __init__(self, service: RouterService) -> None:
        self._s = service
        self._settings = service.router_settings
        self._cluster = service.cluster
        self._clock = service.clock
        self._placer = Placer(service)
        self._prompts = service.prompts
        registry = service.metrics
        done = prometheus_client.Counter(
            "ei_router_requests", "Requests by outcome", ["outcome"], registry=registry
        )
        self._done = {outcome: done.labels(outcome.value) for outcome in Outcome}
        self._ids = f"r-{uuid.uuid4().hex[:16]}"
        self._made = 0
        self._retries = prometheus_client.Counter(
            "ei_router_retries", "Work sent to another node", ["phase"], registry=registry
        )
        buckets = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 120, 300)
        self._ttft = prometheus_client.Histogram(
            "ei_router_ttft_seconds", "Time to first token", buckets=buckets, registry=registry
        )
        self._mispredicted = prometheus_client.Counter(
            "ei_router_ttft_mispredicted", "First tokens off their predicted time by more than 20 % + 50 ms",
            registry=registry,
        )  # fmt: skip

    # ------------------------------------------------------------------ entry

    async def handle(self, exchange: Exchange, api: Api, key: KeyEntry) -> None:
        """Serve a request to the end of its answer. Raises ApiError while nothing was answered."""
        t_arrive = self._clock.now()
        ticket = self._s.gate.enter(key)
        flight: Flight | None = None
        try:
            encoding = exchange.headers.get("content-encoding")
            if encoding is not None:
                exchange.body = await asyncio.to_thread(
                    plain_body, exchange.body, encoding, self._settings.max_body_bytes
                )
            call = read_call(exchange.body, api)
            info = self._model(call.model)
            self._made += 1
            flight = Flight(f"{self._ids}-{self._made:x}", t_arrive, key.name)
            flight.request_id = exchange.headers.get("x-request-id", "")[:256] or flight.rid
            answering = Answering(
                exchange,
                streams=bool(call.stream),
                keepalive_s=self._settings.keepalive_s,
                headers=[(b"X-Request-Id", flight.request_id.encode("latin-1", "replace"))],
            )
            with self._s.tracer.request(flight, exchange) as span:
                try:
                    deadline_s = self._deadline(exchange)
                    if deadline_s is None:
                        await self._serve(exchange, api, call, info, key, ticket, flight, answering)
                    else:
                        async with asyncio.timeout(deadline_s):
                            await self._serve(exchange, api, call, info, key, ticket, flight, answering)
                except TimeoutError:
                    self._end(flight, answering, _deadline_passed())
                except ApiError as error:
                    self._end(flight, answering, error)
                finally:
                    answering.close()
                    span.ended(flight)
        except (asyncio.CancelledError, ConnectionError):
            if flight is not None:
                flight.outcome = Outcome.CLIENT_GONE
            raise
        finally:
            self._s.gate.leave(ticket, flight.usage.output if flight is not None else 0)
            if flight is not None:
                self._finish(flight)

    def _end(self, flight: Flight, answering: Answering, error: ApiError) -> None:
        flight.outcome = Outcome.REJECTED if error.status < 500 else Outcome.FAILED
        flight.error = error.message
        answering.fail(error)

    def _deadline(self, exchange: Exchange) -> float | None:
        """Seconds from now; None for no limit. Raises ApiError 400."""
        limit = self._settings.deadline_s
        wanted = exchange.headers.get("x-ei-timeout")
        if wanted is not None:
            try:
                seconds = float(wanted)
            except ValueError:
                seconds = 0.0
            if not 0 < seconds < 1e6:
                raise ApiError(
                    400, f"X-EI-Timeout must be seconds above 0, not {wanted!r}.", param="X-EI-Timeout"
                )
            limit = min(seconds, limit) if limit else seconds
        return limit or None

    def _finish(self, flight: Flight) -> None:
        self._let_pages_go(flight)
        for name in (flight.prefill_node, flight.decode_node):
            node = self._cluster.nodes.get(name)
            if node is not None:
                node.forget(flight.rid)
        if flight.identity is not None:
            self._s.identities.done(flight.tenant, flight.identity, self._clock.now())
            if flight.identity.final:
                self._s.end_branch(flight.branch)
        self._done[flight.outcome].inc()
        if flight.t_first_token:
            ttft = flight.t_first_token - flight.t_arrive
            self._ttft.observe(ttft)
            if abs(ttft - flight.predicted_ttft_s) > 0.2 * ttft + 0.05:
                self._mispredicted.inc()
        self._s.requests_out.publish(flight.record(self._clock.now()))

    def _let_pages_go(self, flight: Flight) -> None:
        """The decode node has what it needs of the prefill node, or nobody will ask for it."""
        if flight.kept_at:
            self._s.releases.release(flight.kept_at, flight.rid)
            flight.kept_at = ""

    def _model(self, model: str) -> NodeInfo:
        known = self._cluster.models()
        if not known:
            raise ApiError(
                503, "No worker has registered yet.", type="server_error", code="no_worker", retry_after_s=1
            )
        if not model and len(known) == 1:
            return next(iter(known.values()))
        if model not in known:
            raise unknown_model(model, sorted(known))
        return known[model]

    # ------------------------------------------------------------------ the request's way

    async def _serve(
        self,
        exchange: Exchange,
        api: Api,
        call: Call,
        info: NodeInfo,
        key: KeyEntry,
        ticket: Ticket,
        flight: Flight,
        answering: Answering,
    ) -> None:
        await self._s.gate.turn(ticket)
        flight.tenant = key.tenant or ""
        flight.salt = self._s.keys.salt(key.tenant)
        prompt = await self._prompts.read(exchange, api, call, info, flight)
        limit = call.output_limit
        if limit is not None and prompt.tokens.size + limit > info.max_context:
            raise ApiError(
                400,
                f"This model's maximum context length is {info.max_context} tokens; the prompt has "
                f"{prompt.tokens.size} and {limit} more are asked for.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        self._s.gate.charge(ticket, int(prompt.tokens.size))
        flight.prompt_tokens = int(prompt.tokens.size)
        flight.identity = self._s.identities.identify(
            flight.tenant,
            exchange.headers,
            call,
            prompt.hashes,
            flight.t_arrive,
            prompt.tokens,
            info.page_size,
        )
        flight.branch = qualified(flight.tenant, flight.identity.branch)
        self._s.announce(flight, prompt.hashes)
        needed = flight.prompt_tokens + (limit or DEFAULT_OUTPUT_TOKENS) * call.choices
        await self._prefill_somewhere(info.model, prompt, flight, needed)
        tried: set[str] = set()
        for _ in range(self._settings.max_attempts):
            if not flight.decode_node:
                await self._placer.bind(info.model, flight, needed, tried)
            try:
                await self._decode(exchange, flight, answering)
                return
            except Moved as error:
                self._retries.labels("decode").inc()
                self._s.log.info("decode_moved", rid=flight.rid, node=flight.decode_node, why=str(error))
                tried.add(flight.decode_node)
                node = self._cluster.nodes.get(flight.decode_node)
                if node is not None:
                    node.decode.finished(flight.rid)
                flight.decode_node = ""
        raise _gave_up("decode", self._settings.max_attempts)

    def _lost(self, node: Node, error: Exception) -> None:
        if not isinstance(error, NodeDown):
            self._cluster.failed(node.info.node)

    # ------------------------------------------------------------------ prefill

    async def _prefill_somewhere(self, model: str, prompt: Known, flight: Flight, needed: int) -> None:
        """Compute the prompt's KV on the node with the shortest predicted TTFT (section 5.3)."""
        data = prompt.tokens.astype("<i4", copy=False).tobytes()
        tried: set[str] = set()
        for _ in range(self._settings.max_attempts):
            choice = await self._placer.prefill_node(model, prompt, flight, tried)
            node = self._cluster.nodes.get(choice.node)
            if node is None:
                continue
            flight.prefill_node = choice.node
            todo = flight.prompt_tokens - choice.cached_tokens
            node.prefill.send(Prefill(flight.rid, todo, choice.cached_tokens))
            now = self._clock.now()
            self._s.branch_out.publish(
                BranchPlaced(
                    flight.branch, choice.node, Phase.PREFILL, now, flight.rid, todo, choice.cached_tokens
                )
            )
            source = self._cluster.nodes.get(choice.source) if choice.source else None
            fetch = (
                FetchPlan(source.info.url, choice.own_pages, choice.own_pages + choice.fetch_pages)
                if source is not None
                else None
            )
            plan = self._cluster.plan
            epoch = plan.epoch if plan else 0
            prefill = PrefillCall(flight.rid, flight.branch, data, flight.salt, fetch, epoch, keep=True)
            with self._s.tracer.phase("prefill", flight, node.info):
                try:
                    with node.calling():
                        await self._prefill(node.info, model, prefill, flight, needed)
                    return
                except (Moved, NodeDown) as error:
                    why = str(error)
                except (UpstreamError, TimeoutError) as error:
                    why = f"{type(error).__name__}: {error}"
                    self._cluster.failed(choice.node)
                finally:
                    node.prefill.finished(flight.rid)
            tried.add(choice.node)
            self._retries.labels("prefill").inc()
            self._s.log.info("prefill_moved", rid=flight.rid, node=choice.node, why=why)
        raise _gave_up("prefill", self._settings.max_attempts)

    async def _prefill(
        self, info: NodeInfo, model: str, prefill: PrefillCall, flight: Flight, needed: int
    ) -> None:
        """Raises Moved or UpstreamError when the node does not finish it."""
        answer = await self._s.upstream.request(
            info.url, "POST", b"/ei/v1/prefill", _MSGPACK + flight.trace_headers, _body_encoder.encode(prefill),
            connect_timeout_s=CONNECT_S, head_timeout_s=self._settings.prefill_timeout_s,
        )  # fmt: skip
        answer.read_idle_s = self._settings.prefill_timeout_s
        done = False
        try:
            if answer.status != 200:
                error = relayed(answer.status, await answer.read(MOST_ERROR_BYTES))
                if 400 <= answer.status < 500 and answer.status != 429:
                    raise error
                raise Moved(error.message)
            rest = b""

            def heard(data: bytes) -> bool:
                nonlocal rest
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MOST_LINE_BYTES:
                    raise BadAnswer(f"{info.node} sent a line without an end")
                return any([self._heard(line, info, model, flight, needed) for line in lines if line])

            done = await answer.listen(heard)
        finally:
            if done:  # its end comes by itself, and then its connection can be used again
                answer.read_idle_s = READ_OUT_S
            else:
                answer.close()
        if not done:
            raise Moved("the node closed the connection before the prefill was done")

    def _heard(self, line: bytes, info: NodeInfo, model: str, flight: Flight, needed: int) -> bool:
        """Take one line of a prefill's answer; whether it was the last. Raises Moved and BadAnswer."""
        try:
            event = _events.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadAnswer(f"{info.node} sent what is no event: {error}") from None
        if event.event == "started":
            flight.t_prefill_start = self._clock.now()
            if not flight.decode_node:
                self._placer.bind_now(model, flight, needed)
        elif event.event == "done":
            flight.t_prefill_end = self._clock.now()
            flight.cached_tokens = event.cached_tokens
            flight.fetched_tokens = event.fetched_tokens
            flight.restored_tokens = event.restored_tokens
            flight.kept_at = info.url
            if event.fetch_s:
                self._cluster.fetched(info.node, event.fetched_tokens, event.fetch_s)
            return True
        elif event.event == "moved":
            raise Moved("the node changes its phase")
        elif event.event == "failed":
            raise Moved(event.error)
        return False

    # ------------------------------------------------------------------ decode

    async def _decode(self, exchange: Exchange, flight: Flight, answering: Answering) -> None:
        node = self._cluster.nodes.get(flight.decode_node)
        if node is None:
            raise Moved("the node left")
        headers: Headers = [
            (b"X-EI-Request-Id", flight.rid.encode()),
            (b"X-EI-Branch", flight.branch.encode()),
            (b"X-EI-Cached-Tokens", b"%d" % flight.cached_tokens),
        ]
        if flight.salt:
            headers.append((b"X-EI-Salt", flight.salt.encode()))
        source = self._cluster.nodes.get(flight.prefill_node)
        if source is not None and flight.prefill_node != flight.decode_node:
            headers.append((b"X-EI-KV-Source", source.info.url.encode()))
        with self._s.tracer.phase("decode", flight, node.info):
            lines = _lines_on(exchange, traced=bool(flight.trace_headers))
            headers += flight.trace_headers
            try:
                with node.calling():
                    answer = await self._s.upstream.request(
                        node.info.url, exchange.method, exchange.target, headers, exchange.body, lines=lines,
                        connect_timeout_s=CONNECT_S, head_timeout_s=self._settings.stream_timeout_s,
                    )  # fmt: skip
                    try:
                        if answer.status in (502, 503):
                            raise Moved(relayed(answer.status, await answer.read(MOST_ERROR_BYTES)).message)
                        await self._pass_through(exchange, answer, flight, answering)
                    finally:
                        answer.close()
            except (UpstreamError, NodeDown) as error:
                self._lost(node, error)
                text = str(error) or type(error).__name__
                if not flight.t_first_token:
                    raise Moved(text) from None
                flight.error = f"node {flight.decode_node} failed while it answered: {text}"
                self._s.log.warning("answer_broken", rid=flight.rid, node=flight.decode_node, error=text)
                raise ApiError(502, flight.error, type="server_error", code="node_failed") from None

    async def _pass_through(
        self, exchange: Exchange, answer: Answer, flight: Flight, answering: Answering
    ) -> None:
        streams = answer.headers.get("content-type", "").startswith("text/event-stream")
        if answer.status >= 400 and exchange.started:  # with comments only
            raise relayed(answer.status, await answer.read(MOST_ERROR_BYTES))
        answer.read_idle_s = self._settings.stream_timeout_s

        def begins() -> None:  # until its first byte the request can still move
            flight.t_first_token = self._clock.now()
            self._let_pages_go(flight)
            self._cluster.handed_off(flight.to_pull, flight.t_first_token - flight.t_prefill_end)
            own = [
                (b"X-EI-Request-Id", flight.rid.encode()),
                (b"X-EI-Branch", own_name(flight.tenant, flight.branch).encode("latin-1", "replace")),
                (b"X-EI-Prefill-Node", flight.prefill_node.encode()),
                (b"X-EI-Decode-Node", flight.decode_node.encode()),
            ]
            if said_yes(exchange.headers.get("x-ei-explain")):
                own.append((b"X-EI-Explain", explained(flight).encode()))
            answering.headers += own
            answering.begin(
                answer.status,
                _lines_back(answer),
                length=None if streams else answer.length,
                streaming=streams,
            )

        tail, size = await answer.splice(exchange, on_first=begins)
        if not size:
            begins()
            exchange.end()
        flight.usage = usage_in(tail)
        if answer.status >= 400:
            flight.error = f"the engine answered {answer.status}"
        refused = 400 <= answer.status < 500
        flight.outcome = Outcome.REJECTED if refused else Outcome.FAILED if flight.error else Outcome.OK


def passes_on(name: bytes) -> bool:
    """Whether a client's header (in lower case) goes to a node."""
    return name not in _DROPPED and not name.startswith(_OURS)


def _lines_on(exchange: Exchange, traced: bool) -> HeaderLines:
    """A client's headers for a node; without those of its trace when we have a trace of our own."""
    kept = exchange.head.derived.get("on")
    if kept is not None and not traced:
        return kept
    dropped = _TRACE if traced else ()
    names = ((name.lower(), name, value) for name, value in exchange.raw_headers)
    lines = header_lines(
        [(name, value) for low, name, value in names if passes_on(low) and low not in dropped]
    )
    if not traced:
        exchange.head.derived["on"] = lines
    return lines


def _lines_back(answer: Answer) -> HeaderLines:
    """A node's headers for the client."""
    lines = answer.head.derived.get("back")
    if lines is None:
        passed = [pair for pair in answer.raw_headers if pair[0].lower() not in _NOT_PASSED_BACK]
        lines = answer.head.derived["back"] = header_lines(passed)
    return lines


def _deadline_passed() -> ApiError:
    return ApiError(
        504, "The request did not end within its deadline.", type="timeout_error", code="deadline_exceeded"
    )


def _gave_up(phase: str, attempts: int) -> ApiError:
    return ApiError(
        503,
        f"{attempts} nodes did not finish the {phase} of this request.",
        type="server_error",
        code=f"{phase}_failed",
        retry_after_s=1,
    )
