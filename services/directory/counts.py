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

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from shared.kvindex import KvIndex
from shared.messages import PageArray, Phase

# A page's entry in a node's table is depth * _DEPTH + R. Chained hashes give a page one depth (its place in a
# path) wherever it occurs, so whether a branch counts an evicted page is one comparison.
_DEPTH = 1 << 24
_COUNT = _DEPTH - 1

_REBUILD_PAGES = 4096  # a smaller table is not worth returning memory of
_CHECK_PAGES = 512  # pages looked up at a time when a pending move is checked

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


class NodeChanges(NamedTuple):
    """What changed on a node: R of every changed page; pages that became positive, and zero."""

    counts: dict[int, int]
    positive: list[int]
    zero: list[int]


class Counts:
    """R, C and pending moves. `index` says what nodes hold, `path` gives a branch's current path."""

    def __init__(self, index: KvIndex, path: Callable[[str], PageArray]) -> None:
        self._index = index
        self._path = path
        self._tables: dict[str, dict[int, int]] = {}  # node -> page -> depth and R
        self._peaks: dict[str, int] = {}  # most pages a table has had since it was built
        self._counted: dict[str, dict[str, Counted]] = {}  # branch -> node -> C
        self._branches: dict[str, set[str]] = {}  # node -> branches with a C there
        self._pending: dict[tuple[str, Phase], Pending] = {}
        self._awaited: dict[str, set[tuple[str, Phase]]] = {}  # node -> pending moves to it
        self._before: dict[str, dict[int, int]] = {}  # node -> changed page -> R before the change
        self._touched: set[str] = set()

    # ------------------------------------------------------------------------- questions

    def count(self, node: str, page: int) -> int:
        """R[page, node]."""
        table = self._tables.get(node)
        return table.get(page, 0) & _COUNT if table else 0

    def counted_pages(self, node: str) -> int:
        """Pages of the node with a positive count."""
        return len(self._tables.get(node, ()))

    def positive(self, node: str) -> PageArray:
        """int64[n]: pages of the node with a positive count, in no order that means something."""
        table = self._tables.get(node, {})
        return np.fromiter(table, dtype=np.int64, count=len(table))

    def table(self, node: str) -> dict[int, int]:
        """R of every page of the node that is not zero: a copy."""
        return {page: value & _COUNT for page, value in self._tables.get(node, {}).items()}

    def nodes(self) -> list[str]:
        """Nodes with a positive count."""
        return [node for node, table in self._tables.items() if table]

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
        return bool(self._before or self._touched)

    @property
    def changed_pages(self) -> int:
        """Pages in the next `take_changes`, at most."""
        return sum(len(pages) for pages in self._before.values())

    def take_touched(self) -> set[str]:
        """Branches whose C or pending moves may have changed since the last call, ended ones too."""
        touched, self._touched = self._touched, set()
        return touched

    def take_changes(self) -> dict[str, NodeChanges]:
        """What changed in R since the last call, by node; pages with the same R as then are left out."""
        before, self._before = self._before, {}
        changes: dict[str, NodeChanges] = {}
        for node, pages in before.items():
            table = self._tables.get(node, {})
            found = NodeChanges({}, [], [])
            for page, old in pages.items():
                new = table.get(page, 0) & _COUNT
                if new == old:
                    continue
                found.counts[page] = new
                if not old:
                    found.positive.append(page)
                elif not new:
                    found.zero.append(page)
            if found.counts:
                changes[node] = found
            self._shrink(node)
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
        table = self._tables.get(node)
        if not table:
            return
        found = [(page, table[page]) for page in pages.tolist() if page in table]
        if not found:
            return
        left = {page: value & _COUNT for page, value in found}
        hashes = np.array([page for page, _ in found], dtype=np.int64)
        depths = np.array([value // _DEPTH for _, value in found], dtype=np.int64)
        for branch in list(self._branches[node]):
            counted = self._counted[branch][node]
            inside = np.flatnonzero(depths < counted.pages)
            hit = inside[self._path(branch)[depths[inside]] == hashes[inside]]
            for page, depth in zip(hashes[hit].tolist(), depths[hit].tolist(), strict=True):
                if depth not in counted.holes:
                    counted.holes.add(depth)
                    left[page] -= 1
            if hit.size:
                self._touched.add(branch)
                self._tidy(branch, node, counted)
        before = self._before.setdefault(node, {})
        for page, value in found:
            if left[page]:
                self._leave_every_path(node, page)
            before.setdefault(page, value & _COUNT)
            table.pop(page, None)

    def stored(self, node: str) -> None:
        """The node has more pages than before: settle the moves that waited for them."""
        for branch, phase in list(self._awaited.get(node, ())):
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
        """Bring back what `of` and `pending_of` gave; collected as changes, which the caller may discard."""
        for node, entry in counted.items():
            entry.pages = min(entry.pages, path.size)
            entry.holes = {depth for depth in entry.holes if depth < entry.pages}
            self._counted.setdefault(branch, {})[node] = entry
            self._branches.setdefault(node, set()).add(branch)
            self._add(node, path, (d for d in range(entry.pages) if d not in entry.holes))
            self._tidy(branch, node, entry)
        for phase, node in pending.items():
            self._pending[branch, phase] = Pending(node, 0)
            self._awaited.setdefault(node, set()).add((branch, phase))

    def expect(self, node: str, saved: dict[int, int]) -> int:
        """Collect as changes where R differs from what was saved; returns how many pages do."""
        table = self.table(node)
        differ = {page for page, _ in table.items() ^ saved.items()}
        if differ:
            self._before.setdefault(node, {}).update({page: saved.get(page, 0) for page in differ})
        return len(differ)

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
            self._add(node, path, counted.holes)
            counted.holes = set()
        self._add(node, path, range(counted.pages, path.size))
        counted.pages = path.size

    def _cut(self, branch: str, node: str, path: PageArray, pages: int) -> None:
        """Count(β, n, C ∩ the first `pages` pages of `path`, which is the path that C is of)."""
        counted = self._counted[branch][node]
        if counted.pages <= pages:
            return
        holes = counted.holes
        table = self._tables[node]
        before = self._before.setdefault(node, {})
        for depth, page in enumerate(path[pages : counted.pages].tolist(), pages):
            if depth in holes:
                continue
            value = table[page]
            before.setdefault(page, value & _COUNT)
            if value & _COUNT == 1:
                del table[page]
            else:
                table[page] = value - 1
        counted.pages = pages
        counted.holes = {depth for depth in holes if depth < pages}
        self._touched.add(branch)
        self._tidy(branch, node, counted)

    def _add(self, node: str, path: PageArray, depths: range | set[int] | Iterator[int]) -> None:
        table = self._tables.setdefault(node, {})
        before = self._before.setdefault(node, {})
        pages = path.tolist() if not isinstance(depths, range) else path[depths.start : depths.stop].tolist()
        first = depths.start if isinstance(depths, range) else 0
        for depth in depths:
            page = pages[depth - first]
            value = table.get(page, depth * _DEPTH)
            before.setdefault(page, value & _COUNT)
            table[page] = value + 1
        self._peaks[node] = max(self._peaks.get(node, 0), len(table))

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

    def _shrink(self, node: str) -> None:
        table = self._tables.get(node)
        if table is None:
            return
        if not table:
            del self._tables[node]
            self._peaks.pop(node, None)
        elif self._peaks[node] > _REBUILD_PAGES and len(table) < self._peaks[node] // 4:
            # A dict keeps its room when items go; a copy has what it needs.
            self._tables[node] = dict(table)
            self._peaks[node] = len(table)

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
        held = self._leading(pending.node, path, min(pending.held, path.size))
        # Pages seen there earlier may have left since.
        if held == path.size and pending.held:
            held = self._leading(pending.node, path, 0)
        if held < path.size:
            self._pending[branch, phase] = pending._replace(held=held)
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
