"""Pages that lie side by side are moved as one: what the transports share.

Rules that hold here
- `check_read` is called before anything moves, so that a transport never sees an offset outside of an arena.
- Spans keep the order of the pages: the bytes of two spans one after the other are the bytes of their pages.
"""

from __future__ import annotations

import numpy as np

from worker.transport.base import Endpoint, Offsets, TransferError, check_ranges

MAX_ADDRESS = 255  # characters


def check_read(
    name: str, peer: Endpoint, remote: Offsets, local: Offsets, length: int, nbytes: int
) -> tuple[Offsets, Offsets]:
    """The offsets as contiguous int64[n]. Raises ValueError for a read that leaves an arena (`nbytes`: the own one),
    TransferError when the peer does not speak the transport `name`."""
    if remote.ndim != 1 or remote.shape != local.shape:
        raise ValueError(f"{remote.shape} remote offsets for {local.shape} local ones")
    if length < 1:
        raise ValueError(f"pages of {length} bytes cannot be read")
    check_ranges(remote, length, peer.nbytes, f"the peer {peer.address}'s")
    check_ranges(local, length, nbytes, "the own")
    if peer.transport != name:
        raise TransferError(f"{peer.address} serves over {peer.transport}, this node reads over {name}")
    return np.ascontiguousarray(remote, np.int64), np.ascontiguousarray(local, np.int64)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises TransferError for anything else."""
    host, _, port = address.rpartition(":")
    if (
        not host
        or not address.isascii()
        or len(address) > MAX_ADDRESS
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise TransferError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def spans(length: int, *offsets: Offsets) -> tuple[list[Offsets], Offsets]:
    """Pages that follow each other in every one of `offsets` (int64[n]) become one span.

    Returns the first offset of each span, for each of `offsets`, and the bytes of each span: int64[spans].
    """
    n = len(offsets[0])
    follows = np.ones(max(0, n - 1), dtype=bool)
    for each in offsets:
        follows &= np.diff(each) == length
    starts = np.flatnonzero(np.concatenate((np.ones(min(n, 1), dtype=bool), ~follows)))
    lengths = np.diff(np.append(starts, n)).astype(np.int64) * length
    return [each[starts] for each in offsets], lengths
