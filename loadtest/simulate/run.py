"""One simulated run: a workload, a cluster and a policy, from the first agent to the report.

Rules that hold here
- Equal settings give equal results, bit for bit: all that is drawn at random comes from generators of the seed.
- What ends in the warm-up is not measured. A request counts where it ends.
- h*, the ideal hit rate, is that of a cache without end that all nodes share, on the same requests in the order in
  which they were sent; lost KV reuse is 1 - h / h*.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec
import numpy as np

from loadtest.baselines.names import PLANNERS, ROUTERS, make_planner, make_router
from loadtest.baselines.policy import Planner, Router
from loadtest.simulate.agents import Agent, Fleet
from loadtest.simulate.cluster import Cluster
from loadtest.simulate.flight import Flight
from loadtest.simulate.knowledge import Delays
from loadtest.simulate.loop import Loop
from loadtest.simulate.ours import OurRouter
from loadtest.simulate.pages import PageNames
from loadtest.simulate.planning import OurPlanner
from loadtest.tally import Measured
from loadtest.traces import Session, StepRef, Trace
from shared.messages import PageArray, Phase
from shared.split import Split
from shared.timing import Profile
from worker.kv.eviction import Eviction

OURS = "ours"
ROUTER_NAMES = (OURS, *ROUTERS)
PLANNER_NAMES = (OURS, *PLANNERS)
Loadback = Literal["async", "inline"]
# In-line load-back of upstream SGLang: a longer gap between iterations, and the restored tokens' own time (D.6).
INLINE_GAP_S, INLINE_S_PER_TOKEN = 0.020, 1.5e-6


class System(msgspec.Struct, frozen=True, kw_only=True):
    """What serves: each part by name (see `loadtest/baselines`), `ours` for this system's own."""

    router: str = OURS
    planner: str = OURS
    eviction: Eviction = "count"
    loadback: Loadback = "async"
    split: Split = Split(6, 3)
    late_binding: bool = True  # of our router: the decode node is bound when the prefill starts
    pool: bool = True  # of our router: nodes fetch from each other
    router_settings: dict[str, object] = {}
    planner_settings: dict[str, object] = {}

    @property
    def counted(self) -> bool:
        """Whether there is a directory that counts."""
        return self.eviction != "lru"


class Shift(msgspec.Struct, frozen=True):
    """From `t` on (seconds, of the whole run), so many agents of each fleet at once."""

    t: float
    agents: dict[str, int]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. Closed loop: `shifts` say how many agents run at once, each replaced when it has finished. Open
    loop: agents of the one fleet come at `arrivals_s`, and none is replaced. Times are seconds."""

    shifts: tuple[Shift, ...] = ()
    arrivals_s: tuple[float, ...] = ()
    max_pause_s: float | None = 30.0
    warmup_s: float = 1800.0
    measure_s: float | None = 3600.0  # None: until the fleets have no session left


class Result(msgspec.Struct, kw_only=True):
    """What was measured. Times are seconds, of the simulated cluster unless they say wall."""

    measured: list[Measured] = []
    queue_s: list[float] = []  # from the placement to the start of the prefill
    t_end: list[float] = []
    predicted_s: list[
        float
    ] = []  # until the end of the prefill, as the router said when it placed the request
    prefill_s: list[float] = []  # and as it was, of the same requests
    measure_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ideal_tokens: int = 0
    switches: int = 0
    switch_s: list[float] = []  # drain included
    splits: list[tuple[float, int, int]] = []
    sessions: int = 0
    requests: int = 0  # in all, the warm-up's too
    events: int = 0
    wall_s: float = 0.0

    @property
    def req_per_s(self) -> float:
        return len(self.measured) / self.measure_s if self.measure_s else 0.0

    @property
    def mispredicted(self) -> float | None:
        """Part of the predictions that were off by more than 20 % + 50 ms; None when there were none."""
        predicted, seen = np.array(self.predicted_s), np.array(self.prefill_s)
        return float((np.abs(seen - predicted) > 0.2 * seen + 0.05).mean()) if predicted.size else None

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def ideal_hit_rate(self) -> float:
        return self.ideal_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def lost_reuse(self) -> float:
        return 1 - self.hit_rate / self.ideal_hit_rate if self.ideal_hit_rate else 0.0


def inline(profile: Profile) -> Profile:
    """The profile of an engine that loads back in line with the prefill."""
    prefill = msgspec.structs.replace(profile.prefill, c3=profile.prefill.c3 + INLINE_S_PER_TOKEN)
    return msgspec.structs.replace(profile, prefill=prefill, idle_gap_s=INLINE_GAP_S)


class Ideal:
    """A cache without end that all nodes share."""

    def __init__(self) -> None:
        self._held = np.zeros(1024, dtype=np.bool_)

    def leading(self, pages: PageArray, prompt_tokens: int, page_size: int) -> int:
        """Tokens of a prompt that are held as it is sent; its pages are from then on."""
        self._room(pages)
        held = self._held[pages]
        count = pages.size if held.all() else int(held.argmin())
        self._held[pages[count:]] = True
        return min(count, (prompt_tokens - 1) // page_size) * page_size

    def add(self, pages: PageArray) -> None:
        self._room(pages)
        self._held[pages] = True

    def _room(self, pages: PageArray) -> None:
        last = int(pages.max()) if pages.size else 0
        if last >= self._held.size:
            grown = np.zeros(max(2 * self._held.size, last + 1), dtype=np.bool_)
            grown[: self._held.size] = self._held
            self._held = grown


class Simulation:
    """`run` to the end; `done_s` says how far it is."""

    def __init__(
        self, fleets: Mapping[str, Iterator[Session]], system: System, load: Load, profile: Profile, *,
        seed: int = 0, delays: Delays | None = None,
    ) -> None:  # fmt: skip
        """`fleets`: by name, the sessions that agents of each play, without end.

        Raises ValueError for a policy that there is not, or settings that it does not have.
        """
        self.loop = Loop()
        self.system, self.load = system, load
        self.result = Result()
        self._names = PageNames(profile.page_size)
        self._ideal = Ideal()
        self._random = np.random.Generator(np.random.PCG64([seed, 1]))
        if system.loadback == "inline":
            profile = inline(profile)
        count = system.split.prefill + system.split.decode
        nodes = [f"n{number:03d}" for number in range(1, count + 1)]
        profiles = dict.fromkeys(nodes, profile)
        phases = {
            name: Phase.PREFILL if number < system.split.prefill else Phase.DECODE
            for number, name in enumerate(nodes)
        }
        planned = system.planner == OURS
        router: Router
        if system.router == OURS:
            router = OurRouter(profiles, late=system.late_binding, pool=system.pool)
        else:
            router = make_router(system.router, system.router_settings)
        self.cluster = Cluster(
            self.loop, self._names, profiles, dict.fromkeys(nodes, Phase.BOTH) if planned else phases, router,
            eviction=system.eviction, counted=system.counted, inline=system.loadback == "inline",
            delays=delays or Delays(), finished=self._finished,
        )  # fmt: skip
        self.cluster.on_switch = self._switched
        self._agents: dict[str, Agent] = {}
        self.fleets = {name: Fleet(sessions, self._agent, f"{name}-") for name, sessions in fleets.items()}
        if planned:
            self.planner = OurPlanner(
                self.loop,
                self.cluster,
                router,
                profiles,
                system.split,
                load.warmup_s,
                system.planner_settings,
            )
        else:
            self._baseline(make_planner(system.planner, system.planner_settings))
        self._watch()

    # ------------------------------------------------------------------------------ agents

    def _agent(self, session: Session, name: str) -> Agent:
        agent = Agent(name, session, self._names, self.loop, self, self.load.max_pause_s)
        self._agents[name] = agent
        return agent

    def request(self, agent: Agent, ref: StepRef) -> None:
        step = agent.session.branches[ref.branch].steps[ref.step]
        pages = agent.pages(ref)
        ideal = self._ideal.leading(pages.prompt, step.prompt_tokens, self._names.page_size)
        self.result.requests += 1
        self.cluster.request(agent, ref, ideal, pages)

    def branch_ended(self, branch: str) -> None:
        self.cluster.branch_ended(branch)

    def session_ended(self, agent: Agent) -> None:
        del self._agents[agent.name]
        self.cluster.session_ended(agent.name)
        self.fleets[agent.name.rpartition("-")[0]].ended(agent)

    def _finished(self, flight: Flight) -> None:
        result = self.result
        self._ideal.add(flight.pages.context)
        if flight.t_end >= self.load.warmup_s:
            result.measured.append(
                Measured(
                    flight.t_first - flight.t_arrive, flight.t_end - flight.t_arrive, flight.prompt_tokens,
                    flight.output_tokens, flight.cached_tokens, flight.ideal_tokens,
                )
            )  # fmt: skip
            result.queue_s.append(flight.t_prefill_start - flight.t_placed)
            result.t_end.append(flight.t_end)
            predicted_s = flight.placement.predicted_ttft_s if flight.placement is not None else None
            if predicted_s is not None:
                result.predicted_s.append(predicted_s)
                result.prefill_s.append(flight.t_prefill_end - flight.t_placed)
            result.prompt_tokens += flight.prompt_tokens
            result.cached_tokens += flight.cached_tokens
            result.ideal_tokens += flight.ideal_tokens
        self._told(flight)
        flight.agent.ended(flight.ref)

    def _told(self, flight: Flight) -> None:
        if self.system.planner == OURS:
            self.planner.finished(flight)

    # ------------------------------------------------------------------------------ baselines' planners

    def _baseline(self, planner: Planner) -> None:
        self.cluster.planner = planner
        if planner.period_s is not None:
            self.loop.after(planner.period_s, self._decide, planner, planner.period_s)

    def _decide(self, planner: Planner, period_s: float) -> None:
        moves = planner.decide(self.cluster, self.loop.now)
        if moves is not None:
            out_s = float(self._random.uniform(*planner.moving.out_s))
            self.cluster.move(moves, planner.moving, out_s)
        self.loop.after(period_s, self._decide, planner, period_s)

    def _switched(self, node: str, drain_s: float, out_s: float) -> None:
        if self.loop.now >= self.load.warmup_s:
            self.result.switches += 1
            self.result.switch_s.append(drain_s + out_s)

    def _watch(self) -> None:
        split = self.cluster.split
        splits = self.result.splits
        if not splits or splits[-1][1:] != split:
            splits.append((self.loop.now, *split))
        self.loop.after(1.0, self._watch)

    # ------------------------------------------------------------------------------ the run

    @property
    def total_s(self) -> float | None:
        """Simulated seconds of the whole run, None when that is not known beforehand."""
        return None if self.load.measure_s is None else self.load.warmup_s + self.load.measure_s

    def run(self, progress: Callable[[float], None] | None = None) -> Result:
        """To the end. `progress` is called now and then with the simulated seconds that have passed."""
        begun = time.perf_counter()
        for shift in self.load.shifts:
            for name, fleet in self.fleets.items():
                self.loop.at(shift.t, fleet.resize, shift.agents.get(name, 0))
        (first, *_) = self.fleets.values()
        for t in self.load.arrivals_s:
            self.loop.at(t, first.begin)
        total_s, result = self.total_s, self.result
        step_s = 10.0 if total_s is None else max(1.0, total_s / 200)
        while self.loop.now < total_s if total_s is not None else self._goes_on():
            now = self.loop.now + step_s
            self.loop.run(now if total_s is None else min(total_s, now))
            if progress is not None:
                progress(self.loop.now)
        end_s = total_s if total_s is not None else max(result.t_end, default=self.load.warmup_s)
        result.measure_s = end_s - self.load.warmup_s
        result.sessions = sum(fleet.begun for fleet in self.fleets.values())
        result.events = self.loop.events
        result.wall_s = time.perf_counter() - begun
        return result

    def _goes_on(self) -> bool:
        """Whether agents are at work, or will be."""
        last = max((*self.load.arrivals_s, *(shift.t for shift in self.load.shifts)), default=0.0)
        return self.loop.now <= last or any(fleet.running for fleet in self.fleets.values())


def repeated(trace: Trace, seed: int) -> Iterator[Session]:
    """The trace's sessions round and round, as `evolving replay` plays them; a seed above 0 begins at another one."""
    count = len(trace.sessions)
    first = 0 if not seed else int(np.random.Generator(np.random.PCG64([seed, 2])).integers(count))
    return (trace.sessions[(first + number) % count] for number in itertools.count())
