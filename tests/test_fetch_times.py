"""tau as it is learned: the true line, through noise, changes and odd samples."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.router.fetch_times import KEEP, PRIOR, FetchTimes
from shared.timing import FetchModel

START = FetchModel(0.02, 2e-6, 512)
LENGTHS = st.integers(512, 200_000)
LONG = (1_000, 10_000, 100_000)


def feed(times: FetchTimes, model: FetchModel, n: int, rng: random.Random, noise: float = 0.1) -> None:
    for _ in range(n):
        x = rng.randint(512, 200_000)
        times.observed(x, model.seconds(x) * rng.uniform(1 - noise, 1 + noise))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(0.001, 0.5), st.floats(1e-7, 1e-4), st.integers(0, 1000))
def test_it_finds_the_true_line_in_noise(base, slope, seed):
    true = FetchModel(base, slope, 512)
    times = FetchTimes(START)
    feed(times, true, 600, random.Random(seed))
    for x in (20_000, 100_000, 200_000):
        assert times.model.seconds(x) == pytest.approx(true.seconds(x), rel=0.15)
    exact = FetchTimes(START)
    feed(exact, true, 1500, random.Random(seed), noise=0.0)
    assert exact.model.base_s == pytest.approx(base, rel=1e-3, abs=1e-6)
    assert exact.model.per_token_s == pytest.approx(slope, rel=1e-3)


def test_it_follows_a_change():
    rng = random.Random(3)
    times = FetchTimes(START)
    feed(times, START, 500, rng)
    slow = FetchModel(0.2, 2e-5, 512)
    feed(times, slow, 300, rng)
    for x in LONG:
        assert times.model.seconds(x) == pytest.approx(slow.seconds(x), rel=0.15)
    feed(times, START, 600, rng)
    for x in LONG[1:]:
        assert times.model.seconds(x) == pytest.approx(START.seconds(x), rel=0.15)


def weighted(samples: list[tuple[int, float]]) -> tuple[float, float]:
    """Base and slope of the weighted least squares, the prior's fetches among them."""
    n = len(samples)
    rows = [(x, START.base_s + START.per_token_s * x, PRIOR / 2 * KEEP**n) for x in (1_000.0, 100_000.0)]
    rows += [(float(x), y, KEEP ** (n - 1 - i)) for i, (x, y) in enumerate(samples)]
    x, y, w = (np.array(column) for column in zip(*rows, strict=True))
    root = np.sqrt(w)
    left = np.stack([root, root * x / 1e5], axis=1)
    base, slope = np.linalg.lstsq(left, root * y, rcond=None)[0]
    return float(base), float(slope / 1e5)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(LENGTHS, st.floats(0.001, 30.0)), min_size=1, max_size=60))
def test_it_is_the_least_squares_with_old_fetches_forgotten(samples):
    times = FetchTimes(START)
    for x, y in samples:
        times.observed(x, y)
    base, slope = weighted(samples)
    assume(base > 1e-9 and slope > 1e-12)  # else a coefficient is held at zero
    assert times.model.base_s == pytest.approx(base, rel=1e-4, abs=1e-6)
    assert times.model.per_token_s == pytest.approx(slope, rel=1e-4, abs=1e-12)


ANY_SECONDS = st.one_of(
    st.floats(-10.0, 1e6), st.sampled_from([0.0, math.inf, -math.inf, math.nan, 1e-300, 1e12])
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(-10, 10**9), ANY_SECONDS), max_size=80))
def test_nothing_makes_it_negative_or_endless(samples):
    times = FetchTimes(START)
    for x, y in samples:
        before, seen = times.model, times.seen
        times.observed(x, y)
        if x <= 0 or not math.isfinite(y) or y < 0:
            assert (times.model, times.seen) == (before, seen)
        else:
            assert times.seen == seen + 1
        model = times.model
        assert model.base_s >= 0 and model.per_token_s >= 0
        assert math.isfinite(model.base_s) and math.isfinite(model.per_token_s)
        assert model.min_tokens == START.min_tokens


@pytest.mark.parametrize("n", [1, 10, 100, 5000])
@pytest.mark.parametrize("x", [512, 4096, 200_000])
def test_lengths_that_are_all_equal_say_what_that_length_takes(n, x):
    times = FetchTimes(START)
    for _ in range(n):
        times.observed(x, 1.5)
    model = times.model
    assert model.base_s >= 0 and 0 <= model.per_token_s < 1.0
    if n >= 100:
        assert model.seconds(x) == pytest.approx(1.5, rel=0.1)
    if n >= 5000:
        assert model.seconds(x) == pytest.approx(1.5, rel=1e-3)


def test_fetches_that_take_no_time_cost_nothing():
    times = FetchTimes(START)
    for x in (512, 5_000, 50_000, 200_000) * 300:
        times.observed(x, 0.0)
    assert all(times.model.seconds(x) == pytest.approx(0.0, abs=1e-6) for x in LONG)


def test_longer_ones_that_are_faster_do_not_make_the_slope_negative():
    times = FetchTimes(START)
    for _ in range(200):
        times.observed(1_000, 2.0)
        times.observed(100_000, 1.0)
    assert times.model.per_token_s == 0.0
    assert times.model.base_s == pytest.approx(1.5, rel=0.05)


def test_a_line_that_would_begin_below_zero_goes_through_the_origin():
    times = FetchTimes(START)
    for _ in range(300):
        times.observed(50_000, 0.1)
        times.observed(100_000, 1.0)
    assert times.model.base_s == 0.0
    best = (50_000 * 0.1 + 100_000 * 1.0) / (50_000**2 + 100_000**2)
    assert times.model.per_token_s == pytest.approx(best, rel=0.05)


def test_the_profile_goes_first_and_one_odd_fetch_changes_little():
    times = FetchTimes(START)
    assert times.model == START
    for x in LONG:
        one = FetchTimes(START)
        said = START.seconds(x)
        one.observed(x, 10 * said)
        moved = (one.model.seconds(x) - said) / (9 * said)
        # Half of the profile's fetches lie at one length, and are one fetch old.
        assert 0 < moved < 1.001 / (1 + KEEP * PRIOR / 2) < 0.5
    # As many fetches as the profile counts for weigh about as much as it does.
    many = FetchTimes(START)
    for _ in range(round(PRIOR / 2)):
        for x in (1_000, 100_000):
            many.observed(x, 3 * START.seconds(x))
    assert many.model.seconds(100_000) == pytest.approx(2 * START.seconds(100_000), rel=0.1)


def test_the_profile_is_forgotten_in_the_end():
    wrong = FetchTimes(FetchModel(5.0, 1e-3, 0))
    feed(wrong, START, 1500, random.Random(1), noise=0.0)
    for x in LONG:
        assert wrong.model.seconds(x) == pytest.approx(START.seconds(x), rel=1e-3)
