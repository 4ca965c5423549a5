"""Settings of the planner. Times are cluster seconds; the defaults are the paper's (Appendix E.3)."""

from __future__ import annotations

from typing import Annotated

from services.planner.core import Rules
from shared.config import Doc, Settings
from shared.split import parse_split


class PlannerSettings(Settings, kw_only=True):
    initial_split: Annotated[
        str,
        Doc("split after the warm-up, such as 6P3D; a ratio when the nodes differ; empty for half and half"),
    ] = ""
    warmup_s: Annotated[float, Doc("cluster seconds in which every node serves both phases")] = 1800.0
    window_s: Annotated[float, Doc("cluster seconds of a planning window")] = 600.0
    slices: Annotated[int, Doc("slices of a planning window; telemetry measures them")] = 10
    skip_s: Annotated[float, Doc("cluster seconds after a change of the split that are not used")] = 120.0
    drain_timeout_s: Annotated[
        float, Doc("cluster seconds after which a node that has not switched is reported and told again")
    ] = 600.0
    automatic: Annotated[bool, Doc("change the split when another is certain to serve more")] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_split:
            parse_split(self.initial_split)
        if self.warmup_s < 0 or self.skip_s < 0:
            raise ValueError("warmup_s and skip_s must be at least 0")
        if self.window_s <= 0 or self.drain_timeout_s <= 0:
            raise ValueError("window_s and drain_timeout_s must be above 0")
        if not 2 <= self.slices <= 1000:
            raise ValueError(f"slices must be 2 to 1000, not {self.slices}")

    def rules(self) -> Rules:
        return Rules(
            initial=parse_split(self.initial_split) if self.initial_split else None,
            warmup_s=self.warmup_s,
            window_s=self.window_s,
            slices=self.slices,
            skip_s=self.skip_s,
            drain_timeout_s=self.drain_timeout_s,
            automatic=self.automatic,
        )
