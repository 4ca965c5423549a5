"""The one clock of a cluster.

Cluster time is wall time since 2026-01-01 times the cluster's speed-up, so a simulated cluster that runs 20
times faster than its model sees the model's seconds everywhere: queues, planner windows, fetch times. With
speed-up 1 (any real engine) cluster seconds are wall seconds. Within a process the clock never goes back;
between hosts it is as close as their wall clocks. Network timeouts and leases stay in wall seconds.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

EPOCH_S = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


class Clock:
    def __init__(self, speedup: float = 1.0) -> None:
        if speedup <= 0:
            raise ValueError(f"speed-up must be above 0, not {speedup}")
        self.speedup = speedup
        self._offset = time.time() - EPOCH_S - time.monotonic()

    def now(self) -> float:
        """Cluster seconds."""
        return (time.monotonic() + self._offset) * self.speedup

    def wall_s(self, cluster_s: float) -> float:
        """Wall seconds of a span of cluster seconds."""
        return cluster_s / self.speedup

    def wall_time(self, t: float) -> float:
        """Unix time of the cluster time `t`."""
        return t / self.speedup + EPOCH_S
