"""How much of the router a key may use, and what all keys together may: buckets, places in flight, the line.

Rules that hold here
- No I/O and no clock: `now` is an argument, any wall seconds that go on steadily (`time.monotonic`), never cluster seconds.
- A refusal takes nothing: no slot, no request, no token. Everything that an admission took is given back once, by
  `Ticket.done`, whatever happened to its key meanwhile.
- What a key used belongs to its name: another limit, another hash (a rotation in place) or another tenant under
  the same name neither forgives nor repeats it.

Limits of a key
- Requests and tokens: a bucket of one minute's worth, refilled evenly. So any span of T seconds sees at most
  limit * (1 + T / 60). All prompt tokens count, also those whose KV is cached.
- A prompt is charged when its length is known, the output when it ended. Output may bring the bucket below zero, and
  so may a prompt longer than the bucket, which waits for a full one; then nothing goes until that is refilled.
- In flight: from `admit` to `done`, time in the waiting line included.

Limits of the router
- All requests in flight together, with room kept for what is more urgent: `SHARE`.
- What finds no room waits in a line of bounded length, in which the same shares hold: interactive first, within a
  priority in the order of arrival. Nothing overtakes its own priority or a higher one, so batch may wait as long as
  more urgent work keeps coming; the caller gives up with `done`.
"""

from __future__ import annotations

import math

from services.router.access import PRIORITIES, KeyEntry, Keys, Priority
from shared.openai import ApiError

# Percent of the router's places that requests of a priority may fill.
SHARE: dict[Priority, int] = {"interactive": 100, "normal": 95, "batch": 80}

# Nobody knows when a place will be free; requests take seconds.
_RETRY_FOR_A_PLACE_S = 1.0
_MICROS = 1_000_000
_UNIT = (
    60 * _MICROS
)  # of a bucket's level: one token. A microsecond refills `per_minute` units, so nothing is rounded.


class Bucket:
    """A budget of `per_minute`, refilled evenly, at most one minute's worth; 0 is no limit."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute * _UNIT
        self._t = round(now * _MICROS)

    def level(self, now: float) -> float:
        """What may be taken now; below zero after an overdraft."""
        self._refill(now)
        return self._level / _UNIT

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount`, or a full bucket if that is less, may be taken; 0 for now."""
        self._refill(now)
        lacking = min(amount, self.per_minute) * _UNIT - self._level
        return -(-lacking // self.per_minute) / _MICROS if lacking > 0 else 0.0

    def take(self, amount: int, now: float) -> None:
        """Take it, whether it is there or not."""
        self._refill(now)
        if self.per_minute:
            self._level -= amount * _UNIT

    def resize(self, per_minute: int, now: float) -> None:
        """Another limit from now on; what was used and is not yet refilled stays used."""
        self._refill(now)
        self._t = round(now * _MICROS)
        used = self.per_minute * _UNIT - self._level
        self.per_minute = per_minute
        self._level = per_minute * _UNIT - used if per_minute else 0

    def _refill(self, now: float) -> None:
        if not self.per_minute:
            return
        t = round(now * _MICROS)
        # A clock that was set back refills nothing, and goes on from there.
        gained = max(0, t - self._t) * self.per_minute
        self._level, self._t = min(self.per_minute * _UNIT, self._level + gained), t


class _Account:
    """What one key uses."""

    def __init__(self, entry: KeyEntry, now: float) -> None:
        self.entry = entry
        self.in_flight = 0
        self.requests = Bucket(entry.requests_per_minute, now)
        self.tokens = Bucket(entry.tokens_per_minute, now)

    def now_is(self, entry: KeyEntry, now: float) -> None:
        if entry is not self.entry:
            self.entry = entry
            self.requests.resize(entry.requests_per_minute, now)
            self.tokens.resize(entry.tokens_per_minute, now)

    def check(self, now: float) -> None:
        most = self.entry.max_in_flight
        if most and self.in_flight >= most:
            raise _refused(
                "too_many_in_flight",
                f"This API key may have {most} requests in flight.",
                _RETRY_FOR_A_PLACE_S,
            )
        wait_s = self.requests.wait_s(1, now)
        if wait_s:
            raise _refused(
                "rate_limit_requests",
                f"This API key may send {self.requests.per_minute} requests a minute.",
                wait_s,
            )
        self.check_tokens(1, now)

    def check_tokens(self, tokens: int, now: float) -> None:
        wait_s = self.tokens.wait_s(tokens, now)
        if wait_s:
            raise _refused(
                "rate_limit_tokens",
                f"This API key may use {self.tokens.per_minute} tokens a minute.",
                wait_s,
            )


def _refused(code: str, message: str, wait_s: float) -> ApiError:
    # Whole seconds, rounded up: a Retry-After has no others, and one that is too short earns a second refusal.
    retry_after_s = max(1, math.ceil(wait_s))
    return ApiError(
        429,
        f"{message} Try again in {retry_after_s} s.",
        type="rate_limit_error",
        code=code,
        retry_after_s=retry_after_s,
    )


class Ticket:
    """One admitted request. `waiting`: it has a place in the line, not yet one in flight."""

    def __init__(self, admission: Admission, account: _Account, priority: Priority, waiting: bool) -> None:
        self._admission, self._account = admission, account
        self.priority: Priority = priority
        self.waiting = waiting
        self.ended = False

    @property
    def position(self) -> int:
        """How many waiting requests go before this one; 0 when it does not wait."""
        return self._admission._ahead(self) if self.waiting else 0

    def charge_prompt(self, tokens: int, now: float) -> None:
        """Raises ApiError 429 `rate_limit_tokens`, and then takes nothing; the request counts until `done`."""
        self._account.check_tokens(tokens, now)
        self._account.tokens.take(tokens, now)

    def done(self, output_tokens: int, now: float) -> list[Ticket]:
        """The request is over, however it ended; a second call does nothing.

        Returns the waiting requests that are in flight from now on: the caller wakes them.
        """
        if self.ended:
            return []
        self.ended = True
        self._account.in_flight -= 1
        self._account.tokens.take(max(0, output_tokens), now)
        return self._admission._leave(self)


class Admission:
    """Who may begin, who waits, who is refused."""

    def __init__(self, max_in_flight: int, max_waiting: int = 0) -> None:
        """`max_waiting` 0: nobody waits, what finds no room is refused."""
        if max_in_flight < 1 or max_waiting < 0:
            raise ValueError("max_in_flight must be at least 1, max_waiting at least 0")
        self._max_in_flight, self._max_waiting = max_in_flight, max_waiting
        self._accounts: dict[str, _Account] = {}
        # One line a priority, in the order of arrival.
        self._lines: dict[Priority, dict[Ticket, None]] = {priority: {} for priority in PRIORITIES}
        self.in_flight = 0

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    def used_by(self, name: str) -> int:
        """Requests of a key, in flight and waiting."""
        account = self._accounts.get(name)
        return account.in_flight if account else 0

    def admit(self, entry: KeyEntry, now: float) -> Ticket:
        """Raises ApiError 429 with the code `too_many_in_flight`, `rate_limit_requests` or `rate_limit_tokens` for a
        limit of the key, `overloaded` for one of the router.
        """
        account = self._accounts.get(entry.name)
        if account is None:
            account = self._accounts[entry.name] = _Account(entry, now)
        account.now_is(entry, now)
        account.check(now)
        priority = entry.priority
        # Who waits is first in line without room, so its own priority and lower ones have none either.
        waits = not self._has_room(priority)
        if waits and self.waiting >= _places(self._max_waiting, priority):
            raise _refused(
                "overloaded",
                f"The router has as many {priority} requests as it takes.",
                _RETRY_FOR_A_PLACE_S,
            )
        ticket = Ticket(self, account, priority, waits)
        account.in_flight += 1
        account.requests.take(1, now)
        if waits:
            self._lines[priority][ticket] = None
        else:
            self.in_flight += 1
        return ticket

    def reloaded(self, keys: Keys) -> None:
        """Forget what keys that are gone used, unless requests of theirs are still on their way."""
        names = {entry.name for entry in keys.entries}
        for name in [n for n, a in self._accounts.items() if n not in names and not a.in_flight]:
            del self._accounts[name]

    def _has_room(self, priority: Priority) -> bool:
        return self.in_flight < _places(self._max_in_flight, priority)

    def _ahead(self, ticket: Ticket) -> int:
        urgent = PRIORITIES[: PRIORITIES.index(ticket.priority)]
        return sum(len(self._lines[p]) for p in urgent) + list(self._lines[ticket.priority]).index(ticket)

    def _leave(self, ticket: Ticket) -> list[Ticket]:
        if ticket.waiting:
            del self._lines[ticket.priority][ticket]
            ticket.waiting = False
            return []
        self.in_flight -= 1
        started = []
        # Urgent lines first: where one finds no room, those after it find none either, for their share is smaller.
        for priority, line in self._lines.items():
            while line and self._has_room(priority):
                first = next(iter(line))
                del line[first]
                first.waiting = False
                self.in_flight += 1
                started.append(first)
        return started


def _places(limit: int, priority: Priority) -> int:
    """Places of `limit` that a priority may fill: at least one, where there is any."""
    return max(min(limit, 1), limit * SHARE[priority] // 100)
