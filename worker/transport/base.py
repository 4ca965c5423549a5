"""What every transport does: read pages out of a peer's arena into the own one.

Rules that hold here
- Only reads: a node never writes into a peer. What is where, and for how long it stays there, the page service says
  (`worker/kv/serve.py`); a transport moves bytes between offsets and knows nothing of pages.
- A peer is an address and a boot id. A transport never reads from another boot than it was asked for.
- `read` returns when all bytes are in place. When it raises, and when it was cancelled, some may have been written,
  but none will be any more once it has ended: the caller may use the destination again.
- A peer that is dead, silent or slow costs its own reads a bounded time, and reads from other peers nothing that
  a retry does not mend.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from worker.kv.arena import Arena

Offsets = npt.NDArray[np.int64]


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a peer's arena can be read: what its page service tells with every answer."""

    transport: str  # tcp, mooncake
    address: str  # host:port
    boot: str  # another one whenever what is behind the address is new
    base: int = 0  # what the transport adds to an offset
    nbytes: int = 0  # bytes of the arena


class TransferError(Exception):
    """A read did not end well; the text is one line that says with whom and why."""


class TransportMissing(Exception):
    """The transport cannot be used on this machine; the text says what is missing and what to do."""


class Transport(Protocol):
    """One node's way to its peers' arenas, and theirs to its own."""

    name: str

    async def start(self, arena: Arena, host: str) -> None:
        """Serve the arena to peers that reach this machine as `host`. Raises TransportMissing, OSError."""

    @property
    def endpoint(self) -> Endpoint:
        """Where peers read. It changes when the transport had to begin anew."""

    async def read(
        self, peer: Endpoint, remote: Offsets, local: Offsets, length: int, timeout_s: float
    ) -> None:
        """Copy `length` bytes from each offset of the peer's arena to each offset of the own one.

        `remote`, `local`: int64[n]. Raises TransferError when it fails or takes more than `timeout_s` (seconds), and
        ValueError for offsets outside of an arena, before anything is read.
        """

    async def close(self) -> None:
        """Stop serving and reading; running reads fail."""


def check_ranges(offsets: Offsets, length: int, nbytes: int, whose: str) -> None:
    """Raises ValueError unless every range of `length` bytes lies within an arena of `nbytes` bytes."""
    if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) + length > nbytes):
        raise ValueError(
            f"{length} bytes at {int(offsets.max())} do not lie in {whose} arena of {nbytes} bytes"
        )
