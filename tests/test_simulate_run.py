"""A whole run: equal seeds give equal results, the warm-up is not measured, loads shift, and what a run reports."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest.baselines.policy import Arrival
from loadtest.simulate.ours import OurRouter
from loadtest.simulate.run import Ideal, Load, Result, Shift, Simulation, System, inline, repeated
from loadtest.traces import Session, Trace
from shared.split import Split
from shared.timing import TINY
from tests.test_simulate_cluster import SMALL, Run, endless, synthetic, system


def same(result: Result) -> bytes:
    """All but the wall's time, to the last bit."""
    return msgspec.json.encode(msgspec.structs.replace(result, wall_s=0.0))


def played(router: str, planner: str, seed: int = 0) -> Result:
    run = Run(system(router, planner), agents=6, seconds=2.0, seed=seed, warmup_s=0.5).play()
    assert len(run.simulation.result.measured) > 30
    return run.simulation.result


@pytest.mark.parametrize(("router", "planner"), [("ours", "ours"), ("thunder-agent", "dynamo-1.5.1")])
def test_equal_seeds_give_equal_results_and_others_do_not(router: str, planner: str) -> None:
    assert same(played(router, planner)) == same(played(router, planner))
    assert same(played(router, planner, 1)) != same(played(router, planner))


def test_results_do_not_depend_on_how_python_hashes() -> None:
    code = (
        "from tests.test_simulate_run import *;"
        "sys.stdout.buffer.write(same(played('ours', 'ours')) + same(played('dynamo-pool', 'static')))"
    )
    root = Path(__file__).parent.parent
    results = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert results[0] == results[1] and results[0]


def test_what_ends_in_the_warm_up_is_not_measured() -> None:
    run = Run(system(), seconds=1.0, warmup_s=1.0).play()
    result = run.simulation.result
    ends = [flight.t_end for flight in run.answered]
    assert min(ends) < 1.0 and max(ends) <= 2.0
    assert result.t_end == [t for t in ends if t >= 1.0]
    counted = [flight for flight in run.answered if flight.t_end >= 1.0]
    assert len(result.measured) == len(counted) < len(ends) <= result.requests
    assert result.prompt_tokens == sum(flight.prompt_tokens for flight in counted)
    assert result.cached_tokens == sum(flight.cached_tokens for flight in counted)
    assert result.queue_s == [flight.t_prefill_start - flight.t_placed for flight in counted]
    assert result.req_per_s == len(counted) / 1.0
    assert result.hit_rate == result.cached_tokens / result.prompt_tokens <= result.ideal_hit_rate
    assert result.lost_reuse == pytest.approx(1 - result.hit_rate / result.ideal_hit_rate)
    assert [m.ttft_s for m in result.measured] == [flight.t_first - flight.t_arrive for flight in counted]


def test_fleets_shift_at_their_times() -> None:
    load = Load(
        shifts=(Shift(0.0, {"x": 4}), Shift(1.0, {"x": 1, "y": 3}), Shift(2.0, {})),
        max_pause_s=0.05, warmup_s=0.0, measure_s=3.0,
    )  # fmt: skip
    simulation = Simulation({"x": endless(1), "y": endless(2)}, System(split=Split(2, 2)), load, SMALL)
    seen: list[tuple[int, int, int]] = []

    def look() -> None:
        x, y = (len(simulation.fleets[name].running) for name in "xy")
        seen.append((x, y, simulation.loop.events))

    for t in (0.5, 1.9, 2.9):
        simulation.loop.at(t, look)
    done: list[float] = []
    result = simulation.run(done.append)
    assert [each[:2] for each in seen] == [(4, 0), (1, 3), (0, 0)]
    assert result.sessions == sum(fleet.begun for fleet in simulation.fleets.values()) > 8
    assert done == sorted(done) and done[-1] == 3.0 and result.events > seen[-1][2]


def test_an_open_loop_begins_an_agent_at_each_arrival() -> None:
    load = Load(arrivals_s=(0.1, 0.1, 0.5, 2.5), max_pause_s=0.1, warmup_s=0.0, measure_s=2.0)
    begun: list[float] = []

    def sessions() -> Iterator[Session]:
        for number, one in enumerate(endless(3)):
            begun.append(simulation.loop.now)
            yield one if number < 3 else synthetic(0)

    simulation = Simulation({"x": sessions()}, system(), load, SMALL)
    result = simulation.run()
    assert begun == [0.1, 0.1, 0.5] and result.sessions == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"router": "nobody"}, "no router 'nobody'"),
        ({"planner": "nobody"}, "no planner 'nobody'"),
        ({"router": "sticky", "router_settings": {"x": 1}}, "router sticky"),
        ({"planner": "arrow", "planner_settings": {"ttft_s": "much"}}, "planner arrow"),
        ({"planner": "ours", "planner_settings": {"window_s": "much"}}, "Expected `float`"),
    ],
)
def test_a_policy_that_there_is_not_is_a_value_error(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Simulation({"x": endless()}, System(**settings), Load(), SMALL)  # type: ignore[arg-type]


def test_the_ideal_cache_holds_what_was_sent_and_what_was_answered() -> None:
    ideal = Ideal()
    path = np.arange(5)
    assert ideal.leading(path[:3], 50, 16) == 0
    assert ideal.leading(path, 80, 16) == 48
    assert ideal.leading(path, 80, 16) == 64  # the last token is always computed
    assert ideal.leading(path, 81, 16) == 80
    context = np.concatenate((path, [7, 5000]))
    assert ideal.leading(np.concatenate((path, [7])), 100, 16) == 80
    ideal.add(context)
    assert ideal.leading(context, 120, 16) == 112
    assert ideal.leading(np.empty(0, dtype=np.int64), 3, 16) == 0
    assert ideal.leading(np.array([9000, 1]), 40, 16) == 0  # a hole ends what is held


def test_sessions_are_repeated_round_and_round_from_where_the_seed_says() -> None:
    trace = Trace("t", "weka", [synthetic(seed) for seed in range(6)])

    def first(seed: int) -> list[str]:
        return [session.id for session in itertools.islice(repeated(trace, seed), 18)]

    assert first(0) == 3 * [session.id for session in trace.sessions]
    assert all(sorted(first(seed)) == sorted(first(0)) and first(seed) == first(seed) for seed in range(9))
    assert len({first(seed)[0] for seed in range(9)}) > 2


def test_a_load_without_an_end_ends_with_its_sessions() -> None:
    load = Load(shifts=(Shift(0.0, {"x": 3}),), max_pause_s=0.1, warmup_s=0.05, measure_s=None)
    sessions = [synthetic(seed) for seed in range(8)]
    simulation = Simulation({"x": iter(sessions)}, system(), load, SMALL)
    result = simulation.run()
    assert result.sessions == 8 and result.requests == sum(session.requests for session in sessions)
    assert not simulation.cluster.flights and not simulation.fleets["x"].running
    assert result.measure_s == pytest.approx(max(result.t_end) - 0.05) and simulation.total_s is None


def test_the_inline_profile_has_the_gap_and_the_time_of_restored_tokens() -> None:
    changed = inline(TINY)
    assert changed.idle_gap_s == 0.020
    assert changed.prefill.iteration_s(10, 0, 1000) - TINY.prefill.iteration_s(10, 0, 1000) == pytest.approx(
        1.5e-3
    )
    assert msgspec.structs.replace(changed, prefill=TINY.prefill, idle_gap_s=TINY.idle_gap_s) == TINY


def test_our_router_counts_a_prefill_until_it_is_done() -> None:
    run = Run(system(split=Split(1, 1)), agents=0)
    run.simulation.loop.run(1.5)  # the nodes have reported
    router, now = OurRouter({name: SMALL for name in run.cluster.nodes}), 1.5
    for name in run.cluster.nodes:
        state = run.cluster.state(name)
        assert state is not None
        router.reported(state, now)

    def predicted(rid: str) -> float:
        placement = router.place(Arrival(rid, "s", "b", np.arange(100, 150), 800, 1), run.cluster, now)
        assert placement.predicted_ttft_s is not None
        return placement.predicted_ttft_s

    first, second = predicted("a"), predicted("b")
    router.prefill_done("a", now)
    assert predicted("c") == pytest.approx(second) and second > 1.5 * first
    router.prefill_done("b", now)
    router.ended("c", 0, now)
    assert predicted("d") == pytest.approx(first)
