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
        l1, l2 = self._l1, self._l2
        for at, page in enumerate(path):
            if page not in l1 and page not in l2:
                return at
        return len(path)

    def pages(self, tier: Tier) -> list[int]:
        return list((self._l1 if tier is Tier.L1 else self._l2).pages)

    @property
    def l1_used(self) -> int:
        """Pages with KV in L1, pinned or not."""
        return len(self._l1)

    @property
    def l1_pinned(self) -> int:
        return self._l1.pinned_pages

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
        return self.l1_pages - self._l1.pinned_pages - self._room

    @property
    def l2_used(self) -> int:
        return len(self._l2)

    @property
    def l2_pinned(self) -> int:
        return self._l2.pinned_pages

    @property
    def l2_counted(self) -> int:
        """L2 pages with R > 0."""
        return self._l2.counted_pages

    def counted(self, tier: Tier) -> int:
        """Pages of the tier with R > 0."""
        if tier is Tier.L2:
            return self._l2.counted_pages
        return sum(1 for page in self._l1.pages if self._l2.is_counted(page))

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
        l1 = self._l1
        held = list(path[: self.held(path)])
        if not self._fits(held, total_pages):
            return None
        absent = [page for page in held if page not in l1]
        pinned = len(held) - len(absent)
        for page in held:
            if page in l1:
                l1.pin(page)
        self._make_room(total_pages - pinned)
        self._room += total_pages - len(held)
        self._enter_l1(absent)
        for page in absent:
            l1.pin(page)
        l1.touch_path(held)
        self._l2.touch_path([page for page in held if page in self._l2])
        return Lease(held, total_pages - len(held), len(absent))

    def _fits(self, held: Sequence[int], total_pages: int) -> bool:
        present = [page for page in held if page in self._l1]
        unpinned = sum(1 for page in present if not self._l1.is_pinned(page))
        return total_pages - len(present) <= self.l1_available - unpinned

    def write(self, lease: Lease, pages: Sequence[int]) -> None:
        """The next pages of the lease's path have KV now, in its room.

        A page that another request wrote meanwhile is shared and its room given back. Raises ValueError when
        the lease has less room.
        """
        if len(pages) > lease.room:
            raise ValueError(f"{len(pages)} pages do not fit into a lease with room for {lease.room}")
        lease.room -= len(pages)
        self._room -= len(pages)
        self._enter_l1([page for page in dict.fromkeys(pages) if page not in self._l1])
        for page in pages:
            self._l1.pin(page)
        lease.pages.extend(pages)

    def release(self, lease: Lease) -> None:
        """Give up pins and room; pages stay held until evicted. A second release does nothing."""
        for page in reversed(lease.pages):
            self._l1.unpin(page)
        self._l2.touch_path([page for page in lease.pages if page in self._l2])
        self._room -= lease.room
        lease.pages, lease.room = [], 0

    def _make_room(self, pages: int) -> None:
        """Evict until `pages` pages of L1 are free; there must be enough that may go."""
        gone: list[int] = []
        for _ in range(pages - self.l1_free):
            victim = self._l1.evict()
            assert victim is not None, "room was promised that pinned pages hold"
            gone.append(victim.page)
            self.evicted[Tier.L1, self._l2.is_counted(victim.page)] += 1
            if victim.page not in self._l2:
                self._l2.forget(victim.page)
        self._changed(False, Tier.L1, gone)

    def _enter_l1(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._l1.add(page)
        self._changed(True, Tier.L1, pages)
        self._enter_l2(pages)

    # ------------------------------------------------------------------------------ host memory

    def receive(self, pages: Sequence[int]) -> list[int]:
        """Pages pulled from a peer enter L2, pinned until `unpin_host`.

        Returns the leading pages that are pinned now: fewer when all of L2 is pinned.
        """
        self._l2.touch_path([page for page in pages if page in self._l2])
        self._enter_l2(pages)
        pinned: list[int] = []
        for page in pages:
            if page not in self._l2:
                break
            self._l2.pin(page)
            pinned.append(page)
        return pinned

    def unpin_host(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._l2.unpin(page)

    def _enter_l2(self, pages: Sequence[int]) -> None:
        new = [page for page in pages if page not in self._l2]
        fit = min(len(new), self.l2_pages - self._l2.pinned_pages)
        self.unwritten_pages += len(new) - fit
        new = new[:fit]
        gone: list[int] = []
        for _ in range(len(new) - (self.l2_pages - len(self._l2))):
            victim = self._l2.evict()
            if victim is None:
                break
            gone.append(victim.page)
            self.evicted[Tier.L2, victim.counted] += 1
            if victim.page not in self._l1:
                self._l2.forget(victim.page)
        self._changed(False, Tier.L2, gone)
        for page in reversed(new):
            self._l2.add(page)
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
