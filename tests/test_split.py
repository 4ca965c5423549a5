"""Equations 5 and 6 by hand, and what a choice of split must never do."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.split import (
    IterationModels,
    SplitPlanner,
    evaluate,
    moves,
    prefill_worth,
    throughput,
    with_prefill_count,
)
from shared.messages import Phase
from shared.timing import DecodeModel, PrefillModel, Work
from tests.planner_cases import BOTH, PLAIN, D, P, phases, rates, slice_

WORK = Work(1000, 2000, 400, 2)


def planner(**more: float) -> SplitPlanner:
    made = SplitPlanner(window_s=600, slices=10, skip_s=120, **more)
    made.begin(0.0)
    return made


def windowed(split: dict[str, Phase], *slices: dict[str, float]) -> SplitPlanner:
    made = planner()
    for i, values in enumerate(slices):
        made.add(slice_(60.0 * i, split, **values))
    return made


def models(split: dict[str, Phase]) -> dict[str, IterationModels]:
    return dict.fromkeys(split, PLAIN)


# ----------------------------------------------------------------- Equation 5


def test_throughput_is_that_of_the_slower_phase():
    one_p = 1 / 1.4
    assert throughput([rates()], [rates(), rates()], WORK, 20, 1e5) == pytest.approx(one_p)
    # Five prefill nodes could serve 3.57 req/s; two decode nodes with 10 running each serve 2 / 0.6.
    assert throughput([rates()] * 5, [rates()] * 2, WORK, 20, 1e5) == pytest.approx(2 / 0.6)
    # The batch is q-bar over |D|: the same 20 requests on one node run as 20, in iterations of 0.04 s.
    assert throughput([rates()] * 5, [rates()], WORK, 20, 1e5) == pytest.approx(1 / (0.04 / 20 * 200))


def test_throughput_of_unequal_nodes_adds_up_each_ones_own_rate():
    slow = rates(IterationModels(PrefillModel(0.2, 2e-3, 2e-6, 2e-4), PLAIN.decode))
    assert throughput([rates(), slow], [rates()] * 9, WORK, 900, 1e5) == pytest.approx(1 / 1.4 + 1 / 2.8)
    fewer_tokens = rates(t_bar=250.0, f=0.0)  # 0.4 + 1.0 + 0.1
    assert throughput([fewer_tokens], [rates()] * 9, WORK, 900, 1e5) == pytest.approx(1 / 1.5)


def test_throughput_takes_the_mean_of_pairs_and_else_the_pairs_of_the_means():
    # A of the means is 1000 * 2000 + 1000 * 1001 / 2 = 2500500 pairs, 2.5005 s of the 3.8005.
    assert throughput([rates()], [rates()] * 9, WORK, 900) == pytest.approx(1 / 3.8005)


def test_throughput_without_decode_nodes_or_requests_in_decode_is_zero():
    assert throughput([rates()], [], WORK, 20, 1e5) == 0
    assert throughput([], [rates()], WORK, 20, 1e5) == 0
    assert throughput([rates()], [rates()], WORK, 0, 1e5) == 0


# ----------------------------------------------------------------- candidates


def test_a_candidate_changes_the_fewest_nodes():
    split = phases(2, 4)
    assert moves(split, with_prefill_count(split, 3)) == {"n3": P}
    assert moves(split, with_prefill_count(split, 1)) == {"n1": D}
    assert moves(split, with_prefill_count(split, 5)) == {"n3": P, "n4": P, "n5": P}
    assert with_prefill_count(split, 2) == split


def test_of_unequal_nodes_those_move_that_suit_the_other_phase():
    split = phases(2, 3)
    worth = {"n1": 5.0, "n2": 0.1, "n3": 1.0, "n4": 3.0, "n5": 2.0}
    assert moves(split, with_prefill_count(split, 3, worth)) == {"n4": P}
    assert moves(split, with_prefill_count(split, 4, worth)) == {"n4": P, "n5": P}
    assert moves(split, with_prefill_count(split, 1, worth)) == {"n2": D}


def test_worth_is_prefill_rate_over_decode_rate():
    slow = rates(IterationModels(PrefillModel(0.2, 2e-3, 2e-6, 2e-4), PLAIN.decode))
    split = phases(1, 1)
    worth = prefill_worth(split, {"n1": rates(), "n2": slow}, [slice_(0, split)])
    assert worth == {"n1": pytest.approx(0.6 / 1.4), "n2": pytest.approx(0.6 / 2.8)}
    assert prefill_worth(split, {"n1": rates()}, [slice_(0, split)]) == {}
    assert prefill_worth(split, {"n1": rates(), "n2": slow}, []) == {}
    silent = msgspec.structs.replace(slice_(0, split), t_acc=0.0, t_out=0.0)
    assert prefill_worth(split, {"n1": rates(), "n2": slow}, [silent]) == {}
    assert prefill_worth(split, {"n1": rates(), "n2": slow}, [silent, slice_(0, split)]) == worth


# ----------------------------------------------------------------- Equation 6


def test_gains_by_hand():
    # 1P3D: prefill limits at 1 / 1.4. 2P2D: prefill 2 / 1.4 = 1.43, decode 2 / 0.6: gain 1 / 1.4 in a slice of
    # q = 20. With q = 4, 2P2D has B = 2: 0.022 s / 2 * 200 = 2.2 s each, 2 / 2.2 in all.
    split = phases(1, 3)
    nodes = dict.fromkeys(split, rates())
    present, candidates = evaluate(split, nodes, [slice_(0, split), slice_(60, split, in_decode=4.0)])
    assert present == pytest.approx(1 / 1.4)
    two, three = candidates
    g1, g2 = 2 / 1.4 - 1 / 1.4, 2 / 2.2 - 1 / 1.4
    assert (two.prefill, two.decode, two.moves) == (2, 2, {"n2": P})
    assert two.mean_gain == pytest.approx((g1 + g2) / 2)
    assert two.standard_error == pytest.approx(abs(g1 - g2) / math.sqrt(2) / math.sqrt(2))
    assert not two.qualifies and two.refusal == "gain is within twice its standard error"
    # 3P1D: B = 20 gives 2.5 req/s of decode, B = 4 0.024 / 4 * 200 = 1.2 s.
    h1, h2 = 3 / 1.4 - 1 / 1.4, 1 / 1.2 - 1 / 1.4
    assert (three.prefill, three.moves) == (3, {"n2": P, "n3": P})
    assert three.mean_gain == pytest.approx((h1 + h2) / 2)


def test_the_largest_mean_gain_wins():
    split = phases(1, 4)
    made = windowed(split, *[{"in_decode": 40.0}] * 10)
    decision = made.decide(600.0, split, models(split))
    gains = {c.prefill: c.mean_gain for c in decision.candidates}
    assert set(gains) == {2, 3, 4}
    assert decision.phases == dict(split) | {"n2": P, "n3": P, "n4": P}
    assert gains[4] == max(gains.values())
    assert decision.reason.startswith("4P1D is predicted to serve")
    assert (decision.window_t0, decision.window_t1, decision.slices) == (0.0, 600.0, 10)


def test_a_split_that_is_best_already_stays():
    split = phases(3, 1)
    made = windowed(split, *[{}] * 10)
    decision = made.decide(600.0, split, models(split))
    assert decision.phases is None
    assert decision.reason == "no other split is certain to serve more"
    assert all(c.mean_gain <= 0 and c.refusal for c in decision.candidates)


def test_a_burst_of_one_slice_does_not_switch_but_a_lasting_shift_does():
    split = phases(2, 2)
    calm = {"t_uc": 500.0, "pairs": 0.0, "t_c": 0.0, "in_decode": 4.0}  # decode limits
    heavy = {"t_uc": 8000.0, "in_decode": 40.0}  # prefill limits by far

    def decide(bursts: int):
        made = windowed(split, *[calm] * (10 - bursts), *[heavy] * bursts)
        return made.decide(600.0, split, models(split))

    assert decide(10).phases == dict(split) | {"n3": P}
    burst = decide(1)
    three = next(c for c in burst.candidates if c.prefill == 3)
    assert three.refusal and burst.phases is None


def test_unequal_nodes_are_split_by_what_each_is_good_at():
    good = IterationModels(PrefillModel(0.01, 1e-4, 1e-7, 1e-5), PLAIN.decode)
    split = phases(1, 3)
    made = windowed(split, *[{}] * 10)
    decision = made.decide(600.0, split, models(split) | {"n4": good})
    assert decision.phases is not None
    assert decision.phases["n4"] is P


# ----------------------------------------------------------------- when nothing is decided


def test_no_decision_while_a_node_drains():
    split = phases(1, 3)
    made = windowed(split, *[{}] * 10)
    decision = made.decide(600.0, split, models(split), draining=["n2"])
    assert decision.phases is None and decision.reason == "still draining: n2"


def test_no_decision_soon_after_a_switch():
    split = phases(1, 3)
    made = windowed(split, *[{}] * 10)
    made.switching(480.0)
    made.switched(490.0)
    assert made.decide(600.0, split, models(split)).reason == "the split changed less than 120 s ago"


def test_slices_that_overlap_a_switch_and_the_skip_after_it_do_not_count():
    split = phases(1, 3)
    made = windowed(split, *[{}] * 10)
    made.switching(70.0)  # in the second slice
    made.switched(100.0)  # skipped until 220, in the fourth
    decision = made.decide(600.0, split, models(split))
    assert (decision.slices, decision.slices_skipped) == (7, 3)
    assert decision.phases is not None
    never = windowed(split, *[{}] * 10)
    never.switching(300.0)  # never done
    assert never.decide(600.0, split, models(split)).phases is None


def test_too_few_slices_decide_nothing():
    split = phases(1, 3)
    made = windowed(split, *[{}] * 4, *[{"requests": 0, "in_decode": 0.0}] * 6)
    decision = made.decide(600.0, split, models(split))
    assert decision.phases is None
    assert decision.reason == "4 slices with finished requests are too few; 5 are needed"


def test_nodes_without_models_or_measurement_decide_nothing():
    split = phases(1, 3)
    made = windowed(split, *[{}] * 10)
    known = models(split)
    del known["n3"]
    assert made.decide(600.0, split, known).reason == "no iteration-time models yet for n3"
    idle = windowed(split, *[{"t_bar": 0.0}] * 10)
    assert "t-bar" in idle.decide(600.0, split, models(split)).reason
    zero = IterationModels(PrefillModel(0, 0, 0, 0), DecodeModel(0, 0, 0))
    none = windowed(split, *[{}] * 10).decide(600.0, split, dict.fromkeys(split, zero))
    assert none.reason == "the models predict no time for this work"


def test_a_collocated_cluster_is_not_compared():
    split = {"n1": BOTH, "n2": P}
    made = windowed(split, *[{}] * 10)
    assert made.decide(600.0, split, models(split)).reason == "the nodes are not split"


def test_windows_end_once_each():
    split = phases(1, 3)
    made = planner()
    for i in range(9):
        made.add(slice_(60.0 * i, split))
        assert not made.due
    made.add(slice_(540.0, split))
    made.add(slice_(540.0, split))  # seen
    assert made.due and len(made.slices()) == 10
    made.decide(612.0, split, models(split))
    assert not made.due
    made.add(slice_(1140.0, split))
    assert made.due
    assert len(made.slices()) == 1  # the older ones lie before this window


def test_decode_nodes_get_the_measurements_of_those_that_prefilled():
    split = phases(2, 1)
    made = planner()
    made.add(slice_(0.0, {"n1": P, "n2": D, "n3": D}, t_bar=100.0, f=0.2))
    made.add(slice_(60.0, {"n1": D, "n2": P, "n3": D}, t_bar=300.0, f=0.6))
    got = made.rates(models(split))
    assert (got["n1"].t_bar, got["n1"].f) == (100.0, 0.2)
    assert (got["n2"].t_bar, got["n2"].f) == (300.0, 0.6)
    assert (got["n3"].t_bar, got["n3"].f) == (pytest.approx(200.0), pytest.approx(0.4))
    # Nobody prefilled in a later window: each keeps its own last measurement, and n3 has none.
    for i in range(10):
        made.add(slice_(600.0 + 60 * i, dict.fromkeys(split, D)))
    later = made.rates(models(split))
    assert later["n1"].t_bar == 100.0 and later["n2"].t_bar == 300.0 and "n3" not in later


# ----------------------------------------------------------------- properties

coefficient = st.floats(1e-5, 1e-2)
model = st.builds(
    IterationModels,
    st.builds(PrefillModel, c0=coefficient, c1=coefficient, c2=st.floats(0, 1e-8), c3=st.floats(0, 1e-6)),
    st.builds(DecodeModel, d0=coefficient, d1=coefficient, d2=coefficient),
)
workload = st.fixed_dictionaries(
    {
        "t_uc": st.floats(1, 20_000),
        "t_c": st.floats(0, 200_000),
        "pairs": st.floats(1, 1e9),
        "t_out": st.floats(1, 5_000),
        "t_acc": st.floats(1, 5),
        "in_decode": st.floats(0.1, 500),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_chosen_split_is_predicted_better_and_certain(data):
    n = data.draw(st.integers(2, 9))
    prefill = data.draw(st.integers(1, n - 1))
    split = phases(prefill, n - prefill)
    per_node = {node: data.draw(model) for node in split}
    works = data.draw(st.lists(workload, min_size=10, max_size=10))
    made = windowed(split, *works)
    decision = made.decide(600.0, split, per_node)
    assert [c.prefill for c in decision.candidates] == [p for p in range(1, n) if p != prefill]
    for c in decision.candidates:
        assert len(c.moves) == abs(c.prefill - decision.prefill)
        assert c.mean_gain == pytest.approx(c.req_per_s - decision.req_per_s, rel=1e-6, abs=1e-9)
    again = windowed(split, *works).decide(600.0, split, per_node)
    assert again == decision
    if decision.phases is None:
        assert not any(c.qualifies for c in decision.candidates)
        return
    assert decision.phases.keys() == split.keys()
    assert {P, D} == set(decision.phases.values())
    chosen = next(c for c in decision.candidates if c.moves == moves(split, decision.phases))
    assert chosen.mean_gain > 2 * chosen.standard_error
    assert chosen.req_per_s > decision.req_per_s
    assert chosen.mean_gain == max(c.mean_gain for c in decision.candidates if c.qualifies)


@settings(max_examples=50, deadline=None)
@given(works=st.lists(workload, min_size=10, max_size=10), n=st.integers(2, 8))
def test_equal_nodes_in_stationary_work_reach_one_split_and_stay(works, n):
    """From every start, decisions over the same window end at one split and do not go round."""
    ends = set()
    for start in range(1, n):
        split, seen = phases(start, n - start), set()
        while True:
            prefill = sum(phase is P for phase in split.values())
            assert prefill not in seen
            seen.add(prefill)
            decision = windowed(split, *works[:1] * 10).decide(600.0, split, models(split))
            if decision.phases is None:
                break
            split = decision.phases
        theta = evaluate(split, dict.fromkeys(split, rates()), [slice_(0, split, **works[0])] * 2)[0]
        ends.add(round(theta, 9))
    assert len(ends) == 1
