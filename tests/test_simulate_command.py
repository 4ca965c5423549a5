"""`evolving simulate`: bad input is one line and exit code 2, a run leaves a report of a replay's form."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from loadtest.report import Report
from loadtest.simulate.command import SimulateSettings, build, main, sized
from shared.timing import GLM_52_4XGB300, TINY


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "TRACE"),
        (["nothing-there.jsonl"], "nothing-there.jsonl"),
        (["demo", "--split", "0P2D"], "split"),
        (["demo", "--split", "many"], "many"),
        (["demo", "--agents", "0"], "agents must be at least 1, not 0"),
        (["demo", "--agents", "some"], "agents"),
        (["demo", "--duration", "0"], "duration must be above 0, not 0"),
        (["demo", "--duration", "inf"], "duration must be above 0, not inf"),
        (["demo", "--duration", "nan"], "duration must be above 0, not nan"),
        (["demo", "--warmup", "-1"], "warmup must be at least 0, not -1"),
        (["demo", "--max-pause", "-0.5"], "max-pause must be at least 0"),
        (["demo", "--arrivals", "0"], "arrivals must be above 0"),
        (["demo", "--arrivals", "1e9"], "arrivals of 1e+09 a minute are too many"),
        (["demo", "--capacity-scale", "0"], "capacity-scale must be above 0"),
        (["demo", "--page-size", "0"], "page-size must be 1 to 65536, not 0"),
        (["demo", "--page-size", "48"], "blocks of 64 tokens and pages of 48"),
        (["demo", "--seed", "-1"], "seed must be at least 0"),
        (["demo", "--router", "nobody"], "router"),
        (["demo", "--planner", "nobody"], "planner"),
        (["demo", "--eviction", "nobody"], "eviction"),
        (["demo", "--profile", "nothing"], "no timing profile 'nothing'; known: glm-5.2-4xgb300, tiny"),
        (["demo", "--no-such-flag", "1"], "no-such-flag"),
        (["demo", "--capacity-scale", "0.0001"], "room for"),
        (["4*putnam@60,@5"], "phase '@5'"),
        (["4*chess@60"], "no workload 'chess'"),
        (["4*putnam@0"], "must be above 0"),
        (["demo", "--report", "no/such/folder/report.json"], "no/such/folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    argv: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("evolving: ") and err.count("\n") == 1 and err.endswith("\n")
    assert said in err
    assert not list(tmp_path.iterdir())


def test_a_damaged_trace_is_said_with_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"id":"x","block_size":64\n')
    assert main([str(trace)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("evolving: ") and err.count("\n") == 1 and re.search(r"bad\.jsonl.*1", err)


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["--help"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    out = capsys.readouterr().out
    assert code == 0
    for name in SimulateSettings.__struct_fields__:
        assert name.replace("_", "-") in out or name in out


def test_a_run_of_the_demo_writes_a_report_of_a_replays_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    argv = ["demo", "--agents", "4", "--warmup", "30", "--duration", "60", "--report", str(path)]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert not err and "Simulation" in out and "simulated requests/s" in out and str(path) in out
    raw = msgspec.json.decode(path.read_bytes())
    assert list(raw) == list(Report.__struct_fields__)
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert report.requests > 10 and report.failed == 0 and not report.interrupted
    assert (report.duration_s, report.trace, report.trace_format) == (60.0, "demo", "Weka")
    assert report.req_per_s == pytest.approx(report.requests / 60.0)
    assert report.kv_hit_rate is not None and report.ideal_hit_rate is not None
    assert 0.3 < report.kv_hit_rate <= report.ideal_hit_rate <= 1.0
    assert report.lost_kv_reuse == pytest.approx(1 - report.kv_hit_rate / report.ideal_hit_rate)
    assert 0 < report.ttft_s.p50 <= report.ttft_s.p95 <= report.ttft_s.p99 < report.e2e_s.p99
    assert 0 < report.tpot_s.mean < 0.1
    assert report.settings["agents"] == 4 and report.settings["split"] == "2P2D" and report.sessions >= 4
    assert report.settings["page_size"] is None and report.settings["router"] == "ours"
    assert report.splits[-1][1:] == (2, 2) and report.wall_s > 0
    # Equal settings, equal report.
    assert main(argv) == 0
    again = msgspec.json.decode(path.read_bytes(), type=Report)
    assert msgspec.structs.replace(again, wall_s=0.0) == msgspec.structs.replace(report, wall_s=0.0)


def test_a_composition_shifts_and_its_first_phase_fills_the_warm_up() -> None:
    simulation, kind, requests = build(
        SimulateSettings(trace="3*putnam@100,1*putnam+2*osworld@50", warmup=30.0, duration=150.0)
    )
    assert (kind, requests) == ("generated", 0)
    assert [(shift.t, shift.agents) for shift in simulation.load.shifts] == [
        (0.0, {"putnam": 3}), (130.0, {"putnam": 1, "osworld": 2}),
    ]  # fmt: skip
    assert list(simulation.fleets) == ["osworld", "putnam"] and simulation.total_s == 180.0


def test_an_open_loop_has_arrivals_up_to_its_end_and_no_shifts() -> None:
    simulation, _, _ = build(
        SimulateSettings(trace="demo", arrivals=30.0, warmup=100.0, duration=500.0, seed=3)
    )
    times = simulation.load.arrivals_s
    assert not simulation.load.shifts and list(times) == sorted(times)
    assert times[0] >= 0 and 500 < times[-1] < 600 and 200 < len(times) < 400


def test_a_workload_by_name_has_sessions_without_end() -> None:
    simulation, kind, _ = build(SimulateSettings(trace="osworld", agents=3, max_pause=0.0))
    assert kind == "generated" and simulation.load.max_pause_s is None
    assert [(shift.t, shift.agents) for shift in simulation.load.shifts] == [(0.0, {"agents": 3})]


def test_without_a_duration_a_trace_is_played_once_and_a_workload_for_an_hour() -> None:
    for trace, measure_s in (("demo", None), ("osworld", 3600.0), ("2*osworld@60", 3600.0)):
        simulation, _, requests = build(SimulateSettings(trace=trace, agents=2))
        assert simulation.load.measure_s == measure_s
    assert requests == 0


def test_a_profile_of_another_size_has_whole_pages() -> None:
    assert sized(TINY, None, 1.0) == TINY
    half = sized(TINY, 48, 0.5)
    assert (half.page_size, half.l1_tokens, half.l2_tokens, half.chunk_tokens) == (
        48,
        85 * 48,
        341 * 48,
        5 * 48,
    )
    smallest = sized(GLM_52_4XGB300, 65_536, 1e-6)
    assert smallest.l1_tokens == smallest.l2_tokens == smallest.chunk_tokens == 65_536


def test_a_trace_that_is_played_once_is_measured_whole_and_memory_is_what_was_asked_for():
    once, _, _ = build(SimulateSettings(trace="demo", l1_tokens=6400, l2_tokens=12_900))
    assert (once.load.warmup_s, once.load.measure_s) == (0.0, None)
    node = next(iter(once.cluster.nodes.values()))
    assert (node.cache.l1_pages, node.cache.l2_pages) == (100, 202)
    again, _, _ = build(SimulateSettings(trace="demo", duration=100.0))
    assert (again.load.warmup_s, again.load.measure_s) == (1800.0, 100.0)
