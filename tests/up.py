"""`evolving up` as a user runs it, for the end-to-end tests: a real process that starts real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

READY_S = 60.0


class Up:
    """Start with `with Up(...) as up`; leaving it sends one Ctrl-C and wants exit code 0."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.flags = flags
        self.output: Path = folder / "up.out"
        self.url = self.page = self.redis = ""

    def __enter__(self) -> Up:
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "services.cli", "up", "--port", "0", "--page-port", "0",
                    "--logs", str(self.folder / "logs"), *self.flags,
                ],
                stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            self.until(lambda: "nodes ready" in self.text() or self.process.poll() is not None, READY_S)
            assert self.process.poll() is None, self.text()
        except BaseException:
            self.process.kill()
            raise
        found = dict(re.findall(r"^(router|live page|redis) +(\S+)", self.text(), re.MULTILINE))
        self.url, self.page, self.redis = (
            found["router"].removesuffix("/v1"),
            found["live page"],
            found["redis"],
        )
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if kind is None:
            assert code == 0, self.text()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @staticmethod
    def until(condition: Callable[[], object], timeout_s: float = 30.0, every_s: float = 0.1) -> object:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"condition still {value!r} after {timeout_s} s"
            time.sleep(every_s)
        return value

    def evolving(self, *argv: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "services.cli", *argv], capture_output=True, text=True, timeout=timeout_s
        )

    def status(self) -> dict[str, object]:
        done = self.evolving("status", "--redis", self.redis, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def get(self, url: str) -> bytes:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read()

    def pids(self, module: str) -> list[int]:
        """Processes under this one that run `python -m module`."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if module.encode() in words and parent == self.process.pid:
                found.append(int(entry.name))
        return found

    def kill(self, module: str) -> int:
        pid = self.pids(module)[0]
        os.kill(pid, signal.SIGKILL)
        return pid
