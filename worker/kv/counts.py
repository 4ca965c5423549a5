"""Which pages of a node have R > 0, beyond the flags that its host memory keeps in the order of eviction.

Rules that hold here
- Counts are the node's, not a tier's: the flag of a page survives the loss of one copy and goes with the last
  (line 20 of Algorithm E.2). One that comes before its page is kept for it, the oldest of too many dropped first.
- Pages that a decode adds to a branch's path have the flag of the page that they follow, until the directory speaks of
  them (the branch's next request names them) or that page's count goes to zero: they are what that request reuses.
- `_follows` names only pages that lie in host memory, counted.
"""

from __future__ import annotations

import numpy as np

from shared.messages import PageArray
from worker.kv.pool import Flags, PagePool

ABSENT_LIMIT = 1_000_000


class CountFlags:
    """The flags of a node's pages; `host` is its host memory."""

    def __init__(self, host: PagePool) -> None:
        self._host = host
        self._absent: dict[int, None] = {}  # pages with R > 0 that host memory does not hold, oldest first
        # Pages that have their flag from another one, and those of each such other one.
        self._follows: dict[int, int] = {}
        self._followers: dict[int, list[int]] = {}

    @property
    def counted(self) -> int:
        """Pages of host memory with R > 0, as the directory says."""
        return self._host.order.counted_slots - len(self._follows)

    def of(self, pages: PageArray) -> Flags:
        """bool[n]: which of the pages have R > 0, wherever they lie."""
        slots = self._host.find(pages)
        counted = np.zeros(pages.size, dtype=np.bool_)
        held = slots >= 0
        counted[held] = self._host.order.is_counted(slots[held])
        counted[~held] = self._are_absent(pages[~held])
        return counted

    # ------------------------------------------------------------------------------ what the directory says

    def set(self, positive: PageArray, zero: PageArray) -> None:
        """Pages (int64[n]) whose count became positive, and zero."""
        self._let_go(zero)
        if self._follows:
            for page in self._concerned(positive):
                self._follows.pop(page, None)
        self._set_positive(positive)
        slots = self._host.find(zero)
        self._host.order.set_counted(slots[slots >= 0], False)
        self._forget_absent(zero[slots < 0])

    def set_all(self, positive: PageArray) -> None:
        """Exactly these pages have a positive count."""
        slots = self._host.find(positive)
        self._host.set_all_counted(slots[slots >= 0])
        self._follows.clear()
        self._followers.clear()
        self._absent.clear()
        self._keep_absent(positive[slots < 0])

    # ------------------------------------------------------------------------------ pages that come and go

    def entering(self, pages: PageArray) -> Flags:
        """bool[n]: the flags with which pages enter host memory."""
        counted = self._are_absent(pages)
        self._forget_absent(pages[counted])
        return counted

    def left_host(self, pages: PageArray, elsewhere: Flags) -> None:
        """Counted pages left host memory; `elsewhere`: which of them GPU memory still has."""
        own = np.fromiter((page not in self._follows for page in pages.tolist()), np.bool_, pages.size)
        self._keep_absent(pages[own & elsewhere])
        self._let_go(pages)

    def left_gpu(self, pages: PageArray) -> None:
        """Pages left GPU memory: the flags of those that were only there go with them."""
        if self._absent:
            self._forget_absent(pages[self._host.find(pages) < 0])

    def dropped(self, pages: PageArray) -> None:
        """Pages were taken out of host memory because their bytes had changed."""
        self._let_go(pages)

    def follow(self, page: int, pages: PageArray) -> None:
        """Count `pages` as `page` is, those of which the directory has not spoken."""
        if not self.of(np.array([page]))[0]:
            return
        page = self._follows.get(page, page)
        slots = self._host.find(pages)
        new = (slots >= 0).nonzero()[0]
        new = new[~self._host.order.is_counted(slots[new])]
        self._host.order.set_counted(slots[new], True)
        followers = pages[new].tolist()
        self._followers.setdefault(page, []).extend(followers)
        self._follows.update(dict.fromkeys(followers, page))

    # ------------------------------------------------------------------------------ inside

    def _set_positive(self, pages: PageArray) -> None:
        slots = self._host.find(pages)
        self._host.order.set_counted(slots[slots >= 0], True)
        self._keep_absent(pages[slots < 0])

    def _let_go(self, pages: PageArray) -> None:
        """The count of these pages is zero now, or they have left: what followed them is not counted any more."""
        if not self._follows:
            return
        gone: list[int] = []
        for page in self._concerned(pages):
            self._follows.pop(page, None)
            for follower in self._followers.pop(page, ()):
                if self._follows.get(follower) == page:
                    del self._follows[follower]
                    gone.append(follower)
        slots = self._host.find(np.array(gone, dtype=np.int64))
        self._host.order.set_counted(slots[slots >= 0], False)

    def _concerned(self, pages: PageArray) -> list[int]:
        """Those of the pages that follow or are followed: as a rule few of many."""
        listed = pages.tolist()
        return sorted(self._follows.keys() & listed | self._followers.keys() & listed)

    def _are_absent(self, pages: PageArray) -> Flags:
        absent = self._absent
        if not absent:
            return np.zeros(pages.size, dtype=np.bool_)
        return np.fromiter((page in absent for page in pages.tolist()), np.bool_, pages.size)

    def _forget_absent(self, pages: PageArray) -> None:
        for page in pages.tolist() if self._absent else ():
            self._absent.pop(page, None)

    def _keep_absent(self, pages: PageArray) -> None:
        for page in pages.tolist():
            self._absent[page] = None
            if len(self._absent) > ABSENT_LIMIT:
                del self._absent[next(iter(self._absent))]
