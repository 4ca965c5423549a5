"""The directory process: one of several leads, the others stand by (Algorithms E.1 and E.2).

Rules that hold here
- Only the holder of the `directory` lease has state and writes; a stand-by asks for the lease when it would end, and
  every quarter of its time to live, and begins from what the last leader wrote.
- HTTP only shows: `GET /v1/branches` and `GET /v1/branches/{id}` answer 503 on a stand-by.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
import prometheus_client
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.directory.branches import Branch
from services.directory.core import Directory
from services.directory.leader import Term
from services.directory.settings import DirectorySettings
from shared.bus import NotLeader
from shared.messages import Phase
from shared.openai import ApiError
from shared.service import Service
from shared.store import StateLost
from shared.streams import Backoff, BusError

LISTED = 1000  # branches in one answer, unless the client asks for another number


class BranchShown(msgspec.Struct):
    """A branch as `GET /v1/branches` shows it. `nodes`: pages that it counts on each node."""

    branch: str
    version: int
    path_pages: int
    last_t: float
    nodes: dict[str, int]
    moving_to: dict[Phase, str]


class DirectoryService(Service):
    name = "directory"

    def __init__(self, settings: DirectorySettings) -> None:
        super().__init__(settings)
        self.directory_settings = settings
        self.stats: Counter[str] = Counter()
        self._term: Term | None = None
        self._asked = False
        self._failing: str | None = None  # why the lease cannot be asked for
        registry = self.metrics
        self.events = prometheus_client.Counter(
            "ei_directory_events", "Events applied, by stream", ["stream"], registry=registry
        )
        self.batches = prometheus_client.Counter(
            "ei_directory_batches", "Batches written to Redis", registry=registry
        )
        self.resyncs = prometheus_client.Counter(
            "ei_directory_resyncs", "Full sets of counts sent to workers", registry=registry
        )
        self.commit_s = prometheus_client.Histogram(
            "ei_directory_commit_seconds", "Time to write a batch",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0), registry=registry,
        )  # fmt: skip
        registry.register(_StateMetrics(self))

    # ------------------------------------------------------------------ life

    async def startup(self) -> None:
        self._lease = self.bus.lease("directory", self.instance, self.directory_settings.lease_ttl_s)

    async def main_loop(self) -> None:
        backoff = Backoff()
        while True:
            try:
                token = await self._lease.acquire()
            except BusError as error:
                self.log.warning("redis_failed", error=error)
                self._failing = str(error)
                await backoff.wait()
                continue
            backoff.reset()
            self._asked, self._failing = True, None
            if token is None:
                # Just after its end, if it ends, and now and then, for its holder may give it up.
                await asyncio.sleep(min(self._lease.ttl_s / 4, self._lease.free_in_s + 0.01))
                continue
            self._term = Term(self, self._lease)
            try:
                await self._term.run()
            except* (NotLeader, StateLost) as lost:
                self.log.warning("stepped_down", term=token, reason=lost.exceptions[0])
            finally:
                self._term = None

    async def shutdown(self) -> None:
        await self._lease.release()

    def ready(self) -> str | None:
        if self._failing is not None:
            return self._failing
        if not self._asked:
            return "has not asked for the lease yet"
        if self._term is not None and not self._term.begun:
            return "loading"
        return None

    @property
    def term(self) -> Term | None:
        """The present term of leadership; None on a stand-by and while it loads."""
        return self._term if self._term is not None and self._term.begun else None

    # ------------------------------------------------------------------ HTTP

    def routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/branches", self._get_branches)
        app.router.add_get("/v1/branches/{branch:.+}", self._get_branch)

    async def _get_branches(self, request: web.Request) -> web.Response:
        try:
            directory = self._directory()
            text = request.query.get("limit", str(LISTED))
            if not text.isdecimal():
                raise ApiError(400, f"limit must be a whole number, not {text!r}.", param="limit")
            branches = list(directory.table)
            # The most recent are last.
            newest = branches[len(branches) - min(int(text), len(branches)) :]
            return _answer({"branches": [_shown(directory, b) for b in newest], "total": len(branches)})
        except ApiError as error:
            return _failed(error)

    async def _get_branch(self, request: web.Request) -> web.Response:
        name = request.match_info["branch"]
        try:
            directory = self._directory()
            branch = directory.table.get(name)
            if branch is None:
                raise ApiError(404, f"No branch {name!r} is active.", code="branch_not_found")
            return _answer(_shown(directory, branch))
        except ApiError as error:
            return _failed(error)

    def _directory(self) -> Directory:
        term = self.term
        if term is None:
            raise ApiError(
                503, "This directory stands by; another one leads.", type="unavailable", code="stand_by"
            )
        return term.directory


class _StateMetrics(Collector):
    """Gauges of the state as it is when they are read."""

    def __init__(self, service: DirectoryService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        term = self._service.term
        yield GaugeMetricFamily("ei_directory_leader", "1 on the leader", value=float(term is not None))
        happened = CounterMetricFamily(
            "ei_directory_happenings", "What events meant, by kind", labels=["kind"]
        )
        for kind, count in self._service.stats.items():
            happened.add_metric([kind], count)
        yield happened
        if term is not None:
            yield from self._of_term(term)

    def _of_term(self, term: Term) -> Iterator[Metric]:
        directory = term.directory
        gauges = {
            "branches": ("Active branches", len(directory.table)),
            "path_pages": ("Pages of all paths, each once", directory.table.paths.pages),
            "pending_moves": ("Moves whose target lacks pages", directory.counts.pending_moves),
            "index_pages": ("Distinct pages held anywhere", len(directory.index)),
            "unsynced_nodes": ("Nodes whose pages are unknown", len(directory.unsynced())),
            "lag_seconds": ("From Redis to here, newest event", term.lag_s),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"ei_directory_{name}", text, value=float(value))
        counted = GaugeMetricFamily(
            "ei_directory_counted_pages", "Pages with a positive count", labels=["node"]
        )
        for node in directory.counts.nodes():
            counted.add_metric([node], directory.counts.counted_pages(node))
        yield counted


def _shown(directory: Directory, branch: Branch) -> BranchShown:
    return BranchShown(
        branch=branch.name,
        version=branch.version,
        path_pages=int(branch.path.size),
        last_t=branch.last_t,
        nodes={node: len(c) for node, c in sorted(directory.counts.of(branch.name).items())},
        moving_to=directory.counts.pending_of(branch.name),
    )


def _answer(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _failed(error: ApiError) -> web.Response:
    return web.Response(body=error.body(), status=error.status, content_type="application/json")
