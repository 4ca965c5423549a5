"""NVIDIA Dynamo's frontend with its KV router and simulated workers, for `bench/router.py`.

It opens listeners on all addresses whatever it is told, so this file runs as a program in a network namespace of
its own, clients included, and is told what to measure on standard input: a line of seconds is answered with a line
of JSON (requests a second and CPU milliseconds of the frontend for each).

Its model is a word a token, the cheapest tokenizer there is: the routers are to be compared.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from router_fakes import MODEL
from router_load import Agent, closed_loop, post, words
from router_peers import DYNAMO, DYNAMO_BARE, Missing, Router, venv

PORT = 8000
EXPECT = b'"usage"'
TOKENS = 20_000
READY = "ready"
_UP, _SIOCGIFFLAGS, _SIOCSIFFLAGS = 1, 0x8913, 0x8914


class Dynamo:
    """The program below, seen from outside of its namespace."""

    name = "dynamo"

    def __init__(self, peers: Path, load_core: int, router_core: int) -> None:
        """Raises Missing."""
        if shutil.which("unshare") is None:
            raise Missing("dynamo needs a network namespace, and there is no unshare here")
        way = next((w for w in (["unshare", "-n"], ["unshare", "-rn"]) if _works(w)), None)
        if way is None:
            raise Missing("dynamo needs a network namespace, and unshare -n is not permitted here")
        python = venv(peers, "dynamo", DYNAMO, DYNAMO_BARE)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*way, sys.executable, __file__, python, str(load_core), str(router_core)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    async def ready(self) -> Dynamo:
        """Raises Missing."""
        if (await asyncio.to_thread(self._line)).strip() != READY:
            self.stop()
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["no output"]
            raise Missing(f"dynamo did not serve: {last[0]}"[:400])
        return self

    async def rate(self, seconds: float, clients: int) -> tuple[float, float]:
        """Requests a second of unique prompts, and CPU milliseconds of a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds} {clients}\n")
        self._process.stdin.flush()
        line = await asyncio.to_thread(self._line)
        if not line:
            self._errors.seek(0)
            raise Missing(f"dynamo failed: {self._errors.read()[-300:]}")
        found = json.loads(line)
        return found["rate"], found["cpu_ms"]

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _works(way: list[str]) -> bool:
    return subprocess.run([*way, "true"], capture_output=True).returncode == 0


# ------------------------------------------------------------------------------------- in the namespace


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name = b"lo".ljust(16, b"\0")
        flags = struct.unpack("16sh", fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sh", name, 0)))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh", name, flags | _UP))


def model(folder: Path) -> Path:
    """A model's folder without weights: every word of four hex digits is a token."""
    special = ["<unk>", "<s>", "</s>", "<user>", "<assistant>"]
    vocab = {word: i for i, word in enumerate([*special, *(f"{i:04x}" for i in range(65_536))])}
    added = [
        {"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, word in enumerate(special)
    ]  # fmt: skip
    files: dict[str, dict[str, Any]] = {
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>",
            "model_max_length": 131_072,
            "chat_template": "{% for message in messages %}<user> {{ message['content'] }} </s>{% endfor %}<assistant>",
        },
        "config.json": {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(vocab),
            "max_position_embeddings": 131_072, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


async def serve(python: str, load_core: int, router_core: int) -> None:
    os.sched_setaffinity(0, {load_core})
    loopback_up()
    with tempfile.TemporaryDirectory(prefix="bench-dynamo-") as name:
        (kept := Path(name, "kv")).mkdir()
        (weights := Path(name, "model")).mkdir()
        env = {"DYN_FILE_KV": str(kept), "DYN_LOG": "warn", "HF_HUB_OFFLINE": "1"}
        planes = ["--discovery-backend", "file", "--event-plane", "zmq", "--request-plane", "tcp"]
        url = f"http://127.0.0.1:{PORT}"
        mocker = Router(
            "dynamo-mocker",
            [python, "-m", "dynamo.mocker", "--model-path", str(model(weights)), "--model-name", MODEL, *planes,
             "--speedup-ratio", "1000000", "--num-gpu-blocks-override", "100000", "--block-size", "64",
             "--max-num-seqs", "256", "--max-num-batched-tokens", "65536", "--num-workers", "2"],
            url, load_core, env,
        )  # fmt: skip
        frontend = Router(
            "dynamo-frontend",
            [python, "-m", "dynamo.frontend", "--router-mode", "kv", "--http-host", "127.0.0.1", "--http-port",
             str(PORT), *planes],
            url, router_core, env,
        )  # fmt: skip
        try:
            hello = b'{"model":"%b","messages":[{"role":"user","content":"%b"}],"max_tokens":5}'
            try:
                await frontend.ready(
                    post("/v1/chat/completions", hello % (MODEL.encode(), words(200))), EXPECT
                )
            except Missing as error:
                raise SystemExit(f"{error} {mocker.log()[-600:]}") from None
            print(READY, flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                seconds, clients = float(line.split()[0]), int(line.split()[1])
                agents = [Agent(TOKENS, 0, 0) for _ in range(clients)]
                rate, cpu_ms = await closed_loop(url, frontend.pid, agents, seconds, EXPECT)
                print(json.dumps({"rate": rate, "cpu_ms": cpu_ms}), flush=True)
        finally:
            frontend.stop()
            mocker.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
