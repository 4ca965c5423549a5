"""What `identity.py` keeps of branches: where each stands, and marks by which a new path finds them.

Rules that hold here
- No I/O, no clock. Page names are chained, so one equal page proves an equal prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import msgspec
import numpy as np

from shared.messages import PageArray
from shared.openai import TokenArray

TEMPLATE_TOKENS = 4  # at a prompt's end: a chat template may write them differently in the next prompt
MAX_TRIED = 256  # branches looked at that end, or began, with the same page

NO_PATH: PageArray = np.empty(0, dtype=np.int64)


class KnownBranch(msgspec.Struct, eq=False):
    """A branch as its last requests left it. Sizes are pages."""

    branch: str
    session: str
    exact: bool
    last_t: float
    pool: str = ""
    path: PageArray = NO_PATH  # of its last request
    rest: TokenArray | None = None  # its tokens after the last full page, None when unknown
    page_size: int = 0  # tokens
    first: int = 0  # size of the first path since the branch was new or rewritten
    before: int = 0  # size of the path before the last one that made it grow
    left: tuple[int, int] = (0, 0)  # size and last page of the path that an edit or rewrite left
    in_flight: int = 0
    requests: int = 0
    compacting: int = 0  # steps during which an announced compaction is waited for
    observed_t: float = -np.inf  # last request at another router

    def ends_at(self, size: int, page: int) -> bool:
        return self.path.size == size and int(self.path[-1]) == page

    def begins(self, path: PageArray) -> bool:
        """Whether this branch's whole path begins that one."""
        size = self.path.size
        return size == 0 or (path.size >= size and bool(path[size - 1] == self.path[-1]))


class Prompt(msgspec.Struct, frozen=True, eq=False):
    """A request's prompt: pages and, where given, tokens."""

    path: PageArray
    tokens: TokenArray | None
    page_size: int

    @property
    def rest(self) -> TokenArray | None:
        return None if self.tokens is None else self.tokens[self.path.size * self.page_size :].copy()

    def equal_rest(self, known: KnownBranch) -> int:
        """How many tokens after the branch's last full page are here again; -1 when they are not, 0 when unknown."""
        if self.tokens is None or known.rest is None or known.page_size != self.page_size:
            return 0
        rest = known.rest[: max(0, known.rest.size - TEMPLATE_TOKENS)]
        at = known.path.size * self.page_size
        return int(rest.size) if np.array_equal(self.tokens[at : at + rest.size], rest) else -1


class Marks:
    """Pages that mark branches, found in a whole path at once: a filter by the page's low bits, then a dict."""

    def __init__(self, limit: int) -> None:
        bits = max(8, (64 * limit - 1).bit_length())
        self._filter = np.zeros(1 << bits, dtype=np.uint8)  # marks by low bits; 255 and more stays
        self._mask = (1 << bits) - 1
        self._by_key: dict[int, dict[str, KnownBranch]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, key: int, branch: KnownBranch) -> None:
        marked = self._by_key.get(key)
        if marked is None:
            marked = self._by_key[key] = {}
            if self._filter[key & self._mask] < 255:
                self._filter[key & self._mask] += 1
        marked.pop(branch.branch, None)
        marked[branch.branch] = branch  # the latest is last

    def remove(self, key: int, branch: KnownBranch) -> None:
        marked = self._by_key.get(key)
        if marked is None or marked.pop(branch.branch, None) is None or marked:
            return
        del self._by_key[key]
        if self._filter[key & self._mask] < 255:
            self._filter[key & self._mask] -= 1

    def find(self, path: PageArray, salt: int) -> Iterator[tuple[int, list[KnownBranch]]]:
        """Size of the path up to each mark and the branches there, latest first; from the path's end."""
        keys = path ^ np.int64(salt)
        for at in np.flatnonzero(self._filter[keys & self._mask])[::-1].tolist():
            marked = self._by_key.get(int(keys[at]))
            if marked is not None:
                yield at + 1, list(islice(reversed(marked.values()), MAX_TRIED))


def salted(space: str) -> int:
    """A number that keeps the marks of two sessions apart."""
    return hash(space) if space else 0
