"""Which node holds which KV pages, and in which tier (paper, section 4.3 and Appendix A.3).

Rules that hold here
- A page is its int64 hash (`shared/pages.py`). It is in the index exactly while some node holds it in some
  tier, and it leaves a node only when its last tier there lets it go: a removal in one tier says nothing
  about the other.
- Every operation is idempotent, and one about an unknown page or node changes nothing.
- A path is leading pages first. Hashes are chained, so a page proves its whole prefix in content, but a node
  may hold it after it evicted an earlier page: a match counts leading pages only.
- No I/O and no clock. Not safe for use from several threads.

Each page has one integer: bit 2s of it is L1 and bit 2s + 1 is L2 of the node in slot s. A dropped node's
slot goes to the next new node. What asks for one node's pages scans the index: it happens when a node is
lost, cleared or snapshotted, and costs no memory in between.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shared.messages import PageArray, Tier

MAX_NODES = 128

_REBUILD_PAGES = 4096  # a smaller table is not worth returning memory of


class KvIndex:
    """Pages by node and tier. Tiers other than L1 and L2 are a ValueError, as is a 129th node."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._slots: dict[str, int] = {}
        self._held: dict[str, dict[Tier, int]] = {}  # pages of each node and tier
        self._most = 0  # pages the table has had since it was built

    def __len__(self) -> int:
        """Distinct pages held anywhere."""
        return len(self._masks)

    def nodes(self) -> list[str]:
        """Nodes that stored something and were not dropped since, even if they hold nothing now."""
        return list(self._slots)

    def count(self, node: str, tier: Tier) -> int:
        """Pages of the node in that tier."""
        held = self._held.get(node)
        return held[tier] if held else 0

    # ------------------------------------------------------------------------- changes

    def store(self, node: str, tier: Tier, pages: PageArray) -> None:
        """The node now holds these pages (int64[n], any order) in that tier.

        Raises ValueError for a new node when MAX_NODES are known.
        """
        offset = _offset(tier)
        bit = 1 << (2 * self._slot(node) + offset)
        masks = self._masks
        get = masks.get
        new = 0
        for page in pages.tolist():
            mask = get(page, 0)
            if not mask & bit:
                masks[page] = mask | bit
                new += 1
        self._held[node][tier] += new
        self._most = max(self._most, len(masks))

    def remove(self, node: str, tier: Tier, pages: PageArray) -> None:
        """These pages (int64[n], any order) left that tier of the node."""
        offset = _offset(tier)
        if node not in self._slots:
            return
        bit = 1 << (2 * self._slots[node] + offset)
        masks = self._masks
        gone = 0
        for page in pages.tolist():
            mask = masks.get(page, 0)
            if mask & bit:
                gone += 1
                if mask == bit:
                    del masks[page]
                else:
                    masks[page] = mask ^ bit
        self._held[node][tier] -= gone
        self._shrink()

    def clear(self, node: str, tier: Tier | None = None) -> None:
        """All pages left that tier of the node, or both tiers when None. The node stays known."""
        if tier is not None:
            _offset(tier)
        held = self._held.get(node)
        if held is None:
            return
        bits = 0
        for each in Tier if tier is None else (tier,):
            if held[each]:
                bits |= 1 << (2 * self._slots[node] + _offset(each))
                held[each] = 0
        if bits:
            masks = self._masks
            for page in [page for page, mask in masks.items() if mask & bits]:
                left = masks[page] & ~bits
                if left:
                    masks[page] = left
                else:
                    del masks[page]
            self._shrink()

    def drop_node(self, node: str) -> None:
        """Forget the node with all its pages."""
        self.clear(node)
        self._held.pop(node, None)
        self._slots.pop(node, None)

    # ------------------------------------------------------------------------- questions

    def match(self, path: PageArray) -> dict[str, int]:
        """Leading pages of the path (int64[n]) that each node holds in any tier; only nodes with some."""
        return dict(self._leading(path, 0, 1))

    def match_tier(self, path: PageArray, tier: Tier) -> dict[str, int]:
        """Leading pages of the path (int64[n]) that each node holds in that tier; only nodes with some."""
        offset = _offset(tier)
        return dict(self._leading(path, offset, offset))

    def holds(self, node: str, pages: PageArray) -> npt.NDArray[np.bool_]:
        """bool[n]: whether the node holds each page in any tier."""
        if node not in self._slots:
            return np.zeros(len(pages), dtype=np.bool_)
        bits = 0b11 << (2 * self._slots[node])
        get = self._masks.get
        held = (get(page, 0) & bits != 0 for page in pages.tolist())
        return np.fromiter(held, dtype=np.bool_, count=len(pages))

    def pages(self, node: str, tier: Tier) -> PageArray:
        """int64[n]: the node's pages in that tier, in no order that means something."""
        offset = _offset(tier)
        if not self.count(node, tier):
            return np.empty(0, dtype=np.int64)
        bit = 1 << (2 * self._slots[node] + offset)
        held = (page for page, mask in self._masks.items() if mask & bit)
        return np.fromiter(held, dtype=np.int64, count=self.count(node, tier))

    # ------------------------------------------------------------------------- inside

    def _leading(self, path: PageArray, low: int, high: int) -> Iterator[tuple[str, int]]:
        """(node, leading pages) by the bits at offsets `low` and `high` of each slot; either will do."""
        if not self._slots:
            return
        alive = 0  # bit 2s: the node in slot s holds every page so far
        for slot in self._slots.values():
            alive |= 1 << (2 * slot)
        get = self._masks.get
        ends: list[tuple[int, int]] = []  # (slots whose prefix ends here, its pages)
        last = -1
        for at, page in enumerate(path.tolist()):
            mask = get(page, 0)
            # Neighbours mostly lie on the same nodes.
            if mask == last:
                continue
            last = mask
            still = alive & (mask >> low | mask >> high)
            if still != alive:
                ends.append((alive ^ still, at))
                alive = still
                if not alive:
                    break
        ends.append((alive, len(path)))
        for node, slot in self._slots.items():
            bit = 1 << (2 * slot)
            held = next((pages for slots, pages in ends if slots & bit), 0)
            if held:
                yield node, held

    def _slot(self, node: str) -> int:
        slot = self._slots.get(node)
        if slot is None:
            if len(self._slots) >= MAX_NODES:
                raise ValueError(f"node {node}: the index already has {MAX_NODES} nodes, its most")
            taken = set(self._slots.values())
            # The lowest free one keeps the integers short.
            slot = next(s for s in range(MAX_NODES) if s not in taken)
            self._slots[node] = slot
            self._held[node] = dict.fromkeys(Tier, 0)
        return slot

    def _shrink(self) -> None:
        # A dict keeps its table when items are deleted; a copy has one of the size it needs.
        if self._most > _REBUILD_PAGES and len(self._masks) < self._most // 4:
            self._masks = dict(self._masks)
            self._most = len(self._masks)


def _offset(tier: Tier) -> int:
    return Tier(tier) - 1
