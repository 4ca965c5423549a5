"""Round robin, sticky sessions, the static split, and how policies are named."""

from __future__ import annotations

import pytest

from loadtest.baselines.dynamo_planner import DynamoPlanner
from loadtest.baselines.dynamo_router import DynamoRouter
from loadtest.baselines.names import PLANNERS, ROUTERS, make_planner, make_router
from loadtest.baselines.policy import KvAfterMove, Placement
from loadtest.baselines.round_robin import RoundRobin
from loadtest.baselines.static import Static
from loadtest.baselines.sticky import Sticky
from shared.messages import Phase
from tests.test_baselines_view import View, arrival

# ----------------------------------------------------------------- round robin


def test_prefill_and_decode_nodes_come_in_turn_each_in_its_own():
    router, view = RoundRobin(), View("a b c", "d e")
    placed = [router.place(arrival(), view, 0.0).node for _ in range(5)]
    bound = [router.bind(arrival(), "a", view, 0.0) for _ in range(3)]
    assert placed == ["a", "b", "c", "a", "b"]
    assert bound == ["d", "e", "d"]


def test_a_turn_goes_on_when_nodes_change():
    router, view = RoundRobin(), View("a b c", "d")
    assert [router.place(arrival(), view, 0.0).node for _ in range(2)] == ["a", "b"]
    view.prefill_nodes = ["a", "b", "c", "x"]
    assert [router.place(arrival(), view, 0.0).node for _ in range(3)] == ["c", "x", "a"]


# ----------------------------------------------------------------- sticky


def test_a_session_stays_and_new_ones_spread():
    router, view = Sticky(), View("a b", "d e")
    sessions = ["s", "t", "s", "u", "t", "s"]
    assert [router.place(arrival(session=s), view, 0.0).node for s in sessions] == [*"abaaba"]
    assert [router.bind(arrival(session="s"), "a", view, 0.0) for _ in range(3)] == ["d", "e", "d"]


def test_a_session_is_new_when_its_node_no_longer_prefills():
    router, view = Sticky(), View("a b c", "d")
    assert router.place(arrival(session="s"), view, 0.0).node == "a"
    assert router.place(arrival(session="t"), view, 0.0).node == "b"
    view.prefill_nodes = ["b", "c"]
    router.node_changed("a", Phase.DECODE, 1.0)
    assert len(router) == 1
    assert router.place(arrival(session="s"), view, 1.0).node == "b"
    assert router.place(arrival(session="t"), view, 1.0).node == "b"
    view.prefill_nodes = ["a", "b", "c"]  # the first node is back, and the session stays with the second
    router.node_changed("a", Phase.PREFILL, 2.0)
    assert router.place(arrival(session="s"), view, 2.0).node == "b"


def test_the_view_counts_even_before_the_notice():
    router, view = Sticky(), View("a b", "d")
    router.place(arrival(session="s"), view, 0.0)
    view.prefill_nodes = ["b"]
    assert router.place(arrival(session="s"), view, 0.0).node == "b"


def test_a_session_that_ended_leaves_nothing():
    router, view = Sticky(), View("a b", "d")
    router.place(arrival(session="s"), view, 0.0)
    router.session_ended("s", 1.0)
    assert len(router) == 0
    assert router.place(arrival(session="s"), view, 0.0).node == "b"


# ----------------------------------------------------------------- static


def test_a_static_split_never_moves():
    planner, view = Static(), View("a", "d e f")
    view.kv, view.queued = {"d": 10**9}, {"a": 10**9}
    planner.placed(Placement("a"), 0.0)
    assert planner.period_s is None
    assert planner.decide(view, 1e6) is None


# ----------------------------------------------------------------- names


def test_names_of_the_command_line():
    assert [*ROUTERS] == [
        "round-robin",
        "cache-aware",
        "sticky",
        "dynamo",
        "dynamo-pool",
        "arrow",
        "thunder-agent",
    ]
    assert [*PLANNERS] == ["static", "dynamo-1.5.1", "dynamo-1.6.1", "arrow"]


def test_each_name_makes_a_new_policy_of_its_variant():
    assert make_router("sticky") is not make_router("sticky")
    pools = []
    for name in ("dynamo", "dynamo-pool"):
        router = make_router(name)
        assert isinstance(router, DynamoRouter)
        pools.append(router.settings.pool)
    assert pools == [False, True]
    for release in ("1.5.1", "1.6.1"):
        planner = make_planner(f"dynamo-{release}")
        assert isinstance(planner, DynamoPlanner)
        assert planner.release == release


def test_settings_are_given_as_values_or_as_text():
    for value in (0.5, "0.5"):
        router = make_router("dynamo", {"prefill_load_scale": value})
        assert isinstance(router, DynamoRouter)
        assert router.settings.prefill_load_scale == 0.5
        assert router.settings.host_cache_hit_weight == 0.75
    assert make_router("cache-aware", {"eviction_interval_s": 7}).tick_s == 7
    assert make_planner("dynamo-1.5.1", {"relaunch_to_s": "900"}).moving.out_s == (681.0, 900.0)


def test_what_is_unknown_is_an_error_that_says_what_there_is():
    with pytest.raises(
        ValueError, match=r"no router 'robin'; known: round-robin, cache-aware, .*thunder-agent"
    ):
        make_router("robin")
    with pytest.raises(
        ValueError, match=r"no planner 'dynamo'; known: static, dynamo-1.5.1, dynamo-1.6.1, arrow"
    ):
        make_planner("dynamo")
    with pytest.raises(ValueError, match=r"router sticky: .*unknown field `turns`"):
        make_router("sticky", {"turns": 1})
    with pytest.raises(ValueError, match=r"router dynamo: pool goes with the name"):
        make_router("dynamo", {"pool": True})
    with pytest.raises(ValueError, match=r"planner arrow: .*tpot_s"):
        make_planner("arrow", {"tpot_s": "fast"})


def test_how_moves_are_done():
    moving = {name: make_planner(name).moving for name in PLANNERS}
    assert {name: m.kv for name, m in moving.items()} == {
        "static": KvAfterMove.KEPT,
        "dynamo-1.5.1": KvAfterMove.EMPTY,
        "dynamo-1.6.1": KvAfterMove.EMPTY,
        "arrow": KvAfterMove.UNREACHABLE,
    }
    assert not moving["dynamo-1.5.1"].drains
    assert moving["dynamo-1.5.1"].out_s == (681.0, 800.0)
    assert moving["arrow"].drains
    assert moving["arrow"].out_s == (0.7, 0.7)
