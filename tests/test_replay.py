"""Replays against a small server: what reaches it, in which order, and what the report says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import lzma
import math
import os
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from conftest import eventually
from loadtest_server import FakeServer, Seen, common_prefix
from test_traces import MOONCAKE, TRIE, lines, real, request, subagent, weka

from loadtest import command
from loadtest.client import ServerError
from loadtest.formats import read_trace
from loadtest.replay import Plan, Replay
from loadtest.report import Report
from loadtest.traces import Trace

SPEEDUP = 100.0


def trace_of(tmp_path: Path, *records: object) -> Trace:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(*records))
    return read_trace(path)


async def play(
    server: FakeServer,
    trace: Trace,
    *,
    agents: int = 4,
    speedup: float | None = SPEEDUP,
    duration_s: float | None = None,
    max_pause_s: float | None = None,
    model: str = "",
    timeout_s: float = 20.0,
) -> Report:
    plan = Plan(
        url=server.url,
        agents=agents,
        speedup=speedup,
        duration_s=duration_s,
        max_pause_s=max_pause_s,
        model=model,
        timeout_s=timeout_s,
        run_id="run",
    )
    replay = Replay(trace, plan)
    await asyncio.wait_for(replay.run(), 60.0)
    return replay.report({"agents": agents}, "test")


def with_agents(api: float = 1.0) -> dict[str, object]:
    """A session with two sub-agents that run at once, of which the main branch waits for the first."""
    return weka(
        request(0, 200, [1, 2, 3], out=40, api=4.0),
        subagent(
            5,
            "a",
            request(0, 150, [20, 21], out=5, api=1.0),
            request(3, 400, [20, 21, 22, 23, 24, 25], api=1.0),
        ),
        subagent(6, "b", request(0, 150, [20, 21], out=6, api=60.0)),
        request(12, 500, [1, 2, 3, 4, 5, 6, 7], out=30, api=2.0),
        request(90, 300, [1, 30, 31, 32], out=3, api=api),
    )


# --------------------------------------------------------------------------------- on the wire


def check_wire(
    requests: list[Seen], record: dict[str, object], instance: str, max_pause_s: float, speedup: float
) -> None:
    """A played session against its raw record: lengths, sharing, outputs, order and pauses."""
    size = record["block_size"]
    assert isinstance(size, int)
    branches: dict[str, list[dict[str, object]]] = {"main": []}
    for entry in record["requests"]:  # type: ignore[attr-defined]
        if entry["type"] == "subagent":
            branches[entry["agent_id"]] = entry["requests"]
        else:
            branches["main"].append(entry)
    by_branch: dict[str, list[Seen]] = defaultdict(list)
    for seen in requests:
        by_branch[seen.branch].append(seen)
    assert set(by_branch) == {f"{instance}/{key}" for key, entries in branches.items() if entries}
    raw_of: dict[int, dict[str, object]] = {}
    for key, entries in branches.items():
        sent = by_branch[f"{instance}/{key}"]
        assert [seen.prompt.size for seen in sent] == [entry["in"] for entry in entries]
        assert [seen.output.size for seen in sent] == [max(1, entry["out"]) for entry in entries]  # type: ignore[call-overload]
        for number, (seen, entry) in enumerate(zip(sent, entries, strict=True)):
            assert seen.answered and seen.body["ignore_eos"] is True and seen.body["temperature"] == 0
            assert seen.headers.get("X-EI-Parent-Branch") == (None if key == "main" else f"{instance}/main")
            assert seen.headers.get("X-EI-Branch-Final") == ("true" if number == len(entries) - 1 else None)
            raw_of[id(seen)] = entry
        for before, after in zip(sent, sent[1:], strict=False):
            old, new = raw_of[id(before)], raw_of[id(after)]
            pause_s = new["t"] - old["t"] - (old.get("api_time") or 0.0)  # type: ignore[operator]
            if key != "main" or len(branches) == 1:
                assert after.arrived >= before.end + max(0.0, min(pause_s, max_pause_s)) / speedup - 1e-3
            else:
                assert after.arrived >= before.end
    # Sharing, of each prompt with the few before it in its branch and in order of sending.
    ordered = sorted(requests, key=lambda seen: seen.arrived)
    known: set[int] = set()
    for place, seen in enumerate(ordered):
        ids = raw_of[id(seen)]["hash_ids"]
        assert isinstance(ids, list)
        branch = [other for other in ordered[:place] if other.branch == seen.branch]
        for other in [*branch[-4:], *ordered[max(0, place - 6) : place], *ordered[:2]]:
            other_ids = raw_of[id(other)]["hash_ids"]
            assert isinstance(other_ids, list)
            shared = next(
                (i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b),
                min(len(ids), len(other_ids)),
            )
            common = common_prefix(seen.prompt, other.prompt) if other is not seen else math.inf
            assert common >= shared * size
            if shared < min(len(ids), len(other_ids)):
                assert common < (shared + 1) * size
        if branch:
            last = branch[-1]
            last_ids = raw_of[id(last)]["hash_ids"]
            assert isinstance(last_ids, list)
            goes_on = ids[: len(last_ids)] == last_ids and seen.prompt.size >= last.prompt.size
            if goes_on and not known.intersection(ids[len(last_ids) :]):
                carried = np.concatenate((last.prompt, last.output))[: seen.prompt.size]
                assert np.array_equal(seen.prompt[: carried.size], carried)
        known.update(ids)


async def test_a_session_on_the_wire(tmp_path: Path) -> None:
    record = with_agents()
    async with FakeServer(delay_s=0.02) as server:
        report = await play(server, trace_of(tmp_path, record), max_pause_s=10.0)
    assert (report.requests, report.failed, report.wrong_lengths) == (6, 0, 0)
    check_wire(server.requests, record, "run-0", 10.0, SPEEDUP)
    main, a, b = (server.branch(f"run-0/{key}") for key in ("main", "a", "b"))
    # Each sub-agent follows the first main step; the second waits for a, the third for b.
    for sub, pause_s in ((a[0], 1.0), (b[0], 2.0)):
        assert sub.arrived >= main[0].end + pause_s / SPEEDUP
    assert main[1].arrived >= a[1].end + 3.0 / SPEEDUP
    assert main[2].arrived >= b[0].end + 10.0 / SPEEDUP
    # b's two blocks are a's, and no more than that.
    assert 128 <= common_prefix(a[0].prompt, b[0].prompt) < 150
    assert np.array_equal(main[1].prompt[200:240], main[0].output)
    assert common_prefix(main[1].prompt, main[2].prompt) == 64
    assert server.ended == []
    assert report.kv_hit_rate == pytest.approx(report.ideal_hit_rate)
    assert report.lost_kv_reuse == pytest.approx(0.0)


@pytest.mark.parametrize("place", [0, 1, 4])
async def test_recorded_sessions_on_the_wire(place: int) -> None:
    path = real("weka_small_12.jsonl.xz")
    with lzma.open(path) as file:
        record = json.loads(file.read().splitlines()[place])
    trace = read_trace(path)
    alone = Trace(path=trace.path, format=trace.format, sessions=trace.sessions[place : place + 1])
    async with FakeServer() as server:
        report = await play(server, alone, agents=1, speedup=300.0, max_pause_s=30.0)
    assert (report.requests, report.failed, report.wrong_lengths) == (alone.requests, 0, 0)
    check_wire(server.requests, record, "run-0", 30.0, 300.0)
    assert report.ideal_hit_rate is not None and report.ideal_hit_rate > 0.75
    assert report.kv_hit_rate == pytest.approx(report.ideal_hit_rate, abs=0.002)


async def test_trie_and_mooncake_on_the_wire(tmp_path: Path) -> None:
    async with FakeServer() as server:
        await play(server, trace_of(tmp_path, TRIE))
        steps = server.branch("run-0/main")
        assert [(s.prompt.size, s.output.size) for s in steps] == [(100, 30), (170, 5), (375, 12)]
        assert np.array_equal(steps[1].prompt[:130], np.concatenate((steps[0].prompt, steps[0].output)))
        assert np.array_equal(steps[2].prompt[:175], np.concatenate((steps[1].prompt, steps[1].output)))
    other = MOONCAKE | {"input_length": 1024, "hash_ids": [4, 10]}
    async with FakeServer() as server:
        report = await play(server, trace_of(tmp_path, MOONCAKE, other, MOONCAKE), agents=1)
        first, second, third = server.requests
        assert common_prefix(first.prompt, second.prompt) == 512
        assert np.array_equal(first.prompt, third.prompt) and first.branch != third.branch
    assert report.ideal_hit_rate == pytest.approx((512 + 960) / 3024)
    assert report.kv_hit_rate == pytest.approx(report.ideal_hit_rate)


# --------------------------------------------------------------------------------- the closed loop


async def test_agents_at_once_and_every_session_once(tmp_path: Path) -> None:
    records = [weka(request(0, 100, [1]), request(3, 200, [1, 2, 3]), name=f"s{i}") for i in range(7)]
    async with FakeServer(delay_s=0.03) as server:
        report = await play(server, trace_of(tmp_path, *records), agents=3)
    assert (report.requests, report.sessions, report.failed) == (14, 7, 0)
    spans = [(seen.arrived, seen.end) for seen in server.requests]
    running = [sum(a <= at < b for a, b in spans) for at, _ in spans]
    assert max(running) == 3
    firsts = [seen for seen in server.requests if seen.prompt.size == 100]
    assert [seen.branch for seen in firsts] == [f"run-{i}/main" for i in range(7)]
    for a in firsts:  # sessions share nothing, though their ids are alike
        assert all(common_prefix(a.prompt, b.prompt) < 3 for b in firsts if b is not a)


async def test_with_a_duration_the_trace_repeats_as_new_instances(tmp_path: Path) -> None:
    record = weka(request(0, 100, [1]), request(3, 200, [1, 2, 3]), request(1000, 300, [1, 2, 3, 4]))
    async with FakeServer() as server:
        report = await play(server, trace_of(tmp_path, record), agents=5, duration_s=30.0)
    assert report.failed == 0 and report.requests == 10
    assert len({seen.branch for seen in server.requests}) == 5
    # The third step never came, so nothing told the server that the branch is final.
    assert sorted(server.ended) == [f"run-{i}/main" for i in range(5)]
    async with FakeServer() as server:
        report = await play(server, trace_of(tmp_path, weka(request(0, 100, [1]))), agents=2, duration_s=10.0)
    assert report.requests == len({seen.branch for seen in server.requests}) > 2
    assert server.ended == []


async def test_the_pause_cap_and_the_speedup_of_the_cluster(tmp_path: Path) -> None:
    record = weka(request(0, 100, [1], api=1.0), request(100_001, 200, [1, 2, 3]))
    async with FakeServer() as server:
        server.cluster = {
            "speedup": 50.0,
            "nodes": [{"node": "a", "phase": "prefill"}, {"node": "b", "phase": "decode"}],
            "split": {"prefill": 1, "decode": 1},
        }
        report = await play(server, trace_of(tmp_path, record), speedup=None, max_pause_s=10.0)
    first, second = server.requests
    assert second.arrived >= first.end + 10.0 / 50.0
    assert report.settings["speedup"] == 50.0
    assert report.duration_s >= 10.0
    assert report.splits == [(0.0, 1, 1)] and report.switches == 0


async def test_a_switch_of_the_cluster_is_seen(tmp_path: Path) -> None:
    record = weka(request(0, 100, [1]), request(40, 200, [1, 2, 3]))
    async with FakeServer() as server:
        server.cluster = {
            "speedup": 20.0,
            "nodes": [{"node": "a", "phase": "prefill"}, {"node": "b", "phase": "decode"}],
            "split": {"prefill": 1, "decode": 1},
        }
        playing = asyncio.create_task(play(server, trace_of(tmp_path, record), speedup=None))
        await asyncio.wait_for(server.arrival.wait(), 10.0)
        server.cluster = server.cluster | {
            "nodes": [{"node": "a", "phase": "decode"}, {"node": "b", "phase": "decode"}],
            "split": {"prefill": 0, "decode": 2},
        }
        report = await playing
    assert [split[1:] for split in report.splits] == [(1, 1), (0, 2)]
    assert report.switches == 1


# --------------------------------------------------------------------------------- failures


async def test_a_refused_request_is_sent_again(tmp_path: Path) -> None:
    async with FakeServer() as server:
        server.refusals = [(503, {"Retry-After": "0"}), (429, {"Retry-After": "0.1"})]
        report = await play(server, trace_of(tmp_path, weka(request(0, 100, [1]))))
    assert (report.requests, report.failed, report.retries) == (1, 0, 2)


async def test_a_failed_step_is_counted_and_the_session_goes_on(tmp_path: Path) -> None:
    record = weka(request(0, 100, [1]), request(3, 200, [1, 2, 3]), request(6, 300, [1, 2, 3, 4]))
    async with FakeServer() as server:
        server.refusals = [(400, {})]
        report = await play(server, trace_of(tmp_path, record))
        assert report.failures == {"HTTP 400: overloaded": 1} and report.requests == 3
        assert [seen.prompt.size for seen in server.requests] == [200, 300]
        assert server.ended == []
    async with FakeServer() as server:
        server.broken = 1
        report = await play(server, trace_of(tmp_path, record))
        assert report.failed == 1 and report.requests == 3
        assert next(iter(report.failures)).startswith(("stream", "connection"))
    async with FakeServer() as server:
        server.refusals = [(500, {})]
        report = await play(server, trace_of(tmp_path, weka(request(0, 100, [1]))))
        # The request that should have ended the branch failed: it is ended by itself.
        assert report.failed == 1 and server.ended == ["run-0/main"]


CHUNK = b'data: {"choices":[{"index":0,"text":"ab","token_ids":[97,98]}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":2,"total_tokens":102}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (CHUNK, "stream: ended early"),
        (b"", "stream: ended early"),
        (CHUNK + USAGE, "stream: ended early"),
        (CHUNK + DONE, "stream: without usage"),
        (CHUNK + b"data: {not json}\n\n" + DONE, "stream: an event that is no completion chunk"),
        (
            CHUNK
            + b'data: {"error":{"message":"node n1 died","type":"server_error","code":"node_lost"}}\n\n',
            "stream: node_lost",
        ),
        (b": comment\r\n\r\n" + CHUNK.replace(b"\n", b"\r\n") + USAGE + DONE, None),
    ],
)
async def test_streams_count_only_when_whole(tmp_path: Path, stream: bytes, reason: str | None) -> None:
    async with FakeServer() as server:
        server.raw = [stream[at : at + 7] for at in range(0, len(stream), 7)]
        report = await play(server, trace_of(tmp_path, weka(request(0, 100, [1], out=2))))
    assert report.failures == ({} if reason is None else {reason: 1})
    assert report.requests == 1 and report.wrong_lengths == 0
    assert report.kv_hit_rate is None


async def test_answers_of_other_lengths_than_asked_for_are_counted(tmp_path: Path) -> None:
    async with FakeServer() as server:
        server.raw = [CHUNK, USAGE, DONE]
        report = await play(server, trace_of(tmp_path, weka(request(0, 100, [1], out=9))))
    assert report.failed == 0 and report.wrong_lengths == 1


async def test_a_server_that_hangs_costs_the_timeout(tmp_path: Path) -> None:
    async with FakeServer(delay_s=30.0) as server:
        report = await play(server, trace_of(tmp_path, weka(request(0, 100, [1]))), timeout_s=0.3)
    assert report.failures == {"timeout": 1}


async def test_a_server_without_token_ids(tmp_path: Path) -> None:
    async with FakeServer(token_ids=False) as server:
        report = await play(server, trace_of(tmp_path, with_agents()), max_pause_s=1.0)
    assert report.failed == 0 and report.requests == 6
    assert report.kv_hit_rate == pytest.approx(report.ideal_hit_rate)


async def test_an_unknown_model_is_refused_at_the_start(tmp_path: Path) -> None:
    async with FakeServer() as server:
        with pytest.raises(ServerError, match="serves no model 'other', only fake"):
            await play(server, trace_of(tmp_path, weka(request(0, 100, [1]))), model="other")
    assert server.requests == []


async def test_an_interrupted_replay_ends_its_branches_and_reports(tmp_path: Path) -> None:
    record = weka(request(0, 100, [1]), request(3, 200, [1, 2, 3]))
    async with FakeServer(delay_s=30.0) as server:
        replay = Replay(
            trace_of(tmp_path, record, record), Plan(url=server.url, agents=2, speedup=1.0, run_id="run")
        )
        running = asyncio.create_task(replay.run())
        await eventually(lambda: len(server.requests) == 2)
        replay.interrupt()
        await asyncio.wait_for(running, 10.0)
    report = replay.report({}, "test")
    assert report.interrupted and (report.requests, report.failed) == (0, 0)
    assert sorted(server.ended) == ["run-0/main", "run-1/main"]


# --------------------------------------------------------------------------------- the command


async def run_command(*argv: str) -> int:
    return await asyncio.to_thread(command.replay, argv)


async def test_the_command_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace_of(tmp_path, with_agents())
    out = tmp_path / "report.json"
    async with FakeServer() as server:
        code = await run_command(
            str(tmp_path / "trace.jsonl"), "--url", server.url, "--agents", "2", "--speedup", "200",
            "--max-pause", "5", "--report", str(out),
        )  # fmt: skip
    assert code == 0
    report = json.loads(out.read_text())
    assert (report["requests"], report["failed"]) == (6, 0)
    assert report["settings"]["agents"] == 2 and report["trace"].endswith("trace.jsonl")
    shown = capsys.readouterr().out
    assert "6/6 requests" in shown and "ideal hit rate" in shown and "TTFT" in shown


async def test_the_command_says_with_its_code_that_requests_failed(tmp_path: Path) -> None:
    trace_of(tmp_path, weka(request(0, 100, [1])))
    async with FakeServer() as server:
        server.refusals = [(400, {})]
        assert await run_command(str(tmp_path / "trace.jsonl"), "--url", server.url) == 1


def closed_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["TRACE", "--url", "http://127.0.0.1:CLOSED"], "no server answers"),
        (["TRACE", "--url", "ftp://x"], "url must start with"),
        (["none.jsonl"], "no such file"),
        (["README"], "not JSON"),
        (["TRACE", "--agents", "0"], "agents must be at least 1"),
        (["TRACE", "--speedup", "0"], "speedup must be above 0"),
        (["TRACE", "--max-pause", "-1"], "max-pause must be at least 0"),
        (["TRACE", "--run-id", "a/b"], "run-id takes letters"),
        (["TRACE", "--report", "missing/folder/r.json"], "cannot be written"),
        (["TRACE", "--report", "."], "cannot be written"),
        ([], "TRACE"),
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
    trace_of(tmp_path, weka(request(0, 100, [1])))
    (tmp_path / "README").write_text("not a trace\n")
    names = {"TRACE": "trace.jsonl"}
    argv = [names.get(word, word).replace("CLOSED", str(closed_port())) for word in argv]
    assert command.replay(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("evolving: ") and complaint in error.replace("trace", "TRACE") + error
    assert error.count("\n") == 1


async def test_ctrl_c_prints_the_report(tmp_path: Path) -> None:
    trace_of(tmp_path, weka(request(0, 100, [1]), request(5000, 200, [1, 2, 3])))
    out = tmp_path / "report.json"
    program = "import sys; from loadtest.command import replay; sys.exit(replay(sys.argv[1:]))"
    async with FakeServer() as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(tmp_path / "trace.jsonl"), "--url", server.url,
            "--speedup", "1", "--report", str(out),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parent.parent, env=os.environ,
        )  # fmt: skip
        await eventually(lambda: server.requests and server.requests[0].answered, 30.0)
        process.send_signal(signal.SIGINT)
        shown, _ = await asyncio.wait_for(process.communicate(), 30.0)
        assert process.returncode == 130
        assert len(server.ended) == 1 and server.ended[0].endswith("/main")
    assert b"interrupted" in shown
    assert json.loads(out.read_text())["interrupted"] is True
