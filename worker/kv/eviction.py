"""Which page a memory tier evicts next (section 5.3; EvictHost of Algorithm E.2, and one step beyond it).

Rules that hold here
- It speaks of slots, the numbers 0..n-1 of one tier's memory; which page lies in one is its owner's
  business.
- T is a logical time: every access gets a number of its own. The slots of a call are accessed last slot
  first, so of one path the deeper pages leave first and what stays is a prefix.
- R > 0 is a flag of each present slot; one whose flag changes keeps its place by T.
- `count`, the default: slots with R = 0 leave first, the least recently used first. When only slots with
  R > 0 are left, the contexts of active agents do not fit: then those of the latest access leave first, deeper
  pages first. Every agent comes back, and those that have been away for long come back soonest; in LRU order
  each would find its pages gone just before it needs them. Flags may be wrong, though (a branch whose end nobody
  told): a slot that was not accessed while `STALE_TURNS` times all slots were, leaves before those, oldest first.
- `count_lru` is Algorithm E.2 to the letter: ascending (1[R > 0], T). `lru` is T alone; flags are kept and
  reported.
- A pinned slot never leaves. The end of its last pin is an access.
- A slot that one call of `touch`, `pin` or `unpin` names twice counts once; other calls get distinct slots. A call that
  raises has changed nothing.

T is a position in a log: an access writes the slot at its end, so the log is in the order of T by
construction and nothing is ever sorted. For each group a row of bytes says which positions hold a slot that
may leave: pins and flags set and clear bytes there, an eviction takes the first that are set, or the last
access that has any. A second row, a byte for each block of positions, leads past blocks that have none. A full
log is packed: at most n slots stay of 2n positions, so that is O(1) an access, though one in n accesses waits
for it. No call goes through its slots in Python.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
Eviction = Literal["count", "count_lru", "lru"]

STALE_TURNS = 8
_BLOCK = 256  # positions: a small eviction reads one block, and a byte for each block before it


class EvictionOrder:
    """The present ones of `slots` slots in the order in which they would leave."""

    def __init__(self, slots: int, eviction: Eviction = "count") -> None:
        if slots < 1:
            raise ValueError(f"an order needs at least one slot, not {slots}")
        blocks = -(-2 * slots // _BLOCK)
        self._by_count = eviction != "lru"
        groups = 2 if self._by_count else 1
        self._newest_first = eviction == "count"
        self._stale = STALE_TURNS * slots
        self._log: Slots = np.zeros(blocks * _BLOCK, np.intp)
        self._end = 0  # positions of the log in use
        # How many accesses came before the call that wrote a position: one number a call, ascending.
        self._call = np.zeros(blocks * _BLOCK, np.int64)
        self._accesses = 0
        self._at: Slots = np.full(slots, -1, np.intp)  # a slot's position, so its T; -1 while it is absent
        self._pins = np.zeros(slots, np.int32)
        self._mark = np.zeros(slots, np.int32)  # see `_once`
        self._numbers = np.arange(slots, dtype=np.int32)
        self._counted: Flags = np.zeros(slots, np.bool_)  # False while absent
        # A byte is set exactly where a present, unpinned slot of the row's group has its position.
        self._free: list[Flags] = [np.zeros(blocks * _BLOCK, np.bool_) for _ in range(groups)]
        # A clear byte says that no byte of the block is set in `_free`; a set one promises nothing.
        self._some: list[Flags] = [np.zeros(blocks, np.bool_) for _ in range(groups)]
        self._present = self._pinned_slots = self._counted_slots = 0

    def __len__(self) -> int:
        """Present slots."""
        return self._present

    @property
    def pinned_slots(self) -> int:
        """Slots with at least one pin."""
        return self._pinned_slots

    @property
    def counted_slots(self) -> int:
        """Present slots with R > 0."""
        return self._counted_slots

    @property
    def evictable(self) -> int:
        """Slots that `evict` could take out now."""
        return self._present - self._pinned_slots

    def is_counted(self, slots: Slots) -> Flags:
        """Whether R > 0, of each slot; False for absent ones."""
        return self._counted[slots]

    def is_pinned(self, slots: Slots) -> Flags:
        """Whether it has pins, of each slot; False for absent ones."""
        return self._pins[slots] > 0

    # ------------------------------------------------------------------------------ presence and access

    def add(self, slots: Slots, counted: Flags) -> None:
        """Absent slots are present from now on, accessed last slot first, `counted` where R > 0.

        Raises ValueError when one is present already.
        """
        present = self._at[slots] >= 0
        if np.count_nonzero(present):
            raise ValueError(f"slot {slots[present][0]} is present already")
        self._counted[slots] = counted
        self._present += len(slots)
        self._counted_slots += int(np.count_nonzero(counted))
        self._append(slots, counted)

    def remove(self, slots: Slots) -> Flags:
        """The slots are gone, pinned or not. Returns their flags. Raises KeyError when one is absent."""
        self._leave(self._positions(slots))
        self._pinned_slots -= int(np.count_nonzero(self._pins[slots]))
        self._pins[slots] = 0
        return self._forget(slots)

    def touch(self, slots: Slots) -> None:
        """Access, last slot first. Raises KeyError when one is absent."""
        slots = self._once(slots)
        self._leave(self._positions(slots))
        self._append(slots, self._counted[slots])
        pinned = slots[self._pins[slots].nonzero()]
        if len(pinned):
            self._leave(self._at[pinned])

    def pin(self, slots: Slots) -> None:
        """Keep the slots until as many `unpin`. Raises KeyError when one is absent."""
        slots = self._once(slots)
        self._leave(self._positions(slots))
        pins = self._pins[slots]
        self._pinned_slots += len(slots) - int(np.count_nonzero(pins))
        self._pins[slots] = pins + 1

    def unpin(self, slots: Slots) -> None:
        """End one pin of each slot; where it was the last one that is an access, the last slot first.

        Raises KeyError when a slot has none.
        """
        slots = self._once(slots)
        pins = self._pins[slots]
        if np.count_nonzero(pins) < len(slots):
            raise KeyError(int(slots[pins == 0][0]))
        self._pins[slots] = pins - 1
        free = slots[pins == 1]
        self._pinned_slots -= len(free)
        self._append(free, self._counted[free])

    def set_counted(self, slots: Slots, counted: bool) -> None:
        """Whether R > 0, for all of these slots. Raises KeyError when one is absent."""
        at = self._positions(slots)
        changed = self._counted[slots] != counted
        slots, at = slots[changed], at[changed]
        self._counted[slots] = counted
        self._counted_slots += len(slots) if counted else -len(slots)
        if self._by_count:
            at = at[self._pins[slots] == 0]
            self._free[int(not counted)][at] = False
            self._free[int(counted)][at] = True
            self._some[int(counted)][at // _BLOCK] = True

    def evict(self, wanted: int) -> tuple[Slots, Flags]:
        """Take out the next slots to leave: returns them in that order, and their flags.

        Fewer than `wanted` when the rest is pinned; none for a number below 1.
        """
        wanted = min(wanted, self.evictable)
        found: list[Slots] = []
        self._take_oldest(0, wanted, found)
        if self._newest_first:
            self._take_stale(wanted, found)
            self._take_newest(wanted, found)
        elif self._by_count:
            self._take_oldest(1, wanted, found)
        if not found:
            return np.zeros(0, np.intp), np.zeros(0, np.bool_)
        victims = found[0] if len(found) == 1 else np.concatenate(found)
        return victims, self._forget(victims)

    def _take_oldest(self, group: int, wanted: int, found: list[Slots]) -> None:
        """Fill `found` up to `wanted` slots with the least recently used of a group; they leave their positions."""
        free, some = self._free[group], self._some[group]
        left = wanted - sum(map(len, found))
        # First as if slots lay dense, then more blocks a step, so that scattered ones take few steps.
        blocks = max(1, left // 8)
        while left > 0:
            first = int(some.argmax())
            if not some[first]:
                break
            if blocks == 1:
                among = free[first * _BLOCK : (first + 1) * _BLOCK].nonzero()[0]
                at = among[:left] + first * _BLOCK
                some[first] = len(among) > left
            else:
                near = some[first:].nonzero()[0][:blocks] + first
                among = free.reshape(-1, _BLOCK)[near].ravel().nonzero()[0]
                row = among[:left] // _BLOCK
                at = near[row] * _BLOCK + among[:left] % _BLOCK
                # Nothing is left in these blocks, or else nothing before the last slot's.
                some[near[: row[-1] if len(among) > left else blocks]] = False
            free[at] = False
            found.append(self._log[at])
            left -= len(at)
            blocks *= 8

    def _take_stale(self, wanted: int, found: list[Slots]) -> None:
        """The same with counted slots that were not accessed for `STALE_TURNS` times all slots."""
        free, some = self._free[1], self._some[1]
        left = wanted - sum(map(len, found))
        if left <= 0 or self._accesses <= self._stale:
            return
        end = int(self._call[: self._end].searchsorted(self._accesses - self._stale))
        first = int(some.argmax())
        if not some[first] or first * _BLOCK >= end:
            return
        at = free[first * _BLOCK : end].nonzero()[0][:left] + first * _BLOCK
        # Nothing is left before the last one taken, or else nothing before `end`.
        some[first : (at[-1] if len(at) == left else end) // _BLOCK] = False
        free[at] = False
        found.append(self._log[at])

    def _take_newest(self, wanted: int, found: list[Slots]) -> None:
        """The same with counted slots: of the latest access first, the deeper pages of each first."""
        free, some = self._free[1], self._some[1]
        left = wanted - sum(map(len, found))
        while left > 0:
            block = len(some) - 1 - int(some[::-1].argmax())
            if not some[block]:
                break
            among = free[block * _BLOCK : (block + 1) * _BLOCK].nonzero()[0]
            if not len(among):
                some[block] = False
                continue
            last = block * _BLOCK + int(among[-1])
            first = int(self._call[: self._end].searchsorted(self._call[last]))
            at = free[first : last + 1].nonzero()[0][:left] + first
            free[at] = False
            found.append(self._log[at])
            left -= len(at)

    # ------------------------------------------------------------------------------ the log

    def _positions(self, slots: Slots) -> Slots:
        """Where present slots lie in the log. Raises KeyError when one is absent."""
        at = self._at[slots]
        absent = at < 0
        if np.count_nonzero(absent):
            raise KeyError(int(slots[absent][0]))
        return at

    def _once(self, slots: Slots) -> Slots:
        """Each slot once: a second position of one in the log would let it leave while it is pinned."""
        numbers = self._numbers[: len(slots)]
        if len(numbers) < len(slots):  # more than there are
            return np.unique(slots)
        self._mark[slots] = numbers
        once = self._mark[slots] == numbers
        return slots if np.count_nonzero(once) == len(slots) else slots[once]

    def _leave(self, at: Slots) -> None:
        """No slot may be evicted from these positions any more."""
        for free in self._free:
            free[at] = False

    def _forget(self, slots: Slots) -> Flags:
        """Make unpinned slots absent, whose positions were left. Returns their flags."""
        counted = self._counted[slots]
        self._at[slots] = -1
        self._counted[slots] = False
        self._present -= len(slots)
        self._counted_slots -= int(np.count_nonzero(counted))
        return counted

    def _append(self, slots: Slots, counted: Flags) -> None:
        """Write slots that left their positions at the end, free to leave again: the last slot first."""
        if self._end + len(slots) > len(self._log):
            self._pack()
        first, end = self._end, self._end + len(slots)
        self._log[first:end] = slots[::-1]
        self._call[first:end] = self._accesses
        self._accesses += len(slots)
        self._at[slots] = np.arange(end - 1, first - 1, -1)
        blocks = slice(first // _BLOCK, -(-end // _BLOCK))
        positive = np.count_nonzero(counted) if self._by_count else 0
        if positive < len(slots):
            self._free[0][first:end] = ~counted[::-1] if positive else True
            self._some[0][blocks] = True
        if positive:
            self._free[1][first:end] = counted[::-1]
            self._some[1][blocks] = True
        self._end = end

    def _pack(self) -> None:
        """Close the gaps in the log. T of every slot changes, their order does not."""
        log = self._log[: self._end]
        kept = np.flatnonzero(self._at[log] == np.arange(self._end))
        self._end = len(kept)
        self._log[: self._end] = slots = log[kept]
        self._at[slots] = np.arange(self._end)
        self._call[: self._end] = self._call[kept]
        for free, some in zip(self._free, self._some, strict=True):
            free[: self._end] = free[kept]
            free[self._end :] = False
            some[:] = free.reshape(-1, _BLOCK).any(axis=1)
