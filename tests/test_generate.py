"""Generated traces: their statistics, their shape, that they can be made again bit for bit."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import loadtest
from loadtest import command
from loadtest.formats import read_trace
from loadtest.generate import GenerateError, Shape, sessions, write_trace
from loadtest.trace_stats import COMPACTION_DROP_TOKENS, trace_stats
from loadtest.traces import Trace, common_blocks
from loadtest.workloads.agents import Agents

DEMO = Path(loadtest.__file__).parent / "data" / "demo.jsonl.gz"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("trace") / "full.jsonl"
    write_trace(str(path), Shape(sessions=40, seed=3))
    return read_trace(path)


def test_statistics_are_those_of_recorded_agents(full: Trace) -> None:
    stats = trace_stats(full)
    assert stats.main_steps == pytest.approx(69, rel=0.12)
    assert stats.all_steps == pytest.approx(222, rel=0.25)
    assert stats.main_prompt_tokens == pytest.approx(122_000, rel=0.10)
    assert stats.main_uncached_tokens == pytest.approx(4_509, rel=0.12)
    assert stats.main_reuse == pytest.approx(0.963, abs=0.007)
    assert stats.output_tokens == pytest.approx(440, rel=0.08)
    assert stats.sibling_reuse == pytest.approx(0.964, abs=0.01)
    assert 7 <= stats.pause_p50_s <= 13 and stats.pause_p99_s > 200
    assert stats.compactions > 10


def test_sub_agents_share_with_their_type_and_nothing_with_their_parent(full: Trace) -> None:
    related = 0
    for session in full.sessions:
        main = {block for path in session.branches[0].paths() for block in path.tolist()}
        firsts = [next(branch.paths()) for branch in session.branches[1:]]
        for first in firsts:
            assert main.isdisjoint(first.tolist())
        for a in range(len(firsts)):
            for b in range(a):
                shared = common_blocks(firsts[a], firsts[b])
                assert shared == 0 or shared / firsts[a].size == pytest.approx(0.964, abs=0.01)
                related += shared > 0
    assert related > 100


def test_some_sub_agents_run_at_once_and_some_beside_their_parent(full: Trace) -> None:
    at_once = beside = 0
    for session in full.sessions:
        spawns = [branch.steps[0].after for branch in session.branches[1:]]
        at_once += len(spawns) - len(set(spawns))
        for index, branch in enumerate(session.branches[1:], 1):
            ((_, spawner),) = branch.steps[0].after
            following = session.branches[0].steps[spawner + 1 : spawner + 2]
            beside += any(index not in {ref.branch for ref in step.after} for step in following)
    assert at_once > 50 and beside > 50


def test_compactions_keep_system_and_tools_only(full: Trace) -> None:
    reuse = []
    for session in full.sessions:
        steps = session.branches[0].steps
        for before, step in zip(steps, steps[1:], strict=False):
            if before.prompt_tokens - step.prompt_tokens > COMPACTION_DROP_TOKENS:
                assert step.shared * session.block_size * 2 < before.prompt_tokens
                assert step.continues == -1
                reuse.append(step.shared * session.block_size / step.prompt_tokens)
            else:
                assert step.continues >= 0
    assert sum(reuse) / len(reuse) == pytest.approx(0.23, abs=0.08)


def test_prompts_have_room_for_the_answers_before_them(full: Trace) -> None:
    for session in full.sessions:
        for branch in session.branches:
            for step in branch.steps:
                if step.continues >= 0 and branch.parent < 0:
                    before = branch.steps[step.continues]
                    assert step.prompt_tokens > before.prompt_tokens + before.output_tokens


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    shape = Shape(sessions=3, steps=8, context_scale=0.1, seed=11)
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz"):
        write_trace(str(tmp_path / name), shape)
        first = (tmp_path / name).read_bytes()
        write_trace(str(tmp_path / f"other-{name}"), shape)
        assert (tmp_path / f"other-{name}").read_bytes() == first
    traces = [read_trace(tmp_path / name) for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz")]
    assert len({tuple(step.prompt_tokens for step in t.sessions[0].branches[0].steps) for t in traces}) == 1
    # More sessions are more of the same; another seed is another trace.
    assert list(sessions(Shape(sessions=5, steps=8, context_scale=0.1, seed=11)))[:3] == list(sessions(shape))
    assert next(sessions(Shape(sessions=1, steps=8, context_scale=0.1, seed=12))) != next(sessions(shape))


def test_scale_steps_and_pauses_follow_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(str(path), Shape(sessions=60, steps=20, context_scale=0.3, max_pause_s=25.0, seed=1))
    trace = read_trace(path)
    stats = trace_stats(trace)
    assert stats.main_steps == pytest.approx(20, rel=0.15)
    assert 0.6 * 0.3 * 122_000 < stats.main_prompt_tokens < 1.1 * 0.3 * 122_000
    assert stats.largest_prompt_tokens <= 0.3 * 240_000
    pauses = [step.pause_s for session in trace.sessions for b in session.branches for step in b.steps]
    assert max(pauses) <= 25.0 + 1.0  # a sub-agent is spawned within a moment of its step's end


def test_the_command_prints_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl.gz"
    assert (
        command.generate(["--out", str(path), "--sessions", "2", "--steps", "5", "--context-scale", "0.1"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "sub-agents" in shown and "uncached tokens" in shown
    assert len(read_trace(path).sessions) == 2


def test_the_command_writes_other_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--sessions", "3", "--seed", "2", "--workload", "putnam"]
    assert command.generate(["--out", str(tmp_path / "t.jsonl"), *argv]) == 0
    assert "output tokens" in capsys.readouterr().out
    read = read_trace(tmp_path / "t.jsonl").sessions
    wanted = [Agents(workload="putnam", seed=2).session(n) for n in range(3)]
    assert [s.id for s in read] == [s.id for s in wanted] and [s.requests for s in read] == [
        s.requests for s in wanted
    ]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--out", "t.csv"], "must end in"),
        (["--out", "none/t.jsonl"], "cannot be written"),
        (["--out", "t.jsonl", "--sessions", "0"], "sessions must be at least 1"),
        (["--out", "t.jsonl", "--steps", "nan"], "steps must be"),
        (["--out", "t.jsonl", "--seed", "-1"], "seed must be"),
        (["--out", "t.jsonl", "--size", "3"], "--size"),
        (["--out", "t.jsonl", "--workload", "swe"], "claude-code | codex | osworld | putnam"),
        ([], "--out"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.generate(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("evolving: ") and complaint in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_finished_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(shape: Shape) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("loadtest.generate.sessions", fail)
    with pytest.raises(GenerateError, match="No space"):
        write_trace(str(tmp_path / "t.jsonl"), Shape(sessions=1))
    assert list(tmp_path.iterdir()) == []


def test_the_bundled_trace_suits_a_demo() -> None:
    trace = read_trace(DEMO)
    stats = trace_stats(trace)
    assert stats.sessions == 12 and stats.requests == 295
    assert stats.compactions >= 2 and stats.subagents >= 10
    assert stats.largest_prompt_tokens < 60_000


def test_the_bundled_trace_can_be_made_again() -> None:
    """By the command in its README, bit for bit but for the compressor."""
    shape = Shape(sessions=12, steps=15, context_scale=0.25, max_pause_s=200.0, seed=50)
    assert gzip.decompress(DEMO.read_bytes()).splitlines() == list(sessions(shape))
