"""What a replay has seen so far.

Times in `Measured` and `splits` are seconds of the trace; `last_end` is on the caller's own clock.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np

from loadtest.client import Cluster

RECENT_REQUESTS = 500


class Measured(msgspec.Struct, frozen=True):
    """One answered request. cached_tokens: None when the server does not say."""

    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    ideal_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Seconds of an output token after the first; None for an output of one."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class Progress(msgspec.Struct, frozen=True):
    """A replay at one moment. total: requests in all, None when the duration decides.
    ttft_p50_s: of the most recent requests."""

    done: int
    failed: int
    total: int | None
    elapsed_s: float
    duration_s: float | None
    req_per_s: float
    ttft_p50_s: float
    kv_hit_rate: float | None
    split: tuple[int, int] | None  # prefill, decode nodes


class Tally:
    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.failures: Counter[str] = Counter()
        self.wrong_lengths = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.ideal_tokens = 0
        self.splits: list[tuple[float, int, int]] = []
        self.switches = 0
        self._router_switches: int | None = None
        self.last_end = 0.0
        self._cached_tokens = 0
        self._cached_unknown = False
        self._phases: dict[str, str] = {}

    @property
    def cached_tokens(self) -> int | None:
        """None when an answer did not say, or there was none."""
        return self._cached_tokens if self.measured and not self._cached_unknown else None

    def answered(self, measured: Measured, as_asked: bool, at: float) -> None:
        """as_asked: whether prompt and output were as long as the trace's."""
        self.measured.append(measured)
        self.wrong_lengths += not as_asked
        self.prompt_tokens += measured.prompt_tokens
        self.output_tokens += measured.output_tokens
        self.ideal_tokens += measured.ideal_tokens
        self._cached_tokens += measured.cached_tokens or 0
        self._cached_unknown = self._cached_unknown or measured.cached_tokens is None
        self.last_end = at

    def failed(self, reason: str, at: float) -> None:
        self.failures[reason] += 1
        self.last_end = at

    def saw_cluster(self, cluster: Cluster, t_s: float) -> None:
        split = (cluster.split.get("prefill", 0), cluster.split.get("decode", 0))
        if not self.splits or self.splits[-1][1:] != split:
            self.splits.append((t_s, *split))
        if cluster.switches is not None:
            # The router sees every switch, also those between two looks. Fewer than before: it was restarted.
            last = self._router_switches if self._router_switches is not None else cluster.switches
            self.switches += cluster.switches - last if cluster.switches >= last else cluster.switches
            self._router_switches = cluster.switches
            return
        for node in cluster.nodes:
            # Leaving the collocated warm-up is no switch: only prefill to decode and back.
            if node.phase not in ("prefill", "decode"):
                continue
            self.switches += self._phases.get(node.node, node.phase) != node.phase
            self._phases[node.node] = node.phase

    def progress(self, *, total: int | None, elapsed_s: float, duration_s: float | None) -> Progress:
        recent = [m.ttft_s for m in self.measured[-RECENT_REQUESTS:]]
        cached = self.cached_tokens
        return Progress(
            done=len(self.measured) + self.failures.total(),
            failed=self.failures.total(),
            total=total,
            elapsed_s=elapsed_s,
            duration_s=duration_s,
            req_per_s=len(self.measured) / elapsed_s if elapsed_s > 0 else 0.0,
            ttft_p50_s=float(np.median(recent)) if recent else 0.0,
            kv_hit_rate=cached / self.prompt_tokens if cached is not None else None,
            split=self.splits[-1][1:] if self.splits else None,
        )
