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


class Rewind:
    """Takes events after number `seq` in order, up to the snapshot's."""

    def __init__(self, seq: int, snapshot: KvSnapshot) -> None:
        self._seq = seq
        self._next = seq + 1
        self._snapshot = snapshot
        self._had: dict[Tier, dict[int, bool]] = {tier: {} for tier in Tier}  # page -> held at `seq`
        self._cleared: set[Tier] = set()
        self.broken = seq > snapshot.seq  # an event is missing: `result` is then the snapshot itself

    @property
    def exact(self) -> bool:
        """Whether `result` is what the node held; asked when `done`."""
        return not self.broken and not self._cleared

    @property
    def done(self) -> bool:
        return self.broken or self._next > self._snapshot.seq

    def feed(self, event: Event) -> None:
        """One event of the snapshot's incarnation; others and known ones are passed over."""
        if self.done or event.producer != self._snapshot.incarnation or event.seq < self._next:
            return
        if event.seq != self._next:
            self.broken = True
            return
        self._next += 1
        message = event.message
        if isinstance(message, PagesStored | PagesRemoved):
            if message.tier not in self._cleared:
                had = self._had[message.tier]
                removed = isinstance(message, PagesRemoved)
                try:
                    pages = unpack_pages(message.pages)
                except PageListError:
                    self.broken = True
                    return
                for page in pages.tolist():
                    had.setdefault(page, removed)
        elif isinstance(message, PagesCleared):
            self._cleared.update(Tier if message.tier is None else (message.tier,))

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
        held = set() if tier in self._cleared else set(now.tolist())
        held.difference_update(had)
        held.update(page for page, held_then in had.items() if held_then)
        return np.fromiter(held, dtype=np.int64, count=len(held))


class Replay:
    """Takes all events of an incarnation in order, up to number `seq`."""

    def __init__(self, node: str, incarnation: str, seq: int) -> None:
        self._node, self._incarnation, self._seq = node, incarnation, seq
        self._next = 1
        self._held: dict[Tier, set[int]] = {tier: set() for tier in Tier}
        self._broken = False

    @property
    def done(self) -> bool:
        return self._broken or self._next > self._seq

    def feed(self, event: Event) -> None:
        """One event; those of other incarnations and known ones are passed over."""
        if self.done or event.producer != self._incarnation or event.seq < self._next:
            return
        if event.seq != self._next:
            self._broken = True
            return
        self._next += 1
        message = event.message
        if isinstance(message, PagesStored | PagesRemoved):
            try:
                pages = unpack_pages(message.pages).tolist()
            except PageListError:
                self._broken = True
                return
            held = self._held[message.tier]
            (held.update if isinstance(message, PagesStored) else held.difference_update)(pages)
        elif isinstance(message, PagesCleared):
            for tier in Tier if message.tier is None else (message.tier,):
                self._held[tier].clear()

    def result(self) -> KvSnapshot | None:
        """The node's pages as of event `seq`; None when events are missing."""
        if self._broken or not self.done:
            return None
        l1, l2 = (pack_pages(list(self._held[tier])) for tier in (Tier.L1, Tier.L2))
        return KvSnapshot(self._node, self._incarnation, self._seq, l1, l2)
