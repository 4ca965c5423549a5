"""Which KV pages a node holds in GPU memory (L1) and host memory (L2), and for whom (section 4.2).

Rules that hold here
- Accounting only: pages are hashes (int64 as int), no bytes, no clock. Capacities are in pages.
- A request's KV lives in L1. Its `Lease` covers every page that it may need: held pages are pinned, the rest is
  room that `write` fills. pinned + free-to-evict + room + free = capacity at all times.
- Every page that enters L1 is written through to L2, unless everything there is pinned. L1 evicts by LRU, L2 by
  (1[R > 0], T): see `eviction.py`. A page in L2 only is held all the same; leasing it restores it to L1.
- Counts are the node's, not a tier's: the flag of a page survives the loss of one copy and goes with the last
  (line 20 of Algorithm E.2).
- Changes are queued in the order in which they happened, removals before what took their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse
from typing import NamedTuple

from shared.messages import Tier
from worker.kv.eviction import EvictionOrder


class KvChange(NamedTuple):
    """Pages that entered (`stored`) or left one tier."""

    stored: bool
    tier: Tier
    pages: list[int]


class Lease:
    """The L1 pages of one request: `pages` are pinned, in path order, `room` more are reserved for it."""

    __slots__ = ("cached_pages", "pages", "restored_pages", "room")

    def __init__(self, pages: list[int], room: int, restored_pages: int) -> None:
        self.pages = pages
        self.room = room
        self.cached_pages = len(pages)  # held when the lease was taken
        self.restored_pages = restored_pages  # of these, loaded from L2


class NodeCache:
    """Both tiers of one node."""

    def __init__(self, l1_pages: int, l2_pages: int, *, by_count: bool = True) -> None:
        if l1_pages < 1 or l2_pages < 0:
            raise ValueError(f"a node needs at least 1 page in L1 and 0 in L2, not {l1_pages} and {l2_pages}")
        self.l1_pages = l1_pages
        self.l2_pages = l2_pages
        self._l1 = EvictionOrder(by_count=False)
        self._l2 = EvictionOrder(by_count=by_count)
        self._room = 0
        self._changes: list[KvChange] = []
        self.evicted: dict[tuple[Tier, bool], int] = {(t, c): 0 for t in Tier for c in (False, True)}
        self.unwritten_pages = 0  # pages that could not be written through, all of L2 being pinned

    # ------------------------------------------------------------------------------ what is held

    def held(self, path: Sequence[int]) -> int:
        """Leading pages of the path that are in L1 or L2."""
        # Paths have thousands of pages: the usual case, all in L1, is left to C.
        on_gpu, in_host = self._l1.present.__contains__, self._l2.present.__contains__
        missing = next(filterfalse(on_gpu, path), None)
        if missing is None:
            return len(path)
        for at in range(path.index(missing), len(path)):
            if not on_gpu(path[at]) and not in_host(path[at]):
                return at
        return len(path)

    def read(self, path: Sequence[int]) -> int:
        """`held`, and an access of these pages in host memory: a peer is about to copy them."""
        held = self.held(path)
        self._touch_host(path[:held])
        return held

    def pages(self, tier: Tier) -> list[int]:
        return list((self._l1 if tier is Tier.L1 else self._l2).present)

    @property
    def l1_used(self) -> int:
        """Pages with KV in L1, pinned or not."""
        return len(self._l1)

    @property
    def l1_pinned(self) -> int:
        return len(self._l1.pins)

    @property
    def l1_room(self) -> int:
        """Pages reserved by leases and not written yet."""
        return self._room

    @property
    def l1_free(self) -> int:
        """Pages with nothing in them and reserved by nobody."""
        return self.l1_pages - len(self._l1) - self._room

    @property
    def l1_available(self) -> int:
        """Pages that a new lease may take: free ones and those that may be evicted."""
        return self.l1_pages - len(self._l1.pins) - self._room

    @property
    def l2_used(self) -> int:
        return len(self._l2)

    @property
    def l2_pinned(self) -> int:
        return len(self._l2.pins)

    @property
    def l2_counted(self) -> int:
        """L2 pages with R > 0."""
        return self._l2.counted_pages

    def counted(self, tier: Tier) -> int:
        """Pages of the tier with R > 0."""
        if tier is Tier.L2:
            return self._l2.counted_pages
        return sum(1 for page in self._l1.present if self._l2.is_counted(page))

    def take_changes(self) -> list[KvChange]:
        """The changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    # ------------------------------------------------------------------------------ leases

    def lease(self, path: Sequence[int], total_pages: int) -> Lease | None:
        """Pin the leading pages of `path` that are held, restoring those in L2 only, and reserve room so that
        the request has `total_pages` in all; None when L1 has no room now.

        Raises ValueError when `total_pages` is less than the path or can never fit.
        """
        if not len(path) <= total_pages <= self.l1_pages:
            raise ValueError(f"{total_pages} pages for a path of {len(path)}, of {self.l1_pages} in all")
        l1, pins = self._l1.present, self._l1.pins
        held = list(path[: self.held(path)])
        absent = list(filterfalse(l1.__contains__, held))
        taken = total_pages - len(held) + len(absent)
        unpinned = len(held) - len(absent) - sum(map(pins.__contains__, held))
        if taken > self.l1_available - unpinned:
            return None
        self._l1.pin_path(list(filter(l1.__contains__, held)) if absent else held)
        self._make_room(taken)
        self._room += total_pages - len(held)
        self._enter_l1(absent)
        self._l1.pin_path(absent)
        self._l1.touch_path(held)
        self._touch_host(held)
        return Lease(held, total_pages - len(held), len(absent))

    def write(self, lease: Lease, pages: Sequence[int]) -> None:
        """The next pages of the lease's path have KV now, in its room.

        A page that another request wrote meanwhile is shared and its room given back. Raises ValueError when
        the lease has less room.
        """
        if len(pages) > lease.room:
            raise ValueError(f"{len(pages)} pages do not fit into a lease with room for {lease.room}")
        lease.room -= len(pages)
        self._room -= len(pages)
        self._enter_l1(list(filterfalse(self._l1.present.__contains__, pages)))
        self._l1.pin_path(pages)
        lease.pages.extend(pages)

    def release(self, lease: Lease) -> None:
        """Give up pins and room; pages stay held until evicted. A second release does nothing."""
        self._l1.unpin_path(lease.pages)
        self._touch_host(lease.pages)
        self._room -= lease.room
        lease.pages, lease.room = [], 0

    def _make_room(self, pages: int) -> None:
        """Evict until `pages` pages of L1 are free; there must be enough that may go."""
        victims = self._l1.evict(max(0, pages - self.l1_free))
        host = self._l2.present
        for page, _ in victims:
            self.evicted[Tier.L1, self._l2.is_counted(page)] += 1
            if page not in host:
                self._l2.forget(page)
        self._changed(False, Tier.L1, [page for page, _ in victims])

    def _enter_l1(self, pages: Sequence[int]) -> None:
        self._l1.add_path(pages)
        self._changed(True, Tier.L1, pages)
        self._enter_l2(pages)

    # ------------------------------------------------------------------------------ host memory

    def receive(self, pages: Sequence[int]) -> list[int]:
        """Pages pulled from a peer enter L2, pinned until `unpin_host`.

        Returns the leading pages that are pinned now: fewer when all of L2 is pinned.
        """
        self._touch_host(pages)
        self._enter_l2(pages)
        host = self._l2.present
        absent = next((at for at, page in enumerate(pages) if page not in host), len(pages))
        pinned = list(pages[:absent])
        self._l2.pin_path(pinned)
        return pinned

    def unpin_host(self, pages: Sequence[int]) -> None:
        self._l2.unpin_path(pages)

    def _touch_host(self, path: Sequence[int]) -> None:
        self._l2.touch_path(list(filter(self._l2.present.__contains__, path)))

    def _enter_l2(self, pages: Sequence[int]) -> None:
        host = self._l2.present
        new = list(filterfalse(host.__contains__, pages))
        fit = min(len(new), self.l2_pages - len(self._l2.pins))
        self.unwritten_pages += len(new) - fit
        new = new[:fit]
        victims = self._l2.evict(max(0, len(new) - (self.l2_pages - len(host))))
        for page, counted in victims:
            self.evicted[Tier.L2, counted] += 1
            if page not in self._l1:
                self._l2.forget(page)
        self._changed(False, Tier.L2, [page for page, _ in victims])
        self._l2.add_path(new)
        self._changed(True, Tier.L2, new)

    # ------------------------------------------------------------------------------ counts

    def set_counts(self, positive: Iterable[int], zero: Iterable[int]) -> None:
        """See `EvictionOrder.set_counts`."""
        self._l2.set_counts(positive, zero)

    def set_all_counts(self, positive: Iterable[int]) -> None:
        """See `EvictionOrder.set_all_counts`."""
        self._l2.set_all_counts(positive)

    def _changed(self, stored: bool, tier: Tier, pages: Sequence[int]) -> None:
        if not pages:
            return
        last = self._changes[-1] if self._changes else None
        if last is not None and last.stored is stored and last.tier is tier:
            last.pages.extend(pages)
        else:
            self._changes.append(KvChange(stored, tier, list(pages)))
