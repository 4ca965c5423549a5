"""The client's side of the router: whose request it is, and which part serves it.

| path | served by |
|---|---|
| `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, `/generate` | `Proxy`: prefill, then decode |
| `/v1/models`, `/v1/branches`, `/v1/hooks/claude-code` | the aiohttp application (`service.py`) |
| any other `/v1/` path (`/v1/tokenize`, `/v1/messages/count_tokens`, ...) | a decode node, unchanged |
| `/healthz`, `/readyz` | the application, for everybody |
| `/metrics`, `/ei/v1/...` | the application, for administrators, unless `admin_port` keeps them apart |

Rules that hold here
- Every path but the health checks needs a key, when there are keys.
- The application listens on loopback only, for who shows the secret of this process (`INNER`), which no client can.
- Errors have the shape of the path's API.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import aiohttp.hdrs
import msgspec

from services.router.answer import error_answer
from services.router.calls import Api
from services.router.cluster import NodeDown
from services.router.proxy import passes_on
from services.router.upstream_answer import Answer, UpstreamError
from shared.openai import ApiError

if TYPE_CHECKING:
    from services.router.access import KeyEntry
    from services.router.answer import Headers
    from services.router.exchange import Exchange
    from services.router.service import RouterService

INNER = "x-ei-inner"  # the secret; only requests with it are served by the application
TENANT, ADMIN = "x-ei-tenant", "x-ei-admin"  # what the key says, for the application
PASS_S = 120.0
MOST_MODEL_BYTES = 2**20  # of a body that is looked into for its model
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"upgrade",
    b"transfer-encoding", b"content-length", b"expect", b"authorization", b"x-api-key", b"host",
    INNER.encode(), TENANT.encode(), ADMIN.encode(),
}  # fmt: skip
_HEALTH = ("/healthz", "/readyz")
_ADMIN = ("/metrics", "/ei/v1/")
_OWN = ("/v1/models", "/v1/branches", "/v1/hooks")


class _Model(msgspec.Struct):
    model: str = ""


_model = msgspec.json.Decoder(_Model)


class Front:
    def __init__(self, service: RouterService, secret: str) -> None:
        self._s = service
        self._secret = secret
        self.inner_url = ""  # of the application
        self._apis = {api.value: api for api in Api}

    async def serve(self, exchange: Exchange) -> None:
        """Handle one request, whatever it is."""
        try:
            await self._route(exchange)
        except ApiError as error:
            refuse(exchange, error)

    def failed(self, exchange: Exchange, error: BaseException) -> None:
        """A handler raised what it should not have."""
        self._s.log.error("request_failed", path=exchange.path, error=f"{type(error).__name__}: {error}")
        if not exchange.started:
            wrong = ApiError(
                500, "The router failed to serve this request.", type="server_error", code="internal"
            )
            refuse(exchange, wrong)

    async def _route(self, exchange: Exchange) -> None:
        path = exchange.path
        if exchange.method not in _METHODS:
            raise ApiError(405, f"{exchange.method} is no method here.", code="method_not_allowed")
        if "/." in path and any(part in (".", "..") for part in path.split("/")):
            raise ApiError(404, f"There is no {path} here.", code="unknown_url")
        if path in _HEALTH:
            await self._inner(exchange, None)
            return
        key = self._s.keys.authenticate(exchange.headers, time.time())
        api = self._apis.get(path)
        if api is not None:
            if exchange.method != "POST":
                raise ApiError(405, f"{path} takes POST, not {exchange.method}.", code="method_not_allowed")
            await self._s.proxy.handle(exchange, api, key)
        elif any(path == own or path.startswith(own + "/") for own in _OWN):
            await self._inner(exchange, key)
        elif path.startswith("/v1/"):
            await self._to_a_node(exchange)
        elif self._s.router_settings.admin_port or not path.startswith(_ADMIN):
            raise ApiError(404, f"There is no {exchange.method} {path} here.", code="unknown_url")
        elif not key.admin:
            raise ApiError(
                403,
                f"{path} is for administrators: this key is none.",
                type="permission_error",
                code="not_admin",
            )
        else:
            await self._inner(exchange, key)

    async def _inner(self, exchange: Exchange, key: KeyEntry | None) -> None:
        headers: Headers = [(INNER.encode(), self._secret.encode())]
        if key is not None:
            headers.append((TENANT.encode(), (key.tenant or "").encode()))
            headers.append((ADMIN.encode(), b"1" if key.admin else b"0"))
        try:
            answer = await self._ask(self.inner_url, exchange, headers)
            await relay(exchange, answer)
        except UpstreamError as error:
            raise ApiError(
                503, f"The router is starting or stopping ({error}).", type="server_error"
            ) from None

    async def _to_a_node(self, exchange: Exchange) -> None:
        """Pass a request that needs no two phases to the least busy node that decodes."""
        model = ""
        if 0 < len(exchange.body) < MOST_MODEL_BYTES:
            try:
                model = _model.decode(exchange.body).model
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                model = ""  # the node will say what is wrong
        nodes = [node for node in self._s.cluster.live() if self._s.cluster.phases(node)[1]]
        nodes = [node for node in nodes if node.info.model == model] or nodes
        nodes.sort(key=lambda node: (len(node.decode.sent), node.info.node))
        for left, node in reversed(list(enumerate(reversed(nodes[:3])))):
            try:
                with node.calling():
                    answer = await self._ask(node.info.url, exchange, [])
                    if answer.status in (502, 503) and left:
                        answer.close()  # another one may
                        continue
                    await relay(exchange, answer)
                    return
            except (UpstreamError, NodeDown) as error:
                if isinstance(error, UpstreamError):
                    self._s.cluster.failed(node.info.node)
                if exchange.started:
                    exchange.abort()
                    return
        raise ApiError(
            503,
            f"No decode node can serve {exchange.path} right now.",
            type="server_error",
            code="no_decode_node",
            retry_after_s=1,
        )

    async def _ask(self, url: str, exchange: Exchange, headers: Headers) -> Answer:
        passed = [pair for pair in exchange.raw_headers if passes_on(pair[0].lower())]
        return await self._s.upstream.request(
            url, exchange.method, exchange.target, passed + headers, exchange.body,
            connect_timeout_s=3.0, head_timeout_s=PASS_S,
        )  # fmt: skip


def refuse(exchange: Exchange, error: ApiError) -> None:
    """Answer with an error, in the shape of the path's API."""
    if exchange.gone or exchange.started:
        exchange.abort()
        return
    headers, body = error_answer(error, exchange.path)
    if error.status == 405:
        headers.append((aiohttp.hdrs.ALLOW.encode(), b"POST"))
    request_id = exchange.headers.get("x-request-id")
    if request_id:
        headers.append((b"X-Request-Id", request_id[:256].encode("latin-1", "replace")))
    exchange.reply(error.status, headers, body)


async def relay(exchange: Exchange, answer: Answer) -> None:
    """Pass a node's answer on as it is. Raises UpstreamError when it breaks."""
    with answer:
        headers = [pair for pair in answer.raw_headers if pair[0].lower() not in _HOP]
        exchange.start(answer.status, headers, length=answer.length)
        await answer.splice(exchange)
