"""A closed loop whose workloads shift in time (paper, section 6.3): phases of agents that run at once.

Rules that hold here
- A phase begins where the one before it ends; the first begins at 0. Times are seconds.
- In a phase an agent that finishes is replaced by a new one of its workload, as long as no more of it run than
  the phase says.
- Text form: phases with commas between, each `AGENTS*WORKLOAD+...@SECONDS`. The paper's run is
  `288*putnam@3600,144*putnam+72*osworld@3600,144*osworld@3600`. Spaces do not count. `str()` of a composition
  is its text form.
"""

from __future__ import annotations

import math
import re

import msgspec

from loadtest.workloads.agents import WORKLOADS, Workload


class CompositionError(Exception):
    """A text that is no composition; one line."""


class Phase(msgspec.Struct, frozen=True):
    """agents: how many of each workload run at once, at least 1 each."""

    duration_s: float
    agents: dict[Workload, int]

    def __str__(self) -> str:
        return "+".join(f"{n}*{name}" for name, n in self.agents.items()) + f"@{self.duration_s!r}"


class Composition(msgspec.Struct, frozen=True):
    """At least one phase."""

    phases: tuple[Phase, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.phases))

    @property
    def duration_s(self) -> float:
        return sum(phase.duration_s for phase in self.phases)

    def starts_s(self) -> list[float]:
        """When each phase begins."""
        starts, now_s = [], 0.0
        for phase in self.phases:
            starts.append(now_s)
            now_s += phase.duration_s
        return starts

    def at(self, t_s: float) -> Phase | None:
        """The phase at a time, which its first moment belongs to; None before the first and after the last."""
        for start_s, phase in zip(self.starts_s(), self.phases, strict=True):
            if start_s <= t_s < start_s + phase.duration_s:
                return phase
        return None


def parse_composition(text: str) -> Composition:
    """A composition from its text form. Raises CompositionError."""
    return Composition(tuple(_phase(part.strip()) for part in text.split(",")))


def _phase(text: str) -> Phase:
    mix, at, seconds = text.partition("@")
    if not at:
        raise CompositionError(f"phase {text!r} lacks its seconds: AGENTS*WORKLOAD+...@SECONDS")
    try:
        duration_s = float(seconds)
    except ValueError:
        raise CompositionError(f"phase {text!r}: {seconds.strip()!r} is not a number of seconds") from None
    if not 0 < duration_s < math.inf:
        raise CompositionError(f"phase {text!r}: its seconds must be above 0, not {seconds.strip()}")
    agents: dict[Workload, int] = {}
    for part in mix.split("+"):
        name, count = _share(part.strip(), text)
        if name in agents:
            raise CompositionError(f"phase {text!r} names {name} twice")
        agents[name] = count
    return Phase(duration_s, agents)


def _share(text: str, phase: str) -> tuple[Workload, int]:
    count, star, given = (part.strip() for part in text.partition("*"))
    if not star:
        raise CompositionError(f"phase {phase!r}: {text!r} is not AGENTS*WORKLOAD")
    if not re.fullmatch("[1-9][0-9]{0,8}", count):
        raise CompositionError(f"phase {phase!r}: {count!r} is not a number of agents, 1 or more")
    for name in WORKLOADS:
        if name == given:
            return name, int(count)
    raise CompositionError(f"phase {phase!r}: no workload {given!r} (there are {', '.join(WORKLOADS)})")
