"""Redis over a socket, with passwords, ACL users and TLS, against real servers."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from redis.exceptions import ConnectionError, RedisError

from shared import messages as m
from shared.bus import Bus
from shared.redis_client import open_redis
from shared.store import DirectoryStore
from shared.streams import BusError
from tests.conftest import eventually
from tests.redis_servers import (
    Certificates,
    RedisServer,
    certificates,
)
from tests.redis_work import batch, refusal, sending, works
from tests.sentinel_group import SentinelGroup

EXAMPLES = Path(__file__).parent.parent / "ops" / "redis"
ACL = EXAMPLES / "users.acl"
FAILOVER_S = 15.0


@pytest.fixture(scope="module")
def guarded(binary: str) -> Iterator[RedisServer]:
    limited = ["user few on >s3cret ~ei:* +ping", "user other on >s3cret ~other:* +@all"]
    with RedisServer(binary, password="s3cret", extra=limited) as server:
        yield server


async def test_a_password_opens(guarded: RedisServer) -> None:
    await works(guarded.url)


@pytest.mark.parametrize(
    ("userinfo", "why"),
    [
        ("", "asks for a password: give EI_REDIS_PASSWORD"),
        (":s3cret-not@", "invalid username-password pair"),
        ("nobody:s3cret@", "check the user's name and password"),
        ("few:s3cret@", "'get' command; give the ACL user the rights in ops/redis/users.acl"),
        ("other:s3cret@", "give the ACL user the rights in ops/redis/users.acl"),
    ],
)
async def test_a_refused_user_is_told_why(guarded: RedisServer, userinfo: str, why: str) -> None:
    assert why in await refusal(f"redis://{userinfo}127.0.0.1:{guarded.port}/0")


async def test_no_server_is_one_line(guarded: RedisServer) -> None:
    assert "127.0.0.1:1/0 cannot be used: Error 111" in await refusal("redis://:s3cret@127.0.0.1:1/0")
    assert "no such file" in (await refusal("unix:///nowhere/redis.sock")).lower()
    assert "no sentinel can be asked" in await refusal(
        "redis+sentinel://:s3cret@127.0.0.1:1,127.0.0.1:2/main"
    )
    bare = f"redis+sentinel://127.0.0.1:{guarded.port}/main"
    assert "asks for a password: give sentinel_password" in await refusal(bare)
    text = await refusal(f"{bare}?sentinel_password=s3cret")
    assert "a server answers there, not a sentinel" in text


async def test_a_socket_file(binary: str, tmp_path: Path) -> None:
    with RedisServer(binary, password="p", extra=[f"unixsocket {tmp_path}/redis.sock"]):
        await works(f"unix://:p@{tmp_path}/redis.sock?db=1")


async def test_the_user_of_the_example_may_do_what_the_bus_does_and_no_more(
    binary: str, tmp_path: Path
) -> None:
    rules = tmp_path / "users.acl"
    admin = "user admin on >admin ~* +@all\n"
    rules.write_text(ACL.read_text().replace("user default off", "user default on >admin ~* +@all") + admin)
    server = RedisServer(binary, extra=[f"aclfile {rules}"])
    server.password = "admin"
    with server:
        bus = await Bus.connect(f"redis://evolving:change-me@127.0.0.1:{server.port}/1", "c")
        async with sending(bus) as publisher:
            reader = bus.reader({})
            await reader.follow("branch")
            publisher.publish(m.BranchEnded("b"))
            await publisher.flush()
            assert [event.message for event in await reader.read()] == [m.BranchEnded("b")]
        assert len(await bus.last("branch")) == 1
        await bus.register_service(m.ServiceInfo("router", "r1", "http://r1", 0.0), 0.05)
        assert len(await bus.services()) == 1
        await eventually(lambda: _empty(bus))
        await bus.register_service(m.ServiceInfo("router", "r1", "http://r1", 0.0), 5.0)
        await bus.unregister_service("r1")
        assert await bus.nodes() == {}
        await bus.save("x", b"y")
        assert await bus.load("x") == b"y"
        lease = bus.lease("directory", "one", 5.0)
        assert await lease.acquire() and await lease.acquire() and await lease.renew()
        assert await bus.lease("directory", "two", 5.0).acquire() is None
        for number in (1, 2):
            await DirectoryStore(bus).commit(lease, batch(number, pages=2000))
        assert (
            (await DirectoryStore(bus).load()).number
            == (await DirectoryStore(bus).load_at_once()).number
            == 2
        )
        assert await DirectoryStore(bus).load_branch("b") == b"record"
        assert (await DirectoryStore(bus).load_segment(1))[0] == b"s"
        assert (await DirectoryStore(bus).load_counts("n1", np.array([5], dtype=np.int64))).size == 1
        await lease.release()
        with pytest.raises(RedisError):
            await bus.redis.set("other:key", "x")
        await bus.close()
        with server.client() as client:
            used = {
                name.removeprefix("cmdstat_").replace("_", "|") for name in client.info("commandstats")
            } | {"select", "unwatch"}
            denied = [entry for entry in client.acl_log() if entry["object"] != "other:key"]
    (rule,) = re.findall(r"^user evolving .*$", ACL.read_text(), re.M)
    assert not denied
    assert set(re.findall(r"\+(\S+)", rule)) <= used


async def _empty(bus: Bus) -> bool:
    return not await bus.services()


async def test_a_server_that_takes_no_writes_is_left(binary: str) -> None:
    with RedisServer(binary) as server:
        client = open_redis(server.url)
        other = await client.client_id()
        with server.client() as admin:
            admin.config_set("min-replicas-to-write", 1)
            with pytest.raises(ConnectionError, match="min-replicas-to-write"):
                await client.set("x", "y")
            assert await client.client_id() > other
            admin.config_set("min-replicas-to-write", 0)
            await client.set("x", "y")
            other = await client.client_id()
            admin.replicaof("127.0.0.1", 1)
            script = client.register_script("return redis.call('SET', KEYS[1], 'z')")
            with pytest.raises(ConnectionError, match="has become a replica"):
                await script(keys=["x"])
            assert await client.client_id() > other
            with pytest.raises(ConnectionError, match="has become a replica"):
                async with client.pipeline(transaction=True) as pipe:
                    await pipe.watch("x")
                    pipe.multi()
                    pipe.set("x", "z")
                    await pipe.execute()
        await client.aclose()


async def test_a_connection_lost_during_a_commit_is_no_loss_of_the_lease(binary: str) -> None:
    with RedisServer(binary) as server:
        bus = await Bus.connect(server.url)
        lease = bus.lease("directory", "one", 60.0)
        await lease.acquire()
        await DirectoryStore(bus).commit(lease, batch(1))
        with server.client() as admin:
            admin.replicaof("127.0.0.1", 1)
            with pytest.raises(BusError, match="has become a replica"):
                await DirectoryStore(bus).commit(lease, batch(2))
            admin.replicaof("NO", "ONE")
        await DirectoryStore(bus).commit(lease, batch(2))
        server.kill()
        with pytest.raises(BusError):
            await DirectoryStore(bus).commit(lease, batch(3))
        server.start()
        await DirectoryStore(bus).commit(lease, batch(3))
        await bus.close()


# ------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def files(tls_binary: str) -> Certificates:
    return certificates()


@pytest.fixture(scope="module")
def tls_server(tls_binary: str) -> Iterator[RedisServer]:
    with RedisServer(tls_binary, tls=True, password="s3cret", extra=["bind 127.0.0.1 127.0.0.2"]) as server:
        yield server


async def test_tls_with_a_ca(tls_server: RedisServer) -> None:
    await works(tls_server.url)
    await works(f"rediss://:s3cret@127.0.0.1:{tls_server.port}/0?ssl_cert_reqs=none")


async def test_tls_that_is_not_trusted_is_told_why(tls_server: RedisServer, files: Certificates) -> None:
    address = f":s3cret@127.0.0.1:{tls_server.port}/0"
    assert "give the CA that signed its certificate" in await refusal(f"rediss://{address}")
    other = certificates("another CA").ca
    assert "give the CA that signed" in await refusal(f"rediss://{address}?ssl_ca_certs={other}")
    elsewhere = f"rediss://:s3cret@127.0.0.2:{tls_server.port}/0?ssl_ca_certs={files.ca}"
    assert "name the host as its certificate does" in await refusal(elsewhere)
    await works(elsewhere + "&ssl_check_hostname=false")
    assert "rediss:// for redis://" in await refusal(f"redis://{address}")
    assert "ssl_ca_certs: /nowhere: No such file" in await refusal(
        f"rediss://{address}?ssl_ca_certs=/nowhere"
    )
    assert "cannot be used" in await refusal(f"rediss://{address}?ssl_ca_certs={files.client_key}")


async def test_tls_with_client_certificates(tls_binary: str, files: Certificates) -> None:
    other = certificates("another CA")
    with RedisServer(tls_binary, tls=True, extra=["tls-auth-clients yes"]) as server:
        await works(f"{server.url}&ssl_certfile={files.client}&ssl_keyfile={files.client_key}")
        assert "client certificate" in await refusal(server.url)
        wrong = f"{server.url}&ssl_certfile={other.client}&ssl_keyfile={other.client_key}"
        assert "client certificate" in await refusal(wrong)


async def test_plain_server_behind_a_tls_url(guarded: RedisServer) -> None:
    text = await refusal(f"rediss://127.0.0.1:{guarded.port}/0")
    assert "redis:// for rediss://" in text


async def test_sentinels_and_servers_over_tls_each_with_a_password(tls_binary: str) -> None:
    group = SentinelGroup(tls_binary, password="s3cret", sentinel_password="s3cret2", tls=True)
    await asyncio.to_thread(group.start)
    try:
        await works(group.url)
        assert "a sentinel asks for a password" in await refusal(
            re.sub("sentinel_password=[^&]*&", "", group.url)
        )
        assert "invalid username-password" in await refusal(group.url.replace("s3cret2", "s3cret3"))
        assert "check the user's name" in await refusal(group.url.replace(":s3cret@", ":s3cret3@"))
        assert "CERTIFICATE_VERIFY_FAILED" in await refusal(re.sub("&?ssl_ca_certs=[^&]*", "", group.url))
    finally:
        await asyncio.to_thread(group.stop)


def test_a_connection_that_goes_under_a_write_is_an_error_of_the_connection(binary: str) -> None:
    """uvloop, which the services run on, has an exception of its own for that."""
    uvloop = pytest.importorskip("uvloop")

    async def write() -> None:
        client = open_redis(server.url)
        await client.ping()
        connection = await client.connection_pool.get_connection()
        connection._writer.transport.abort()
        with pytest.raises(ConnectionError):
            await connection.send_packed_command(connection.pack_command("PING"))
        await client.connection_pool.release(connection)
        assert await client.ping()
        await client.aclose()

    with RedisServer(binary) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(write())


async def test_a_cancellation_during_a_command_is_not_lost(redis_url: str) -> None:
    client, rng = open_redis(redis_url), random.Random(1)

    async def asking() -> None:
        while True:
            await client.get("x")

    for _ in range(300):
        task = asyncio.ensure_future(asking())
        for _ in range(rng.randint(1, 60)):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=5.0)
        if not done:
            task.cancel()
            pytest.fail("the task goes on")
    assert await client.ping()
    await client.aclose()
