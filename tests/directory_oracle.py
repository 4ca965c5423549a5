"""Algorithms E.1 and E.2 written down from the pseudocode with plain sets, to compare the directory with; and a
cluster's streams and store in memory.

Nothing of services/directory is used here. A path is a tuple of pages; `page_names` gives chained hashes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from shared.messages import (
    Began,
    BranchEnded,
    BranchPlaced,
    BranchRequest,
    KvSnapshot,
    NodeInfo,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    Phase,
    StreamMessage,
    Tier,
    pack_pages,
)
from shared.store import Commit, NodeCounts, Stored
from shared.streams import Event

Path = tuple[int, ...]
K = TypeVar("K")
PURE = (Phase.PREFILL, Phase.DECODE)

_names: dict[tuple[object, ...], int] = {}


def page_names(context: Sequence[object]) -> Path:
    """One page for each item: equal prefixes give equal pages, and nothing else does."""
    found = []
    for end in range(1, len(context) + 1):
        prefix = tuple(context[:end])
        # Spread over all of int64, negative ones too.
        found.append(_names.setdefault(prefix, (len(_names) + 1) * 0x9E3779B97F4A7C15 % 2**64 - 2**63))
    return tuple(found)


class Oracle:
    """S, C and R, a page set a tier and node, and the moves that wait."""

    def __init__(self) -> None:
        self.version: dict[str, int] = {}
        self.path: dict[str, Path] = {}
        self.counted: dict[tuple[str, str], set[int]] = {}
        self.placed_for: dict[tuple[str, str], set[Phase]] = {}
        self.count: dict[tuple[int, str], int] = {}
        self.phase: dict[str, Phase] = {}
        self.tiers: dict[tuple[str, Tier], set[int]] = {}
        self.waiting: dict[tuple[str, Phase], tuple[str, int]] = {}
        # Where a move ended unsettled or a copy changed its phase: the next placement in that phase mends it.
        self.unsettled: set[tuple[str, Phase]] = set()

    # -------------------------------------------------------------- lines 1-4

    def Count(self, branch: str, node: str, pages: Iterable[int]) -> None:
        pages = set(pages)
        had = self.counted.get((branch, node), set())
        for page in pages - had:
            self.count[page, node] = self.count.get((page, node), 0) + 1
        for page in had - pages:
            self.count[page, node] -= 1
            if not self.count[page, node]:
                del self.count[page, node]
        if pages:
            self.counted[branch, node] = pages
        else:
            self.counted.pop((branch, node), None)
            self.placed_for.pop((branch, node), None)

    def Release(self, branch: str, node: str) -> None:
        self.Count(branch, node, ())

    def holders(self, branch: str) -> list[str]:
        return [node for name, node in list(self.counted) if name == branch]

    # -------------------------------------------------------------- Algorithm E.1 and lines 5-8

    def request(self, branch: str, path: Path) -> None:
        if branch not in self.path:
            self.version[branch] = 1
        else:
            old = self.path[branch]
            if path[: len(old)] != old:
                self.version[branch] += 1
                for node in self.holders(branch):
                    self.Count(branch, node, self.counted[branch, node] & set(path))
        self.path[branch] = path

    # -------------------------------------------------------------- lines 9-13

    def place(self, branch: str, node: str, phase: Phase) -> None:
        if branch not in self.path:
            return
        self.Count(branch, node, self.path[branch])
        if self.path[branch]:
            self.placed_for.setdefault((branch, node), set()).add(phase)
        self.waiting[branch, phase] = (node, self.version[branch])
        self.unsettled.discard((branch, phase))
        self.settle()

    def end(self, branch: str) -> None:
        for node in self.holders(branch):
            self.Release(branch, node)
        self.path.pop(branch, None)
        self.version.pop(branch, None)

    def settle(self) -> None:
        """Line 11, for every move whose target now holds the version it was made for."""
        for (branch, phase), (node, version) in list(self.waiting.items()):
            if self.version.get(branch) != version:
                self._give_up(branch, phase)
            elif set(self.path[branch]) <= self.held(node):
                del self.waiting[branch, phase]
                for other in self.holders(branch):
                    phases = self.placed_for[branch, other]
                    if other != node and phase in phases:
                        phases.discard(phase)
                        if not phases:
                            self.Release(branch, other)

    def _give_up(self, branch: str, phase: Phase) -> None:
        del self.waiting[branch, phase]
        self.unsettled.add((branch, phase))

    # -------------------------------------------------------------- lines 14-15 and 20

    def switch(self, node: str, phase: Phase) -> None:
        before, self.phase[node] = self.phase[node], phase
        if before is phase:
            return
        for branch, where in list(self.counted):
            if where == node:
                if before is Phase.DECODE and phase is Phase.PREFILL:
                    self.Release(branch, node)
                elif phase is not Phase.BOTH:
                    self.placed_for[branch, node] = {phase}
                    self.unsettled.add((branch, phase))
        if phase is not Phase.BOTH:
            for (branch, wanted), (target, _) in list(self.waiting.items()):
                if target == node and wanted is not phase:
                    self._give_up(branch, wanted)
        self.settle()

    def held(self, node: str) -> set[int]:
        return self.tiers.get((node, Tier.L1), set()) | self.tiers.get((node, Tier.L2), set())

    def store(self, node: str, tier: Tier, pages: Iterable[int]) -> None:
        self.tiers.setdefault((node, tier), set()).update(pages)
        self.settle()

    def remove(self, node: str, tier: Tier, pages: Iterable[int]) -> None:
        before = self.held(node)
        self.tiers.setdefault((node, tier), set()).difference_update(pages)
        self._evict(node, before - self.held(node))

    def clear(self, node: str, tiers: Iterable[Tier]) -> None:
        for tier in tiers:
            self.tiers[node, tier] = set()
        counted = {page for page, where in self.count if where == node}
        self._evict(node, counted - self.held(node))

    def _evict(self, node: str, pages: set[int]) -> None:
        for branch, where in list(self.counted):
            if where == node and self.counted[branch, node] & pages:
                self.Count(branch, node, self.counted[branch, node] - pages)
        assert not any((page, node) in self.count for page in pages)

    def lose(self, node: str) -> None:
        """The node died or began anew."""
        for branch, where in list(self.counted):
            if where == node:
                self.Release(branch, node)
        for (branch, phase), (target, _) in list(self.waiting.items()):
            if target == node:
                self._give_up(branch, phase)
        for tier in Tier:
            self.tiers.pop((node, tier), None)

    # -------------------------------------------------------------- to compare

    def table(self, node: str) -> dict[int, int]:
        return {page: count for (page, where), count in self.count.items() if where == node}

    def copies(self, branch: str, phase: Phase) -> list[str]:
        """Nodes where the branch counts a copy for that phase."""
        return [node for node in self.holders(branch) if phase in self.placed_for[branch, node]]


class Streams:
    """Numbers events as publishers and Redis would: one position a millisecond."""

    def __init__(self) -> None:
        self.log: list[Event] = []
        self._clock = itertools.count(1_000_000)
        self._seq: dict[tuple[str, str], int] = {}

    def publish(self, stream: str, producer: str, message: StreamMessage) -> Event:
        seq = self._seq[stream, producer] = self._seq.get((stream, producer), 0) + 1
        event = Event(stream, f"{next(self._clock)}-0", producer, seq, message)
        self.log.append(event)
        return event

    def seq(self, stream: str, producer: str) -> int:
        return self._seq.get((stream, producer), 0)

    def after(self, stream: str, position: str) -> list[Event]:
        return [
            e for e in self.log if e.stream == stream and milliseconds(e.position) > milliseconds(position)
        ]


def milliseconds(position: str) -> int:
    return int(position.partition("-")[0])


class Store:
    """What Redis keeps of the directory."""

    def __init__(self) -> None:
        self.number = 0
        self.counts: dict[str, dict[int, int]] = {}
        self.branches: dict[str, bytes] = {}
        self.segments: dict[int, bytes] = {}
        self.pages: dict[int, bytes] = {}
        self.state: dict[str, bytes] = {}

    def commit(self, commit: Commit) -> None:
        assert commit.number in (self.number, self.number + 1)
        self.number = commit.number
        for node, changed in commit.counts.items():
            table = self.counts.setdefault(node, {})
            pages = changed.pages.tolist()
            assert len(set(pages)) == len(pages)
            for page, count in zip(pages, changed.counts.tolist(), strict=True):
                assert table.get(page, 0) != count, "nothing changed"
                if count:
                    table[page] = count
                else:
                    del table[page]
            assert changed.empty == (not table)
        _put(self.branches, commit.branches)
        _put(self.segments, commit.segments)
        for number in [number for number, blob in commit.segments.items() if blob is None]:
            self.pages.pop(number, None)
        for number, (first, pages) in commit.pages.items():
            old = self.pages.get(number, b"")
            assert len(old) >= first * 8, "a segment with a hole"
            end = first * 8 + len(pages)
            self.pages[number] = old[: first * 8] + pages + (old[end:] if first else b"")
        _put(self.state, commit.state)

    def load(self) -> Stored:
        counts = {
            node: NodeCounts(
                np.array(list(table), dtype=np.int64), np.array(list(table.values()), dtype=np.int32)
            )
            for node, table in self.counts.items()
            if table
        }
        return Stored(
            self.number, counts, dict(self.branches), dict(self.segments), dict(self.pages), dict(self.state)
        )


def _put(held: dict[K, bytes], changed: Mapping[K, bytes | None]) -> None:
    for key, value in changed.items():
        if value is None:
            held.pop(key, None)
        else:
            held[key] = value


class RouterSide:
    """What a router publishes about branches: paths relative to the last one."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}

    def request(self, branch: str, path: Path, t: float = 0.0) -> BranchRequest:
        known = self.paths.get(branch, ())
        base = 0
        while base < min(len(known), len(path)) and known[base] == path[base]:
            base += 1
        self.paths[branch] = path
        return BranchRequest(branch, base, path[base - 1] if base else 0, pack_pages(list(path[base:])), t=t)


def placed(branch: str, node: str, phase: Phase, t: float = 0.0) -> BranchPlaced:
    return BranchPlaced(branch, node, phase, t)


def ended(branch: str, t: float = 0.0) -> BranchEnded:
    return BranchEnded(branch, t)


def stored(tier: Tier, pages: Iterable[int]) -> PagesStored:
    return PagesStored(tier, pack_pages(list(pages)))


def removed(tier: Tier, pages: Iterable[int]) -> PagesRemoved:
    return PagesRemoved(tier, pack_pages(list(pages)))


def cleared(tier: Tier | None = None) -> PagesCleared:
    return PagesCleared(tier)


def begun(phase: Phase, epoch: int = 0, t: float = 0.0) -> PagesCleared:
    """The first kv message of a life."""
    return PagesCleared(None, Began(phase, epoch, t))


def snapshot_of(oracle: Oracle, node: str, incarnation: str, seq: int) -> KvSnapshot:
    return KvSnapshot(
        node,
        incarnation,
        seq,
        pack_pages(sorted(oracle.tiers.get((node, Tier.L1), set()))),
        pack_pages(sorted(oracle.tiers.get((node, Tier.L2), set()))),
    )


def node_info(
    node: str,
    incarnation: str,
    phase: Phase,
    *,
    epoch: int = 0,
    started_t: float = 0.0,
    url: str = "http://-",
) -> NodeInfo:
    return NodeInfo(
        node=node, url=url, incarnation=incarnation, model="m", profile="tiny", page_size=16,
        max_context=1 << 20, l1_tokens=1 << 20, l2_tokens=1 << 20, chunk_tokens=8192, phase=phase, epoch=epoch,
        started_t=started_t,
    )  # fmt: skip
