"""What a node held after an earlier event: from a later snapshot and the events between, or from all before.

A directory that starts again has counts as of event q of a node and can have a snapshot of its pages as of a
later event s. It needs the pages as of q, so that events q + 1 to s, applied once more, take the same pages
out of the counts as they would have without the interruption.

Rules that hold here
- A node publishes a page as stored only when the tier did not have it, and as removed only when it had. So the
  first event about a page after q says whether the tier had it at q; without one, it had what it has at s.
- After a clear nothing tells what a tier had before it, unless an earlier event does: it counts as not held, and
  `exact` is False. A clear makes every counted page that the node then lacks leave the counts, so all that can
  differ is a move that would have settled before the clear.
- Where the snapshot is of a later life of the node, or inexact, `Replay` builds the pages from the first event
  of the life on, if the stream still has it.
- No I/O and no clock.
"""

from __future__ import annotations

import numpy as np

from shared.messages import (
    KvSnapshot,
    PageArray,
    PageListError,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    Tier,
    pack_pages,
    unpack_pages,
)
from shared.streams import Event


class _Events:
    """Takes an incarnation's events `first` to `last` in order; those of others and known ones are passed over."""

    def __init__(self, incarnation: str, first: int, last: int) -> None:
        self._incarnation, self._next, self._last = incarnation, first, last
        self.broken = False  # an event is missing, or cannot be read

    @property
    def done(self) -> bool:
        return self.broken or self._next > self._last

    def feed(self, event: Event) -> None:
        if self.done or event.producer != self._incarnation or event.seq < self._next:
            return
        if event.seq != self._next:
            self.broken = True
            return
        self._next += 1
        message = event.message
        if isinstance(message, PagesStored | PagesRemoved):
            try:
                pages = unpack_pages(message.pages).tolist()
            except PageListError:
                self.broken = True
            else:
                self._moved(message.tier, pages, isinstance(message, PagesStored))
        elif isinstance(message, PagesCleared):
            for tier in Tier if message.tier is None else (message.tier,):
                self._cleared(tier)

    def _moved(self, tier: Tier, pages: list[int], stored: bool) -> None:
        raise NotImplementedError

    def _cleared(self, tier: Tier) -> None:
        raise NotImplementedError


class Rewind(_Events):
    """Takes events after number `seq`, up to the snapshot's."""

    def __init__(self, seq: int, snapshot: KvSnapshot) -> None:
        super().__init__(snapshot.incarnation, seq + 1, snapshot.seq)
        self._seq, self._snapshot = seq, snapshot
        self._had: dict[Tier, dict[int, bool]] = {tier: {} for tier in Tier}  # page -> held at `seq`
        self._unknown: set[Tier] = set()  # cleared since
        self.broken = seq > snapshot.seq

    @property
    def exact(self) -> bool:
        """Whether `result` is what the node held; asked when `done`."""
        return not self.broken and not self._unknown

    def _moved(self, tier: Tier, pages: list[int], stored: bool) -> None:
        if tier not in self._unknown:
            had = self._had[tier]
            for page in pages:
                had.setdefault(page, not stored)

    def _cleared(self, tier: Tier) -> None:
        self._unknown.add(tier)

    def result(self) -> KvSnapshot:
        """The node's pages as of event `seq`; the snapshot as it was taken when that cannot be told."""
        if self.broken or not self.done:
            return self._snapshot
        return KvSnapshot(
            node=self._snapshot.node,
            incarnation=self._snapshot.incarnation,
            seq=self._seq,
            l1=pack_pages(self._tier(Tier.L1, unpack_pages(self._snapshot.l1))),
            l2=pack_pages(self._tier(Tier.L2, unpack_pages(self._snapshot.l2))),
        )

    def _tier(self, tier: Tier, now: PageArray) -> PageArray:
        had = self._had[tier]
        held = set() if tier in self._unknown else set(now.tolist())
        held.difference_update(had)
        held.update(page for page, held_then in had.items() if held_then)
        return np.fromiter(held, dtype=np.int64, count=len(held))


class Replay(_Events):
    """Takes all events of an incarnation, up to number `seq`."""

    def __init__(self, node: str, incarnation: str, seq: int) -> None:
        super().__init__(incarnation, 1, seq)
        self._node = node
        self._held: dict[Tier, set[int]] = {tier: set() for tier in Tier}

    def _moved(self, tier: Tier, pages: list[int], stored: bool) -> None:
        held = self._held[tier]
        (held.update if stored else held.difference_update)(pages)

    def _cleared(self, tier: Tier) -> None:
        self._held[tier].clear()

    def result(self) -> KvSnapshot | None:
        """The node's pages as of event `seq`; None when events are missing."""
        if self.broken or not self.done:
            return None
        l1, l2 = (pack_pages(list(self._held[tier])) for tier in (Tier.L1, Tier.L2))
        return KvSnapshot(self._node, self._incarnation, self._last, l1, l2)
