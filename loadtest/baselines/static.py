"""A split that stays as it began. The best static split is the best of all of them on the same trace.

Rules that hold here
- Nothing moves.
"""

from __future__ import annotations

import msgspec

from loadtest.baselines.policy import ClusterView, KvAfterMove, Moves, Moving, Planner


class StaticSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """There is nothing to set."""


class Static(Planner):
    period_s = None
    moving = Moving(drains=True, out_s=(0.0, 0.0), kv=KvAfterMove.KEPT)

    def __init__(self, settings: StaticSettings | None = None) -> None:
        pass

    def decide(self, view: ClusterView, now: float) -> Moves | None:
        return None
