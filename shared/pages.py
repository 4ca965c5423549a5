"""Page hashes: the names of KV pages, the same on every part and in every engine.

Rules that hold here
- A path is a context's tokens cut into full pages of `page_size` tokens; a last, partial page has no name.
- A page's digest is SHA-256 over its parent page's 32-byte digest (nothing for the first page) followed by
  each token id as 4 bytes little-endian. This equals SGLang's HiCache page key, so an engine's KV events and
  ours join with no translation. Equal digests mean equal prefixes: the chain covers every token before.
- A page's hash is the first 64 bits of its digest read big-endian, as a signed int64: SGLang's block hash.
- A salt (a tenant) seeds the chain: the first page's parent is the SHA-256 of the salt's UTF-8 bytes, so
  tenants never share pages. The empty salt is no salt.
- Token ids are 0 to 2^31 - 1; anything else is a ValueError. No Python work is done per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from shared.messages import PageArray

DIGEST_BYTES = 32
MAX_TOKEN_ID = 2**31 - 1

TokenArray = npt.NDArray[np.int32]
Tokens = npt.NDArray[np.integer] | Sequence[int]

_FIRST_BUFFER_PAGES = 64


def salt_digest(salt: str) -> bytes:
    """The digest that stands in for the first page's parent: 32 bytes, or none for the empty salt."""
    return sha256(salt.encode()).digest() if salt else b""


def as_tokens(tokens: Tokens) -> TokenArray:
    """Token ids as contiguous little-endian int32[n]. No copy when they already are.

    Raises ValueError when an id is negative, at least 2^31 or no integer, or when the array is not flat.
    """
    try:
        array = np.asarray(tokens)
    except ValueError as error:
        raise ValueError(f"token ids must be a flat list of integers: {error}") from None
    if array.ndim != 1:
        raise ValueError(f"token ids must be a flat list, not an array of {array.ndim} dimensions")
    if array.size == 0:
        return np.empty(0, dtype="<i4")
    if array.dtype.kind not in "iu":
        # A list with an id beyond 64 bits becomes an array of objects or floats.
        raise ValueError(f"token ids must be integers of 0 to {MAX_TOKEN_ID}, not {array.dtype} values")
    if array.itemsize < 4 or not array.dtype.isnative:
        array = array.astype(np.int64 if array.dtype.kind == "i" else np.uint64)
    # Read as unsigned, a negative id is a huge one: a single pass checks both ends.
    if array.view(f"u{array.itemsize}").max() > MAX_TOKEN_ID:
        at = int(np.flatnonzero((array < 0) | (array > MAX_TOKEN_ID))[0])
        raise ValueError(f"token id {array[at]} at position {at} is not in 0 to {MAX_TOKEN_ID}")
    return np.ascontiguousarray(array, dtype="<i4")


def page_digests(tokens: Tokens, page_size: int, *, parent: bytes = b"", start_page: int = 0) -> list[bytes]:
    """32-byte digests of the full pages of a path, from page `start_page` on.

    `tokens` is the path from its first token. `parent` is the digest of page start_page - 1; for page 0 it is
    the salt's digest, or empty. Raises ValueError for bad ids, a page size below 1, a parent of another
    length, or a later start without its parent.
    """
    _check_page_size(page_size)
    if len(parent) not in (0, DIGEST_BYTES):
        raise ValueError(f"a parent digest has {DIGEST_BYTES} bytes, not {len(parent)}")
    if start_page < 0 or (start_page and not parent):
        raise ValueError(f"page {start_page} needs the digest of the page before it as parent")
    return _chain(as_tokens(tokens)[start_page * page_size :], page_size, parent)


def page_hashes(tokens: Tokens, page_size: int, *, salt: str = "") -> PageArray:
    """int64[len(tokens) // page_size]: the hashes of a path's full pages. Raises ValueError for bad ids."""
    return digests_to_hashes(page_digests(tokens, page_size, parent=salt_digest(salt)))


def digests_to_hashes(digests: Sequence[bytes]) -> PageArray:
    """int64[n]: the first 64 bits of each 32-byte digest."""
    words = np.frombuffer(b"".join(digests), dtype=">i8")
    return words[:: DIGEST_BYTES // 8].astype(np.int64)


class PathHasher:
    """The page hashes of a path that grows: each token is hashed once.

    Keeps the tokens of the partial last page only, not those of full pages.
    """

    def __init__(self, page_size: int, salt: str = "") -> None:
        _check_page_size(page_size)
        self.page_size = page_size
        self.salt = salt
        self._seed = salt_digest(salt)
        self._digests: list[bytes] = []
        self._hashes: PageArray = np.empty(_FIRST_BUFFER_PAGES, dtype=np.int64)
        self._tail: TokenArray = np.empty(page_size, dtype="<i4")
        self._tail_tokens = 0

    def __len__(self) -> int:
        """Full pages."""
        return len(self._digests)

    @property
    def tokens_seen(self) -> int:
        """Tokens of the path, with those of the partial last page."""
        return len(self._digests) * self.page_size + self._tail_tokens

    @property
    def hashes(self) -> PageArray:
        """int64[len(self)], read-only; later calls to `extend` do not change it."""
        view = self._hashes[: len(self._digests)]
        view.flags.writeable = False
        return view

    @property
    def digests(self) -> Sequence[bytes]:
        """32-byte digests of the full pages. Grows with `extend`; not to be changed."""
        return self._digests

    @property
    def tail(self) -> TokenArray:
        """int32[tokens_seen % page_size]: a copy of the tokens of the partial last page."""
        return self._tail[: self._tail_tokens].copy()

    def tail_digest(self) -> bytes | None:
        """A name for the partial last page: chained as a full page's, 32 bytes; None when there is none.

        SGLang has no such name; between our own nodes it stands for the KV of a prompt's last tokens.
        """
        if not self._tail_tokens:
            return None
        parent = self._digests[-1] if self._digests else self._seed
        return sha256(parent + self._tail[: self._tail_tokens].tobytes()).digest()

    def extend(self, tokens: Tokens) -> PageArray:
        """Append tokens; int64 hashes of the pages that they complete, often none.

        A call costs as much as hashing several pages: where tokens come one by one, gather some first.
        Raises ValueError for bad ids and then leaves the path as it was.
        """
        new = as_tokens(tokens)
        kept = self._tail_tokens
        if kept + new.size < self.page_size:
            self._tail[kept : kept + new.size] = new
            self._tail_tokens += new.size
            return np.empty(0, dtype=np.int64)
        if kept:
            new = np.concatenate((self._tail[:kept], new))
        digests = _chain(new, self.page_size, self._digests[-1] if self._digests else self._seed)
        hashes = digests_to_hashes(digests)
        self._append(digests, hashes)
        rest = new[len(digests) * self.page_size :]
        self._tail[: rest.size] = rest
        self._tail_tokens = rest.size
        return hashes

    def fork(self, pages: int) -> PathHasher:
        """A hasher of this path's first `pages` full pages, to go on differently from there.

        Raises ValueError when the path has fewer full pages.
        """
        if not 0 <= pages <= len(self._digests):
            raise ValueError(f"a path of {len(self._digests)} full pages cannot be cut to {pages}")
        other = PathHasher(self.page_size, self.salt)
        other._append(self._digests[:pages], self._hashes[:pages])
        return other

    def _append(self, digests: list[bytes], hashes: PageArray) -> None:
        first, last = len(self._digests), len(self._digests) + len(digests)
        if last > self._hashes.size:
            # A new buffer, not a resize: views given out by `hashes` stay valid.
            grown = np.empty(max(last, self._hashes.size * 3 // 2), dtype=np.int64)
            grown[:first] = self._hashes[:first]
            self._hashes = grown
        self._hashes[first:last] = hashes
        self._digests += digests


def _chain(tokens: TokenArray, page_size: int, parent: bytes) -> list[bytes]:
    data = tokens.view(np.uint8).data
    step = page_size * tokens.itemsize
    digests = []
    for end in range(step, len(data) + 1, step):
        parent = sha256(parent + data[end - step : end]).digest()
        digests.append(parent)
    return digests


def _check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise ValueError(f"a page has at least 1 token, not {page_size}")
