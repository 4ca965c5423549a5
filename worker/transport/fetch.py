"""Fetching pages from peers while their requests queue (section 4.2): peer L2 -> own L2.

Rules that hold here
- A page that is held, or on its way already, is not fetched again: requests share what is in flight.
- A page is readable here once it has arrived and was checked. One that is not what its checksum says ends the fetch:
  the pages before it are good, the rest is computed.
- What was fetched stays pinned in L2 until the request takes it over.
- A fetch ends with its last request: then its slots are free again as soon as nothing is written into them any more,
  and the peer is told.
- It never takes longer than `timeout_s` in all, and never fails: what did not come is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from shared.log import get_logger
from shared.messages import PageArray
from worker.kv.cache import NodeCache
from worker.kv.memory import Flags, PageMemory
from worker.kv.path import Path, Slots
from worker.transport.base import TransferError, Transport
from worker.transport.peers import PeerClient, Pinned

# Read and checked together, while the next pieces are read: some batches of a transport, and bytes enough that what is
# done once a piece does not count.
PIECE_PAGES, PIECE_BYTES = 255, 2**22
MOST_PIECE_BYTES = 2**25
PIECE_S = 3.0  # wall: a piece that takes longer comes from a peer that hangs
READ_AHEAD = 2  # pieces
WINDOW_PAGES = 2048  # asked for, and pinned at the peer, at a time
log = get_logger("worker")

Spawn = Callable[[Coroutine[None, None, None], str], object]


class Arrived(msgspec.Struct, frozen=True):
    """What came of a fetch: the first `pages` of the path are held; `held` are the L2 slots that are pinned for it.

    `reason` says why the rest is missing: peer_failed, peer_missing, corrupt, no_room; empty when nothing is.
    """

    pages: int
    held: Slots
    reason: str = ""


class FetchCounts(msgspec.Struct):
    """What was fetched since the start."""

    fetches: int = 0
    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0  # wall, from the question to the last page
    shared_pages: int = 0  # wanted while on their way for another request
    corrupt_pages: int = 0
    failures: int = 0


class _Transfer:
    """Pages on their way from one peer. `users` wait for them."""

    __slots__ = ("done", "held", "path", "reason", "task", "url", "users")

    def __init__(self, url: str, path: Path) -> None:
        self.url = url
        self.path = path
        self.users = 0
        self.held: list[Slots] = []  # pinned until the last user has gone
        self.reason = ""
        self.done = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Fetcher:
    def __init__(
        self,
        cache: NodeCache,
        memory: PageMemory,
        transport: Transport,
        peers: PeerClient,
        spawn: Spawn,
        *,
        timeout_s: float = 10.0,
        on_pages: Callable[[], None] = lambda: None,
    ) -> None:
        self._cache, self._memory, self._transport, self._peers = cache, memory, transport, peers
        self._spawn = spawn
        self._timeout_s = timeout_s
        self._on_pages = on_pages  # pages entered or left L2
        self.page_bytes = memory.arena.page_bytes
        self._in_flight: dict[int, _Transfer] = {}
        self._checker = ThreadPoolExecutor(1, "check")
        self.counts = FetchCounts()

    def close(self) -> None:
        self._checker.shutdown(wait=False, cancel_futures=True)

    @property
    def pages_in_flight(self) -> int:
        return len(self._in_flight)

    async def fetch(self, url: str, path: Path, *, tail: bool = False) -> Arrived:
        """Get what this node lacks of a path from the worker at `url`. With `tail` the last page is a tail."""
        cache = self._cache
        began = cache.hold(path.pages)
        joined: list[_Transfer] = []
        try:
            while True:
                transfers = self._share(url, path, tail, joined)
                for transfer in transfers:
                    await transfer.done.wait()
                missing = (~cache.in_host(path.pages)).nonzero()[0]
                pages = int(missing[0]) if missing.size else len(path)
                reason = next((transfer.reason for transfer in transfers if transfer.reason), "peer_missing")
                # What another request's peer did not give, this one's may have.
                if pages == len(path) or all(transfer.url == url for transfer in transfers):
                    return Arrived(pages, cache.hold(path.pages[:pages]), reason if pages < len(path) else "")
        finally:
            cache.let_go(began)
            for transfer in joined:
                self._leave(transfer)

    def _share(self, url: str, path: Path, tail: bool, joined: list[_Transfer]) -> list[_Transfer]:
        """Join the transfers of missing pages that are under way, and begin one from `url` for the others."""
        wanted: list[int] = []
        transfers: list[_Transfer] = []
        there = self._cache.in_host(path.pages).tolist()
        for at, page in enumerate(path.pages.tolist()):
            transfer = self._in_flight.get(page)
            if there[at]:
                continue
            if transfer is None:
                wanted.append(at)
                continue
            self.counts.shared_pages += 1
            if transfer not in transfers:
                transfers.append(transfer)
        if wanted:
            tail = tail and wanted[-1] == len(path) - 1
            transfers.append(self._begin(url, path.take(np.array(wanted)), tail=tail))
        for transfer in transfers:
            self._join(transfer, joined)
        return transfers

    def _join(self, transfer: _Transfer, joined: list[_Transfer]) -> None:
        transfer.users += 1
        joined.append(transfer)

    def _leave(self, transfer: _Transfer) -> None:
        transfer.users -= 1
        if transfer.users:
            return
        if not transfer.done.is_set():
            # Nobody may join what will not end well.
            self._forget(transfer)
            if transfer.task is not None:
                transfer.task.cancel()
        self._let_go(transfer)

    def _let_go(self, transfer: _Transfer) -> None:
        held, transfer.held = transfer.held, []
        for slots in held:
            self._cache.let_go(slots)

    def _begin(self, url: str, path: Path, *, tail: bool) -> _Transfer:
        transfer = _Transfer(url, path)
        for page in path.pages.tolist():
            self._in_flight[page] = transfer
        self._spawn(self._run(transfer, tail), f"fetch from {url}")
        return transfer

    # ------------------------------------------------------------------------------ one transfer

    async def _run(self, transfer: _Transfer, tail: bool) -> None:
        transfer.task = asyncio.current_task()
        if transfer.users < 1:
            # All users went before this began.
            self._end(transfer)
            return
        start = time.monotonic()
        self.counts.fetches += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._transfer(transfer, tail)
        except TimeoutError:
            transfer.reason = "peer_failed"
            self._peers.failed(transfer.url, TimeoutError(f"no end after {self._timeout_s:g} s"))
        finally:
            self.counts.seconds += time.monotonic() - start
            self.counts.failures += transfer.reason == "peer_failed"
            self._end(transfer)

    def _forget(self, transfer: _Transfer) -> None:
        for page in transfer.path.pages.tolist():
            if self._in_flight.get(page) is transfer:
                del self._in_flight[page]

    def _end(self, transfer: _Transfer) -> None:
        self._forget(transfer)
        transfer.done.set()
        if not transfer.users:
            self._let_go(transfer)
        self._on_pages()

    async def _transfer(self, transfer: _Transfer, tail: bool) -> None:
        """Window after window, each as long as the peer lends pages."""
        path, first = transfer.path, 0
        while first < len(path) and not transfer.reason:
            window = path[first : first + WINDOW_PAGES]
            pinned = await self._pin(transfer.url, window)
            if pinned is None:
                transfer.reason = "peer_failed"
                return
            bad: Path | None = None
            held = window[: pinned.offsets.size]
            first += len(held)
            try:
                bad = await self._read(transfer, held, pinned, tail=tail and first == len(path))
            except (TransferError, ValueError) as error:
                # A ValueError: what the peer said of its arena cannot be.
                transfer.reason = "peer_failed"
                self._peers.failed(transfer.url, error)
            finally:
                self._spawn(self._peers.release(pinned, bad), "release")
            if not transfer.reason and len(held) < len(window) and not pinned.cut:
                transfer.reason = "peer_missing"

    async def _pin(self, url: str, path: Path) -> Pinned | None:
        asking = asyncio.ensure_future(self._peers.pin(url, path, self._timeout_s + 1.0))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The peer may have pinned them already: what it answers is then given back.
            self._spawn(self._release_unread(asking), "release")
            raise

    async def _release_unread(self, asking: asyncio.Future[Pinned | None]) -> None:
        pinned = await asking
        if pinned is not None:
            await self._peers.release(pinned)

    async def _read(self, transfer: _Transfer, path: Path, pinned: Pinned, *, tail: bool) -> Path | None:
        """Read pages that are pinned at the peer; the first that is not what it should be, if one came."""
        size = self.page_bytes
        step = PIECE_PAGES * max(1, PIECE_BYTES // (PIECE_PAGES * size))
        step = max(1, min(step, MOST_PIECE_BYTES // size))
        slots = self._cache.reserve(len(path))
        if slots.size < len(path):
            transfer.reason = "no_room"
        kept = 0  # slots that hold pages, or are free again
        under_way: deque[tuple[int, asyncio.Future[Flags]]] = deque()
        at = 0
        try:
            while at < slots.size or under_way:
                while at < slots.size and len(under_way) <= READ_AHEAD:
                    piece = self._read_piece(path.pages, pinned, slots, slice(at, min(at + step, slots.size)))
                    under_way.append((at, asyncio.ensure_future(piece)))
                    at += step
                first, future = under_way[0]
                sound = await asyncio.shield(future)
                under_way.popleft()
                wrong = (~sound).nonzero()[0]
                kept = first + (int(wrong[0]) if wrong.size else sound.size)
                self._keep(transfer, path[first:kept], slots[first:kept], tail=tail and kept == len(path))
                if wrong.size:
                    return self._corrupt(transfer, path[kept : kept + 1])
            self._peers.well(transfer.url)
            return None
        finally:
            # Their slots are in use until they have ended.
            for _, future in under_way:
                future.cancel()
            await _settled([future for _, future in under_way])
            self._cache.give_back(slots[kept:])

    async def _read_piece(self, pages: PageArray, pinned: Pinned, slots: Slots, part: slice) -> Flags:
        """bool[n]: which pages of the piece are what the peer says that they are."""
        size, target = self.page_bytes, slots[part]
        left_s = min(PIECE_S, max(0.01, pinned.until - time.monotonic()))
        await self._transport.read(pinned.endpoint, pinned.offsets[part], target * size, size, left_s)
        if time.monotonic() >= pinned.until:
            raise TransferError(f"{pinned.url}: the pages came after their time")
        check = asyncio.get_running_loop().run_in_executor(
            self._checker, self._memory.arrived, target, pages[part], pinned.checksums[part]
        )
        # The thread looks at these slots until it is done.
        await _settled([check])
        return check.result()

    def _keep(self, transfer: _Transfer, path: Path, slots: Slots, *, tail: bool) -> None:
        if not slots.size:
            return
        self._cache.arrived(path, slots, tail=tail)
        transfer.held.append(self._cache.hold(path.pages))
        self.counts.pages += slots.size
        self.counts.bytes += slots.size * self.page_bytes
        self._on_pages()

    def _corrupt(self, transfer: _Transfer, page: Path) -> Path:
        transfer.reason = "corrupt"
        self.counts.corrupt_pages += 1
        name = int(page.pages[0]) & 2**64 - 1
        log.error("page_corrupt", url=transfer.url, page=f"{name:016x}", where="fetched")
        return page


async def _settled(futures: Sequence[asyncio.Future[Flags]]) -> None:
    """Wait for the end of futures, also while being cancelled."""
    cancelled = False
    while rest := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(rest)
        except asyncio.CancelledError:
            cancelled = True
    for future in futures:
        if not future.cancelled():
            future.exception()  # has been looked at: the first one that failed was raised
    if cancelled:
        raise asyncio.CancelledError
