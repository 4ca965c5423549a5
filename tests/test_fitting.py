"""Models fitted from recorded iterations: right, bounded, pooled where a node alone told too little, frozen."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner import fitting
from services.planner.fitting import PER_BUCKET, Bucket, Learner, LearnerState, NodeSamples
from shared.messages import Iterations
from shared.timing import PROFILES
from tests.planner_cases import BOTH, D, P, decode_record, prefill_record

GLM = PROFILES["glm-5.2-4xgb300"]


def feed(
    learner: Learner, node: str, *, n: int = 200, profile: str = GLM.name, slower: float = 1.0, seed: int = 1
):
    """`n` prefill and `n` decode records of a node `slower` than the profile, measured with 2 % of noise."""
    rng = random.Random(seed)
    for _ in range(n):
        t_uc, t_c = rng.randint(1, 8192), rng.randint(0, 200_000)
        noise = rng.uniform(0.98, 1.02) * slower
        first = prefill_record(GLM.prefill, t_uc, t_c, rng.choice([0, t_c]), noise)
        second = decode_record(GLM.decode, rng.randint(1, 64), error=rng.uniform(0.98, 1.02) * slower)
        learner.add(Iterations(node, 1.0, BOTH, [first, second]), profile)


def test_models_follow_each_nodes_own_speed():
    learner = Learner()
    nodes = {"n1": GLM.name, "n2": GLM.name}
    feed(learner, "n1", seed=1)
    feed(learner, "n2", seed=2, slower=1.5)
    assert learner.wants(nodes) == ["n1", "n2"]
    assert learner.freeze(nodes) == ["n1", "n2"]
    assert learner.wants(nodes) == []
    for node, slower in (("n1", 1.0), ("n2", 1.5)):
        fit = learner.fits(nodes)[node]
        assert (fit.prefill_source, fit.decode_source) == ("own", "own")
        for t_uc, t_c in ((512, 100_000), (8192, 0), (4000, 50_000)):
            true = GLM.prefill.request_s(t_uc, t_c, 4000, 0.5) * slower
            assert fit.models.prefill.request_s(t_uc, t_c, 4000, 0.5) == pytest.approx(true, rel=0.05)
        for batch in (1, 8, 64):
            true = GLM.decode.iteration_s(batch) * slower
            assert fit.models.decode.iteration_s(batch) == pytest.approx(true, rel=0.05)
        assert 0 < fit.prefill_error < 0.03 and 0 < fit.decode_error < 0.03


def test_a_node_that_told_too_little_gets_its_profiles_models():
    learner = Learner()
    nodes = {"n1": GLM.name, "n2": GLM.name, "n3": GLM.name, "other": "tiny"}
    feed(learner, "n1")
    feed(learner, "n2", n=2, seed=5)
    assert learner.freeze(nodes) == ["n1", "n2", "n3"]
    fits = learner.fits(nodes)
    assert fits["n1"].prefill_source == "own"
    assert (fits["n2"].prefill_source, fits["n2"].decode_source) == ("pooled", "pooled")
    assert fits["n3"].models == fits["n2"].models
    assert "other" not in fits and learner.wants(nodes) == ["other"]
    # A node that joins later has the pooled models at once.
    assert learner.fits({"n9": GLM.name})["n9"].models == fits["n2"].models


def test_alike_batches_do_not_determine_a_model():
    learner = Learner()
    for _ in range(100):
        same = [prefill_record(GLM.prefill, 100, 1000), decode_record(GLM.decode, 4)]
        learner.add(Iterations("n1", 1.0, BOTH, same), GLM.name)
    assert learner.freeze({"n1": GLM.name}) == []


def test_full_chunks_alone_do_not_determine_a_model():
    """With them every split of the time between iteration and tokens fits as well; a few last chunks tell."""
    learner, nodes = Learner(), {"n1": GLM.name}
    for i in range(100):
        chunk = prefill_record(GLM.prefill, 8192, 2000 * i)
        learner.add(Iterations("n1", 1.0, BOTH, [chunk, decode_record(GLM.decode, 1 + i % 60)]), GLM.name)
    assert learner.freeze(nodes) == [] and learner.wants(nodes) == ["n1"]
    for t_uc in (300, 2500):
        learner.add(Iterations("n1", 1.0, BOTH, [prefill_record(GLM.prefill, t_uc, 50_000)]), GLM.name)
    assert learner.freeze(nodes) == ["n1"]
    fitted = learner.fits(nodes)["n1"].models.prefill
    assert fitted.iteration_s(300, 300 * 50_000, 0) == pytest.approx(
        GLM.prefill.iteration_s(300, 300 * 50_000, 0), rel=0.05
    )


def test_phases_are_learned_from_different_nodes_after_the_split():
    learner = Learner()
    rng = random.Random(3)
    for _ in range(60):
        prefill = prefill_record(GLM.prefill, rng.randint(1, 8192), rng.randint(0, 100_000))
        learner.add(Iterations("n1", 1.0, P, [prefill]), GLM.name)
        learner.add(Iterations("n2", 1.0, D, [decode_record(GLM.decode, rng.randint(1, 40))]), GLM.name)
    nodes = {"n1": GLM.name, "n2": GLM.name}
    assert learner.freeze(nodes) == ["n1", "n2"]
    fits = learner.fits(nodes)
    assert (fits["n1"].prefill_source, fits["n1"].decode_source) == ("own", "pooled")
    assert (fits["n2"].prefill_source, fits["n2"].decode_source) == ("pooled", "own")


def test_frozen_models_do_not_change():
    learner = Learner()
    nodes = {"n1": GLM.name}
    feed(learner, "n1")
    learner.freeze(nodes)
    before = learner.fits(nodes)["n1"]
    feed(learner, "n1", slower=3.0)
    assert learner.samples == {}
    assert learner.freeze(nodes) == []
    assert learner.fits(nodes)["n1"] == before


def test_a_node_that_comes_back_with_another_profile_is_learned_anew():
    learner = Learner()
    feed(learner, "n1")
    learner.freeze({"n1": GLM.name})
    assert learner.wants({"n1": "tiny"}) == ["n1"]


def test_models_and_samples_survive_being_saved():
    learner = Learner()
    feed(learner, "n1")
    blob = msgspec.msgpack.encode(learner.samples)
    again = Learner(samples=msgspec.msgpack.decode(blob, type=dict[str, NodeSamples]))
    nodes = {"n1": GLM.name}
    learner.freeze(nodes)
    again.freeze(nodes)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(again.state), type=LearnerState)
    assert Learner(state).fits(nodes) == learner.fits(nodes)


def test_useless_records_are_left_out():
    learner = Learner()
    bad = [
        msgspec.structs.replace(decode_record(GLM.decode, 4), seconds=0.0),
        msgspec.structs.replace(decode_record(GLM.decode, 4), count=0),
        msgspec.structs.replace(prefill_record(GLM.prefill, 10, 0), t_uc=0),
    ]
    learner.add(Iterations("n1", 1.0, BOTH, bad), GLM.name)
    assert learner.progress() == {"n1": (0, 0)}


def test_models_of_nodes_that_left_are_bounded(monkeypatch):
    monkeypatch.setattr(fitting, "MOST_NODES", 3)
    learner = Learner()
    feed(learner, "n0")
    for i in range(6):
        learner.state.pools.clear()
        feed(learner, f"n{i}")
        assert learner.freeze({f"n{i}": GLM.name}) == [f"n{i}"]
    assert len(learner.state.fits) == 3 and "n5" in learner.state.fits


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000))
def test_a_bucket_is_bounded_and_spread_evenly_over_time(n):
    bucket = Bucket()
    for i in range(n):
        bucket.add(decode_record(GLM.decode, 1, count=i + 1))
    kept = [record.count - 1 for record in bucket.records]
    assert len(kept) <= PER_BUCKET
    assert len(kept) >= min(n, PER_BUCKET // 2)
    assert kept == list(range(0, n, bucket.stride))
