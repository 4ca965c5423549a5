"""The routers that `bench/router.py` compares: ours, and Rust ones out of virtual environments of their own.

Rules that hold here
- A peer that cannot be installed or started is `Missing`, with the reason; the benchmark goes on without it.
- Nothing listens beyond loopback: what cannot be told so runs in a network namespace of its own.
- A router's process is pinned to one core from its start on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from router_fakes import ANSWER
from router_load import BadAnswer, Client, Short

from shared.embedded import free_port

SGLANG = ("sglang-router==0.3.2",)
DYNAMO_BARE = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1")  # without the needs of real engines
DYNAMO = (
    "aiohttp", "msgspec", "prometheus-client", "pyzmq", "redis", "tqdm", "transformers==5.19.0", "typing-extensions",
    "zstandard", "numpy", "pydantic<2.14", "pyyaml", "certifi", "uvloop",
)  # fmt: skip
READY_S = 60.0


class Missing(Exception):
    """A peer that is not there; the text says why, in one line."""


def venv(folder: Path, name: str, packages: tuple[str, ...], bare: tuple[str, ...] = ()) -> str:
    """Path of a Python with the packages, installed once; `bare` ones without what they depend on."""
    home = folder / name
    python, done = home / "bin" / "python", home / "installed"
    if done.exists() and done.read_text() == repr((packages, bare)):
        return str(python)
    print(f"installing {', '.join((*bare, *packages))[:80]} into {home}", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _quiet([sys.executable, "-m", "venv", str(home)])
        for options, wanted in ((["--no-deps"], bare), ([], packages)):
            if wanted:
                _quiet([str(python), "-m", "pip", "install", "-q", *options, *wanted])
    except (OSError, subprocess.SubprocessError) as error:
        raise Missing(f"{name} cannot be installed: {error}") from None
    done.write_text(repr((packages, bare)))
    return str(python)


def _quiet(words: list[str]) -> None:
    result = subprocess.run(words, capture_output=True, text=True, timeout=600)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no output"]
        raise subprocess.SubprocessError(lines[-1][:200])


class Router:
    """A process that serves `url`."""

    def __init__(
        self, name: str, words: list[str], url: str, core: int, env: dict[str, str] | None = None
    ) -> None:
        self.name, self.url = name, url
        self._log = tempfile.NamedTemporaryFile(prefix=f"bench-{name}-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=os.environ | (env or {}),
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    async def ready(self, request: bytes | None = None, expect: bytes = ANSWER) -> Router:
        """Wait until a request is answered as it should. Raises Missing."""
        request = request or Short(chat=True).next()
        deadline = time.monotonic() + READY_S
        why = ""
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                client = await Client.open(self.url)
                async with asyncio.timeout(5.0):
                    await client.ask(request, expect)
                client.close()
                return self
            except (OSError, BadAnswer, TimeoutError) as error:
                why = str(error)
                await asyncio.sleep(0.2)
        code = self._process.poll()
        last = (self.log().strip().splitlines() or [""])[-1]
        self.stop()
        raise Missing(
            f"{self.name} did not serve: {f'exit code {code}' if code is not None else why}; {last}"[:400]
        )

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def ours(redis: str, cluster: str, core: int) -> Router:
    port = free_port()
    words = [
        sys.executable, "-m", "services.router", "--redis", redis, "--cluster", cluster, "--host", "127.0.0.1",
        "--port", str(port), "--log-level", "warning",
    ]  # fmt: skip
    return Router("evolving", words, f"http://127.0.0.1:{port}", core)


def sglang(folder: Path, urls: dict[str, str], core: int) -> Router:
    """sglang-router with the fakes as prefill and decode workers. Raises Missing."""
    python = venv(folder, "sglang-router", SGLANG)
    port = free_port()
    words = [python, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "cache_aware"]
    for node, url in urls.items():
        words += ["--prefill", url, "8998"] if node.startswith("p") else ["--decode", url]
    words += [
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port",
        str(free_port()), "--log-level", "warn",
    ]  # fmt: skip
    return Router("sglang-router", words, f"http://127.0.0.1:{port}", core)
