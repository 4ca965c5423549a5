"""Lookup tables for pages that are small whole numbers, as a simulation names them: the page is the row.

They take the place of the hash tables that look up real page names; what is decided on top of them is the same.
"""

from __future__ import annotations

import numpy as np

from loadtest.simulate.pages import PageNames
from shared.messages import PageArray
from shared.pagetable import Column, PageTable, Slots


class DenseTable(PageTable):
    """A `PageTable` with a row for every page that was ever named."""

    def __init__(self, names: PageNames, width: int = 1) -> None:
        self.columns: list[Column] = [np.zeros(names.room, dtype=np.int32) for _ in range(width)]
        names.tables.add(self)

    def grow(self, room: int) -> None:
        more = np.zeros(room - self.columns[0].size, dtype=np.int32)
        self.columns = [np.concatenate((column, more)) for column in self.columns]

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def find(self, pages: PageArray) -> Slots:
        return pages

    def insert(self, pages: PageArray) -> Slots:
        return pages

    def insert_told(self, pages: PageArray) -> tuple[Slots, bool]:
        return pages, False

    def pages(self, slots: Slots) -> PageArray:
        return slots

    def shrink(self, live: int) -> None:
        pass


class DenseIndex:
    """Which slot of a pool each page lies in (`worker.kv.pool.SlotIndex`)."""

    def __init__(self, names: PageNames) -> None:
        self._slots: Slots = np.full(names.room, -1, dtype=np.intp)
        self._held = 0
        names.tables.add(self)

    def __len__(self) -> int:
        return self._held

    def grow(self, room: int) -> None:
        more = np.full(room - self._slots.size, -1, dtype=np.intp)
        self._slots = np.concatenate((self._slots, more))

    def find(self, pages: PageArray) -> Slots:
        found: Slots = self._slots[pages]
        return found

    def put(self, pages: PageArray, slots: Slots) -> None:
        self._slots[pages] = slots
        self._held += pages.size

    def drop(self, pages: PageArray) -> None:
        self._slots[pages] = -1
        self._held -= pages.size
