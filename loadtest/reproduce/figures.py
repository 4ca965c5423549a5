"""The figures that tables show of a run, by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from loadtest.report import spread
from loadtest.simulate.run import Result


def _e2e(result: Result) -> float:
    return spread([m.e2e_s for m in result.measured]).mean


def _ttft_mean(result: Result) -> float:
    return spread([m.ttft_s for m in result.measured]).mean


def _ttft_p95(result: Result) -> float:
    return spread([m.ttft_s for m in result.measured]).p95


def _last_prefill(result: Result) -> float:
    return float(result.splits[-1][1]) if result.splits else 0.0


FIGURES: dict[str, Callable[[Result], float]] = {
    "req/s": lambda result: result.req_per_s,
    "mean E2E s": _e2e,
    "mean TTFT s": _ttft_mean,
    "P95 TTFT s": _ttft_p95,
    "hit %": lambda result: 100 * result.hit_rate,
    "lost reuse %": lambda result: 100 * result.lost_reuse,
    "queue s": lambda result: spread(result.queue_s).mean,
    "switches": lambda result: float(result.switches),
    "switch s": lambda result: float(np.mean(result.switch_s)) if result.switch_s else 0.0,
    "P nodes at end": _last_prefill,
}


def figures_of(result: Result) -> dict[str, float]:
    return {name: figure(result) for name, figure in FIGURES.items()}
