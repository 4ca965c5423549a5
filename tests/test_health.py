"""A node's circuit breaker, against a plain model of its rules."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router.health import (
    FAILURES,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SUCCESSES,
    SUSPECT_S,
    Breaker,
    Fitness,
)

UP, DOWN, TRIAL = Fitness.UP, Fitness.DOWN, Fitness.TRIAL


class Plain:
    """The rules, from what happened so far: a list of (what, when)."""

    def __init__(self) -> None:
        self.fitness = UP
        self.log: list[tuple[str, float]] = []
        self.failed_trials = 0
        self.down_since = 0.0

    def streak(self, what: str) -> int:
        n = 0
        for event, _ in reversed(self.log):
            if event != what:
                break
            n += 1
        return n

    def pause_s(self) -> float:
        return min(FIRST_PAUSE_S * 2**self.failed_trials, LONGEST_PAUSE_S)

    def ask(self, now: float) -> bool:
        if self.fitness is DOWN and now >= self.down_since + self.pause_s():
            self.fitness = TRIAL
            self.log.append(("trial", now))  # what was answered before the trial does not count for it
        last = next(((event, t) for event, t in reversed(self.log) if event != "trial"), ("ok", 0.0))
        suspect = last[0] == "failed" and now < last[1] + SUSPECT_S
        return self.fitness is UP and not suspect

    def fail(self, now: float) -> bool:
        self.log.append(("failed", now))
        if self.fitness is UP and self.streak("failed") < FAILURES:
            return False
        went = self.fitness is UP
        self.failed_trials += self.fitness is TRIAL
        self.fitness, self.down_since = DOWN, now
        return went

    def succeed(self, now: float) -> bool:
        self.log.append(("ok", now))
        if self.fitness is UP or self.streak("ok") < SUCCESSES:
            return False
        self.fitness, self.failed_trials = UP, 0
        self.log.append(("up", now))
        return True


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["failed", "ok", "ask"]),
        st.sampled_from([0.0, 0.25, FIRST_PAUSE_S, SUSPECT_S, 4.0, 16.0, LONGEST_PAUSE_S]),
    ),
    max_size=60,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_it_does_what_a_plain_model_does(steps):
    breaker, plain, now = Breaker(), Plain(), 1000.0
    for what, after in steps:
        now += after
        match what:
            case "failed":
                assert breaker.failed(now) == plain.fail(now)
            case "ok":
                assert breaker.succeeded() == plain.succeed(now)
            case _:
                assert breaker.usable(now) == plain.ask(now)
        assert breaker.fitness is plain.fitness


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STEPS)
def test_what_it_says_is_when_it_changes(steps):
    breaker, now = Breaker(), 0.0
    for what, after in steps:
        now += after
        before = breaker.fitness
        match what:
            case "failed":
                assert breaker.failed(now) == (before is UP and breaker.fitness is not UP)
            case "ok":
                assert breaker.succeeded() == (before is not UP and breaker.fitness is UP)
            case _:
                if breaker.usable(now):
                    assert before is breaker.fitness is UP


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, FAILURES - 1), max_size=200))
def test_a_node_that_fails_now_and_then_is_never_taken_down(failures_between_successes):
    breaker, now = Breaker(), 0.0
    for failures in failures_between_successes:
        for _ in range(failures):
            now += 0.01
            assert not breaker.failed(now)
            assert breaker.fitness is UP
        breaker.succeeded()
        assert breaker.usable(now)


def test_failures_in_a_row_take_it_down_once():
    breaker = Breaker()
    assert [breaker.failed(1.0 + i) for i in range(FAILURES + 2)] == [False] * (FAILURES - 1) + [
        True,
        False,
        False,
    ]
    assert breaker.fitness is DOWN and not breaker.usable(4.0)


def test_after_one_failure_it_is_left_out_for_a_moment():
    breaker = Breaker()
    breaker.failed(10.0)
    assert not breaker.usable(10.0) and not breaker.usable(10.0 + SUSPECT_S - 0.001)
    assert breaker.usable(10.0 + SUSPECT_S)
    breaker.failed(20.0)
    breaker.succeeded()
    assert breaker.usable(20.1)  # it was no more than that


def down(at: float) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.failed(at)
    return breaker


def trial_after(breaker: Breaker, now: float) -> float:
    """Seconds until a trial may begin, by asking."""
    waited = 0.0
    while breaker.fitness is DOWN:
        assert not breaker.usable(now + waited)
        waited += 0.25
    return waited - 0.25


def test_pauses_double_up_to_a_limit_and_begin_anew():
    breaker, now, pauses = down(0.0), 0.0, []
    for _ in range(8):
        pause = trial_after(breaker, now)
        pauses.append(pause)
        now += pause
        assert breaker.fitness is TRIAL
        assert not breaker.failed(now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    now += trial_after(breaker, now)
    assert [breaker.succeeded() for _ in range(SUCCESSES)] == [False] * (SUCCESSES - 1) + [True]
    assert breaker.usable(now)
    for _ in range(FAILURES):
        breaker.failed(now)
    assert trial_after(breaker, now) == FIRST_PAUSE_S


def test_a_trial_needs_its_successes_in_a_row():
    breaker = down(0.0)
    breaker.usable(FIRST_PAUSE_S)
    breaker.succeeded()
    breaker.failed(1.1)
    assert breaker.fitness is DOWN
    assert not breaker.succeeded()
    breaker.usable(1.1 + 2 * FIRST_PAUSE_S)
    assert breaker.fitness is TRIAL
    assert not breaker.succeeded()  # the one before the trial does not count
    assert not breaker.usable(4.0)  # no work during a trial
    assert breaker.succeeded()


def test_calls_that_fail_late_do_not_lengthen_the_pause():
    """A node takes hundreds of calls down with it: that is one failure of the node."""
    breaker = down(0.0)
    for _ in range(500):
        breaker.failed(0.5)
    assert trial_after(breaker, 0.5) == FIRST_PAUSE_S


def test_a_node_that_is_well_is_usable_nearly_always_and_a_dead_one_never():
    """One call of 50 fails: the node stays up, and is left out for no longer than its failures say."""
    rng = random.Random(7)
    breaker, left_out = Breaker(), 0
    for i in range(20_000):
        now = i * 0.1
        left_out += not breaker.usable(now)
        if rng.random() < 0.02:
            breaker.failed(now)
        else:
            breaker.succeeded()
    assert breaker.fitness is UP and left_out < 600
    for i in range(20_000):
        now = 3000.0 + i * 0.1
        if i >= FAILURES:
            assert not breaker.usable(now)
        if i < FAILURES or breaker.fitness is TRIAL:
            breaker.failed(now)
