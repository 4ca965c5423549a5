"""The eviction order against a plain reading of Algorithm E.2: least (1[R > 0], T) of the unpinned pages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kv import eviction
from worker.kv.eviction import EvictionOrder

PAGES = st.integers(0, 11)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PAGES),
        st.tuples(st.just("remove"), PAGES),
        st.tuples(st.just("touch"), st.lists(PAGES, unique=True, max_size=6)),
        st.tuples(st.just("pin"), PAGES),
        st.tuples(st.just("unpin"), PAGES),
        st.tuples(st.just("evict"), st.none()),
        st.tuples(st.just("counts"), st.tuples(st.lists(PAGES, max_size=4), st.lists(PAGES, max_size=4))),
        st.tuples(st.just("full"), st.sets(PAGES)),
    ),
    max_size=80,
)


class Naive:
    """Everything written down, searched from end to end."""

    def __init__(self, by_count: bool) -> None:
        self.by_count = by_count
        self.now = 0
        self.last: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.positive: set[int] = set()

    def access(self, page: int) -> None:
        self.now += 1
        self.last[page] = self.now

    def evict(self) -> tuple[int, bool] | None:
        free = [page for page in self.last if not self.pins.get(page)]
        if not free:
            return None
        page = min(free, key=lambda p: (self.by_count and p in self.positive, self.last[p]))
        del self.last[page]
        return page, page in self.positive


@given(ACTIONS, st.booleans())
@settings(max_examples=400, deadline=None)
def test_order_equals_the_algorithm(actions: list[tuple[str, object]], by_count: bool) -> None:
    order, naive = EvictionOrder(by_count=by_count), Naive(by_count)
    for action, what in actions:
        match action, what:
            case "add", int(page):
                order.add_path([page])
                naive.access(page)
            case "remove", int(page) if page in naive.last:
                order.remove(page)
                del naive.last[page]
                naive.pins.pop(page, None)
            case "touch", list(path):
                path = [page for page in path if page in naive.last]
                order.touch_path(path)
                for page in reversed(path):
                    naive.access(page)
            case "pin", int(page) if page in naive.last:
                order.pin_path([page])
                naive.pins[page] = naive.pins.get(page, 0) + 1
            case "unpin", int(page) if naive.pins.get(page):
                order.unpin_path([page])
                naive.pins[page] -= 1
                if not naive.pins[page]:
                    del naive.pins[page]
                    naive.access(page)
            case "counts", (list(positive), list(zero)):
                order.set_counts(positive, zero)
                naive.positive = (naive.positive | set(positive)) - set(zero)
            case "full", set(positive):
                order.set_all_counts(positive)
                naive.positive = set(positive)
            case "evict", _:
                expected = naive.evict()
                assert order.evict() == ([] if expected is None else [expected])
        assert set(order.present) == set(naive.last)
        assert order.pins == naive.pins
        assert order.counted_pages == len(naive.positive & set(naive.last))
        assert order.absent_counted == len(naive.positive - set(naive.last))
    left = []
    while (expected := naive.evict()) is not None:
        left.append(expected)
    assert order.evict(100) == left and not order.evict()


def test_deeper_pages_of_a_path_leave_first() -> None:
    order = EvictionOrder()
    order.add_path([1, 2, 3, 4])
    assert [victim.page for victim in order.evict(4)] == [4, 3, 2, 1]


def test_zero_counts_leave_before_older_positive_ones_and_keep_their_age() -> None:
    order = EvictionOrder()
    for page in (1, 2, 3, 4):
        order.add_path([page])
    order.set_counts([1, 2, 3], [])
    order.set_counts([], [2])  # compaction dropped page 2: as old as it was, so before page 4
    assert order.evict(4) == [(2, False), (4, False), (1, True), (3, True)]


def test_a_flag_waits_for_its_page_within_a_bound() -> None:
    order = EvictionOrder(absent_limit=3)
    order.set_counts([10, 11, 12, 13], [])
    assert order.absent_counted == 3 and not order.is_counted(10)
    for page in (13, 10, 9):
        order.add_path([page])
    assert order.evict(3) == [(10, False), (9, False), (13, True)]


def test_wrong_use_is_refused() -> None:
    order = EvictionOrder()
    with pytest.raises(KeyError):
        order.pin_path([1])
    with pytest.raises(KeyError):
        order.unpin_path([1])
    with pytest.raises(KeyError):
        order.remove(1)


def test_stale_entries_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_SLACK", 8)
    order = EvictionOrder()
    for page in range(2000):
        # Counted pages that go by `remove` leave entries in a heap from which nothing is ever evicted.
        order.set_counts([page], [])
        order.add_path([page])
        order.remove(page)
    assert len(order) == 0
    assert sum(len(heap) for heap in order._heaps) < 50
    order.add_path([7])
    assert order.evict() == [(7, True)]
