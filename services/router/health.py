"""Whether a node is fit for new work: a circuit breaker fed by calls and probes.

Rules that hold here
- No I/O, no clock: `now` is an argument, in wall seconds.
- A node is `UP` until `FAILURES` failures in a row, then `DOWN`: it gets no work. After a pause that doubles with
  every failed trial it is on `TRIAL`: a probe may try it. `SUCCESSES` in a row bring it `UP` again.
- One failure of a call leaves the node out for `SUSPECT_S`, so that the retry goes elsewhere; a success ends that.
- A node that answers late is not one that fails: probes have a time limit of their own, and a single late one
  changes nothing.
"""

from __future__ import annotations

from enum import StrEnum

FAILURES = 3
SUCCESSES = 2
SUSPECT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class Fitness(StrEnum):
    UP = "up"
    DOWN = "down"
    TRIAL = "trial"


class Breaker:
    """One node's."""

    def __init__(self) -> None:
        self.fitness = Fitness.UP
        self._failures = 0
        self._successes = 0
        self._suspect_until = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._retry_at = 0.0

    def usable(self, now: float) -> bool:
        """Whether new work may go there."""
        if self.fitness is Fitness.DOWN and now >= self._retry_at:
            self.fitness, self._successes = Fitness.TRIAL, 0
        return self.fitness is Fitness.UP and now >= self._suspect_until

    def failed(self, now: float) -> bool:
        """A call or a probe failed. Whether the node went down with it."""
        self._successes = 0
        self._failures += 1
        self._suspect_until = now + SUSPECT_S
        if self.fitness is Fitness.UP and self._failures < FAILURES:
            return False
        went = self.fitness is Fitness.UP
        if self.fitness is Fitness.TRIAL:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.fitness, self._retry_at = Fitness.DOWN, now + self._pause_s
        return went

    def heard(self) -> None:
        """The node showed life otherwise: a trial need not wait for the pause's end."""
        if self.fitness is Fitness.DOWN:
            self.fitness, self._successes = Fitness.TRIAL, 0

    def succeeded(self) -> bool:
        """A call was answered, or a probe. Whether the node came up with it."""
        self._failures, self._suspect_until = 0, 0.0
        if self.fitness is Fitness.UP:
            return False
        self._successes += 1
        if self._successes < SUCCESSES:
            return False
        self.fitness, self._pause_s = Fitness.UP, FIRST_PAUSE_S
        return True
