"""What is known of the nodes' KV beyond the nodes: the router's index and the directory's counts, each late by its delay."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from loadtest.simulate.dense import DenseTable
from loadtest.simulate.directory import SimDirectory
from loadtest.simulate.loop import Loop
from loadtest.simulate.node import SimNode
from loadtest.simulate.pages import PageNames
from shared.kvindex import KvIndex
from shared.messages import PageArray, Phase, Tier
from worker.kv.cache import KvChange


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until what happened on a node is known elsewhere; `state_s` is also the least time between two states."""

    kv_s: float = 0.01
    state_s: float = 0.02
    count_s: float = 0.01
    idle_report_s: float = 1.0


class Knowledge:
    """`index` is what routers and directory know; `directory` is None where nobody counts, and what would change counts
    does nothing then."""

    def __init__(
        self, loop: Loop, names: PageNames, nodes: Mapping[str, SimNode], delays: Delays, *, counted: bool
    ) -> None:
        self._loop, self._nodes, self._delays = loop, nodes, delays
        self.index = KvIndex(DenseTable(names))
        self.directory = SimDirectory(self.index, lambda: DenseTable(names, 3)) if counted else None
        self._unreachable: set[str] = set()
        self._told: dict[str, list[KvChange]] = {}  # of each node, on its way
        self._counts_due = False

    # ------------------------------------------------------------------------------ branches

    def requested(self, branch: str, parent: str | None, path: PageArray, base: int) -> None:
        """See `SimDirectory.request`."""
        if self.directory is not None:
            self.directory.request(branch, parent, path, base, self._loop.now)
            self._count_soon()

    def placed(self, branch: str, node: str, phase: Phase, rid: str) -> None:
        if self.directory is not None:
            self.directory.placed(branch, node, phase, rid, self._loop.now)
            self._count_soon()

    def ended(self, branch: str) -> None:
        if self.directory is not None:
            self.directory.ended(branch, self._loop.now)
            self._count_soon()

    # ------------------------------------------------------------------------------ nodes

    def switched(self, node: str, before: Phase | None, now: Phase) -> None:
        """The node serves in another phase; None: it begins."""
        if self.directory is not None and before is not now:
            self.directory.counts.switched(node, before, now)
            self._count_soon()
        if node in self._unreachable and now.prefills:
            self._unreachable.discard(node)
            cache = self._nodes[node].cache
            self.changed(node, [KvChange(True, tier, cache.pages(tier)) for tier in Tier])

    def hidden(self, node: str) -> None:
        """Nobody reads the node's KV until it prefills again."""
        self._unreachable.add(node)
        self.index.clear(node)

    def lost(self, node: str) -> None:
        """The node is gone, with its KV."""
        self._unreachable.discard(node)
        self._told.pop(node, None)
        self.index.clear(node)
        if self.directory is not None:
            self.directory.counts.drop_node(node)
            self._count_soon()

    def changed(self, node: str, changes: list[KvChange]) -> None:
        """Pages came to the node or left it."""
        told = self._told.get(node)
        if told is not None:
            told += changes
            return
        self._told[node] = list(changes)
        self._loop.after(self._delays.kv_s, self._heard, node)

    def _heard(self, node: str) -> None:
        changes = self._told.pop(node, [])
        if node in self._unreachable or not self._nodes[node].up:
            return
        counts = self.directory.counts if self.directory is not None else None
        stored: list[PageArray] = []
        for change in changes:
            if change.stored:
                self.index.store(node, change.tier, change.pages)
                stored.append(change.pages)
            else:
                gone = self.index.remove(node, change.tier, change.pages)
                if counts is not None and gone.size:
                    counts.evicted(node, gone)
        if counts is not None:
            for pages in stored:
                counts.stored(node, pages)
            self._count_soon()

    # ------------------------------------------------------------------------------ counts

    def _count_soon(self) -> None:
        if not self._counts_due:
            self._counts_due = True
            self._loop.after(self._delays.count_s, self._tell_counts)

    def _tell_counts(self) -> None:
        assert self.directory is not None
        self._counts_due = False
        for name, changes in self.directory.take_changes().items():
            node = self._nodes[name]
            if node.up:
                node.set_counts(changes.positive, changes.zero)
