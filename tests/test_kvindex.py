"""The page index against a naive model of sets, and its bounds."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kvindex import MAX_NODES, KvIndex
from shared.messages import PageArray, Tier

NODES = ["a", "b", "c", "d"]
# Real hashes are spread over all of int64.
PAGES = [-(2**63), -1, 0, 1, 2**63 - 1, *(i * 1_000_003**3 for i in range(1, 6))]


def array(pages: list[int]) -> PageArray:
    return np.array(pages, dtype=np.int64)


class Naive:
    def __init__(self) -> None:
        self.held: dict[tuple[str, Tier], set[int]] = {}

    def known(self) -> set[str]:
        return {node for node, _ in self.held}

    def of(self, node: str, tier: Tier) -> set[int]:
        return self.held.get((node, tier), set())

    def both(self, node: str) -> set[int]:
        return self.of(node, Tier.L1) | self.of(node, Tier.L2)

    def leading(self, held: set[int], path: list[int]) -> int:
        n = 0
        while n < len(path) and path[n] in held:
            n += 1
        return n


page_lists = st.lists(st.sampled_from(PAGES), max_size=8)
nodes = st.sampled_from(NODES)
tiers = st.sampled_from(list(Tier))
Operation = tuple[str, str, Tier | None, list[int]]
operations: st.SearchStrategy[Operation] = st.one_of(
    st.tuples(st.just("store"), nodes, tiers, page_lists),
    st.tuples(st.just("remove"), nodes, tiers, page_lists),
    st.tuples(st.just("clear"), nodes, st.one_of(st.none(), tiers), st.just([])),
    st.tuples(st.just("drop"), nodes, st.none(), st.just([])),
)


def apply(index: KvIndex, naive: Naive, operation: Operation, times: int) -> None:
    what, node, tier, pages = operation
    for _ in range(times):
        if what == "store" and tier is not None:
            index.store(node, tier, array(pages))
        elif what == "remove" and tier is not None:
            index.remove(node, tier, array(pages))
        elif what == "clear":
            index.clear(node, tier)
        else:
            index.drop_node(node)
    if what == "store" and tier is not None:
        for each in Tier:
            naive.held.setdefault((node, each), set())
        naive.held[node, tier] |= set(pages)
    elif what == "drop":
        for each in Tier:
            naive.held.pop((node, each), None)
    elif node in naive.known():
        for each in Tier if tier is None else (tier,):
            naive.held[node, each] -= set(pages) if what == "remove" else naive.held[node, each]


@settings(max_examples=200)
@given(st.lists(operations, max_size=25), st.integers(1, 2), page_lists)
def test_equals_sets(ops: list[Operation], times: int, path: list[int]) -> None:
    """`times` 2 runs each operation twice: the second must change nothing."""
    index, naive = KvIndex(), Naive()
    for operation in ops:
        apply(index, naive, operation, times)
        assert set(index.nodes()) == naive.known()
        assert len(index) == len(set().union(*naive.held.values()))
        for node in NODES:
            for tier in Tier:
                held = index.pages(node, tier)
                assert held.dtype == np.int64
                assert sorted(held.tolist()) == sorted(naive.of(node, tier))
                assert index.count(node, tier) == len(naive.of(node, tier))
            want = [page in naive.both(node) for page in path]
            assert index.holds(node, array(path)).tolist() == want
        assert index.match(array(path)) == {
            node: n for node in NODES if (n := naive.leading(naive.both(node), path))
        }
        for tier in Tier:
            assert index.match_tier(array(path), tier) == {
                node: n for node in NODES if (n := naive.leading(naive.of(node, tier), path))
            }


def test_a_page_stays_while_one_tier_holds_it() -> None:
    index = KvIndex()
    path = array([10, 20, 30])
    index.store("n", Tier.L1, path)
    index.store("n", Tier.L2, path[:2])
    index.remove("n", Tier.L1, path[:2])
    assert index.match(path) == {"n": 3}
    assert index.match_tier(path, Tier.L2) == {"n": 2}
    assert index.match_tier(path, Tier.L1) == {}
    index.remove("n", Tier.L2, path[:1])
    assert index.match(path) == {}
    assert index.holds("n", path).tolist() == [False, True, True]
    assert len(index) == 2


def test_a_match_may_go_on_in_the_other_tier() -> None:
    index = KvIndex()
    path = array([1, 2, 3, 4])
    index.store("n", Tier.L1, path[[0, 2]])
    index.store("n", Tier.L2, path[[1, 3]])
    assert index.match(path) == {"n": 4}
    assert index.match_tier(path, Tier.L1) == {"n": 1}


def test_empty_index_and_empty_path() -> None:
    index = KvIndex()
    assert index.match(array([1])) == {} and len(index) == 0 and index.nodes() == []
    assert index.holds("n", array([1, 2])).tolist() == [False, False]
    index.store("n", Tier.L1, array([]))
    assert index.nodes() == ["n"] and index.match(array([])) == {}


def test_slots_are_recycled_and_a_new_node_inherits_nothing() -> None:
    index = KvIndex()
    path = array([1, 2, 3])
    index.store("stays", Tier.L2, path[:2])
    for i in range(3 * MAX_NODES):
        index.store(f"n{i}", Tier.L1, path)
        assert index.match(path) == {"stays": 2, f"n{i}": 3}
        index.drop_node(f"n{i}")
    index.store("new", Tier.L2, array([]))
    assert index.match(path) == {"stays": 2}
    assert len(index) == 2


def test_many_nodes_up_to_the_bound() -> None:
    index = KvIndex()
    path = array(list(range(MAX_NODES + 1)))
    for i in range(MAX_NODES):
        index.store(f"n{i}", Tier(1 + i % 2), path[: i + 1])
    assert index.match(path) == {f"n{i}": i + 1 for i in range(MAX_NODES)}
    with pytest.raises(ValueError, match="already has 128 nodes"):
        index.store("one-more", Tier.L1, path)
    index.drop_node("n7")
    index.store("one-more", Tier.L1, path)
    assert index.match(path)["one-more"] == MAX_NODES + 1


def test_a_tier_that_is_none_changes_nothing() -> None:
    index = KvIndex()
    with pytest.raises(ValueError, match="3 is not a valid Tier"):
        index.store("n", 3, array([1]))  # type: ignore[arg-type]
    assert index.nodes() == []
    with pytest.raises(ValueError, match="3 is not a valid Tier"):
        index.remove("n", 3, array([1]))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["remove", "clear", "drop"])
def test_memory_returns(how: str) -> None:
    pages = np.arange(40_000, dtype=np.int64) * 2_147_483_659 + 2**40
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        index = KvIndex()
        index.store("n", Tier.L1, pages)
        index.store("m", Tier.L2, pages[:100])
        full, _ = tracemalloc.get_traced_memory()
        if how == "remove":
            for part in np.array_split(pages, 40):
                index.remove("n", Tier.L1, part)
        elif how == "clear":
            index.clear("n", Tier.L1)
        else:
            index.drop_node("n")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == 100
    assert after - before < (full - before) / 4
