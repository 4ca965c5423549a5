"""Redis behind Sentinel: failovers of every kind, and the example settings, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared import messages as m
from shared.bus import Bus, Lease
from shared.redis_client import open_redis
from shared.store import DirectoryStore
from shared.streams import BusError
from tests.conftest import eventually
from tests.redis_servers import (
    RedisServer,
    ServerError,
    certificates,
)
from tests.redis_work import batch, refusal, sending, works
from tests.sentinel_group import NAME, SentinelGroup, SentinelServer

EXAMPLES = Path(__file__).parent.parent / "ops" / "redis"
ACL = EXAMPLES / "users.acl"
FAILOVER_S = 15.0


@pytest.fixture(scope="module")
def started(binary: str) -> Iterator[SentinelGroup]:
    with SentinelGroup(binary, password="s3cret") as group:
        yield group


@pytest.fixture
def group(started: SentinelGroup) -> SentinelGroup:
    """Everything up, whatever the test before has done."""
    started.restart_dead()
    started.wait_ready()
    return started


class Writer:
    """Sends messages and commits batches, as a directory's leader does."""

    def __init__(self, bus: Bus, lease: Lease) -> None:
        self.bus, self.lease, self.number = bus, lease, 0

    async def writes(self, timeout_s: float = FAILOVER_S) -> None:
        """A message and a batch go through within the time."""
        async with asyncio.timeout(timeout_s), sending(self.bus) as publisher:
            publisher.publish(m.BranchEnded("b"))
            await publisher.flush(timeout_s)
            self.number += 1
            await eventually(self._commit, timeout_s, 0.2)

    async def _commit(self) -> bool:
        try:
            await DirectoryStore(self.bus).commit(self.lease, batch(self.number))
        except BusError:
            return False
        return True


@pytest.fixture
async def writer(group: SentinelGroup, cluster_name: str) -> AsyncIterator[Writer]:
    bus = await Bus.connect(group.url, cluster_name)
    lease = bus.lease("directory", "one", 60.0)
    await lease.acquire()
    writer = Writer(bus, lease)
    await writer.writes()
    await asyncio.to_thread(group.wait_ready)
    yield writer
    await bus.close()


async def changed(group: SentinelGroup, old: RedisServer) -> RedisServer:
    """The new primary, once there is one."""

    def primary() -> RedisServer | None:
        with contextlib.suppress(ServerError):
            return group.primary() if group.primary() is not old else None
        return None

    found = await eventually(primary, FAILOVER_S)
    assert isinstance(found, RedisServer)
    return found


async def test_a_dead_sentinel_costs_nearly_nothing(group: SentinelGroup) -> None:
    hanging, dead, _ = group.sentinels
    hanging.pause()
    try:
        for _ in range(2):
            took = []
            for _ in range(3):
                begun = time.monotonic()
                await works(group.url)
                took.append(time.monotonic() - begun)
            assert min(took) < 0.4
            dead.kill()
        begun = time.monotonic()
        assert "no answer in 0.5 s" in await refusal(f"redis+sentinel://127.0.0.1:{hanging.port}/{NAME}")
        assert time.monotonic() - begun < 2.0
    finally:
        hanging.resume()


async def test_a_name_that_no_sentinel_knows(group: SentinelGroup) -> None:
    text = await refusal(group.url_of("other"))
    assert "no sentinel knows a primary named 'other'" in text and "sentinel monitor" in text


async def test_a_killed_primary_is_replaced_and_returns_as_a_replica(
    group: SentinelGroup, writer: Writer
) -> None:
    old = group.kill_primary()
    await writer.writes()
    assert group.primary() is not old
    await asyncio.to_thread(group.restart_dead)
    await asyncio.to_thread(group.wait_ready)
    assert old.role()[0] == "slave"
    await writer.writes(5.0)
    assert (await DirectoryStore(writer.bus).load()).number == writer.number


async def test_a_primary_that_hangs_is_replaced_and_returns_as_a_replica(
    group: SentinelGroup, writer: Writer
) -> None:
    old = group.primary()
    old.pause()
    begun = time.monotonic()
    await writer.writes()
    new = await changed(group, old)
    old.resume()
    await asyncio.to_thread(group.wait_ready)
    assert group.primary() is new
    await writer.writes(5.0)
    assert time.monotonic() - begun < 2 * FAILOVER_S


async def test_a_sentinel_that_missed_the_failover_is_outvoted(group: SentinelGroup, binary: str) -> None:
    if int(group.sentinels[0].state()["config-epoch"]) == 0:
        old = group.kill_primary()
        await changed(group, old)
    with (
        RedisServer(binary, password="s3cret") as stray,
        SentinelServer(binary, False, "", "", lambda: _monitoring(stray)) as behind,
    ):
        url = group.url.replace("127.0.0.1:", f"127.0.0.1:{behind.port},127.0.0.1:", 1)
        client = open_redis(url)
        await client.set("x", "y")
        await client.aclose()
        with stray.client() as asked:
            assert asked.dbsize() == 0


async def test_a_reader_follows_when_its_server_is_replaced_but_still_answers(binary: str) -> None:
    with (
        RedisServer(binary, password="s3cret") as one,
        RedisServer(binary, password="s3cret") as two,
        SentinelServer(binary, False, "", "", lambda: _monitoring(one)) as sentinel,
    ):
        bus = await Bus.connect(f"redis+sentinel://:s3cret@127.0.0.1:{sentinel.port}/{NAME}")
        reader = bus.reader({"branch": "0"})
        reading = asyncio.create_task(reader.read(1.0))
        await bus.load("x")
        with sentinel.client() as client:
            client.execute_command("SENTINEL", "REMOVE", NAME)
            client.execute_command("SENTINEL", "MONITOR", NAME, "127.0.0.1", two.port, 1)
            client.execute_command("SENTINEL", "SET", NAME, "auth-pass", "s3cret")
        await asyncio.gather(*(bus.load("x") for _ in range(3)))
        await reading
        with one.client() as asked:
            await eventually(lambda: len(asked.client_list(_type="normal")) == 1)
        async with sending(bus) as publisher:
            publisher.publish(m.BranchEnded("b"))
            await publisher.flush()
        assert len(await reader.read(1.0)) == 1
        await bus.close()


def _monitoring(server: RedisServer) -> list[str]:
    return [f"sentinel monitor {NAME} 127.0.0.1 {server.port} 1", f"sentinel auth-pass {NAME} s3cret"]


def _example(name: str, **values: str) -> list[str]:
    """Lines of an example's settings, those left out that a test server has of its own, some values changed."""
    own = (
        "bind",
        "port",
        "tls-port",
        "dir",
        "tls-cert-file",
        "tls-key-file",
        "tls-ca-cert-file",
        "requirepass",
    )
    lines = [line for line in (EXAMPLES / name).read_text().splitlines() if line and not line.startswith("#")]
    text = "\n".join(line for line in lines if line.split()[0] not in own)
    for old, new in values.items():
        assert old in text
        text = text.replace(old, new)
    return text.splitlines()


async def test_the_example_settings_work_together(tls_binary: str, tmp_path: Path) -> None:
    servers: list[RedisServer] = []
    with contextlib.ExitStack() as stack:
        for i in range(2):
            rules = tmp_path / f"users{i}.acl"
            rules.write_text(ACL.read_text() + "user admin on >admin ~* &* +@all\n")
            lines = _example(
                "redis.conf", **{"/etc/redis/users.acl": str(rules), "redis-1.internal": "localhost"}
            )
            replica_of = servers[0] if servers else None
            server = RedisServer(tls_binary, tls=True, replica_of=replica_of, extra=lines)
            server.username, server.password = "admin", "admin"
            servers.append(stack.enter_context(server))

        def lines_of_sentinel() -> list[str]:
            monitored = {
                "redis-1.internal 6379": f"localhost {servers[0].port}",
                "milliseconds main 5000": "milliseconds main 500",
            }
            return _example("sentinel.conf", **monitored)

        sentinels = [
            stack.enter_context(SentinelServer(tls_binary, True, "", "change-me", lines_of_sentinel))
            for _ in range(3)
        ]
        hosts = ",".join(f"localhost:{sentinel.port}" for sentinel in sentinels)
        options = f"ssl_ca_certs={certificates().ca}&sentinel_password=change-me"
        url = f"rediss+sentinel://evolving:change-me@{hosts}/main/0?{options}"

        async def writable() -> bool:
            with contextlib.suppress(BusError):
                await works(url)
                return True
            return False

        await eventually(writable)
        await eventually(lambda: all(s.state().get("num-other-sentinels") == 2 for s in sentinels))
        await eventually(lambda: all(s.state().get("num-slaves") == 1 for s in sentinels))
        servers[0].kill()
        await eventually(lambda: servers[1].role()[:1] == ["master"])
        assert "min-replicas-to-write" in await _cannot_write(url)
        servers[0].start()
        await eventually(lambda: servers[0].role()[:1] == ["slave"])
        await eventually(writable)


async def _cannot_write(url: str) -> str:
    async def refused() -> str:
        with contextlib.suppress(BusError):
            bus = await Bus.connect(url)
            try:
                await bus.save("x", b"y")
            except BusError as error:
                return str(error)
            finally:
                await bus.close()
        return ""

    return str(await eventually(refused))
