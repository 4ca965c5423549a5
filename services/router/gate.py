"""Who may begin a request now: `access.Admission` with a clock, and with the waiting itself."""

from __future__ import annotations

import asyncio
import time

from services.router.access import Admission, KeyEntry, Ticket


class Gate:
    def __init__(self, max_in_flight: int, max_waiting: int) -> None:
        self.admission = Admission(max_in_flight, max_waiting)
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    async def enter(self, key: KeyEntry) -> Ticket:
        """Wait for a place in flight. Raises ApiError 429 at once when a limit is reached or the line is full."""
        ticket = self.admission.admit(key, time.monotonic())
        if ticket.waiting:
            turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
            try:
                await turn
            except asyncio.CancelledError:
                self.leave(ticket, 0)
                raise
            finally:
                del self._waiting[ticket]
        return ticket

    def charge(self, ticket: Ticket, tokens: int) -> None:
        """Raises ApiError 429 when the key has used up its tokens."""
        ticket.charge_prompt(tokens, time.monotonic())

    def leave(self, ticket: Ticket, output_tokens: int) -> None:
        """The request is over; a second call does nothing."""
        for started in ticket.done(output_tokens, time.monotonic()):
            turn = self._waiting.get(started)
            if turn is not None and not turn.done():
                turn.set_result(None)
