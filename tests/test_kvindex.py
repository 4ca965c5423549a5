"""The page index against a naive model of sets, and its bounds."""

from __future__ import annotations

import tracemalloc
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import kvindex
from shared.kvindex import MAX_NODES, KvIndex
from shared.messages import PageArray, Tier

NODES = ["a", "b", "c", "d"]
# Real hashes are spread over all of int64.
PAGES = [-(2**63), -1, 0, 1, 2**63 - 1, *(i * 1_000_003**3 for i in range(1, 6))]


def array(pages: list[int]) -> PageArray:
    return np.array(pages, dtype=np.int64)


def match(index: KvIndex, path: PageArray, tier: Tier | None = None) -> dict[str, int]:
    """What the index says, which is the same set by set and all at once."""
    ask = index.match if tier is None else lambda path: index.match_tier(path, tier)
    found = ask(path)
    with mock.patch.object(kvindex, "_MOST_RUNS", 0):
        assert ask(path) == found
    return found


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
    """Both do it; what the index says came to or left the node is what the sets say."""
    what, node, tier, pages = operation
    before = naive.both(node)
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
    for _ in range(times):
        if what == "store" and tier is not None:
            index.store(node, tier, array(pages))
            continue
        elif what == "drop":
            index.drop_node(node)
            continue
        else:
            cleared = index.clear(node, tier) if what == "clear" else None
            told = index.remove(node, tier, array(pages)) if cleared is None and tier else cleared
            assert told is not None
            want = before - naive.both(node)
        assert told.dtype == np.int64 and sorted(told.tolist()) == sorted(want)
        before = naive.both(node)


@settings(max_examples=200)
@given(st.lists(st.tuples(operations, st.booleans()), max_size=25), st.integers(1, 2), page_lists)
def test_equals_sets(ops: list[tuple[Operation, bool]], times: int, path: list[int]) -> None:
    """`times` 2 runs each operation twice: the second must change nothing. What is not asked for at once waits."""
    index, naive = KvIndex(), Naive()
    for operation, ask in [*ops, (("remove", "a", Tier.L1, []), True)]:
        apply(index, naive, operation, times)
        if not ask:
            continue
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
        assert match(index, array(path)) == {
            node: n for node in NODES if (n := naive.leading(naive.both(node), path))
        }
        for tier in Tier:
            assert match(index, array(path), tier) == {
                node: n for node in NODES if (n := naive.leading(naive.of(node, tier), path))
            }


def test_a_page_stays_while_one_tier_holds_it() -> None:
    index = KvIndex()
    path = array([10, 20, 30])
    index.store("n", Tier.L1, path)
    index.store("n", Tier.L2, path[:2])
    index.remove("n", Tier.L1, path[:2])
    assert match(index, path) == {"n": 3}
    assert match(index, path, Tier.L2) == {"n": 2}
    assert match(index, path, Tier.L1) == {}
    index.remove("n", Tier.L2, path[:1])
    assert match(index, path) == {}
    assert index.holds("n", path).tolist() == [False, True, True]
    assert len(index) == 2


def test_a_match_may_go_on_in_the_other_tier() -> None:
    index = KvIndex()
    path = array([1, 2, 3, 4])
    index.store("n", Tier.L1, path[[0, 2]])
    index.store("n", Tier.L2, path[[1, 3]])
    assert match(index, path) == {"n": 4}
    assert match(index, path, Tier.L1) == {"n": 1}


def test_empty_index_and_empty_path() -> None:
    index = KvIndex()
    assert match(index, array([1])) == {} and len(index) == 0 and index.nodes() == []
    assert index.holds("n", array([1, 2])).tolist() == [False, False]
    index.store("n", Tier.L1, array([]))
    assert index.nodes() == ["n"] and match(index, array([])) == {}


def test_slots_are_recycled_and_a_new_node_inherits_nothing() -> None:
    index = KvIndex()
    path = array([1, 2, 3])
    index.store("stays", Tier.L2, path[:2])
    for i in range(3 * MAX_NODES):
        index.store(f"n{i}", Tier.L1, path)
        assert match(index, path) == {"stays": 2, f"n{i}": 3}
        index.drop_node(f"n{i}")
    index.store("new", Tier.L2, array([]))
    assert match(index, path) == {"stays": 2}
    assert len(index) == 2


def test_many_nodes_up_to_the_bound() -> None:
    index = KvIndex()
    path = array(list(range(MAX_NODES + 1)))
    for i in range(MAX_NODES):
        index.store(f"n{i}", Tier(1 + i % 2), path[: i + 1])
    assert match(index, path) == {f"n{i}": i + 1 for i in range(MAX_NODES)}
    with pytest.raises(ValueError, match="already has 128 nodes"):
        index.store("one-more", Tier.L1, path)
    index.drop_node("n7")
    index.store("one-more", Tier.L1, path)
    assert match(index, path)["one-more"] == MAX_NODES + 1


def test_a_tier_that_is_none_changes_nothing() -> None:
    index = KvIndex()
    with pytest.raises(ValueError, match="3 is not a valid Tier"):
        index.store("n", 3, array([1]))  # type: ignore[arg-type]
    assert index.nodes() == []
    with pytest.raises(ValueError, match="3 is not a valid Tier"):
        index.remove("n", 3, array([1]))  # type: ignore[arg-type]


def equal(index: KvIndex, naive: Naive, universe: PageArray) -> None:
    assert set(index.nodes()) == naive.known()
    assert len(index) == len(set().union(*naive.held.values()))
    for node in naive.known():
        for tier in Tier:
            assert set(index.pages(node, tier).tolist()) == naive.of(node, tier)
            assert index.count(node, tier) == len(naive.of(node, tier))
        both = naive.both(node)
        assert index.holds(node, universe).tolist() == [page in both for page in universe.tolist()]


@pytest.mark.parametrize("near", [False, True], ids=["spread", "near"])
@pytest.mark.parametrize("most_nodes", [3, 40, MAX_NODES])
def test_equals_sets_while_it_grows_and_shrinks(near: bool, most_nodes: int) -> None:
    """Batches of every size over thousands of pages, so that the table is rebuilt often; duplicates in batches."""
    rng = np.random.default_rng(most_nodes)
    universe = np.arange(-2000, 4000) if near else rng.integers(-(2**63), 2**63 - 1, 6000)
    universe[:2] = 0, -(2**63)
    index, naive = KvIndex(), Naive()
    for step in range(240):
        node = f"n{rng.integers(most_nodes)}"
        tier = Tier(int(rng.integers(1, 3)))
        batch = universe[rng.integers(0, len(universe), int(rng.choice([0, 1, 32, 33, 700, 5000])))].tolist()
        # Now more comes than goes, now the other way round.
        what = rng.choice(["store", "remove", "clear", "drop"], p=WAX if step // 60 % 2 == 0 else WANE)
        if what == "clear":
            apply(index, naive, ("clear", node, tier if rng.random() < 0.5 else None, []), 1)
        else:
            apply(index, naive, (str(what), node, None if what == "drop" else tier, batch), 1)
        if step % 30 == 29:
            equal(index, naive, universe)
        if naive.known():
            some = sorted(naive.known())[0]
            path = np.concatenate([array(sorted(naive.both(some))[:3000]), universe[:50]])
            assert match(index, path) == {
                node: n for node in naive.known() if (n := naive.leading(naive.both(node), path.tolist()))
            }


WAX, WANE = (0.8, 0.15, 0.04, 0.01), (0.1, 0.6, 0.2, 0.1)


def test_every_page_on_nodes_of_its_own() -> None:
    rng = np.random.default_rng(5)
    path = rng.integers(-(2**63), 2**63 - 1, 5000)
    index = KvIndex()
    ends = {}
    for n in range(MAX_NODES):
        first = rng.random(path.size) < 0.5
        ends[f"n{n}"] = int(rng.integers(1, path.size + 1))
        held = path[: ends[f"n{n}"]]
        index.store(f"n{n}", Tier.L1, held[first[: held.size]])
        index.store(f"n{n}", Tier.L2, held[~first[: held.size]])
    assert len(index._sets.masks) > 4500
    assert match(index, path) == ends
    for tier in Tier:
        want = {node: int(np.argmin(np.isin(path, index.pages(node, tier)))) for node in ends}
        assert match(index, path, tier) == {node: n for node, n in want.items() if n}


def test_numbers_of_sets_are_given_out_again() -> None:
    """Ever new sets of nodes, a few at a time: their numbers stay few, and a reused one means the new set."""
    rng = np.random.default_rng(6)
    path = rng.integers(-(2**63), 2**63 - 1, 50)
    index, naive = KvIndex(), Naive()
    for _ in range(1500):
        what = "store" if rng.random() < 0.5 else "remove"
        batch = path[rng.random(path.size) < 0.3].tolist()
        apply(index, naive, (what, f"n{rng.integers(30)}", Tier(int(rng.integers(1, 3))), batch), 1)
    equal(index, naive, path)
    assert len(index._sets.masks) <= 2 * path.size + 2


def test_room_for_sets_returns_when_few_are_left() -> None:
    rng = np.random.default_rng(8)
    path = rng.integers(-(2**63), 2**63 - 1, 5000)
    index, naive = KvIndex(), Naive()
    for n in range(40):
        apply(index, naive, ("store", f"n{n}", Tier.L1, path[rng.random(path.size) < 0.5].tolist()), 1)
    assert len(index._sets.masks) > 4900
    for n in range(37):
        apply(index, naive, ("clear", f"n{n}", None, []), 1)
    assert len(index._sets.masks) < 1100 and index._sets.words.shape[1] <= 2048
    equal(index, naive, path)
    apply(index, naive, ("store", "n0", Tier.L2, path[:100].tolist()), 1)
    equal(index, naive, path)


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
        full_table = index.nbytes
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
    # Large arrays are mappings, which tracemalloc does not see.
    assert index.nbytes < full_table / 4
    assert after - before < 200_000 and full - before < 900_000
