"""The pages of one tier of a node: which slot each lies in, which slots are free, and what leaves first.

Rules that hold here
- A slot is free, taken (somebody writes into it), or holds a page: free + taken + held = slots. Slots are numbered
  from 0 in each tier.
- A page has at most one slot. `drop` takes a page out of the index at once; when its slot is pinned, the slot is not
  used again before the last pin has ended.
- No bytes here and no clock.

The index is a dictionary, unless its owner knows a better one: pages come one by one from decode as often as thousands
at a time, and a numpy table, which is a little faster for thousands, costs more than everything else together for one.
"""

from __future__ import annotations

from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shared.messages import PageArray
from shared.pages import DIGEST_BYTES
from worker.kv.eviction import Eviction, EvictionOrder
from worker.kv.path import Keys, Path, Slots

Flags = npt.NDArray[np.bool_]


class Victims(NamedTuple):
    """Pages that left to make room."""

    pages: PageArray
    counted: Flags  # which of them had R > 0
    silent: Flags  # which of them nobody was told of


class SlotIndex(Protocol):
    """Pages to slots. Its length is the number of pages."""

    def __len__(self) -> int: ...

    def find(self, pages: PageArray) -> Slots:
        """intp[n]: the slot of each page (int64[n]), -1 where it has none."""

    def put(self, pages: PageArray, slots: Slots) -> None:
        """Pages that have none have these slots now."""

    def drop(self, pages: PageArray) -> None:
        """Pages that have slots have none now."""


class DictIndex:
    """For pages of any name."""

    def __init__(self) -> None:
        self._slot_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slot_of)

    def find(self, pages: PageArray) -> Slots:
        return np.fromiter(map(self._slot_of.get, pages.tolist(), repeat(-1)), np.intp, pages.size)

    def put(self, pages: PageArray, slots: Slots) -> None:
        self._slot_of.update(zip(pages.tolist(), slots.tolist(), strict=True))

    def drop(self, pages: PageArray) -> None:
        for page in pages.tolist():
            del self._slot_of[page]


class PagePool:
    """`slots` pages of room."""

    def __init__(
        self, slots: int, eviction: Eviction, index: SlotIndex | None = None, key_bytes: int = DIGEST_BYTES
    ) -> None:
        """`key_bytes` 0: pages have no keys beyond their names."""
        self.slots = slots
        self.order = EvictionOrder(max(1, slots), eviction)
        self.page_of: PageArray = np.zeros(slots, dtype=np.int64)
        self.keys: Keys = np.zeros((slots, key_bytes), dtype=np.uint8)
        self._index: SlotIndex = DictIndex() if index is None else index
        self._indexed: Flags = np.zeros(slots, dtype=np.bool_)
        self._silent: Flags = np.zeros(slots, dtype=np.bool_)
        self._free: Slots = np.arange(slots - 1, -1, -1, dtype=np.intp)  # a stack, its top last
        self._free_slots = slots
        self.taken_slots = 0

    # ------------------------------------------------------------------------------ what is held

    def __len__(self) -> int:
        """Pages held."""
        return len(self._index)

    @property
    def free_slots(self) -> int:
        return self._free_slots

    @property
    def pinned(self) -> int:
        """Slots with pins."""
        return self.order.pinned_slots

    @property
    def available(self) -> int:
        """Slots that `take` could give: free ones, and those whose pages may leave."""
        return self._free_slots + len(self.order) - self.order.pinned_slots

    def find(self, pages: PageArray) -> Slots:
        """intp[n]: the slot of each page (int64[n]), -1 where it is not held."""
        return self._index.find(pages)

    def find_keys(self, path: Path) -> Slots:
        """`find`, with -1 also for a page of the same name and another key."""
        slots = self.find(path.pages)
        held = (slots >= 0).nonzero()[0]
        other = (self.keys[slots[held]] != path.keys[held]).any(axis=1)
        slots[held[other]] = -1
        return slots

    def pages(self) -> PageArray:
        """int64[n]: all pages that somebody was told of."""
        return self.page_of[self._indexed & ~self._silent]

    def set_all_counted(self, slots: Slots) -> None:
        """Exactly the pages in these slots have R > 0."""
        wanted = np.zeros(self.slots, dtype=np.bool_)
        wanted[slots] = True
        held = self._indexed.nonzero()[0]
        off = held[self.order.is_counted(held) & ~wanted[held]]
        self.order.set_counted(off, False)
        self.order.set_counted(slots, True)

    # ------------------------------------------------------------------------------ slots

    def take(self, wanted: int) -> tuple[Slots, Victims]:
        """Up to `wanted` slots to write into: free ones first, then those of the pages that leave first."""
        victims = self.evict(wanted - self._free_slots)
        wanted = min(wanted, self._free_slots)
        self._free_slots -= wanted
        self.taken_slots += wanted
        return self._free[self._free_slots : self._free_slots + wanted][::-1].copy(), victims

    def evict(self, wanted: int) -> Victims:
        """Free `wanted` slots more, or as many as are not pinned."""
        slots, counted = self.order.evict(max(0, wanted))
        # What was dropped while it was pinned has left already.
        left = self._indexed[slots]
        self._forget(slots[left])
        self._push(slots[::-1])
        return Victims(self.page_of[slots[left]], counted[left], self._silent[slots[left]])

    def give_back(self, slots: Slots) -> None:
        """Slots that were taken and are free again."""
        self.taken_slots -= slots.size
        self._push(slots)

    def put(self, path: Path, slots: Slots, counted: Flags, *, silent: bool = False) -> None:
        """Taken slots hold these pages now, which are distinct and not held."""
        self.taken_slots -= slots.size
        self.page_of[slots] = path.pages
        self.keys[slots] = path.keys
        self._index.put(path.pages, slots)
        self._indexed[slots] = True
        self._silent[slots] = silent
        self.order.add(slots, counted)

    def drop(self, slots: Slots) -> None:
        """The pages in these slots are gone."""
        self._forget(slots)
        pinned = self.order.is_pinned(slots)
        self.order.set_counted(slots[pinned], False)
        unpinned = slots[~pinned]
        self.order.remove(unpinned)
        self._push(unpinned)

    def is_silent(self, slots: Slots) -> Flags:
        """bool[n]: which of the held pages in these slots nobody was told of."""
        return self._silent[slots]

    def _push(self, slots: Slots) -> None:
        self._free[self._free_slots : self._free_slots + slots.size] = slots
        self._free_slots += slots.size

    def _forget(self, slots: Slots) -> None:
        if not slots.size:
            return
        self._index.drop(self.page_of[slots])
        self._indexed[slots] = False
