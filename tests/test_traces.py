"""Trace files: what is read from them, and what is said about those that are none."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from loadtest.formats import read_trace
from loadtest.trace_stats import trace_stats
from loadtest.traces import Session, Step, StepRef, TraceError


def request(
    t: float, tokens: int, ids: list[int], *, out: int = 10, api: float | None = 2.0
) -> dict[str, object]:
    entry: dict[str, object] = {"t": t, "type": "n", "model": "m", "in": tokens, "out": out, "hash_ids": ids}
    return entry if api is None else entry | {"api_time": api}


def subagent(t: float, agent: str, *requests: dict[str, object]) -> dict[str, object]:
    return {"t": t, "type": "subagent", "agent_id": agent, "duration_ms": 1, "requests": list(requests)}


def weka(*requests: dict[str, object], name: str = "s") -> dict[str, object]:
    return {
        "id": name,
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": list(requests),
    }


TRIE = {
    "num_turns": 2,
    "input_prompt_length": 100,
    "assistant_response_length": [30, 5],
    "tool_call_output_length": [40, 200],
    "tool_call_latency": [0.5, 1.5],
    "final_assistant_response_length": 12,
}
MOONCAKE = {"timestamp": 27000, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]}


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def read_one(tmp_path: Path, *records: object, **options: str) -> Session:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(*records))
    return read_trace(path, **options).sessions[0]  # type: ignore[arg-type]


def branch(session: Session, key: str) -> list[Step]:
    return next(branch.steps for branch in session.branches if branch.key == key)


def number(session: Session, key: str) -> int:
    return [branch.key for branch in session.branches].index(key)


# --------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "name", ["t.jsonl", "t.json", "t.jsonl.gz", "t.jsonl.xz", "array.json", "pretty.json"]
)
def test_every_container_gives_the_same_trace(tmp_path: Path, name: str) -> None:
    records = [weka(request(0, 130, [1, 2]), name="a"), weka(request(0, 64, [1]), name="b")]
    data = lines(*records)
    if name.endswith(".gz"):
        data = gzip.compress(data)
    elif name.endswith(".xz"):
        data = lzma.compress(data)
    elif name == "array.json":
        data = json.dumps(records, indent=1).encode()
    elif name == "pretty.json":
        data, records = json.dumps(records[0], indent=1).encode(), records[:1]
    path = tmp_path / name
    path.write_bytes(data)
    trace = read_trace(path)
    assert trace.format == "Weka"
    assert [session.id for session in trace.sessions] == [record["id"] for record in records]
    assert trace.sessions[0].branches[0].steps[0].fresh.tolist() == [1, 2]


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "2.json").write_bytes(lines(weka(request(0, 64, [1]), name="second")))
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(lines(weka(request(0, 64, [1]), name="first"))))
    (tmp_path / "notes.txt").write_text("no trace")
    assert [session.id for session in read_trace(tmp_path).sessions] == ["first", "second"]


GOOD = weka(request(0, 130, [1, 2]))


@pytest.mark.parametrize(
    ("data", "place", "complaint"),
    [
        (b"TIMESTAMP,Tokens\n2023,4808\n", "line 1", "not JSON"),
        (b"\x00\x01\x02\xff\n", "line 1", "not JSON"),
        (b"", "", "holds no requests"),
        (b"\n\n", "", "holds no requests"),
        (lines({"prompt": "hello"}), "line 1", "first record's keys are prompt"),
        (lines([1, 2]), "record 1", "a record is a JSON object"),
        (lines(weka()), "", "holds no requests"),
        (lines(GOOD) + b'{"id": "x", "block_size"\n', "line 2", "not JSON"),
        (lines(GOOD) + b"\n" + lines({"id": "x"}), "line 3", "not a Weka record"),
        (lines(GOOD, TRIE), "line 2", "not a Weka record"),
        (lines(weka(request(0, 1000, [1, 2]))), "line 1", "2 hash_ids for 1000 tokens"),
        (lines(weka(request(0, 0, []))), "line 1", "0 input"),
        (lines(weka(request(0, 64, [1], out=-1))), "line 1", "-1 output"),
        (lines(weka(request(0, 64, [1 << 70]))), "line 1", ""),
        (lines(weka({"t": 3, "type": "n", "in": 64})), "line 1", "the request at 3 s lacks"),
        (lines(weka(request(0, 64, [1])) | {"block_size": 0}), "line 1", "block_size is 0"),
        (lines(weka(subagent(1, "a", request(0, 64, [1])))), "line 1", "no request of its own"),
        (lines(TRIE | {"num_turns": 3}), "line 1", "num_turns is 3"),
        (lines(TRIE | {"tool_call_latency": [1, -1]}), "line 1", "negative"),
        (lines(MOONCAKE | {"hash_ids": [1, 2, 3]}), "line 1", "3 hash_ids for 1000 tokens"),
        (gzip.compress(lines(GOOD) * 2000)[:-20], "line", "truncated or damaged"),
        (lzma.compress(lines(GOOD) * 2000)[:-20], "line", "truncated or damaged"),
        (gzip.compress(b"x")[:10] + b"\xff" * 30, "line 1", "truncated or damaged"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, data: bytes, place: str, complaint: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and place in text and complaint in text and "\n" not in text


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="no trace file"):
        read_trace(tmp_path)


# --------------------------------------------------------------------------------- Weka


def test_steps_share_continue_and_pause(tmp_path: Path) -> None:
    session = read_one(
        tmp_path,
        weka(
            request(0, 130, [1, 2], api=2.0),
            request(5, 200, [1, 2, 3], api=None),  # ends when it starts, for all we know
            request(9, 90, [1], api=1.0),  # compacted
            request(9.5, 300, [1, 4, 5, 6], out=0),  # recorded start before the end of the one before
        ),
    )
    steps = branch(session, "main")
    assert [step.shared for step in steps] == [0, 2, 1, 1]
    assert [step.fresh.tolist() for step in steps] == [[1, 2], [3], [], [4, 5, 6]]
    assert [step.continues for step in steps] == [-1, 0, -1, 2]
    assert [step.pause_s for step in steps] == [0.0, 3.0, 4.0, 0.0]
    assert [step.after for step in steps] == [(), *((StepRef(0, i),) for i in range(3))]
    assert [step.output_tokens for step in steps] == [10, 10, 10, 1]
    # A tail begins the block that the next prompt has there, if that one goes on.
    assert [step.tail for step in steps][:3:2] == [3, 4]
    assert steps[1].tail < 0 and steps[3].tail < 0 and steps[1].tail != steps[3].tail
    assert [path.tolist() for path in session.branches[0].paths()] == [[1, 2], [1, 2, 3], [1], [1, 4, 5, 6]]


def test_a_named_partial_block_is_the_tail(tmp_path: Path) -> None:
    session = read_one(tmp_path, weka(request(0, 130, [1, 2, 77]), request(5, 256, [1, 2, 3, 4])))
    first, second = branch(session, "main")
    assert first.fresh.tolist() == [1, 2] and first.tail == 3
    assert second.continues == 0 and second.fresh.tolist() == [3, 4]
    alone = read_one(tmp_path, weka(request(0, 130, [1, 2, 77])))
    assert branch(alone, "main")[0].tail == 77


def test_a_side_request_does_not_cut_the_conversation(tmp_path: Path) -> None:
    session = read_one(
        tmp_path,
        weka(request(0, 130, [1, 2]), request(1, 70, [9]), request(2, 260, [1, 2, 3, 4])),
    )
    steps = branch(session, "main")
    assert [step.continues for step in steps] == [-1, -1, 0]
    assert [step.shared for step in steps] == [0, 0, 0]
    assert steps[0].tail == 3


def test_sub_agents_start_and_are_awaited_in_recorded_order(tmp_path: Path) -> None:
    session = read_one(
        tmp_path,
        weka(
            request(0, 64, [1], api=10.0),
            subagent(
                12, "a", request(0, 64, [20], api=5.0), request(8, 128, [20, 21], api=2.0)
            ),  # ends at 22
            subagent(13, "b", request(1, 64, [20], api=60.0)),  # ends at 74
            request(25, 128, [1, 2], api=5.0),
            request(80, 192, [1, 2, 3], api=5.0),
        ),
    )
    main, a, b = (number(session, key) for key in ("main", "a", "b"))
    steps = branch(session, "main")
    assert session.branches[a].parent == session.branches[b].parent == main
    assert branch(session, "a")[0].after == (StepRef(main, 0),)
    assert branch(session, "a")[0].pause_s == 2.0
    assert branch(session, "a")[1].pause_s == 3.0
    assert branch(session, "b")[0].pause_s == 4.0
    assert set(steps[1].after) == {StepRef(main, 0), StepRef(a, 1)}
    assert steps[1].pause_s == 3.0  # after sub-agent a, not after the main step
    assert set(steps[2].after) == {StepRef(main, 1), StepRef(b, 0)}
    assert steps[2].pause_s == 6.0


def test_nested_and_like_named_sub_agents(tmp_path: Path) -> None:
    session = read_one(
        tmp_path,
        weka(
            request(0, 64, [1], api=1.0),
            subagent(
                2,
                "a",
                request(0, 64, [5], api=1.0),
                subagent(2, "a", request(1, 64, [6], api=1.0)),
                request(9, 128, [5, 7]),
            ),
            request(30, 128, [1, 2]),
        ),
    )
    assert [b.key for b in session.branches] == ["main", "a", "a.2"]
    assert [b.parent for b in session.branches] == [-1, 0, 1]
    inner = branch(session, "a.2")[0]
    assert inner.after == (StepRef(1, 0),) and inner.pause_s == 2.0  # spawned at 4, sent at 5, after 3
    assert set(branch(session, "a")[1].after) == {StepRef(1, 0), StepRef(2, 0)}
    assert set(branch(session, "main")[1].after) == {StepRef(0, 0), StepRef(1, 1)}


def test_a_sub_agent_as_quick_as_its_spawner_is_no_circle(tmp_path: Path) -> None:
    session = read_one(
        tmp_path,
        weka(
            request(0, 64, [1]),
            request(10, 128, [1, 2], api=None),
            subagent(10, "a", request(0, 64, [9], api=None)),
            request(10.2, 192, [1, 2, 3]),
        ),
    )
    assert branch(session, "a")[0].after == (StepRef(0, 1),)
    assert branch(session, "main")[1].after == (StepRef(0, 0),)
    assert set(branch(session, "main")[2].after) == {StepRef(0, 1), StepRef(1, 0)}


def test_inner_times_from_the_session(tmp_path: Path) -> None:
    record = weka(
        request(0, 64, [1], api=10.0),
        subagent(12, "a", request(15, 64, [20], api=5.0)),
        request(25, 128, [1, 2]),
    )
    session = read_one(tmp_path, record, inner_t="session")
    assert branch(session, "a")[0].pause_s == 5.0
    assert branch(session, "main")[1].pause_s == 5.0
    assert branch(read_one(tmp_path, record), "a")[0].pause_s == 17.0
    wrong = weka(request(0, 64, [1]), subagent(12, "a", request(0, 64, [20])))
    with pytest.raises(TraceError, match="count from the spawn"):
        read_one(tmp_path, wrong, inner_t="session")


# --------------------------------------------------------------------------------- Trie, Mooncake


def test_trie(tmp_path: Path) -> None:
    session = read_one(tmp_path, TRIE)
    steps = branch(session, "main")
    assert [step.prompt_tokens for step in steps] == [100, 170, 375]
    assert [step.output_tokens for step in steps] == [30, 5, 12]
    assert [step.pause_s for step in steps] == [0.0, 0.5, 1.5]
    assert [step.continues for step in steps] == [-1, 0, 1]
    assert [step.shared for step in steps] == [0, 1, 2]


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(MOONCAKE, MOONCAKE | {"input_length": 1024, "hash_ids": [4, 10]}))
    trace = read_trace(path)
    assert trace.format == "Mooncake" and trace.requests == 2
    first, second = (session.branches[0].steps[0] for session in trace.sessions)
    assert {session.scope for session in trace.sessions} == {"shared"}
    assert (first.fresh.tolist(), first.tail, first.output_tokens) == ([4], 9, 7)
    assert second.fresh.tolist() == [4, 10]


# --------------------------------------------------------------------------------- real files


def real(name: str) -> Path:
    folder = os.environ.get("EI_TRACES")
    if not folder:
        pytest.skip("EI_TRACES is not set: it names the folder of the recorded traces")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


def test_recorded_sessions() -> None:
    trace = read_trace(real("weka_small_12.jsonl.xz"))
    stats = trace_stats(trace)
    assert (stats.sessions, stats.requests, stats.subagents, stats.compactions) == (12, 609, 9, 2)
    assert stats.main_reuse > 0.93
    for session in trace.sessions:
        order: set[StepRef] = set()
        waiting = {
            StepRef(b, s) for b, branch in enumerate(session.branches) for s in range(len(branch.steps))
        }
        while waiting:
            ready = {
                ref for ref in waiting if set(session.branches[ref.branch].steps[ref.step].after) <= order
            }
            assert ready, "the steps of a session wait for each other in a circle"
            order |= ready
            waiting -= ready


def test_recorded_trie_and_mooncake() -> None:
    trie = read_trace(real("office_work_8k_first_rows_sample.jsonl"))
    assert (trie.format, len(trie.sessions)) == ("Trie", 5)
    mooncake = read_trace(real("conversation_trace.jsonl.gz"))
    assert (mooncake.format, mooncake.requests) == ("Mooncake", 12031)


@pytest.mark.parametrize("name", ["AzureLLMInferenceTrace_code.csv.gz", "cctrace_phase0_usage_only.json"])
def test_recorded_files_that_are_no_traces(name: str) -> None:
    with pytest.raises(TraceError):
        read_trace(real(name))
