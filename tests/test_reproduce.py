"""The paper's tables from simulated runs: what is run, the tables' form, the files, and that outcomes repeat."""

from __future__ import annotations

import json

import msgspec
import pytest

from loadtest.reproduce import command
from loadtest.reproduce.experiments import EXPERIMENTS, Experiment, Run, ours, sglang
from loadtest.reproduce.figures import FIGURES
from loadtest.reproduce.runner import Outcome, Plan, carry_out, shown, table
from loadtest.simulate.run import PLANNER_NAMES, ROUTER_NAMES
from shared.timing import TINY

SMALL = Experiment(
    name="small",
    title="two systems",
    source="Table X",
    columns=("req/s", "P95 TTFT s"),
    runs=(
        Run(label="SGLang", system=sglang("1P1D"), agents=2, paper={"req/s": 2.5}),
        Run(label="this system", system=ours("1P1D", "static"), agents=2),
    ),
)


def plan(jobs: int = 1, seeds: int = 1) -> Plan:
    node = msgspec.structs.replace(TINY, l1_tokens=1_048_576, l2_tokens=4_194_304, max_context=1_048_576)
    return Plan(trace="", node=node, page_size=512, warmup_s=20.0, measure_s=60.0, seeds=seeds, jobs=jobs)


def test_every_experiment_runs_systems_that_there_are_and_shows_figures_that_there_are():
    for name, experiment in EXPERIMENTS.items():
        assert experiment.name == name and experiment.source and experiment.runs
        assert set(experiment.columns) <= set(FIGURES)
        labels = [run.label for run in experiment.runs]
        assert len(set(labels)) == len(labels)
        for run in experiment.runs:
            assert run.system.router in ROUTER_NAMES and run.system.planner in PLANNER_NAMES
            assert (run.agents > 0) != (run.per_min > 0)
            assert set(run.paper) <= set(FIGURES)


def test_the_papers_own_figures():
    """Golden values of arXiv:2611.12304: Table C.3, Table D.1 and Table D.4."""
    rows = {run.label: run for run in EXPERIMENTS["fig6-cc"].runs}
    assert rows["Dynamo, 126 agents"].paper["req/s"] == 2.14
    assert rows["this system, 108 agents"].paper["mean E2E s"] == 9.9
    assert [run.agents for run in rows.values()] == [112, 112, 135, 135, 158, 158]
    static = {run.label: run for run in EXPERIMENTS["tabD1"].runs}
    assert static["SGLang, 4P5D"].paper["P95 TTFT s"] == 19.5
    assert [run.paper["req/s"] for run in EXPERIMENTS["tabD4"].runs] == [4.66, 4.43, 6.27]
    larger = EXPERIMENTS["figD1"].runs
    assert [sum(run.system.split) for run in larger] == [9, 9, 16, 16, 32, 32, 64, 64]


def test_outcomes_repeat_whatever_runs_beside_them():
    one = carry_out(SMALL, plan())
    two = carry_out(SMALL, plan(jobs=2))
    assert [o.seeds for o in one] == [o.seeds for o in two]
    assert all(o.requests > 5 and o.mean["req/s"] > 0 for o in one)
    seeds = carry_out(SMALL, plan(seeds=2))
    assert seeds[0].seeds[0] == one[0].seeds[0] != seeds[0].seeds[1]


def test_a_table_sets_the_papers_figures_beside_ours():
    outcomes = [
        Outcome("SGLang", [{"req/s": 2.0, "P95 TTFT s": 10.0}, {"req/s": 3.0, "P95 TTFT s": 20.5}], 10, 1.0),
        Outcome("this system", [{"req/s": 4.25, "P95 TTFT s": 123.4}], 10, 1.0),
    ]
    lines = table(SMALL, outcomes).splitlines()
    assert lines[0] == "## small: two systems"
    assert lines[-2:] == ["| SGLang | 2.50 (2.50) | 15.2 |", "| this system | 4.25 | 123 |"]
    assert [shown(v) for v in (0.0, 0.123, 9.87, 12.34, 140.0)] == ["0", "0.12", "9.87", "12.3", "140"]


def test_the_command_writes_tables_plots_and_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(EXPERIMENTS, "small", SMALL)
    monkeypatch.setattr(command, "load_profile", lambda name: plan().node)
    argv = ["small", "--quick", "--jobs", "1", "--out", str(tmp_path)]
    assert command.main(argv) == 0
    assert "this system" in capsys.readouterr().out
    for kind in ("md", "json", "png", "svg"):
        assert (tmp_path / f"small.{kind}").stat().st_size > 100
    record = json.loads((tmp_path / "small.json").read_text())
    assert [row["label"] for row in record["rows"]] == ["SGLang", "this system"]
    assert record["settings"]["quick"] and record["rows"][0]["system"]["router"] == "cache-aware"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["nothing"], "no table or figure 'nothing' is reproduced here; there are fig3"),
        (["fig3", "--seeds", "0"], "seeds must be at least 1"),
        (["fig3", "--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["fig3", "--profile", "none"], "no timing profile 'none'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(argv, told, tmp_path, capsys):
    assert command.main([*argv, "--jobs", "1", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
