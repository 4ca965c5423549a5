"""A hash table from pages to rows of int32 columns, looked up and filled many pages at a time.

Rules that hold here
- A page is any int64. It has at most one row, and a row whose columns are all 0 is dead: its owner kills it by
  writing zeros and revives it by writing something else.
- A slot is a row's place. It is valid until the next `insert` or `shrink`: either may rebuild the table, which
  drops the dead rows and moves the others.
- `find` gives slot -1 to a page without a row. Every column reads 0 there, and nobody writes there.
- Memory follows the live rows: the table doubles when they fill it, and `shrink` gives room back.
- No Python work is done per page. Not safe for use from several threads.

Rows lie in buckets of _CELLS cells, filled from the left and named by the top bits of the page times an odd
constant. A page whose bucket is full goes to the next one that is not, so a lookup ends at the first bucket
with a free cell. A free cell has the page 0; the real page 0 has a row of its own behind the buckets.
"""

from __future__ import annotations

import mmap
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shared.messages import PageArray

_T = TypeVar("_T", bound=np.generic)
Slots = npt.NDArray[np.intp]
Column = npt.NDArray[np.int32]

_CELLS = 16
_LOG_CELLS = 4
_MIN_BUCKETS = 4  # a smaller table is not worth returning memory of
_MOST_LOAD = 0.5
_REGROWN = 0.7  # a rebuilt table is at most this full of what it may have, lest the next rebuild come soon
_KEPT = 0.25  # and one that is less full than this shrinks
_CHUNK = 4096  # pages handled at a time, so that what a lookup gathers stays in the processor's cache
_REBUILD_BUCKETS = _CHUNK  # of which one cell each is moved at a time
_MAPPED_BYTES = 1 << 19

# Arrays of no dimension: numpy is quicker with them than with its scalars.
_LAST_CELL = np.array(_CELLS - 1, dtype=np.intp)
_CELL_SHIFT = np.array(_LOG_CELLS, dtype=np.intp)
_ONE = np.array(1, dtype=np.intp)
# 2^64 over the golden ratio: it spreads near and strided values, which tests and made-up traces have.
_FACTOR = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)


class PageTable:
    """Pages to rows of `width` int32 columns; `columns[i][slots]` reads and writes them.

    `columns` are other arrays after an `insert` or a `shrink`: do not keep them.
    """

    def __init__(self, width: int = 1) -> None:
        self.columns: list[Column] = [np.empty(0, dtype=np.int32)] * width
        self._order = np.arange(_CHUNK, dtype=np.int32)
        self._allocate(_MIN_BUCKETS)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._keys.nbytes + self._free.nbytes + sum(column.nbytes for column in self.columns)

    def find(self, pages: PageArray) -> Slots:
        """intp[n]: the slot of each page (int64[n]), -1 where it has none. Dead rows are found, too."""
        if np.count_nonzero(pages) != pages.size:
            slots = np.full(pages.size, self._zero, dtype=np.intp)
            real = pages.nonzero()[0]
            slots[real] = self.find(pages[real])
            return slots
        if pages.size <= _CHUNK:
            return self._find(pages)
        slots = np.empty(pages.size, dtype=np.intp)
        for at in range(0, pages.size, _CHUNK):
            slots[at : at + _CHUNK] = self._find(pages[at : at + _CHUNK])
        return slots

    def insert(self, pages: PageArray) -> Slots:
        """intp[n]: the slot of each page (int64[n]); those without a row get a dead one.

        A page that occurs twice has the same slot twice. Read `columns` after this, not before.
        """
        return self.insert_told(pages)[0]

    def insert_told(self, pages: PageArray) -> tuple[Slots, bool]:
        """As `insert`, and whether all rows are new and distinct, which saves the caller finding out.

        False says nothing.
        """
        if pages.size <= _CHUNK and np.count_nonzero(pages) == pages.size <= self._most - self._used:
            return self._insert(pages)
        slots = self.find(pages)
        absent = (slots < 0).nonzero()[0]
        if absent.size:
            if absent.size > self._most - self._used:
                self._rebuild(self._live() + absent.size)
                # The rebuild also dropped the dead rows of these pages.
                slots = self.find(pages)
                absent = (slots < 0).nonzero()[0]
            for at in range(0, absent.size, _CHUNK):
                some = absent[at : at + _CHUNK]
                slots[some], _ = self._insert(pages[some])
        return slots, False

    def pages(self, slots: Slots) -> PageArray:
        """int64[n]: the pages at these slots, dead or not. None may be -1."""
        found: PageArray = self._keys[slots]
        return found

    def shrink(self, live: int) -> None:
        """Give memory back when the owner has so few live rows left that it pays."""
        if live < self._most * _KEPT and len(self._free) > _MIN_BUCKETS:
            self._rebuild(live)

    # ------------------------------------------------------------------------- inside

    def _allocate(self, buckets: int) -> None:
        cells = buckets * _CELLS
        # Behind the buckets: the row of page 0, and the one that -1 reads.
        self._keys: PageArray = _zeros(cells + 2, np.int64)
        self._rows = self._keys[:cells].reshape(buckets, _CELLS)
        self._last_cells = self._rows[:, -1]
        self._free = _zeros(buckets, np.intp)  # first free cell of each bucket
        for at in range(0, buckets, _CHUNK):
            part = self._free[at : at + _CHUNK]
            np.add(self._order[: part.size], at, out=part)
            part <<= _CELL_SHIFT
        self.columns = [_zeros(cells + 2, np.int32) for _ in self.columns]
        self._zero = cells
        self._last_bucket = np.array(buckets - 1, dtype=np.intp)
        self._shift = np.array(65 - buckets.bit_length(), dtype=np.uint64)
        self._most = int(cells * _MOST_LOAD)
        self._used = 0  # cells in use, or some more: a page twice in a call counts twice

    def _home(self, pages: PageArray) -> Slots:
        hashed: npt.NDArray[np.uint64] = pages.view(np.uint64) * _FACTOR
        hashed >>= self._shift
        homes: Slots = hashed.view(np.intp)
        return homes

    def _find(self, pages: PageArray) -> Slots:
        """`find` for at most _CHUNK pages other than 0."""
        buckets = self._home(pages)
        rows = self._rows.take(buckets, axis=0)
        hits: Slots = (rows == pages[:, None]).ravel().nonzero()[0]
        if hits.size == pages.size:
            hits &= _LAST_CELL
            hits += buckets << _CELL_SHIFT
            return hits
        return self._find_rest(pages, buckets, hits, rows[:, -1])

    def _insert(self, pages: PageArray) -> tuple[Slots, bool]:
        """`insert_told` for at most _CHUNK pages other than 0 that there is room for."""
        buckets = self._home(pages)
        rows = self._rows.take(buckets, axis=0)
        hits: Slots = (rows == pages[:, None]).ravel().nonzero()[0]
        if hits.size == pages.size:
            hits &= _LAST_CELL
            hits += buckets << _CELL_SHIFT
            return hits, False
        last_cells = rows[:, -1]
        if not hits.size and not np.count_nonzero(last_cells):
            slots = self._free[buckets]
            # What the column keeps of a write for each page shows pages that share a cell.
            column, order = self.columns[0], self._order[: pages.size]
            column[slots] = order
            shared = column[slots] != order
            column[slots] = 0
            if not np.count_nonzero(shared):
                self._used += pages.size
                self._keys[slots] = pages
                self._free[buckets] = slots + _ONE
                return slots, True
            return self._add(pages), False
        slots = self._find_rest(pages, buckets, hits, last_cells)
        absent = (slots < 0).nonzero()[0]
        if absent.size:
            slots[absent] = self._add(pages[absent])
        return slots, False

    def _find_rest(self, pages: PageArray, buckets: Slots, hits: Slots, last_cells: PageArray) -> Slots:
        """`find` when home buckets have only some of the pages: `hits` are positions in the gathered rows."""
        slots = np.empty(pages.size, dtype=np.intp)
        slots.fill(-1)
        if hits.size:
            found = hits >> _CELL_SHIFT
            slots[found] = (buckets[found] << _CELL_SHIFT) + (hits & _LAST_CELL)
        if np.count_nonzero(last_cells):
            onward = ((slots < 0) & (last_cells != 0)).nonzero()[0]
            if onward.size:
                self._find_onward(pages, buckets, onward, slots)
        return slots

    def _find_onward(self, pages: PageArray, buckets: Slots, open_: Slots, slots: Slots) -> None:
        """Write into `slots` where the pages at `open_`, whose home bucket is full and has them not, are."""
        pages, buckets = pages[open_], buckets[open_]
        while open_.size:
            buckets = (buckets + _ONE) & self._last_bucket
            rows = self._rows.take(buckets, axis=0)
            found, cells = (rows == pages[:, None]).nonzero()
            slots[open_[found]] = (buckets[found] << _CELL_SHIFT) + cells
            onward = rows[:, -1] != 0
            onward[found] = False
            open_, pages, buckets = open_[onward], pages[onward], buckets[onward]

    def _add(self, pages: PageArray) -> Slots:
        """New rows for at most _CHUNK pages other than 0 that have none; there must be room."""
        self._used += pages.size
        slots = np.empty(pages.size, dtype=np.intp)
        buckets, rest = self._home(pages), self._order[: pages.size]
        while rest.size:
            buckets = self._with_room(buckets)
            cells = self._free[buckets]
            self._keys[cells] = pages
            # Equal pages get the same cell; of different ones the last written has it and the others try again.
            self._free[buckets] = cells + _ONE
            slots[rest] = cells
            lost = self._keys[cells] != pages
            if not np.count_nonzero(lost):
                break
            rest, buckets, pages = rest[lost], buckets[lost], pages[lost]
        return slots

    def _with_room(self, buckets: Slots) -> Slots:
        """The first bucket with a free cell from each of these on."""
        full = self._last_cells[buckets] != 0
        while np.count_nonzero(full):
            buckets = (buckets + full) & self._last_bucket
            full = self._last_cells[buckets] != 0
        return buckets

    def _live(self) -> int:
        if len(self.columns) == 1:
            return int(np.count_nonzero(self.columns[0]))
        return int(np.count_nonzero(np.logical_or.reduce(self.columns)))

    def _rebuild(self, rows: int) -> None:
        """A table of the live rows, with room for this many and some more."""
        buckets = _MIN_BUCKETS
        while buckets * _CELLS * _MOST_LOAD * _REGROWN < rows:
            buckets *= 2
        keys, old = self._rows, self.columns
        behind = [column[self._zero] for column in old]
        self._allocate(buckets)
        # One cell of every bucket at a time: neighbours in the old table then hardly meet in the new one.
        for first in range(0, len(keys), _REBUILD_BUCKETS):
            block = keys[first : first + _REBUILD_BUCKETS]
            cells = slice(first * _CELLS, first * _CELLS + block.size)
            tables = [column[cells].reshape(block.shape) for column in old]
            for cell in range(_CELLS):
                values = [table[:, cell] for table in tables]
                live = (
                    np.logical_or.reduce(values).nonzero()[0] if len(values) > 1 else values[0].nonzero()[0]
                )
                slots = self._add(block[live, cell])
                for column, value in zip(self.columns, values, strict=True):
                    column[slots] = value[live]
        for column, value in zip(self.columns, behind, strict=True):
            column[self._zero] = value


def _zeros(count: int, dtype: type[_T]) -> npt.NDArray[_T]:
    size = count * np.dtype(dtype).itemsize
    if size < _MAPPED_BYTES:
        return np.zeros(count, dtype=dtype)
    # The allocator may keep what is freed; a mapping of its own always goes back to the system.
    mapped: npt.NDArray[_T] = np.frombuffer(mmap.mmap(-1, size), dtype=dtype)
    return mapped
