"""The pages of a context, as the worker carries them: names for the index and the events, keys for a fetch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.messages import PageArray
from shared.pages import DIGEST_BYTES, digests_to_hashes

Keys = npt.NDArray[np.uint8]
Slots = npt.NDArray[np.intp]


class Path:
    """`pages`: int64[n], the first 64 bits of each page's digest. `keys`: uint8[n, 32], the whole digests.

    Two pages whose names are equal and whose keys differ are different pages: whoever hands KV to another node
    compares keys.
    """

    __slots__ = ("keys", "pages")

    def __init__(self, pages: PageArray, keys: Keys) -> None:
        self.pages = pages
        self.keys = keys

    @classmethod
    def of_digests(cls, digests: Sequence[bytes]) -> Path:
        """Of 32-byte digests."""
        return cls.of_keys(b"".join(digests))

    @classmethod
    def of_keys(cls, keys: bytes) -> Path:
        """Of digests one after the other. Raises ValueError when the last one is cut off."""
        if len(keys) % DIGEST_BYTES:
            raise ValueError(f"page keys have {DIGEST_BYTES} bytes each, not {len(keys)} in all")
        return cls(digests_to_hashes([keys]), np.frombuffer(keys, np.uint8).reshape(-1, DIGEST_BYTES))

    @classmethod
    def bare(cls, pages: Sequence[int]) -> Path:
        """Of names alone, for a model of a node that never hands KV to anybody."""
        names = np.asarray(pages, dtype=np.int64)
        keys = np.zeros((names.size, DIGEST_BYTES), dtype=np.uint8)
        keys[:, :8] = names.astype(">i8").view(np.uint8).reshape(-1, 8)
        return cls(names, keys)

    def __len__(self) -> int:
        return self.pages.size

    def __getitem__(self, part: slice) -> Path:
        return Path(self.pages[part], self.keys[part])

    def take(self, at: Slots | npt.NDArray[np.bool_]) -> Path:
        """The pages at these places, or where the mask is true."""
        return Path(self.pages[at], self.keys[at])

    def plus(self, other: Path) -> Path:
        return Path(np.concatenate((self.pages, other.pages)), np.concatenate((self.keys, other.keys)))


EMPTY = Path.bare([])
