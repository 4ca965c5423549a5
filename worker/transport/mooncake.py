"""Pages over the Mooncake Transfer Engine: RDMA where there is some, else its own TCP.

The engine runs in two child processes (`worker/transport/mooncake_process.py`): one serves the arena, the other, which
the first read starts, reads. Both map the arena's file, so bytes land in the arena without passing through here.

Rules that hold here
- A read that the engine failed, that took too long, or that was cancelled may still be written by the engine: it ends
  only once its batches have ended well or the process that reads is dead. Then a new one takes its place.
- Reads that were under way in it and are not to blame begin their batch again there, within their own time.
- At most IN_FLIGHT batches are with the process, and those of different reads take turns. Only one of them may be the
  first from its peer, for a silent peer can block the whole engine, and must be told from those that it blocks.
- The engine remembers for good what it learned about an address: another boot at a known address needs a new process.
- `Endpoint.boot` is the boot's mark and where in the server's memory it can be read; each batch reads it too, and bytes
  that came with another mark fail the read.
- Peers are not authenticated, listen on all addresses and could write: the network must keep others out.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque

import numpy as np

from shared.log import get_logger
from worker.kv.arena import Arena
from worker.transport import mooncake_process as process
from worker.transport.base import Endpoint, Offsets, TransferError, TransportMissing
from worker.transport.mooncake_helper import Helper, Pauses, spawn
from worker.transport.spans import check_read, spans, split_address

ENTRY_BYTES = 2**20  # longer spans are cut, so that no batch is long
BATCH_BYTES = 16 * 2**20
BATCH_ENTRIES = process.MAX_ENTRIES - 1  # the mark is one more
IN_FLIGHT = process.THREADS
FIRST_BATCH_S = 2.0  # for the first batch from a peer, which makes the connection
BATCH_S = 6.0  # for every other
CANCEL_S = 0.25  # what a cancelled read gives its batches to end by themselves
START_S = 20.0
MAX_PEERS = 4096  # addresses a reading process learns before it is replaced
log = get_logger("worker")


class _Batch:
    """A part of a read that goes to the process at once. Offsets and bytes of each entry: int64[n]."""

    def __init__(self, read: _Read, remote: Offsets, local: Offsets, lengths: Offsets) -> None:
        self.read = read
        self.remote = remote
        self.local = local
        self.lengths = lengths
        self.due = 0.0
        self.first = False  # from that peer, for that process


class _Read:
    """A call of `read`: `ended` once nothing more is written for it."""

    def __init__(
        self, peer: Endpoint, remote: Offsets, local: Offsets, lengths: Offsets, timeout_s: float
    ) -> None:
        mark, _, where = peer.boot.partition("@")
        try:
            self.mark_address = int(where, 16)
            self.mark = mark.encode("ascii")
            if not 0 <= self.mark_address < 2**63 or not 0 <= peer.base < 2**63 - peer.nbytes:
                raise ValueError
        except ValueError:
            raise TransferError(f"{peer.address} does not tell what a Mooncake server does") from None
        loop = asyncio.get_running_loop()
        self.peer = peer
        self.due = loop.time() + timeout_s
        self.error: TransferError | None = None
        self.cancelled = False
        self.flying = 0
        self.ended: asyncio.Future[None] = loop.create_future()
        self.batches = _batches(self, remote, local, lengths)

    def stop(self, error: TransferError | None) -> None:
        """Begin no more batches. The first error stays."""
        self.error = self.error or error
        self.batches.clear()

    def settle(self) -> None:
        """End it when nothing is left to do."""
        if not self.flying and not self.batches and not self.ended.done():
            self.ended.set_result(None)


def _batches(read: _Read, remote: Offsets, local: Offsets, lengths: Offsets) -> deque[_Batch]:
    """Spans (int64[n]) cut into entries of at most ENTRY_BYTES, these dealt into batches."""
    pieces = -(-lengths // ENTRY_BYTES)
    span = np.repeat(np.arange(lengths.size), pieces)
    inside = (np.arange(span.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * ENTRY_BYTES
    remote = remote[span] + inside
    local = local[span] + inside
    lengths = np.minimum(lengths[span] - inside, ENTRY_BYTES)
    ends = np.cumsum(lengths)
    batches: deque[_Batch] = deque()
    at = 0
    while at < span.size:
        full = int(np.searchsorted(ends, ends[at] - lengths[at] + BATCH_BYTES, side="right"))
        to = min(at + BATCH_ENTRIES, full)
        batches.append(_Batch(read, remote[at:to], local[at:to], lengths[at:to]))
        at = to
    return batches


class _Reader:
    """Runs reads in a process that is replaced when it must be. `run` is the one task that touches the process."""

    def __init__(self, arena: Arena, settings: process.Settings) -> None:
        self._arena = arena
        self._settings = settings
        self._news = asyncio.Event()
        self._reads: deque[_Read] = deque()  # in turn
        self._flying: dict[int, _Batch] = {}
        self._number = 0
        self._process: Helper | None = None
        self._pauses = Pauses()
        self._start_at = 0.0
        self._doubtful = False  # the process may write what nobody waits for, or blocks
        self._outdated = False  # it knows another boot of a peer that is to be read

    def add(self, read: _Read) -> None:
        self._reads.append(read)
        self._news.set()

    def cancel(self, read: _Read) -> None:
        """It ends soon, as one that may not be waited for any longer."""
        read.cancelled = True
        read.due = min(read.due, asyncio.get_running_loop().time() + CANCEL_S)
        read.stop(None)
        self._news.set()

    async def run(self) -> None:
        try:
            while True:
                await self._wait()
                self._take_results()
                self._expire()
                helper = self._process
                if helper and (helper.gone or self._doubtful or (self._outdated and not self._flying)):
                    await self._replace(helper)
                self._settle()
                if self._process is None:
                    if self._reads and asyncio.get_running_loop().time() >= self._start_at:
                        await self._start()
                elif self._process.hello is not None and not self._outdated:
                    self._send_batches(self._process)
        finally:
            await self.end()

    async def end(self) -> None:
        """Kill the process and end the reads that are left. A second call does nothing more."""
        if self._process is not None:
            await self._process.end()
            self._process = None
        self._flying.clear()
        for read in self._reads:
            read.stop(TransferError("the transport was closed"))
            read.flying = 0
        self._settle()

    async def _wait(self) -> None:
        """Until there is news, or the next time limit."""
        limits = [read.due for read in self._reads] + [batch.due for batch in self._flying.values()]
        if self._reads and self._process is None:
            limits.append(self._start_at)
        try:
            async with asyncio.timeout_at(min(limits, default=None)):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    def _settle(self) -> None:
        for read in self._reads:
            read.settle()
        self._reads = deque(read for read in self._reads if not read.ended.done())

    def _take_results(self) -> None:
        while self._process is not None and self._process.messages:
            number, result = process.RESULT.unpack(self._process.messages.popleft())
            batch = self._flying.pop(number)
            read = batch.read
            read.flying -= 1
            if result == process.READ:
                self._process.delivered.add(read.peer.address)
            elif result == process.OTHER_BOOT:
                read.stop(TransferError(f"{read.peer.address} is another boot than was asked for"))
            else:
                self._blame(batch, "could not be read by Mooncake")

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for read in self._reads:
            if now >= read.due:
                read.stop(TransferError(f"{read.peer.address} did not deliver in time"))
                self._doubtful |= read.flying > 0
        if self._process is not None and self._process.hello is None:
            self._doubtful |= time.monotonic() - self._process.since > START_S
        for batch in self._flying.values():
            if now >= batch.due:
                self._blame(batch, "is silent")

    def _blame(self, batch: _Batch, why: str) -> None:
        """The process must go because of this batch, and its read fails."""
        self._doubtful = True
        peer = batch.read.peer
        log.warning("transport_read_failed", peer=peer.address, why=why)
        for read in self._reads:
            # Others that wait for the same peer's first batch would each cost everybody a process.
            if read is batch.read or (batch.first and read.peer == peer):
                read.stop(TransferError(f"{peer.address} {why}"))

    async def _replace(self, helper: Helper) -> None:
        """Kill the process. What was under way begins again, but for reads that failed or it crashed with."""
        crashed = helper.gone and not self._doubtful
        code = await helper.end()
        hello = helper.hello
        if crashed:
            lasted_s = time.monotonic() - helper.since
            self._start_at = asyncio.get_running_loop().time() + self._pauses.next_s(lasted_s)
            text = (hello.error if hello else "") or f"the process that reads ended with {code}"
            log.warning("transport_reader_ended", error=text)
            for read in self._reads:
                if read.flying or hello is None or hello.error:
                    read.stop(TransferError(text))
        for batch in self._flying.values():
            read = batch.read
            read.flying = 0
            if read.error is None and not read.cancelled:
                read.batches.appendleft(batch)
        self._flying.clear()
        self._process = None
        self._doubtful = self._outdated = False

    async def _start(self) -> None:
        try:
            self._process = await spawn(self._arena, self._settings, self._news)
        except OSError as error:
            self._start_at = asyncio.get_running_loop().time() + self._pauses.next_s(0.0)
            for read in self._reads:
                read.stop(TransferError(f"the process that reads could not be started: {error}"))
            self._settle()

    def _send_batches(self, helper: Helper) -> None:
        """Fill the process with batches, one of each read in turn."""
        waiting = len(self._reads)
        while waiting and len(self._flying) < IN_FLIGHT:
            read = self._reads[0]
            self._reads.rotate(-1)
            address = read.peer.address
            known = helper.boots.get(address)
            fresh = address not in helper.delivered
            if not read.batches:
                waiting -= 1
            elif (known or read.peer.boot) != read.peer.boot or (
                not known and len(helper.boots) >= MAX_PEERS
            ):
                self._outdated = True
                self._news.set()
                return
            elif fresh and any(batch.first for batch in self._flying.values()):
                waiting -= 1  # so that a silent peer is the one to blame
            else:
                waiting = len(self._reads)
                helper.boots[address] = read.peer.boot
                batch = read.batches.popleft()
                batch.first = fresh
                self._send(helper, batch)

    def _send(self, helper: Helper, batch: _Batch) -> None:
        assert helper.hello is not None
        read = batch.read
        peer = read.peer.address.encode()
        self._number += 1
        batch.due = asyncio.get_running_loop().time() + (FIRST_BATCH_S if batch.first else BATCH_S)
        read.flying += 1
        self._flying[self._number] = batch
        entries = len(batch.lengths)
        head = process.BATCH.pack(self._number, len(peer), entries, read.mark_address, read.mark)
        local = batch.local + helper.hello.base
        remote = batch.remote + read.peer.base
        helper.send(b"".join((head, peer, local.tobytes(), remote.tobytes(), batch.lengths.tobytes())))


class _Server:
    """Keeps a process that serves the arena alive; `endpoint` is where the last one that started serves."""

    def __init__(self, arena: Arena, settings: process.Settings) -> None:
        self._arena = arena
        self._settings = settings
        self._news = asyncio.Event()
        self._pauses = Pauses()
        self._process: Helper | None = None
        self.endpoint: Endpoint | None = None

    async def start(self) -> None:
        """Returns once `endpoint` can be read. Raises TransportMissing, OSError; then no process is left."""
        settings = self._settings.copy()
        settings["boot"] = uuid.uuid4().hex
        helper = await spawn(self._arena, settings, self._news)
        try:
            async with asyncio.timeout(START_S):
                while helper.hello is None and not helper.gone:
                    self._news.clear()
                    await self._news.wait()
            hello = helper.hello
            if hello is None:
                raise OSError(f"the Mooncake process ended with {await helper.end()} before it served")
            if hello.missing:
                raise TransportMissing(
                    f"Mooncake cannot be used here: {hello.error}. It needs the system's libibverbs1 and "
                    "pip install 'evolving-infra[mooncake]'"
                )
            if hello.error:
                raise OSError(hello.error)
        except TimeoutError:
            await helper.end()
            raise OSError(f"Mooncake did not serve within {START_S:g} s") from None
        except BaseException:
            await helper.end()
            raise
        self._process = helper
        self.endpoint = Endpoint(
            transport=MooncakeTransport.name,
            address=f"{settings['host']}:{hello.port}",
            boot=f"{settings['boot']}@{hello.mark:x}",
            base=hello.base,
            nbytes=self._arena.nbytes,
        )

    async def run(self) -> None:
        """Start it again, as another boot, whenever it ended."""
        try:
            while True:
                while self._process is not None and not self._process.gone:
                    self._news.clear()
                    await self._news.wait()
                lasted_s = 0.0
                if self._process is not None:
                    lasted_s = time.monotonic() - self._process.since
                    code = await self._process.end()
                    self._process = None
                    log.warning("transport_server_ended", code=code, lasted_s=lasted_s)
                await asyncio.sleep(self._pauses.next_s(lasted_s))
                try:
                    await self.start()
                except (OSError, TransportMissing) as error:
                    log.warning("transport_server_not_started", error=error)
        finally:
            await self.end()

    async def end(self) -> None:
        if self._process is not None:
            await self._process.end()
            self._process = None


class MooncakeTransport:
    """`protocol`: "tcp" or "rdma"; `devices`: RDMA device names, comma separated (empty: all); `interface`: the
    address of this machine that Mooncake binds to (empty: all)."""

    name = "mooncake"

    def __init__(self, *, protocol: str = "tcp", devices: str = "", interface: str = "") -> None:
        self._protocol = protocol
        self._devices = devices
        self._interface = interface
        self._server: _Server | None = None
        self._reader: _Reader | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, arena: Arena, host: str) -> None:
        settings = process.Settings(
            host=host,
            protocol=self._protocol,
            devices=self._devices,
            interface=self._interface,
            mapped_bytes=arena.mapped_bytes,
            nbytes=arena.nbytes,
            boot=uuid.uuid4().hex,
        )
        server = _Server(arena, settings)
        await server.start()
        self._server = server
        self._reader = _Reader(arena, settings)
        self._tasks = [asyncio.create_task(server.run()), asyncio.create_task(self._reader.run())]

    @property
    def endpoint(self) -> Endpoint:
        if self._server is None or self._server.endpoint is None:
            raise RuntimeError("the transport was not started")
        return self._server.endpoint

    async def read(
        self, peer: Endpoint, remote: Offsets, local: Offsets, length: int, timeout_s: float
    ) -> None:
        remote, local = check_read(self.name, peer, remote, local, length, self.endpoint.nbytes)
        split_address(peer.address)
        if not remote.size:
            return
        if self._reader is None or any(task.done() for task in self._tasks):
            raise TransferError("the transport is closed")
        (far, near), lengths = spans(length, remote, local)
        read = _Read(peer, far, near, lengths, timeout_s)
        self._reader.add(read)
        cancelled: asyncio.CancelledError | None = None
        while not read.ended.done():
            try:
                await asyncio.wait([read.ended])
            except asyncio.CancelledError as error:
                cancelled = error
                self._reader.cancel(read)
        if cancelled is not None:
            raise cancelled
        if read.error is not None:
            raise read.error

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                log.error("transport_failed", error=ended)
        self._tasks = []
        # A task that was cancelled before its first step has not tidied up.
        if self._reader is not None:
            await self._reader.end()
            self._reader = None
        if self._server is not None:
            await self._server.end()
