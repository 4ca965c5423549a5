"""What a benchmark must keep to."""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    name: str
    value: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit
