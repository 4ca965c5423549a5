"""Runs experiments, several at once in processes of their own, and keeps what came out.

Rules that hold here
- A run is a function of its settings, the trace and the seed. Its outcome does not depend on what runs beside it.
- Figures are means over the seeds; a seed says at which of the trace's sessions the agents begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import msgspec
import numpy as np

from loadtest.formats import read_trace
from loadtest.reproduce.experiments import Experiment, Run
from loadtest.reproduce.figures import figures_of
from loadtest.simulate.command import sized
from loadtest.simulate.run import Load, Shift, Simulation, repeated
from loadtest.traces import Session, Trace
from loadtest.workloads.agents import Agents
from loadtest.workloads.arrivals import DayRhythm, arrivals
from shared.timing import Profile

MAX_PAUSE_S = 30.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How experiments are run. trace: a file, empty for generated Claude Code agents. Times are seconds."""

    trace: str
    node: Profile
    page_size: int
    warmup_s: float
    measure_s: float
    seeds: int
    jobs: int


class Outcome(msgspec.Struct, frozen=True):
    """One row's figures, of each seed."""

    label: str
    seeds: list[dict[str, float]]
    requests: int
    wall_s: float

    @property
    def mean(self) -> dict[str, float]:
        return {name: float(np.mean([one[name] for one in self.seeds])) for name in self.seeds[0]}


_traces: dict[str, Trace] = {}  # that this process has read


def _agents(plan: Plan, seed: int) -> Iterator[Session]:
    if not plan.trace:
        return Agents(workload="claude-code", seed=seed).endless()
    if plan.trace not in _traces:
        _traces[plan.trace] = read_trace(plan.trace)
    return repeated(_traces[plan.trace], seed)


def simulate(run: Run, plan: Plan, seed: int) -> tuple[dict[str, float], int, float]:
    """One run: its figures, its requests and its wall seconds."""
    system = run.system
    total_s = plan.warmup_s + plan.measure_s
    if system.planner.startswith("dynamo"):
        system = msgspec.structs.replace(system, planner_settings={"start_s": plan.warmup_s})
    times: tuple[float, ...] = ()
    # One after the other over half of the warm-up: their first prompts, computed at once, would be a load of their own.
    shifts = tuple(
        Shift(plan.warmup_s / 2 * number / run.agents, {"agents": number + 1}) for number in range(run.agents)
    )
    if run.per_min:
        coming = arrivals(DayRhythm(automatic_per_min=run.per_min), seed)
        times = tuple(a.t_s for a in itertools.takewhile(lambda a: a.t_s < total_s, coming))
        shifts = ()
    load = Load(
        shifts=shifts,
        arrivals_s=times,
        max_pause_s=MAX_PAUSE_S,
        warmup_s=plan.warmup_s,
        measure_s=plan.measure_s,
    )
    node = sized(plan.node, plan.page_size)
    result = Simulation({"agents": _agents(plan, seed)}, system, load, node, seed=seed).run()
    return figures_of(result), result.requests, result.wall_s


def carry_out(
    experiment: Experiment, plan: Plan, told: Callable[[str], None] = lambda text: None
) -> list[Outcome]:
    """All rows of an experiment, in its order. `told` hears of every run that has ended."""
    work = [(number, seed) for number in range(len(experiment.runs)) for seed in range(plan.seeds)]
    found: dict[tuple[int, int], tuple[dict[str, float], int, float]] = {}
    if plan.jobs == 1:
        for number, seed in work:
            found[number, seed] = simulate(experiment.runs[number], plan, seed)
            told(_line(experiment.runs[number], found[number, seed]))
    else:
        with ProcessPoolExecutor(plan.jobs) as pool:
            running = {pool.submit(simulate, experiment.runs[n], plan, seed): (n, seed) for n, seed in work}
            for future in as_completed(running):
                number, seed = running[future]
                found[number, seed] = future.result()
                told(_line(experiment.runs[number], found[number, seed]))
    outcomes = []
    for number, run in enumerate(experiment.runs):
        mine = [found[number, seed] for seed in range(plan.seeds)]
        outcomes.append(
            Outcome(
                run.label,
                [figures for figures, _, _ in mine],
                sum(m[1] for m in mine),
                sum(m[2] for m in mine),
            )
        )
    return outcomes


def _line(run: Run, found: tuple[dict[str, float], int, float]) -> str:
    figures, requests, wall_s = found
    return (
        f"{run.label}: {figures['req/s']:.2f} req/s, mean E2E {figures['mean E2E s']:.1f} s, P95 TTFT"
        f" {figures['P95 TTFT s']:.1f} s ({requests:,} requests in {wall_s:.0f} s)"
    )


def shown(value: float) -> str:
    return (
        f"{value:.0f}"
        if value >= 100 or value == int(value)
        else f"{value:.2f}"
        if value < 10
        else f"{value:.1f}"
    )


def table(experiment: Experiment, outcomes: Sequence[Outcome]) -> str:
    """Markdown: each figure as simulated, the paper's behind it in brackets."""
    lines = [f"## {experiment.name}: {experiment.title}", "", f"{experiment.source}. Simulated (paper).", ""]
    lines.append("| | " + " | ".join(experiment.columns) + " |")
    lines.append("|---|" + "---:|" * len(experiment.columns))
    for run, outcome in zip(experiment.runs, outcomes, strict=True):
        mean = outcome.mean
        cells = []
        for column in experiment.columns:
            paper = f" ({shown(run.paper[column])})" if column in run.paper else ""
            cells.append(f"{shown(mean[column])}{paper}")
        lines.append(f"| {run.label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
