"""Cache-aware routing and its tree, by hand and against a plain record of what was sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.baselines.cache_aware import CacheAware, CacheAwareSettings
from loadtest.baselines.prefix_tree import PrefixTree
from shared.messages import PageArray, Phase
from tests.test_baselines_view import PAGE, View, arrival, leading, pages


def loaded(**loads: int) -> CacheAware:
    """A router with so many requests in flight, all of content that nobody else has."""
    router = CacheAware()
    for node, many in loads.items():
        for i in range(many):
            path = pages((-1000 * (ord(node) * 1000 + i) - 500, 1))
            router.place(arrival(f"{node}{i}", path), View(node, "z"), 0.0)
    assert all(router.load(node) == many for node, many in loads.items())
    return router


# ----------------------------------------------------------------- the choice


def test_the_longest_match_serves_if_it_covers_enough():
    router, view = CacheAware(), View("a b c", "z")
    router.place(arrival("1", pages((0, 50))), View("b", "z"), 0.0)
    router.place(arrival("2", pages((0, 20), (1000, 60))), View("c", "z"), 0.0)
    assert router.place(arrival("3", pages((0, 20), (1000, 80))), view, 0.0).node == "c"
    assert router.place(arrival("4", pages((0, 60))), view, 0.0).node == "b"


@pytest.mark.parametrize(("more", "node"), [(0, "a"), (-1, "b")])
def test_the_threshold_itself_is_not_enough(more, node):
    router = CacheAware()
    router.place(arrival("1", pages((0, 30))), View("b", "z"), 0.0)
    # 30 pages of 16 tokens are 480: of 1600 tokens exactly 0.3, of 1599 more.
    new = arrival("2", pages((0, 30), (900, 69)), tokens=1600 + more)
    assert router.place(new, View("a b", "z"), 0.0).node == node


def test_without_a_match_the_least_loaded_serves_and_the_first_of_equals():
    router = loaded(a=2, b=1, c=1)
    assert router.place(arrival("x", pages((0, 10))), View("a b c", "z"), 0.0).node == "b"
    assert router.place(arrival("y", pages((100, 10))), View("a b c", "z"), 0.0).node == "c"


def test_of_nodes_with_the_same_match_the_first_that_was_sent_it_serves():
    router, view = CacheAware(), View("a b c", "z")
    for rid, node in (("1", "c"), ("2", "b")):
        router.place(arrival(rid, pages((0, 50))), View(node, "z"), 0.0)
    assert router.place(arrival("3", pages((0, 55))), view, 0.0).node == "c"


@pytest.mark.parametrize(
    ("loads", "node"),
    [
        ({"a": 64, "b": 0}, "a"),  # a difference of 64 is not above 64
        ({"a": 65, "b": 0}, "b"),
        ({"a": 195, "b": 130}, "a"),  # 1.5 times is not above 1.5 times
        ({"a": 196, "b": 130}, "b"),
        ({"a": 300, "b": 236}, "a"),  # 64 apart again
    ],
)
def test_the_match_counts_until_loads_differ_by_both_thresholds(loads, node):
    router = loaded(**(loads | {"a": loads["a"] - 1}))
    router.place(arrival("first", pages((0, 100))), View("a", "z"), 0.0)
    assert router.place(arrival("next", pages((0, 110))), View("a b", "z"), 0.0).node == node


def test_what_load_sent_elsewhere_is_in_the_tree_of_its_node():
    router = loaded(a=64)
    router.place(arrival("first", pages((0, 100))), View("a", "z"), 0.0)
    assert router.place(arrival("next", pages((0, 110))), View("a b", "z"), 0.0).node == "b"
    assert router.tree.match(pages((0, 110)))[0] == 110
    assert [*router.tree.match(pages((0, 110)))[1]] == ["b"]


def test_load_is_counted_to_the_end_of_the_request_not_of_its_prefill():
    router = CacheAware()
    router.place(arrival("x"), View("a", "z"), 0.0)
    router.prefill_started("x", 1.0)
    router.prefill_done("x", 2.0)
    assert router.load("a") == 1
    router.ended("x", 500, 3.0)
    assert router.load("a") == 0


def test_a_node_that_no_longer_prefills_is_forgotten():
    router = CacheAware()
    router.place(arrival("1", pages((0, 50))), View("a b", "z"), 0.0)
    router.node_changed("a", Phase.DECODE, 1.0)
    assert len(router.tree) == 0
    assert router.place(arrival("2", pages((0, 50))), View("b", "z"), 1.0).node == "b"
    router.node_changed("b", Phase.PREFILL, 2.0)
    assert router.tree.pages("b") == 50
    router.node_changed("b", None, 3.0)
    assert router.tree.nodes() == []


def test_a_match_on_nodes_that_are_not_there_is_none():
    router = CacheAware()
    router.place(arrival("1", pages((0, 50))), View("b", "z"), 0.0)
    assert router.place(arrival("2", pages((0, 50))), View("a c", "z"), 0.0).node == "a"


def test_decode_nodes_come_in_turn():
    router = CacheAware()
    assert [router.bind(arrival(), "a", View("a", "d e"), 0.0) for _ in range(3)] == ["d", "e", "d"]


def test_the_tree_is_bounded_at_each_tick():
    router = CacheAware(CacheAwareSettings(max_tree_size=20 * PAGE * 4))
    view = View("a", "z")
    for i in range(4):
        router.place(arrival(str(i), pages((1000 * i, 9))), view, 0.0)
    assert router.tree.pages("a") == 36
    assert router.tick(view, 120.0) == ()
    assert router.tree.pages("a") == 18
    assert router.tree.match(pages((3000, 9)))[0] == 9
    assert router.tree.match(pages((1000, 9)))[0] == 0


# ----------------------------------------------------------------- the tree


def test_pages_of_nodes_that_share_a_prefix_are_counted_for_each():
    tree = PrefixTree()
    tree.insert(pages((0, 10)), "a")
    tree.insert(pages((0, 4), (100, 3)), "b")
    assert (len(tree), tree.pages("a"), tree.pages("b")) == (13, 10, 7)
    assert tree.match(pages((0, 4))) == (4, {"a", "b"})
    assert tree.match(pages((0, 6))) == (6, {"a"})
    assert tree.match(pages((0, 4), (100, 9))) == (7, {"b"})
    assert tree.match(pages((50, 4))) == (0, ())


def test_eviction_takes_the_oldest_leaf_whole_and_then_its_parent():
    tree = PrefixTree()
    tree.insert(pages((0, 10)), "a")  # 1
    tree.insert(pages((500, 10)), "a")  # 2
    tree.insert(pages((0, 15)), "a")  # 3: five pages more, a leaf of their own
    tree.insert(pages((900, 8)), "a")  # 4
    tree.evict("a", 33)
    assert tree.pages("a") == 33
    tree.evict("a", 32)  # the leaf of 2 is the oldest: what came at 1 has a child
    assert tree.match(pages((500, 10)))[0] == 0
    assert tree.match(pages((0, 15)))[0] == 15
    tree.evict("a", 22)  # the leaf of 3
    assert tree.match(pages((0, 15)))[0] == 10
    tree.evict("a", 17)  # now what came at 1 is a leaf, older than 4
    assert tree.match(pages((0, 15)))[0] == 0
    assert tree.match(pages((900, 8)))[0] == 8
    tree.evict("a", 0)
    assert len(tree) == 0
    assert tree.nodes() == []


def test_the_use_of_a_leaf_renews_it():
    tree = PrefixTree()
    for first in (0, 100, 200, 0):
        tree.insert(pages((first, 10)), "a")
    tree.evict("a", 20)
    assert tree.match(pages((0, 10)))[0] == 10
    assert tree.match(pages((100, 10)))[0] == 0


def test_a_cut_leaf_keeps_its_time():
    tree = PrefixTree()
    tree.insert(pages((0, 10)), "a")  # 1
    tree.insert(pages((500, 4)), "a")  # 2
    tree.insert(pages((0, 8), (100, 4)), "a")  # 3 cuts the first in 8 and 2
    tree.evict("a", 17)
    assert tree.match(pages((0, 10)))[0] == 8
    assert tree.match(pages((500, 4)))[0] == 4
    tree.evict("a", 15)
    assert tree.match(pages((500, 4)))[0] == 0


@pytest.mark.parametrize("kept", [2, 8])  # the shorter part of a cut is the new one
def test_a_cut_in_the_middle_keeps_what_follows(kept):
    tree = PrefixTree()
    tree.insert(pages((0, 10)), "a")
    tree.insert(pages((0, 20)), "a")
    tree.insert(pages((0, kept), (100, 1)), "c")
    tree.insert(pages((0, 20)), "b")
    assert (tree.pages("a"), tree.pages("b"), tree.pages("c")) == (20, 20, kept + 1)
    assert tree.match(pages((0, 20))) == (20, {"a", "b"})
    tree.drop("a")
    tree.evict("b", 9)
    assert tree.match(pages((0, 20))) == (kept, {"b", "c"})
    tree.drop("b")
    assert len(tree) == kept + 1


def test_eviction_and_loss_of_one_node_leave_the_others():
    tree = PrefixTree()
    for node in "ab":
        tree.insert(pages((0, 10)), node)
        tree.insert(pages((0, 20)), node)
    tree.evict("a", 10)
    assert tree.match(pages((0, 20))) == (20, {"b"})
    assert (tree.pages("a"), tree.pages("b")) == (10, 20)
    tree.drop("b")
    assert tree.match(pages((0, 20))) == (10, {"a"})
    assert (tree.pages("b"), len(tree)) == (0, 10)


def chained(choices: list[int]) -> PageArray:
    """A path whose pages prove their prefix: equal beginnings only."""
    page, path = 0, []
    for choice in choices:
        page = page * 3 + choice + 1
        path.append(page)
    return np.array(path, dtype=np.int64)


PATHS = st.lists(st.integers(0, 1), max_size=12).map(chained)
OPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "insert", "evict", "drop"]), PATHS, st.sampled_from("abc")
    ),
    max_size=30,
)


@given(ops=OPS, asked=PATHS)
def test_the_tree_finds_what_a_plain_record_finds(ops, asked):
    tree = PrefixTree()
    sent: dict[str, set[int]] = {node: set() for node in "abc"}
    for what, path, node in ops:
        if what == "insert":
            tree.insert(path, node)
            sent[node] |= set(path.tolist())
        elif what == "drop":
            tree.drop(node)
            sent[node].clear()
        else:
            tree.evict(node, len(path))
            # Which pages go is tested by hand; that whole branches' ends go, here.
            assert tree.pages(node) <= len(path) or tree.pages(node) == 0
            left = {page for page in sent[node] if node in tree._where.get(page, tree._root).stamps}
            assert {(page - 1) // 3 for page in left} - {0} <= left
            sent[node] = left
        assert {n: tree.pages(n) for n in "abc"} == {n: len(held) for n, held in sent.items()}
        assert len(tree) == len(set().union(*sent.values()))
    held = {node: leading(asked, np.array(sorted(found), dtype=np.int64)) for node, found in sent.items()}
    most = max(held.values())
    assert tree.match(asked)[0] == most
    assert set(tree.match(asked)[1]) == ({n for n, many in held.items() if many == most} if most else set())
