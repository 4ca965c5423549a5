"""A PD split: how many nodes prefill and how many decode, written as the paper writes it (6P3D)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from shared.messages import Phase


class Split(NamedTuple):
    """xPyD. Where it is a target, only the ratio counts once the number of nodes differs."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"

    def prefill_of(self, nodes: int) -> int:
        """Prefill count of `nodes` (at least 2) nearest to this ratio, ties to prefill; both phases get a node."""
        wanted = math.floor(nodes * self.prefill / (self.prefill + self.decode) + 0.5)
        return min(max(wanted, 1), nodes - 1)


HALVES = Split(1, 1)


def parse_split(text: str) -> Split:
    """ "6P3D" -> Split(6, 3). Raises ValueError."""
    found = re.fullmatch(r"\s*(\d{1,4})\s*[pP]\s*(\d{1,4})\s*[dD]\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is not a split; write it as 2P1D, prefill nodes first")
    split = Split(int(found[1]), int(found[2]))
    if split.prefill < 1 or split.decode < 1:
        raise ValueError(f"split {text!r} leaves a phase without a node")
    return split


def split_of(phases: Mapping[str, Phase]) -> Split:
    """Nodes of exactly one phase; those that serve both count in neither."""
    of = list(phases.values())
    return Split(of.count(Phase.PREFILL), of.count(Phase.DECODE))


def split_text(phases: Mapping[str, Phase]) -> str:
    """ "2P2D"; nodes that serve both are counted behind: "2P2D+1", or "4 collocated" when all do."""
    split = split_of(phases)
    both = len(phases) - split.prefill - split.decode
    if both and both == len(phases):
        return f"{both} collocated"
    return f"{split}+{both}" if both else str(split)
