"""What a worker shows at /metrics. Everything is read from the engine when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shared.messages import Phase, Tier
from worker.agent.page_service import PageService
from worker.engines.simulated.engine import Engine
from worker.engines.simulated.phase import Ack
from worker.engines.simulated.scheduler import Scheduler
from worker.transport.fetch import Fetcher
from worker.transport.peers import PeerClient


def _counted(value: bool) -> str:
    return "positive" if value else "zero"


class WorkerMetrics(Collector):
    """`ei_worker_*`; `switched` is told of phase changes."""

    def __init__(
        self,
        registry: CollectorRegistry,
        scheduler: Scheduler,
        engine: Engine,
        fetcher: Fetcher,
        peers: PeerClient,
        page_service: PageService,
    ) -> None:
        self._scheduler, self._engine, self._fetcher = scheduler, engine, fetcher
        self._peers, self._page_service = peers, page_service
        self._switches = 0
        self._drain_s = 0.0
        self._switch_s = 0.0
        registry.register(self)

    def switched(self, ack: Ack) -> None:
        self._switches += 1
        self._drain_s += ack.drain_s
        self._switch_s += ack.switch_s

    def collect(self) -> Iterator[Metric]:
        yield from self._kv()
        yield from self._fetches()
        yield from self._loans()
        yield from self._requests()
        yield from self._work()
        yield from self._role()

    def _kv(self) -> Iterator[Metric]:
        cache = self._scheduler.cache
        pages = GaugeMetricFamily("ei_worker_kv_pages", "KV pages held", labels=["tier", "count"])
        size = GaugeMetricFamily("ei_worker_kv_bytes", "Bytes of KV held", labels=["tier", "count"])
        page_bytes = self._fetcher.page_bytes
        for tier, used in ((Tier.L1, cache.l1_used), (Tier.L2, cache.l2_used)):
            positive = cache.counted(tier)
            for counted, number in ((True, positive), (False, used - positive)):
                labels = [tier.name.lower(), _counted(counted)]
                pages.add_metric(labels, number)
                size.add_metric(labels, number * page_bytes)
        yield pages
        yield size
        capacity = GaugeMetricFamily("ei_worker_kv_capacity_pages", "KV pages that fit", labels=["tier"])
        capacity.add_metric(["l1"], cache.l1_pages)
        capacity.add_metric(["l2"], cache.l2_pages)
        yield capacity
        pinned = GaugeMetricFamily(
            "ei_worker_kv_pinned_pages", "KV pages pinned by requests, fetches and loans", labels=["tier"]
        )
        pinned.add_metric(["l1"], cache.l1_pinned)
        pinned.add_metric(["l2"], cache.l2_pinned)
        yield pinned
        yield GaugeMetricFamily("ei_worker_kv_reserved_pages", "L1 pages promised to requests", cache.l1_room)
        evicted = CounterMetricFamily(
            "ei_worker_kv_evicted_pages",
            "Pages evicted; l1 is GPU, l2 host memory; positive: an active branch referenced it",
            labels=["tier", "count"],
        )
        for (tier, counted), number in cache.evicted.items():
            evicted.add_metric([tier.name.lower(), _counted(counted)], number)
        yield evicted
        yield CounterMetricFamily(
            "ei_worker_kv_unwritten_pages",
            "Pages not written through to host memory, all of it being pinned",
            cache.unwritten_pages,
        )

        yield CounterMetricFamily(
            "ei_worker_kv_corrupt_pages", "Pages dropped because their bytes had changed", cache.corrupt_pages
        )

    def _fetches(self) -> Iterator[Metric]:
        counts = self._fetcher.counts
        for name, text, number in (
            ("fetches", "Transfers from peers that were begun", counts.fetches),
            ("fetched_pages", "Pages that came from peers", counts.pages),
            ("fetched_bytes", "Bytes that came from peers", counts.bytes),
            ("fetch_wall_seconds", "Wall seconds of transfers, from the question to the last page", counts.seconds),
            ("fetch_shared_pages", "Pages wanted while on their way for another request", counts.shared_pages),
            ("fetch_corrupt_pages", "Pages that came with other bytes than the peer said", counts.corrupt_pages),
            ("fetch_failures", "Of these, the ones that a peer did not finish", counts.failures),
            ("peer_failures", "Questions for pages and transfers that failed", self._peers.failures),
            ("fetch_seconds", "Cluster seconds that prefills waited for, or overlapped with, fetches", self._engine.fetch_s),
            ("exposed_fetch_seconds", "Cluster seconds of these that held a prefill up", self._engine.exposed_s),
        ):  # fmt: skip
            yield CounterMetricFamily(f"ei_worker_{name}", text, number)

    def _loans(self) -> Iterator[Metric]:
        loans = self._page_service.loans
        yield GaugeMetricFamily("ei_worker_lent_pages", "Pages that peers have pinned", loans.pages)
        yield CounterMetricFamily(
            "ei_worker_loaned_pages", "Pages lent to peers", self._page_service.lent_pages
        )
        yield CounterMetricFamily("ei_worker_loans_expired", "Loans that peers did not end", loans.expired)
        yield CounterMetricFamily("ei_worker_loans_refused", "Loans beyond what may be pinned", loans.refused)

    def _requests(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily("ei_worker_queued_requests", "Requests that wait", labels=["kind"])
        queued.add_metric(["prefill"], self._scheduler.queued_prefills)
        queued.add_metric(["decode"], self._scheduler.queued_decodes)
        yield queued
        yield GaugeMetricFamily("ei_worker_requests", "Requests on the node", self._scheduler.requests)

    def _work(self) -> Iterator[Metric]:
        iterations = CounterMetricFamily("ei_worker_iterations", "Iterations", labels=["phase"])
        seconds = CounterMetricFamily(
            "ei_worker_iteration_seconds", "Cluster seconds in iterations", labels=["phase"]
        )
        tokens = CounterMetricFamily(
            "ei_worker_tokens", "Tokens computed (prefill) and produced (decode)", labels=["phase"]
        )
        for phase in (Phase.PREFILL, Phase.DECODE):
            iterations.add_metric([phase], self._engine.iterations[phase])
            seconds.add_metric([phase], self._engine.iteration_s[phase])
            tokens.add_metric([phase], self._engine.tokens[phase])
        yield iterations
        yield seconds
        yield tokens
        yield CounterMetricFamily(
            "ei_worker_fetched_tokens",
            "Cached tokens pulled from peers for prefills",
            self._engine.fetched_tokens,
        )
        lost = CounterMetricFamily(
            "ei_worker_recomputed_tokens",
            "Tokens whose KV was to come from a cache and was computed: peer_failed (no answer, or another page size or "
            "transport), peer_missing (it no longer has it), corrupt, no_room (host memory is pinned), evicted (here)",
            labels=["reason"],
        )
        for reason, number in self._scheduler.recomputed.items():
            lost.add_metric([reason], number)
        yield lost

    def _role(self) -> Iterator[Metric]:
        role = self._scheduler.role
        phase = GaugeMetricFamily("ei_worker_phase", "1 for the node's phase", labels=["phase"])
        for each in Phase:
            phase.add_metric([each], 1.0 if role.phase is each else 0.0)
        yield phase
        yield GaugeMetricFamily("ei_worker_role_epoch", "Epoch of the plan in force", role.epoch)
        yield GaugeMetricFamily(
            "ei_worker_draining", "1 during a phase change", 1.0 if role.draining else 0.0
        )
        yield CounterMetricFamily("ei_worker_phase_changes", "Phase changes that ended", self._switches)
        yield CounterMetricFamily(
            "ei_worker_drain_seconds", "Cluster seconds spent draining before a change", self._drain_s
        )
        yield CounterMetricFamily(
            "ei_worker_switch_seconds", "Cluster seconds spent switching", self._switch_s
        )
