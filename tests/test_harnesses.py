"""Other people's programs against the router, as their users run them: an agent harness, a load generator."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness_env import clean_environment, python_of
from tests.up import Up

pytestmark = pytest.mark.harness

MINI = ("mini-swe-agent", "2.4.6")
AIPERF = ("aiperf", "0.13.0")
RUN_S = 240.0
MODEL = "m"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    flags = ("--nodes", "4", "--split", "2P2D", "--speedup", "2", "--profile", "tiny", "--model", MODEL)
    with Up(tmp_path_factory.mktemp("up"), *flags, "--warmup-s", "4", "--window-s", "36000") as cluster:
        cluster.until(lambda: cluster.status()["split"] == "2P2D", 60.0)
        yield cluster


def installed(package: str, version: str) -> str:
    """Its Python. Raises Missing: whoever asks for these tests wants to know."""
    return str(python_of(package, version))


def run(argv: list[str], home: Path, **environment: str) -> str:
    """What the program printed; it must succeed. It runs in `home`/work."""
    work = home / "work"
    work.mkdir()
    done = subprocess.run(
        argv,
        cwd=work,
        env=clean_environment(home, **environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


# ---------------------------------------------------------------------- mini-swe-agent

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat result.txt"
COMMANDS = [
    "ls -a",
    "printf 'print(6 * 7)\\n' > answer.py",
    "python3 answer.py > result.txt; cat result.txt missing.txt",
    SUBMIT,
]


def commands(*batches: list[str]) -> str:
    """A task whose answers call the shell with those commands."""
    steps = [
        {"say": f"Step {n}.", "tools": [{"name": "bash", "arguments": {"command": line}} for line in batch]}
        for n, batch in enumerate(batches)
    ]
    return f"Write answer.py and run it. <<script>>{json.dumps(steps)}<</script>>"


def mini(up: Up, home: Path, task: str, *config: str) -> dict[str, Any]:
    """The trajectory of mini-swe-agent's command line working on that task in `home`/work."""
    argv = [installed(*MINI), "-m", "minisweagent.run.mini", "-m", f"openai/{MODEL}", "-t", task, "-y"]
    argv += ["--exit-immediately", "-l", "0", "-c", "mini.yaml", "-o", str(home / "trajectory.json")]
    for line in (f"model.model_kwargs.api_base={up.url}/v1", "agent.agent_class=default", *config):
        argv += ["-c", line]
    run(
        argv,
        home,
        OPENAI_API_KEY="none",
        MSWEA_CONFIGURED="true",
        MSWEA_COST_TRACKING="ignore_errors",
        MSWEA_SILENT_STARTUP="1",
        MSWEA_GLOBAL_CONFIG_DIR=str(home / "config"),
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    found: dict[str, Any] = json.loads((home / "trajectory.json").read_text())
    return found


def test_mini_swe_agent_works_on_its_task_to_the_end(up: Up, tmp_path: Path) -> None:
    told = mini(up, tmp_path, commands(*([line] for line in COMMANDS)))
    assert (tmp_path / "work" / "answer.py").read_text() == "print(6 * 7)\n"
    assert (tmp_path / "work" / "result.txt").read_text() == "42\n"
    info = told["info"]
    assert (info["exit_status"], info["submission"]) == ("Submitted", "42\n")
    assert info["model_stats"]["api_calls"] == len(COMMANDS)
    messages = told["messages"]
    assert [m["role"] for m in messages] == [
        "system", "user", *["assistant", "tool"] * (len(COMMANDS) - 1), "assistant", "exit",
    ]  # fmt: skip
    answers = [message for message in messages if message["role"] == "assistant"]
    assert [[a["command"] for a in answer["extra"]["actions"]] for answer in answers] == [
        [line] for line in COMMANDS
    ]
    tools = [message["extra"] for message in messages if message["role"] == "tool"]
    assert "missing.txt" in tools[2]["raw_output"] and tools[2]["returncode"] == 1
    usages = [answer["extra"]["response"]["usage"] for answer in answers]
    for before, usage in zip(usages, usages[1:], strict=False):
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["prompt_tokens"] > cached >= before["prompt_tokens"] - 64


@pytest.mark.parametrize("model_class", ["litellm", "litellm_response"])
def test_mini_swe_agent_makes_calls_together(up: Up, tmp_path: Path, model_class: str) -> None:
    """Also over the responses API, which its other model class takes."""
    told = mini(up, tmp_path, commands(COMMANDS[:3], [SUBMIT]), f"model.model_class={model_class}")
    assert (told["info"]["exit_status"], told["info"]["submission"]) == ("Submitted", "42\n")
    assert told["info"]["model_stats"]["api_calls"] == 2
    assert (tmp_path / "work" / "result.txt").read_text() == "42\n"
    found = [m["extra"] for m in told["messages"] if "returncode" in m.get("extra", {})]
    assert [extra["returncode"] for extra in found] == [0, 0, 1]


# ---------------------------------------------------------------------- aiperf

BLOCK = 64
TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
bare = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
bare.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=bare).save_pretrained(sys.argv[1])
"""


def mooncake(path: Path, requests: int) -> list[dict[str, Any]]:
    """A trace of requests that begin with the same blocks and end in one of their own."""
    lines = [
        {
            "timestamp": 100 * n,
            "input_length": 4 * BLOCK - n % 5,
            "output_length": 8 + n,
            "hash_ids": [0, 1, 2, 100 + n],
        }
        for n in range(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `tests/bytes` is a tokenizer that was downloaded: one token a byte, as the engine's."""
    hub = tmp_path_factory.mktemp("hf")
    model = hub / "hub" / "models--tests--bytes"
    revision = "0" * 40
    snapshot = model / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision)
    environment = {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
    made = subprocess.run(
        [installed(*AIPERF), "-c", TOKENIZER, str(snapshot)],
        env=clean_environment(hub, **environment),
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert made.returncode == 0, made.stderr
    return environment


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses", "messages"])
def test_aiperf_replays_a_mooncake_trace_without_an_error(
    up: Up, tmp_path: Path, tokenizer: dict[str, str], endpoint: str
) -> None:
    lines = mooncake(tmp_path / "trace.jsonl", 14)
    out = tmp_path / "out"
    argv = [
        installed(*AIPERF), "-m", "aiperf", "profile", "-m", MODEL, "-u", up.url, "--endpoint-type", endpoint,
        "--streaming", "--input-file", str(tmp_path / "trace.jsonl"), "--custom-dataset-type", "mooncake_trace",
        "--tokenizer", "tests/bytes", "--isl-block-size", str(BLOCK), "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", str(out), "--no-gpu-telemetry",
        "--workers-max", "2",
    ]  # fmt: skip
    printed = run(argv, tmp_path, **tokenizer)
    report = json.loads((out / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == len(lines), printed[-4000:]
    assert not report.get("error_request_count") and not report["error_summary"], report["error_summary"]
    assert report["was_cancelled"] is False
    records = [json.loads(line) for line in (out / "profile_export.jsonl").read_text().splitlines()]
    assert len(records) == len(lines) and not any(record.get("error") for record in records)

    def each(name: str) -> list[int]:
        return sorted(int(record["metrics"][name]["value"]) for record in records)

    if endpoint != "responses":  # there it reads the usage of `response.completed` alone: a limit ended these
        assert each("output_sequence_length") == sorted(line["output_length"] for line in lines)
        lengths = sorted(line["input_length"] for line in lines)
        template = {found - given for found, given in zip(each("usage_prompt_tokens"), lengths, strict=True)}
        assert len(template) == 1 and 0 <= template.pop() < 16
    assert all(0 < record["metrics"]["time_to_first_token"]["value"] < 5000 for record in records)
