"""`evolving simulate`: what would a trace do on N nodes? Settings in, the replay's report out.

Exit codes: 0 all well; 2 it could not be done, said in one line; 130 interrupted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from loadtest.command import installed_version, trace_path
from loadtest.formats import read_trace
from loadtest.outcome import carried_out
from loadtest.profiles import load_profile
from loadtest.report import (
    Report,
    Setting,
    check_writable,
    percent,
    print_report,
    seconds,
    share,
    spread,
    write_report,
)
from loadtest.simulate.run import (
    PLANNER_NAMES,
    ROUTER_NAMES,
    Load,
    Loadback,
    Result,
    Shift,
    Simulation,
    System,
    repeated,
)
from loadtest.traces import InnerT, Session
from loadtest.workloads.agents import WORKLOADS, Agents
from loadtest.workloads.arrivals import DayRhythm, arrivals
from loadtest.workloads.composition import parse_composition
from shared.config import Doc, load
from shared.split import parse_split
from shared.timing import Profile
from worker.kv.eviction import Eviction

RouterName = Literal[
    "ours", "round-robin", "cache-aware", "sticky", "dynamo", "dynamo-pool", "arrow", "thunder-agent"
]
PlannerName = Literal["ours", "static", "dynamo-1.5.1", "dynamo-1.6.1", "arrow"]
MOST_ARRIVALS = 1_000_000
GENERATED = "generated"  # the format of a workload
WARMUP_S = 1800.0
GENERATED_S = 3600.0  # of a workload without end, unless the settings say


class SimulateSettings(msgspec.Struct, kw_only=True):
    trace: Annotated[
        str,
        Doc(
            "trace file or folder, `demo`, a workload (claude-code, codex, osworld, putnam), or one that shifts:"
            " 288*putnam@3600,144*osworld@3600"
        ),
    ]
    agents: Annotated[int, Doc("agents at once; one that has finished is replaced")] = 8
    arrivals: Annotated[
        float | None, Doc("open loop: agents that come a minute, instead of `agents` at once")
    ] = None
    split: Annotated[str, Doc("prefill and decode nodes, and the first split of a planner")] = "2P2D"
    router: Annotated[RouterName, Doc("whose placement")] = "ours"
    planner: Annotated[PlannerName, Doc("whose planner")] = "ours"
    eviction: Annotated[Eviction, Doc("what host memory evicts first")] = "count"
    loadback: Annotated[
        Loadback, Doc("KV is loaded while a request queues (async) or in line with its prefill")
    ] = "async"
    warmup: Annotated[
        float | None,
        Doc(
            "seconds that are not measured; our planner learns in them (default: 1800; none for a trace played once)"
        ),
    ] = None
    duration: Annotated[
        float | None,
        Doc("seconds that are measured after these (default: a trace is played once, a workload for 3600)"),
    ] = None
    max_pause: Annotated[float, Doc("cap on the agents' pauses, seconds; 0: none")] = 30.0
    profile: Annotated[str, Doc("timing profile of a node")] = "glm-5.2-4xgb300"
    capacity_scale: Annotated[float, Doc("factor on the KV capacity of the profile")] = 1.0
    l1_tokens: Annotated[
        int | None, Doc("KV capacity of GPU memory, tokens (default: the profile's, scaled)")
    ] = None
    l2_tokens: Annotated[
        int | None, Doc("KV capacity of host memory, tokens (default: the profile's, scaled)")
    ] = None
    page_size: Annotated[
        int | None, Doc("tokens of a KV page; larger ones simulate faster (default: the profile's)")
    ] = None
    seed: Annotated[int, Doc("equal seeds give equal results")] = 0
    inner_t: Annotated[InnerT, Doc("what times inside Weka sub-agents count from")] = "spawn"
    report: Annotated[str, Doc("file for the report as JSON")] = ""

    def __post_init__(self) -> None:
        if self.agents < 1:
            raise ValueError(f"agents must be at least 1, not {self.agents}")
        for name, tokens in (("l1-tokens", self.l1_tokens), ("l2-tokens", self.l2_tokens)):
            if tokens is not None and tokens < 1:
                raise ValueError(f"{name} must be at least 1, not {tokens}")
        for name, value, least in (
            ("duration", self.duration, 1e-3), ("arrivals", self.arrivals, 1e-6), ("warmup", self.warmup, 0.0),
            ("max-pause", self.max_pause, 0.0), ("capacity-scale", self.capacity_scale, 1e-6),
        ):  # fmt: skip
            if value is not None and not least <= value < float("inf"):
                raise ValueError(
                    f"{name} must be above 0, not {value}"
                    if least
                    else f"{name} must be at least 0, not {value}"
                )
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, not {self.seed}")
        if self.page_size is not None and not 1 <= self.page_size <= 2**16:
            raise ValueError(f"page-size must be 1 to 65536, not {self.page_size}")
        parse_split(self.split)


def main(argv: Sequence[str]) -> int:
    return carried_out(lambda: _main(argv))


def _main(argv: Sequence[str]) -> None:
    settings = load(
        SimulateSettings,
        "simulate",
        argv,
        positional=("trace",),
        summary="Run a trace or workload on a simulated cluster, with this system's decisions or a baseline's.",
    )
    if settings.report:
        check_writable(settings.report)
    simulation, kind, sessions = build(settings)
    console = Console()
    result = _run(simulation, console)
    report = report_of(settings, simulation, result, kind, sessions)
    print_report(report, console, title="Simulation")
    wrong = result.mispredicted
    console.print(
        f"{result.requests / result.wall_s:,.0f} simulated requests/s; queue before prefill"
        f" {seconds(spread(result.queue_s).mean)} in the mean"
        + (f"; {percent(wrong)} of the predicted TTFTs off by more than 20 % + 50 ms" if wrong is not None else ""),
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    if settings.report:
        write_report(settings.report, report)
        console.print(f"report written to {settings.report}", soft_wrap=True, highlight=False)


def build(settings: SimulateSettings) -> tuple[Simulation, str, int]:
    """The simulation, the format of its trace, and how many requests that has (0: without end)."""
    fleets, shifts, kind, requests = _workload(settings)
    once = kind != GENERATED and settings.duration is None and settings.arrivals is None
    warmup_s = settings.warmup if settings.warmup is not None else 0.0 if once else WARMUP_S
    times: tuple[float, ...] = ()
    if settings.arrivals is not None:
        total_s = warmup_s + (settings.duration or GENERATED_S)
        if settings.arrivals * total_s / 60 > MOST_ARRIVALS:
            raise ValueError(f"arrivals of {settings.arrivals:g} a minute are too many for {total_s:g} s")
        coming = arrivals(DayRhythm(automatic_per_min=settings.arrivals), settings.seed)
        times = tuple(a.t_s for a in itertools.takewhile(lambda a: a.t_s < total_s, coming))
        shifts = ()
    system = System(
        router=settings.router, planner=settings.planner, eviction=settings.eviction, loadback=settings.loadback,
        split=parse_split(settings.split),
        planner_settings={"warmup_s": WARMUP_S} if settings.planner == "ours" and settings.warmup is None else {},
    )  # fmt: skip
    asked = Load(
        shifts=shifts, arrivals_s=times, max_pause_s=settings.max_pause or None, warmup_s=warmup_s,
        measure_s=GENERATED_S if settings.duration is None and kind == GENERATED else settings.duration,
    )  # fmt: skip
    node = sized(
        load_profile(settings.profile),
        settings.page_size,
        settings.capacity_scale,
        settings.l1_tokens,
        settings.l2_tokens,
    )
    return Simulation(fleets, system, asked, node, seed=settings.seed), kind, requests


def _workload(
    settings: SimulateSettings,
) -> tuple[Mapping[str, Iterator[Session]], tuple[Shift, ...], str, int]:
    """Sessions by fleet, how many agents of each when, the format, and the requests of a file."""
    name, seed = settings.trace, settings.seed
    always = (Shift(0.0, {"agents": settings.agents}),)
    if Path(name).exists() or ("@" not in name and name not in WORKLOADS):
        trace = read_trace(trace_path(name), inner_t=settings.inner_t)
        once = settings.duration is None and settings.arrivals is None
        sessions = iter(trace.sessions) if once else repeated(trace, seed)
        return {"agents": sessions}, always, trace.format, trace.requests
    for workload in WORKLOADS:
        if workload == name:
            return {"agents": Agents(workload=workload, seed=seed).endless()}, always, GENERATED, 0
    composition = parse_composition(name)
    starts = composition.starts_s()
    # The first phase also fills the warm-up.
    shifts = tuple(
        Shift(
            (WARMUP_S if settings.warmup is None else settings.warmup) + start if start else 0.0,
            {str(w): n for w, n in phase.agents.items()},
        )
        for start, phase in zip(starts, composition.phases, strict=True)
    )
    used = sorted({workload for phase in composition.phases for workload in phase.agents})
    fleets = {str(w): Agents(workload=w, seed=seed).endless() for w in used}
    return fleets, shifts, GENERATED, 0


def sized(
    node: Profile,
    page_size: int | None = None,
    capacity_scale: float = 1.0,
    l1_tokens: int | None = None,
    l2_tokens: int | None = None,
) -> Profile:
    """A profile with another page size and capacity, in whole pages."""
    page = page_size or node.page_size

    def pages(tokens: float) -> int:
        return max(1, round(tokens / page)) * page

    return msgspec.structs.replace(
        node, page_size=page, chunk_tokens=pages(node.chunk_tokens), max_context=pages(node.max_context),
        l1_tokens=pages(l1_tokens or node.l1_tokens * capacity_scale),
        l2_tokens=pages(l2_tokens or node.l2_tokens * capacity_scale),
    )  # fmt: skip


def _run(simulation: Simulation, console: Console) -> Result:
    if not console.is_terminal:
        return simulation.run()
    columns = (
        TextColumn("simulate"), BarColumn(bar_width=24), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )  # fmt: skip
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("simulate", total=simulation.total_s, figures="")

        def draw(done_s: float) -> None:
            prefill, decode = simulation.cluster.split
            text = f"{done_s:,.0f} s, {simulation.result.requests:,} requests, {prefill}P{decode}D"
            bar.update(task, completed=done_s, figures=text)

        return simulation.run(draw)


def report_of(
    settings: SimulateSettings, simulation: Simulation, result: Result, kind: str, trace_requests: int
) -> Report:
    """The result in the form of a replay's."""
    measured = result.measured
    ideal = share(result.ideal_tokens, result.prompt_tokens)
    told: dict[str, Setting] = {
        name: value for name, value in msgspec.structs.asdict(settings).items() if isinstance(value, Setting)
    }
    return Report(
        requests=len(measured),
        failed=0,
        duration_s=result.measure_s,
        req_per_s=result.req_per_s,
        ttft_s=spread([m.ttft_s for m in measured]),
        tpot_s=spread([t for m in measured if (t := m.tpot_s) is not None]),
        e2e_s=spread([m.e2e_s for m in measured]),
        kv_hit_rate=share(result.cached_tokens, result.prompt_tokens),
        ideal_hit_rate=ideal,
        lost_kv_reuse=result.lost_reuse if ideal is not None else None,
        switches=result.switches,
        splits=list(result.splits),
        trace=settings.trace,
        settings=told,
        version=installed_version(),
        trace_format=kind,
        trace_requests=trace_requests,
        sessions=result.sessions,
        retries=0,
        failures={},
        prompt_tokens=result.prompt_tokens,
        output_tokens=sum(m.output_tokens for m in measured),
        cached_tokens=result.cached_tokens,
        wrong_lengths=0,
        interrupted=False,
        wall_s=result.wall_s,
    )


assert set(ROUTER_NAMES) == set(RouterName.__args__)  # type: ignore[attr-defined]
assert set(PLANNER_NAMES) == set(PlannerName.__args__)  # type: ignore[attr-defined]
