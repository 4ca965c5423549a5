"""Page accounting of both tiers: what is held, what is promised, and that KV events tell the same story."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import Tier
from worker.kv.cache import KvChange, Lease, NodeCache


def fill(cache: NodeCache, path: list[int]) -> None:
    lease = cache.lease(path, len(path))
    assert lease is not None
    cache.write(lease, path[lease.cached_pages :])
    cache.release(lease)


def test_pages_enter_both_tiers_and_are_shared() -> None:
    cache = NodeCache(8, 16)
    first = cache.lease([1, 2, 3], 4)
    assert first is not None and first.cached_pages == 0 and cache.l1_room == 4
    cache.write(first, [1, 2])
    second = cache.lease([1, 2, 9], 3)
    assert second is not None and second.cached_pages == 2 and second.restored_pages == 0
    assert (cache.l1_used, cache.l1_pinned, cache.l1_room, cache.l1_free) == (2, 2, 3, 3)
    cache.release(first)
    assert cache.l1_pinned == 2
    cache.release(second)
    cache.release(second)
    assert (cache.l1_pinned, cache.l1_room, cache.l1_used) == (0, 0, 2)
    assert cache.take_changes() == [KvChange(True, Tier.L1, [1, 2]), KvChange(True, Tier.L2, [1, 2])]
    assert cache.take_changes() == []


def test_two_requests_that_compute_the_same_page_share_it() -> None:
    cache = NodeCache(4, 4)
    one, two = cache.lease([1], 2), cache.lease([1], 2)
    assert one is not None and two is not None and cache.l1_free == 0
    cache.write(one, [1])
    cache.write(two, [1])
    assert (cache.l1_used, cache.l1_room, cache.l1_free) == (1, 2, 1)
    with pytest.raises(ValueError, match="room for 1"):
        cache.write(two, [5, 6])


def test_no_room_changes_nothing_and_room_comes_back() -> None:
    cache = NodeCache(4, 8)
    fill(cache, [1, 2])
    busy = cache.lease([7], 3)
    assert busy is not None
    cache.take_changes()
    assert cache.lease([1, 2], 3) is None
    assert cache.take_changes() == [] and cache.l1_pinned == 0
    cache.release(busy)
    again = cache.lease([1, 2], 3)
    assert again is not None and again.cached_pages == 2 and again.restored_pages == 1
    with pytest.raises(ValueError, match="of 4 in all"):
        cache.lease([1], 5)


def test_l1_evicts_the_least_recent_and_l2_restores_it() -> None:
    cache = NodeCache(3, 9)
    fill(cache, [1, 2, 3])
    fill(cache, [4])
    assert cache.held([1, 2, 3]) == 3  # page 3 left L1 only
    assert sorted(cache.pages(Tier.L1)) == [1, 2, 4]
    lease = cache.lease([1, 2, 3], 3)
    assert lease is not None and (lease.cached_pages, lease.restored_pages) == (3, 1)
    assert cache.evicted == {(Tier.L1, False): 2, (Tier.L1, True): 0, (Tier.L2, False): 0, (Tier.L2, True): 0}


def test_l2_evicts_zero_counts_first() -> None:
    cache = NodeCache(2, 4)
    cache.set_counts([1, 2], [])
    fill(cache, [1, 2])
    fill(cache, [3, 4])
    fill(cache, [5])  # pushes out 4, the deeper of the newer pages without a count
    assert sorted(cache.pages(Tier.L2)) == [1, 2, 3, 5]
    cache.set_counts([3], [1])
    fill(cache, [6])  # now 1 is the oldest page without a count
    assert sorted(cache.pages(Tier.L2)) == [2, 3, 5, 6] and cache.l2_counted == 2
    assert (cache.evicted[Tier.L2, False], cache.evicted[Tier.L2, True]) == (2, 0)

    plain = NodeCache(2, 4, by_count=False)
    plain.set_counts([1, 2], [])
    for path in ([1, 2], [3, 4], [5]):
        fill(plain, path)
    assert sorted(plain.pages(Tier.L2)) == [1, 3, 4, 5]
    assert plain.evicted[Tier.L2, True] == 1


def test_a_count_survives_one_copy_and_goes_with_the_last() -> None:
    cache = NodeCache(1, 1)
    cache.set_counts([1], [])
    fill(cache, [1])
    pinned = cache.lease([1], 1)
    assert pinned is not None
    assert cache.receive([2]) == [2]  # pushes page 1 out of L2; L1 still has it
    assert cache.counted(Tier.L1) == 1
    cache.release(pinned)
    cache.unpin_host([2])
    fill(cache, [3])  # pushes it out of L1
    fill(cache, [1])
    assert cache.counted(Tier.L1) == 0 and cache.l2_counted == 0


def test_a_count_goes_with_the_last_copy_in_host_memory_too() -> None:
    cache = NodeCache(1, 1)
    cache.set_counts([1], [])
    fill(cache, [1])
    fill(cache, [2])  # page 1 leaves L1 first, then L2
    assert cache.held([1]) == 0
    fill(cache, [1])
    assert cache.l2_counted == 0


def test_all_of_l2_pinned_means_no_write_through() -> None:
    cache = NodeCache(4, 2)
    assert cache.receive([1, 2, 3]) == [1, 2]
    fill(cache, [8, 9])
    assert sorted(cache.pages(Tier.L2)) == [1, 2] and cache.unwritten_pages == 3
    assert cache.held([8, 9]) == 2


PATHS = [[1, 2, 3, 4], [1, 2, 5], [1, 6, 7, 8, 9], [10, 11]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["lease", "write", "release", "receive", "unpin", "counts"]), st.integers(0, 30)
    ),
    max_size=60,
)


@given(STEPS, st.integers(5, 9), st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_accounts_always_balance_and_events_replay_to_the_truth(
    steps: list[tuple[str, int]], l1_pages: int, l2_pages: int
) -> None:
    cache = NodeCache(l1_pages, l2_pages)
    leases: list[tuple[Lease, list[int]]] = []
    host: list[list[int]] = []
    seen: dict[Tier, set[int]] = {Tier.L1: set(), Tier.L2: set()}
    for step, number in steps:
        path = PATHS[number % len(PATHS)]
        if step == "lease":
            lease = cache.lease(path, len(path) + number % 2 if len(path) < l1_pages else len(path))
            if lease is not None:
                leases.append((lease, path))
        elif step == "write" and leases:
            lease, path = leases[number % len(leases)]
            cache.write(lease, path[len(lease.pages) :][: 1 + number % 3])
        elif step == "release" and leases:
            cache.release(leases.pop(number % len(leases))[0])
        elif step == "receive":
            host.append(cache.receive(path))
        elif step == "unpin" and host:
            cache.unpin_host(host.pop(number % len(host)))
        elif step == "counts":
            cache.set_counts(path, PATHS[(number + 1) % len(PATHS)])
        for stored, tier, pages in cache.take_changes():
            assert len(set(pages)) == len(pages)
            if stored:
                assert not seen[tier] & set(pages)
                seen[tier] |= set(pages)
            else:
                assert set(pages) <= seen[tier]
                seen[tier] -= set(pages)
        assert seen[Tier.L1] == set(cache.pages(Tier.L1)) and seen[Tier.L2] == set(cache.pages(Tier.L2))
        assert cache.l1_used + cache.l1_room + cache.l1_free == l1_pages and cache.l1_free >= 0
        assert cache.l2_used <= l2_pages
        assert cache.l1_room == sum(lease.room for lease, _ in leases)
        assert {page for lease, _ in leases for page in lease.pages} <= seen[Tier.L1]
    for lease, _ in leases:
        cache.release(lease)
    for pages in host:
        cache.unpin_host(pages)
    assert cache.l1_pinned == cache.l1_room == cache.l2_pinned == 0
