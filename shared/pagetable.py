"""A hash table from pages to rows of int32 columns, looked up and filled many pages at a time.

Rules that hold here
- A page is any int64. It has at most one row, and a row whose columns are all 0 is dead: its owner kills it by
  writing zeros and revives it by writing something else.
- A slot is a row's place. It is valid until the next `insert` or `shrink`: either may rebuild the table, which
  drops the dead rows and moves the others.
- `find` gives slot -1 to a page without a row. Every column reads 0 there, and nobody writes there.
- Memory follows the live rows: the table doubles when they fill it, and `shrink` gives room back.
- No Python work is done per page. Not safe for use from several threads.

Rows lie in the order in which their pages came, and an index of open addressing with linear probing leads to them.
Pages are stored in path order, so a path is mostly runs of neighbouring rows. A lookup goes through the index for
the first page of a run and compares the rows from there on with the path, all at once; where runs are many, it does
so for one page in _STRIDE and guesses the next rows. What it compares lies side by side in memory, where each probe
of a big index is a wait for memory.
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

_LOG_PLACES = 6  # of the smallest index: a smaller one is not worth returning memory of
_MOST_LOAD = 0.25
_REGROWN = 0.7  # a rebuilt table is at most this full of what it may have, lest the next rebuild come soon
_KEPT = 0.25  # and one that is less full than this shrinks
_STRIDE = 16
_MOST_RUNS = 8  # followed one by one
_FEWEST_GUESSED = 512
_CHUNK = 1 << 14  # pages handled at a time, so that what a lookup gathers stays in the processor's cache
_MAPPED_BYTES = 1 << 19

# Arrays of no dimension: numpy is quicker with them than with its scalars.
_ONE = np.array(1, dtype=np.intp)
_NEXT_ROWS = np.arange(_STRIDE, dtype=np.intp)
# 2^64 over the golden ratio: it spreads near and strided values, which tests and made-up traces have.
_FACTOR_INT, _WORD = 0x9E3779B97F4A7C15, 2**64 - 1
_FACTOR = np.array(_FACTOR_INT, dtype=np.uint64)


class PageTable:
    """Pages to rows of `width` int32 columns; `columns[i][slots]` reads and writes them.

    `columns` are other arrays after an `insert` or a `shrink`: do not keep them.
    """

    def __init__(self, width: int = 1) -> None:
        self.columns: list[Column] = [np.empty(0, dtype=np.int32)] * width
        self._allocate(_LOG_PLACES)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._keys.nbytes + self._index.nbytes + sum(column.nbytes for column in self.columns)

    def find(self, pages: PageArray) -> Slots:
        """intp[n]: the slot of each page (int64[n]), -1 where it has none. Dead rows are found, too."""
        if pages.size <= _CHUNK:
            return self._find(pages)
        return np.concatenate([self._find(pages[at : at + _CHUNK]) for at in range(0, pages.size, _CHUNK)])

    def insert(self, pages: PageArray) -> Slots:
        """intp[n]: the slot of each page (int64[n]); those without a row get a dead one.

        A page that occurs twice has the same slot twice. Read `columns` after this, not before.
        """
        return self.insert_told(pages)[0]

    def insert_told(self, pages: PageArray) -> tuple[Slots, bool]:
        """As `insert`, and whether all rows are new and distinct, which saves the caller finding out."""
        slots, places = self._find_places(pages)
        absent = (slots < 0).nonzero()[0]
        if not absent.size:
            return slots, not pages.size
        if absent.size > self._most - self._used:
            # The rebuild also drops dead rows of these pages.
            self._rebuild(self._live() + pages.size)
            slots, places = self._find_places(pages)
            absent = (slots < 0).nonzero()[0]
        new, places = (pages, places) if absent.size == pages.size else (pages[absent], places[absent])
        ordered = np.sort(new)
        if np.count_nonzero(ordered[1:] == ordered[:-1]):
            _, first, place = np.unique(new, return_index=True, return_inverse=True)
            order = np.sort(first)  # not that of the pages' values: a path is to stay a run of rows
            slots[absent] = self._append(new[order], places[order])[np.searchsorted(order, first)[place]]
            return slots, False
        slots[absent] = self._append(new, places)
        return slots, new is pages

    def pages(self, slots: Slots) -> PageArray:
        """int64[n]: the pages at these slots, dead or not. None may be -1."""
        found: PageArray = self._keys[slots]
        return found

    def shrink(self, live: int) -> None:
        """Give memory back when the owner has so few live rows left that it pays."""
        if live < self._most * _KEPT and self._log_places > _LOG_PLACES:
            self._rebuild(live)

    # ------------------------------------------------------------------------- inside

    def _allocate(self, log_places: int) -> None:
        places = 1 << log_places
        self._log_places = log_places
        self._index = _zeros(places, np.int32)  # slot + 1 of the page whose place it is, 0: free
        self._last_place = np.array(places - 1, dtype=np.intp)
        self._shift = np.array(64 - log_places, dtype=np.uint64)
        self._most = int(places * _MOST_LOAD)
        # The last row is what -1 reads.
        self._keys: PageArray = _zeros(self._most + 1, np.int64)
        self.columns = [_zeros(self._most + 1, np.int32) for _ in self.columns]
        self._used = 0  # rows, the dead ones too

    def _home(self, pages: PageArray) -> Slots:
        hashed: npt.NDArray[np.uint64] = pages.view(np.uint64) * _FACTOR
        hashed >>= self._shift
        homes: Slots = hashed.view(np.intp)
        return homes

    def _find(self, pages: PageArray) -> Slots:
        slots: Slots = np.empty(pages.size, dtype=np.intp)
        at = 0
        for _ in range(_MOST_RUNS if self._used else 0):
            if at == pages.size:
                return slots
            slot = self._slot(int(pages[at]))
            if slot < 0:
                break
            run = self._keys[slot : min(slot + pages.size - at, self._used)]
            same = run == pages[at : at + run.size]
            length = run.size if np.count_nonzero(same) == run.size else int(same.argmin())
            slots[at : at + length] = np.arange(slot, slot + length)
            at += length
            if length < _STRIDE:
                break
        if at < pages.size:
            slots[at:] = self._guess(pages[at:])
        return slots

    def _find_places(self, pages: PageArray) -> tuple[Slots, Slots]:
        """`find`, and for pages without a row where in the index to look for a place first."""
        places = self._home(pages)
        # Pages that are stored mostly come again, or are all new.
        if pages.size and pages.size < _FEWEST_GUESSED and self._slot(int(pages[0])) < 0:
            return self._probe(pages, places), places
        return self.find(pages), places

    def _slot(self, page: int) -> int:
        """`find` for one page."""
        index, keys, last = self._index, self._keys, len(self._index) - 1
        place = (page * _FACTOR_INT & _WORD) >> 64 - self._log_places
        while (slot := int(index[place]) - 1) >= 0 and keys[slot] != page:
            place = place + 1 & last
        return slot

    def _guess(self, pages: PageArray) -> Slots:
        """`find` for a path of many runs."""
        if pages.size < _FEWEST_GUESSED or not self._used:
            return self._probe(pages, self._home(pages))
        anchors = pages[::_STRIDE]
        first = self._probe(anchors, self._home(anchors))
        slots: Slots = np.add.outer(first, _NEXT_ROWS).ravel()[: pages.size]
        known = self._keys.take(slots, mode="clip") == pages
        # A guess means nothing where the first is absent, and behind the last row.
        known &= np.repeat(first >= 0, _STRIDE)[: pages.size]
        known &= slots < self._used
        if np.count_nonzero(known) < pages.size:
            rest = (~known).nonzero()[0]
            pages = pages[rest]
            slots[rest] = self._probe(pages, self._home(pages))
        return slots

    def _probe(self, pages: PageArray, places: Slots) -> Slots:
        """`find` by way of the index, from these places on; they are then those where the search ended."""
        slots: Slots = self._index.take(places).astype(np.intp)
        slots -= _ONE
        rest = (self._keys.take(slots, mode="wrap") != pages).nonzero()[0]
        rest = rest[slots[rest] >= 0]
        if rest.size:
            pages, onward = pages[rest], places[rest]
            while rest.size:
                onward += _ONE
                onward &= self._last_place
                places[rest] = onward
                found = self._index.take(onward).astype(np.intp)
                found -= _ONE
                slots[rest] = found
                on = ((self._keys.take(found, mode="wrap") != pages) & (found >= 0)).nonzero()[0]
                rest, pages, onward = rest[on], pages[on], onward[on]
        return slots

    def _append(self, pages: PageArray, places: Slots) -> Slots:
        """Rows for distinct pages that have none, in the first free place from these on; there must be room."""
        slots = np.arange(self._used, self._used + pages.size, dtype=np.intp)
        self._keys[self._used : self._used + pages.size] = pages
        self._used += pages.size
        numbers = slots + _ONE
        while numbers.size:
            free = self._index.take(places) == 0
            # Of pages that want the same place, the last one written has it.
            self._index[places[free]] = numbers[free]
            on = (self._index.take(places) != numbers).nonzero()[0]
            places, numbers = places[on] + _ONE, numbers[on]
            places &= self._last_place
        return slots

    def _live(self) -> int:
        return sum(int(np.count_nonzero(self._is_live(at))) for at in range(0, self._used, _CHUNK))

    def _is_live(self, at: int) -> npt.NDArray[np.bool_]:
        """bool[n]: which of the next _CHUNK rows, or of those that there are, are live."""
        end = min(at + _CHUNK, self._used)
        live: npt.NDArray[np.bool_] = self.columns[0][at:end] != 0
        for column in self.columns[1:]:
            live |= column[at:end] != 0
        return live

    def _rebuild(self, rows: int) -> None:
        """A table of the live rows in the order that they had, with room for this many and some more."""
        log_places = _LOG_PLACES
        while (1 << log_places) * _MOST_LOAD * _REGROWN < rows:
            log_places += 1
        old = PageTable.__new__(PageTable)
        old._keys, old.columns, old._used = self._keys, self.columns, self._used
        self._allocate(log_places)
        for at in range(0, old._used, _CHUNK):
            live = old._is_live(at).nonzero()[0]
            live += at
            pages = old._keys[live]
            slots = self._append(pages, self._home(pages))
            for column, values in zip(self.columns, old.columns, strict=True):
                column[slots] = values[live]


def _zeros(count: int, dtype: type[_T]) -> npt.NDArray[_T]:
    size = count * np.dtype(dtype).itemsize
    if size < _MAPPED_BYTES:
        return np.zeros(count, dtype=dtype)
    # The allocator may keep what is freed; a mapping of its own always goes back to the system.
    mapped: npt.NDArray[_T] = np.frombuffer(mmap.mmap(-1, size), dtype=dtype)
    return mapped
