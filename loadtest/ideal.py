"""The ideal KV hit rate h*: what an unlimited cache shared by all nodes would have served.

Rules that hold here
- Requests count in the order of their sending. A request's cached tokens are those of the longest run of full
  pages from its start that an earlier request had in its prompt or, once it has ended, in its output.
- At least one token of a prompt is always computed, so a prompt never counts as cached to its last token.
- Only what follows the branch's previous path is hashed.
- Instances that share nothing may have a cache each, dropped with them: the result is the same.
"""

from __future__ import annotations

import numpy as np

from loadtest.content import Prompt, TokenArray
from shared.pages import PathHasher


class IdealCache:
    """Pages seen so far, without end."""

    def __init__(self) -> None:
        self._pages: set[int] = set()

    def __len__(self) -> int:
        return len(self._pages)

    def leading(self, hashes: list[int]) -> int:
        """How many of a path's pages, from its start, are held."""
        pages = self._pages
        # Pages are chained: a held page implies that all before it are held.
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in pages:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, hashes: list[int]) -> None:
        self._pages.update(hashes)


class IdealBranch:
    """One branch's requests against a cache."""

    def __init__(self, cache: IdealCache, page_size: int) -> None:
        self._cache = cache
        self._page_size = page_size
        self._path = PathHasher(page_size)

    def send(self, prompt: Prompt) -> int:
        """Tokens of the prompt that the ideal cache holds as it is sent; its pages are held from then on."""
        size = self._page_size
        # Before the prompt's own pages the path may hold the previous output's, which may differ from it.
        kept = min(prompt.common // size, len(self._path))
        self._path = self._path.fork(kept)
        fresh = self._path.extend(prompt.tokens[kept * size :])
        held = self._cache.leading(self._path.hashes.tolist())
        self._cache.add(fresh.tolist())
        return min(held, (prompt.tokens.size - 1) // size) * size

    def output(self, token_ids: TokenArray) -> None:
        """The output of the last sent prompt: its full pages are held from now on."""
        self._cache.add(self._path.extend(np.asarray(token_ids, dtype=np.int32)).tolist())
