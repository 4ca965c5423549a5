"""The replay's account of the workers' KV: differences of counters, also of workers that came and went."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from loadtest.kv_work import KvWork, kv_work, read_counters, shown


def counters(**values: float) -> dict[str, float]:
    return {f"{name}{{}}": value for name, value in values.items()}


def test_a_workers_metrics_are_read_as_prometheus_writes_them() -> None:
    registry = CollectorRegistry()
    evicted = Counter("ei_worker_kv_evicted_pages", "text", ["tier", "count"], registry=registry)
    evicted.labels("l2", "positive").inc(7)
    Counter("ei_worker_fetched_pages", "text", registry=registry).inc(3)
    Counter("ei_router_requests", "text", registry=registry).inc(3)
    Gauge("ei_worker_requests", "text", registry=registry).set(5)
    found = read_counters(generate_latest(registry).decode())
    assert found.pop("kv_evicted_pages{count=positive,tier=l2}") == 7.0
    assert found.pop("fetched_pages{}") == 3.0
    assert not [name for name in found if "requests" in name]


def test_text_that_is_no_metrics_is_refused() -> None:
    with pytest.raises(ValueError):
        read_counters("<html>no metrics</html>")


def test_sums_over_workers_are_differences() -> None:
    before = {"a": counters(fetched_pages=10, kv_corrupt_pages=1), "b": counters(fetched_pages=5)}
    after = {
        "a": counters(fetched_pages=30, kv_corrupt_pages=2, fetch_corrupt_pages=1)
        | {"recomputed_tokens{reason=evicted}": 64.0, "recomputed_tokens{reason=corrupt}": 0.0},
        "b": counters(fetched_pages=2),  # began anew
        "c": counters(fetched_pages=4, fetch_seconds=2.0, exposed_fetch_seconds=0.5),  # joined
    }
    found = kv_work(before, after)
    assert found is not None
    assert (found.workers, found.fetched_pages, found.corrupt_pages) == (3, 20 + 2 + 4, 2)
    assert found.recomputed_tokens == {"evicted": 64}
    rows = dict(shown(found))
    assert (
        rows["prefill held up"].endswith("25.0 % of their 2.0 s")
        and rows["tokens recomputed"] == "64 (evicted)"
    )


def test_without_workers_there_is_none() -> None:
    assert kv_work({"a": counters(fetched_pages=1)}, {}) is None
    assert dict(shown(KvWork(1, 0, 0, 0, 0, 0, {}, 0.0, 0.0))).keys() == {
        "KV pages moved", "KV pages corrupt", "host memory evicted",
    }  # fmt: skip
