"""Settings of the directory."""

from __future__ import annotations

from typing import Annotated

from shared.config import Doc, Settings


class DirectorySettings(Settings, kw_only=True):
    lease_ttl_s: Annotated[
        float, Doc("wall seconds after which a stand-by takes over from a dead leader")
    ] = 2.0
    branch_idle_s: Annotated[float, Doc("cluster seconds after which an idle branch is taken as ended")] = (
        7200.0
    )
    node_grace_s: Annotated[
        float, Doc("wall seconds that a node may be missing from the registry before its counts go")
    ] = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lease_ttl_s < 0.1:
            raise ValueError(f"lease_ttl_s must be at least 0.1, not {self.lease_ttl_s}")
        if self.branch_idle_s <= 0 or self.node_grace_s < 0:
            raise ValueError("branch_idle_s must be above 0 and node_grace_s at least 0")
