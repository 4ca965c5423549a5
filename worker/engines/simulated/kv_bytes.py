"""KV bytes of the simulated engine: a page's bytes are a function of its name, so a wrong page is found out.

Word i of a page is pattern[i] xor mix(page), with a pattern that is the same everywhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.messages import PageArray
from worker.kv.arena import Arena
from worker.kv.memory import Flags, PageMemory
from worker.kv.path import Slots

_AT_ONCE = 2**22  # bytes looked at together: what is computed for them stays in the processor's cache


class SimulatedMemory(PageMemory):
    """Writes the bytes that the KV of a page has, and knows them again."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        words = arena.page_bytes // 8
        self._pattern = _mix(np.arange(1, words + 1, dtype=np.uint64))
        self._step = max(1, _AT_ONCE // arena.page_bytes)

    def write(self, slots: Slots, pages: PageArray) -> None:
        for at in range(0, slots.size, self._step):
            part = slice(at, at + self._step)
            self.arena.words[slots[part]] = self._words(pages[part])
        super().write(slots, pages)

    def sound(self, slots: Slots, pages: PageArray) -> Flags:
        """The bytes are compared with what they must be; so is the checksum, which goes to peers."""
        same = super().sound(slots, pages)
        for at in range(0, slots.size, self._step):
            part = slice(at, at + self._step)
            same[part] &= (self.arena.words[slots[part]] == self._words(pages[part])).all(axis=1)
        return same

    def _words(self, pages: PageArray) -> npt.NDArray[np.uint64]:
        return np.bitwise_xor.outer(_mix(pages.view(np.uint64)), self._pattern)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: any change of a word changes half of the bits."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
