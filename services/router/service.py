"""The router process: feeds `Cluster` from Redis, serves clients through `Front`, and a few paths of its own."""

from __future__ import annotations

import asyncio
import importlib.metadata
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec
import prometheus_client
from aiohttp import web

from services.router.access import KeyFile, Keys, check_listen
from services.router.branches import Branches, BranchView
from services.router.cluster import Cluster, Node, unusable
from services.router.flight import Flight
from services.router.front import ADMIN, INNER, TENANT, Front
from services.router.gate import Gate
from services.router.hooks import read_hook
from services.router.http import HttpLimits, HttpServer
from services.router.identity import check_branch_id
from services.router.prompts import Prompts
from services.router.proxy import Proxy
from services.router.releases import Releases
from services.router.settings import RouterSettings
from services.router.tenants import Identities, own_name, qualified, tenant_of
from services.router.tracing import tracer
from services.router.upstream_answer import UpstreamError
from services.router.upstream_http import Upstream
from shared.api_errors import openai_errors
from shared.kvfollow import KV_STREAM, Follow
from shared.kvsnapshot import SnapshotError, fetch_snapshot
from shared.messages import (
    BranchEnded,
    BranchPlaced,
    BranchRequest,
    Models,
    NodeInfo,
    NodeState,
    PageArray,
    PathWanted,
    RolePlan,
    Slice,
)
from shared.openai import ApiError, unknown_model
from shared.service import Listener, Service
from shared.streams import BusError, Event

REGISTRY_S = 0.5
# For which messages wait for others: a busy router would talk to Redis for each of them.
BRANCH_LINGER_S, RECORD_LINGER_S, READ_EVERY_S = 0.002, 0.05, 0.002
CREATED = 1_767_225_600  # 2026-01-01: the models', which clients expect to be told
_EVERYBODY = Keys.none(admin=True)  # see `check_listen`


class RouterService(Service):
    name = "router"

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.router_settings = settings
        self.cluster = Cluster(self.clock)
        self._key_file = KeyFile(settings.keys_file) if settings.keys_file else None
        check_listen(settings.host, self._key_file is not None, settings.allow_anonymous)
        self.identities = Identities(self.instance.removeprefix("router-"), settings.branch_idle_s)
        self.branches = Branches()
        self.gate = Gate(settings.max_requests, settings.max_waiting)
        self.tracer = tracer(settings.tracing, self.instance)
        self._secret = secrets.token_urlsafe(24)
        self.front = Front(self, self._secret)
        self._resyncing: set[str] = set()
        self._admin_port = 0
        self._refused_nodes: set[str] = set()  # whose registration cannot be used

    @property
    def keys(self) -> Keys:
        """The API keys as they are now."""
        return self._key_file.keys if self._key_file is not None else _EVERYBODY

    async def _listen(self) -> Listener:
        """The client's port is `Front`'s; aiohttp serves the rest behind it, and on `admin_port` if there is one."""
        settings = self.router_settings
        self.upstream = Upstream()
        self.prompts = Prompts(self.cluster, self.upstream, settings.token_cache_tokens)
        self.releases = Releases(self.upstream, self.spawn)
        self.proxy = Proxy(self)
        sock = self._bind(settings.host, settings.port)
        self.url = self._url_of(sock)
        try:
            inner = self._bind("127.0.0.1", 0)
            admin = self._bind(settings.host, settings.admin_port) if settings.admin_port else None
        except BaseException:
            sock.close()
            raise
        runner = await self._serve_app(inner)
        if admin is not None:
            await web.SockSite(runner, admin, backlog=128).start()
            self._admin_port = settings.admin_port
        self.front.inner_url = f"http://127.0.0.1:{inner.getsockname()[1]}"
        limits = HttpLimits(max_body=settings.max_body_bytes, max_connections=settings.max_connections)
        server = HttpServer(self.front.serve, limits=limits, on_error=self.front.failed)
        await server.start(sock)
        return _Listeners(server, runner, self.upstream)

    async def startup(self) -> None:
        self.branch_out = self.bus.publisher("branch", self.instance, maxlen=50_000, linger_s=BRANCH_LINGER_S)
        self.requests_out = self.bus.publisher(
            "requests", self.instance, maxlen=50_000, linger_s=RECORD_LINGER_S
        )
        self.spawn(self.branch_out.run(), "publish branch")
        self.spawn(self.requests_out.run(), "publish requests")
        self._reader = self.bus.reader({})
        self._reader.ignore(self.instance)
        await self._reader.follow("resync", "roles", "windows", "branch")
        for event in await self.bus.last("roles", 64):
            if isinstance(event.message, RolePlan):
                self.cluster.planned(event.message)
            elif isinstance(event.message, Models):
                self.cluster.fitted(event.message)
        self._gauges()
        await self._refresh_registry()

    async def main_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_registry())
            group.create_task(self._expire_branches())
            group.create_task(self._probe_nodes())
            if self._key_file is not None:
                group.create_task(self._follow_keys(self._key_file))
            while True:
                await asyncio.sleep(READ_EVERY_S)
                for event in await self._reader.read(1.0):
                    message = event.message
                    if event.stream.startswith(KV_STREAM):
                        if self.cluster.follower.feed(event) is Follow.WANT_SNAPSHOT:
                            self._want_snapshot(event.stream.removeprefix(KV_STREAM))
                    elif isinstance(message, NodeState):
                        self.cluster.reported(message)
                    elif isinstance(message, RolePlan):
                        self.cluster.planned(message)
                        self.log.info("plan", epoch=message.epoch, reason=message.reason)
                    elif isinstance(message, Models):
                        self.cluster.fitted(message)
                    elif isinstance(message, Slice):
                        self.cluster.measured(message)
                    elif isinstance(message, PathWanted):
                        self.branches.path_wanted(message.branch)
                    elif event.stream == "branch":
                        self._heard_of_another(event)
                self.cluster.index.settle()

    def _heard_of_another(self, event: Event) -> None:
        """Another router's request, placement or end of a branch."""
        message = event.message
        if isinstance(message, BranchPlaced):
            self.cluster.placed(message)
        elif isinstance(message, BranchRequest):
            path = self.branches.observed(message, self.clock.now())
            if path is not None:
                self.identities.observe(message.branch, path, message.t)
        elif isinstance(message, BranchEnded):
            self.identities.end(message.branch)
            self.branches.forget(message.branch)

    async def shutdown(self) -> None:
        self.tracer.close()
        await self.branch_out.flush()
        await self.requests_out.flush()

    def ready(self) -> str | None:
        if not self.cluster.nodes:
            return "no worker has registered yet"
        if self.cluster.clocks_differ():
            return "the workers' clock is another one: the speed-up must be the same everywhere, and the hosts' clocks right"
        return None

    # ------------------------------------------------------------------ nodes and their pages

    async def _follow_registry(self) -> None:
        while True:
            await asyncio.sleep(REGISTRY_S)
            try:
                await self._refresh_registry()
            except BusError as error:
                self.log.warning("registry_failed", error=error)

    async def _refresh_registry(self) -> None:
        infos = await self.bus.nodes()
        for name, info in list(infos.items()):
            wrong = unusable(info)
            if wrong:
                del infos[name]
                if name not in self._refused_nodes:
                    self._refused_nodes.add(name)
                    self.log.error("node_refused", node=name, why=wrong)
        for name in infos.keys() - self.cluster.nodes.keys():
            # before the snapshot is taken, so that no event falls between the two
            await self._reader.follow(KV_STREAM + name, "state:" + name)
        new, gone = self.cluster.registered(infos)
        for info in new:
            self.log.info("node_joined", node=info.node, url=info.url, phase=info.phase)
            self._want_snapshot(info.node)
        for node in gone:
            self.log.warning("node_left", node=node)
            self._reader.remove(KV_STREAM + node)
            self._reader.remove("state:" + node)

    def _want_snapshot(self, node: str) -> None:
        if node not in self._resyncing:
            self._resyncing.add(node)
            self.spawn(self._fetch_snapshot(node), f"snapshot {node}")

    async def _fetch_snapshot(self, node: str) -> None:
        try:
            for attempt in range(20):
                known = self.cluster.nodes.get(node)
                if known is None:
                    return
                try:
                    snapshot = await fetch_snapshot(self.http, known.info)
                    if self.cluster.follower.snapshot(node, snapshot):
                        return
                except SnapshotError as error:
                    self.log.warning("snapshot_failed", node=node, attempt=attempt, error=error)
                await asyncio.sleep(min(0.1 * 2**attempt, 2.0))
        finally:
            self._resyncing.discard(node)

    async def _expire_branches(self) -> None:
        while True:
            await asyncio.sleep(30.0)
            self.branches.expire(self.clock.now() - self.router_settings.branch_idle_s)
            for node in self.cluster.follower.unsynced():
                self._want_snapshot(node)

    async def _probe_nodes(self) -> None:
        """Ask nodes that have not reported for a while whether they live; those that do not answer go down."""
        every = self.router_settings.probe_s
        while True:
            await asyncio.sleep(every)
            doubtful = self.cluster.doubtful(2 * every)
            if doubtful:
                await asyncio.gather(*map(self._probe, doubtful))

    async def _probe(self, node: Node) -> None:
        timeout_s = 2 * self.router_settings.probe_s
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.upstream.request(
                    node.info.url,
                    "GET",
                    b"/healthz",
                    [],
                    connect_timeout_s=timeout_s,
                    head_timeout_s=timeout_s,
                )
                with answer:
                    await answer.read(2**16)
        except (UpstreamError, TimeoutError) as error:
            if self.cluster.nodes.get(node.info.node) is node and self.cluster.failed(node.info.node):
                self.log.warning("node_down", node=node.info.node, error=f"{type(error).__name__}: {error}")
        else:
            if self.cluster.answered(node.info.node):
                self.log.info("node_up", node=node.info.node)

    async def _follow_keys(self, file: KeyFile) -> None:
        while True:
            await asyncio.sleep(1.0)
            if file.changed():
                self.gate.admission.reloaded(file.keys)
                if file.error is None:
                    self.log.info("keys_changed", keys=len(file.keys.entries))
                else:
                    self.log.warning("keys_file_refused", kept=len(file.keys.entries), error=file.error)

    # ------------------------------------------------------------------ HTTP

    def routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._get_models)
        app.router.add_get("/v1/models/{model:.+}", self._get_model)
        app.router.add_get("/v1/branches", self._get_branches)
        app.router.add_get("/v1/branches/{branch:.+}", self._get_branch)
        app.router.add_delete("/v1/branches/{branch:.+}", self._delete_branch)
        app.router.add_post("/v1/hooks/claude-code", self._claude_code_hook)
        app.router.add_get("/ei/v1/cluster", self._get_cluster)
        app.middlewares.append(self._known)
        app.middlewares.append(openai_errors)

    @web.middleware
    async def _known(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Serve what comes through `Front`; on the admin port what is for administrators."""
        if request.headers.get(INNER) != self._secret:
            admin_paths = ("/healthz", "/readyz", "/metrics", "/ei/v1/")
            port = request.transport.get_extra_info("sockname")[1] if request.transport is not None else 0
            if port != self._admin_port or not request.path.startswith(admin_paths):
                raise web.HTTPNotFound()
        return await handler(request)

    async def _get_models(self, _: web.Request) -> web.Response:
        models = [_model(name, info) for name, info in sorted(self.cluster.models().items())]
        first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
        listed = {"object": "list", "data": models, "has_more": False, "first_id": first, "last_id": last}
        return api_response(listed)

    async def _get_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        known = self.cluster.models()
        if name not in known:
            raise unknown_model(name, sorted(known))
        return api_response(_model(name, known[name]))

    async def _get_branches(self, request: web.Request) -> web.Response:
        listed = [_shown(request, view) for view in self.branches.list() if _may_see(request, view.branch)]
        return api_response({"branches": listed})

    async def _get_branch(self, request: web.Request) -> web.Response:
        branch = self._branch_of(request)
        view = self.branches.get(branch)
        if view is None:
            raise ApiError(404, f"No branch {branch!r} is active on this router.", code="branch_not_found")
        return api_response(_shown(request, view))

    async def _delete_branch(self, request: web.Request) -> web.Response:
        branch = self._branch_of(request)
        return api_response({"branch": branch, "ended": True, "known": self.end_branch(branch)})

    def _branch_of(self, request: web.Request) -> str:
        """The branch that the path names: in the key's tenant, unless it is an administrator's."""
        branch = check_branch_id(request.match_info["branch"], "the branch id")
        if _may_see(request, branch):
            return branch
        return qualified(request.headers.get(TENANT, ""), branch)

    async def _claude_code_hook(self, request: web.Request) -> web.Response:
        tenant = request.headers.get(TENANT, "")
        action = read_hook(await request.read())
        ended = self.identities.hooked(tenant, action)
        for branch in ended:
            self.end_branch(branch)
        return api_response({"ended": ended, "compacts": action.compacts})

    def end_branch(self, branch: str) -> bool:
        """Tell the directory that a branch is over; whether this router knew it. `branch` with its tenant."""
        self.identities.end(branch)
        self.branch_out.publish(BranchEnded(branch, self.clock.now()))
        return self.branches.forget(branch)

    def announce(self, flight: Flight, path: PageArray) -> None:
        """Tell the directory and the other routers of a request's branch and path."""
        identity = flight.identity
        assert identity is not None
        parent = qualified(flight.tenant, identity.parent) if identity.parent else None
        self.branch_out.publish(
            self.branches.request(flight.branch, parent, identity.tagged, path, flight.t_arrive)
        )

    async def _get_cluster(self, _: web.Request) -> web.Response:
        prefill, decode = self.cluster.split()
        nodes = [
            {
                "node": name,
                "phase": node.state.phase if node.state else node.info.phase,
                "url": node.info.url,
                "model": node.info.model,
                "draining": bool(node.state and node.state.draining),
                "queue": len(node.state.queue) if node.state else 0,
                "decodes": len(node.state.decodes) if node.state else 0,
            }
            for name, node in sorted(self.cluster.nodes.items())
        ]
        some = next(iter(self.cluster.nodes.values()), None)
        return api_response(
            {
                "cluster": self.settings.cluster,
                "version": importlib.metadata.version("evolving-infra"),
                "speedup": self.settings.speedup,
                "page_size": some.info.page_size if some else None,
                "model": some.info.model if some else None,
                "max_context": some.info.max_context if some else None,
                "epoch": self.cluster.plan.epoch if self.cluster.plan else 0,
                "split": {"prefill": prefill, "decode": decode},
                "switches": self.cluster.switches,
                "nodes": nodes,
            }
        )

    def _gauges(self) -> None:
        def gauge(name: str, text: str) -> prometheus_client.Gauge:
            return prometheus_client.Gauge(name, text, registry=self.metrics)

        gauge("ei_router_in_flight", "Requests in flight").set_function(lambda: self.gate.admission.in_flight)
        gauge("ei_router_waiting", "Requests in line").set_function(lambda: self.gate.admission.waiting)
        gauge("ei_router_cached_tokens", "Token ids kept for next steps").set_function(
            lambda: self.prompts.cache.tokens
        )
        gauge("ei_router_nodes", "Registered workers").set_function(lambda: len(self.cluster.nodes))
        gauge("ei_router_branches", "Branches known").set_function(lambda: len(self.branches.list()))
        gauge("ei_router_index_pages", "Distinct KV pages in the index").set_function(
            lambda: len(self.cluster.index)
        )
        gauge("ei_router_unsynced_nodes", "Nodes whose pages are unknown").set_function(
            lambda: len(self.cluster.follower.unsynced())
        )


class _Listeners:
    def __init__(self, server: HttpServer, runner: web.AppRunner, upstream: Upstream) -> None:
        self._server, self._runner, self._upstream = server, runner, upstream

    async def cleanup(self) -> None:
        await self._server.close(2.0)
        await self._runner.cleanup()
        await self._upstream.close()


def api_response(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _model(name: str, info: NodeInfo) -> dict[str, object]:
    """As OpenAI's clients expect it, and as Anthropic's do."""
    return {
        "id": name,
        "object": "model",
        "created": CREATED,
        "owned_by": "evolving-infra",
        "max_model_len": info.max_context,
        "page_size": info.page_size,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(CREATED, UTC).isoformat().replace("+00:00", "Z"),
    }


def _shown(request: web.Request, view: BranchView) -> BranchView:
    """A branch by the name that the key's tenant knows it by."""
    if request.headers.get(ADMIN) == "1":
        return view
    tenant = request.headers.get(TENANT, "")
    parent = own_name(tenant, view.parent) if view.parent else None
    return msgspec.structs.replace(view, branch=own_name(tenant, view.branch), parent=parent)


def _may_see(request: web.Request, branch: str) -> bool:
    """Whether a branch is an administrator's to see, or its tenant's."""
    if request.headers.get(ADMIN) == "1":
        return True
    return tenant_of(branch) == request.headers.get(TENANT, "")
