"""Transports: what `worker/transport/base.py` promises, by both of them, between real processes that die and freeze."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.conftest import eventually
from tests.transport_peer import pattern
from worker.kv.arena import Arena
from worker.transport import choose, mooncake, tcp
from worker.transport.base import Endpoint, Offsets, TransferError, Transport, TransportMissing
from worker.transport.choose import make_transport

PAGE = 4096
SLOTS = 4096
NBYTES = PAGE * SLOTS
BOUND_S = 12.0  # what no failure may take longer than
FILL = 0xEE


async def _why_not_mooncake() -> str:
    arena = Arena(1, PAGE, huge_pages=False)
    transport = mooncake.MooncakeTransport()
    try:
        await transport.start(arena, "127.0.0.1")
    except TransportMissing as missing:
        return str(missing)
    finally:
        await transport.close()
        arena.close()
    return ""


@pytest.fixture(scope="module")
def mooncake_missing() -> str:
    return asyncio.run(_why_not_mooncake())


@pytest.fixture(params=["tcp", "mooncake"])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "mooncake" and (missing := request.getfixturevalue("mooncake_missing")):
        pytest.skip(missing)
    return str(request.param)


class Node:
    """A transport in this process, and its arena."""

    def __init__(self, arena: Arena, transport: Transport) -> None:
        self.arena = arena
        self.transport = transport

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        return self.arena.memory

    async def read(
        self, peer: Endpoint, remote: Offsets, local: Offsets, length: int = PAGE, timeout_s: float = BOUND_S
    ) -> None:
        await self.transport.read(peer, remote, local, length, timeout_s)

    def equals(self, seed: int, remote: Offsets, local: Offsets, length: int = PAGE) -> bool:
        """Whether the pages here are the peer's, and all bytes around them are untouched."""
        theirs = pattern(NBYTES, seed)
        wanted = np.zeros(NBYTES, np.uint8)
        for source, target in zip(remote, local, strict=True):
            wanted[target : target + length] = theirs[source : source + length]
        return bool(np.array_equal(self.memory, wanted))


@contextlib.asynccontextmanager
async def node(name: str) -> AsyncIterator[Node]:
    arena = Arena(SLOTS, PAGE, huge_pages=False)
    transport = await make_transport(name, arena, "127.0.0.1")
    try:
        yield Node(arena, transport)
    finally:
        await transport.close()
        arena.close()


class Peer:
    """A serving process and its endpoint."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: Endpoint) -> None:
        self.process = process
        self.endpoint = endpoint

    def signal(self, number: int) -> None:
        """To it and to what it started."""
        os.killpg(self.process.pid, number)

    async def kill(self) -> None:
        """Itself only: what it started must notice."""
        children = children_of(self.process.pid)
        self.process.kill()
        await self.process.wait()
        await eventually(lambda: not any(alive(child) for child in children))


@contextlib.asynccontextmanager
async def peer(name: str, seed: int, port: int = 0, **environment: str) -> AsyncIterator[Peer]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.transport_peer", name, str(SLOTS), str(PAGE), str(seed), str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 30.0)
        yield Peer(process, msgspec.json.decode(line, type=Endpoint))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        process.stdin.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, children.read_text().split())
    return found


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def pages(*numbers: int) -> Offsets:
    return np.array(numbers, np.int64) * PAGE


def scattered(n: int, seed: int = 7) -> Offsets:
    return np.random.default_rng(seed).permutation(SLOTS)[:n].astype(np.int64) * PAGE


def long_read() -> tuple[Offsets, Offsets]:
    """Takes a while: 20,000 pages, the same ones again and again, the first into the arena's first."""
    return np.tile(scattered(2000, 1), 10), np.tile(pages(*range(2000)), 10)


async def begin_long_read(reader: Node, endpoint: Endpoint, timeout_s: float = BOUND_S) -> asyncio.Task[None]:
    """A long read, once its first bytes have arrived."""
    reader.memory[:] = 0
    task = asyncio.create_task(reader.read(endpoint, *long_read(), timeout_s=timeout_s))
    await eventually(lambda: reader.memory[:PAGE].any() or task.done(), every_s=0.001)
    assert not task.done()
    return task


async def stays(memory: npt.NDArray[np.uint8], value: int, for_s: float = 0.4) -> bool:
    """Whether nobody writes into memory that is filled with `value`."""
    memory[:] = value
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        await asyncio.sleep(0.02)
    return bool((memory == value).all())


async def failure(read: asyncio.Task[None] | asyncio.Future[None], within_s: float = BOUND_S) -> str:
    """The text of the TransferError with which it must end in time."""
    with pytest.raises(TransferError) as raised:
        await asyncio.wait_for(asyncio.shield(read), within_s)
    return str(raised.value)


# Bytes


async def test_exactly_the_bytes_asked_for(name: str) -> None:
    cases = {
        "scattered": (scattered(2000, 1), scattered(2000, 2), PAGE),
        "one": (pages(5), pages(9), PAGE),
        "neighbours": (pages(*range(100, 400)), pages(*range(2000, 2300)), PAGE),
        "spans here, others there": (pages(7, 8, 9, 20, 21, 5), pages(1, 2, 4, 5, 6, 7), PAGE),
        "ends": (pages(0, SLOTS - 1), pages(SLOTS - 1, 0), PAGE),
        "neighbours, but not what is read of them": (pages(3, 4, 5), pages(10, 11, 12), 1000),
        "odd": (np.array([17, 17, 4001], np.int64), np.array([1, 900, 70_001], np.int64), 37),
        "all": (np.array([0], np.int64), np.array([0], np.int64), NBYTES),
    }
    async with node(name) as server, node(name) as reader:
        server.memory[:] = pattern(NBYTES, 3)
        for case, (remote, local, length) in cases.items():
            reader.memory[:] = 0
            await reader.read(server.transport.endpoint, remote, local, length)
            assert reader.equals(3, remote, local, length), case


async def test_no_pages_and_bad_ranges_move_nothing(name: str) -> None:
    async with node(name) as server, node(name) as reader:
        server.memory[:] = pattern(NBYTES, 3)
        endpoint = server.transport.endpoint
        await reader.read(endpoint, pages(), pages())
        for remote, local, length in [
            (pages(1, SLOTS), pages(1, 2), PAGE),
            (pages(1, 2), pages(1, SLOTS), PAGE),
            (pages(1, -1), pages(1, 2), PAGE),
            (pages(1, 2), pages(-1, 1), PAGE),
            (pages(1, SLOTS - 1), pages(1, 2), PAGE + 1),
            (np.array([2**63 - 1], np.int64), pages(1), PAGE),
            (pages(1, 2), pages(1), PAGE),
            (pages(1), pages(1), 0),
            (pages(1), pages(1), -PAGE),
        ]:
            with pytest.raises(ValueError):
                await reader.read(endpoint, remote, local, length)
        assert not reader.memory.any()


async def test_twenty_reads_at_once_and_a_small_one_does_not_wait_for_a_long_one(name: str) -> None:
    async with node(name) as server, node(name) as reader:
        server.memory[:] = pattern(NBYTES, 3)
        endpoint = server.transport.endpoint
        long = await begin_long_read(reader, endpoint, 30.0)
        await reader.read(endpoint, pages(1), pages(SLOTS - 1))
        assert not long.done()
        long.cancel()
        await asyncio.wait([long])
        reader.memory[:] = 0
        remote, local = scattered(2000, 1), scattered(2000, 2)
        async with asyncio.TaskGroup() as group:
            for at in range(0, 2000, 100):
                group.create_task(reader.read(endpoint, remote[at : at + 100], local[at : at + 100]))
        assert reader.equals(3, remote, local)


# Peers that are not as they should be


async def test_dead_and_unknown_peers_fail_in_time(name: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    async with node(name) as server, node(name) as reader:
        server.memory[:] = pattern(NBYTES, 3)
        good = server.transport.endpoint
        for bad in [
            msgspec.structs.replace(good, address=address),
            msgspec.structs.replace(good, address="no.such.host.invalid:70"),
            msgspec.structs.replace(good, address="nonsense"),
            msgspec.structs.replace(good, address="a" * 2000 + ":70"),
            msgspec.structs.replace(good, address="\udc80:70"),
            msgspec.structs.replace(good, boot="nonsense"),
            msgspec.structs.replace(good, boot="0" * 32 + "@-1"),
            msgspec.structs.replace(good, boot="0" * 32 + "@" + "f" * 20),
            msgspec.structs.replace(good, boot="\udc80" + good.boot[1:]),
            msgspec.structs.replace(good, base=2**63 - 1, boot="0" * 32),
            msgspec.structs.replace(good, transport="pigeon"),
            msgspec.structs.replace(good, boot="0" * 32 + good.boot[32:]),
        ]:
            await failure(asyncio.ensure_future(reader.read(bad, pages(1), pages(1), timeout_s=5.0)))
        reader.memory[:] = 0
        await reader.read(good, pages(1), pages(2))
        assert reader.equals(3, pages(1), pages(2))


async def test_peer_killed_in_the_middle_of_a_read(name: str) -> None:
    async with peer(name, 1) as first, peer(name, 2) as second, node(name) as reader:
        read = await begin_long_read(reader, first.endpoint, 30.0)
        await first.kill()
        await failure(read)
        assert await stays(reader.memory, FILL)
        reader.memory[:] = 0
        await reader.read(second.endpoint, scattered(500, 1), scattered(500, 2))
        assert reader.equals(2, scattered(500, 1), scattered(500, 2))


async def test_peer_that_was_restarted_is_another_one(name: str) -> None:
    async with node(name) as reader:
        async with peer(name, 1) as first:
            await reader.read(first.endpoint, pages(1), pages(1))
            await first.kill()
        # Mooncake takes a port of its own choice.
        port = int(first.endpoint.address.rpartition(":")[2]) if name == "tcp" else 0
        async with peer(name, 2, port) as second:
            assert second.endpoint.boot != first.endpoint.boot
            assert name != "tcp" or second.endpoint.address == first.endpoint.address
            await failure(asyncio.ensure_future(reader.read(first.endpoint, pages(1), pages(1))))
            for _ in range(2):
                reader.memory[:] = 0
                await reader.read(second.endpoint, scattered(300, 1), scattered(300, 2))
                assert reader.equals(2, scattered(300, 1), scattered(300, 2))
                await failure(asyncio.ensure_future(reader.read(first.endpoint, pages(1), pages(1))))


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
async def test_silent_peer_costs_only_its_own_reads(name: str, known: bool) -> None:
    async with peer(name, 1) as frozen, peer(name, 2) as healthy, node(name) as reader:
        if known:
            await reader.read(frozen.endpoint, pages(1), pages(1))
        frozen.signal(signal.SIGSTOP)
        began = time.monotonic()
        silent = [
            asyncio.create_task(reader.read(frozen.endpoint, pages(1), pages(at), timeout_s=1.5))
            for at in (3000, 3001)
        ]
        for at in range(5):
            await reader.read(healthy.endpoint, scattered(500, at), scattered(500, at + 1))
        for read in silent:
            await failure(read, 6.0)
        assert time.monotonic() - began < 8.0
        reader.memory[:] = 0
        await reader.read(healthy.endpoint, scattered(500, 1), scattered(500, 2))
        frozen.signal(signal.SIGCONT)
        await frozen.kill()
        assert reader.equals(2, scattered(500, 1), scattered(500, 2))


# Ends


@pytest.mark.parametrize("answering", [True, False], ids=["answering", "frozen"])
async def test_nothing_is_written_after_a_cancelled_read(name: str, answering: bool) -> None:
    async with peer(name, 1) as serving, node(name) as reader:
        read = await begin_long_read(reader, serving.endpoint)
        if not answering:
            serving.signal(signal.SIGSTOP)
        read.cancel()
        read_ended = await asyncio.wait([read], timeout=BOUND_S)
        assert read_ended[0] and read.cancelled()
        reader.memory[:] = FILL
        serving.signal(signal.SIGCONT)
        assert await stays(reader.memory, FILL)
        reader.memory[:] = 0
        await reader.read(serving.endpoint, pages(1), pages(2))
        assert reader.equals(1, pages(1), pages(2))


async def test_nothing_is_written_after_a_read_that_took_too_long(name: str) -> None:
    async with peer(name, 1) as serving, node(name) as reader:
        read = await begin_long_read(reader, serving.endpoint, timeout_s=1.5)
        serving.signal(signal.SIGSTOP)
        await failure(read, 4.0)
        reader.memory[:] = FILL
        serving.signal(signal.SIGCONT)
        assert await stays(reader.memory, FILL)


async def test_rounds_of_reads_cancellations_and_errors_leak_nothing(name: str) -> None:
    async with node(name) as server, node(name) as reader:
        server.memory[:] = pattern(NBYTES, 3)
        good = server.transport.endpoint
        dead = msgspec.structs.replace(good, address="127.0.0.1:9")

        async def rounds(n: int) -> None:
            for at in range(n):
                if at % 40 == 3:
                    await failure(asyncio.ensure_future(reader.read(dead, pages(1), pages(1))))
                elif at % 3:
                    await reader.read(good, scattered(20, at), scattered(20, at + 1))
                else:
                    read = asyncio.create_task(reader.read(good, scattered(600, at), scattered(600, at + 1)))
                    await asyncio.sleep(0.001 * (at % 5))
                    read.cancel()
                    await asyncio.wait([read])
            await reader.read(good, pages(1), pages(1))

        await rounds(10)
        fds, children = open_fds(), len(children_of(os.getpid()))
        await rounds(200)
        await eventually(lambda: open_fds() <= fds + 2)  # a few kept connections more or less
        assert len(children_of(os.getpid())) == children


async def test_close_ends_reads_and_leaves_nothing(name: str) -> None:
    fds, children = open_fds(), children_of(os.getpid())
    async with node(name) as server:
        server.memory[:] = pattern(NBYTES, 3)
        async with node(name) as reader:
            read = await begin_long_read(reader, server.transport.endpoint)
            await reader.transport.close()
            await failure(read, 2.0)
            del read  # its traceback holds a view of the arena
            assert await stays(reader.memory, FILL, 0.1)
            await failure(asyncio.ensure_future(reader.read(server.transport.endpoint, pages(1), pages(1))))
    assert children_of(os.getpid()) == children
    await eventually(lambda: open_fds() <= fds)


# Mooncake's processes


async def test_processes_that_crash_are_replaced(mooncake_missing: str) -> None:
    if mooncake_missing:
        pytest.skip(mooncake_missing)
    before = set(children_of(os.getpid()))
    async with node("mooncake") as server:
        server.memory[:] = pattern(NBYTES, 3)
        (serving,) = set(children_of(os.getpid())) - before
        async with node("mooncake") as reader:
            idle = set(children_of(os.getpid()))
            read = await begin_long_read(reader, server.transport.endpoint, 30.0)
            (reading,) = set(children_of(os.getpid())) - idle
            os.kill(reading, signal.SIGSEGV)
            assert "ended with -11" in await failure(read)
            reader.memory[:] = 0
            await reader.read(server.transport.endpoint, pages(1), pages(2))
            assert reader.equals(3, pages(1), pages(2))

            old = server.transport.endpoint
            os.kill(serving, signal.SIGKILL)
            await eventually(lambda: server.transport.endpoint.boot != old.boot)
            await failure(asyncio.ensure_future(reader.read(old, pages(1), pages(3))))
            reader.memory[:] = 0
            await reader.read(server.transport.endpoint, pages(1), pages(2))
            assert reader.equals(3, pages(1), pages(2))


async def test_silent_peer_is_found_out_once(mooncake_missing: str) -> None:
    if mooncake_missing:
        pytest.skip(mooncake_missing)
    async with peer("mooncake", 1) as frozen, node("mooncake") as reader:
        frozen.signal(signal.SIGSTOP)
        began = time.monotonic()
        reads = [
            asyncio.create_task(reader.read(frozen.endpoint, pages(at), pages(at), timeout_s=30.0))
            for at in range(5)
        ]
        for read in reads:
            await failure(read)
        assert time.monotonic() - began < 2 * mooncake.FIRST_BATCH_S


async def test_another_boot_at_a_known_address_is_read_by_a_new_process(mooncake_missing: str) -> None:
    if mooncake_missing:
        pytest.skip(mooncake_missing)
    async with node("mooncake") as server, node("mooncake") as reader:
        server.memory[:] = pattern(NBYTES, 3)
        good = server.transport.endpoint
        idle = set(children_of(os.getpid()))
        await reader.read(good, pages(1), pages(1))
        (first,) = set(children_of(os.getpid())) - idle
        await reader.read(good, pages(1), pages(1))
        assert alive(first)
        other = msgspec.structs.replace(good, boot="0" * 32 + good.boot[32:])
        assert "another boot" in await failure(asyncio.ensure_future(reader.read(other, pages(2), pages(1))))
        (second,) = set(children_of(os.getpid())) - idle
        await reader.read(good, pages(1), pages(1))
        (third,) = set(children_of(os.getpid())) - idle
        assert len({first, second, third}) == 3
        dead = msgspec.structs.replace(good, address="127.0.0.1:9")
        await failure(asyncio.ensure_future(reader.read(dead, pages(2), pages(1))))
        await eventually(lambda: not alive(third))  # for it may write after an error


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_close_right_after_the_start_leaves_nothing(name: str, steps: int) -> None:
    fds, children = open_fds(), children_of(os.getpid())
    async with node(name) as server:
        async with node(name) as reader:
            read = asyncio.create_task(reader.read(server.transport.endpoint, pages(1), pages(1)))
            for _ in range(steps):
                await asyncio.sleep(0)
        await failure(read, 2.0)
        del read
    assert children_of(os.getpid()) == children
    await eventually(lambda: open_fds() <= fds)


async def test_without_mooncake_auto_is_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1: not found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    children = children_of(os.getpid())
    with pytest.raises(TransportMissing, match=r"libibverbs.so.1: not found.*pip install"):
        async with node("mooncake"):
            pass
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(choose, "RDMA_DEVICES", tmp_path)
    async with node("auto") as chosen:
        assert chosen.transport.name == "tcp"
        assert children_of(os.getpid()) == children
    with pytest.raises(ValueError, match="pigeon"):
        async with node("pigeon"):
            pass


# The TCP server and clients that are not its own


async def connect(endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Welcomed by the server."""
    host, _, port = endpoint.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
    writer.write(tcp.MAGIC + endpoint.boot.encode())
    assert struct.unpack("<QQ", await reader.readexactly(16)) == (tcp.OK, NBYTES)
    return reader, writer


@pytest.mark.parametrize(
    "request_bytes",
    [
        struct.pack("<QQ", 0, PAGE),
        struct.pack("<QQ", 2**60, PAGE),
        struct.pack("<QQ", 1, NBYTES + 1),
        struct.pack("<QQ", 1, 2**64 - 1),
        struct.pack("<QQ", tcp.MAX_COUNT, NBYTES),
        struct.pack("<QQq", 1, PAGE, -1),
        struct.pack("<QQqq", 2, PAGE, 0, NBYTES - PAGE + 1),
        struct.pack("<QQq", 1, PAGE, 2**63 - 1),
    ],
    ids=["none", "count", "length", "huge length", "answer", "before", "behind", "huge offset"],
)
async def test_tcp_refuses_bad_requests(request_bytes: bytes) -> None:
    async with node("tcp") as server:
        reader, writer = await connect(server.transport.endpoint)
        writer.write(request_bytes)
        answer = await asyncio.wait_for(reader.read(), BOUND_S)
        assert answer == struct.pack("<Q", tcp.BAD_REQUEST)
        writer.close()


async def test_tcp_drops_garbage_and_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "REQUEST_S", 0.2)
    async with node("tcp") as server:
        host, _, port = server.transport.endpoint.address.rpartition(":")
        for hello in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n......", b"", b"EI"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(hello)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 3.0) == b""
            writer.close()


async def test_tcp_bounds_connections_and_clients_that_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "SERVED_CONNECTIONS", 3)
    monkeypatch.setattr(tcp, "ANSWER_S", 0.5)
    monkeypatch.setattr(tcp, "ANSWER_BYTES_A_SECOND", 2**30)
    async with node("tcp") as server, node("tcp") as reader:
        server.memory[:] = pattern(NBYTES, 3)
        endpoint = server.transport.endpoint
        held = [await connect(endpoint) for _ in range(2)]
        for _, writer in held:
            writer.write(struct.pack("<QQ", 4, NBYTES) + bytes(32))
        await reader.read(endpoint, pages(1), pages(2))
        assert reader.equals(3, pages(1), pages(2))
        host, _, port = endpoint.address.rpartition(":")
        refused, writer = await asyncio.open_connection(host, int(port))
        assert await asyncio.wait_for(refused.read(), 0.4) == b""
        writer.close()

        async def served() -> bool:
            try:
                (await connect(endpoint))[1].close()
            except (asyncio.IncompleteReadError, ConnectionError):
                return False
            return True

        await eventually(served, 5.0)
        for _, writer in held:
            writer.close()


async def test_tcp_keeps_connections_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "IDLE_S", 0.4)
    async with node("tcp") as server, node("tcp") as reader:
        endpoint = server.transport.endpoint
        fds = open_fds()
        async with asyncio.TaskGroup() as group:
            for at in range(20):
                group.create_task(reader.read(endpoint, scattered(500, at), scattered(500, at)))
        assert open_fds() - fds <= 2 * tcp.PEER_CONNECTIONS  # both ends are here
        await reader.read(endpoint, pages(1), pages(1))
        assert open_fds() > fds
        await eventually(lambda: open_fds() == fds, 5.0)
        await reader.read(endpoint, pages(1), pages(1))
