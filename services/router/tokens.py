"""Token ids and page hashes of a conversation, kept so that its next step costs what it appended.

Rules that hold here
- No I/O, no clock. An entry is the last prompt of one conversation: its ids, their digest, its page digests.
- Nothing is assumed about templates: a worker compares its own ids of the new prompt with the digest of the known
  ones before it sends the rest only, and ids that a client gave are compared here. So ids and hashes are always
  those of the whole prompt, wherever special tokens lie.
- A conversation is found by its keys, the first that is known: what names it (its branch or session) or, without a
  name, how its prompt begins (`head_keys`: the longer the prompt, the more of it). Several conversations may share a
  key; each keeps an entry of its own, until `PER_KEY`.
- Bounded by `limit` tokens in all, an entry counting for at least `LEAST_COST`; the least recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from shared.messages import PageArray
from shared.openai import TokenArray
from shared.pages import digests_to_hashes, page_digests, salt_digest

PER_KEY = 4
LEAST_COST = 256
FIRST_HEAD_BYTES, HEAD_GROWTH, HEAD_KEYS = 64, 4, 3


class Known:
    """The last prompt of a conversation. `base`: one that it goes on from."""

    __slots__ = ("_hashed", "_hashed_tokens", "digests", "hashes", "page_size", "salt", "tokens")

    def __init__(
        self,
        tokens: TokenArray,
        page_size: int,
        salt: str,
        digests: list[bytes],
        hashes: PageArray,
        base: Known | None = None,
    ) -> None:
        self.tokens, self.page_size, self.salt = tokens, page_size, salt
        self.digests, self.hashes = digests, hashes
        # Of the ids' first `_hashed_tokens`.
        self._hashed: blake2b | None = None if base is None else base._hashed
        self._hashed_tokens: int = 0 if base is None else base._hashed_tokens

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for all of the ids."""
        hashed = blake2b(digest_size=16) if self._hashed is None else self._hashed.copy()
        hashed.update(self.tokens[self._hashed_tokens :].astype("<i4", copy=False).tobytes())
        self._hashed, self._hashed_tokens = hashed, self.tokens.size
        return hashed.digest()


def head_keys(prompt: bytes) -> list[bytes]:
    """Keys for a conversation that nothing names: digests of how its prompt begins, the longest beginning first.

    A prompt of at least `FIRST_HEAD_BYTES` that grows keeps a key in common with the one before, as long as it grows
    by less than `HEAD_GROWTH ** (HEAD_KEYS - 1)` times.
    """
    size = FIRST_HEAD_BYTES
    while size * HEAD_GROWTH <= len(prompt):
        size *= HEAD_GROWTH
    sizes = [size // HEAD_GROWTH**n for n in range(HEAD_KEYS) if size // HEAD_GROWTH**n >= FIRST_HEAD_BYTES]
    return [blake2b(prompt[:head], digest_size=16).digest() for head in sizes]


class TokenCache:
    def __init__(self, limit: int = 16_000_000) -> None:
        self._limit = limit
        self._entries: OrderedDict[bytes, list[Known]] = OrderedDict()
        self.tokens = 0  # in all entries
        self._cost = 0

    def __len__(self) -> int:
        """Conversations."""
        return sum(map(len, self._entries.values()))

    def known(self, keys: Sequence[bytes]) -> Known | None:
        """The conversation that was last seen under the keys: its ids are what a worker need not send again."""
        for key in keys:
            entries = self._entries.get(key)
            if entries:
                return entries[-1]
        return None

    def prompt(self, keys: Sequence[bytes], tokens: TokenArray, page_size: int, salt: str = "") -> Known:
        """The whole prompt with its page hashes, kept as the conversation's last one.

        Raises ValueError for ids that are none.
        """
        base, base_key = self._begun(keys, tokens, page_size, salt)
        if base is not None and base.tokens.size == tokens.size:
            self._drop(base_key, base)
            self._keep(keys[0], base)
            return base
        shared = min(base.tokens.size, tokens.size) // page_size if base is not None else 0
        if base is not None and shared:
            fresh = page_digests(tokens, page_size, parent=base.digests[shared - 1], start_page=shared)
            digests = base.digests[:shared] + fresh
            hashes = (
                np.concatenate([base.hashes[:shared], digests_to_hashes(fresh)])
                if fresh
                else base.hashes[:shared]
            )
        else:
            digests = page_digests(tokens, page_size, parent=salt_digest(salt))
            hashes = digests_to_hashes(digests)
        goes_on = base is not None and base.tokens.size < tokens.size
        found = Known(tokens, page_size, salt, digests, hashes, base if goes_on else None)
        if base is not None:
            self._drop(base_key, base)
        if tokens.size:
            self._keep(keys[0], found)
        return found

    def _keep(self, key: bytes, known: Known) -> None:
        entries = self._entries.setdefault(key, [])
        self._entries.move_to_end(key)
        entries.append(known)
        self._count(known, 1)
        while len(entries) > PER_KEY:
            self._count(entries.pop(0), -1)
        while self._cost > self._limit and (len(self._entries) > 1 or len(entries) > 1):
            oldest, old = next(iter(self._entries.items()))
            self._drop(oldest, old[0])

    def _count(self, known: Known, sign: int) -> None:
        self.tokens += sign * known.tokens.size
        self._cost += sign * max(known.tokens.size, LEAST_COST)

    def _begun(
        self, keys: Sequence[bytes], tokens: TokenArray, page_size: int, salt: str
    ) -> tuple[Known | None, bytes]:
        """The entry that the prompt goes on from, or repeats a part of, and its key."""
        for key in keys:
            for entry in reversed(self._entries.get(key, ())):
                if entry.page_size == page_size and entry.salt == salt and _same_start(entry.tokens, tokens):
                    return entry, key
        return None, b""

    def _drop(self, key: bytes, entry: Known) -> None:
        entries = self._entries[key]
        entries.remove(entry)
        self._count(entry, -1)
        if not entries:
            del self._entries[key]


def _same_start(a: TokenArray, b: TokenArray) -> bool:
    """Whether the shorter one begins the longer one."""
    n = min(a.size, b.size)
    # As bytes: for a few ids numpy's comparison costs more than all of it.
    return n > 0 and a[0] == b[0] and a[n - 1] == b[n - 1] and a[:n].tobytes() == b[:n].tobytes()
