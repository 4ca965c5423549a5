"""Page hashes: SGLang's golden values, a naive per-token chain, and the incremental hasher."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import pack_pages, unpack_pages
from shared.pages import MAX_TOKEN_ID, PathHasher, digests_to_hashes, page_digests, page_hashes

token_ids = st.integers(0, MAX_TOKEN_ID)


def naive_digests(tokens: list[int], page_size: int, salt: str = "") -> list[bytes]:
    parent = hashlib.sha256(salt.encode()).digest() if salt else b""
    digests = []
    for page in range(len(tokens) // page_size):
        h = hashlib.sha256(parent)
        for token in tokens[page * page_size : (page + 1) * page_size]:
            h.update(struct.pack("<I", token))
        parent = h.digest()
        digests.append(parent)
    return digests


def naive_hash(digest: bytes) -> int:
    value = int(digest.hex()[:16], 16)
    return value - 2**64 if value >= 2**63 else value


def test_golden_page_of_sglang() -> None:
    tokens = list(range(100, 116))
    assert page_digests(tokens, 16)[0].hex().startswith("34819f75ed7b029c")
    hashes = page_hashes(tokens, 16)
    assert hashes.dtype == np.int64
    assert hashes.tolist() == [3783480490812179100]


@given(
    st.lists(token_ids, max_size=70),
    st.integers(1, 9),
    st.sampled_from(["", "tenant-a", "mandant ü"]),
)
def test_equals_the_chain_token_by_token(tokens: list[int], page_size: int, salt: str) -> None:
    want = naive_digests(tokens, page_size, salt)
    assert page_hashes(tokens, page_size, salt=salt).tolist() == [naive_hash(d) for d in want]
    if not salt:
        assert page_digests(np.array(tokens, dtype=np.int32), page_size) == want


def test_both_signs_occur_and_survive_the_wire() -> None:
    hashes = page_hashes(np.arange(64 * 4, dtype=np.int32), 4)
    assert (hashes < 0).any() and (hashes > 0).any()
    assert unpack_pages(pack_pages(hashes)).tolist() == hashes.tolist()


def test_a_salt_gives_other_pages_and_no_salt_none() -> None:
    tokens = np.arange(64, dtype=np.int32)
    plain, a, b = (set(page_hashes(tokens, 16, salt=s).tolist()) for s in ("", "a", "b"))
    assert len(plain | a | b) == 12


@given(st.lists(token_ids, min_size=8, max_size=60), st.data())
def test_paths_share_exactly_the_pages_before_the_first_difference(
    tokens: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    other = list(tokens)
    other[at] ^= 1
    same = page_hashes(tokens, 4) == page_hashes(other, 4)
    assert same.tolist() == [page < at // 4 for page in range(len(same))]


def test_continues_from_a_parent_digest() -> None:
    tokens = np.arange(100, dtype=np.int32)
    whole = page_digests(tokens, 16)
    assert len(whole) == 6
    assert page_digests(tokens, 16, parent=whole[3], start_page=4) == whole[4:]
    assert page_digests(tokens, 16, parent=whole[5], start_page=6) == []
    with pytest.raises(ValueError, match="page 4 needs the digest"):
        page_digests(tokens, 16, start_page=4)
    with pytest.raises(ValueError, match="32 bytes, not 8"):
        page_digests(tokens, 16, parent=b"12345678")


@pytest.mark.parametrize(
    "tokens",
    [
        np.arange(200, dtype=np.int64)[::2],
        np.arange(0, 200, 2, dtype=np.uint16),
        np.arange(0, 200, 2, dtype=">i4"),
        np.arange(0, 200, 2, dtype=np.int32),
        tuple(range(0, 200, 2)),
        np.frombuffer(np.arange(0, 200, 2, dtype="<i4").tobytes(), dtype="<i4"),
    ],
)
def test_any_integers_in_any_layout(tokens: np.ndarray | tuple[int, ...]) -> None:
    assert page_digests(tokens, 16) == naive_digests(list(range(0, 200, 2)), 16)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, -1, 4], "token id -1 at position 2"),
        ([1, 2**31], "token id 2147483648 at position 1"),
        (np.array([0, -(2**31)], dtype=np.int32), "token id -2147483648 at position 1"),
        (np.array([0, -5], dtype=np.int8), "token id -5 at position 1"),
        (np.array([2**32 - 1], dtype=np.uint32), "token id 4294967295 at position 0"),
        ([2**63], "token id 9223372036854775808 at position 0"),
        ([2**70], "must be integers"),
        ([1.0, 2.0], "must be integers"),
        ([True, False], "must be integers"),
        (["7"], "must be integers"),
        ([[1, 2], [3, 4]], "flat list"),
        ([[1, 2], [3]], "flat list"),
    ],
)
def test_bad_ids_are_refused_and_leave_a_path_as_it_was(tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        page_hashes(tokens, 1)
    hasher = PathHasher(2)
    hasher.extend([1, 2, 3])
    with pytest.raises(ValueError, match=message):
        hasher.extend(tokens)
    assert hasher.tokens_seen == 3 and hasher.tail.tolist() == [3]


@pytest.mark.parametrize("page_size", [0, -16])
def test_bad_page_size(page_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        page_hashes([1], page_size)
    with pytest.raises(ValueError, match="at least 1 token"):
        PathHasher(page_size)


@given(st.lists(st.lists(token_ids, max_size=25), max_size=8), st.sampled_from(["", "t"]))
def test_hasher_in_pieces_equals_the_whole(pieces: list[list[int]], salt: str) -> None:
    hasher = PathHasher(8, salt)
    whole: list[int] = []
    new: list[int] = []
    for piece in pieces:
        new += hasher.extend(piece).tolist()
        whole += piece
        want = naive_digests(whole, 8, salt)
        assert list(hasher.digests) == want
        assert hasher.hashes.tolist() == new == [naive_hash(d) for d in want]
        assert hasher.tokens_seen == len(whole)
        assert len(hasher) == len(whole) // 8
        assert hasher.tail.tolist() == whole[len(whole) // 8 * 8 :]


def test_hasher_token_by_token_over_many_pages() -> None:
    hasher = PathHasher(4)
    for token in range(2000):
        hasher.extend([token])
    assert hasher.hashes.tolist() == page_hashes(np.arange(2000, dtype=np.int32), 4).tolist()


def test_hashes_given_out_are_read_only_and_stay() -> None:
    hasher = PathHasher(4)
    early = hasher.extend(range(8))
    view = hasher.hashes
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    hasher.extend(np.arange(8, 4000))
    assert view.tolist() == early.tolist() == hasher.hashes[:2].tolist()


@given(st.lists(token_ids, max_size=40), st.lists(token_ids, max_size=40), st.data())
def test_fork_goes_its_own_way(tokens: list[int], after: list[int], data: st.DataObject) -> None:
    hasher = PathHasher(4, "salt")
    hasher.extend(tokens)
    before = hasher.hashes.tolist()
    pages = data.draw(st.integers(0, len(hasher)))
    fork = hasher.fork(pages)
    assert fork.tokens_seen == pages * 4
    fork.extend(after)
    assert fork.hashes.tolist() == page_hashes(tokens[: pages * 4] + after, 4, salt="salt").tolist()
    assert hasher.hashes.tolist() == before and hasher.tokens_seen == len(tokens)


@pytest.mark.parametrize("pages", [-1, 3])
def test_fork_beyond_the_path(pages: int) -> None:
    hasher = PathHasher(4)
    hasher.extend(range(11))
    with pytest.raises(ValueError, match="2 full pages cannot be cut"):
        hasher.fork(pages)


def test_digests_to_hashes_of_nothing() -> None:
    assert digests_to_hashes([]).tolist() == []
    assert page_hashes([], 16).dtype == np.int64
