"""Settings of telemetry."""

from __future__ import annotations

from typing import Annotated

from shared.config import Doc, Settings


class TelemetrySettings(Settings, kw_only=True):
    slice_s: Annotated[float, Doc("cluster seconds of a slice of the planning window")] = 60.0
    grace_s: Annotated[float, Doc("wall seconds after its end at which a slice is closed")] = 1.0
    max_state_age_s: Annotated[float, Doc("wall seconds for which a node's last state stands")] = 5.0
    max_listeners: Annotated[int, Doc("live pages open at once; more are refused")] = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("slice_s", "max_state_age_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.grace_s < 0:
            raise ValueError(f"grace_s must be at least 0, not {self.grace_s}")
        if self.max_listeners < 1:
            raise ValueError(f"max_listeners must be at least 1, not {self.max_listeners}")
