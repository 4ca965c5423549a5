"""Page accounting of both tiers: what is held, what is promised, and that KV events tell the same story."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import PageArray, Tier
from worker.engines.simulated.kv_bytes import SimulatedMemory
from worker.kv.arena import Arena
from worker.kv.cache import Lease, NodeCache
from worker.kv.memory import PageMemory
from worker.kv.path import Path, Slots


def at(*pages: int) -> PageArray:
    return np.array(pages, dtype=np.int64)


def path(*pages: int) -> Path:
    return Path.bare(pages)


def held_in(cache: NodeCache, tier: Tier) -> list[int]:
    return sorted(cache.pages(tier).tolist())


def changes(cache: NodeCache) -> list[tuple[bool, Tier, list[int]]]:
    return [(change.stored, change.tier, change.pages.tolist()) for change in cache.take_changes()]


def fill(cache: NodeCache, pages: list[int]) -> None:
    lease = cache.lease(at(*pages), len(pages))
    assert lease is not None
    cache.write(lease, path(*pages[lease.cached_pages :]))
    cache.release(lease)


def receive(cache: NodeCache, pages: list[int]) -> Slots:
    """Pages come from a peer into L2, as many as there is room for, and stay pinned there."""
    new = path(*pages).take(~cache.in_host(at(*pages)))
    slots = cache.reserve(len(new))
    cache.arrived(new[: slots.size], slots)
    return cache.hold(at(*pages))


def test_pages_enter_both_tiers_and_are_shared() -> None:
    cache = NodeCache(8, 16)
    first = cache.lease(at(1, 2, 3), 4)
    assert first is not None and first.cached_pages == 0 and cache.l1_room == 4
    cache.write(first, path(1, 2))
    second = cache.lease(at(1, 2, 9), 3)
    assert second is not None and second.cached_pages == 2 and second.restored_pages == 0
    assert (cache.l1_used, cache.l1_pinned, cache.l1_room, cache.l1_free) == (2, 2, 3, 3)
    cache.release(first)
    assert cache.l1_pinned == 2
    cache.release(second)
    cache.release(second)
    assert (cache.l1_pinned, cache.l1_room, cache.l1_used) == (0, 0, 2)
    assert changes(cache) == [(True, Tier.L1, [1, 2]), (True, Tier.L2, [1, 2])]
    assert changes(cache) == []


def test_two_requests_that_compute_the_same_page_share_it() -> None:
    cache = NodeCache(4, 4)
    one, two = cache.lease(at(1), 2), cache.lease(at(1), 2)
    assert one is not None and two is not None and cache.l1_free == 0
    cache.write(one, path(1))
    cache.write(two, path(1))
    assert (cache.l1_used, cache.l1_room, cache.l1_free) == (1, 2, 1)
    with pytest.raises(ValueError, match="room for 1"):
        cache.write(two, path(5, 6))


def test_no_room_changes_nothing_and_room_comes_back() -> None:
    cache = NodeCache(4, 8)
    fill(cache, [1, 2])
    busy = cache.lease(at(7), 3)
    assert busy is not None
    cache.take_changes()
    assert cache.lease(at(1, 2), 3) is None
    assert changes(cache) == [] and cache.l1_pinned == 0
    cache.release(busy)
    again = cache.lease(at(1, 2), 3)
    assert again is not None and again.cached_pages == 2 and again.restored_pages == 1
    with pytest.raises(ValueError, match="of 4 in all"):
        cache.lease(at(1), 5)


def test_pages_that_a_lease_reuses_are_not_room_for_it() -> None:
    cache = NodeCache(6, 12)
    fill(cache, [1, 2, 3])
    busy = cache.lease(at(7), 2)
    assert busy is not None
    # 1 page is free, and the 3 that may go are those that are reused: 5 in all would be one too many.
    assert cache.lease(at(1, 2, 3), 5) is None
    lease = cache.lease(at(1, 2, 3), 4)
    assert lease is not None and lease.cached_pages == 3 and cache.l1_free == 0


def test_l1_evicts_the_least_recent_and_l2_restores_it() -> None:
    cache = NodeCache(3, 9)
    fill(cache, [1, 2, 3])
    fill(cache, [4])
    assert cache.held(at(1, 2, 3)) == 3  # page 3 left L1 only
    assert held_in(cache, Tier.L1) == [1, 2, 4]
    lease = cache.lease(at(1, 2, 3), 3)
    assert lease is not None and (lease.cached_pages, lease.restored_pages) == (3, 1)
    assert cache.evicted == {(Tier.L1, False): 2, (Tier.L1, True): 0, (Tier.L2, False): 0, (Tier.L2, True): 0}


def test_l2_evicts_zero_counts_first() -> None:
    cache = NodeCache(2, 4)
    cache.set_counts(at(1, 2), at())
    fill(cache, [1, 2])
    fill(cache, [3, 4])
    fill(cache, [5])  # pushes out 4, the deeper of the newer pages without a count
    assert held_in(cache, Tier.L2) == [1, 2, 3, 5]
    cache.set_counts(at(3), at(1))
    fill(cache, [6])  # now 1 is the oldest page without a count
    assert held_in(cache, Tier.L2) == [2, 3, 5, 6] and cache.l2_counted == 2
    assert (cache.evicted[Tier.L2, False], cache.evicted[Tier.L2, True]) == (2, 0)

    plain = NodeCache(2, 4, eviction="lru")
    plain.set_counts(at(1, 2), at())
    for pages in ([1, 2], [3, 4], [5]):
        fill(plain, pages)
    assert held_in(plain, Tier.L2) == [1, 3, 4, 5]
    assert plain.evicted[Tier.L2, True] == 1


def test_what_host_memory_lost_is_written_again_when_it_was_used() -> None:
    cache = NodeCache(8, 4)
    fill(cache, [1, 2])
    fill(cache, [3, 4, 5, 6])  # pushes 1 and 2 out of L2, not out of L1
    assert held_in(cache, Tier.L2) == [3, 4, 5, 6] and cache.held(at(1, 2)) == 2
    cache.set_counts(at(1, 2), at())
    fill(cache, [1, 2])
    assert held_in(cache, Tier.L2) == [1, 2, 3, 4] and cache.l2_counted == 2


def test_a_count_survives_one_copy_and_goes_with_the_last() -> None:
    cache = NodeCache(1, 1)
    cache.set_counts(at(1), at())
    fill(cache, [1])
    pinned = cache.lease(at(1), 1)
    assert pinned is not None
    held = receive(cache, [2])  # pushes page 1 out of L2; L1 still has it
    assert cache.counted(Tier.L1) == 1
    cache.release(pinned)
    cache.let_go(held)
    fill(cache, [3])  # pushes it out of L1
    fill(cache, [1])
    assert cache.counted(Tier.L1) == 0 and cache.l2_counted == 0


def test_a_count_goes_with_the_last_copy_in_host_memory_too() -> None:
    cache = NodeCache(1, 1)
    cache.set_counts(at(1), at())
    fill(cache, [1])
    fill(cache, [2])  # page 1 leaves L1 first, then L2
    assert cache.held(at(1)) == 0
    fill(cache, [1])
    assert cache.l2_counted == 0


def test_all_of_l2_pinned_means_no_write_through() -> None:
    cache = NodeCache(4, 2)
    assert receive(cache, [1, 2, 3]).size == 2
    fill(cache, [8, 9])
    assert held_in(cache, Tier.L2) == [1, 2] and cache.unwritten_pages == 2
    assert cache.held(at(8, 9)) == 2


def test_what_a_decode_adds_counts_as_its_branch_until_the_directory_speaks() -> None:
    def flagged(cache: NodeCache) -> int:
        return cache._l2.order.counted_slots

    def decoded(cache: NodeCache) -> None:
        cache.set_counts(at(1, 2), at())
        lease = cache.lease(at(1, 2), 5)
        assert lease is not None
        cache.write(lease, path(1, 2))
        cache.write(lease, path(3), follow=True)
        cache.write(lease, path(4, 5), follow=True)  # follows a page that follows
        cache.release(lease)
        assert (cache.l2_counted, flagged(cache)) == (2, 5)

    cache = NodeCache(5, 6)
    decoded(cache)
    for page in (20, 21, 22):
        fill(cache, [page])
    assert set(held_in(cache, Tier.L2)) == {1, 2, 3, 4, 5, 22}
    cache.set_counts(at(3, 4), at())  # the branch's next request has these in its path
    assert (cache.l2_counted, flagged(cache)) == (4, 5)
    cache.set_counts(at(), at(1, 2))  # and then it moves: what nobody spoke of goes with page 2
    assert (cache.l2_counted, flagged(cache)) == (2, 2)
    cache.set_counts(at(), at(3, 4))
    assert cache.l2_counted == 0 and not cache._counts._follows

    cache = NodeCache(5, 6)
    decoded(cache)
    cache.set_all_counts(at(1, 2))
    assert (cache.l2_counted, flagged(cache)) == (2, 2)
    cache = NodeCache(5, 5)
    decoded(cache)
    held = receive(cache, [30, 31, 32, 33])  # pushes out the deeper pages, of which GPU memory has copies
    cache.let_go(held)
    assert not cache._counts._follows and cache.counted(Tier.L1) == 2, (
        "nothing is kept of what nobody spoke of"
    )


def test_a_tail_is_kept_for_its_decode_and_nobody_is_told() -> None:
    cache = NodeCache(4, 2)
    cache.keep_tail(path(7))
    assert cache.has_tail(path(7)) and cache.l2_used == 1 and changes(cache) == []
    assert held_in(cache, Tier.L2) == []
    fill(cache, [1, 2])  # it has no count: it leaves first, and nobody is told of that either
    assert not cache.has_tail(path(7)) and held_in(cache, Tier.L2) == [1, 2]
    assert changes(cache) == [(True, Tier.L1, [1, 2]), (True, Tier.L2, [1, 2])]


def test_a_page_of_the_same_name_and_another_key_is_not_lent() -> None:
    cache = NodeCache(4, 8)
    fill(cache, [1, 2, 3])
    other = path(1, 2, 3)
    other.keys[1, 20] ^= 1
    slots, lent = cache.lend(other)
    assert slots.tolist()[1:] == [-1, -1] and lent.size == 1
    cache.end_loan(lent)
    assert cache.l2_pinned == 0


def test_lent_pages_stay_until_they_are_given_back() -> None:
    cache = NodeCache(1, 3)
    fill(cache, [1])
    fill(cache, [2])
    slots, lent = cache.lend(path(1, 2, 9))
    assert (slots >= 0).tolist() == [True, True, False] and cache.l2_pinned == 2
    for page in (3, 4, 5):
        fill(cache, [page])
    assert set(held_in(cache, Tier.L2)) >= {1, 2}
    cache.end_loan(lent)
    fill(cache, [6])
    assert 5 not in held_in(cache, Tier.L2), "the end of a loan is an access"
    fill(cache, [7])
    fill(cache, [8])
    assert not {1, 2} & set(held_in(cache, Tier.L2))


def with_bytes(l1_pages: int, l2_pages: int) -> tuple[NodeCache, SimulatedMemory]:
    memory = SimulatedMemory(Arena(l1_pages + l2_pages, 64, huge_pages=False))
    return NodeCache(l1_pages, l2_pages, memory=memory), memory


@pytest.mark.parametrize("pinned", [False, True])
def test_a_page_whose_bytes_changed_is_dropped_when_it_is_restored(pinned: bool) -> None:
    cache, memory = with_bytes(4, 8)
    fill(cache, [1, 2, 3])
    fill(cache, [5, 6, 7, 8])
    assert held_in(cache, Tier.L1) == [5, 6, 7, 8]
    slots, lent = cache.lend(path(1, 2, 3))
    if not pinned:
        cache.end_loan(lent)
    changes(cache)
    memory.arena.pages[slots[1], 17] ^= 4
    lease = cache.lease(at(1, 2, 3), 4)
    assert lease is not None and lease.cached_pages == 1 and cache.corrupt_pages == 1
    assert cache.take_corrupt() == [2]
    assert 2 not in held_in(cache, Tier.L2) and cache.held(at(1, 2, 3)) == 1
    assert (False, Tier.L2, [2]) in changes(cache)
    cache.write(lease, path(2, 3))
    cache.release(lease)
    assert cache.held(at(1, 2, 3)) == 3
    if pinned:
        cache.end_loan(lent)
    assert cache.l2_pinned == cache.l1_pinned == cache.l1_room == 0
    for page in range(20, 40):
        fill(cache, [page])
    assert cache.l2_used == 8


def test_checksums_alone_find_a_changed_byte() -> None:
    memory = PageMemory(Arena(12, 64, huge_pages=False))
    memory.arena.memory[:] = np.arange(memory.arena.nbytes, dtype=np.uint8)
    cache = NodeCache(4, 8, memory=memory)
    fill(cache, [1, 2, 3])
    fill(cache, [5, 6, 7, 8])
    slots, lent = cache.lend(path(1, 2, 3))
    cache.end_loan(lent)
    memory.arena.pages[slots[1], 5] ^= 1
    lease = cache.lease(at(1, 2, 3), 3)
    assert lease is not None and lease.cached_pages == 1 and cache.corrupt_pages == 1


def test_a_tail_whose_bytes_changed_is_not_there() -> None:
    cache, memory = with_bytes(4, 8)
    cache.keep_tail(path(7))
    slots, lent = cache.lend(path(7))
    cache.end_loan(lent)
    memory.arena.pages[slots[0], 3] ^= 1
    assert not cache.has_tail(path(7)) and cache.corrupt_pages == 1 and changes(cache) == []


def test_pages_of_gpu_memory_stay_while_they_are_on_loan_and_go_when_they_are_wrong() -> None:
    cache, memory = with_bytes(3, 4)
    taken = cache.reserve(4)
    fill(cache, [1, 2])
    slots, lent = cache.lend(path(1, 2))
    assert slots.tolist() == lent.tolist() and (slots < 3).all() and cache.l1_pinned == 2
    assert cache.lease(at(8, 9), 2) is None, "only one page is not on loan"
    memory.arena.pages[slots[1], 3] ^= 1
    cache.end_loan(lent)
    changes(cache)
    cache.recheck(at(1, 2))
    assert changes(cache) == [(False, Tier.L1, [2])] and held_in(cache, Tier.L1) == [1]
    cache.give_back(taken)
    fill(cache, [20, 21, 22])
    assert cache.l1_used == 3


def test_a_peer_that_saw_wrong_bytes_has_them_looked_at_again() -> None:
    cache, memory = with_bytes(4, 8)
    fill(cache, [1, 2, 3])
    slots, lent = cache.lend(path(1, 2, 3))
    cache.end_loan(lent)
    memory.arena.pages[slots[2], 0] ^= 1
    cache.recheck(at(1, 3))
    assert held_in(cache, Tier.L2) == [1, 2] and cache.corrupt_pages == 1


def test_bytes_follow_their_pages_through_both_tiers() -> None:
    cache, memory = with_bytes(6, 9)
    for first in range(0, 60, 3):
        fill(cache, [first, first + 1, first + 2])
    for page in range(60):
        slots, lent = cache.lend(path(page))
        if lent.size:
            assert memory.sound(lent, at(page)).all() and not memory.sound(lent, at(page + 1)).any()
        cache.end_loan(lent)
    assert len(held_in(cache, Tier.L2)) == 9


PATHS = [[1, 2, 3, 4], [1, 2, 5], [1, 6, 7, 8, 9], [10, 11]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["lease", "write", "load", "release", "receive", "let go", "lend", "end", "tail", "flip", "counts", "all"]
        ),
        st.integers(0, 30),
    ),
    max_size=60,
)  # fmt: skip


@given(STEPS, st.integers(5, 9), st.integers(0, 9), st.booleans())
@settings(max_examples=400, deadline=None)
def test_accounts_always_balance_and_events_replay_to_the_truth(
    steps: list[tuple[str, int]], l1_pages: int, l2_pages: int, flips: bool
) -> None:
    cache, memory = with_bytes(l1_pages, l2_pages)
    leases: list[tuple[Lease, list[int]]] = []
    host: list[Slots] = []
    loans: list[Slots] = []
    seen: dict[Tier, set[int]] = {Tier.L1: set(), Tier.L2: set()}
    for step, number in steps:
        pages = PATHS[number % len(PATHS)]
        if step == "lease":
            total = len(pages) + number % 2 if len(pages) < l1_pages else len(pages)
            lease = cache.lease(at(*pages), total)
            if lease is not None:
                leases.append((lease, pages))
        elif step == "write" and leases:
            lease, pages = leases[number % len(leases)]
            cache.write(lease, path(*pages[lease.pages :][: 1 + number % 3]), follow=number % 2 == 0)
        elif step == "load" and leases:
            lease, pages = leases[number % len(leases)]
            cache.load(lease, at(*pages[lease.pages :]))
        elif step == "release" and leases:
            cache.release(leases.pop(number % len(leases))[0])
        elif step == "receive":
            new = path(*pages).take(~cache.in_host(at(*pages)))
            slots = cache.reserve(len(new))
            memory.write(slots, new.pages[: slots.size])
            cache.arrived(new[: slots.size], slots)
            host.append(cache.hold(at(*pages)))
        elif step == "let go" and host:
            cache.let_go(host.pop(number % len(host)))
        elif step == "lend":
            loans.append(cache.lend(path(*pages))[1])
        elif step == "end" and loans:
            cache.end_loan(loans.pop(number % len(loans)))
        elif step == "tail":
            cache.keep_tail(path(100 + number % 5))
        elif step == "flip" and flips and l2_pages:
            memory.arena.pages[l1_pages + number % l2_pages, number % 64] ^= 1
        elif step == "counts":
            cache.set_counts(at(*pages), at(*PATHS[(number + 1) % len(PATHS)]))
        elif step == "all":
            cache.set_all_counts(at(*pages))
        for stored, tier, moved in changes(cache):
            assert len(set(moved)) == len(moved)
            if stored:
                assert not seen[tier] & set(moved)
                seen[tier] |= set(moved)
            else:
                assert set(moved) <= seen[tier]
                seen[tier] -= set(moved)
        assert sorted(seen[Tier.L1]) == held_in(cache, Tier.L1)
        assert sorted(seen[Tier.L2]) == held_in(cache, Tier.L2)
        assert cache.l1_used + cache.l1_room + cache.l1_free == l1_pages and cache.l1_free >= 0
        assert cache.l2_used <= l2_pages
        assert cache.l1_room == sum(lease.room for lease, _ in leases)
        assert set(cache._counts._follows) <= set(cache.pages(Tier.L2).tolist())
        assert sum(map(len, cache._counts._followers.values())) >= len(cache._counts._follows)
        for lease, pages in leases:
            # What a request computes with is what it should be, whatever happened to host memory.
            assert memory.sound(lease.slots, at(*pages[: lease.pages])).all()
    for lease, _ in leases:
        cache.release(lease)
    for slots in host:
        cache.let_go(slots)
    for slots in loans:
        cache.end_loan(slots)
    assert cache.l1_pinned == cache.l1_room == cache.l2_pinned == 0
