"""The memory that holds a node's KV pages: one mapping of equal slots.

Rules that hold here
- One arena a node. Slots [0, l1) are its GPU memory where that is simulated, the rest its host memory; the number of
  a slot times the bytes of a page is its offset, which is what transports and peers speak of.
- It is a file in memory (memfd), so that a transport's own process can map the same pages: `fd` is inherited by
  children that are given it. Pages that were never touched take no memory.
- Huge pages are used when the system has enough of them reserved, transparent ones when it offers those.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.log import get_logger

Bytes = npt.NDArray[np.uint8]
_HUGE = 2 * 2**20
log = get_logger("worker")


class Arena:
    """`slots` pages of `page_bytes` bytes each. Raises ValueError for sizes that are none, OSError without memory."""

    def __init__(self, slots: int, page_bytes: int, *, huge_pages: bool = True) -> None:
        if slots < 1 or page_bytes < 8 or page_bytes % 8:
            raise ValueError(
                f"an arena needs at least one slot of a multiple of 8 bytes, not {slots} of {page_bytes}"
            )
        self.slots = slots
        self.page_bytes = page_bytes
        self.nbytes = slots * page_bytes
        mapped = -(-self.nbytes // _HUGE) * _HUGE  # whole huge pages
        self.huge_pages = (
            huge_pages and _huge_pages_free() * _HUGE >= mapped and self._open(mapped, os.MFD_HUGETLB)
        )
        if not self.huge_pages and not self._open(mapped, 0):
            raise OSError(f"no memory for {slots} KV pages of {page_bytes} bytes")
        if huge_pages and not self.huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them
        self.mapped_bytes = mapped
        self.memory: Bytes = np.frombuffer(self._map, dtype=np.uint8, count=self.nbytes)

    def _open(self, nbytes: int, flags: int) -> bool:
        self.fd = os.memfd_create("kv-arena", os.MFD_CLOEXEC | flags)
        try:
            os.ftruncate(self.fd, nbytes)
            self._map = mmap.mmap(self.fd, nbytes)
        except OSError as error:
            os.close(self.fd)
            self.fd = -1
            log.warning("no_arena", bytes=nbytes, huge_pages=flags != 0, error=error)
            return False
        return True

    @property
    def pages(self) -> Bytes:
        """uint8[slots, page_bytes]: the bytes themselves."""
        return self.memory.reshape(self.slots, self.page_bytes)

    @property
    def words(self) -> npt.NDArray[np.uint64]:
        """uint64[slots, page_bytes / 8]: the same as words."""
        return self.memory.view(np.uint64).reshape(self.slots, -1)

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return int(self.memory.ctypes.data)

    def close(self) -> None:
        """Give the memory back once nobody has a view of it any more. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.memory = np.empty(0, dtype=np.uint8)
            try:
                self._map.close()
            except BufferError:
                pass  # a view is still in use: the mapping goes with the last one
            del self._map


def _huge_pages_free() -> int:
    """2 MiB pages that are reserved and not in use."""
    try:
        text = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text()
        return int(text)
    except (OSError, ValueError):
        return 0
