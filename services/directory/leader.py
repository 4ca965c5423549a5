"""One term of leadership: from what the last leader wrote until the lease is lost.

Rules that hold here
- A batch of events is written in one transaction before anything of it is sent to a worker. When that fails, or
  the lease is lost, the term ends, and what was not written is read again from the positions that were.
- Events are applied in the order in which Redis took them, over all streams: an entry's position starts with
  Redis' clock. So counts are a function of the streams' contents, not of when they were read. Those of a
  millisecond that is not over wait, for another stream may have more of it.
- Every worker gets its full set when the term begins, when it begins anew, and when it asks.
- When Redis turns out to lack what this term wrote, because a failover took it back, the term ends and the next
  one, of this process or another, begins from what Redis has: the publishers send again what the streams lost.
- A node known from before is followed from the last event that was written, once its pages as of that event
  are known (`rewind.py`); the term begins without it when that takes longer than RECOVERY_LEASES.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from services.directory.core import Batch, Directory
from services.directory.rewind import Replay, Rewind
from shared.bus import Lease, NotLeader
from shared.kvfollow import KV_STREAM
from shared.kvsnapshot import SnapshotError, fetch_snapshot
from shared.messages import (
    BranchPlaced,
    CountsChanged,
    CountsFull,
    KvSnapshot,
    PathWanted,
    RoleAck,
    pack_pages,
)
from shared.store import DirectoryStore, StateLost
from shared.streams import BATCH, Backoff, BusError, Event, Publisher, order

if TYPE_CHECKING:
    from services.directory.service import DirectoryService

READ_S = 0.5  # longest wait for events
REGISTRY_S = 1.0  # between looks at the registry
POSITIONS_S = 1.0  # positions alone are written this often
RECOVERY_LEASES = 0.5  # lease times that a term waits for the nodes' pages before it begins
MILLISECOND_S = 0.0011
TURN_S = 0.005  # between two batches, at least: a batch costs the same for one event as for ten
AHEAD_S = 0.2  # that an event waits for its millisecond to be over, in case Redis' clock went back
EVENTS_A_LOOK = 16
# The event loop stands still while a batch is made, and the lease must be renewed.
PAGES_A_COMMIT = 20_000
APPLY_LEASES = 0.1
MAX_HELD = 50_000  # events kept back for the order between streams
REWIND_S = 10.0  # for the events between a saved position and a snapshot
SNAPSHOTS_AT_ONCE = 8
AGAIN_S = 0.2  # before a node is asked again whose snapshot did not do

T = TypeVar("T")


class _Arrived(NamedTuple):
    """A node's pages; None when there is nothing to take, the node being another by now."""

    node: str
    snapshot: KvSnapshot | None


class _Counts(NamedTuple):
    publisher: Publisher
    task: asyncio.Task[None]


class Term:
    """`run` returns never; it raises NotLeader or StateLost (in a group) when the lease or the state is lost."""

    def __init__(self, service: DirectoryService, lease: Lease) -> None:
        self._service = service
        self._bus, self._clock, self._log = service.bus, service.clock, service.log
        self._lease = lease
        self._store = DirectoryStore(service.bus)
        settings = service.directory_settings
        self.directory = Directory(settings.branch_idle_s, settings.node_grace_s)
        self.begun = False
        self.lag_s = 0.0  # wall seconds from Redis to here of the newest event applied
        # A name of its own for each term, also where a failover gave the same lease twice: readers drop what a
        # producer numbered before.
        self._producer = f"{service.instance}.{lease.token}.{uuid.uuid4().hex[:6]}"
        self._publishers: dict[str, _Counts] = {}
        self._numbered = 0
        self._followed: set[str] = set()  # nodes whose kv stream is read, or soon will be
        self._fetching: set[str] = set()
        self._slots = asyncio.Semaphore(SNAPSHOTS_AT_ONCE)
        self._arrived: deque[_Arrived] = deque()
        self._held: list[tuple[float, Event]] = []  # since when
        self._committed = 0  # number of the batch that Redis has for certain
        self._written_s = 0.0
        self._looked_s = 0.0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._keep_lease(), name="lease")
            await self._begin()
            while True:
                await self._turn()

    # ------------------------------------------------------------------ life of the term

    async def _keep_lease(self) -> None:
        every_s = self._lease.ttl_s / 3
        while True:
            await asyncio.sleep(every_s)
            try:
                if not await self._lease.renew():
                    raise NotLeader("the directory lease was lost")
                number = self._committed
                if await self._store.committed() < number:
                    raise StateLost(f"Redis no longer has batch {number}")
            except BusError as error:
                self._log.warning("renew_failed", error=error)

    async def _begin(self) -> None:
        started = time.monotonic()
        directory = self.directory
        directory.stats = self._service.stats
        stored = await self._insist(self._store.load, "load")
        # In a thread: with millions of counts it takes seconds, in which the lease must be renewed.
        damage = await asyncio.to_thread(directory.restore, stored)
        self._committed = directory.written
        if damage:
            self._log.error("state_damaged", **damage._asdict())
        self._reader = self._bus.reader(dict(directory.positions))
        self._resync = self._bus.publisher("resync", self._producer, maxlen=10_000)
        self._group.create_task(self._resync.run(), name="publish resync")
        await self._look_at_registry()
        directory.want_full()
        until = time.monotonic() + RECOVERY_LEASES * self._lease.ttl_s
        while self._fetching and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self._take_arrived()
        self.begun = True
        self._log.info(
            "leading", term=self._lease.token, branches=len(directory.table), nodes=len(directory.nodes),
            load_s=time.monotonic() - started,
        )  # fmt: skip

    async def _insist(self, command: Callable[[], Awaitable[T]], what: str) -> T:
        backoff = Backoff()
        while True:
            try:
                return await command()
            except BusError as error:
                self._log.warning("redis_failed", what=what, error=error)
                await backoff.wait()

    # ------------------------------------------------------------------ events

    async def _turn(self) -> None:
        """Read, apply, write, send."""
        if self._held:
            await asyncio.sleep(max(MILLISECOND_S, self._written_s + TURN_S - time.monotonic()))
        wait_s = 0.0 if self._held or self._arrived else 0.1 if self._fetching else READ_S
        read = await self._reader.read(wait_s)
        now = time.monotonic()
        held, self._held = self._held, []
        arrived = held + [(now, event) for event in read]
        events = [event for _, event in arrived]
        self._take_arrived()
        due = time.monotonic() - self._looked_s >= REGISTRY_S or any(map(self._is_of_new_node, events))
        if due and await self._look_at_registry():
            # What a new node published may belong before these.
            self._held = arrived
            return
        events = self._in_order(arrived, now)
        for number, event in enumerate(events, 1):
            self._service.events.labels(event.stream.partition(":")[0]).inc()
            if self.directory.apply(event, self._clock.now()):
                self._want_snapshot(event.stream.removeprefix(KV_STREAM))
            if number % EVENTS_A_LOOK == 0 and (
                self.directory.counts.changed_pages > PAGES_A_COMMIT
                or time.monotonic() - now > APPLY_LEASES * self._lease.ttl_s
            ):
                self._seen(event)
                await self._write()
                now = time.monotonic()
        if events:
            self._seen(events[-1])
        self.directory.expire(self._clock.now())
        await self._write()

    def _is_of_new_node(self, event: Event) -> bool:
        message = event.message
        return isinstance(message, BranchPlaced | RoleAck) and message.node not in self._followed

    def _seen(self, event: Event) -> None:
        self.lag_s = max(0.0, time.time() - order(event.position)[0] / 1000)

    def _in_order(self, arrived: list[tuple[float, Event]], now: float) -> list[Event]:
        """Events in the order of their positions; those that others may still precede are kept back."""
        arrived.sort(key=lambda entry: in_order_key(entry[1]))
        if len(arrived) > MAX_HELD:
            self._log.warning("order_given_up", events=len(arrived))
            return [event for _, event in arrived]
        read: dict[str, tuple[int, Event]] = {}
        for _, event in arrived:
            read[event.stream] = read.get(event.stream, (0, event))[0] + 1, event
        # A stream that gave as much as a read may have has more, at later positions than these.
        cut = min((in_order_key(last) for count, last in read.values() if count >= BATCH), default=None)
        whole_ms = self._reader.whole_ms
        ready: list[Event] = []
        for at, (since, event) in enumerate(arrived):
            key = in_order_key(event)
            if (cut is not None and key > cut) or (key[0] > whole_ms and now - since < AHEAD_S):
                self._held = arrived[at:]
                break
            ready.append(event)
        return ready

    async def _write(self) -> None:
        directory = self.directory
        due = time.monotonic() - self._written_s >= POSITIONS_S
        if not (directory.urgent or (due and directory.dirty)):
            return
        batch = directory.take()
        started = time.monotonic()
        try:
            await self._store.commit(self._lease, batch.commit)
        except BusError as error:
            # Whether it was written, and whether the events in it are still what the streams have, only Redis knows.
            raise StateLost(str(error)) from None
        self._committed = batch.commit.number
        self._written_s = time.monotonic()
        self._service.batches.inc()
        self._service.commit_s.observe(self._written_s - started)
        self._send(batch)

    def _send(self, batch: Batch) -> None:
        for node in batch.full:
            publisher = self._publisher(node)
            publisher.publish(CountsFull(pack_pages(self.directory.counts.positive(node))))
            self._service.resyncs.inc()
        for node, change in batch.changes.items():
            if (
                node in self._publishers
                and node not in batch.full
                and (change.positive.size or change.zero.size)
            ):
                self._publisher(node).publish(
                    CountsChanged(pack_pages(change.positive), pack_pages(change.zero))
                )
        for branch in batch.wanted:
            self._resync.publish(PathWanted(branch))

    # ------------------------------------------------------------------ nodes

    async def _look_at_registry(self) -> bool:
        """Whether a node is now followed that was not."""
        infos = await self._insist(self._bus.nodes, "list nodes")
        self._looked_s = time.monotonic()
        begun, lost = self.directory.registered(infos, self._looked_s)
        added = False
        for node in begun:
            info = infos[node]
            self._log.info("node_begun", node=node, incarnation=info.incarnation, phase=info.phase)
            if node not in self._followed:
                self._followed.add(node)
                self._follow(node)
                added = True
        for node in infos:
            self._publisher(node)
        # Also nodes that are gone, for now or for good: what they said last has its place among the other events.
        for node in self.directory.nodes:
            if node not in self._followed:
                self._followed.add(node)
                self._spawn_fetch(node, self._recover)
        for node in lost:
            self._log.warning("node_lost", node=node)
            self._followed.discard(node)
            self._reader.remove(KV_STREAM + node)
            publisher = self._publishers.pop(node, None)
            if publisher is not None:
                publisher.task.cancel()
        return added

    def _publisher(self, node: str) -> Publisher:
        found = self._publishers.get(node)
        if found is None:
            # Readers drop what a producer numbered before, so each publisher is a producer of its own.
            self._numbered += 1
            publisher = self._bus.publisher(
                f"counts:{node}", f"{self._producer}.{self._numbered}", maxlen=10_000, capacity=5_000
            )
            task = self._group.create_task(publisher.run(), name=f"publish counts:{node}")
            found = self._publishers[node] = _Counts(publisher, task)
        return found.publisher

    def _follow(self, node: str) -> None:
        """Read the node's kv events from the last one that was applied."""
        record = self.directory.nodes.get(node)
        if record is not None:
            self._reader.add(KV_STREAM + node, record.position)

    def _take_arrived(self) -> None:
        while self._arrived:
            node, snapshot = self._arrived.popleft()
            again = snapshot is not None and not self.directory.snapshot(node, snapshot)
            self._follow(node)
            if again:
                self._spawn_fetch(node, self._fetch_later)

    def _want_snapshot(self, node: str) -> None:
        self._spawn_fetch(node, self._fetch)

    def _spawn_fetch(self, node: str, fetch: Callable[[str], Awaitable[KvSnapshot | None]]) -> None:
        async def run() -> None:
            try:
                self._arrived.append(_Arrived(node, await fetch(node)))
            finally:
                self._fetching.discard(node)

        self._fetching.add(node)
        self._group.create_task(run(), name=f"snapshot {node}")

    async def _fetch(self, node: str) -> KvSnapshot | None:
        """The node's pages; None when the node is gone."""
        backoff = Backoff(first_s=0.1, last_s=10.0)
        failures = 0
        while True:
            try:
                info = (await self._bus.nodes()).get(node)
                if info is not None:
                    async with self._slots:
                        return await fetch_snapshot(self._service.http, info)
                if node not in self.directory.nodes:
                    return None
            except (SnapshotError, BusError) as error:
                if failures % 10 == 0:
                    self._log.warning("snapshot_failed", node=node, failures=failures + 1, error=error)
                failures += 1
            await backoff.wait()

    async def _fetch_later(self, node: str) -> KvSnapshot | None:
        """As `_fetch`, when the last one did not do."""
        await asyncio.sleep(AGAIN_S)
        return await self._fetch(node)

    async def _recover(self, node: str) -> KvSnapshot | None:
        """The pages of a node known from before, as of its last event that was applied; None when the node is gone
        or they cannot be told."""
        record = self.directory.nodes[node]
        info = (await self._insist(self._bus.nodes, "list nodes")).get(node)
        found: KvSnapshot | None = None
        if info is not None and info.incarnation == record.incarnation:
            try:
                snapshot = await fetch_snapshot(self._service.http, info)
            except SnapshotError as error:
                self._log.warning("snapshot_failed", node=node, error=error)
            else:
                rewind = Rewind(record.seq, snapshot)
                await self._read_for(rewind, node, record.position)
                found = rewind.result()
                if rewind.done and rewind.exact:
                    return found
        replay = Replay(node, record.incarnation, record.seq)
        await self._read_for(replay, node, "0")
        result = replay.result()
        if result is not None:
            return result
        self._service.stats["recovery_gaps"] += 1
        self._log.warning("kv_events_missing", node=node, after=record.seq)
        if found is None and info is not None:
            found = await self._fetch(node)
        return None if found is None or found.incarnation != record.incarnation else found

    async def _read_for(self, wanting: Rewind | Replay, node: str, position: str) -> None:
        """Feed it the node's kv events from the position on until it is done, or the stream has no more."""
        stream = KV_STREAM + node
        reader = self._bus.reader({stream: position})
        until = time.monotonic() + REWIND_S
        while not wanting.done and time.monotonic() < until:
            events = await reader.read(0.2)
            if not events and isinstance(wanting, Replay):
                return
            for event in events:
                wanting.feed(event)


def in_order_key(event: Event) -> tuple[int, str, int]:
    """Events in the order in which Redis took them; within a millisecond those of one stream together."""
    milliseconds, number = order(event.position)
    return milliseconds, event.stream, number
