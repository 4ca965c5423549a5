"""`evolving reproduce NAME|all`: the paper's tables and figures from simulated runs.

Exit codes: 0 all well; 2 it could not be done, said in one line; 130 interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console

from loadtest.command import installed_version
from loadtest.outcome import carried_out
from loadtest.profiles import load_profile
from loadtest.reproduce.experiments import EXPERIMENTS
from loadtest.reproduce.plots import draw
from loadtest.reproduce.runner import Plan, carry_out, table
from shared.config import Doc, load

NAMES = ", ".join(EXPERIMENTS)


class ReproduceSettings(msgspec.Struct, kw_only=True):
    name: Annotated[str, Doc(f"a table or figure, or all: {NAMES}")]
    trace: Annotated[
        str, Doc("recorded Claude Code sessions in the Weka format (default: generated ones)")
    ] = ""
    out: Annotated[str, Doc("folder for tables, plots and JSON")] = "results"
    quick: Annotated[bool, Doc("ten simulated minutes a run, after five of warm-up")] = False
    seeds: Annotated[int, Doc("runs of each row, at other sessions of the trace")] = 1
    jobs: Annotated[int, Doc("runs at once (default: one a processor)")] = 0
    page_size: Annotated[int, Doc("tokens of a KV page; larger ones simulate faster")] = 512
    profile: Annotated[str, Doc("timing profile of a node, or a file that `evolving fit` wrote")] = (
        "glm-5.2-4xgb300"
    )

    def __post_init__(self) -> None:
        if self.name != "all" and self.name not in EXPERIMENTS:
            raise ValueError(f"no table or figure {self.name!r} is reproduced here; there are {NAMES}, all")
        for name, value in (("seeds", self.seeds), ("page-size", self.page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.jobs < 0:
            raise ValueError(f"jobs must be at least 0, not {self.jobs}")


def main(argv: Sequence[str]) -> int:
    return carried_out(lambda: _main(argv))


def _main(argv: Sequence[str]) -> None:
    settings = load(
        ReproduceSettings,
        "reproduce",
        argv,
        positional=("name",),
        summary="Reproduce the paper's tables and figures in simulation, beside its own figures.",
    )
    plan = Plan(
        trace=settings.trace, node=load_profile(settings.profile), page_size=settings.page_size,
        warmup_s=300.0 if settings.quick else 1800.0, measure_s=600.0 if settings.quick else 3600.0,
        seeds=settings.seeds, jobs=settings.jobs or len(os.sched_getaffinity(0)),
    )  # fmt: skip
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    _reproduce(settings, plan, folder, Console())


def _reproduce(settings: ReproduceSettings, plan: Plan, folder: Path, console: Console) -> None:
    def told(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    for name in EXPERIMENTS if settings.name == "all" else (settings.name,):
        experiment = EXPERIMENTS[name]
        told(f"{name}: {experiment.title}")
        outcomes = carry_out(experiment, plan, told)
        text = table(experiment, outcomes)
        told("\n" + text)
        (folder / f"{name}.md").write_text(text)
        record = {
            "name": name, "title": experiment.title, "source": experiment.source, "version": installed_version(),
            "settings": msgspec.structs.asdict(settings), "node": plan.node,
            "rows": [
                {"label": run.label, "system": run.system, "agents": run.agents, "per_min": run.per_min,
                 "paper": run.paper, "mean": outcome.mean, "seeds": outcome.seeds, "requests": outcome.requests}
                for run, outcome in zip(experiment.runs, outcomes, strict=True)
            ],
        }  # fmt: skip
        (folder / f"{name}.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
        )
        try:
            draw(experiment, outcomes, folder)
        except ImportError:
            told("no plots: pip install 'evolving-infra[loadtest]' for matplotlib")
