"""Which page a node evicts next (section 5.3; EvictHost of Algorithm E.2).

Rules that hold here
- Pages leave in ascending order of (1[R > 0], T): pages that no active branch references first, the least
  recently used first within each group. R > 0 is a flag per page, set by `set_counts` and `set_all_counts`.
- T is a logical time: every access gets a number of its own. A path is touched from its last page to its
  first, so of one path the deeper pages leave first and what stays is a prefix.
- A pinned page never leaves. The end of a pin is an access.
- A flag may come before its page does: it is kept for `absent_limit` absent pages, the oldest dropped first.
- With `by_count=False` flags are ignored: plain LRU.

Each group is a heap of (T at push, page) that is put right when an entry reaches the top: an access is one
dictionary write, an eviction amortised O(log n), and a page whose flag changes keeps its place by T.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import filterfalse
from typing import NamedTuple

ABSENT_LIMIT = 1_000_000
_SLACK = 1024  # stale heap entries allowed before a rebuild, so that small heaps are not rebuilt often


class Victim(NamedTuple):
    page: int
    counted: bool  # the page had R > 0


class EvictionOrder:
    """The pages of one tier of one node in the order in which they would leave."""

    def __init__(self, *, by_count: bool = True, absent_limit: int = ABSENT_LIMIT) -> None:
        self._by_count = by_count
        self._absent_limit = absent_limit
        self._last: dict[int, int] = {}  # T of every present page
        self._pins: dict[int, int] = {}
        self._counted: set[int] = set()  # present pages with R > 0
        self._absent: dict[int, None] = {}  # absent pages with R > 0, oldest first
        # Every present, unpinned page has exactly one entry in its group's heap, with a key <= its T.
        self._heaps: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._queued: tuple[set[int], set[int]] = (set(), set())
        self._now = 0

    def __len__(self) -> int:
        return len(self._last)

    def __contains__(self, page: int) -> bool:
        return page in self._last

    @property
    def present(self) -> Mapping[int, int]:
        """T of every present page: a live view, to ask for many pages at the price of a dictionary."""
        return self._last

    @property
    def pins(self) -> Mapping[int, int]:
        """Number of pins of every pinned page: a live view."""
        return self._pins

    @property
    def counted_pages(self) -> int:
        """Present pages with R > 0."""
        return len(self._counted)

    @property
    def absent_counted(self) -> int:
        """Flags kept for pages that are not present."""
        return len(self._absent)

    def is_counted(self, page: int) -> bool:
        """Whether R > 0 for the page, present or not."""
        return page in self._counted or page in self._absent

    # ------------------------------------------------------------------------------ presence and access

    def add_path(self, path: Sequence[int]) -> None:
        """The pages are present from now on, accessed last page first; adding one again is an access."""
        if self._absent:
            for page in path:
                if page in self._absent:
                    del self._absent[page]
                    self._counted.add(page)
        self._access(path)
        self._enqueue(path)

    def remove(self, page: int) -> None:
        """The page is gone, pinned or not; its flag is kept as an absent page's. Raises KeyError when absent."""
        del self._last[page]
        self._pins.pop(page, None)
        if page in self._counted:
            self._counted.discard(page)
            self._keep_absent(page)

    def touch_path(self, path: Sequence[int]) -> None:
        """Access the pages of a path, last page first. All must be present."""
        self._access(path)

    def pin_path(self, path: Sequence[int]) -> None:
        """Keep present pages until as many `unpin_path`. Raises KeyError, and pins none, when one is absent."""
        pins = self._pins
        absent = next(filterfalse(self._last.__contains__, path), None)
        if absent is not None:
            raise KeyError(absent)
        for page in path:
            pins[page] = pins.get(page, 0) + 1

    def unpin_path(self, path: Sequence[int]) -> None:
        """End one pin of each page; where it was the last one that is an access, the path's last page first.

        Raises KeyError for a page that has none.
        """
        pins = self._pins
        free: list[int] = []
        for page in path:
            left = pins[page] - 1
            if left:
                pins[page] = left
            else:
                del pins[page]
                free.append(page)
        self._access(free)
        self._enqueue(free)

    def _access(self, path: Sequence[int]) -> None:
        first = self._now + 1
        self._now += len(path)
        self._last.update(zip(reversed(path), range(first, self._now + 1), strict=True))

    def evict(self, pages: int = 1) -> list[Victim]:
        """Take out the next pages to leave, in that order: fewer than `pages` when the rest is pinned."""
        victims: list[Victim] = []
        last, pins, counted, by_count = self._last, self._pins, self._counted, self._by_count
        for group in (0, 1):
            heap, queued = self._heaps[group], self._queued[group]
            while heap and len(victims) < pages:
                key, page = heap[0]
                newest = last.get(page)
                positive = page in counted
                if newest is None or page in pins or (by_count and positive) != bool(group):
                    heappop(heap)
                    queued.discard(page)
                elif key < newest:
                    heapreplace(heap, (newest, page))
                else:
                    heappop(heap)
                    queued.discard(page)
                    del last[page]
                    if positive:
                        counted.discard(page)
                        self._keep_absent(page)
                    victims.append(Victim(page, positive))
        return victims

    # ------------------------------------------------------------------------------ counts

    def set_counts(self, positive: Iterable[int], zero: Iterable[int]) -> None:
        """Pages whose count became positive, and zero."""
        for page in positive:
            self._set_positive(page)
        for page in zero:
            self._set_zero(page)

    def set_all_counts(self, positive: Iterable[int]) -> None:
        """Exactly these pages have a positive count."""
        wanted = set(positive)
        for page in [page for page in self._counted if page not in wanted]:
            self._set_zero(page)
        self._absent = {page: None for page in self._absent if page in wanted}
        for page in wanted:
            self._set_positive(page)

    def forget(self, page: int) -> None:
        """Drop the flag of an absent page."""
        self._absent.pop(page, None)

    def _set_positive(self, page: int) -> None:
        if page not in self._last:
            self._keep_absent(page)
        elif page not in self._counted:
            self._counted.add(page)
            self._enqueue((page,))

    def _set_zero(self, page: int) -> None:
        self._absent.pop(page, None)
        if page in self._counted:
            self._counted.discard(page)
            self._enqueue((page,))

    def _keep_absent(self, page: int) -> None:
        self._absent[page] = None
        if len(self._absent) > self._absent_limit:
            del self._absent[next(iter(self._absent))]

    # ------------------------------------------------------------------------------ heaps

    def _group(self, page: int) -> int:
        return 1 if self._by_count and page in self._counted else 0

    def _enqueue(self, pages: Sequence[int]) -> None:
        """Give present pages their entry, where they have none and are not pinned."""
        pins, last, counted, by_count = self._pins, self._last, self._counted, self._by_count
        for page in pages:
            group = 1 if by_count and page in counted else 0
            queued = self._queued[group]
            if page in queued or page in pins:
                continue
            queued.add(page)
            heappush(self._heaps[group], (last[page], page))
        for group in (0, 1):
            if len(self._heaps[group]) > 2 * len(last) + _SLACK:
                self._rebuild(group)

    def _rebuild(self, group: int) -> None:
        heap, queued = self._heaps[group], self._queued[group]
        heap[:] = [
            (last, page)
            for page, last in self._last.items()
            if page in queued and page not in self._pins and self._group(page) == group
        ]
        heapify(heap)
        queued.clear()
        queued.update(page for _, page in heap)
