"""Prometheus metrics of the cluster: counted as records come, the nodes' own read when scraped.

Times are cluster seconds. What a restart reads again from the streams is not counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.telemetry.cluster import ClusterView, times
from shared.messages import Outcome, Phase, RequestDone

_TTFT_S = (0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)
_TPOT_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_E2E_S = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300, 600)


class RequestMeters:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("ei_requests", "Finished requests", ["outcome"], registry=registry)
        for outcome in Outcome:
            self._requests.labels(outcome.value)
        self._ttft = Histogram(
            "ei_ttft_seconds", "From arrival to the first token", buckets=_TTFT_S, registry=registry
        )
        self._tpot = Histogram(
            "ei_tpot_seconds",
            "Between two output tokens, a request's mean",
            buckets=_TPOT_S,
            registry=registry,
        )
        self._e2e = Histogram("ei_e2e_seconds", "From arrival to the end", buckets=_E2E_S, registry=registry)
        self._tokens = Counter(
            "ei_tokens",
            "Tokens of served requests: prompt, of these cached, fetched from a peer and restored; and output",
            ["kind"],
            registry=registry,
        )

    def count(self, done: RequestDone) -> None:
        self._requests.labels(done.outcome.value).inc()
        if done.outcome is not Outcome.OK:
            return
        ttft_s, tpot_s, e2e_s = times(done)
        self._ttft.observe(ttft_s)
        self._e2e.observe(e2e_s)
        if tpot_s is not None:
            self._tpot.observe(tpot_s)
        for kind, tokens in (
            ("prompt", done.prompt_tokens),
            ("cached", done.cached_tokens),
            ("fetched", done.fetched_tokens),
            ("restored", done.restored_tokens),
            ("output", done.output_tokens),
        ):
            self._tokens.labels(kind).inc(max(0, tokens))


class ClusterCollector(Collector):
    """Reads the live picture at each scrape."""

    def __init__(self, view: ClusterView, now: Callable[[], float]) -> None:
        self._view, self._now = view, now

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry then does not collect when this is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        t = self._now()
        nodes = self._view.node_views(t)
        phase = GaugeMetricFamily(
            "ei_node_phase", "1 for the phase the node serves", labels=["node", "phase"]
        )
        split = GaugeMetricFamily("ei_split_nodes", "Nodes by the phase they serve", labels=["phase"])
        pages = GaugeMetricFamily(
            "ei_node_pages", "KV pages held: l1 and l2, and those of l2 with counts", labels=["node", "tier"]
        )
        gauges = {
            "queue": GaugeMetricFamily("ei_node_queue", "Requests that wait for prefill", labels=["node"]),
            "queue_tokens": GaugeMetricFamily(
                "ei_node_queue_tokens", "Uncached tokens that these have still to compute", labels=["node"]
            ),
            "decodes": GaugeMetricFamily("ei_node_decodes", "Requests in decode", labels=["node"]),
            "decode_tokens": GaugeMetricFamily(
                "ei_node_decode_tokens", "Context tokens of these", labels=["node"]
            ),
            "draining": GaugeMetricFamily("ei_node_draining", "1 while it changes phase", labels=["node"]),
            "age_s": GaugeMetricFamily(
                "ei_node_state_age_seconds", "Age of the node's last state", labels=["node"]
            ),
        }
        for node in nodes:
            for one in Phase:
                phase.add_metric([node.node, one.value], float(node.phase is one))
            pages.add_metric([node.node, "l1"], node.l1_pages)
            pages.add_metric([node.node, "l2"], node.l2_pages)
            pages.add_metric([node.node, "l2_counted"], node.l2_counted_pages)
            for name, gauge in gauges.items():
                value = getattr(node, name)
                if value is not None:
                    gauge.add_metric([node.node], float(value))
        for one in Phase:
            split.add_metric([one.value], sum(node.phase is one for node in nodes))
        yield from (phase, split, pages, *gauges.values())
        epoch = self._view.plan.epoch if self._view.plan is not None else 0
        yield GaugeMetricFamily("ei_plan_epoch", "Epoch of the plan in force", value=epoch)
        yield CounterMetricFamily("ei_switches", "Changes of the split", value=self._view.switches)
        yield CounterMetricFamily("ei_node_switches", "Nodes moved by them", value=self._view.node_switches)
        hit_rate = self._view.hit_rate(t)
        if hit_rate is not None:
            yield GaugeMetricFamily(
                "ei_kv_hit_rate", "Cached over prompt tokens of recent requests", value=hit_rate
            )
