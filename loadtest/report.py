"""What a replay measured: the report as a struct, as JSON and as a table.

Rules that hold here
- Times are seconds of the trace (cluster seconds): wall seconds times the speed-up.
- Latencies, hit rates and token sums are over answered requests. A share whose total is 0, or that the server
  does not report, is null.
- The JSON's top-level keys are only ever added to.
- A report file appears as a whole or not at all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.files import whole_file
from loadtest.kv_work import KvWork, shown
from loadtest.tally import Tally

Setting = str | int | float | bool | None


class Spread(msgspec.Struct, frozen=True):
    """Of some times in seconds; all 0 when there were none."""

    mean: float
    p50: float
    p95: float
    p99: float


class Report(msgspec.Struct, frozen=True):
    requests: int  # answered or failed
    failed: int
    duration_s: float
    req_per_s: float  # answered
    ttft_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    kv_hit_rate: float | None  # h
    ideal_hit_rate: float | None  # h*
    lost_kv_reuse: float | None  # 1 - h / h*
    switches: int
    splits: list[tuple[float, int, int]]  # t_s, prefill nodes, decode nodes; one entry a change
    trace: str
    settings: dict[str, Setting]
    version: str
    trace_format: str
    trace_requests: int
    sessions: int  # begun
    retries: int
    failures: dict[str, int]  # by reason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    wrong_lengths: int  # answers of another length than the trace's prompt or output
    interrupted: bool
    wall_s: float
    kv: KvWork | None = None  # None when no worker could be asked


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0)
    array = np.asarray(values, dtype=np.float64)
    p50, p95, p99 = (float(p) for p in np.percentile(array, [50, 95, 99]))
    return Spread(float(array.mean()), p50, p95, p99)


def share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def lost_kv_reuse(hit_rate: float | None, ideal_hit_rate: float | None) -> float | None:
    """1 - h / h* (Figure 3). Nothing to lose when h* is 0."""
    if hit_rate is None or ideal_hit_rate is None:
        return None
    return 1.0 - hit_rate / ideal_hit_rate if ideal_hit_rate > 0 else 0.0


def build_report(
    tally: Tally,
    *,
    duration_s: float,
    wall_s: float,
    trace: str,
    trace_format: str,
    trace_requests: int,
    sessions: int,
    retries: int,
    interrupted: bool,
    settings: Mapping[str, Setting],
    version: str,
    kv: KvWork | None = None,
) -> Report:
    measured = tally.measured
    hit_rate = share(tally.cached_tokens, tally.prompt_tokens)
    ideal = share(tally.ideal_tokens, tally.prompt_tokens)
    failed = tally.failures.total()
    return Report(
        requests=len(measured) + failed,
        failed=failed,
        duration_s=duration_s,
        req_per_s=len(measured) / duration_s if duration_s > 0 else 0.0,
        ttft_s=spread([m.ttft_s for m in measured]),
        tpot_s=spread([t for m in measured if (t := m.tpot_s) is not None]),
        e2e_s=spread([m.e2e_s for m in measured]),
        kv_hit_rate=hit_rate,
        ideal_hit_rate=ideal,
        lost_kv_reuse=lost_kv_reuse(hit_rate, ideal),
        switches=tally.switches,
        splits=list(tally.splits),
        trace=trace,
        settings=dict(settings),
        version=version,
        trace_format=trace_format,
        trace_requests=trace_requests,
        sessions=sessions,
        retries=retries,
        failures=dict(sorted(tally.failures.items())),
        prompt_tokens=tally.prompt_tokens,
        output_tokens=tally.output_tokens,
        cached_tokens=tally.cached_tokens,
        wrong_lengths=tally.wrong_lengths,
        interrupted=interrupted,
        wall_s=wall_s,
        kv=kv,
    )


# --------------------------------------------------------------------------------- JSON


def check_writable(path: str) -> None:
    """Raises OSError when no report could be written there. Leaves what is there as it is."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(21, "is a folder", path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    os.unlink(name)


def write_report(path: str, report: Report) -> None:
    """Raises OSError; then the file is as it was before."""
    with whole_file(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


# --------------------------------------------------------------------------------- table


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.2f} %"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.3f} s" if value >= 0.1 else f"{1000 * value:.2f} ms"


def print_report(report: Report, console: Console, title: str = "Replay") -> None:
    head = Table(title=title, show_header=False, title_justify="left")
    head.add_column(style="bold")
    head.add_column()
    head.add_row("trace", f"{report.trace} ({report.trace_format})")
    stopped = ", interrupted" if report.interrupted else ""
    head.add_row("requests", f"{report.requests} in {report.sessions} sessions{stopped}")
    head.add_row("failed", str(report.failed))
    for reason, count in report.failures.items():
        head.add_row("", f"{count} x {reason}")
    if report.retries:
        head.add_row("retries", str(report.retries))
    if report.wrong_lengths:
        head.add_row("wrong lengths", f"{report.wrong_lengths} answers differ in length from the trace")
    head.add_row("duration", f"{report.duration_s:.1f} s of the trace, {report.wall_s:.1f} s on the clock")
    head.add_row("throughput", f"{report.req_per_s:.3f} req/s")
    head.add_row("tokens", f"{report.prompt_tokens:,} prompt, {report.output_tokens:,} output")
    head.add_row("KV hit rate", percent(report.kv_hit_rate))
    head.add_row("ideal hit rate", percent(report.ideal_hit_rate))
    head.add_row("lost KV reuse", percent(report.lost_kv_reuse))
    for name, text in shown(report.kv) if report.kv is not None else ():
        head.add_row(name, text)
    head.add_row("phase switches", str(report.switches))
    if report.splits:
        splits = [f"{p}P{d}D at {t:.0f} s" for t, p, d in report.splits]
        if len(splits) > 8:
            splits = [*splits[:4], f"... {len(splits) - 8} more", *splits[-4:]]
        head.add_row("split", ", ".join(splits))
    console.print(head)
    times = Table(title="Times (seconds of the trace)", title_justify="left")
    times.add_column("")
    for column in ("mean", "p50", "p95", "p99"):
        times.add_column(column, justify="right")
    for name, of in (("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("E2E", report.e2e_s)):
        times.add_row(name, *(seconds(value) for value in (of.mean, of.p50, of.p95, of.p99)))
    console.print(times)
