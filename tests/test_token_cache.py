"""Conversations' ids and page hashes: always those of the whole prompt, for the work of what was appended."""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router import tokens as module
from services.router.tokens import (
    FIRST_HEAD_BYTES,
    HEAD_GROWTH,
    HEAD_KEYS,
    PER_KEY,
    Known,
    TokenCache,
    head_keys,
)
from shared.openai import TokenArray
from shared.pages import page_digests, page_hashes

PAGE = 4
LIMIT = 160


@pytest.fixture(autouse=True)
def entries_cost_their_tokens(monkeypatch):
    monkeypatch.setattr(module, "LEAST_COST", 0)


def ids(values) -> TokenArray:
    return np.array(list(values), dtype=np.int32)


def check(known: Known, tokens: TokenArray, page_size: int, salt: str) -> None:
    """Against the whole prompt, hashed from its beginning."""
    assert known.tokens.tolist() == tokens.tolist()
    assert (known.page_size, known.salt) == (page_size, salt)
    assert known.hashes.dtype == np.int64
    assert known.hashes.tolist() == page_hashes(tokens, page_size, salt=salt).tolist()
    parent = module.salt_digest(salt)
    assert known.digests == page_digests(tokens, page_size, parent=parent)
    packed = struct.pack(f"<{tokens.size}i", *tokens.tolist())
    assert known.digest == blake2b(packed, digest_size=16).digest()


# Few different ids, so that conversations meet by chance, too.
STEP = st.tuples(
    st.sampled_from(["append", "again", "shorter", "edit", "fork", "new"]),
    st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),  # keys
    st.integers(0, 10),  # which earlier prompt of any key
    st.integers(0, 60),  # where
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.sampled_from([PAGE, PAGE, PAGE, 3]),
    st.sampled_from(["", "", "a", "b"]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEP, max_size=40))
def test_random_conversations(steps):
    cache = TokenCache(LIMIT)
    prompts: list[list[int]] = [[1, 0, 1, 1, 0]]
    given_under: dict[bytes, list[list[int]]] = {}
    for action, key_numbers, which, where, more, page_size, salt in steps:
        old = prompts[which % len(prompts)]
        at = where % (len(old) + 1)
        new = {
            "append": old + more,
            "again": list(old),
            "shorter": old[:at],
            "edit": old[:at] + more[:1] + old[at + 1 :],
            "fork": old[:at] + more,
            "new": list(more),
        }[action][:60]
        prompts.append(new)
        prompts = prompts[-8:]
        keys = [b"key%d" % number for number in key_numbers]
        for key in keys:
            given_under.setdefault(key, []).append(new)
        check(cache.prompt(keys, ids(new), page_size, salt), ids(new), page_size, salt)
        kept = [entry for entries in cache._entries.values() for entry in entries]
        assert cache.tokens == sum(entry.tokens.size for entry in kept)
        assert len(cache) == len(kept)
        assert cache.tokens <= LIMIT or len(cache._entries) == 1
        for other, prompts_given in given_under.items():
            entries = cache._entries.get(other, [])
            assert len(entries) <= PER_KEY
            known = cache.known([other])
            assert known is None or known.tokens.tolist() in prompts_given
            for entry in entries:
                assert entry.tokens.tolist() in prompts_given
                check(entry, entry.tokens, entry.page_size, entry.salt)
    assert cache.known([b"another key"]) is None


@pytest.fixture
def hashed(monkeypatch) -> list[tuple[int, int]]:
    """For every call that hashes: the first page, and the number of pages hashed."""
    calls = []

    def counting(tokens, page_size, *, parent=b"", start_page=0):
        found = page_digests(tokens, page_size, parent=parent, start_page=start_page)
        calls.append((start_page, len(found)))
        return found

    monkeypatch.setattr(module, "page_digests", counting)
    return calls


def test_an_append_hashes_the_new_pages_only(hashed):
    cache = TokenCache()
    size, step = 1000, 37
    cache.prompt([b"k"], ids(range(size)), PAGE)
    assert hashed == [(0, 250)]
    for _ in range(20):
        hashed.clear()
        before, size = size // PAGE, size + step
        check(cache.prompt([b"k"], ids(range(size)), PAGE), ids(range(size)), PAGE, "")
        assert hashed == [(before, size // PAGE - before)]
    assert len(cache) == 1 and cache.tokens == size


def test_the_same_prompt_again_hashes_nothing(hashed):
    cache = TokenCache()
    first = cache.prompt([b"k"], ids(range(100)), PAGE)
    hashed.clear()
    assert cache.prompt([b"k"], ids(range(100)), PAGE) is first
    assert hashed == [] and len(cache) == 1


def test_a_shorter_retry_hashes_no_page_again(hashed):
    cache = TokenCache()
    cache.prompt([b"k"], ids(range(100)), PAGE)
    hashed.clear()
    check(cache.prompt([b"k"], ids(range(50)), PAGE), ids(range(50)), PAGE, "")
    assert sum(pages for _, pages in hashed) == 0
    assert cache.tokens == 50  # in place of the longer one


def test_conversations_under_one_key_each_go_on_from_their_own(hashed):
    cache = TokenCache()
    heads = [ids([n, *range(40)]) for n in range(PER_KEY)]
    for head in heads:
        cache.prompt([b"k"], head, PAGE)
    hashed.clear()
    for head in heads:
        longer = np.concatenate([head, ids(range(8))])
        check(cache.prompt([b"k"], longer, PAGE), longer, PAGE, "")
        assert cache.known([b"k"]).tokens.tolist() == longer.tolist()
    assert [start for start, _ in hashed] == [10] * PER_KEY
    assert len(cache) == PER_KEY
    cache.prompt([b"k"], ids([9, 9, 9]), PAGE)  # one too many: the oldest leaves
    assert len(cache) == PER_KEY
    hashed.clear()
    cache.prompt([b"k"], np.concatenate([heads[0], ids(range(20))]), PAGE)
    assert hashed[0][0] == 0


@pytest.mark.parametrize(("page_size", "salt"), [(8, ""), (PAGE, "tenant")])
def test_another_page_size_or_salt_uses_nothing_of_it(hashed, page_size, salt):
    cache = TokenCache()
    cache.prompt([b"k"], ids(range(64)), PAGE, "")
    found = cache.prompt([b"k"], ids(range(72)), page_size, salt)
    check(found, ids(range(72)), page_size, salt)
    assert hashed[-1] == (0, 72 // page_size)


def test_the_least_recently_used_conversations_leave_first():
    cache = TokenCache(100)
    for name in (b"a", b"b", b"c"):
        cache.prompt([name], ids(range(30)), PAGE)
    cache.prompt([b"a"], ids(range(31)), PAGE)
    cache.prompt([b"d"], ids(range(30)), PAGE)
    assert cache.known([b"b"]) is None
    assert all(cache.known([name]) is not None for name in (b"a", b"c", b"d"))
    assert cache.tokens == 91


def test_ids_that_are_none_change_nothing():
    cache = TokenCache()
    cache.prompt([b"k"], ids(range(20)), PAGE)
    for bad in (ids([1, 2, 3, -1]), ids([*range(20), -7, 1, 2, 3])):
        with pytest.raises(ValueError):
            cache.prompt([b"k"], bad, PAGE)
        assert cache.known([b"k"]).tokens.size == 20
    with pytest.raises(ValueError):
        cache.prompt([b"new"], ids([-1, 2, 3, 4]), PAGE)
    assert cache.known([b"new"]) is None and cache.tokens == 20


def test_a_prompt_without_tokens_has_no_pages():
    cache = TokenCache()
    check(cache.prompt([b"k"], ids([]), PAGE), ids([]), PAGE, "")
    check(cache.prompt([b"k"], ids(range(9)), PAGE), ids(range(9)), PAGE, "")
    assert cache.known([b"k"]).tokens.size == 9


def test_a_conversation_is_found_by_any_of_its_keys_the_first_that_is_known(hashed):
    cache = TokenCache()
    cache.prompt([b"short"], ids(range(40)), PAGE)
    cache.prompt([b"other"], ids([7, *range(10)]), PAGE)
    assert cache.known([b"long", b"short", b"other"]).tokens.size == 40
    assert cache.known([b"other", b"short"]).tokens.size == 11
    assert cache.known([b"long"]) is None
    hashed.clear()
    check(cache.prompt([b"long", b"short"], ids(range(48)), PAGE), ids(range(48)), PAGE, "")
    assert hashed == [(10, 2)]
    assert len(cache) == 2 and cache.tokens == 48 + 11  # it moved to its first key
    assert cache.known([b"short"]) is None and cache.known([b"long"]).tokens.size == 48


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(FIRST_HEAD_BYTES, 3000), st.data())
def test_an_unnamed_conversation_that_grows_keeps_a_key(size, data):
    grown = data.draw(st.integers(size, size * HEAD_GROWTH ** (HEAD_KEYS - 1) - 1))
    text = bytes(i * i % 251 for i in range(grown))
    before, after = head_keys(text[:size]), head_keys(text)
    assert 1 <= len(before) <= HEAD_KEYS and 1 <= len(after) <= HEAD_KEYS
    assert set(before) & set(after)
    other = head_keys(b"x" + text)
    assert not set(other) & (set(before) | set(after))


def test_longer_beginnings_come_first():
    same, one, two = b"s" * 1000, b"1" * 4000, b"2" * 4000
    first, second = head_keys(same + one), head_keys(same + two)
    assert first[0] != second[0]
    assert first[1:] != second[1:] or first[1:] == second[1:] == head_keys(same)[:2]
    assert head_keys(b"") and head_keys(b"a") != head_keys(b"b")


def test_what_is_known_is_the_prompt_that_came_last():
    """Also when that was one that had been there before."""
    cache = TokenCache()
    one, two = ids([1, *range(40)]), ids([2, *range(40)])
    cache.prompt([b"k"], one, PAGE)
    cache.prompt([b"k"], two, PAGE)
    cache.prompt([b"k"], one, PAGE)
    assert cache.known([b"k"]).tokens.tolist() == one.tolist()


def test_a_prompt_that_is_only_repeated_is_in_use():
    cache = TokenCache(100)
    for name in (b"a", b"b"):
        cache.prompt([name], ids(range(40)), PAGE)
    cache.prompt([b"a"], ids(range(40)), PAGE)
    cache.prompt([b"c"], ids(range(40)), PAGE)
    assert cache.known([b"a"]) is not None and cache.known([b"b"]) is None


def test_the_limit_holds_within_one_key_too():
    cache = TokenCache(100)
    for n in range(PER_KEY):
        cache.prompt([b"k"], ids([n, *range(59)]), PAGE)
        assert cache.tokens <= 100


def test_small_prompts_are_bounded_too(monkeypatch):
    monkeypatch.setattr(module, "LEAST_COST", 50)
    cache = TokenCache(100)
    for n in range(9):
        cache.prompt([b"%d" % n], ids([n, 1, 2]), PAGE)
    assert len(cache) == 2 and cache.tokens == 6
