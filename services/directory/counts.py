"""How many active branches reference each page on each node: R and C of Algorithm E.2, lines 1-15 and 20.

Rules that hold here
- C[β,n], the pages that branch β counts on node n, is the first `pages` pages of β's path without the
  `holes`, which n evicted: an append keeps a prefix, a rewrite cuts it where the paths part (hashes are
  chained), a placement makes it the whole path. So C is three numbers and never a copy of the path.
- R[b,n] is at all times the number of branches with b in C[β,n]. It may be positive before n has the page.
- C[β,n] remembers the phases that β was placed on n for. A node that serves one phase has only that one; in a
  collocated warm-up it may have both. A move in a phase takes that phase from the other nodes, and a C without
  a phase is released.
- A move is pending from the placement until its target holds every page of the branch's path; then it is
  settled, once. A new placement in the same phase, a rewrite, the end of the branch, the loss of the target or
  its change to the other phase ends it unsettled. Until it settles, the sources keep their counts.
- Every change of R is collected until `take_changes`, relative to the call before.
- No I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.kvindex import KvIndex
from shared.messages import PageArray, Phase
from shared.pagetable import PageTable, Slots

_CHECK_PAGES = 512  # pages looked up at a time when a pending move is checked

_NO_PAGES: PageArray = np.empty(0, dtype=np.int64)

_BITS = {Phase.PREFILL: 1, Phase.DECODE: 2, Phase.BOTH: 3}


class Counted:
    """C[β,n]: the first `pages` pages of β's path without those at `holes`; `phases` is a mask of _BITS."""

    __slots__ = ("holes", "pages", "phases")

    def __init__(self, pages: int, phases: int, holes: set[int] | None = None) -> None:
        self.pages = pages
        self.phases = phases
        self.holes: set[int] = set() if holes is None else holes

    def __len__(self) -> int:
        return self.pages - len(self.holes)


class Pending(NamedTuple):
    """A move that waits until `node` holds the branch's path."""

    node: str
    held: int  # leading pages of the path that it held when last asked
    last: bool = False  # it held the path's last page then, which mostly comes last


class NodeChanges(NamedTuple):
    """What changed on a node: pages (int64[n]) and R of each (int32[n]); of these the pages that became positive,
    and zero."""

    pages: PageArray
    counts: npt.NDArray[np.int32]
    positive: PageArray
    zero: PageArray


class _NodeCounts:
    """R of one node's pages. Columns of a row: R, R when it was last taken, depth of the page.

    Chained hashes give a page one depth (its place in a path) wherever it occurs, so whether a branch counts an
    evicted page is one comparison.
    """

    def __init__(self, rows: PageTable) -> None:
        self.rows = rows  # of three columns
        self.touched: list[PageArray] = []  # pages whose R may differ from what was last taken
        self._distinct = False  # they are, and have rows
        self._positive = 0  # pages with R > 0 when they were last taken

    @property
    def pages(self) -> int:
        """Pages with R > 0."""
        return int(np.count_nonzero(self.rows.columns[0])) if self.touched else self._positive

    def positive(self) -> Slots:
        """Slots of the pages with R > 0."""
        return self.rows.columns[0].nonzero()[0]

    def add(self, pages: PageArray, depths: npt.NDArray[np.int32]) -> None:
        """One branch more has these pages, at these depths."""
        slots, fresh = self.rows.insert_told(pages)
        now, _, depth = self.rows.columns
        if fresh:
            depth[slots] = depths
            now[slots] = 1
            self._distinct = not self.touched
        else:
            new = now[slots] == 0
            depth[slots[new]] = depths[new]
            np.add.at(now, slots, 1)
            self._distinct = False
        self.touched.append(pages)

    def subtract(self, pages: PageArray) -> None:
        """One branch fewer has these pages."""
        np.subtract.at(self.rows.columns[0], self.rows.find(pages), 1)
        self.touch(pages)

    def touch(self, pages: PageArray) -> None:
        """R of these pages may have changed."""
        self._distinct = False
        self.touched.append(pages)

    def take(self) -> NodeChanges | None:
        """What changed since the call before; None when nothing did."""
        if not self.touched:
            return None
        pages = self.touched[0] if len(self.touched) == 1 else np.concatenate(self.touched)
        self.touched = []
        slots = self.rows.find(pages)
        if not self._distinct:
            slots = _distinct(slots)
            if slots.size and slots[0] < 0:
                slots = slots[1:]
        now, taken, depth = self.rows.columns
        new, old = now[slots], taken[slots]
        depth[slots[new == 0]] = 0
        changed = new != old
        slots, new, old = slots[changed], new[changed], old[changed]
        taken[slots] = new
        pages = self.rows.pages(slots)
        found = NodeChanges(pages, new, pages[old == 0], pages[new == 0])
        self._positive += found.positive.size - found.zero.size
        self.rows.shrink(self._positive)
        return found if pages.size else None

    def adopt(self, pages: PageArray, counts: npt.NDArray[np.int32]) -> int:
        """Take these for what was last taken; returns how many pages have another R."""
        slots = self.rows.insert(pages)
        now, taken, _ = self.rows.columns
        taken[:] = 0
        taken[slots] = counts
        self._positive = int(np.count_nonzero(taken))
        differ = (now != taken).nonzero()[0]
        self.touched = [self.rows.pages(differ)] if differ.size else []
        self._distinct = False
        return int(differ.size)


class Counts:
    """R, C and pending moves. `index` says what nodes hold, `path` gives a branch's current path, `table` a new and
    empty table of three columns for a node's counts."""

    def __init__(
        self,
        index: KvIndex,
        path: Callable[[str], PageArray],
        table: Callable[[], PageTable] = lambda: PageTable(3),
    ) -> None:
        self._table = table
        self._index = index
        self._path = path
        self._nodes: dict[str, _NodeCounts] = {}
        self._counted: dict[str, dict[str, Counted]] = {}  # branch -> node -> C
        self._branches: dict[str, set[str]] = {}  # node -> branches with a C there
        self._pending: dict[tuple[str, Phase], Pending] = {}
        self._awaited: dict[str, set[tuple[str, Phase]]] = {}  # node -> pending moves to it
        self._touched: set[str] = set()
        self._dirty: dict[str, None] = {}  # nodes whose R may have changed since it was last taken
        self._changed_pages = 0

    # ------------------------------------------------------------------------- questions

    def count(self, node: str, page: int) -> int:
        """R[page, node]."""
        counts = self._nodes.get(node)
        if counts is None:
            return 0
        slots = counts.rows.find(np.array([page], dtype=np.int64))
        return int(counts.rows.columns[0][slots[0]])

    def counted_pages(self, node: str) -> int:
        """Pages of the node with a positive count."""
        counts = self._nodes.get(node)
        return 0 if counts is None else counts.pages

    def positive(self, node: str) -> PageArray:
        """int64[n]: pages of the node with a positive count, in no order that means something."""
        counts = self._nodes.get(node)
        return _NO_PAGES if counts is None else counts.rows.pages(counts.positive())

    def table(self, node: str) -> dict[int, int]:
        """R of every page of the node that is not zero."""
        counts = self._nodes.get(node)
        if counts is None:
            return {}
        slots = counts.positive()
        values = counts.rows.columns[0][slots].tolist()
        return dict(zip(counts.rows.pages(slots).tolist(), values, strict=True))

    def nodes(self) -> list[str]:
        """Nodes with a positive count."""
        return [node for node, counts in self._nodes.items() if counts.pages]

    def of(self, branch: str) -> dict[str, Counted]:
        """C of the branch by node (N_β are its keys); do not change it."""
        return self._counted.get(branch, {})

    def pending_of(self, branch: str) -> dict[Phase, str]:
        """Targets of the branch's moves that are not settled."""
        found = ((phase, self._pending.get((branch, phase))) for phase in (Phase.PREFILL, Phase.DECODE))
        return {phase: pending.node for phase, pending in found if pending is not None}

    @property
    def pending_moves(self) -> int:
        return len(self._pending)

    @property
    def changed(self) -> bool:
        """Whether `take_changes` or `take_touched` has something to give."""
        return bool(self._touched or self._dirty)

    @property
    def changed_pages(self) -> int:
        """Pages in the next `take_changes`, at most."""
        return self._changed_pages

    def take_touched(self) -> set[str]:
        """Branches whose C or pending moves may have changed since the last call, ended ones too."""
        touched, self._touched = self._touched, set()
        return touched

    def take_changes(self) -> dict[str, NodeChanges]:
        """What changed in R since the last call, by node; pages with the same R as then are left out."""
        changes: dict[str, NodeChanges] = {}
        dirty, self._dirty, self._changed_pages = self._dirty, {}, 0
        for node in dirty:
            counts = self._nodes[node]
            found = counts.take()
            if found is not None:
                changes[node] = found
            if not counts.pages:
                del self._nodes[node]
        return changes

    # ------------------------------------------------------------------------- Algorithm E.2

    def rewritten(self, branch: str, old: PageArray, common: int) -> None:
        """Lines 6-8: the branch's path `old` was left after `common` pages; what it dropped is released."""
        for node in list(self.of(branch)):
            self._cut(branch, node, old, common)
        self._cancel(branch)

    def place(self, branch: str, node: str, phase: Phase) -> None:
        """Lines 9-12: the branch's path is now served on the node in that phase."""
        if phase is Phase.BOTH:
            self.place(branch, node, Phase.PREFILL)
            self.place(branch, node, Phase.DECODE)
            return
        self._touched.add(branch)
        self._count_all(branch, node, _BITS[phase])
        self._cancel(branch, phase)
        if any(other != node and c.phases & _BITS[phase] for other, c in self.of(branch).items()):
            self._pending[branch, phase] = Pending(node, 0)
            self._awaited.setdefault(node, set()).add((branch, phase))
            self._check(branch, phase)

    def end(self, branch: str, path: PageArray) -> None:
        """Line 13: the branch, whose path is `path`, is over."""
        self.rewritten(branch, path, 0)

    def switched(self, node: str, before: Phase | None, now: Phase) -> None:
        """Lines 14-15: the node changed its phase. None: its phase was not known, and nothing is reset."""
        for branch in list(self._branches.get(node, ())):
            counted = self._counted[branch][node]
            if before is Phase.DECODE and now is Phase.PREFILL:
                # One that was placed here for prefill came after the switch, though it is heard of before.
                phases = counted.phases & _BITS[Phase.PREFILL]
            elif now is Phase.BOTH:
                phases = counted.phases
            else:
                phases = _BITS[now]
            self._set_phases(branch, node, phases)
        for branch, phase in list(self._awaited.get(node, ())):
            if not _BITS[phase] & _BITS[now]:
                self._cancel(branch, phase)

    def evicted(self, node: str, pages: PageArray) -> None:
        """Line 20: these pages (int64[n]) left the node altogether; they leave every C there."""
        counts = self._nodes.get(node)
        if counts is None:
            return
        slots = counts.rows.find(pages)
        now, _, depth = counts.rows.columns
        counted_here = now[slots] > 0
        hashes, slots = pages[counted_here], slots[counted_here]
        if not slots.size:
            return
        left, depths = now[slots], depth[slots]
        for branch in list(self._branches[node]):
            counted = self._counted[branch][node]
            inside = (depths < counted.pages).nonzero()[0]
            hit = inside[self._path(branch)[depths[inside]] == hashes[inside]]
            if not hit.size:
                continue
            if counted.holes:
                hit = hit[[d not in counted.holes for d in depths[hit].tolist()]]
            left[hit] -= 1
            counted.holes.update(depths[hit].tolist())
            self._touched.add(branch)
            self._tidy(branch, node, counted)
        for page in hashes[left > 0].tolist():
            self._leave_every_path(node, page)
        now[slots] = 0
        counts.touch(hashes)
        self._changed(node, hashes.size)

    def stored(self, node: str, pages: PageArray | None = None) -> None:
        """The node has more pages than before, these (int64[n]) if they are given: settle the moves that waited for
        them."""
        awaited = self._awaited.get(node)
        if not awaited:
            return
        new = None if pages is None else set(pages.tolist())
        for branch, phase in list(awaited):
            if new is not None and not self._pending[branch, phase].last:
                path = self._path(branch)
                if path.size and int(path[-1]) not in new:
                    continue
            self._check(branch, phase)

    def drop_node(self, node: str) -> None:
        """The node is gone or begins anew: its counts go, and so do moves to it."""
        for branch in list(self._branches.get(node, ())):
            self._cut(branch, node, self._path(branch), 0)
        for branch, phase in list(self._awaited.get(node, ())):
            self._cancel(branch, phase)

    def restore(
        self, branch: str, counted: dict[str, Counted], pending: dict[Phase, str], path: PageArray
    ) -> None:
        """Bring back what `of` and `pending_of` gave; `adopt` follows for every node."""
        for node, entry in counted.items():
            entry.pages = min(entry.pages, path.size)
            entry.holes = {depth for depth in entry.holes if depth < entry.pages}
            self._counted.setdefault(branch, {})[node] = entry
            self._branches.setdefault(node, set()).add(branch)
            self._add(node, path, _without(range(entry.pages), entry.holes))
            self._tidy(branch, node, entry)
        for phase, node in pending.items():
            self._pending[branch, phase] = Pending(node, 0)
            self._awaited.setdefault(node, set()).add((branch, phase))

    def adopt(self, node: str, pages: PageArray, counts: npt.NDArray[np.int32]) -> int:
        """R as it was saved: what differs counts as changed since. Returns how many pages do."""
        differ = self._node(node).adopt(pages, counts)
        self._changed(node, differ)
        return differ

    # ------------------------------------------------------------------------- Count and Release

    def _count_all(self, branch: str, node: str, phases: int) -> None:
        """Count(β, n, π_β) for a placement in `phases`."""
        path = self._path(branch)
        if not path.size:
            return
        nodes = self._counted.setdefault(branch, {})
        counted = nodes.get(node)
        if counted is None:
            counted = nodes[node] = Counted(0, 0)
            self._branches.setdefault(node, set()).add(branch)
        counted.phases |= phases
        if counted.holes:
            self._add(node, path, np.array(sorted(counted.holes), dtype=np.int32))
            counted.holes = set()
        self._add(node, path, _without(range(counted.pages, path.size), ()))
        counted.pages = path.size

    def _cut(self, branch: str, node: str, path: PageArray, pages: int) -> None:
        """Count(β, n, C ∩ the first `pages` pages of `path`, which is the path that C is of)."""
        counted = self._counted[branch][node]
        if counted.pages <= pages:
            return
        left = path[_without(range(pages, counted.pages), counted.holes)]
        self._nodes[node].subtract(left)
        self._changed(node, left.size)
        counted.pages = pages
        counted.holes = {depth for depth in counted.holes if depth < pages}
        self._touched.add(branch)
        self._tidy(branch, node, counted)

    def _add(self, node: str, path: PageArray, depths: npt.NDArray[np.int32]) -> None:
        if depths.size:
            self._node(node).add(path[depths], depths)
            self._changed(node, depths.size)

    def _changed(self, node: str, pages: int) -> None:
        self._dirty[node] = None
        self._changed_pages += pages

    def _node(self, node: str) -> _NodeCounts:
        counts = self._nodes.get(node)
        if counts is None:
            counts = self._nodes[node] = _NodeCounts(self._table())
        return counts

    def _leave_every_path(self, node: str, page: int) -> None:
        """As `evicted`, for a page that a sender put at several depths, against the rule of chained hashes."""
        for branch in list(self._branches.get(node, ())):
            counted = self._counted[branch][node]
            depths = np.flatnonzero(self._path(branch)[: counted.pages] == page)
            if depths.size:
                counted.holes.update(depths.tolist())
                self._touched.add(branch)
                self._tidy(branch, node, counted)

    def _set_phases(self, branch: str, node: str, phases: int) -> None:
        counted = self._counted[branch][node]
        if counted.phases == phases:
            return
        counted.phases = phases
        self._touched.add(branch)
        if not phases:
            self._cut(branch, node, self._path(branch), 0)

    def _tidy(self, branch: str, node: str, counted: Counted) -> None:
        """Take holes off the end of a C; forget it when nothing is left (n leaves N_β)."""
        while counted.pages and counted.pages - 1 in counted.holes:
            counted.pages -= 1
            counted.holes.discard(counted.pages)
        if not counted.pages:
            nodes = self._counted[branch]
            del nodes[node]
            if not nodes:
                del self._counted[branch]
            branches = self._branches[node]
            branches.discard(branch)
            if not branches:
                del self._branches[node]

    # ------------------------------------------------------------------------- pending moves

    def _cancel(self, branch: str, phase: Phase | None = None) -> None:
        for each in (Phase.PREFILL, Phase.DECODE) if phase is None else (phase,):
            pending = self._pending.pop((branch, each), None)
            if pending is not None:
                self._touched.add(branch)
                waiting = self._awaited[pending.node]
                waiting.discard((branch, each))
                if not waiting:
                    del self._awaited[pending.node]

    def _check(self, branch: str, phase: Phase) -> None:
        """Settle the move if its target holds the whole path: Release(β, m) on the others of the phase."""
        pending = self._pending[branch, phase]
        path = self._path(branch)
        if path.size and not self._index.holds(pending.node, path[-1:])[0]:
            self._pending[branch, phase] = pending._replace(last=False)
            return
        held = self._leading(pending.node, path, min(pending.held, path.size))
        # Pages seen there earlier may have left since.
        if held == path.size and pending.held:
            held = self._leading(pending.node, path, 0)
        if held < path.size:
            self._pending[branch, phase] = pending._replace(held=held, last=True)
            return
        self._cancel(branch, phase)
        for node, counted in list(self.of(branch).items()):
            if node != pending.node:
                self._set_phases(branch, node, counted.phases & ~_BITS[phase])

    def _leading(self, node: str, path: PageArray, first: int) -> int:
        """End of the run of pages from `first` on that the node holds."""
        for start in range(first, path.size, _CHECK_PAGES):
            held = self._index.holds(node, path[start : start + _CHECK_PAGES])
            if not held.all():
                return start + int(np.argmin(held))
        return path.size


def _distinct(slots: Slots) -> Slots:
    """The slots, each once, in order. Most are runs, in order already."""
    if slots.size and np.count_nonzero(slots[1:] > slots[:-1]) == slots.size - 1:
        return slots
    slots = np.sort(slots)
    first = np.ones(slots.size, dtype=np.bool_)
    np.not_equal(slots[1:], slots[:-1], out=first[1:])
    return slots[first]


def _without(depths: range, holes: Container[int]) -> npt.NDArray[np.int32]:
    """These depths but for the holes."""
    if not holes:
        return np.arange(depths.start, depths.stop, dtype=np.int32)
    return np.array([depth for depth in depths if depth not in holes], dtype=np.int32)
