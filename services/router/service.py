"""The router process: feeds `Cluster` from Redis and serves the API through `Proxy`."""

from __future__ import annotations

import asyncio
import importlib.metadata

import prometheus_client
from aiohttp import web

from services.router.branches import Branches
from services.router.cluster import Cluster
from services.router.identity import Identifier, check_branch_id
from services.router.proxy import Proxy, api_response
from services.router.settings import RouterSettings
from shared.api_errors import openai_errors
from shared.kvfollow import KV_STREAM, Follow
from shared.kvsnapshot import SnapshotError, fetch_snapshot
from shared.messages import BranchEnded, Models, NodeState, PathWanted, RolePlan, Slice
from shared.openai import ApiError
from shared.service import Service
from shared.streams import BusError

REGISTRY_S = 0.5


class RouterService(Service):
    name = "router"

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self.router_settings = settings
        self.cluster = Cluster(self.clock)
        self.identifier = Identifier(f"auto-{self.instance}-", settings.branch_idle_s)
        self.branches = Branches()
        self._resyncing: set[str] = set()

    async def startup(self) -> None:
        self.branch_out = self.bus.publisher("branch", self.instance, maxlen=50_000)
        self.requests_out = self.bus.publisher("requests", self.instance, maxlen=50_000)
        self.spawn(self.branch_out.run(), "publish branch")
        self.spawn(self.requests_out.run(), "publish requests")
        self.proxy = Proxy(self)
        self._reader = self.bus.reader({})
        await self._reader.follow("resync", "roles", "windows")
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
            while True:
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

    async def shutdown(self) -> None:
        await self.branch_out.flush()
        await self.requests_out.flush()

    def ready(self) -> str | None:
        if not self.cluster.nodes:
            return "no worker has registered yet"
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

    # ------------------------------------------------------------------ HTTP

    def routes(self, app: web.Application) -> None:
        async def chat(request: web.Request) -> web.StreamResponse:
            return await self.proxy.handle(request, "chat")

        async def completion(request: web.Request) -> web.StreamResponse:
            return await self.proxy.handle(request, "completion")

        async def tokenize(request: web.Request) -> web.StreamResponse:
            return await self.proxy.tokenize(request)

        app.router.add_post("/v1/chat/completions", chat)
        app.router.add_post("/v1/completions", completion)
        app.router.add_post("/v1/tokenize", tokenize)
        app.router.add_get("/v1/models", self._get_models)
        app.router.add_get("/v1/branches", self._get_branches)
        app.router.add_get("/v1/branches/{branch:.+}", self._get_branch)
        app.router.add_delete("/v1/branches/{branch:.+}", self._delete_branch)
        app.router.add_get("/ei/v1/cluster", self._get_cluster)
        app.middlewares.append(openai_errors)

    async def _get_models(self, _: web.Request) -> web.Response:
        models = [
            {
                "id": model,
                "object": "model",
                "created": 1767225600,
                "owned_by": "evolving-infra",
                "max_model_len": info.max_context,
                "page_size": info.page_size,
            }
            for model, info in sorted(self.cluster.models().items())
        ]
        return api_response({"object": "list", "data": models})

    async def _get_branches(self, _: web.Request) -> web.Response:
        return api_response({"branches": self.branches.list()})

    async def _get_branch(self, request: web.Request) -> web.Response:
        branch = check_branch_id(request.match_info["branch"], "the branch id")
        view = self.branches.get(branch)
        if view is None:
            raise ApiError(404, f"No branch {branch!r} is active on this router.", code="branch_not_found")
        return api_response(view)

    async def _delete_branch(self, request: web.Request) -> web.Response:
        branch = check_branch_id(request.match_info["branch"], "the branch id")
        return api_response({"branch": branch, "ended": True, "known": self.end_branch(branch)})

    def end_branch(self, branch: str) -> bool:
        """Tell the directory that a branch is over; whether this router knew it."""
        self.identifier.end(branch)
        self.branch_out.publish(BranchEnded(branch, self.clock.now()))
        return self.branches.forget(branch)

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

        gauge("ei_router_in_flight", "Requests in flight").set_function(lambda: self.proxy.in_flight)
        gauge("ei_router_nodes", "Registered workers").set_function(lambda: len(self.cluster.nodes))
        gauge("ei_router_branches", "Branches known").set_function(lambda: len(self.branches.list()))
        gauge("ei_router_index_pages", "Distinct KV pages in the index").set_function(
            lambda: len(self.cluster.index)
        )
        gauge("ei_router_unsynced_nodes", "Nodes whose pages are unknown").set_function(
            lambda: len(self.cluster.follower.unsynced())
        )
