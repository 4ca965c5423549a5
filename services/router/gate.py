"""Who may begin a request now: `limits.Admission` with a clock, and with the waiting itself."""

from __future__ import annotations

import asyncio
import time

from services.router.access import KeyEntry
from services.router.limits import Admission, Ticket


class Gate:
    def __init__(self, max_in_flight: int, max_waiting: int) -> None:
        self.admission = Admission(max_in_flight, max_waiting)
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    def enter(self, key: KeyEntry) -> Ticket:
        """A place in flight, or in line. Raises ApiError 429 when a limit is reached or the line is full."""
        ticket = self.admission.admit(key, time.monotonic())
        if ticket.waiting:
            self._waiting[ticket] = asyncio.get_running_loop().create_future()
        return ticket

    async def turn(self, ticket: Ticket) -> None:
        """Wait for the place in flight. Whoever gives up has to `leave`."""
        waiting = self._waiting.get(ticket)
        if waiting is not None:
            await waiting

    def charge(self, ticket: Ticket, tokens: int) -> None:
        """Raises ApiError 429 when the key has used up its tokens."""
        ticket.charge_prompt(tokens, time.monotonic())

    def leave(self, ticket: Ticket, output_tokens: int) -> None:
        """The request is over; a second call does nothing."""
        self._waiting.pop(ticket, None)
        for started in ticket.done(output_tokens, time.monotonic()):
            turn = self._waiting.pop(started, None)
            if turn is not None and not turn.done():
                turn.set_result(None)
