"""Checks of what the directory keeps in Redis, made from the records alone and without its own code for counting.

Rules that hold here
- R of every page is rebuilt as the number of branches that count it: a branch counts on a node the first pages of
  its path that its record says, without those that the node evicted. What differs from Redis is a difference.
- What a node holds, as it says itself, is compared only where the directory has applied all its events: then a
  move whose target has the whole path must have settled. Counted pages that a node lacks are no difference: they
  may be on their way, and a count for a page that never comes goes with the branch's next step there.
- No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from services.directory.paths import EMPTY_PATH, SegmentRecord
from services.directory.saved import FIELDS, BranchRecord, NodeRecord
from shared.messages import KvSnapshot, PageArray, Phase, unpack_pages
from shared.store import NO_COUNTS, Stored
from shared.streams import is_position

SHOWN_PAGES = 5  # differences of single pages, a node


class Difference(NamedTuple):
    where: str  # a node, branch or segment
    what: str


class NodeCheck(msgspec.Struct):
    """One node. `held` and `absent` are None where the node did not answer or is ahead of the directory."""

    phase: Phase | None = None
    branches: int = 0  # that count a page there
    counted: int = 0  # pages with R > 0 in Redis
    references: int = 0  # the sum of R
    wrong: int = 0  # pages whose R differs from the rebuilt one
    held: int | None = None  # pages that the node holds
    absent: int | None = None  # counted pages that it does not hold


class Report(msgspec.Struct):
    batch: int
    branches: int
    moves: int  # that wait for pages
    path_pages: int  # of all branches together
    stored_pages: int  # distinct ones, as they are stored
    nodes: dict[str, NodeCheck]
    differences: list[Difference]


class Paths:
    """Paths as the segment records give them."""

    def __init__(self, segments: Mapping[int, bytes], pages: Mapping[int, bytes]) -> None:
        self._segments, self._pages = segments, pages
        self.used: dict[int, int] = {}  # segment -> pages of it that some path has
        self.damaged: dict[int, str] = {}

    def path(self, number: int, pages: int) -> PageArray | None:
        """int64[pages]; None when a segment on the way is missing or damaged."""
        parts: list[PageArray] = []
        end = pages
        while number:
            segment = self._segment(number)
            if segment is None:
                return None
            record, own = segment
            if not record.start < end <= record.start + record.pages:
                self.damaged[number] = f"has pages {record.start} to {record.start + record.pages}, not {end}"
                return None
            self.used[number] = max(self.used.get(number, 0), end - record.start)
            parts.append(own[: end - record.start])
            number, end = record.parent, record.start
        if end:
            return None
        return np.concatenate(parts[::-1]) if parts else EMPTY_PATH

    def _segment(self, number: int) -> tuple[SegmentRecord, PageArray] | None:
        if number not in self._segments:
            self.damaged[number] = "has no record"
            return None
        try:
            record = msgspec.msgpack.decode(self._segments[number], type=SegmentRecord)
            own = unpack_pages(self._pages.get(number, b""))[: record.pages]
        except (msgspec.MsgspecError, ValueError) as error:
            self.damaged[number] = f"cannot be read: {error}"
            return None
        if own.size < record.pages:
            self.damaged[number] = f"has {own.size} pages of {record.pages}"
            return None
        return record, own

    def unused(self) -> Iterator[tuple[int, str]]:
        """Segments, or ends of them, that no path has."""
        for number in self._segments:
            segment = self._segment(number)
            if segment is None:
                continue
            used = self.used.get(number, 0)
            if used < segment[0].pages:
                yield number, f"keeps {segment[0].pages - used} pages that no branch's path has"


def _other_state(stored: Stored) -> Iterator[Difference]:
    """Positions and numbers that cannot be read."""
    for field, decoder in FIELDS.items():
        if field in stored.state:
            try:
                value = decoder.decode(stored.state[field])
            except msgspec.MsgspecError as error:
                yield Difference(field, f"cannot be read: {error}")
                continue
            for stream, position in value.items() if field == "streams" else ():
                if not is_position(position):
                    yield Difference(field, f"{position!r} is no position on {stream}")


def verify(stored: Stored, snapshots: Mapping[str, KvSnapshot]) -> Report:
    """Rebuild and compare. `snapshots`: what nodes that answered hold now."""
    differences: list[Difference] = list(_other_state(stored))
    nodes: dict[str, NodeCheck] = {}
    records: dict[str, NodeRecord] = {}
    for field, blob in stored.state.items():
        if field.startswith("node:"):
            node = field.removeprefix("node:")
            try:
                records[node] = msgspec.msgpack.decode(blob, type=NodeRecord)
                nodes[node] = NodeCheck(records[node].phase)
            except msgspec.MsgspecError as error:
                differences.append(Difference(f"node {node}", f"the record cannot be read: {error}"))
    held = {node: _held(records.get(node), snapshots.get(node)) for node in records}
    paths = Paths(stored.segments, stored.pages)
    counted: dict[str, list[PageArray]] = {}
    moves = path_pages = 0
    for name, blob in sorted(stored.branches.items()):
        try:
            branch = msgspec.msgpack.decode(blob, type=BranchRecord)
        except msgspec.MsgspecError as error:
            differences.append(Difference(f"branch {name}", f"the record cannot be read: {error}"))
            continue
        path = paths.path(branch.segment, branch.path_pages)
        if path is None:
            differences.append(
                Difference(f"branch {name}", f"its path of {branch.path_pages} pages is damaged")
            )
            continue
        path_pages += path.size
        moves += len(branch.pending)
        for node, c in branch.counted.items():
            if not 0 <= c.pages <= path.size or any(not 0 <= depth < c.pages for depth in c.holes):
                text = f"counts {c.pages} pages on {node} of a path of {path.size}"
                differences.append(Difference(f"branch {name}", text))
                continue
            if not 0 < c.phases <= 3:
                text = f"counts pages on {node} for no phase ({c.phases})"
                differences.append(Difference(f"branch {name}", text))
                continue
            kept = np.ones(c.pages, dtype=np.bool_)
            kept[c.holes] = False
            counted.setdefault(node, []).append(path[: c.pages][kept])
            nodes.setdefault(node, NodeCheck()).branches += 1
        for phase, node in branch.pending.items():
            pages = held.get(node)
            if pages is not None and np.isin(path, pages).all():
                text = f"its {phase} move to {node} has not settled, though {node} holds the whole path"
                differences.append(Difference(f"branch {name}", text))
    for number, text in sorted([*paths.damaged.items(), *paths.unused()]):
        differences.append(Difference(f"segment {number}", text))
    for node in sorted({*counted, *stored.counts, *nodes}):
        check = nodes.setdefault(node, NodeCheck())
        differences += _compare(node, check, stored, counted.get(node, []), held.get(node))
    stored_pages = sum(paths.used.values())
    return Report(
        stored.number, len(stored.branches), moves, path_pages, stored_pages,
        dict(sorted(nodes.items())), differences,
    )  # fmt: skip


def _held(record: NodeRecord | None, snapshot: KvSnapshot | None) -> PageArray | None:
    """The node's pages, when they are those that the directory knows."""
    if record is None or snapshot is None:
        return None
    if (snapshot.incarnation, snapshot.seq) != (record.incarnation, record.seq):
        return None
    return np.union1d(unpack_pages(snapshot.l1), unpack_pages(snapshot.l2))


def _compare(
    node: str, check: NodeCheck, stored: Stored, counted: list[PageArray], held: PageArray | None
) -> Iterator[Difference]:
    saved = stored.counts.get(node, NO_COUNTS)
    check.counted, check.references = saved.pages.size, int(saved.counts.sum())
    wanted = np.concatenate(counted) if counted else EMPTY_PATH
    pages, rebuilt = np.unique(wanted, return_counts=True)
    every = np.union1d(pages, saved.pages)
    should, has = np.zeros(every.size, np.int64), np.zeros(every.size, np.int64)
    should[np.searchsorted(every, pages)] = rebuilt
    has[np.searchsorted(every, saved.pages)] = saved.counts
    wrong = np.flatnonzero(should != has)
    check.wrong = int(wrong.size)
    for at in wrong[:SHOWN_PAGES].tolist():
        name = int(every[at]) & (1 << 64) - 1
        yield Difference(f"node {node}", f"page {name:016x}: R is {has[at]}, {should[at]} branches count it")
    if wrong.size > SHOWN_PAGES:
        yield Difference(f"node {node}", f"R is wrong of {wrong.size - SHOWN_PAGES} pages more")
    if held is not None:
        check.held = int(held.size)
        check.absent = int(np.count_nonzero(~np.isin(saved.pages, held)))
