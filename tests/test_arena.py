"""The arena: memory that other processes can map, in slots."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from worker.kv import arena as module
from worker.kv.arena import Arena


def test_slots_lie_side_by_side_and_can_be_mapped_by_others() -> None:
    arena = Arena(5, 4096)
    arena.pages[3] = 7
    arena.words[4, 1] = 2**63 + 5
    assert arena.nbytes == 5 * 4096 and arena.address % mmap.PAGESIZE == 0
    with mmap.mmap(arena.fd, arena.mapped_bytes) as other:
        assert other[3 * 4096 : 4 * 4096] == b"\7" * 4096
        assert other[4 * 4096 + 8 : 4 * 4096 + 16] == (2**63 + 5).to_bytes(8, "little")
        other[0] = 9
    assert arena.pages[0, 0] == 9


def test_memory_goes_back_with_the_last_view() -> None:
    before = set(os.listdir("/proc/self/fd"))
    arena = Arena(16, 2**16)
    view = arena.pages
    arena.close()
    arena.close()
    assert int(view[0, 0]) == 0, "a view stays valid"
    del view, arena
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(("slots", "page_bytes"), [(0, 4096), (-1, 4096), (4, 0), (4, 12), (4, 4)])
def test_sizes_that_are_none_are_refused(slots: int, page_bytes: int) -> None:
    with pytest.raises(ValueError, match="an arena needs"):
        Arena(slots, page_bytes)


def test_without_huge_pages_it_is_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # The system promises huge pages and does not have them.
    monkeypatch.setattr(module, "_huge_pages_free", lambda: 10**6)
    arena = Arena(4, 4096)
    arena.pages[:] = 1
    assert int(np.sum(arena.pages)) == 4 * 4096


def test_untouched_pages_take_no_memory() -> None:
    arena = Arena(2**20, 4096)  # 4 GiB
    arena.pages[2**19] = 1
    blocks = os.fstat(arena.fd).st_blocks * 512
    assert blocks < 64 * 2**20
