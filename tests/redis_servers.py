"""Real servers for tests: one Redis, with a password or TLS (`sentinel_group.py`: a primary with replicas and sentinels).

Rules that hold here
- Everything listens on 127.0.0.1, writes into a folder of its own, and goes with `stop`; a folder is kept, and
  named in the error, when a server failed.
- Ports lie below those that the system gives to outgoing connections: a server that was killed finds its port
  free when it starts again.
- Calls block: use `asyncio.to_thread` where an event loop must go on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import redis

from shared.embedded import EmbeddedError, server_binary

START_TIMEOUT_S = 15.0
_running: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


class ServerError(Exception):
    """A server did not do what it should; the text says where its files are."""


def binaries() -> list[str]:
    """Servers to test with: the installed Redis, and the one that `evolving up` starts."""
    found = [path for path in ("/usr/bin/redis-server",) if os.access(path, os.X_OK)]
    with contextlib.suppress(EmbeddedError):
        if server_binary() not in found:
            found.append(server_binary())
    return found


def binary_name(path: str) -> str:
    """For the names of tests: `redis` or `valkey`."""
    return Path(path).name.removesuffix("-server")


@functools.cache
def tls_missing(binary: str) -> str | None:
    """Why TLS cannot be tested with this binary; None when it can."""
    if shutil.which("openssl") is None:
        return "no openssl command to make certificates with"
    server = RedisServer(binary, tls=True)
    try:
        server.start()
    except ServerError as error:
        return f"{binary_name(binary)} does not speak TLS" if "TLS" in str(error) else str(error)
    finally:
        server.stop()
        shutil.rmtree(server.folder, ignore_errors=True)
    return None


class Certificates(NamedTuple):
    """Paths: a CA, and pairs for 127.0.0.1 that it signed."""

    ca: str
    server: str
    server_key: str
    client: str
    client_key: str


@functools.cache
def certificates(name: str = "ei test CA") -> Certificates:
    """Throw-away certificates; another name makes another CA, of the same host."""
    folder = tempfile.mkdtemp(prefix="evolving-tls-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def path(file: str) -> str:
        return str(Path(folder, file))

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=30.0)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(
        "req",
        "-x509",
        *key,
        "-keyout",
        path("ca.key"),
        "-out",
        path("ca.pem"),
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
    )
    for who in ("server", "client"):
        openssl("req", *key, "-keyout", path(f"{who}.key"), "-out", path(f"{who}.csr"), "-subj", f"/CN={who}")
        Path(path(f"{who}.ext")).write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        openssl(
            "x509", "-req", "-in", path(f"{who}.csr"), "-CA", path("ca.pem"), "-CAkey", path("ca.key"),
            "-CAcreateserial", "-days", "2", "-extfile", path(f"{who}.ext"), "-out", path(f"{who}.pem"),
        )  # fmt: skip
    return Certificates(
        path("ca.pem"), path("server.pem"), path("server.key"), path("client.pem"), path("client.key")
    )


_given: set[int] = set()


def _free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


class ServerProcess:
    """A server process with a file of settings that it may rewrite itself."""

    kind = "server"

    def __init__(self, binary: str | None, port: int, tls: bool, password: str) -> None:
        self.binary = binary or server_binary()
        self.folder = Path(tempfile.mkdtemp(prefix=f"evolving-{self.kind}-"))
        self.port = port or _free_port()
        self.tls, self.password = tls, password
        self.username = ""  # with it and the password, tests ask the server
        self._port_given = bool(port)
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False
        self._failed = False

    # ------------------------------------------------------------------ what a kind of server says

    def settings(self) -> list[str]:
        raise NotImplementedError

    def arguments(self) -> list[str]:
        return []

    # ------------------------------------------------------------------ life

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Any:
        """Start, or start again with the data and settings it had. Raises ServerError."""
        conf = self.folder / "server.conf"
        for _ in range(5):
            if not conf.exists():
                conf.write_text("\n".join([*self._listen(), *self.settings()]) + "\n")
            if self._answers():
                return self
            if self._port_given or "Address already in use" not in self.log():
                break
            conf.unlink()
            self.port = _free_port()
        self._failed = True
        tail = "; ".join(self.log().strip().splitlines()[-3:])
        self._end(signal.SIGKILL)
        raise ServerError(f"{self.binary} did not start: {tail or 'no output'} ({self.folder})")

    def _listen(self) -> list[str]:
        lines = [
            "bind 127.0.0.1", f"dir {self.folder}", "daemonize no", f"logfile {self.folder / 'server.log'}",
            "protected-mode no",
        ]  # fmt: skip
        if not self.tls:
            return [f"port {self.port}", *lines]
        files = certificates()
        return [
            "port 0", f"tls-port {self.port}", *lines, f"tls-ca-cert-file {files.ca}",
            f"tls-cert-file {files.server}", f"tls-key-file {files.server_key}", "tls-auth-clients optional",
            "tls-replication yes",
        ]  # fmt: skip

    def _answers(self) -> bool:
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.binary, str(self.folder / "server.conf"), *self.arguments()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )  # fmt: skip
        _running.add(self)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.running:
            with contextlib.suppress(redis.RedisError, OSError), self.client() as client:
                client.ping()
                return True
            time.sleep(0.02)
        return False

    def log(self) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / "server.log").read_text(errors="replace")
        return ""

    def client(self, timeout_s: float = 1.0) -> redis.Redis:
        """A blocking client of this server, for questions; close it."""
        options: dict[str, Any] = {}
        if self.tls:
            files = certificates()
            options = {
                "ssl": True, "ssl_ca_certs": files.ca, "ssl_certfile": files.client, "ssl_keyfile": files.client_key,
            }  # fmt: skip
        return redis.Redis(
            host="127.0.0.1", port=self.port, decode_responses=True,
            username=self.username or None, password=self.password or None,
            socket_timeout=timeout_s, socket_connect_timeout=timeout_s, protocol=2,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0), **options,
        )  # fmt: skip

    def kill(self) -> None:
        """End it as a crash would (SIGKILL); its data stays."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        if self.running and self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            self._paused = True

    def resume(self) -> None:
        if self.running and self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(number)
            if self._paused:
                self.resume()
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._paused = False
        _running.discard(self)

    def stop(self) -> None:
        """End it and remove its files."""
        crashed = self._process is not None and self._process.poll() not in (None, 0, -signal.SIGKILL)
        self._end(signal.SIGTERM)
        if not (self._failed or crashed):
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Any:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


@atexit.register
def _kill_all() -> None:
    for process in list(_running):
        process._end(signal.SIGKILL)


class RedisServer(ServerProcess):
    """One server: `start()`, `kill()` and `start()` again keep the data; `stop()` removes it. Also a context manager.

    `tls=True` listens with TLS only; a client certificate is asked for with `extra=["tls-auth-clients yes"]`.
    `extra` holds lines of the settings file.
    """

    kind = "redis"

    def __init__(
        self,
        binary: str | None = None,
        *,
        appendonly: bool = True,
        port: int = 0,
        password: str = "",
        tls: bool = False,
        replica_of: RedisServer | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        super().__init__(binary, port, tls, password)
        self._appendonly, self._replica_of, self._extra = appendonly, replica_of, list(extra)

    def settings(self) -> list[str]:
        lines = [
            f"appendonly {'yes' if self._appendonly else 'no'}", "appendfsync everysec", 'save ""',
            "maxmemory-policy noeviction", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1",
        ]  # fmt: skip
        if self.password:
            lines += [f"requirepass {self.password}", f"masterauth {self.password}"]
        if self._replica_of is not None:
            lines.append(f"replicaof 127.0.0.1 {self._replica_of.port}")
        return lines + self._extra

    @property
    def url(self) -> str:
        userinfo = f":{quote(self.password, safe='')}@" if self.password else ""
        options = f"?ssl_ca_certs={quote(certificates().ca)}" if self.tls else ""
        return f"redis{'s' if self.tls else ''}://{userinfo}127.0.0.1:{self.port}/0{options}"

    def role(self) -> list[Any]:
        """What ROLE answers; [] when it does not answer."""
        if not self.running or self.paused:
            return []
        try:
            with self.client(0.5) as client:
                return list(client.execute_command("ROLE"))
        except (redis.RedisError, OSError):
            return []
