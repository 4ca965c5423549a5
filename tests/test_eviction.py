"""The eviction order against a plain reading of its rules; Algorithm E.2: least (1[R > 0], T) of the unpinned slots."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kv import eviction
from worker.kv.eviction import STALE_TURNS, Eviction, EvictionOrder, Flags, Slots

SLOTS = 12
MODES: list[Eviction] = ["count", "count_lru", "lru"]
PATH = st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=6)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.tuples(st.integers(0, SLOTS - 1), st.booleans()), max_size=6)),
        st.tuples(st.sampled_from(["remove", "touch", "pin", "unpin", "set", "clear"]), PATH),
        st.tuples(st.just("evict"), st.integers(-1, 5)),
    ),
    max_size=80,
)


class Naive:
    """Everything written down, searched from end to end."""

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction
        self.now = 0
        self.last: dict[int, int] = {}
        self.call: dict[int, int] = {}  # accesses before the call that accessed the slot last
        self.pins: dict[int, int] = {}
        self.positive: set[int] = set()

    def access(self, path: list[int]) -> None:
        self.call |= dict.fromkeys(path, self.now)
        for slot in reversed(path):
            self.now += 1
            self.last[slot] = self.now

    def remove(self, slot: int) -> tuple[int, bool]:
        del self.last[slot]
        self.pins.pop(slot, None)
        counted = slot in self.positive
        self.positive.discard(slot)
        return slot, counted

    def unpin(self, path: list[int]) -> None:
        for slot in path:
            self.pins[slot] -= 1
        self.access([slot for slot in path if not self.pins[slot]])
        self.pins = {slot: pins for slot, pins in self.pins.items() if pins}

    def evict(self, slots: int) -> list[tuple[int, bool]]:
        victims: list[tuple[int, bool]] = []
        while len(victims) < slots and (free := [slot for slot in self.last if slot not in self.pins]):
            victims.append(self.remove(min(free, key=self.rank)))
        return victims

    def rank(self, slot: int) -> tuple[int, int, int]:
        if self.eviction == "lru" or slot not in self.positive:
            return 0, 0, self.last[slot]
        if self.eviction == "count_lru" or self.now - self.call[slot] > eviction.STALE_TURNS * SLOTS:
            return 1, 0, self.last[slot]
        return 2, -self.call[slot], self.last[slot]


def slots_of(path: list[int]) -> Slots:
    return np.array(path, np.intp)


def flags_of(flags: list[bool]) -> Flags:
    return np.array(flags, np.bool_)


def evicted(order: EvictionOrder, slots: int) -> list[tuple[int, bool]]:
    victims, flags = order.evict(slots)
    assert victims.dtype == np.intp and flags.dtype == np.bool_
    return list(zip(victims.tolist(), flags.tolist(), strict=True))


def whole(order: EvictionOrder) -> tuple[object, ...]:
    """All that can be seen without a change."""
    every = np.arange(SLOTS)
    numbers = (len(order), order.pinned_slots, order.counted_slots, order.evictable)
    return numbers, order.is_counted(every).tolist(), order.is_pinned(every).tolist()


@given(ACTIONS, st.sampled_from(MODES), st.sampled_from([1, 2, 5, 256]), st.sampled_from([0, 1, 8]))
@settings(max_examples=700, deadline=None)
def test_order_equals_the_algorithm(
    actions: list[tuple[str, object]], mode: Eviction, block: int, turns: int
) -> None:
    # Small blocks: a log of few positions is packed often, and slots lie in many blocks.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "_BLOCK", block)
        patch.setattr(eviction, "STALE_TURNS", turns)
        compare(actions, mode)


def compare(actions: list[tuple[str, object]], mode: Eviction) -> None:
    order, naive = EvictionOrder(SLOTS, mode), Naive(mode)
    for action, what in actions:
        if isinstance(what, int):
            assert evicted(order, what) == naive.evict(what)
        elif action == "add":
            assert isinstance(what, list)
            new = {slot: counted for slot, counted in what if slot not in naive.last}
            order.add(slots_of(list(new)), flags_of(list(new.values())))
            naive.access(list(new))
            naive.positive |= {slot for slot, counted in new.items() if counted}
        else:
            assert isinstance(what, list)
            path = [slot for slot in what if slot in (naive.pins if action == "unpin" else naive.last)]
            slots = slots_of(path)
            match action:
                case "remove":
                    flags = order.remove(slots).tolist()
                    assert list(zip(path, flags, strict=True)) == [naive.remove(slot) for slot in path]
                case "touch":
                    order.touch(slots)
                    naive.access(path)
                case "pin":
                    order.pin(slots)
                    naive.pins |= {slot: naive.pins.get(slot, 0) + 1 for slot in path}
                case "unpin":
                    order.unpin(slots)
                    naive.unpin(path)
                case "set":
                    order.set_counted(slots, True)
                    naive.positive |= set(path)
                case "clear":
                    order.set_counted(slots, False)
                    naive.positive -= set(path)
        numbers = (len(naive.last), len(naive.pins), len(naive.positive), len(naive.last) - len(naive.pins))
        counted, pinned = [[s in kept for s in range(SLOTS)] for kept in (naive.positive, naive.pins)]
        assert whole(order) == (numbers, counted, pinned)
    assert evicted(order, 100) == naive.evict(100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_order_of_many_slots_in_bulk(seed: int, mode: Eviction) -> None:
    """Blocks of the real size, thousands of slots that lie dense and far apart, and a log packed often."""
    rng = np.random.default_rng(seed)
    total = 5000
    order = EvictionOrder(total, mode)
    last, counted, pins = np.zeros(total, int), np.zeros(total, bool), np.zeros(total, int)
    call = np.zeros(total, int)
    now = 0

    def access(slots: Slots) -> None:
        nonlocal now
        call[slots] = now
        last[slots[::-1]] = np.arange(now + 1, now + len(slots) + 1)
        now += len(slots)

    for number in range(150):
        present = rng.permutation(np.flatnonzero(last))
        absent = rng.permutation(np.flatnonzero(last == 0))
        new = absent[: rng.integers(0, total)]
        counted[new] = rng.random(len(new)) < rng.choice([0, 0.01, 0.5, 0.99, 1])
        order.add(new, counted[new])
        access(new)
        some = present[: rng.integers(0, len(present) + 1)]
        order.touch(some)
        access(some)
        some = present[: rng.integers(0, len(present) + 1) // 8]
        order.pin(some)
        pins[some] += 1
        some = rng.permutation(np.flatnonzero(pins))
        some = some[: rng.integers(0, len(some) + 1)]
        order.unpin(some)
        pins[some] -= 1
        access(some[pins[some] == 0])
        some = rng.permutation(np.flatnonzero(last))[:: rng.choice([1, 2, 100])]
        order.set_counted(some, number % 3 == 0)
        counted[some] = number % 3 == 0
        for wanted in (1, 3, int(rng.integers(0, total))):
            free = np.flatnonzero((last > 0) & (pins == 0))
            kept = counted[free] & (mode != "lru")
            newest = kept & (now - call[free] <= STALE_TURNS * total) & (mode == "count")
            expected = free[np.lexsort((last[free], -call[free] * newest, newest, kept))][:wanted]
            victims, flags = order.evict(wanted)
            assert np.array_equal(victims, expected) and np.array_equal(flags, counted[expected])
            last[victims], counted[victims] = 0, False
        assert len(order) == np.count_nonzero(last) and order.pinned_slots == np.count_nonzero(pins)
        assert order.counted_slots == np.count_nonzero(counted)


def test_deeper_pages_of_a_path_leave_first() -> None:
    order = EvictionOrder(4)
    order.add(slots_of([1, 2, 3, 0]), flags_of([False] * 4))
    assert order.evict(4)[0].tolist() == [0, 3, 2, 1]


def test_zero_counts_leave_before_older_positive_ones_and_keep_their_age() -> None:
    order = EvictionOrder(4, "count_lru")
    for slot in range(4):
        order.add(slots_of([slot]), flags_of([slot < 3]))
    order.set_counted(slots_of([1]), False)  # compaction dropped its page: as old as it was, so before slot 3
    assert evicted(order, 4) == [(1, False), (3, False), (0, True), (2, True)]


def test_when_all_is_counted_the_latest_path_leaves_first_from_its_end() -> None:
    order = EvictionOrder(9)
    for path in ([0, 1, 2], [3, 4, 5], [6, 7, 8]):
        order.add(slots_of(path), flags_of([True] * 3))
    order.touch(slots_of([0, 1, 2]))
    assert order.evict(4)[0].tolist() == [2, 1, 0, 8]
    order.set_counted(slots_of([4]), False)
    assert evicted(order, 2) == [(4, False), (7, True)]


def test_counted_slots_that_nobody_uses_for_long_leave_after_all() -> None:
    order = EvictionOrder(3)
    order.add(slots_of([0, 1]), flags_of([True] * 2))  # of a branch that went away without a word
    order.add(slots_of([2]), flags_of([True]))
    for _ in range(STALE_TURNS * 3 - 3):
        order.touch(slots_of([2]))
    assert evicted(order, 1) == [(2, True)]
    order.add(slots_of([2]), flags_of([True]))
    assert evicted(order, 3) == [(1, True), (0, True), (2, True)]


def test_without_counts_the_flags_are_reported_only() -> None:
    order = EvictionOrder(3, "lru")
    order.add(slots_of([2, 1, 0]), flags_of([False, True, True]))
    order.set_counted(slots_of([0]), False)
    assert order.counted_slots == 1 and order.is_counted(slots_of([0, 1])).tolist() == [False, True]
    assert evicted(order, 3) == [(0, False), (1, True), (2, False)]


def test_the_end_of_the_last_pin_is_an_access() -> None:
    order = EvictionOrder(3)
    order.add(slots_of([2, 1, 0]), flags_of([False] * 3))
    order.pin(slots_of([0, 1]))
    order.pin(slots_of([0]))
    assert order.evictable == 1 and evicted(order, 3) == [(2, False)] and evicted(order, 3) == []
    order.unpin(slots_of([0, 1]))
    assert order.is_pinned(slots_of([0, 1, 2])).tolist() == [True, False, False]
    order.unpin(slots_of([0]))
    assert evicted(order, 3) == [(1, False), (0, False)]


def test_a_slot_that_left_comes_back_without_flag_and_pins() -> None:
    order = EvictionOrder(1)
    for _ in range(1000):  # the log of one slot is packed again and again
        order.add(slots_of([0]), flags_of([True]))
        order.pin(slots_of([0]))
        assert evicted(order, 1) == [] and order.remove(slots_of([0])).tolist() == [True]
        order.add(slots_of([0]), flags_of([False]))
        assert evicted(order, 1) == [(0, False)]


@pytest.mark.parametrize(
    "call",
    [
        lambda order: order.pin(slots_of([0, 3])),
        lambda order: order.unpin(slots_of([1, 0])),
        lambda order: order.unpin(slots_of([1, 3])),
        lambda order: order.touch(slots_of([0, 3])),
        lambda order: order.remove(slots_of([0, 3])),
        lambda order: order.set_counted(slots_of([0, 3]), True),
        lambda order: order.add(slots_of([3, 0]), flags_of([True, True])),
        lambda order: order.pin(slots_of([0, SLOTS])),
    ],
)
def test_wrong_use_changes_nothing(call: Callable[[EvictionOrder], object]) -> None:
    order = EvictionOrder(SLOTS)
    order.add(slots_of([2, 1, 0]), flags_of([False] * 3))
    order.pin(slots_of([1]))
    before = whole(order)
    with pytest.raises((KeyError, ValueError, IndexError)):
        call(order)
    assert whole(order) == before
    order.unpin(slots_of([1]))
    assert evicted(order, 4) == [(0, False), (2, False), (1, False)]


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_named_twice_counts_once(mode: Eviction) -> None:
    order = EvictionOrder(3, mode)
    order.add(slots_of([0, 1, 2]), flags_of([True, False, True]))
    order.touch(slots_of([1, 0, 1]))
    order.pin(slots_of([1, 1]))
    order.pin(slots_of([1]))
    order.unpin(slots_of([1, 1]))
    assert order.pinned_slots == 1 and order.evictable == 2
    order.pin(slots_of([0, 1, 2, 0, 1, 2]))
    assert evicted(order, 3) == []
    order.unpin(slots_of([0, 1, 2, 0, 1, 2]))
    assert sorted(evicted(order, 3)) == [(0, True), (2, True)]
    order.unpin(slots_of([1]))
    assert order.pinned_slots == 0 and evicted(order, 3) == [(1, False)]


def test_which_slot_was_wrong() -> None:
    order = EvictionOrder(3)
    order.add(slots_of([0, 1]), flags_of([True, True]))
    for call in (order.pin, order.unpin, order.touch, order.remove):
        with pytest.raises(KeyError, match="2"):
            call(slots_of([2]))
    with pytest.raises(ValueError, match="slot 1 is present"):
        order.add(slots_of([2, 1]), flags_of([True, True]))
    with pytest.raises(ValueError, match="at least one slot"):
        EvictionOrder(0)
