"""Real servers for tests: a primary with replicas, and sentinels that watch it. Calls block, as in `redis_servers.py`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import redis

from tests.redis_servers import RedisServer, ServerError, ServerProcess, certificates

NAME = "main"  # of the primary, at the sentinels


class SentinelServer(ServerProcess):
    """One sentinel, with the lines of its settings file; of a group's the group takes care."""

    kind = "sentinel"

    def __init__(
        self,
        binary: str | None,
        tls: bool,
        password: str,
        sentinel_password: str,
        lines: Callable[[], list[str]],
    ) -> None:
        super().__init__(binary, 0, tls, sentinel_password)
        self._lines = lines

    def settings(self) -> list[str]:
        own = [f"requirepass {self.password}"] if self.password else []
        return own + self._lines()

    def arguments(self) -> list[str]:
        return ["--sentinel"]

    def start(self) -> Any:
        super().start()
        with self.client() as client, contextlib.suppress(redis.ResponseError):
            # The sentinels find each other, and put a returned server right, in a second rather than in ten. Not
            # PING-PERIOD: five of it must be longer than the second between two questions to a replica, else no
            # replica is found fit to take over.
            client.execute_command(
                "SENTINEL", "DEBUG", "INFO-PERIOD", 500, "PUBLISH-PERIOD", 200, "ASK-PERIOD", 200
            )
        return self

    def state(self) -> dict[str, Any]:
        """What it says of the primary; {} when it does not answer."""
        if not self.running or self.paused:
            return {}
        try:
            with self.client(0.5) as client:
                return dict(client.execute_command("SENTINEL MASTER", NAME))
        except (redis.RedisError, OSError):
            return {}


class SentinelGroup:
    """A primary, its replicas and sentinels that watch them. Also a context manager, then ready at its start.

    `extra` holds lines of the settings file of every server.
    """

    def __init__(
        self,
        binary: str | None = None,
        replicas: int = 1,
        sentinels: int = 3,
        down_after_ms: int = 500,
        failover_timeout_ms: int = 2000,
        *,
        password: str = "",
        sentinel_password: str = "",
        tls: bool = False,
        extra: Sequence[str] = (),
    ) -> None:
        first = RedisServer(binary, password=password, tls=tls, extra=extra)
        self.servers = [first] + [
            RedisServer(binary, password=password, tls=tls, replica_of=first, extra=extra)
            for _ in range(replicas)
        ]
        self._password, self._sentinel_password, self._tls = password, sentinel_password, tls

        def lines() -> list[str]:
            quorum = sentinels // 2 + 1
            found = [
                f"sentinel monitor {NAME} 127.0.0.1 {first.port} {quorum}",
                f"sentinel down-after-milliseconds {NAME} {down_after_ms}",
                f"sentinel failover-timeout {NAME} {failover_timeout_ms}",
                f"sentinel parallel-syncs {NAME} 1",
            ]
            if password:
                found.append(f"sentinel auth-pass {NAME} {password}")
            if sentinel_password:
                found.append(f"sentinel sentinel-pass {sentinel_password}")
            return found

        self.sentinels = [
            SentinelServer(binary, tls, password, sentinel_password, lines) for _ in range(sentinels)
        ]

    # ------------------------------------------------------------------ life

    def start(self) -> SentinelGroup:
        """Everything up and ready. Raises ServerError."""
        try:
            for process in (*self.servers, *self.sentinels):
                process.start()
            self.wait_ready()
        except BaseException:
            self.stop(keep=True)
            raise
        return self

    def stop(self, *, keep: bool = False) -> None:
        """End everything. The files go, unless `keep`."""
        for process in (*self.sentinels, *self.servers):
            process._failed |= keep
            process.stop()

    def __enter__(self) -> SentinelGroup:
        return self.start()

    def __exit__(self, kind: object, *rest: object) -> None:
        self.stop(keep=kind is not None)
        if kind is not None:
            print("logs:", *(str(p.folder) for p in (*self.sentinels, *self.servers)))

    # ------------------------------------------------------------------ questions

    @property
    def url(self) -> str:
        """Of the primary, by way of the sentinels."""
        return self.url_of(NAME)

    def url_of(self, name: str, **options: str) -> str:
        """The same for another name of a primary, with more options."""
        userinfo = f":{quote(self._password, safe='')}@" if self._password else ""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        if self._sentinel_password:
            options["sentinel_password"] = self._sentinel_password
        if self._tls:
            options["ssl_ca_certs"] = certificates().ca
        query = "&".join(f"{option}={quote(value, safe='')}" for option, value in options.items())
        scheme = "rediss+sentinel" if self._tls else "redis+sentinel"
        return f"{scheme}://{userinfo}{hosts}/{name}/0{'?' + query if query else ''}"

    def primary(self) -> RedisServer:
        """The server that is the primary now. Raises ServerError while there is none or more than one."""
        holding = [server for server in self.servers if server.role()[:1] == ["master"]]
        if len(holding) > 1:
            named = {int(state["port"]) for state in self._states()}
            holding = [server for server in holding if named == {server.port}]
        if len(holding) != 1:
            raise ServerError(f"{len(holding)} servers are the primary ({self._folders()})")
        return holding[0]

    def replicas(self) -> list[RedisServer]:
        """The running servers that are replicas now."""
        return [server for server in self.servers if server.role()[:1] == ["slave"]]

    def wait_ready(self, deadline_s: float = 30.0) -> RedisServer:
        """The primary, once the running sentinels agree on it and every running replica is in step with it."""
        deadline = time.monotonic() + deadline_s
        while True:
            why = self._not_ready()
            if why is None:
                return self.primary()
            if time.monotonic() > deadline:
                raise ServerError(f"not ready after {deadline_s:g} s: {why} ({self._folders()})")
            time.sleep(0.05)

    def _not_ready(self) -> str | None:
        try:
            primary = self.primary()
        except ServerError as error:
            return str(error)
        states = self._states()
        asked = [sentinel for sentinel in self.sentinels if sentinel.running and not sentinel.paused]
        alive = [server for server in self.servers if server.running and not server.paused]
        if len(states) < len(asked):
            return "a sentinel does not answer"
        for state in states:
            if int(state["port"]) != primary.port or state["flags"] != "master":
                return f"a sentinel says {state['port']} {state['flags']} where {primary.port} is the primary"
            if int(state["num-other-sentinels"]) != len(self.sentinels) - 1:
                return f"a sentinel knows {state['num-other-sentinels']} others"
            if int(state["num-slaves"]) < len(alive) - 1:
                return f"a sentinel knows {state['num-slaves']} replicas"
        try:
            with primary.client() as client:
                told = client.info("replication")
        except (redis.RedisError, OSError) as error:
            return str(error)
        online = [
            told[f"slave{i}"]
            for i in range(told["connected_slaves"])
            if told[f"slave{i}"]["state"] == "online"
        ]
        if len(online) < len(alive) - 1:
            return f"{len(online)} replicas are online"
        for server in alive:
            if server is not primary and server.role()[3:4] != ["connected"]:
                return f"replica {server.port} is not connected"
        for sentinel in asked:
            try:
                with sentinel.client() as client:
                    seen = [dict(_pairs(raw)) for raw in client.execute_command("SENTINEL", "REPLICAS", NAME)]
            except (redis.RedisError, OSError) as error:
                return str(error)
            usable = {
                int(r["port"]) for r in seen if r["flags"] == "slave" and r["master-link-status"] == "ok"
            }
            if missing := {s.port for s in alive if s is not primary} - usable:
                return f"a sentinel does not count on replica {missing}"
        return None

    def _states(self) -> list[dict[str, Any]]:
        return [state for state in (sentinel.state() for sentinel in self.sentinels) if state]

    def _folders(self) -> str:
        return " ".join(str(process.folder) for process in (*self.sentinels, *self.servers))

    # ------------------------------------------------------------------ trouble

    def kill_primary(self) -> RedisServer:
        """SIGKILL the primary; returns it."""
        server = self.primary()
        server.kill()
        return server

    def restart_dead(self) -> list[RedisServer]:
        """Start every killed server again (the sentinels make it a replica: `wait_ready`); returns them.

        Not before a failover in progress is known to all sentinels: one that still holds the returned server for the
        primary makes the promoted one its replica, and so undoes the failover.
        """
        for sentinel in self.sentinels:
            if not sentinel.running:
                sentinel.start()
        dead = [server for server in self.servers if not server.running]
        if dead:
            self.wait_ready()
        for server in dead:
            server.start()
        return dead


def _pairs(raw: Any) -> Any:
    return raw.items() if isinstance(raw, dict) else zip(raw[::2], raw[1::2], strict=True)
