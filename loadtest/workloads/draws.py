"""Random lengths and pauses.

Rules that hold here
- A draw depends on its numbers and on the generator's state only, bit for bit.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np


class Lognormal(msgspec.Struct, frozen=True):
    """plus + exp(normal(mu, sigma)), cut at `most`."""

    mu: float
    sigma: float
    plus: float = 0.0
    most: float = math.inf

    @classmethod
    def of_mean(cls, mean: float, sigma: float, plus: float = 0.0, most: float = math.inf) -> Lognormal:
        """`mean` is that of the lognormal alone, without `plus` and before the cut."""
        return cls(math.log(mean) - sigma**2 / 2, sigma, plus, most)

    @classmethod
    def of_median(cls, median: float, sigma: float, most: float = math.inf) -> Lognormal:
        return cls(math.log(median), sigma, 0.0, most)

    def draw(self, random: np.random.Generator) -> float:
        return min(self.most, self.plus + float(random.lognormal(self.mu, self.sigma)))


class Mixture(msgspec.Struct, frozen=True):
    """`rare` with probability `share`, else `common`."""

    share: float
    rare: Lognormal
    common: Lognormal

    def draw(self, random: np.random.Generator) -> float:
        return (self.rare if random.random() < self.share else self.common).draw(random)
