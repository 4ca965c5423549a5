"""Redis: the only module that knows its keys, streams, leases and scripts.

Rules that hold here
- Every key starts with `ei:{CLUSTER}:`; the literal braces put one cluster's keys in one Redis Cluster slot.
- A stream entry has four fields: `v` schema, `p` producer (the incarnation that numbers), `n` sequence number
  (1, 2, ... without gaps for one producer on one stream), `m` the message (`shared/messages.py`).
- A publisher keeps an entry until Redis has it and sends it again after an error; a reader drops what it has
  seen of the same producer. So a message arrives once and in order, or its absence shows as a gap in `n`.
- Nothing here waits for ever: commands have a time limit, failures back off with jitter.
- A lease is a key with a time to live; taking it yields a fencing token that only grows. `commit` writes only
  while its token is the lease's.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, WatchError

from shared import messages
from shared.log import get_logger
from shared.messages import NodeInfo, ServiceInfo, StreamMessage

COMMAND_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 3.0
BATCH = 512

T = TypeVar("T")
log = get_logger("bus")

# redis-py types its answers for every mode at once; this module uses the mode that answers in bytes
_Client = Any


class BusError(Exception):
    """Redis cannot be used; the text is one line."""


class NotLeader(Exception):
    """A write was refused because the lease belongs to somebody else."""


class Event(NamedTuple):
    stream: str
    position: str
    producer: str
    seq: int
    message: StreamMessage


class Backoff:
    """Waits that double from `first_s` to `last_s`, each between half and whole (jitter against stampedes)."""

    def __init__(self, first_s: float = 0.05, last_s: float = 2.0) -> None:
        self._first_s, self._last_s, self._next_s = first_s, last_s, first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    async def wait(self) -> None:
        await asyncio.sleep(self._next_s * random.uniform(0.5, 1.0))
        self._next_s = min(self._next_s * 2, self._last_s)


_ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held then
  local token, holder = string.match(held, '^(%d+) (.*)$')
  if holder ~= ARGV[1] then return 0 end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return tonumber(token)
end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], token .. ' ' .. ARGV[1], 'PX', ARGV[2])
return token
"""
_RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class Bus:
    """One cluster's place in Redis. Make it with `connect`; close it with `close`."""

    def __init__(self, redis: _Client, cluster: str) -> None:
        self._redis = redis
        self._prefix = f"ei:{{{cluster}}}:"
        self.cluster = cluster

    @classmethod
    async def connect(cls, url: str, cluster: str = "main") -> Bus:
        """Raises BusError when the URL is none or nobody answers there within 3 s."""
        try:
            redis: _Client = Redis.from_url(
                url,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                socket_timeout=COMMAND_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise BusError(f"{url!r} is not a Redis URL: {error}") from None
        bus = cls(redis, cluster)
        try:
            await redis.ping()
        except (RedisError, OSError, TimeoutError) as error:
            await bus.close()
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BusError(f"Redis at {url} cannot be used: {reason}") from None
        return bus

    async def close(self) -> None:
        await self._redis.aclose()

    def key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    # ------------------------------------------------------------------------- streams

    def publisher(
        self, stream: str, producer: str, *, maxlen: int = 100_000, capacity: int = 50_000
    ) -> Publisher:
        """`maxlen` trims the stream in Redis (about), `capacity` bounds what waits here."""
        return Publisher(self._redis, self.key("stream", stream), stream, producer, maxlen, capacity)

    def reader(self, streams: Mapping[str, str]) -> Reader:
        """Reads `streams` (name -> position: "0" from the start, "$" only what comes, or a saved one)."""
        return Reader(self._redis, self.key("stream", ""), dict(streams))

    async def last(self, stream: str, n: int = 1) -> list[Event]:
        """The newest `n` readable messages, oldest first. Raises BusError."""
        entries = await self._call(
            lambda: self._redis.xrevrange(self.key("stream", stream), count=n), f"read {stream}"
        )
        found = [event for event in (_event(stream, *entry) for entry in entries) if event is not None]
        return found[::-1]

    async def _call(self, command: Callable[[], Awaitable[T]], what: str) -> T:
        try:
            return await command()
        except (RedisError, OSError, TimeoutError) as error:
            raise BusError(f"Redis: cannot {what}: {error or type(error).__name__}") from None

    # ------------------------------------------------------------------------- registry

    async def register_node(self, info: NodeInfo, ttl_s: float) -> None:
        """List the node for `ttl_s` more seconds. Raises BusError."""
        await self._register("node", info.node, msgspec.msgpack.encode(info), ttl_s)

    async def unregister_node(self, node: str) -> None:
        await self._unregister("node", node)

    async def nodes(self) -> dict[str, NodeInfo]:
        """Nodes whose lease runs. Raises BusError."""
        blobs = await self._registered("node")
        return {name: msgspec.msgpack.decode(blob, type=NodeInfo) for name, blob in sorted(blobs.items())}

    async def register_service(self, info: ServiceInfo, ttl_s: float) -> None:
        await self._register("service", info.instance, msgspec.msgpack.encode(info), ttl_s)

    async def unregister_service(self, instance: str) -> None:
        await self._unregister("service", instance)

    async def services(self) -> list[ServiceInfo]:
        blobs = await self._registered("service")
        found = [msgspec.msgpack.decode(blob, type=ServiceInfo) for blob in blobs.values()]
        return sorted(found, key=lambda info: (info.service, info.instance))

    async def _register(self, kind: str, name: str, blob: bytes, ttl_s: float) -> None:
        async def write() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(self.key(kind, name), blob, px=int(ttl_s * 1000))
                pipe.sadd(self.key(kind + "s"), name)
                await pipe.execute()

        await self._call(write, f"register {kind} {name}")

    async def _unregister(self, kind: str, name: str) -> None:
        async def write() -> None:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(self.key(kind, name))
                pipe.srem(self.key(kind + "s"), name)
                await pipe.execute()

        await self._call(write, f"unregister {kind} {name}")

    async def _registered(self, kind: str) -> dict[str, bytes]:
        async def read() -> dict[str, bytes]:
            members: set[bytes] = await self._redis.smembers(self.key(kind + "s"))
            names = sorted(member.decode() for member in members)
            if not names:
                return {}
            blobs = await self._redis.mget([self.key(kind, name) for name in names])
            dead = [name for name, blob in zip(names, blobs, strict=True) if blob is None]
            if dead:
                await self._redis.srem(self.key(kind + "s"), *dead)
            return {name: blob for name, blob in zip(names, blobs, strict=True) if blob is not None}

        return await self._call(read, f"list {kind}s")

    # ------------------------------------------------------------------------- small state

    async def save(self, name: str, blob: bytes) -> None:
        await self._call(lambda: self._redis.set(self.key("saved", name), blob), f"save {name}")

    async def load(self, name: str) -> bytes | None:
        return await self._call(lambda: self._redis.get(self.key("saved", name)), f"load {name}")

    # ------------------------------------------------------------------------- leases

    def lease(self, name: str, holder: str, ttl_s: float) -> Lease:
        return Lease(self, name, holder, ttl_s)

    # ------------------------------------------------------------------------- the directory's store

    async def commit(self, lease: Lease, commit: Commit) -> None:
        """Write one batch of the directory in one transaction, unless another has taken the lease since.

        Raises NotLeader when one has, or the lease was given up (nothing is written), BusError when Redis fails (the
        batch may or may not be written: all values are absolute, so it is safe to commit it again).
        """
        # The fence, not the lease: it changes exactly when another takes the lease, and not when we renew it.
        fence = self.key("fence", lease.name)
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(fence)
                if lease.token is None or await pipe.get(fence) != str(lease.token).encode():
                    raise NotLeader(f"the {lease.name} lease was lost")
                pipe.multi()
                for node, counts in commit.counts.items():
                    key = self.key("count", node)
                    changed = {page.to_bytes(8, "little", signed=True): n for page, n in counts.items() if n}
                    zero = [page.to_bytes(8, "little", signed=True) for page, n in counts.items() if not n]
                    if changed:
                        pipe.hset(key, mapping=changed)
                    if zero:
                        pipe.hdel(key, *zero)
                for node in commit.dropped_nodes:
                    pipe.delete(self.key("count", node))
                for branch, blob in commit.branches.items():
                    if blob is None:
                        pipe.hdel(self.key("branches"), branch)
                        pipe.delete(self.key("path", branch))
                    else:
                        pipe.hset(self.key("branches"), branch, blob)
                for branch, (offset, pages) in commit.paths.items():
                    if offset:
                        pipe.setrange(self.key("path", branch), offset * 8, pages)
                    else:
                        pipe.set(self.key("path", branch), pages)
                state = {field: value for field, value in commit.state.items() if value is not None}
                gone = [field for field, value in commit.state.items() if value is None]
                if state:
                    pipe.hset(self.key("directory"), mapping=state)
                if gone:
                    pipe.hdel(self.key("directory"), *gone)
                await pipe.execute()
        except WatchError:
            raise NotLeader(f"the {lease.name} lease changed hands during a write") from None
        except (RedisError, OSError, TimeoutError) as error:
            raise BusError(f"Redis: cannot commit: {error or type(error).__name__}") from None

    async def load_directory(self) -> Stored:
        """Everything that `commit` wrote. Raises BusError."""

        async def read() -> Stored:
            state: dict[bytes, bytes] = await self._redis.hgetall(self.key("directory"))
            branches: dict[bytes, bytes] = await self._redis.hgetall(self.key("branches"))
            names = list(branches)
            paths: dict[str, bytes] = {}
            for start in range(0, len(names), BATCH):
                part = names[start : start + BATCH]
                blobs = await self._redis.mget([self.key("path", name.decode()) for name in part])
                paths |= {n.decode(): blob or b"" for n, blob in zip(part, blobs, strict=True)}
            counts: dict[str, dict[int, int]] = {}
            marker = self.key("count", "")
            async for key in self._scan(marker + "*"):
                table: dict[int, int] = {}
                async for page, n in self._redis.hscan_iter(key, count=10_000):
                    table[int.from_bytes(page, "little", signed=True)] = int(n)
                counts[key.removeprefix(marker)] = table
            return Stored(
                counts=counts,
                branches={name.decode(): blob for name, blob in branches.items()},
                paths=paths,
                state={name.decode(): value for name, value in state.items()},
            )

        return await self._call(read, "load the directory")

    async def _scan(self, pattern: str) -> AsyncIterator[str]:
        escaped = pattern.replace("[", "\\[").replace("]", "\\]")
        async for key in self._redis.scan_iter(match=escaped, count=1000):
            yield key.decode()


class Commit(msgspec.Struct):
    """One batch of the directory: absolute counts, changed branch records, positions."""

    counts: dict[str, dict[int, int]] = {}  # node -> page -> R (0 deletes)
    dropped_nodes: list[str] = []  # nodes whose counts all go
    branches: dict[str, bytes | None] = {}  # None deletes the record and the path
    paths: dict[str, tuple[int, bytes]] = {}  # branch -> (first changed page, pages from there on)
    state: dict[str, bytes | None] = {}  # None deletes the field


class Stored(msgspec.Struct):
    """What a new leader finds. A path may be longer than its branch's record says: cut it there."""

    counts: dict[str, dict[int, int]]
    branches: dict[str, bytes]
    paths: dict[str, bytes]
    state: dict[str, bytes]


class Lease:
    """A named right that one holder has at a time."""

    def __init__(self, bus: Bus, name: str, holder: str, ttl_s: float) -> None:
        self._bus, self.name, self.holder, self.ttl_s = bus, name, holder, ttl_s
        self.token: int | None = None
        self._renewed = 0.0
        redis = bus._redis
        self._acquire = redis.register_script(_ACQUIRE)
        self._renew = redis.register_script(_RENEW)
        self._release = redis.register_script(_RELEASE)

    @property
    def value(self) -> bytes:
        return f"{self.token} {self.holder}".encode()

    @property
    def held(self) -> bool:
        """Whether this holder may still think that it holds the lease (it was renewed within its time)."""
        return self.token is not None and time.monotonic() - self._renewed < self.ttl_s

    async def acquire(self) -> int | None:
        """The fencing token, or None while another holds the lease. Raises BusError."""
        asked = time.monotonic()
        keys = [self._bus.key("lease", self.name), self._bus.key("fence", self.name)]
        answer = await self._bus._call(
            lambda: self._acquire(keys=keys, args=[self.holder, int(self.ttl_s * 1000)]),
            f"acquire the {self.name} lease",
        )
        self.token = int(answer) or None
        if self.token is not None:
            self._renewed = asked
        return self.token

    async def renew(self) -> bool:
        """False when the lease is lost. Raises BusError."""
        if self.token is None:
            return False
        asked = time.monotonic()
        done = await self._bus._call(
            lambda: self._renew(
                keys=[self._bus.key("lease", self.name)], args=[self.value, int(self.ttl_s * 1000)]
            ),
            f"renew the {self.name} lease",
        )
        if not int(done):
            self.token = None
            return False
        self._renewed = asked
        return True

    async def release(self) -> None:
        if self.token is None:
            return
        value, self.token = self.value, None
        await self._bus._call(
            lambda: self._release(keys=[self._bus.key("lease", self.name)], args=[value]),
            f"release the {self.name} lease",
        )


class Publisher:
    """Numbers messages and sends them in order; `run` must be running for anything to go out."""

    def __init__(
        self, redis: _Client, key: str, stream: str, producer: str, maxlen: int, capacity: int
    ) -> None:
        self._redis, self._key, self._stream = redis, key, stream
        self._producer, self._maxlen, self._capacity = producer, maxlen, capacity
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._seq = 0
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.dropped = 0  # messages given up because Redis stayed away for too long

    @property
    def seq(self) -> int:
        return self._seq

    def publish(self, message: StreamMessage) -> int:
        """Queue a message and return its number. When the queue is full the oldest goes (readers see a gap)."""
        self._seq += 1
        if len(self._waiting) >= self._capacity:
            self._waiting.popleft()
            self.dropped += 1
            if self.dropped == 1 or self.dropped % 10_000 == 0:
                log.warning("publisher_full", stream=self._stream, dropped=self.dropped)
        self._waiting.append((self._seq, messages.encode(message)))
        self._empty.clear()
        self._wake.set()
        return self._seq

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            await self._wake.wait()
            while self._waiting:
                batch = [self._waiting[i] for i in range(min(BATCH, len(self._waiting)))]
                try:
                    await self._send(batch)
                except (RedisError, OSError, TimeoutError) as error:
                    log.warning(
                        "publish_failed", stream=self._stream, waiting=len(self._waiting), error=error
                    )
                    await backoff.wait()
                    continue
                backoff.reset()
                last = batch[-1][0]
                while self._waiting and self._waiting[0][0] <= last:
                    self._waiting.popleft()
            self._wake.clear()
            self._empty.set()

    async def _send(self, batch: Iterable[tuple[int, bytes]]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for seq, payload in batch:
                pipe.xadd(
                    self._key,
                    {"v": messages.SCHEMA, "p": self._producer, "n": seq, "m": payload},
                    maxlen=self._maxlen,
                    approximate=True,
                )
            await pipe.execute()

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until everything is in Redis. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._empty.wait()


class Reader:
    """Reads several streams from positions on; survives Redis restarts; duplicates are dropped."""

    def __init__(self, redis: _Client, prefix: str, streams: dict[str, str]) -> None:
        self._redis, self._prefix = redis, prefix
        self.positions = streams
        self._seen: dict[tuple[str, str], int] = {}
        self._backoff = Backoff()

    def add(self, stream: str, position: str = "$") -> None:
        self.positions.setdefault(stream, position)

    async def follow(self, *streams: str) -> None:
        """Add streams from their newest message on: nothing that comes after this call is missed.

        Raises BusError.
        """
        for stream in streams:
            self.add(stream)
        try:
            await self._resolve()
        except (RedisError, OSError, TimeoutError) as error:
            raise BusError(f"Redis: cannot follow {', '.join(streams)}: {error}") from None

    def remove(self, stream: str) -> None:
        self.positions.pop(stream, None)
        for key in [key for key in self._seen if key[0] == stream]:
            del self._seen[key]

    async def read(self, block_s: float = 1.0) -> list[Event]:
        """What has come, in stream order; [] when nothing came within `block_s` or Redis was away."""
        if not self.positions:
            await asyncio.sleep(block_s)
            return []
        try:
            await self._resolve()
            reply = await self._redis.xread(
                {self._prefix + stream: position for stream, position in self.positions.items()},
                count=BATCH,
                block=max(1, int(min(block_s, COMMAND_TIMEOUT_S / 2) * 1000)),
            )
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("read_failed", streams=len(self.positions), error=error)
            await self._backoff.wait()
            return []
        self._backoff.reset()
        found: list[Event] = []
        pairs = reply.items() if isinstance(reply, dict) else reply
        for key, entries in pairs:
            stream = key.decode().removeprefix(self._prefix)
            if (
                entries
                and isinstance(entries[0], list)
                and entries[0]
                and isinstance(entries[0][0], list | tuple)
            ):
                entries = entries[0]  # RESP3 nests the entries once more
            for entry_id, fields in entries:
                if stream in self.positions:
                    self.positions[stream] = entry_id.decode()
                event = _event(stream, entry_id, fields)
                if event is None:
                    continue
                key_seen = (stream, event.producer)
                if event.seq <= self._seen.get(key_seen, 0):
                    continue
                self._seen[key_seen] = event.seq
                found.append(event)
        return found

    async def _resolve(self) -> None:
        """Turn "$" into the newest position, so that nothing between two reads is missed."""
        for stream, position in list(self.positions.items()):
            if position == "$":
                newest = await self._redis.xrevrange(self._prefix + stream, count=1)
                if stream in self.positions:
                    self.positions[stream] = newest[0][0].decode() if newest else "0-0"


def _event(stream: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Event | None:
    try:
        schema, producer, seq = int(fields[b"v"]), fields[b"p"].decode(), int(fields[b"n"])
        payload = fields[b"m"]
    except (KeyError, ValueError, UnicodeDecodeError):
        log.warning("entry_unreadable", stream=stream, id=entry_id.decode())
        return None
    message = messages.decode(schema, payload)
    if message is None:
        log.warning("message_skipped", stream=stream, id=entry_id.decode(), schema=schema, producer=producer)
        return None
    return Event(stream, entry_id.decode(), producer, seq, message)
