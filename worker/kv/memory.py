"""The bytes of a node's pages, and how a wrong one is found out.

Rules that hold here
- A page has a checksum (XXH3, 64 bits) from the moment that its KV is complete. It goes with the page: copied inside
  of the node, told to a peer that fetches it, compared after the arrival. A byte that changes anywhere on the way is
  found out.
- Slots are those of the arena: GPU memory first, then host memory.
- What does not agree is reported, never repaired: whoever asked drops the page, and its KV is computed again.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from shared.messages import PageArray
from worker.kv.arena import Arena
from worker.kv.path import Slots

Checksums = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


class KvMemory(Protocol):
    """What the cache does with bytes; slots are intp[n] of the arena, pages int64[n]."""

    def write(self, slots: Slots, pages: PageArray) -> None:
        """The KV of these pages was computed into these slots."""

    def copy(self, source: Slots, target: Slots) -> None:
        """Copy pages from slot to slot."""

    def sound(self, slots: Slots, pages: PageArray) -> Flags:
        """bool[n]: which of the slots hold what was written there for that page."""


class PageMemory:
    """An arena with its checksums. An engine that puts KV there calls `write` when a page is complete."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.checksums: Checksums = np.zeros(arena.slots, dtype=np.uint64)

    def write(self, slots: Slots, pages: PageArray) -> None:
        self.checksums[slots] = self.compute(slots)

    def copy(self, source: Slots, target: Slots) -> None:
        self.arena.pages[target] = self.arena.pages[source]
        self.checksums[target] = self.checksums[source]

    def sound(self, slots: Slots, pages: PageArray) -> Flags:
        same: Flags = self.compute(slots) == self.checksums[slots]
        return same

    def arrived(self, slots: Slots, pages: PageArray, told: Checksums) -> Flags:
        """bool[n]: which of the pages that a peer sent are what it said that they are; they have a checksum now.

        Safe to call in a thread, for slots that nobody else uses.
        """
        self.checksums[slots] = told
        return self.sound(slots, pages)

    def compute(self, slots: Slots) -> Checksums:
        """uint64[n]: checksums of what is in the slots now."""
        digest, view, size = xxhash.xxh3_64_intdigest, self.arena.memory.data, self.arena.page_bytes
        sums = (digest(view[at : at + size]) for at in (slots * size).tolist())
        return np.fromiter(sums, np.uint64, slots.size)
