"""The Dynamo KV router's cost by hand, its own book of loads, and the pool variant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.baselines.dynamo_router import DynamoRouter, DynamoRouterSettings
from loadtest.baselines.policy import Placement
from tests.test_baselines_view import PAGE, View, arrival, pages

PATH = pages((0, 100))


def test_blocks_in_gpu_memory_count_in_full_and_in_host_memory_three_quarters():
    view = View("a b c", "z")
    view.l1 = {"a": PATH[:60], "b": PATH[:40]}
    view.l2 = {"b": PATH[:80]}
    router = DynamoRouter()
    # a: 100 - 60 + 100 = 140; b: 100 - (40 + 0.75 * 40) + 100 = 130; c: 200.
    assert router.place(arrival("1", PATH), view, 0.0) == Placement("b", own_pages=80)
    assert router.prefill_load("b") == (30.0, 100.0)
    # b has work now: 100 - 70 + 30 + 100 + 100 = 260; a: 140.
    assert router.place(arrival("2", PATH), view, 0.0).node == "a"
    # a: 100 - 60 + 40 + 200 = 280; b: 260; c: 200.
    assert router.place(arrival("3", PATH), view, 0.0).node == "c"
    assert router.prefill_load("c") == (100.0, 100.0)


def test_work_that_is_assigned_counts_beside_blocks_that_are_active():
    router, view = DynamoRouter(), View("b a", "z")
    view.l1 = {"a": pages((7000, 90))}
    router.place(arrival("1", pages((7000, 100))), View("b", "z"), 0.0)
    view.prefill_nodes = ["a"]
    router.place(arrival("2", pages((7000, 100))), view, 0.0)
    view.prefill_nodes = ["b", "a"]
    assert (router.prefill_load("b"), router.prefill_load("a")) == ((100.0, 100.0), (10.0, 100.0))
    # b: 100 + 100 + 100 + 100; a: 100 + 10 + 100 + 100.
    assert router.place(arrival("3", PATH), view, 0.0).node == "a"


@pytest.mark.parametrize(("host_pages", "node"), [(80, "a"), (81, "b")])
def test_the_credits_compare_as_60_to_80(host_pages, node):
    view = View("a b", "z")
    view.l1, view.l2 = {"a": PATH[:60]}, {"b": PATH[:host_pages]}
    assert DynamoRouter().place(arrival("1", PATH), view, 0.0).node == node


def test_equal_costs_go_to_the_first_node():
    router, view = DynamoRouter(), View("b a c", "z")
    assert [router.place(arrival(rid), view, 0.0).node for rid in "123"] == ["b", "a", "c"]


def test_the_credit_is_for_leading_blocks_only():
    view = View("a b", "z")
    view.l1 = {"a": pages((1, 99)), "b": PATH[:1]}  # a lacks the first block
    assert DynamoRouter().place(arrival("1", PATH), view, 0.0).node == "b"


def test_prefill_work_weighs_as_it_is_scaled():
    view = View("a b", "z")
    view.l1 = {"a": PATH[:50]}
    busy = arrival("busy", pages((5000, 60)))
    for scale, node in ((1.0, "b"), (2.0, "a")):
        router = DynamoRouter(DynamoRouterSettings(prefill_load_scale=scale))
        router.place(busy, View("a", "z"), 0.0)
        router._prefill_loads["a"].prefill = 0.0  # the work is all but done, the blocks are active
        # a: scale * 50 + 60 + 100; b: scale * 100 + 100.
        assert router.place(arrival("1", PATH), view, 0.0).node == node


def test_a_prompt_that_ends_within_a_page_counts_the_part():
    router = DynamoRouter()
    router.place(arrival("1", pages((0, 2)), tokens=2 * PAGE + PAGE // 2), View("a", "z"), 0.0)
    assert router.prefill_load("a") == (2.5, 2.5)


def test_prefill_load_goes_with_the_prefill_and_decode_load_with_the_request():
    router, view = DynamoRouter(), View("a", "d e")
    router.place(arrival("1", PATH), view, 0.0)
    assert router.bind(arrival("1", PATH), "a", view, 0.0) == "d"
    router.prefill_started("1", 1.0)
    assert router.prefill_load("a") == (100.0, 100.0)
    router.prefill_done("1", 2.0)
    assert router.prefill_load("a") == (0.0, 0.0)
    assert router.decode_load("d") == 100.0
    router.ended("1", 1700, 3.0)
    assert router.decode_load("d") == 0.0


def test_a_request_that_ends_early_takes_both_loads_with_it():
    router, view = DynamoRouter(), View("a", "d")
    router.place(arrival("1", PATH), view, 0.0)
    router.bind(arrival("1", PATH), "a", view, 0.0)
    router.ended("1", 0, 1.0)
    assert router.prefill_load("a") == (0.0, 0.0)
    assert router.decode_load("d") == 0.0


def test_the_decode_node_is_the_one_with_the_fewest_blocks():
    router, view = DynamoRouter(), View("a", "d e f")
    sizes = {"1": 100, "2": 30, "3": 80, "4": 60, "5": 5}
    bound = [router.bind(arrival(rid, pages((0, size))), "a", view, 0.0) for rid, size in sizes.items()]
    # d 100; e 30; f 80; e has the fewest, then 90; then f with 80.
    assert bound == ["d", "e", "f", "e", "f"]
    router.ended("1", 0, 0.0)
    assert router.bind(arrival("6"), "a", view, 0.0) == "d"


def test_the_plain_router_fetches_nothing():
    view = View("a", "z")
    view.l2 = {"z": PATH}
    assert DynamoRouter().place(arrival("1", PATH), view, 0.0) == Placement("a")
    assert not DynamoRouter().fetches_inline


# ----------------------------------------------------------------- the pool


def pool() -> DynamoRouter:
    return DynamoRouter(DynamoRouterSettings(pool=True))


def test_missing_leading_pages_come_from_the_node_with_the_most():
    view = View("a b", "z")
    view.l1, view.l2 = {"a": PATH[:30]}, {"b": PATH[:60], "z": PATH[:90]}
    router = pool()
    router.place(arrival("busy", pages((7000, 300))), View("b", "z"), 0.0)
    assert router.place(arrival("1", PATH), view, 0.0) == Placement("a", 30, 60, "z")
    assert router.fetches_inline


def test_the_pool_does_not_change_the_choice():
    view = View("a b", "z")
    view.l1, view.l2 = {"a": PATH[:30]}, {"b": PATH[:60]}
    # a: 170; b: 100 - 45 + 100 = 155.
    assert pool().place(arrival("1", PATH), view, 0.0) == Placement("b", 60)
    assert DynamoRouter().place(arrival("1", PATH), view, 0.0) == Placement("b", 60)


def test_the_first_of_equal_sources_serves_and_never_the_node_itself():
    view = View("a", "y z")
    view.l2 = {"a": PATH[:10], "y": PATH[:50], "z": PATH[:50]}
    assert pool().place(arrival("1", PATH), view, 0.0) == Placement("a", 10, 40, "y")
    view.l2 = {"a": PATH[:50], "y": PATH[:50]}
    assert pool().place(arrival("1", PATH), view, 0.0) == Placement("a", 50)


def test_the_last_token_of_a_prompt_is_never_fetched():
    view = View("a", "z")
    view.l2 = {"z": PATH}
    assert pool().place(arrival("1", PATH), view, 0.0) == Placement("a", 0, 99, "z")
    one_more = arrival("2", PATH, tokens=100 * PAGE + 1)
    assert pool().place(one_more, view, 0.0) == Placement("a", 0, 100, "z")


@given(
    sizes=st.lists(st.tuples(st.integers(1, 99), st.integers(0, 99), st.booleans()), min_size=1, max_size=20)
)
def test_loads_are_the_sum_of_what_is_assigned(sizes):
    router, view = DynamoRouter(), View("a", "d")
    view.l2 = {"a": PATH[:40]}
    prefill = active = decode = 0.0
    for i, (many, _, done) in enumerate(sizes):
        request = arrival(str(i), PATH[:many])
        router.place(request, view, 0.0)
        router.bind(request, "a", view, 0.0)
        decode += many
        if done:
            router.prefill_done(str(i), 0.0)
        else:
            prefill += many - 0.75 * min(many, 40)
            active += many
    assert router.prefill_load("a") == pytest.approx((prefill, active))
    assert router.decode_load("d") == pytest.approx(decode)
