"""Slices from records: means, q-bar over time, t-bar and f, lateness, the grid."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.telemetry.windows import MOST_MISSED, SliceBuilder
from shared.messages import Iteration, Iterations, NodeState, Outcome, RequestDone
from tests.planner_cases import BOTH, D, P


def builder(start_t: float = 0.0, *, grace_s: float = 2.0, stale_s: float = 5.0) -> SliceBuilder:
    return SliceBuilder(start_t=start_t, slice_s=60.0, grace_s=grace_s, stale_s=stale_s)


def done(
    t_end: float, prompt: int = 1000, cached: int = 800, out: int = 100, iterations: int = 50, **more: object
):
    values = {
        "outcome": Outcome.OK,
        "rid": "r",
        "branch": "b",
        "fetched_tokens": 0,
        "restored_tokens": 0,
        **more,
    }
    return RequestDone(
        t_arrive=t_end - 10,
        t_prefill_start=t_end - 9,
        t_prefill_end=t_end - 8,
        t_first_token=t_end - 7,
        t_end=t_end,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=out,
        decode_iterations=iterations,
        prefill_node="n1",
        decode_node="n2",
        **values,
    )


def state(t: float, decodes: int, node: str = "n2", tokens: int = 0, phase=D) -> NodeState:
    rids = [f"r{i}" for i in range(decodes)]
    return NodeState(node, t, phase, 1, False, 0.0, [], [], rids, tokens, 0)


def prefilled(t: float, node: str = "n1", **more: float) -> Iterations:
    values = {
        "count": 1,
        "batch": 1,
        "t_uc": 0,
        "pairs": 0.0,
        "t_rst": 0,
        "tokens": 0,
        "seconds": 1.0,
        "t_c": 0,
    }
    return Iterations(node, t, P, [Iteration(P, **{**values, **more})])


def test_means_of_the_work_of_requests_that_ended_in_the_slice():
    b = builder()
    b.request(done(10.0, prompt=1000, cached=800, out=100, iterations=50))
    b.request(done(59.9, prompt=3000, cached=2600, out=200, iterations=150))
    b.request(done(60.0, prompt=9, cached=0, out=1, iterations=1))  # the next slice's
    first, second = b.close(122.0)
    assert (first.t0, first.t1, first.requests) == (0.0, 60.0, 2)
    assert (first.t_uc, first.t_c, first.t_out) == (300.0, 1700.0, 150.0)
    assert first.t_acc == 300 / 200  # tokens per iteration over all, not the mean of ratios
    a1, a2 = 200 * 800 + 200 * 201 / 2, 400 * 2600 + 400 * 401 / 2
    assert first.pairs == (a1 + a2) / 2
    assert (second.t0, second.requests, second.t_uc) == (60.0, 1, 9.0)


def test_a_request_of_unknown_output_does_not_bias_the_mean_output():
    windows = builder()
    windows.request(done(10.0, out=100, iterations=50))
    windows.request(done(20.0, out=0, iterations=0))
    (one,) = windows.close(70.0)
    assert (one.requests, one.t_out, one.t_acc) == (2, 100, 2.0)


def test_only_served_requests_count():
    b = builder()
    for outcome in (Outcome.CLIENT_GONE, Outcome.REJECTED, Outcome.FAILED):
        b.request(done(10.0, outcome=outcome))
    (made,) = b.close(62.0)
    assert made.requests == 0 and made.t_acc == 0.0 and made.in_decode == 0.0


def test_requests_in_decode_are_averaged_over_time_and_summed_over_nodes():
    b = builder(stale_s=100.0)
    b.state(state(0.0, 4, "a", tokens=4000))
    b.state(state(30.0, 8, "a", tokens=16_000))
    b.state(state(0.0, 0, "b"))
    b.state(state(45.0, 2, "b", tokens=1000))
    first, second = b.close(122.0)
    assert first.in_decode == pytest.approx((4 * 30 + 8 * 30 + 2 * 15) / 60)
    in_decode_s = 4 * 30 + 8 * 30 + 2 * 15
    assert first.context == pytest.approx((4000 * 30 + 16_000 * 30 + 1000 * 15) / in_decode_s)
    assert second.in_decode == pytest.approx((8 * 60 + 2 * 60) / 60)  # both go on over the boundary


def test_a_node_that_went_silent_holds_no_requests():
    b = builder(stale_s=5.0)
    b.state(state(10.0, 6, "a"))
    b.state(state(50.0, 6, "a"))
    first, second, third = b.close(182.0)
    assert first.in_decode == pytest.approx((6 * 5 + 6 * 5) / 60)
    assert second.in_decode == 0.0
    assert [n.node for n in first.nodes] == ["a"] and second.nodes == [] and third.nodes == []


def test_a_state_that_comes_after_its_slice_was_closed_counts_from_there_on():
    b = builder(stale_s=100.0)
    b.state(state(0.0, 4, "a"))
    b.close(62.0)
    b.state(state(55.0, 8, "a"))
    b.state(state(20.0, 99, "a"))  # older than what is known
    (second,) = b.close(122.0)
    assert second.in_decode == pytest.approx(8.0)


def test_t_bar_and_f_of_each_node():
    b = builder()
    b.iterations(prefilled(5.0, t_uc=8000, t_rst=3000, t_c=6000, begun=1))
    b.iterations(prefilled(6.0, t_uc=2000, t_rst=0, t_c=2000, begun=1))
    b.iterations(prefilled(7.0, t_uc=1000, count=2))
    b.iterations(prefilled(8.0, node="n3", t_uc=500, t_rst=900, t_c=600))
    b.iterations(Iterations("n2", 9.0, D, [Iteration(D, 40, 8, 0, 0.0, 0, 320, 1.0)]))
    (made,) = b.close(62.0)
    nodes = {node.node: node for node in made.nodes}
    assert (nodes["n1"].t_bar, nodes["n1"].f, nodes["n1"].iterations) == (12_000 / 4, 3000 / 8000, 4)
    assert (nodes["n3"].t_bar, nodes["n3"].f) == (500.0, 1.0)  # restored for requests of the slice before
    assert (nodes["n2"].phase, nodes["n2"].t_bar, nodes["n2"].iterations) == (D, 0.0, 0)


def test_slices_wait_for_the_grace_time_and_late_records_are_dropped_and_counted():
    b = builder(grace_s=10.0)
    assert b.close(69.9) == []
    b.request(done(59.0))  # a bit late, still in time
    (made,) = b.close(70.0)
    assert made.requests == 1
    b.request(done(59.5))
    b.iterations(prefilled(59.0, t_uc=1))
    assert b.dropped == 2
    (made,) = b.close(130.0)
    assert made.requests == 0
    b.request(done(1e9))  # a clock that is wrong
    assert b.dropped == 3


def test_slices_lie_on_one_grid_and_none_before_the_start():
    b = builder(61.0)
    assert b.open_t == 120.0
    b.request(done(100.0))
    assert b.dropped == 0  # not late: its slice is not ours to make
    assert b.close(119.0) == []
    assert [(s.t0, s.t1) for s in b.close(200.0)] == [(120.0, 180.0)]
    assert builder(120.0).open_t == 120.0


def test_empty_minutes_are_slices_too_but_a_long_sleep_is_skipped():
    b = builder()
    assert len(b.close(600.0)) == 9
    assert b.close(600.0 + 60 * (MOST_MISSED + 50)) == []
    assert b.open_t == 600.0 + 60 * (MOST_MISSED + 49)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(0.001, 40), st.integers(0, 9), st.booleans()), max_size=40),
    slice_s=st.sampled_from([60.0, 29.7, 113.37]),
    stale_s=st.sampled_from([1.0, 5.0, 300.0]),
)
def test_no_request_second_is_lost_or_counted_twice(steps, slice_s, stale_s):
    """However slices are closed in between, the integrals add up to the requests' time in decode."""
    b = SliceBuilder(start_t=0.0, slice_s=slice_s, grace_s=50.0, stale_s=stale_s)
    slices, t, want, last = [], 0.0, 0.0, (0.0, 0)
    for wait, decodes, close in steps:
        t += wait
        want += last[1] * min(t - last[0], stale_s)
        last = (t, decodes)
        b.state(state(t, decodes, "a", phase=BOTH))
        if close:
            slices += b.close(t)
    slices += b.close(t + stale_s + 60 + slice_s)
    want += last[1] * stale_s
    assert sum(s.in_decode * (s.t1 - s.t0) for s in slices) == pytest.approx(want, abs=1e-6)
    assert all(a.t1 == b.t0 for a, b in zip(slices, slices[1:], strict=False))
