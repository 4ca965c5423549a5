"""Redis: the only module that knows its keys, streams, leases and scripts.

Rules that hold here
- Every key starts with `ei:{CLUSTER}:`; the literal braces put one cluster's keys in one Redis Cluster slot.
- Nothing here waits for ever: commands have a time limit, failures back off with jitter.
- A lease is a key with a time to live; taking it yields a fencing token that only grows. `commit` writes only
  while its token is the lease's.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, WatchError

from shared.log import get_logger
from shared.messages import NodeInfo, ServiceInfo
from shared.streams import BATCH, COMMAND_TIMEOUT_S, BusError, Event, Publisher, Reader, read_entry

CONNECT_TIMEOUT_S = 3.0

T = TypeVar("T")
log = get_logger("bus")

# redis-py types its answers for every mode at once; this module uses the mode that answers in bytes
_Client = Any


class NotLeader(Exception):
    """A write was refused because the lease belongs to somebody else."""


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
        """Reads `streams` (name -> position, "0" for the start); `Reader.follow` adds what is read from now on."""
        return Reader(self._redis, self.key("stream", ""), dict(streams))

    async def last(self, stream: str, n: int = 1) -> list[Event]:
        """The newest `n` readable messages, oldest first. Raises BusError."""
        entries = await self._call(
            lambda: self._redis.xrevrange(self.key("stream", stream), count=n), f"read {stream}"
        )
        found = [event for event in (read_entry(stream, *entry) for entry in entries) if event is not None]
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
