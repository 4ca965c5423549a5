"""Settings of a worker."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.config import Doc, Settings
from shared.messages import Phase
from shared.timing import Profile, profile
from worker.kv.eviction import Eviction


class WorkerSettings(Settings, kw_only=True):
    node: Annotated[str, Doc("id of the node; empty for HOST-PORT")] = ""
    model: Annotated[str, Doc("name of the served model")] = "glm-5.2"
    profile: Annotated[str, Doc("timing profile: a model on a node's hardware")] = "glm-5.2-4xgb300"
    phase: Annotated[Phase, Doc("phase until a role plan names the node")] = Phase.BOTH
    l1_tokens: Annotated[int, Doc("KV capacity of GPU memory in tokens, 0 for the profile's")] = 0
    l2_tokens: Annotated[int, Doc("KV capacity of host memory in tokens, 0 for the profile's")] = 0
    capacity_scale: Annotated[float, Doc("factor on both capacities")] = 1.0
    eviction: Annotated[
        Eviction,
        Doc(
            "order in which pages leave host memory: unreferenced pages first (count; count_lru, with plain LRU "
            "among the referenced), or lru"
        ),
    ] = "count"
    ttl_s: Annotated[float, Doc("wall seconds after which a silent node counts as gone")] = 3.0
    page_bytes: Annotated[
        int, Doc("bytes of a KV page in the arena: simulated KV is smaller than the model's")
    ] = 4096
    huge_pages: Annotated[bool, Doc("use huge pages for the arena when there are enough")] = True
    transport: Annotated[
        Literal["auto", "mooncake", "tcp"],
        Doc("how pages are read from peers; auto: Mooncake where there is RDMA"),
    ] = "auto"
    protocol: Annotated[
        Literal["auto", "tcp", "rdma"], Doc("what Mooncake runs over; auto: RDMA, if any")
    ] = "auto"
    rdma_devices: Annotated[str, Doc("RDMA devices for Mooncake, comma-separated; empty for all")] = ""
    transport_host: Annotated[str, Doc("address of the interface for KV; empty for the advertised host")] = ""
    peer_timeout_s: Annotated[float, Doc("wall seconds that a peer has to answer a question for pages")] = 1.0
    fetch_timeout_s: Annotated[float, Doc("wall seconds after which a fetch is given up")] = 10.0
    lend_share: Annotated[float, Doc("part of host memory that peers may have pinned at a time")] = 0.5
    grace_s: Annotated[float, Doc("wall seconds for running requests when the worker is told to stop")] = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.phase = Phase(self.phase)
        profile(self.profile)
        for name in ("l1_tokens", "l2_tokens", "grace_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        for name in ("capacity_scale", "peer_timeout_s", "fetch_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 64 <= self.page_bytes <= 2**26 or self.page_bytes % 8:
            raise ValueError(f"page_bytes must be a multiple of 8 from 64 to {2**26}, not {self.page_bytes}")
        if not 0 < self.lend_share <= 1:
            raise ValueError(f"lend_share must be above 0 and at most 1, not {self.lend_share}")
        if self.ttl_s < 1.5:
            raise ValueError(
                f"ttl_s must be at least 1.5, as the lease is renewed every second, not {self.ttl_s}"
            )
        if not self.model:
            raise ValueError("model must not be empty")
        if any(c in self.node for c in ": \t\n{}"):
            raise ValueError(f"node must be a name without braces, colons or blanks, not {self.node!r}")

    def hardware(self) -> Profile:
        """The profile with the capacities that were asked for, in whole pages (at least one each)."""
        base = profile(self.profile)

        def tokens(wanted: int) -> int:
            return max(1, round(wanted * self.capacity_scale) // base.page_size) * base.page_size

        l1_tokens = tokens(self.l1_tokens or base.l1_tokens)
        return msgspec.structs.replace(
            base,
            l1_tokens=l1_tokens,
            l2_tokens=tokens(self.l2_tokens or base.l2_tokens),
            # A longer request could never run.
            max_context=min(base.max_context, l1_tokens),
        )
