"""Arrow: predictions by hand, what moves on which miss, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.baselines.arrow import (
    ArrowPlanner,
    ArrowPlannerSettings,
    ArrowRouter,
    prefill_s,
    tpot_s,
)
from loadtest.baselines.policy import Placement
from shared.messages import Phase
from shared.timing import DecodeModel, PrefillModel
from tests.test_baselines_view import PAGE, View, arrival, pages

# A token takes 1 ms in prefill; an iteration of B requests 10 ms x B and gives each 2 tokens.
PREFILL = PrefillModel(0.0, 1e-3, 0.0, 0.0)
DECODE = DecodeModel(0.0, 0.0, 0.01, 1, 1)


def cluster(prefill: str, decode: str) -> View:
    return View(prefill, decode, prefill=PREFILL, decode=DECODE, t_acc=2.0)


def test_a_prompt_is_predicted_as_if_nothing_of_it_were_cached():
    profile = View(prefill=PrefillModel(0.5, 1e-3, 1e-6, 9.0), chunk_tokens=256).profile("a")
    # Four chunks of 0.5 s, 1,024 tokens, 1,024 * 1,025 / 2 pairs.
    assert prefill_s(profile, 1024) == pytest.approx(2.0 + 1.024 + 0.5248)
    view = cluster("a b", "z")
    view.l1 = {"b": pages((0, 100))}
    placed = ArrowRouter().place(arrival("1", pages((0, 100))), view, 0.0)
    assert placed == Placement("a", predicted_ttft_s=pytest.approx(1.6))


def test_the_least_predicted_ttft_serves_and_the_first_of_equals():
    router, view = ArrowRouter(), cluster("a b", "z")
    sizes = [100, 50, 25, 75]
    placed = [router.place(arrival(str(i), pages((0, size))), view, 0.0) for i, size in enumerate(sizes)]
    # a 1.6; b 0.8; b 0.8 + 0.4; b 1.2 + 1.2 against a 1.6 + 1.2.
    assert [p.node for p in placed] == ["a", "b", "b", "b"]
    assert [p.predicted_ttft_s for p in placed] == pytest.approx([1.6, 0.8, 1.2, 2.4])
    assert router.place(arrival("x", pages((0, 100))), view, 0.0).node == "a"


def test_nodes_are_predicted_each_with_its_own_model():
    view = cluster("a b", "z")
    view.profiles["b"] = View(prefill=PrefillModel(0.0, 0.9e-3, 0.0, 0.0)).profile("b")
    assert ArrowRouter().place(arrival(), view, 0.0).node == "b"


def test_a_prefill_that_runs_counts_with_what_its_prediction_leaves():
    router, view = ArrowRouter(), cluster("a", "z")
    router.place(arrival("1", pages((0, 100))), view, 0.0)
    router.place(arrival("2", pages((0, 50))), view, 0.0)
    assert router.waiting_s("a", 5.0) == pytest.approx(2.4)  # it waits, for whatever reason
    router.prefill_started("1", 5.0)
    assert router.waiting_s("a", 6.0) == pytest.approx(1.4)
    assert router.waiting_s("a", 60.0) == pytest.approx(0.8)  # it took longer than predicted
    router.prefill_done("1", 60.0)
    router.ended("2", 0, 60.0)
    assert router.waiting_s("a", 60.0) == 0


def test_the_decode_node_is_the_one_with_the_fewest_tokens():
    router, view = ArrowRouter(), cluster("a", "d e")
    bound = [
        router.bind(arrival(str(i), pages((0, n))), "a", view, 0.0) for i, n in enumerate([90, 20, 30, 50])
    ]
    assert bound == ["d", "e", "e", "e"]
    assert router.decode_tokens("e") == 100 * PAGE
    router.ended("0", 0, 1.0)
    assert router.bind(arrival("x"), "a", view, 1.0) == "d"


# ----------------------------------------------------------------- the planner


def planner(**settings: float) -> ArrowPlanner:
    return ArrowPlanner(ArrowPlannerSettings(**{"ttft_s": 2.0, "tpot_s": 0.05, **settings}))


def predicted(made: ArrowPlanner, *ttft_s: float) -> ArrowPlanner:
    for seconds in ttft_s:
        made.placed(Placement("a", predicted_ttft_s=seconds), 0.0)
    return made


def test_tpot_of_a_batch():
    profile = cluster("a", "d").profile("d")
    assert tpot_s(profile, 10) == pytest.approx(0.05)
    assert tpot_s(profile, 0) == 0.0


def test_a_ttft_that_was_predicted_to_miss_moves_the_idlest_decode_node():
    view = cluster("a b", "d e f")
    view.kv = {"d": 500, "e": 100, "f": 300}
    decision = predicted(planner(), 1.0, 2.1, 0.5).decide(view, 1.0)
    assert decision is not None
    assert decision.phases == {"e": Phase.PREFILL}
    assert decision.reason == "TTFT 2.1 s above 2 s"


def test_the_targets_themselves_are_met():
    view = cluster("a b", "d e")
    view.requests = {"d": 10}  # 0.05 s
    assert predicted(planner(), 2.0).decide(view, 1.0) is None


def test_predictions_count_once():
    made, view = predicted(planner(), 9.0), cluster("a b", "d e")
    assert made.decide(view, 1.0) is not None
    assert made.decide(view, 2.0) is None


def test_nothing_is_decided_while_a_node_moves_nor_kept_for_after():
    made, view = predicted(planner(), 9.0), cluster("a b", "d e")
    view.moving = ["x"]
    assert made.decide(view, 1.0) is None
    view.moving = []
    assert made.decide(view, 2.0) is None


def test_nothing_is_decided_before_the_start():
    view = cluster("a b", "d e")
    assert predicted(planner(start_s=10), 9.0).decide(view, 9.9) is None
    assert predicted(planner(start_s=10), 9.0).decide(view, 10.0) is not None


@pytest.mark.parametrize(("requests", "moves"), [(20, True), (21, False)])
def test_a_decode_node_stays_when_the_others_would_miss_tpot(requests, moves):
    view = cluster("a", "d e f")
    view.requests = {"d": 10, "e": 5, "f": requests - 15}
    # On two nodes, ten each take 0.05 s.
    assert (predicted(planner(), 9.0).decide(view, 1.0) is not None) is moves


def test_a_tpot_that_misses_moves_the_prefill_node_with_the_shortest_queue():
    view = cluster("a b c", "d e")
    view.requests, view.queued = {"e": 11}, {"a": 300, "b": 100, "c": 200}
    decision = planner().decide(view, 1.0)
    assert decision is not None
    assert decision.phases == {"b": Phase.DECODE}
    assert decision.reason == "TPOT 0.055 s above 0.05 s"


def test_tpot_goes_before_ttft():
    view = cluster("a b", "d e")
    view.requests = {"d": 11}
    decision = predicted(planner(), 9.0).decide(view, 1.0)
    assert decision is not None
    assert decision.phases == {"a": Phase.DECODE}


def test_the_last_node_of_a_phase_stays():
    view = cluster("a", "d e")
    view.requests = {"d": 11}
    assert planner().decide(view, 1.0) is None
    assert predicted(planner(), 9.0).decide(cluster("a b", "d"), 1.0) is None


def test_a_router_without_predictions_is_an_error():
    with pytest.raises(ValueError, match="needs a router that predicts TTFT"):
        planner().placed(Placement("a"), 0.0)


@given(
    prefill=st.integers(1, 9),
    requests=st.lists(st.integers(0, 30), min_size=1, max_size=9),
    ttft_s=st.lists(st.floats(0, 10), max_size=4),
)
def test_a_move_is_of_one_node_and_leaves_each_phase_one(prefill, requests, ttft_s):
    names = [f"d{i}" for i in range(len(requests))]
    view = cluster(" ".join(f"p{i}" for i in range(prefill)), " ".join(names))
    view.requests = dict(zip(names, requests, strict=True))
    decision = predicted(planner(), *ttft_s).decide(view, 1.0)
    if decision is not None:
        ((node, phase),) = decision.phases.items()
        leaves = view.prefill_nodes if phase is Phase.DECODE else view.decode_nodes
        assert node in leaves
        assert len(leaves) > 1
