"""Workloads: their statistics beside the paper's, sessions by number, what tells them apart."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest.content import Blocks, BranchPrompts
from loadtest.formats import read_trace
from loadtest.generate import Shape, write_trace
from loadtest.ideal import IdealBranch, IdealCache
from loadtest.trace_stats import trace_stats
from loadtest.traces import Session, Trace
from loadtest.workloads.agents import PROFILES, WORKLOADS, Agents, Workload
from loadtest.workloads.codex import PROFILE as CODEX
from loadtest.workloads.draws import Lognormal, Mixture

SESSIONS = 60


def _trace(agents: Agents, count: int = SESSIONS) -> Trace:
    return Trace(agents.workload, "Weka", [agents.session(n) for n in range(count)])


def _outputs(trace: Trace) -> np.ndarray:
    steps = (step for s in trace.sessions for branch in s.branches for step in branch.steps)
    return np.array([step.output_tokens for step in steps])


def _mean_pause_s(trace: Trace) -> float:
    pauses = (step.pause_s for s in trace.sessions for branch in s.branches for step in branch.steps)
    return math.fsum(pauses) / trace.requests


def _hit_rate(trace: Trace) -> float:
    """h*, with outputs held: the cached part of an output is that of the next step's prompt."""
    held = sum(
        branch.steps[step.continues].output_tokens
        for session in trace.sessions
        for branch in session.branches
        for step in branch.steps
        if step.continues >= 0
    )
    stats = trace_stats(trace)
    return 1 - (stats.uncached_tokens - held / stats.requests) / stats.prompt_tokens


@pytest.fixture(scope="module")
def putnam() -> Trace:
    return _trace(Agents(workload="putnam", seed=1))


@pytest.fixture(scope="module")
def osworld() -> Trace:
    return _trace(Agents(workload="osworld", seed=1))


@pytest.fixture(scope="module")
def codex() -> Trace:
    return _trace(Agents(workload="codex", seed=1), 40)


def test_putnam_decodes_long_outputs_in_one_growing_context(putnam: Trace) -> None:
    stats = trace_stats(putnam)
    outputs = _outputs(putnam)
    assert stats.subagents == 0 and stats.compactions == 0
    assert all(s.continues == i - 1 for session in putnam.sessions for i, s in enumerate(_main(session)))
    assert _hit_rate(putnam) == pytest.approx(0.990, abs=0.003)
    assert stats.main_reuse == pytest.approx(0.965, abs=0.004)
    # At 7 ms a token E2E is 14 s, and that of the slowest twentieth five times as long (Table D.1).
    assert 0.6 + 0.007 * outputs.mean() == pytest.approx(14.0, rel=0.12)
    assert 1.2 + 0.007 * np.percentile(outputs, 95) == pytest.approx(72.6, rel=0.12)
    assert _mean_pause_s(putnam) == pytest.approx(10.0, rel=0.08)
    assert 60_000 < stats.prompt_tokens < 79_000
    assert stats.main_steps == pytest.approx(52, rel=0.12)


def test_osworld_prefills_screenshots_and_answers_in_few_tokens(osworld: Trace) -> None:
    stats = trace_stats(osworld)
    outputs = _outputs(osworld)
    assert _hit_rate(osworld) == pytest.approx(0.939, abs=0.005)
    assert outputs.mean() * 0.0065 == pytest.approx(2.6, rel=0.06)
    assert _mean_pause_s(osworld) == pytest.approx(1.35, rel=0.08)
    assert stats.uncached_tokens - stats.output_tokens == pytest.approx(4_300, rel=0.06)
    assert stats.prompt_tokens == pytest.approx(72_000, rel=0.1)
    assert stats.main_steps == pytest.approx(30, rel=0.15)
    assert 0.4 < stats.subagents / stats.sessions < 1.3
    for session in osworld.sessions:
        for branch in session.branches:
            for before, step in zip(branch.steps, branch.steps[1:], strict=False):
                if step.prompt_tokens < 250_000:  # what a full context takes in is cut
                    assert step.prompt_tokens - before.prompt_tokens - before.output_tokens >= 2_700


def test_codex_is_compacted_at_its_limit_and_pauses_as_a_coding_agent(codex: Trace) -> None:
    stats = trace_stats(codex)
    assert stats.largest_prompt_tokens <= 244_800
    assert 0.3 < stats.compactions / stats.sessions < 1.2
    assert 0.5 < stats.subagents / stats.sessions < 2.5
    assert stats.main_steps == pytest.approx(110, rel=0.15)
    assert stats.main_prompt_tokens == pytest.approx(117_000, rel=0.1)
    assert stats.output_tokens == pytest.approx(600, rel=0.1)
    assert _hit_rate(codex) == pytest.approx(0.979, abs=0.004)
    assert stats.pause_p50_s == pytest.approx(9.7, rel=0.12)
    compacted = [
        step.prompt_tokens for session in codex.sessions for step in _main(session)[1:] if step.continues < 0
    ]
    assert compacted and all(9_000 < tokens < 9_000 + 24_000 for tokens in compacted)


@pytest.mark.parametrize("workload", ["claude-code", "codex"])
def test_coding_agents_with_capped_pauses_wait_as_in_the_paper(workload: Workload) -> None:
    trace = _trace(Agents(workload=workload, seed=1, max_pause_s=30.0), 30)
    assert 12.0 < _mean_pause_s(trace) < 14.5


def test_workloads_differ_in_prefill_and_decode_work(putnam: Trace, osworld: Trace, codex: Trace) -> None:
    def ratio(trace: Trace) -> float:
        stats = trace_stats(trace)
        return (stats.uncached_tokens - stats.output_tokens) / stats.output_tokens

    assert ratio(putnam) < 0.6 < 2 < ratio(codex) < 5 < 9 < ratio(osworld)


@pytest.mark.parametrize("workload", ["putnam", "osworld"])
def test_hit_rate_is_that_of_an_ideal_cache_in_a_replay(workload: Workload) -> None:
    """The statistics' formula, beside the tokens that a replay would send and get."""
    session = Agents(workload=workload, seed=9, steps=12.0).session(2)
    blocks = Blocks("instance", session.block_size, "local")
    cache = IdealCache()
    held = prompts = 0
    random = np.random.default_rng(0)
    for branch in session.branches:
        made, ideal = BranchPrompts(blocks, branch), IdealBranch(cache, 64)
        for number, step in enumerate(branch.steps):
            prompt = made.next()
            held, prompts = held + ideal.send(prompt), prompts + step.prompt_tokens
            output = random.integers(1024, 131_072, step.output_tokens).astype(np.int32)
            made.output(number, output.tolist())
            ideal.output(output)
    assert _hit_rate(Trace(workload, "Weka", [session])) == pytest.approx(held / prompts, abs=0.002)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_session_n_is_the_files_and_needs_no_other(workload: Workload, tmp_path: Path) -> None:
    shape = Shape(workload=workload, sessions=5, steps=6, seed=4, max_pause_s=9.0)
    write_trace(str(tmp_path / "t.jsonl"), shape)
    read = read_trace(tmp_path / "t.jsonl").sessions
    agents = Agents(workload=workload, steps=6, seed=4, max_pause_s=9.0)
    for number in (4, 0, 2, 4):
        assert _text(agents.session(number)) == _text(read[number])
    assert [s.id for s in islice(agents.endless(3), 2)] == [s.id for s in read[3:]]
    far = agents.session(1_000_000)
    assert _text(far) == _text(agents.session(1_000_000)) and far.id.endswith("_1000000")
    with pytest.raises(ValueError, match="at least 0"):
        agents.session(-1)


def test_no_two_sessions_are_alike() -> None:
    sessions = [
        Agents(workload=workload, steps=4, seed=seed).session(number)
        for workload in WORKLOADS
        for seed in (0, 1)
        for number in (0, 1)
    ]
    assert len({session.id for session in sessions}) == len(sessions)
    assert len({tuple(step.output_tokens for step in _main(session)) for session in sessions}) == len(
        sessions
    )

    # Nor do workloads of one seed draw alike: as many steps in the same sessions, say.
    alike: list[Workload] = ["claude-code", "putnam", "osworld"]
    counts = [[len(_main(Agents(workload=w, steps=20.0).session(n))) for n in range(8)] for w in alike]
    assert len({tuple(steps) for steps in counts}) == len(alike)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_knobs_change_what_they_name(workload: Workload) -> None:
    few = Agents(workload=workload, steps=5.0, context_scale=0.2, max_pause_s=2.0, seed=1)
    trace, whole = _trace(few, 40), _trace(msgspec.structs.replace(few, context_scale=1.0), 40)
    assert trace_stats(trace).main_steps == pytest.approx(5, rel=0.25)
    mains = [step for session in trace.sessions for step in _main(session)]
    assert max(step.pause_s for step in mains) <= 2.0 + 1.0  # a sub-agent is spawned within a moment
    firsts, whole_firsts = (
        [_main(session)[0].prompt_tokens for session in t.sessions] for t in (trace, whole)
    )
    assert np.mean(firsts) == pytest.approx(0.2 * np.mean(whole_firsts), rel=0.06)  # 64 tokens at least


def test_without_context_management_a_session_ends_at_its_limit() -> None:
    limit = PROFILES["osworld"].limit_tokens[0]
    session = Agents(workload="osworld", steps=200.0).session(0)
    steps = _main(session)
    assert limit - 13_000 < steps[-1].prompt_tokens <= limit
    assert all(step.continues == i - 1 for i, step in enumerate(steps))
    (last,) = [e for e in _entries(Agents(workload="osworld", steps=200.0), 0) if e.get("stop") == "end_turn"]
    assert last["in"] == steps[-1].prompt_tokens
    assert len(_main(Agents(workload="codex", steps=400.0).session(0))) > 120  # it is compacted instead


def test_draws_have_their_means_and_bounds() -> None:
    random = np.random.default_rng(1)
    lengths = Lognormal.of_mean(100.0, 0.5, plus=10.0, most=400.0)
    drawn = [lengths.draw(random) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(110, rel=0.02) and min(drawn) > 10 and max(drawn) <= 400
    median = Lognormal.of_median(9.0, 1.0)
    assert np.median([median.draw(random) for _ in range(20_000)]) == pytest.approx(9, rel=0.04)
    mixture = Mixture(0.25, Lognormal(0.0, 0.0, plus=9.0), Lognormal(0.0, 0.0))
    both = [mixture.draw(random) for _ in range(20_000)]
    assert set(both) == {1.0, 10.0} and np.mean(both) == pytest.approx(3.25, rel=0.03)


def test_profiles_are_named_apart() -> None:
    assert set(PROFILES) == set(WORKLOADS)
    assert len({profile.name for profile in PROFILES.values()}) == len(PROFILES)
    assert len({profile.salt for profile in PROFILES.values()}) == len(PROFILES)
    assert CODEX.compacted_tokens is not None


def _main(session: Session) -> list:
    return session.branches[0].steps


def _entries(agents: Agents, number: int) -> list[dict]:
    own: list[dict] = msgspec.json.decode(agents.record(number))["requests"]
    return [entry for entry in own if entry["type"] != "subagent"]


def _text(session: Session) -> bytes:
    return msgspec.json.encode(session, enc_hook=lambda array: array.tolist())
