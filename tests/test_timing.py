"""Equations 1 to 4, the profiles, and fits that find known coefficients again."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages import Iteration, Phase
from shared.timing import (
    MIN_FIT_ITERATIONS,
    PROFILES,
    DecodeModel,
    FetchModel,
    PrefillModel,
    Work,
    fit_decode,
    fit_prefill,
    profile,
    query_key_pairs,
)

GLM = profile("glm-5.2-4xgb300")
COST = st.floats(0, 1, allow_subnormal=False)
LENGTH = st.integers(0, 200_000)
PREFILL_MODELS = st.builds(PrefillModel, COST, COST, COST, COST)
DECODE_MODELS = st.builds(
    DecodeModel, COST, COST, COST, st.integers(1, 16), st.integers(16, 512), st.integers(1, 8)
)


# ------------------------------------------------------------------------------- Equation 1 and 3


@given(st.integers(0, 300), st.integers(0, 300))
def test_pairs_count_what_each_token_attends_to(t_uc: int, t_c: int) -> None:
    assert query_key_pairs(t_uc, t_c) == sum(t_c + i for i in range(1, t_uc + 1))
    assert Work(t_uc, t_c, 1, 1).pairs == query_key_pairs(t_uc, t_c)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.integers(0, 100_000))
def test_pairs_of_chunks_add_up(chunks: list[int], t_c: int) -> None:
    total = 0.0
    done = t_c
    for chunk in chunks:
        total += query_key_pairs(chunk, done)
        done += chunk
    assert total == query_key_pairs(sum(chunks), t_c)


@given(
    PREFILL_MODELS,
    st.lists(st.tuples(st.integers(1, 20_000), LENGTH), min_size=1, max_size=8),
    st.floats(0, 1, allow_subnormal=False),
)
def test_shares_of_a_batch_sum_to_its_iteration(
    model: PrefillModel, batch: list[tuple[int, int]], f: float
) -> None:
    t_bar = sum(t_uc for t_uc, _ in batch)
    shares = sum(model.request_s(t_uc, t_c, t_bar, f) for t_uc, t_c in batch)
    pairs = sum(query_key_pairs(t_uc, t_c) for t_uc, t_c in batch)
    iteration = model.iteration_s(t_bar, pairs, f * sum(t_c for _, t_c in batch))
    assert shares == pytest.approx(iteration)


def test_means_need_the_mean_of_pairs() -> None:
    batch = [(8000, 1000), (100, 150_000)]
    pairs = [query_key_pairs(*lengths) for lengths in batch]
    mean = GLM.prefill.request_s(4050, 75_500, 4050, 0.1, pairs=sum(pairs) / 2)
    each = [GLM.prefill.request_s(*lengths, 4050, 0.1) for lengths in batch]
    assert mean == pytest.approx(sum(each) / 2)
    assert GLM.prefill.request_s(4050, 75_500, 4050, 0.1) != pytest.approx(sum(each) / 2, rel=1e-3)


@given(PREFILL_MODELS, LENGTH, LENGTH, st.floats(0, 1), st.integers(1, 1000))
def test_more_prefill_work_never_takes_less(
    model: PrefillModel, t_uc: int, t_c: int, f: float, more: int
) -> None:
    base = model.request_s(t_uc, t_c, 4096, f)
    assert model.request_s(t_uc + more, t_c, 4096, f) >= base >= 0
    assert model.request_s(t_uc, t_c + more, 4096, f) >= base
    assert model.request_s(t_uc, t_c, 4096 + more, f) <= base
    pairs = query_key_pairs(t_uc, t_c)
    assert model.iteration_s(t_uc + more, pairs, 0) >= model.iteration_s(t_uc, pairs, 0) >= model.c0
    assert model.iteration_s(t_uc, pairs, more) >= model.iteration_s(t_uc, pairs, 0)


@pytest.mark.parametrize("t_bar", [0, -1, math.nan])
def test_prefill_share_without_new_tokens(t_bar: float) -> None:
    with pytest.raises(ValueError, match="t_bar"):
        GLM.prefill.request_s(100, 0, t_bar, 0)


# ------------------------------------------------------------------------------- Equation 2 and 4


@given(DECODE_MODELS, st.integers(0, 64))
def test_phi_is_the_expected_share_of_experts(model: DecodeModel, batch: int) -> None:
    missed = 1.0
    for _ in range(round(model.t_fwd) * batch):
        missed *= 1 - model.experts_per_token / model.experts
    assert model.phi(batch) == pytest.approx(1 - missed, abs=1e-12)
    assert 0 <= model.phi(batch) <= model.phi(batch + 1) <= 1


def test_phi_against_drawn_experts() -> None:
    """Appendix B.3 by experiment: tokens that each pick k of E experts leave this share unread."""
    rng = np.random.default_rng(7)
    model = DecodeModel(0, 1, 0, experts_per_token=8, experts=256, t_fwd=4)
    drawn = [
        len({e for _ in range(4 * 8) for e in rng.choice(256, 8, replace=False)}) / 256 for _ in range(60)
    ]
    assert model.phi(8) == pytest.approx(float(np.mean(drawn)), rel=0.02)


def test_dense_model_reads_all_its_weights() -> None:
    dense = DecodeModel(1e-3, 5e-3, 1e-4, experts_per_token=1, experts=1, t_fwd=1)
    assert dense.phi(0) == 0 and dense.phi(1) == dense.phi(64) == 1


def test_decode_iterations_of_figure_5d() -> None:
    assert GLM.decode.iteration_s(8) == pytest.approx(0.017, rel=0.05)
    assert GLM.decode.iteration_s(64) == pytest.approx(0.045, rel=0.05)


@given(DECODE_MODELS, st.floats(1, 200), st.integers(0, 5000), st.floats(1, 4))
def test_decode_share_times_batch_is_the_time_a_request_waits(
    model: DecodeModel, batch: float, t_out: int, t_acc: float
) -> None:
    share = model.request_s(t_out, t_acc, batch)
    assert share * batch == pytest.approx(t_out / t_acc * model.iteration_s(batch))
    assert model.iteration_s(batch + 1) >= model.iteration_s(batch)
    assert model.request_s(t_out + 1, t_acc, batch) >= share
    # Sharing the fixed cost and the weights with one more request never costs a request more.
    assert model.request_s(t_out, t_acc, batch + 1) <= share * (1 + 1e-9)


def test_decode_share_without_a_batch() -> None:
    with pytest.raises(ValueError, match="batch 0 is not above 0"):
        GLM.decode.request_s(100, 1.4, 0)
    with pytest.raises(ValueError, match="t_acc"):
        GLM.decode.request_s(100, 0, 8)


# ------------------------------------------------------------------------------- fetch, profiles


def test_fetch_time() -> None:
    tau = FetchModel(base_s=0.45, per_token_s=1e-6, min_tokens=512)
    assert tau.seconds(0) == tau.seconds(511) == 0
    assert tau.seconds(512) == pytest.approx(0.450512)
    assert tau.seconds(100_000) == pytest.approx(0.55)
    assert GLM.fetch == tau


def test_profiles() -> None:
    assert set(PROFILES) == {"glm-5.2-4xgb300", "tiny"}
    for name, each in PROFILES.items():
        assert each.name == name and profile(name) is each
        assert each.l2_tokens == 4 * each.l1_tokens
        assert each.max_context <= each.l1_tokens
    assert GLM.l1_tokens == pytest.approx(2.06e6, rel=0.002)
    assert GLM.l2_tokens == pytest.approx(8.25e6, rel=0.002)
    # A full chunk: 12.5 ms + 8192 x 0.05 ms + 33.6 M pairs; then after 128K tokens, 100K of them restored.
    assert GLM.prefill.iteration_s(8192, query_key_pairs(8192, 0), 0) == pytest.approx(0.4305, abs=1e-4)
    after = GLM.prefill.iteration_s(8192, query_key_pairs(8192, 131_072), 100_000)
    assert after == pytest.approx(0.4305 + 0.2684 + 0.015, abs=1e-4)
    with pytest.raises(ValueError, match="no timing profile 'huge'; known: glm-5.2-4xgb300, tiny"):
        profile("huge")


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrefillModel(-1e-9, 0, 0, 0),
        lambda: PrefillModel(0, 0, math.nan, 0),
        lambda: DecodeModel(0, math.inf, 0),
        lambda: DecodeModel(0, 0, 0, experts_per_token=9, experts=8),
        lambda: DecodeModel(0, 0, 0, experts_per_token=0, experts=8),
        lambda: DecodeModel(0, 0, 0, t_fwd=0),
        lambda: FetchModel(-0.1, 0, 0),
    ],
)
def test_impossible_models_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be|selects"):
        make()


# ------------------------------------------------------------------------------- fits


def prefill_record(
    model: PrefillModel, t_uc: int, t_c: int, t_rst: int, *, noise: float = 1.0, count: int = 1
) -> Iteration:
    pairs = query_key_pairs(t_uc, t_c)
    seconds = model.iteration_s(t_uc, pairs, t_rst) * noise * count
    return Iteration(Phase.PREFILL, count, 1, t_uc, pairs, t_rst, 0, seconds)


def decode_record(model: DecodeModel, batch: int, *, noise: float = 1.0, count: int = 1) -> Iteration:
    return Iteration(Phase.DECODE, count, batch, 0, 0.0, 0, batch, model.iteration_s(batch) * noise * count)


def prefill_workload(model: PrefillModel, n: int, sigma: float) -> list[Iteration]:
    """Agent-like: few uncached tokens after long prefixes, some restored, now and then a full chunk."""
    rng = np.random.default_rng(11)
    records = []
    for _ in range(n):
        t_uc = int(min(8192, rng.lognormal(7.5, 1.2))) + 1
        t_c = int(rng.uniform(0, 300_000))
        t_rst = int(rng.uniform(0, t_c)) if rng.random() < 0.4 else 0
        noise = float(rng.lognormal(0, sigma))
        records.append(prefill_record(model, t_uc, t_c, t_rst, noise=noise, count=int(rng.integers(1, 4))))
    return records


def coefficients(model: PrefillModel | DecodeModel) -> list[float]:
    if isinstance(model, PrefillModel):
        return [model.c0, model.c1, model.c2, model.c3]
    return [model.d0, model.d1, model.d2]


@pytest.mark.parametrize("name", PROFILES)
def test_prefill_fit_is_exact_without_noise(name: str) -> None:
    true = PROFILES[name].prefill
    model, error = fit_prefill(prefill_workload(true, 60, 0.0))
    assert coefficients(model) == pytest.approx(coefficients(true), rel=1e-6)
    assert error < 1e-9


@pytest.mark.parametrize("name", PROFILES)
def test_decode_fit_is_exact_without_noise(name: str) -> None:
    true = PROFILES[name].decode
    records = [decode_record(true, batch, count=1 + batch % 5) for batch in range(1, 65)]
    model, error = fit_decode(records, true.experts_per_token, true.experts, true.t_fwd)
    assert coefficients(model) == pytest.approx(coefficients(true), rel=1e-6)
    assert (model.experts_per_token, model.experts, model.t_fwd) == (8, 256, true.t_fwd)
    assert error < 1e-9


def test_prefill_fit_predicts_within_a_few_percent_under_noise() -> None:
    true = GLM.prefill
    model, error = fit_prefill(prefill_workload(true, 400, 0.05))
    assert 0.02 < error < 0.06
    for t_uc, t_c, t_rst in [(200, 100_000, 0), (1000, 50_000, 50_000), (8192, 0, 0), (8192, 250_000, 0)]:
        pairs = query_key_pairs(t_uc, t_c)
        want = true.iteration_s(t_uc, pairs, t_rst)
        assert model.iteration_s(t_uc, pairs, t_rst) == pytest.approx(want, rel=0.04)


def test_decode_fit_predicts_within_a_few_percent_under_noise() -> None:
    true = GLM.decode
    rng = np.random.default_rng(5)
    records = [
        decode_record(true, int(rng.integers(1, 65)), noise=float(rng.lognormal(0, 0.05))) for _ in range(300)
    ]
    model, error = fit_decode(records)
    assert 0.02 < error < 0.06
    for batch in (1, 4, 8, 16, 32, 64):
        assert model.iteration_s(batch) == pytest.approx(true.iteration_s(batch), rel=0.03)


def test_a_fit_is_right_on_average_under_much_noise() -> None:
    """Dividing rows by the measured time alone would end about 8 % low here."""
    rng = np.random.default_rng(3)
    noise = rng.lognormal(0, 0.2, 4000)
    noise /= noise.mean()
    true = GLM.decode
    model, _ = fit_decode([decode_record(true, 1 + i % 64, noise=float(x)) for i, x in enumerate(noise)])
    for batch in (4, 16, 64):
        assert model.iteration_s(batch) == pytest.approx(true.iteration_s(batch), rel=0.02)


def test_one_stall_does_not_spoil_a_fit() -> None:
    true = GLM.decode
    records = [decode_record(true, batch) for batch in range(1, 65)] * 2
    records.append(decode_record(true, 32, noise=1000))
    model, _ = fit_decode(records)
    for batch in (4, 16, 64):
        assert model.iteration_s(batch) == pytest.approx(true.iteration_s(batch), rel=0.04)


def test_a_record_of_many_equal_iterations_weighs_as_many() -> None:
    slow, fast = PrefillModel(0.03, 0, 0, 0), PrefillModel(0.02, 0, 0, 0)
    merged = [prefill_record(slow, 100, 0, 0, count=30), prefill_record(fast, 100, 0, 0, count=10)]
    single = [prefill_record(slow, 100, 0, 0)] * 30 + [prefill_record(fast, 100, 0, 0)] * 10
    a, b = fit_prefill(merged), fit_prefill(single)
    assert coefficients(a.model) == pytest.approx(coefficients(b.model), rel=1e-5)
    assert a.error == pytest.approx(b.error)
    assert a.model.iteration_s(100, query_key_pairs(100, 0), 0) == pytest.approx(0.0275, rel=1e-3)


@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_equal_prefill_batches_give_their_mean(sigma: float) -> None:
    rng = np.random.default_rng(1)
    records = [
        prefill_record(GLM.prefill, 2000, 60_000, 3000, noise=float(rng.lognormal(0, sigma)))
        for _ in range(50)
    ]
    model, error = fit_prefill(records)
    mean_s = sum(r.seconds for r in records) / len(records)
    pairs = query_key_pairs(2000, 60_000)
    assert model.iteration_s(2000, pairs, 3000) == pytest.approx(mean_s, rel=1e-3)
    assert error < 0.06
    # The time is shared among the terms, so other batches get times of the right order.
    assert min(coefficients(model)) > 0
    assert model.iteration_s(200, query_key_pairs(200, 60_000), 0) < 0.6 * mean_s


@pytest.mark.parametrize("count", [MIN_FIT_ITERATIONS, 10_000])
def test_equal_decode_batches_give_their_mean_even_in_one_record(count: int) -> None:
    record = decode_record(GLM.decode, 16, count=count)
    model, error = fit_decode([record])
    assert model.iteration_s(16) == pytest.approx(GLM.decode.iteration_s(16), rel=1e-3)
    assert error < 1e-3
    assert model.iteration_s(32) > model.iteration_s(16)


def test_what_never_occurred_costs_nothing() -> None:
    records = [prefill_record(GLM.prefill, t_uc, 5 * t_uc, 0) for t_uc in range(100, 8000, 300)]
    model, error = fit_prefill(records)
    assert model.c3 == 0
    assert coefficients(model)[:3] == pytest.approx(coefficients(GLM.prefill)[:3], rel=1e-6)
    assert error < 1e-9


def test_a_fit_never_gives_a_negative_coefficient() -> None:
    """Times that fall with the batch would need one."""
    records = [
        Iteration(Phase.DECODE, 1, batch, 0, 0.0, 0, batch, 0.05 - 0.0005 * batch) for batch in range(1, 65)
    ]
    model, error = fit_decode(records)
    assert min(coefficients(model)) >= 0
    assert 0.01 < error < 0.5


def test_too_little_to_fit() -> None:
    with pytest.raises(ValueError, match="0 prefill iterations are too few to fit: 8 are needed"):
        fit_prefill([])
    few = [decode_record(GLM.decode, 4, count=7), prefill_record(GLM.prefill, 100, 0, 0, count=100)]
    with pytest.raises(ValueError, match="7 decode iterations are too few"):
        fit_decode(few)
    with pytest.raises(ValueError, match="any uncached token"):
        fit_prefill([Iteration(Phase.PREFILL, 20, 1, 0, 0.0, 0, 0, 1.0)])
    with pytest.raises(ValueError, match="had a running request"):
        fit_decode([Iteration(Phase.DECODE, 20, 0, 0, 0.0, 0, 0, 1.0)])


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_records_without_a_time_are_passed_over(seconds: float) -> None:
    bad = Iteration(Phase.DECODE, 5, 8, 0, 0.0, 0, 8, seconds)
    good = [decode_record(GLM.decode, batch) for batch in range(1, 20)]
    assert fit_decode([bad, *good, bad]) == fit_decode(good)
    with pytest.raises(ValueError, match="0 decode iterations"):
        fit_decode([bad] * 10)
