"""Open loop: when agents start, in the rhythm of a day (paper, sections 2.1 and D.3).

Rules that hold here
- Starts by users follow a workday: a sine over 24 hours around their mean. Starts by machines come at a flat
  rate. Both are Poisson processes, so is their sum; a rate alone is `DayRhythm(automatic_per_min=1.0)`.
- Times are seconds since the midnight before the first day; rates are agents a minute.
- By thinning: candidates come at the day's highest rate, each is an arrival with probability rate over highest
  rate. Equal rhythms, seeds and starts give equal arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

DAY_S = 86_400.0


class DayRhythm(msgspec.Struct, frozen=True, kw_only=True):
    """user_per_min, automatic_per_min: means over a day. swing: 0 for a flat day, 1 for a rate that falls to 0.
    peak_h: hour of the day with the most starts by users. Raises ValueError for values out of range."""

    user_per_min: float = 0.0
    automatic_per_min: float = 0.0
    swing: float = 0.8
    peak_h: float = 14.0

    def __post_init__(self) -> None:
        for name, value in (
            ("user_per_min", self.user_per_min),
            ("automatic_per_min", self.automatic_per_min),
        ):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0, not {value}")
        if not self.user_per_min + self.automatic_per_min > 0:
            raise ValueError("no agent ever arrives: both rates are 0")
        if not 0 <= self.swing <= 1:
            raise ValueError(f"swing must be 0 to 1, not {self.swing}")
        if not 0 <= self.peak_h < 24:
            raise ValueError(f"peak_h must be 0 to below 24, not {self.peak_h}")

    def rate_per_min(self, t_s: float) -> float:
        """Agents a minute at a time, users' and machines' together."""
        phase = 2 * math.pi * (t_s / DAY_S - self.peak_h / 24)
        return self.automatic_per_min + self.user_per_min * (1 + self.swing * math.cos(phase))

    @property
    def highest_per_min(self) -> float:
        return self.automatic_per_min + self.user_per_min * (1 + self.swing)


class Arrival(NamedTuple):
    t_s: float
    by_user: bool


def arrivals(rhythm: DayRhythm, seed: int, *, start_s: float = 0.0) -> Iterator[Arrival]:
    """Arrivals after `start_s`, in order, without end."""
    random = np.random.Generator(np.random.PCG64([seed, *b"arrivals"]))
    highest = rhythm.highest_per_min
    t_s = start_s
    while True:
        t_s += 60.0 * float(random.exponential(1 / highest))
        level = highest * float(random.random())
        if level < rhythm.rate_per_min(t_s):
            yield Arrival(t_s, by_user=level >= rhythm.automatic_per_min)
