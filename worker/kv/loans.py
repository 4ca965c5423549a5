"""Pages that peers are reading: pinned for a bounded time.

Rules that hold here
- No I/O and no clock: times are seconds that the caller's clock shows.
- A loan pins pages until it is ended or its time is over, whichever comes first. A peer that dies costs pins for that
  long and no longer.
- At most `most_pages` pins are out on loan: eviction always finds something. A loan is cut to what is left of that, and
  refused when nothing is.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

from shared.messages import PageArray
from worker.kv.cache import NodeCache
from worker.kv.path import Path, Slots

MOST_HOLD_S = 30.0


class TooManyLoans(Exception):
    """So many pages are being read that no more may be pinned; the text is one line."""


class Loan:
    """`slots`: intp[n] of the arena, -1 for pages that are gone; all from the first one on that is not held.

    They are fewer than asked for, `cut`, when no more may be on loan now.
    """

    __slots__ = ("cut", "lent", "number", "pages", "slots", "until")

    def __init__(
        self, number: int, pages: PageArray, slots: Slots, lent: Slots, until: float, *, cut: bool
    ) -> None:
        self.pages = pages  # those that are lent
        self.number = number
        self.cut = cut
        self.slots = slots
        self.lent = lent
        self.until = until


class Loans:
    def __init__(self, cache: NodeCache, most_pages: int) -> None:
        self._cache = cache
        self._most_pages = most_pages
        self._numbers = itertools.count(1)
        self._loans: OrderedDict[int, Loan] = OrderedDict()
        self.pages = 0  # on loan now
        self.expired = 0  # loans whose time ran out
        self.refused = 0

    def __len__(self) -> int:
        return len(self._loans)

    def lend(self, path: Path, hold_s: float, now: float) -> Loan:
        """Pin the leading pages of `path` that are held for `hold_s`, at most MOST_HOLD_S. Raises TooManyLoans."""
        self.expire(now)
        left = self._most_pages - self.pages
        if left <= 0 < len(path):
            self.refused += 1
            raise TooManyLoans(f"{self.pages} pages are on loan, as many as may be")
        slots, lent = self._cache.lend(path[:left])
        until = now + min(hold_s, MOST_HOLD_S)
        pages = path.pages[: lent.size]
        loan = Loan(next(self._numbers), pages, slots, lent, until, cut=left < len(path))
        self._loans[loan.number] = loan
        self.pages += lent.size
        return loan

    def end(self, number: int) -> Loan | None:
        """The loan, if there was such a one still."""
        loan = self._loans.pop(number, None)
        if loan is not None:
            self.pages -= loan.lent.size
            self._cache.end_loan(loan.lent)
        return loan

    def expire(self, now: float) -> None:
        """End the loans whose time is over."""
        for number in [number for number, loan in self._loans.items() if loan.until <= now]:
            self.expired += 1
            self.end(number)
