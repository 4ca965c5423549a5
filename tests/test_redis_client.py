"""How Redis is reached: URLs, passwords, ACL, TLS, Sentinel and its failovers, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from redis.exceptions import ConnectionError, RedisError

from shared import messages as m
from shared.bus import Bus, Lease
from shared.config import ConfigError, Settings, load
from shared.redis_client import open_redis, parse_url, redis_url, safe_url
from shared.store import Commit, DirectoryStore, NodeCounts
from shared.streams import BusError
from tests.conftest import eventually
from tests.redis_servers import (
    NAME,
    Certificates,
    RedisServer,
    SentinelGroup,
    SentinelServer,
    ServerError,
    binaries,
    binary_name,
    certificates,
    tls_missing,
)

EXAMPLES = Path(__file__).parent.parent / "ops" / "redis"
ACL = EXAMPLES / "users.acl"
FAILOVER_S = 15.0

# ------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://h", {"hosts": (("h", 6379),)}),
        ("redis://", {"hosts": (("localhost", 6379),)}),
        ("redis://h:7000/3", {"hosts": (("h", 7000),), "db": 3}),
        ("redis://[::1]:7000/", {"hosts": (("::1", 7000),), "db": 0}),
        ("redis://:p%40%2F%3A@h", {"username": "", "password": "p@/:"}),
        ("redis://u:p@h", {"username": "u", "password": "p", "tls": False}),
        ("redis://u@h", {"username": "u", "password": ""}),
        ("rediss://h?ssl_ca_certs=/ca.pem", {"tls": True, "ssl": {"ssl_ca_certs": "/ca.pem"}}),
        (
            "rediss://h?ssl_cert_reqs=none&ssl_check_hostname=false",
            {"ssl": {"ssl_cert_reqs": "none", "ssl_check_hostname": False}},
        ),
        ("unix:///run/redis.sock?db=2", {"path": "/run/redis.sock", "db": 2, "hosts": ()}),
        ("unix://u:p@/run/redis.sock", {"path": "/run/redis.sock", "username": "u", "password": "p"}),
        ("redis+sentinel://a/main", {"hosts": (("a", 26379),), "primary": "main", "db": 0}),
        (
            "redis+sentinel://u:p@a:1,[fe80::1],[::1]:3,d/main/4",
            {"hosts": (("a", 1), ("fe80::1", 26379), ("::1", 3), ("d", 26379)), "db": 4, "username": "u"},
        ),
        (
            "rediss+sentinel://a/main?sentinel_username=s&sentinel_password=q%26&ssl_cert_reqs=required",
            {"tls": True, "sentinel_username": "s", "sentinel_password": "q&"},
        ),
    ],
)
def test_what_a_url_says(url: str, said: dict[str, object]) -> None:
    target = parse_url(url)
    assert {name: getattr(target, name) for name in said} == said


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nonsense", "it must begin with redis://"),
        ("http://h", "it must begin with redis://"),
        ("sentinel://h/main", "it must begin with redis://"),
        ("redis://h:port", "a port must be a number"),
        ("redis://h:70000", "a port must be a number"),
        ("redis://::1", "an IPv6 address needs brackets"),
        ("redis://[::1", "an IPv6 address needs both brackets"),
        ("redis://h/main", "the database must be a number"),
        ("redis://h/0/1", "the database must be a number"),
        ("redis://a,b/0", "only redis+sentinel"),
        ("redis://h?socket_timeout=1", "unknown option 'socket_timeout' (known to redis: none)"),
        ("redis://h?db=1", "unknown option 'db'"),
        ("redis://h?ssl_ca_certs=/ca.pem", "ssl_ca_certs needs rediss"),
        ("rediss://h?sentinel_password=x", "unknown option 'sentinel_password'"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs must be"),
        ("rediss://h?ssl_check_hostname=", "ssl_check_hostname must be true or false"),
        ("rediss://h?ssl_keyfile=/k", "ssl_keyfile needs ssl_certfile"),
        ("rediss://h?ssl_ca_certs=/a&ssl_ca_certs=/b", "ssl_ca_certs is given twice"),
        ("unix://", "the path of the socket is missing"),
        ("redis+sentinel://a", "the primary's name is missing"),
        ("redis+sentinel:///main", "a host is missing"),
        ("redis+sentinel://a,,b/main", "a host is missing"),
        ("redis+sentinel://a/main/x", "the database must be a number"),
        ("redis://:se/cret@h", "must be percent-encoded"),
        ("redis://:se?cret@h", "must be percent-encoded"),
    ],
)
def test_a_url_that_says_nothing_is_one_line(url: str, why: str) -> None:
    with pytest.raises(BusError) as caught:
        parse_url(url)
    text = str(caught.value)
    assert why in text and safe_url(url) in text and "\n" not in text and "cret" not in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://u@h", "redis://***@h"),
        ("redis://u:p@h/0", "redis://u:***@h/0"),
        ("redis://:p@ss/w?rd@h/0", "redis://:***@h/0"),
        ("u:p@h", "u:***@h"),
        (
            "rediss+sentinel://:p@a,b/m?sentinel_password=x&ssl_ca_certs=/ca",
            "rediss+sentinel://:***@a,b/m?sentinel_password=***&ssl_ca_certs=/ca",
        ),
        ("redis://h?PASSWORD=x", "redis://h?PASSWORD=***"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert safe_url(url) == shown


def test_settings_fill_in_what_the_url_lacks(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("f/ile\n")

    def merged(url: str, **settings: str) -> str:
        return redis_url(Settings(redis=url, **settings))  # type: ignore[arg-type]

    assert merged("redis://h/0") == "redis://h/0"
    assert merged("redis://h/0", redis_password="p@") == "redis://:p%40@h/0"
    assert merged("redis://h/0", redis_username="u", redis_password="p") == "redis://u:p@h/0"
    assert merged("redis://u@h/0", redis_password="p") == "redis://u:p@h/0"
    assert merged("redis://u:own@h/0", redis_username="v", redis_password="p") == "redis://u:own@h/0"
    assert (
        merged("redis+sentinel://a,b/m", redis_password_file=str(file)) == "redis+sentinel://:f%2File@a,b/m"
    )
    assert merged("unix:///s", redis_password="p", redis_password_file=str(file)) == "unix://:p@/s"
    once = merged("redis://h/0", redis_username="u", redis_password="p")
    assert merged(once, redis_username="u", redis_password="p") == once
    file.write_text("\n")
    for broken in (str(file), str(tmp_path / "absent")):
        with pytest.raises(ConfigError, match="redis_password_file"):
            merged("redis://h/0", redis_password_file=broken)


def test_the_password_comes_by_environment_and_help_does_not_tell_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"EI_REDIS_USERNAME": "u", "EI_REDIS_PASSWORD": "s3cret"}
    assert redis_url(load(Settings, "status", [], environ=environ)) == "redis://u:s3cret@127.0.0.1:6379/0"
    with pytest.raises(SystemExit):
        load(Settings, "status", ["--help"], environ=environ)
    assert "s3cret" not in capsys.readouterr().out


# ------------------------------------------------------------------------- one server


@pytest.fixture(scope="module", params=binaries(), ids=binary_name)
def binary(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tls_binary(binary: str) -> str:
    missing = tls_missing(binary)
    if missing:
        pytest.skip(missing)
    return binary


async def refusal(url: str) -> str:
    """What `Bus.connect` says, which must be one line, and quick."""
    begun = time.monotonic()
    with pytest.raises(BusError) as caught:
        await Bus.connect(url)
    text = str(caught.value)
    assert "\n" not in text and "s3cret" not in text and time.monotonic() - begun < 4.0
    return text


async def works(url: str) -> None:
    bus = await Bus.connect(url)
    await bus.save("x", b"y")
    assert await bus.load("x") == b"y"
    await bus.close()


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


@contextlib.asynccontextmanager
async def sending(bus: Bus) -> AsyncIterator[m.StreamMessage]:
    publisher = bus.publisher("branch", "r1")
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def batch(number: int, pages: int = 1) -> Commit:
    counts = NodeCounts(np.arange(1, pages + 1, dtype=np.int64), np.full(pages, number, dtype=np.int32))
    zero = NodeCounts(np.array([1], dtype=np.int64), np.array([0], dtype=np.int32))
    return Commit(
        number,
        counts={"n1": counts, "n2": zero, "n3": zero._replace(empty=True)},
        branches={"b": b"record", "gone": None},
        segments={1: b"s", 2: None},
        pages={1: (0, m.pack_pages([1, 2])), 3: (1, m.pack_pages([3]))},
        state={"branch": b"1-1", "gone": None},
    )


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


# ------------------------------------------------------------------------- Sentinel


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
    group.restart_dead()
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
