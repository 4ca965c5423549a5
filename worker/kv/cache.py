"""Which KV pages a node holds in GPU memory (L1) and host memory (L2), and for whom (section 4.2).

Rules that hold here
- No clock and no I/O. Capacities are in pages. Bytes are moved by a `KvMemory`; without one this is accounting only.
- A request's KV lives in L1. Its `Lease` covers every page that it may need: held pages are pinned, the rest is
  room that `write` and `load` fill. pinned + free-to-evict + room + free = capacity at all times.
- Every page that enters L1 is written through to L2, unless everything there is pinned; so is a page of a lease that
  ends, if L2 has lost it: it was used after what lies there. L1 evicts by LRU, L2 by
  in count order: see `eviction.py`. A page in L2 only is held all the same; leasing it restores it to L1.
- Pages from a peer enter L2: slots are reserved, written by the transport, and hold a page once it was checked.
- What does not agree with its checksum when it is restored is dropped and counts as not held.
- Which pages are counted is the business of `counts.py`.
- A prompt's tokens beyond its last full page are a *tail*: kept in L2 under a key of their own for the decode that
  follows, with count zero, and nobody is told of it.
- Changes are queued in the order in which they happened, removals before what took their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shared.messages import PageArray, Tier
from shared.pages import DIGEST_BYTES
from worker.kv.counts import CountFlags
from worker.kv.eviction import Eviction
from worker.kv.memory import KvMemory
from worker.kv.path import Path, Slots
from worker.kv.pool import DictIndex, Flags, PagePool, SlotIndex


class KvChange(NamedTuple):
    """Pages (int64[n]) that entered (`stored`) or left one tier."""

    stored: bool
    tier: Tier
    pages: PageArray


class Lease:
    """The L1 slots of one request: `slots` hold its leading pages and are pinned, `room` more are reserved for it."""

    __slots__ = ("_slots", "cached_pages", "pages", "restored_pages", "room")

    def __init__(self, slots: Slots, room: int, restored_pages: int) -> None:
        self._slots = np.empty(slots.size + room, dtype=np.intp)
        self._slots[: slots.size] = slots
        self.pages = slots.size
        self.room = room
        self.cached_pages = slots.size  # held when the lease was taken
        self.restored_pages = restored_pages  # loaded from L2 since

    @property
    def slots(self) -> Slots:
        return self._slots[: self.pages]

    def fill(self, slots: Slots) -> None:
        self._slots[self.pages : self.pages + slots.size] = slots
        self.pages += slots.size
        self.room -= slots.size


class NodeCache:
    """Both tiers of one node. The slots of L2 follow those of L1 in the arena."""

    def __init__(
        self,
        l1_pages: int,
        l2_pages: int,
        *,
        eviction: Eviction = "count",
        memory: KvMemory | None = None,
        index: Callable[[], SlotIndex] = DictIndex,
        key_bytes: int = DIGEST_BYTES,
    ) -> None:
        """`index`, `key_bytes`: of each tier's `PagePool`."""
        if l1_pages < 1 or l2_pages < 0:
            raise ValueError(f"a node needs at least 1 page in L1 and 0 in L2, not {l1_pages} and {l2_pages}")
        self.l1_pages = l1_pages
        self.l2_pages = l2_pages
        self._memory = memory
        self._l1 = PagePool(l1_pages, "lru", index(), key_bytes)
        self._l2 = PagePool(l2_pages, eviction, index(), key_bytes)
        self._room = 0
        self._counts = CountFlags(self._l2)
        self._changes: list[KvChange] = []
        self.evicted: dict[tuple[Tier, bool], int] = {(t, c): 0 for t in Tier for c in (False, True)}
        self.unwritten_pages = 0  # pages that could not be written through, all of L2 being pinned
        self._corrupt: list[int] = []
        self.corrupt_pages = 0  # pages that were dropped because their bytes had changed

    # ------------------------------------------------------------------------------ what is held

    def held(self, path: PageArray) -> int:
        """Leading pages of the path (int64[n]) that are in L1 or L2."""
        absent = (self._l1.find(path) < 0).nonzero()[0]
        if not absent.size:
            return path.size
        lost = (self._l2.find(path[absent]) < 0).nonzero()[0]
        return int(absent[lost[0]]) if lost.size else path.size

    def pages(self, tier: Tier) -> PageArray:
        """int64[n]: the pages of one tier, as KV events told of them."""
        return (self._l1 if tier is Tier.L1 else self._l2).pages()

    @property
    def l1_used(self) -> int:
        """Pages with KV in L1, pinned or not."""
        return len(self._l1)

    @property
    def l1_pinned(self) -> int:
        return self._l1.pinned

    @property
    def l1_room(self) -> int:
        """Pages reserved by leases and not written yet."""
        return self._room

    @property
    def l1_free(self) -> int:
        """Pages with nothing in them and reserved by nobody."""
        return self._l1.free_slots - self._room

    @property
    def l1_available(self) -> int:
        """Pages that a new lease may take: free ones and those that may be evicted."""
        return self._l1.available - self._room

    @property
    def l2_used(self) -> int:
        """Pages in L2, tails among them."""
        return len(self._l2)

    @property
    def l2_pinned(self) -> int:
        """L2 pages that a peer reads or that wait for their request, and slots that a transport writes into."""
        return self._l2.pinned + self._l2.taken_slots

    @property
    def l2_counted(self) -> int:
        """L2 pages with R > 0, as the directory says."""
        return self._counts.counted

    def counted(self, tier: Tier) -> int:
        """Pages of the tier with R > 0."""
        if tier is Tier.L2:
            return self.l2_counted
        return int(np.count_nonzero(self._counts.of(self._l1.pages())))

    def take_changes(self) -> list[KvChange]:
        """The changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def take_corrupt(self) -> list[int]:
        """The pages dropped since the last call because their bytes had changed."""
        corrupt, self._corrupt = self._corrupt, []
        return corrupt

    # ------------------------------------------------------------------------------ leases

    def lease(self, path: PageArray, total_pages: int) -> Lease | None:
        """Pin the leading pages of `path` that are held, restoring those in L2 only, and reserve room so that
        the request has `total_pages` in all; None when L1 has no room now.

        Raises ValueError when `total_pages` is less than the path or can never fit.
        """
        if not path.size <= total_pages <= self.l1_pages:
            raise ValueError(f"{total_pages} pages for a path of {path.size}, of {self.l1_pages} in all")
        l1 = self._l1
        while True:
            held = path[: self.held(path)]
            slots = l1.find(held)
            absent = slots < 0
            present = slots[~absent]
            restored = held.size - present.size
            taken = total_pages - present.size
            unpinned = present.size - int(np.count_nonzero(l1.order.is_pinned(present)))
            if taken > self.l1_available - unpinned:
                return None
            l1.order.pin(present)
            self._make_room(taken)
            if not restored:
                break
            places = self._restore(held[absent])
            if places is not None:
                slots[absent] = places
                break
            l1.order.unpin(present)  # a page was not what it should be: the path held is shorter now
        self._room += total_pages - held.size
        self._touch_host(held)
        return Lease(slots, total_pages - held.size, restored)

    def write(self, lease: Lease, path: Path, *, follow: bool = False) -> None:
        """The next pages of the lease's path have KV now, in its room.

        With `follow` they are a decode's: counted as the page before them is. A page that another request wrote
        meanwhile is shared and its room given back. Raises ValueError when the lease has less room.
        """
        self._check_room(lease, len(path))
        self._room -= len(path)
        slots = self._l1.find(path.pages)
        new = (slots < 0).nonzero()[0]
        if new.size:
            slots[new], _ = self._l1.take(new.size)
            written = path.take(new)
            if self._memory is not None:
                self._memory.write(slots[new], written.pages)
            self._enter_l1(written, slots[new])
        self._l1.order.pin(slots)
        if follow and lease.pages:
            self._counts.follow(int(self._l1.page_of[lease.slots[-1]]), path.pages)
        lease.fill(slots)

    def load(self, lease: Lease, path: PageArray) -> int:
        """The next pages of the lease's path come from L2 into its room, as far as they are held; how many did."""
        self._check_room(lease, path.size)
        loaded = 0
        while loaded < path.size:
            rest = path[loaded:]
            slots = self._l1.find(rest)
            # Runs of pages that are there already, and of pages to be restored.
            there = bool(slots[0] >= 0)
            run = ((slots >= 0) != there).nonzero()[0]
            length = int(run[0]) if run.size else rest.size
            if not there:
                in_host = self._l2.find(rest[:length]) < 0
                if in_host.any():
                    length = int(in_host.argmax())
                if not length:
                    break
                self._room -= length
                places = self._restore(rest[:length])
                if places is None:
                    self._room += length
                    continue  # what is held is less now
                slots[:length] = places
                lease.restored_pages += length
            else:
                self._room -= length
                self._l1.order.pin(slots[:length])
            lease.fill(slots[:length])
            loaded += length
        return loaded

    def release(self, lease: Lease) -> None:
        """Give up pins and room; pages stay held until evicted. A second release does nothing."""
        slots = lease.slots
        pages = self._l1.page_of[slots]
        host = self._l2.find(pages)
        self._l2.order.touch(host[host >= 0])
        lost = slots[host < 0]
        self._write_through(Path(pages[host < 0], self._l1.keys[lost]), lost)
        self._l1.order.unpin(slots)
        self._room -= lease.room
        lease.pages = lease.room = 0

    def _check_room(self, lease: Lease, pages: int) -> None:
        if pages > lease.room:
            raise ValueError(f"{pages} pages do not fit into a lease with room for {lease.room}")

    def _make_room(self, pages: int) -> None:
        """Evict until `pages` pages of L1 are free besides those that are promised; enough of them may go."""
        short = pages - self.l1_free
        if short > 0:
            self._left_l1(self._l1.evict(short).pages)

    def _left_l1(self, pages: PageArray) -> None:
        counted = self._counts.of(pages)
        self.evicted[Tier.L1, True] += int(np.count_nonzero(counted))
        self.evicted[Tier.L1, False] += int(np.count_nonzero(~counted))
        self._counts.left_gpu(pages)
        self._changed(False, Tier.L1, pages)

    def _enter_l1(self, path: Path, slots: Slots) -> None:
        self._l1.put(path, slots, np.zeros(slots.size, dtype=np.bool_))
        self._changed(True, Tier.L1, path.pages)
        self.unwritten_pages += self._write_through(path, slots)

    def _restore(self, pages: PageArray) -> Slots | None:
        """L1 slots, pinned, with copies of L2 pages; there must be room. None when a page was not sound and had to
        be dropped; nothing else has changed then."""
        source = self._l2.find(pages)
        slots, _ = self._l1.take(pages.size)
        if self._memory is not None:
            self._memory.copy(self._in_arena(source), slots)
            wrong = (~self._memory.sound(slots, pages)).nonzero()[0]
            if wrong.size:
                self._l1.give_back(slots)
                self._drop_corrupt(pages[wrong])
                return None
        path = Path(pages, self._l2.keys[source])
        self._l1.put(path, slots, np.zeros(slots.size, dtype=np.bool_))
        self._changed(True, Tier.L1, pages)
        self._l1.order.pin(slots)
        return slots

    # ------------------------------------------------------------------------------ host memory

    def reserve(self, pages: int) -> Slots:
        """Arena slots of L2 for a transport to write into: fewer than asked for when the rest is pinned."""
        return self._in_arena(self._take_l2(pages))

    def arrived(self, path: Path, slots: Slots, *, tail: bool = False) -> None:
        """Reserved slots hold these pages, checked. With `tail`, the last one is a tail."""
        local = slots - self.l1_pages
        new = self._l2.find(path.pages) < 0
        self._l2.give_back(local[~new])
        full = new.copy()
        full[len(path) - 1 :] &= not tail
        self._enter_l2(path.take(full), local[full])
        if tail and new[-1]:
            self._l2.put(path[-1:], local[-1:], np.zeros(1, dtype=np.bool_), silent=True)

    def give_back(self, slots: Slots) -> None:
        """Reserved slots that nobody writes into any more."""
        self._l2.give_back(slots - self.l1_pages)

    def hold(self, pages: PageArray) -> Slots:
        """Pin those of the pages that L2 holds, until `let_go` of what this returns. An access."""
        slots = self._l2.find(pages)
        slots = slots[slots >= 0]
        self._l2.order.pin(slots)
        return slots

    def let_go(self, held: Slots) -> None:
        self._l2.order.unpin(held)

    def in_host(self, pages: PageArray) -> Flags:
        """bool[n]: which pages lie in L2."""
        found: Flags = self._l2.find(pages) >= 0
        return found

    def keep_tail(self, tail: Path) -> None:
        """The KV of a tail (one page) was computed: keep it in L2, if there is a slot for it."""
        if (self._l2.find(tail.pages) >= 0).all():
            self._touch_host(tail.pages)
            return
        slots = self._take_l2(1)
        if not slots.size:
            return
        if self._memory is not None:
            self._memory.write(self._in_arena(slots), tail.pages)
        self._l2.put(tail, slots, np.zeros(1, dtype=np.bool_), silent=True)

    def has_tail(self, tail: Path) -> bool:
        """Whether L2 holds the KV of a tail; one that is not sound is dropped."""
        slots = self._l2.find_keys(tail)
        if (slots < 0).any():
            return False
        if self._memory is not None and not self._memory.sound(self._in_arena(slots), tail.pages).all():
            self._drop_corrupt(tail.pages)
            return False
        self._l2.order.touch(slots)
        return True

    def recheck(self, pages: PageArray) -> None:
        """A peer says that the bytes of these pages were wrong when they came: drop those of which it is true."""
        if self._memory is None:
            return
        for tier, pool in ((Tier.L1, self._l1), (Tier.L2, self._l2)):
            slots = pool.find(pages)
            held, slots = pages[slots >= 0], slots[slots >= 0]
            arena = slots if tier is Tier.L1 else self._in_arena(slots)
            self._drop_corrupt(held[~self._memory.sound(arena, held)], tier)

    def _drop_corrupt(self, pages: PageArray, tier: Tier = Tier.L2) -> None:
        pool = self._l1 if tier is Tier.L1 else self._l2
        slots = pool.find(pages)
        slots = slots[slots >= 0]
        self.corrupt_pages += slots.size
        self._corrupt += pool.page_of[slots].tolist()
        told = pool.page_of[slots[~pool.is_silent(slots)]]
        pool.drop(slots)
        if tier is Tier.L2:
            self._counts.dropped(told)
        self._changed(False, tier, told)

    def _take_l2(self, pages: int) -> Slots:
        slots, left = self._l2.take(pages)
        self.evicted[Tier.L2, True] += int(np.count_nonzero(left.counted))
        self.evicted[Tier.L2, False] += int(np.count_nonzero(~left.counted & ~left.silent))
        counted = left.pages[left.counted]
        self._counts.left_host(counted, self._l1.find(counted) >= 0)
        self._changed(False, Tier.L2, left.pages[~left.silent])
        return slots

    def _write_through(self, path: Path, source: Slots) -> int:
        """Copies of L1 pages in L2; how many found no room there."""
        new = (self._l2.find(path.pages) < 0).nonzero()[0]
        if not new.size:
            return 0
        slots = self._take_l2(new.size)
        unwritten = new.size - slots.size
        new = new[: slots.size]
        if self._memory is not None:
            self._memory.copy(source[new], self._in_arena(slots))
        self._enter_l2(path.take(new), slots)
        return unwritten

    def _enter_l2(self, path: Path, slots: Slots) -> None:
        if not slots.size:
            return
        self._l2.put(path, slots, self._counts.entering(path.pages))
        self._changed(True, Tier.L2, path.pages)

    def _touch_host(self, pages: PageArray) -> None:
        slots = self._l2.find(pages)
        self._l2.order.touch(slots[slots >= 0])

    def _in_arena(self, slots: Slots) -> Slots:
        return slots + self.l1_pages

    # ------------------------------------------------------------------------------ pages for peers

    def lend(self, path: Path) -> tuple[Slots, Slots]:
        """Pin pages for a peer that will read them: the leading ones of `path` that are held, by key.

        Arena slots (intp[n], -1 for what is gone: all from the first page on that is not held), and the same pinned
        slots as `end_loan` wants them. An access.
        """
        host = self._l2.find_keys(path)
        slots = np.where(host >= 0, host + self.l1_pages, self._l1.find_keys(path))
        gone = (slots < 0).nonzero()[0]
        length = int(gone[0]) if gone.size else len(path)
        slots[length:] = -1
        lent = slots[:length]
        self._l2.order.pin(lent[lent >= self.l1_pages] - self.l1_pages)
        self._l1.order.pin(lent[lent < self.l1_pages])
        return slots, lent

    def end_loan(self, lent: Slots) -> None:
        self._l2.order.unpin(lent[lent >= self.l1_pages] - self.l1_pages)
        self._l1.order.unpin(lent[lent < self.l1_pages])

    # ------------------------------------------------------------------------------ counts

    def set_counts(self, positive: PageArray, zero: PageArray) -> None:
        """See `CountFlags.set`."""
        self._counts.set(positive, zero)

    def set_all_counts(self, positive: PageArray) -> None:
        """See `CountFlags.set_all`."""
        self._counts.set_all(positive)

    def _changed(self, stored: bool, tier: Tier, pages: PageArray) -> None:
        if not pages.size:
            return
        last = self._changes[-1] if self._changes else None
        if last is not None and last.stored is stored and last.tier is tier:
            self._changes[-1] = KvChange(stored, tier, np.concatenate((last.pages, pages)))
        else:
            self._changes.append(KvChange(stored, tier, pages))
