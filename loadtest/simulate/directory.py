"""The directory of a simulated cluster: the service's own tables and counts, without its stores."""

from __future__ import annotations

from collections.abc import Callable

from services.directory.branches import BranchTable
from services.directory.counts import Counts, NodeChanges
from shared.kvindex import KvIndex
from shared.messages import BranchEnded, BranchPlaced, BranchRequest, PageArray, Phase, pack_pages
from shared.pagetable import PageTable


class SimDirectory:
    """Algorithms E.1 and E.2. `index` says what nodes hold; its owner tells of what changes there."""

    def __init__(self, index: KvIndex, table: Callable[[], PageTable]) -> None:
        """`table`: see `Counts`."""
        self.branches = BranchTable()
        self.counts = Counts(index, self.branches.path, table)

    def request(self, branch: str, parent: str | None, path: PageArray, base: int, now: float) -> None:
        """A request of the branch, whose path shares its first `base` pages with the branch's last one, at least."""
        known = self.branches.path(branch)
        base = min(base, known.size, path.size)
        message = BranchRequest(
            branch=branch, base=base, base_page=int(path[base - 1]) if base else 0, pages=pack_pages(path[base:]),
            parent=parent, t=now,
        )  # fmt: skip
        step = self.branches.request(message, now)
        if step.common < step.old.size:
            self.counts.rewritten(branch, step.old, step.common)

    def placed(self, branch: str, node: str, phase: Phase, rid: str, now: float) -> None:
        if self.branches.place(BranchPlaced(branch, node, phase, now, rid), now):
            self.counts.place(branch, node, phase)

    def ended(self, branch: str, now: float) -> None:
        over = self.branches.end(BranchEnded(branch, now))
        if over is not None:
            self.counts.end(over.name, over.path)

    def take_changes(self) -> dict[str, NodeChanges]:
        """Pages whose count became positive or zero, by node."""
        self.counts.take_touched()
        self.branches.paths.take()
        return self.counts.take_changes()
