"""Simulated time: calls in the order of their times, those of one time in the order in which they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timer:
    """A call to come. `cancel` takes it back."""

    __slots__ = ("args", "call")

    def __init__(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.call: Callable[..., object] | None = call
        self.args = args

    def cancel(self) -> None:
        self.call = None


class Loop:
    """`now` is in seconds of the simulated cluster, from 0 on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # calls made
        self._seq = 0
        self._heap: list[tuple[float, int, Timer]] = []

    def at(self, t: float, call: Callable[..., object], *args: Any) -> Timer:
        """Make the call at `t`, or now if that has passed."""
        timer = Timer(call, args)
        self._seq += 1
        heapq.heappush(self._heap, (t if t > self.now else self.now, self._seq, timer))
        return timer

    def after(self, seconds: float, call: Callable[..., object], *args: Any) -> Timer:
        return self.at(self.now + seconds, call, *args)

    def run(self, until: float) -> bool:
        """Make all calls up to `until`, where `now` is then. False when none is left before that."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            t, _, timer = heapq.heappop(heap)
            self.now = t
            if timer.call is not None:
                self.events += 1
                timer.call(*timer.args)
        self.now = max(self.now, until)
        return bool(heap)
