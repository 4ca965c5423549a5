"""Reports: the figures, their JSON, and what is shown of them."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from loadtest.client import Cluster, NodeEntry
from loadtest.progress import figures
from loadtest.report import (
    Report,
    build_report,
    check_writable,
    lost_kv_reuse,
    print_report,
    spread,
    write_report,
)
from loadtest.tally import Measured, Tally

ISSUED_KEYS = {
    "requests", "failed", "duration_s", "req_per_s", "ttft_s", "tpot_s", "e2e_s", "kv_hit_rate",
    "ideal_hit_rate", "lost_kv_reuse", "switches", "splits", "trace", "settings", "version",
}  # fmt: skip


def measured(cached: int | None = 640, ttft_s: float = 1.0, output: int = 11) -> Measured:
    return Measured(
        ttft_s=ttft_s,
        e2e_s=ttft_s + 2.0,
        prompt_tokens=1000,
        output_tokens=output,
        cached_tokens=cached,
        ideal_tokens=800,
    )


def cluster(**phases: str) -> Cluster:
    nodes = [NodeEntry(node=node, phase=phase) for node, phase in phases.items()]
    split = {phase: sum(node.phase == phase for node in nodes) for phase in ("prefill", "decode")}
    return Cluster(nodes=nodes, split=split)


def report_of(tally: Tally) -> Report:
    return build_report(
        tally,
        duration_s=100.0,
        wall_s=5.0,
        trace="t.jsonl",
        trace_format="Weka",
        trace_requests=9,
        sessions=2,
        retries=3,
        interrupted=False,
        settings={"agents": 4},
        version="1.2.3",
    )


def test_figures() -> None:
    tally = Tally()
    for ttft_s in (1.0, 3.0):
        tally.answered(measured(ttft_s=ttft_s), as_asked=True, at=1.0)
    tally.answered(measured(cached=320, ttft_s=2.0, output=1), as_asked=False, at=2.0)
    tally.failed("timeout", at=3.0)
    report = report_of(tally)
    assert (report.requests, report.failed, report.failures) == (4, 1, {"timeout": 1})
    assert report.req_per_s == pytest.approx(0.03)
    assert report.ttft_s.mean == report.ttft_s.p50 == pytest.approx(2.0)
    assert report.ttft_s.p95 == pytest.approx(2.9)
    assert report.e2e_s.mean == pytest.approx(4.0)
    assert report.tpot_s.p99 == pytest.approx(0.2)  # the output of one token has none
    assert report.kv_hit_rate == pytest.approx(1600 / 3000)
    assert report.ideal_hit_rate == pytest.approx(0.8)
    assert report.lost_kv_reuse == pytest.approx(1 - (1600 / 3000) / 0.8)
    assert report.wrong_lengths == 1 and report.output_tokens == 23
    assert tally.last_end == 3.0


def test_a_server_that_does_not_report_hits_and_an_empty_run() -> None:
    tally = Tally()
    assert report_of(tally).kv_hit_rate is None
    assert report_of(tally).ttft_s == spread([])
    tally.answered(measured(), as_asked=True, at=1.0)
    tally.answered(measured(cached=None), as_asked=True, at=1.0)
    report = report_of(tally)
    assert report.kv_hit_rate is None and report.lost_kv_reuse is None
    assert report.ideal_hit_rate == pytest.approx(0.8)


def test_nothing_is_lost_where_nothing_could_be_reused() -> None:
    assert lost_kv_reuse(0.0, 0.0) == 0.0
    assert lost_kv_reuse(0.4, 0.8) == pytest.approx(0.5)
    assert lost_kv_reuse(None, 0.8) is None


def test_switches_are_of_nodes_from_one_phase_to_the_other() -> None:
    tally = Tally()
    tally.saw_cluster(cluster(a="both", b="both"), 0.0)
    tally.saw_cluster(cluster(a="prefill", b="decode"), 10.0)  # the warm-up's end is no switch
    tally.saw_cluster(cluster(a="prefill", b="decode"), 20.0)
    tally.saw_cluster(cluster(a="decode", b="decode"), 30.0)
    tally.saw_cluster(cluster(a="prefill"), 40.0)  # b is away, and comes back as it was
    tally.saw_cluster(cluster(a="prefill", b="decode"), 50.0)
    assert tally.switches == 2
    assert tally.splits == [(0.0, 0, 0), (10.0, 1, 1), (30.0, 0, 2), (40.0, 1, 0), (50.0, 1, 1)]


def test_json_has_the_agreed_keys(tmp_path: Path) -> None:
    tally = Tally()
    tally.answered(measured(), as_asked=True, at=1.0)
    tally.saw_cluster(cluster(a="prefill", b="decode"), 1.5)
    path = tmp_path / "report.json"
    write_report(str(path), report_of(tally))
    report = json.loads(path.read_text())
    assert report.keys() >= ISSUED_KEYS
    for times in ("ttft_s", "tpot_s", "e2e_s"):
        assert report[times].keys() == {"mean", "p50", "p95", "p99"}
    assert report["splits"] == [[1.5, 1, 1]]
    assert report["settings"] == {"agents": 4} and report["version"] == "1.2.3"
    assert msgspec.json.decode(path.read_bytes(), type=Report) == report_of(tally)
    assert path.stat().st_mode & 0o444 == 0o444 & ~_umask()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_a_report_that_cannot_be_written_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    check_writable(str(path))

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(str(path), report_of(Tally()))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    for nowhere in (tmp_path, tmp_path / "none" / "r.json"):
        with pytest.raises(OSError):
            check_writable(str(nowhere))


def test_the_table_and_the_progress_line_show_the_figures() -> None:
    tally = Tally()
    tally.answered(measured(), as_asked=True, at=1.0)
    tally.failed("HTTP 503: overloaded", at=1.0)
    tally.saw_cluster(cluster(a="prefill", b="decode"), 0.0)
    out = io.StringIO()
    print_report(report_of(tally), Console(file=out, width=120))
    shown = out.getvalue()
    for text in (
        "1 x HTTP 503: overloaded",
        "64.00 %",
        "80.00 %",
        "20.00 %",
        "1P1D at 0 s",
        "TTFT",
        "1.000 s",
    ):
        assert text in shown
    line = figures(tally.progress(total=9, elapsed_s=10.0, duration_s=None))
    assert line == "2/9 requests, 0.10 req/s, TTFT p50 1.000 s, KV hit 64.00 %, 1 failed, 1P1D"
