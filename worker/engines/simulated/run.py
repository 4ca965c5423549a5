"""Equal iterations that follow each other: passed over at once, cut short when something changes."""

from __future__ import annotations

from shared.messages import Iteration, Phase
from worker.engines.simulated.requests import Request

_LEAST_S = 1e-6  # an iteration takes time, whatever the profile says


class Run:
    """`count` iterations of `phase` from `start` on (cluster seconds), `done` of them over.

    Iteration i ends at start + i each_s, computed, not summed up, so that passing over several at once gives
    the same times as going one by one.
    """

    __slots__ = ("batch", "count", "done", "each_s", "phase", "record", "start", "taken")

    def __init__(
        self,
        phase: Phase,
        start: float,
        each_s: float,
        count: int,
        batch: list[Request],
        taken: list[int] | None = None,
        record: Iteration | None = None,
    ) -> None:
        self.phase = phase
        self.start = start
        self.each_s = max(each_s, _LEAST_S)
        self.count = count
        self.done = 0
        self.batch = batch
        self.taken = taken or []  # prefill: tokens computed for each request of the batch
        self.record = record  # prefill: what to report at its end

    def end_of(self, iterations: int) -> float:
        """When that many of the iterations have ended."""
        return self.start + iterations * self.each_s

    def over_at(self, now: float) -> int:
        """Iterations that have ended by `now`, at least `done`."""
        guess = min(self.count, int(max(0.0, now - self.start) / self.each_s) + 1)
        while guess > self.done and self.end_of(guess) > now:
            guess -= 1
        return max(guess, self.done)

    def cut_at(self, t: float) -> None:
        """End with the first iteration that ends at `t` or later; the one in flight always ends."""
        first = self.done + 1
        while first < self.count and self.end_of(first) < t:
            # Step near at once; further turns make up for rounding.
            first = max(first + 1, min(self.count, int((t - self.start) / self.each_s)))
        self.count = min(self.count, first)
