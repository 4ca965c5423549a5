"""The whole system as a user runs it: `evolving up`, official clients, a replayed trace, split changes, deaths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest

from tests.up import Up

REPORT_KEYS = {
    "requests", "failed", "duration_s", "req_per_s", "ttft_s", "tpot_s", "e2e_s", "kv_hit_rate",
    "ideal_hit_rate", "lost_kv_reuse", "switches", "splits", "trace", "settings", "version",
}  # fmt: skip


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("up")
    # A window that never ends: here the split changes by hand only.
    flags = ("--nodes", "4", "--split", "2P2D", "--speedup", "40", "--warmup-s", "80", "--window-s", "36000")
    with Up(folder, *flags) as cluster:
        cluster.until(lambda: cluster.status()["split"] == "2P2D", 60.0)
        yield cluster


@pytest.fixture
def client(up):
    return openai.OpenAI(base_url=up.url + "/v1", api_key="none", timeout=30.0, max_retries=0)


def test_openai_client_streams_the_text_that_it_gets_at_once(client):
    (model,) = client.models.list().data
    ask = {
        "model": model.id,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hällo " * 40}],
        "max_tokens": 80,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask)
    parts = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content and len(text) > 10
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens <= 80
    assert parts[-1].usage.prompt_tokens_details.cached_tokens > 0
    finish = [
        part.choices[0].finish_reason for part in parts if part.choices and part.choices[0].finish_reason
    ]
    assert finish == [whole.choices[0].finish_reason]


def test_a_stream_without_usage_is_accounted_and_its_client_sees_no_difference(up, client):
    (model,) = client.models.list().data
    ask = {
        "model": model.id,
        "messages": [{"role": "user", "content": "as the README does"}],
        "max_tokens": 9,
    }
    before = up.get(up.page + "metrics")
    parts = list(client.chat.completions.create(**ask, stream=True, extra_body={"ignore_eos": True}))
    assert parts and all(part.usage is None for part in parts)

    def output_tokens(text):
        lines = [x for x in text.decode().splitlines() if x.startswith("ei_tokens_total") and "output" in x]
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines)

    up.until(lambda: output_tokens(up.get(up.page + "metrics")) >= output_tokens(before) + 9)


def test_openai_client_completes_text_and_ids(client):
    (model,) = client.models.list().data
    text = client.completions.create(
        model=model.id, prompt="once", max_tokens=12, extra_body={"ignore_eos": True}
    )
    ids = client.completions.create(
        model=model.id, prompt=list(b"once"), max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert text.choices[0].text == ids.choices[0].text
    assert text.usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        ({"model": "nope"}, openai.NotFoundError),
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"prompt": "x" * 1_048_576}, openai.BadRequestError),
        ({"prompt": ""}, openai.BadRequestError),
        ({"prompt": ["a", "b"]}, openai.BadRequestError),
        ({"n": 0}, openai.BadRequestError),
    ],
)
def test_bad_requests_raise_the_clients_own_errors_and_service_goes_on(client, ask, error):
    (model,) = client.models.list().data
    good = {"model": model.id, "prompt": "hello", "max_tokens": 4}
    with pytest.raises(error) as caught:
        client.completions.create(**(good | ask))
    assert caught.value.body["message"]
    assert client.completions.create(**good).choices[0].text


def test_status_and_page(up):
    status = up.status()
    assert [node["node"] for node in status["nodes"]] == ["n1", "n2", "n3", "n4"]
    assert {info["service"] for info in status["services"]} == {"router", "directory", "planner", "telemetry"}
    assert b"<html" in up.get(up.page).lower()
    table = up.evolving("status", "--redis", up.redis)
    assert table.returncode == 0 and "2P2D" in table.stdout and "n4" in table.stdout


@pytest.fixture(scope="module")
def trace(tmp_path_factory, up):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl.gz"
    done = up.evolving(
        "generate",
        "--sessions",
        "6",
        "--steps",
        "12",
        "--context-scale",
        "0.25",
        "--seed",
        "7",
        "--out",
        str(path),
    )
    assert done.returncode == 0, done.stderr
    return path


def replay(up, trace, report, *flags):
    return subprocess.Popen(
        [
            sys.executable, "-m", "services.cli", "replay", str(trace), "--url", up.url, "--agents", "6",
            "--max-pause", "30", "--report", str(report), *flags,
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_replay_through_split_changes_and_deaths_loses_no_request(up, trace, tmp_path):
    report = tmp_path / "report.json"
    playing = replay(up, trace, report)
    lines: list[str] = []
    reading = threading.Thread(target=lambda: lines.extend(playing.stdout))
    reading.start()
    try:
        up.until(lambda: lines, 60.0)  # its first line comes when requests are running
        changed = up.evolving("split", "3P1D", "--redis", up.redis)
        assert changed.returncode == 0, changed.stdout + changed.stderr
        assert up.status()["split"] == "3P1D"
        up.kill("services.directory")
        up.kill("services.telemetry")
        changed = up.evolving("split", "2P2D", "--redis", up.redis)
        assert changed.returncode == 0, changed.stdout + changed.stderr
        assert up.status()["split"] == "2P2D"
        up.kill("services.planner")
        assert playing.wait(180) == 0, "".join(lines)
    finally:
        playing.kill()
        reading.join()
    found = json.loads(report.read_text())
    assert set(found) >= REPORT_KEYS
    assert found["failed"] == 0 and found["requests"] > 60
    assert found["ideal_hit_rate"] - found["kv_hit_rate"] < 0.02
    assert 0 <= found["lost_kv_reuse"] < 0.03
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert set(found[name]) == {"mean", "p50", "p95", "p99"}
        assert 0 < found[name]["p50"] <= found[name]["p95"] <= found[name]["p99"]
    assert found["switches"] >= 2 and [3, 1] in [split[1:] for split in found["splits"]]
    up.until(lambda: len(up.status()["services"]) == 4, 60.0)
    for name in ("directory", "telemetry", "planner"):
        assert f"{name} ended (signal SIGKILL)" in up.text()
    assert up.status()["split"] == "2P2D"


def test_a_worker_that_is_killed_comes_back_and_requests_go_elsewhere(up, trace, tmp_path):
    report = tmp_path / "report.json"
    playing = replay(up, trace, report)
    try:
        up.until(lambda: any(n["decodes"] or n["queue"] for n in up.status()["nodes"]), 60.0)
        up.kill("worker.agent")
        out, _ = playing.communicate(timeout=180)
    finally:
        playing.kill()
    found = json.loads(report.read_text())
    # a stream that the dead node was sending ends with an error event; nothing else may fail
    broken = sum(
        n for reason, n in found.get("failures", {}).items() if "node_failed" in reason or "stream" in reason
    )
    assert found["failed"] == broken, out
    assert found["requests"] > 60
    up.until(lambda: len(up.status()["nodes"]) == 4, 60.0)


def test_the_planner_changes_the_split_during_a_replay_and_no_request_fails(tmp_path):
    """Long outputs after short prompts at 3P1D: more decode nodes are certain to serve more."""
    line = {
        "num_turns": 12,
        "input_prompt_length": 1500,
        "assistant_response_length": [700] * 12,
        "tool_call_output_length": [60] * 12,
        "tool_call_latency": [0.5] * 12,
        "final_assistant_response_length": 700,
    }
    trace = tmp_path / "decode_heavy.jsonl"
    trace.write_text((json.dumps(line) + "\n") * 24)
    flags = ("--nodes", "4", "--split", "3P1D", "--speedup", "40", "--warmup-s", "60", "--window-s", "80")
    with Up(tmp_path, *flags, "--slice-s", "8") as up:
        report = tmp_path / "report.json"
        playing = replay(up, trace, report, "--agents", "24", "--duration", "900")
        try:
            up.until(lambda: up.status()["decode"] > 1 and up.status()["prefill"] < 3, 60.0, every_s=0.5)
            out, _ = playing.communicate(timeout=120)
        finally:
            playing.kill()
        found = json.loads(report.read_text())
        assert found["failed"] == 0 and found["switches"] >= 1, out
        assert max(decode for _, prefill, decode in found["splits"] if prefill + decode == 4) >= 2


def test_a_parts_table_reaches_that_part_under_up(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[worker]\nl1_tokens = 64000\n")
    with Up(tmp_path, "--nodes", "2", "--config", str(file)) as up:
        log = (tmp_path / "logs" / "worker-1.log").read_text()
        assert "l1_pages=1000 " in log
        assert len(up.status()["nodes"]) == 2


def test_ctrl_c_leaves_no_process_and_a_taken_port_is_one_line(up, tmp_path):
    port = up.url.rpartition(":")[2]
    done = up.evolving("up", "--port", port, "--page-port", "0")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and port in done.stderr
    with Up(tmp_path, "--nodes", "2", "--speedup", "40") as other:
        pids = [pid for module in ("services.router", "worker.agent") for pid in other.pids(module)]
        assert len(pids) == 3
        redis = other.redis
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    done = up.evolving("status", "--redis", redis)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["up", "--nodes", "0"],
        ["up", "--split", "4P4D"],
        ["up", "--split", "x"],
        ["up", "--nodes", "many"],
        ["up", "--mystery", "1"],
        ["up", "--profile", "nope"],
        ["up", "--speedup", "nan"],
        ["router", "--redis", "redis://127.0.0.1:1/0"],
        ["worker", "--profile", "nope", "--redis", "redis://127.0.0.1:1/0"],
        ["replay", "/does/not/exist"],
        ["replay", __file__],
        ["split", "0P4D"],
        ["nonsense"],
    ],
)
def test_what_an_operator_must_mend_is_one_line_and_exit_code_2(argv):
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", *argv], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("evolving: ") and done.stderr.count("\n") == 1, done.stderr


def test_environment_and_file_are_checked_too(tmp_path):
    def run(env: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("EI_")}
        return subprocess.run(
            [sys.executable, "-m", "services.cli", *argv],
            env=clean | env,
            capture_output=True,
            text=True,
            timeout=60,
        )

    done = run({"EI_ROUTER_PROT": "1"}, "router")
    assert done.returncode == 2 and "EI_ROUTER_PROT" in done.stderr
    file = tmp_path / "c.toml"
    file.write_text('redis = "redis://127.0.0.1:1/0"\n[router]\nprot = 1\n')
    done = run({}, "router", "--config", str(file))
    assert done.returncode == 2 and "prot" in done.stderr and str(file) in done.stderr
    done = run({}, "up", "--config", str(file), "--port", "0", "--page-port", "0")
    assert done.returncode == 2 and "prot" in done.stderr and str(file) in done.stderr
    done = run({"EI_WORKER_PROFILE": "nope"}, "up", "--port", "0", "--page-port", "0")
    assert done.returncode == 2 and "nope" in done.stderr
    file.write_text('redis = "redis://127.0.0.1:1/0"\n')
    done = run({}, "router", "--config", str(file))
    assert done.returncode == 2 and "127.0.0.1:1" in done.stderr
