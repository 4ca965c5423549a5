"""Settings of the router."""

from __future__ import annotations

from typing import Annotated

from shared.config import Doc, Settings


class RouterSettings(Settings, kw_only=True):
    max_state_age_s: Annotated[float, Doc("wall seconds after which a node's reported state is not used")] = (
        5.0
    )
    copy_s_per_token: Annotated[float, Doc("price of copying KV between nodes, seconds a token")] = 1e-6
    place_timeout_s: Annotated[float, Doc("wall seconds a request waits for a node that can take it")] = 30.0
    prefill_timeout_s: Annotated[float, Doc("wall seconds for one prefill, its queue included")] = 600.0
    stream_timeout_s: Annotated[float, Doc("wall seconds without a byte from the decode node")] = 120.0
    max_attempts: Annotated[int, Doc("nodes that one request is tried on, each phase")] = 5
    max_requests: Annotated[int, Doc("requests in flight; more are refused with 429")] = 4096
    branch_idle_s: Annotated[float, Doc("cluster seconds after which an idle branch is forgotten")] = 7200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_state_age_s", "place_timeout_s", "prefill_timeout_s", "stream_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("max_attempts", "max_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
