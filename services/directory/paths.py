"""The paths of all active branches as a forest of segments, so that what branches share is stored once.

Rules that hold here
- A segment is a run of pages behind a point of its parent segment, or behind nothing. A path is the way from a
  root to a *tip*: a segment and a depth in it. Hashes are chained, so a page has one place in the forest.
- A point of a segment is used by tips and by children that begin there. A segment ends at its last used point
  and goes when it has none: every stored page belongs to an active branch's path.
- A tip never moves when another path grows, shrinks or ends.
- `take` returns what changed since the call before, as it is to be written.
- No I/O and no clock.

A branch that appends lengthens its segment in place. A new, forked or rewritten path is followed from the root
as far as it is known, one comparison of arrays a segment, and begins a segment of its own after that.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from shared.messages import PageArray, pack_pages, unpack_pages

EMPTY_PATH: PageArray = np.empty(0, dtype=np.int64)


class SegmentRecord(msgspec.Struct, array_like=True):
    """What is kept of a segment beside its pages. `start`: pages of a path before its first."""

    parent: int  # number of the parent, 0 for none
    start: int
    pages: int


class Segment:
    __slots__ = ("number", "pages", "parent", "start", "used")

    def __init__(self, number: int, parent: Segment | None, start: int, pages: PageArray) -> None:
        self.number = number
        self.parent = parent
        self.start = start
        self.pages = pages
        self.used: dict[int, int] = {}  # depth -> tips there and children that begin there

    @property
    def end(self) -> int:
        return self.start + int(self.pages.size)


class Tip(NamedTuple):
    """Where a path ends; `segment` None for the empty path. `depth`: pages of the path."""

    segment: Segment | None
    depth: int


NO_TIP = Tip(None, 0)


class PathChanges(NamedTuple):
    """Records (None: deleted) and pages (first changed one within the segment, all from there on)."""

    segments: dict[int, SegmentRecord | None]
    pages: dict[int, tuple[int, bytes]]


class PathStore:
    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._starts: dict[int, Segment] = {}  # first page of a segment
        self._next = 1
        self._dirty: dict[int, int] = {}  # changed segment -> first changed page within it

    def __len__(self) -> int:
        """Segments."""
        return len(self._segments)

    @property
    def pages(self) -> int:
        """Stored pages."""
        return sum(int(segment.pages.size) for segment in self._segments.values())

    @property
    def changed(self) -> bool:
        return bool(self._dirty)

    # ------------------------------------------------------------------------- paths

    def move(self, tip: Tip, path: PageArray, common: int) -> Tip:
        """The tip for `path` (int64[n]), whose first `common` pages are those of the path at `tip`, which goes."""
        new = self._extend(*_at(tip.segment, common), path)
        self._use(new)
        self.release(tip)
        return new

    def release(self, tip: Tip) -> None:
        """The path at `tip` is not needed any more."""
        segment, depth = tip
        while segment is not None:
            left = segment.used[depth] - 1
            if left:
                segment.used[depth] = left
                return
            del segment.used[depth]
            if segment.used:
                end = max(segment.used)
                if end < segment.end:
                    segment.pages = segment.pages[: end - segment.start].copy()
                    self._changed(segment, end - segment.start)
                return
            del self._segments[segment.number]
            self._dirty[segment.number] = 0
            if self._starts.get(int(segment.pages[0])) is segment:
                del self._starts[int(segment.pages[0])]
            depth, segment = segment.start, segment.parent

    def path(self, tip: Tip) -> PageArray:
        """int64[tip.depth]: a new array, but a view where one segment holds it all."""
        segment, depth = tip
        parts: list[PageArray] = []
        while segment is not None:
            parts.append(segment.pages[: depth - segment.start])
            depth, segment = segment.start, segment.parent
        if not parts:
            return EMPTY_PATH
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])

    def _extend(self, segment: Segment | None, depth: int, path: PageArray) -> Tip:
        """Follow `path` from a point on, which is at `depth` of it; what is not known becomes a segment."""
        while depth < path.size:
            if segment is not None and depth < segment.end:
                known = common_pages(segment.pages[depth - segment.start :], path[depth:])
                depth += known
                if known:
                    continue
            child = self._starts.get(int(path[depth]))
            if child is not None and child.parent is segment and child.start == depth:
                segment = child
                continue
            if segment is not None and depth == segment.end:
                self._changed(segment, depth - segment.start)
                segment.pages = path[segment.start :]
            else:
                segment = self._new(segment, depth, path[depth:])
            depth = path.size
        return Tip(segment, depth)

    def _new(self, parent: Segment | None, start: int, pages: PageArray) -> Segment:
        segment = Segment(self._next, parent, start, pages)
        self._next += 1
        self._segments[segment.number] = segment
        # A sender that breaks the rule of chained hashes may use the page elsewhere: it is then not found here.
        self._starts.setdefault(int(pages[0]), segment)
        self._changed(segment, 0)
        self._use(Tip(parent, start))
        return segment

    def _use(self, tip: Tip) -> None:
        if tip.segment is not None:
            tip.segment.used[tip.depth] = tip.segment.used.get(tip.depth, 0) + 1

    def _changed(self, segment: Segment, first: int) -> None:
        self._dirty[segment.number] = min(first, self._dirty.get(segment.number, first))

    # ------------------------------------------------------------------------- to write and to read

    def take(self) -> PathChanges:
        """What changed since the call before."""
        changes = PathChanges({}, {})
        for number, first in self._dirty.items():
            segment = self._segments.get(number)
            if segment is None:
                changes.segments[number] = None
                continue
            parent = 0 if segment.parent is None else segment.parent.number
            size = int(segment.pages.size)
            changes.segments[number] = SegmentRecord(parent, segment.start, size)
            if first < size:
                changes.pages[number] = (first, pack_pages(segment.pages[first:]))
        self._dirty = {}
        return changes

    def restore(self, records: dict[int, SegmentRecord], pages: dict[int, bytes]) -> list[int]:
        """Take back what was written; returns the segments that are damaged, or hang from one that is.

        Nothing is used yet: `claim` the tips, then `sweep`.
        """
        damaged: list[int] = []
        self._next = max(records, default=0) + 1
        # A parent is older than its children.
        for number in sorted(records):
            record = records[number]
            parent = self._segments.get(record.parent)
            try:
                own = unpack_pages(pages.get(number, b""))[: record.pages]
            except ValueError:
                own = EMPTY_PATH
            if own.size != record.pages or not own.size or (parent is None) != (record.parent == 0) or (
                record.start != 0 if parent is None else not parent.start < record.start <= parent.end
            ):  # fmt: skip
                damaged.append(number)
                continue
            segment = self._segments[number] = Segment(number, parent, record.start, own)
            self._starts.setdefault(int(own[0]), segment)
        for segment in self._segments.values():
            self._use(Tip(segment.parent, segment.start))
        for number in damaged:
            self._dirty[number] = 0
        return damaged

    def claim(self, number: int, depth: int) -> Tip | None:
        """A saved path's tip (segment 0 and depth 0: the empty path); None when it is not here."""
        if not number:
            return None if depth else NO_TIP
        segment = self._segments.get(number)
        if segment is None or not segment.start < depth <= segment.end:
            return None
        tip = Tip(segment, depth)
        self._use(tip)
        return tip

    def sweep(self) -> int:
        """Let go of what no tip claimed; returns how many segments that were."""
        before = len(self._segments)
        for segment in list(self._segments.values()):
            if segment.number in self._segments and max(segment.used, default=0) < segment.end:
                tip = Tip(segment, segment.end)
                self._use(tip)
                self.release(tip)
        return before - len(self._segments)


def _at(segment: Segment | None, depth: int) -> Tip:
    """The segment of a path that has its page `depth` - 1, given one further along."""
    while segment is not None and segment.start >= depth:
        segment = segment.parent
    return Tip(segment, depth) if segment is not None else NO_TIP


def common_pages(a: PageArray, b: PageArray) -> int:
    """Length of the common prefix of two paths."""
    n = min(a.size, b.size)
    if not n or a[0] != b[0]:
        return 0
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def tip_number(tip: Tip) -> int:
    """The number that `claim` takes."""
    return 0 if tip.segment is None else tip.segment.number
