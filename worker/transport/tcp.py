"""Pages over plain TCP: needs nothing but a network, and is what a node uses when Mooncake is not there.

A connection opens with a hello that names the boot it wants; then it carries one request after the other.
    client: MAGIC, boot (32 bytes)                      server: status (u64), bytes of the arena (u64)
    client: count (u64), length (u64), int64[count]     server: status (u64), count x length bytes when it is 0

Rules that hold here
- Bytes go from the arena into the socket and from the socket into the arena: nothing is copied in between, and pages
  that lie side by side are one piece.
- Only the coroutine of a read writes into its destination. When it ends early its connection is closed, so bytes
  that are still under way have no place to go.
- Every wait has an end: a read's is its `timeout_s`; a server gives a hello, a request and an answer their time and
  closes the connection of a client that does not keep to it. A connection is in use by one read at a time.
- What a client sends is checked against the arena before memory is taken for it.
- Anyone who reaches the port may read the arena: the network must keep others out.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Coroutine

import numpy as np

from shared.log import get_logger
from worker.kv.arena import Arena
from worker.transport.base import Endpoint, Offsets, TransferError
from worker.transport.spans import check_read, spans, split_address

MAGIC = b"EI-KV-1\n"
_BOOT_BYTES = 32
_HELLO = struct.Struct(f"<8s{_BOOT_BYTES}s")
_WELCOME = struct.Struct("<QQ")
_REQUEST = struct.Struct("<QQ")
_STATUS = struct.Struct("<Q")
OK, OTHER_BOOT, BAD_REQUEST = range(3)
_REFUSALS = {OTHER_BOOT: "it is another boot", BAD_REQUEST: "it found the request bad"}

MAX_COUNT = 32_768  # pages a request
MAX_REQUEST_BYTES = 256 * 2**20  # of an answer to more than one page
PEER_CONNECTIONS = 4  # at once to one peer
SERVED_CONNECTIONS = 512  # at once from all peers
IDLE_S = 30.0  # a client keeps a connection that long
SERVED_IDLE_S = 90.0  # and a server, so that it is the client who closes
REQUEST_S = 5.0  # for a hello or the offsets of a request to arrive
ANSWER_S = 5.0  # for an answer to leave, and a second more for each of these bytes
ANSWER_BYTES_A_SECOND = 4 * 2**20
_PIECES = 64  # at once into one system call
_PIECE_BYTES = 2**20  # what moves before other tasks get their turn
log = get_logger("worker")


class _Gone(OSError):
    """The other side closed the connection."""


class _Stream:
    """A non-blocking socket that moves many pieces of memory in one system call. One task at a time uses it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._waiting: asyncio.Future[None] | None = None
        self.since = 0.0  # monotonic time from when it was idle

    async def connect(self, address: tuple[object, ...]) -> None:
        """Raises OSError."""
        code = self._sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            await self._ready(reading=False)
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    async def receive(self, memory: memoryview, offsets: Offsets, lengths: Offsets) -> None:
        """Fill the pieces of `memory` with the bytes that come next. Raises OSError."""
        await self._move(memory, offsets, lengths, lambda pieces: self._sock.recvmsg_into(pieces)[0], True)

    async def send(self, memory: memoryview, offsets: Offsets, lengths: Offsets) -> None:
        """Send the pieces of `memory`. Raises OSError."""
        await self._move(memory, offsets, lengths, self._sock.sendmsg, False)

    async def receive_exactly(self, nbytes: int) -> bytearray:
        """The next `nbytes` bytes. Raises OSError."""
        data = bytearray(nbytes)
        await self.receive(memoryview(data), np.zeros(1, np.int64), np.array([nbytes], np.int64))
        return data

    async def send_all(self, data: bytes) -> None:
        """Send `data`. Raises OSError."""
        await self.send(memoryview(data), np.zeros(1, np.int64), np.array([len(data)], np.int64))

    async def _move(
        self,
        memory: memoryview,
        offsets: Offsets,
        lengths: Offsets,
        move: Callable[[list[memoryview]], int],
        reading: bool,
    ) -> None:
        ends = np.cumsum(lengths)  # in the stream
        total = int(ends[-1]) if ends.size else 0
        done = turn = 0
        pieces: list[memoryview] = []
        try:
            while done < total:
                at = int(np.searchsorted(ends, done, side="right"))
                inside = done - int(ends[at] - lengths[at])
                room = _PIECE_BYTES
                some = slice(at, at + _PIECES)
                for offset, length in zip(offsets[some].tolist(), lengths[some].tolist(), strict=True):
                    take = min(length - inside, room)
                    pieces.append(memory[offset + inside : offset + inside + take])
                    inside = 0
                    room -= take
                    if not room:
                        break
                try:
                    moved = move(pieces)
                except (BlockingIOError, InterruptedError):
                    pieces.clear()
                    await self._ready(reading)
                    turn = 0
                    continue
                pieces.clear()
                if not moved:
                    raise _Gone(errno.ECONNRESET, "the connection was closed")
                done += moved
                turn += moved
                if turn >= _PIECE_BYTES:
                    turn = 0
                    await asyncio.sleep(0)
                    self._check_open()
        finally:
            pieces.clear()  # an error's traceback would keep the arena's memory

    def _check_open(self) -> None:
        if self._sock.fileno() < 0:
            raise _Gone(errno.ECONNABORTED, "the transport was closed")

    async def _ready(self, reading: bool) -> None:
        """Wait until the socket can move bytes again, or was closed from this side: then OSError."""
        self._check_open()
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        fd = self._sock.fileno()
        add, remove = (
            (loop.add_reader, loop.remove_reader) if reading else (loop.add_writer, loop.remove_writer)
        )
        add(fd, _wake, self._waiting)
        try:
            await self._waiting
        finally:
            if self._sock.fileno() >= 0:
                remove(fd)
            self._waiting = None

    @property
    def usable(self) -> bool:
        """False once the other side closed an idle connection, or sent what nobody asked for."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close it at once; a task that waits for it gets an OSError. A second call does nothing."""
        if self._sock.fileno() < 0:
            return
        if self._waiting is not None:
            loop = self._waiting.get_loop()
            loop.remove_reader(self._sock.fileno())
            loop.remove_writer(self._sock.fileno())
            if not self._waiting.done():
                self._waiting.set_exception(_Gone(errno.ECONNABORTED, "the transport was closed"))
        self._sock.close()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class _Peer:
    """The connections to one boot of one peer: at most PEER_CONNECTIONS, the idle ones kept for the next read."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(PEER_CONNECTIONS)
        self.idle: list[_Stream] = []
        self.reads = 0  # running or waiting for a connection


class TcpTransport:
    """Serves on `port` (0: any free one) of `bind` (an address of this machine; empty: all of them)."""

    name = "tcp"

    def __init__(self, *, port: int = 0, bind: str = "") -> None:
        self._bind = bind
        self._port = port
        self._peers: dict[tuple[str, str], _Peer] = {}
        self._busy: set[_Stream] = set()
        self._served: set[_Stream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._endpoint: Endpoint | None = None
        self._memory = memoryview(b"")

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            raise RuntimeError("the transport was not started")
        return self._endpoint

    async def start(self, arena: Arena, host: str) -> None:
        self._memory = arena.memory.data
        family = socket.AF_INET6 if ":" in self._bind else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.setblocking(False)
            self._listener.bind((self._bind, self._port))
            self._listener.listen(128)
        except OSError:
            self._listener.close()
            raise
        self._endpoint = Endpoint(
            transport=self.name,
            address=f"{host}:{self._listener.getsockname()[1]}",
            boot=uuid.uuid4().hex,
            nbytes=arena.nbytes,
        )
        self._own(self._accept(self._listener))
        self._own(self._close_idle())

    def _own(self, work: Coroutine[object, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Reading

    async def read(
        self, peer: Endpoint, remote: Offsets, local: Offsets, length: int, timeout_s: float
    ) -> None:
        remote, local = check_read(self.name, peer, remote, local, length, self.endpoint.nbytes)
        if not remote.size:
            return
        pool = self._peers.setdefault((peer.address, peer.boot), _Peer())
        pool.reads += 1
        try:
            async with asyncio.timeout(timeout_s), pool.slots:
                await self._read(pool, peer, remote, local, length)
        except TimeoutError:
            raise TransferError(f"{peer.address} did not deliver within {timeout_s:g} s") from None
        except OSError as error:
            raise TransferError(f"{peer.address}: {error.strerror or error}") from error
        finally:
            pool.reads -= 1
            if not pool.reads and not pool.idle:
                self._peers.pop((peer.address, peer.boot), None)

    async def _read(self, pool: _Peer, peer: Endpoint, remote: Offsets, local: Offsets, length: int) -> None:
        """Read in requests of a bounded size, over one connection."""
        stream = self._idle_stream(pool) or await self._connect(peer)
        self._busy.add(stream)
        try:
            step = max(1, min(MAX_COUNT, MAX_REQUEST_BYTES // length))
            for at in range(0, remote.size, step):
                offsets = remote[at : at + step]
                await stream.send_all(
                    _REQUEST.pack(offsets.size, length) + offsets.astype("<i8", copy=False).tobytes()
                )
                (status,) = _STATUS.unpack(await stream.receive_exactly(_STATUS.size))
                _accept_status(peer, status)
                (into,), lengths = spans(length, local[at : at + step])
                await stream.receive(self._memory, into, lengths)
        except BaseException:
            stream.close()
            raise
        finally:
            self._busy.discard(stream)
        stream.since = time.monotonic()
        pool.idle.append(stream)

    def _idle_stream(self, pool: _Peer) -> _Stream | None:
        while pool.idle:
            stream = pool.idle.pop()
            if stream.usable:
                return stream
            stream.close()
        return None

    async def _connect(self, peer: Endpoint) -> _Stream:
        """A connection to that boot of the peer. Raises OSError, TransferError."""
        host, port = split_address(peer.address)
        boot = peer.boot.encode(errors="replace")
        if len(boot) != _BOOT_BYTES:
            raise TransferError(
                f"{peer.address}: {peer.boot!r} is not the boot of a node that serves over TCP"
            )
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if self._listener is None:
            raise TransferError("the transport is closed")
        family, kind, protocol, _, address = found[0]
        stream = _Stream(socket.socket(family, kind, protocol))
        self._busy.add(stream)
        try:
            await stream.connect(address)
            await stream.send_all(_HELLO.pack(MAGIC, boot))
            status, nbytes = _WELCOME.unpack(await stream.receive_exactly(_WELCOME.size))
            _accept_status(peer, status)
            if nbytes != peer.nbytes:
                raise TransferError(f"{peer.address} has an arena of {nbytes} bytes, not {peer.nbytes}")
        except BaseException:
            stream.close()
            raise
        finally:
            self._busy.discard(stream)
        return stream

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 4)
            before = time.monotonic() - IDLE_S
            for key, pool in list(self._peers.items()):
                for stream in [each for each in pool.idle if each.since < before or not each.usable]:
                    pool.idle.remove(stream)
                    stream.close()
                if not pool.idle and not pool.reads:
                    del self._peers[key]

    # Serving

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("transport_accept_failed", error=error)  # out of files: a pause may mend it
                await asyncio.sleep(0.2)
                continue
            try:
                stream = _Stream(sock)
            except OSError:  # it is gone already
                sock.close()
                continue
            if len(self._served) >= SERVED_CONNECTIONS:
                stream.close()
                continue
            self._served.add(stream)
            self._own(self._serve(stream))

    async def _serve(self, stream: _Stream) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                magic, boot = _HELLO.unpack(await stream.receive_exactly(_HELLO.size))
                if magic != MAGIC:
                    return
                status = OK if boot == self.endpoint.boot.encode() else OTHER_BOOT
                await stream.send_all(_WELCOME.pack(status, self.endpoint.nbytes))
            while status == OK:
                status = await self._answer(stream)
        except (OSError, TimeoutError):
            pass  # the client is gone, or too slow to be served
        finally:
            stream.close()
            self._served.discard(stream)

    async def _answer(self, stream: _Stream) -> int:
        """Serve one request; anything but OK ends the connection. Raises OSError, TimeoutError."""
        async with asyncio.timeout(SERVED_IDLE_S):
            count, length = _REQUEST.unpack(await stream.receive_exactly(_REQUEST.size))
        nbytes = self.endpoint.nbytes
        answer_bytes = count * length
        status = OK
        offsets = np.empty(0, np.int64)
        if not (0 < count <= MAX_COUNT and 0 < length <= nbytes) or (
            count > 1 and answer_bytes > MAX_REQUEST_BYTES
        ):
            status = BAD_REQUEST
        else:
            async with asyncio.timeout(REQUEST_S):
                offsets = np.frombuffer(await stream.receive_exactly(8 * count), "<i8").astype(
                    np.int64, copy=False
                )
            if int(offsets.min()) < 0 or int(offsets.max()) > nbytes - length:
                status = BAD_REQUEST
        async with asyncio.timeout(
            ANSWER_S + answer_bytes / ANSWER_BYTES_A_SECOND if status == OK else ANSWER_S
        ):
            await stream.send_all(_STATUS.pack(status))
            if status == OK:
                (out_of,), lengths = spans(length, offsets)
                await stream.send(self._memory, out_of, lengths)
        return status

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for stream in [
            *self._served,
            *self._busy,
            *(each for pool in self._peers.values() for each in pool.idle),
        ]:
            stream.close()
        self._served.clear()
        self._peers.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._memory.release()


def _accept_status(peer: Endpoint, status: int) -> None:
    if status != OK:
        raise TransferError(f"{peer.address} refused: {_REFUSALS.get(status, f'status {status}')}")
