"""What a worker hears from the cluster: its phase, and the counts of its pages.

Rules that hold here
- No I/O and no clock: events and the time come in, calls on `Listener` and a wish for all counts come out.
- Counts are applied as they come, they are absolute. After a gap in their numbers, or with a producer that was
  not heard before, the whole set is asked for again, with growing pauses until it comes.
"""

from __future__ import annotations

from typing import Protocol

from shared.messages import CountsChanged, CountsFull, PageArray, Phase, RolePlan, unpack_pages
from shared.streams import Event

FIRST_ASK_S, LAST_ASK_S = 2.0, 30.0


class Listener(Protocol):
    def set_role(self, epoch: int, phase: Phase) -> None: ...

    def set_counts(self, positive: PageArray, zero: PageArray) -> None: ...

    def set_all_counts(self, positive: PageArray) -> None: ...


class Follower:
    """Reads the streams `roles` and `counts:<node>` for one node."""

    def __init__(self, node: str, listener: Listener) -> None:
        self._node = node
        self._listener = listener
        self._producer = ""
        self._seq = 0
        self._complete = False
        self._next_ask_s = 0.0
        self._pause_s = FIRST_ASK_S
        self.gaps = 0

    def feed(self, event: Event) -> None:
        message = event.message
        if isinstance(message, RolePlan):
            phase = message.phases.get(self._node)
            if phase is not None:
                self._listener.set_role(message.epoch, phase)
        elif isinstance(message, CountsFull):
            self._listener.set_all_counts(unpack_pages(message.positive))
            self._producer, self._seq, self._complete = event.producer, event.seq, True
            self._pause_s = FIRST_ASK_S
        elif isinstance(message, CountsChanged):
            if event.producer != self._producer or event.seq != self._seq + 1:
                if self._complete:
                    self.gaps += 1
                    self._next_ask_s = 0.0
                self._complete = False
            self._producer, self._seq = event.producer, event.seq
            self._listener.set_counts(unpack_pages(message.positive), unpack_pages(message.zero))

    def wants_counts(self, wall_s: float) -> bool:
        """Whether to ask the directory for all counts now; true once per pause until they come."""
        if self._complete or wall_s < self._next_ask_s:
            return False
        self._next_ask_s = wall_s + self._pause_s
        self._pause_s = min(LAST_ASK_S, self._pause_s * 2)
        return True
