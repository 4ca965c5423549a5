"""Redis: the only module that knows its keys, streams, leases and scripts.

Rules that hold here
- Every key starts with `ei:{CLUSTER}:`; the literal braces put one cluster's keys in one Redis Cluster slot.
- Nothing here waits for ever: commands have a time limit, failures back off with jitter.
- A lease is a key with a time to live; taking it yields a fencing token that only grows, also when a failover of
  Redis took the last ones back: it is a time in milliseconds. `commit` writes only while its token is the lease's.
- The directory's batches are numbered, and one is written only on top of the one before: a leader learns from
  that when Redis lost what it wrote.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from redis.exceptions import RedisError, WatchError

from shared.log import get_logger
from shared.messages import NodeInfo, PageArray, ServiceInfo
from shared.redis_client import explain, open_redis, safe_url
from shared.streams import BATCH, BusError, Event, Publisher, Reader, read_entry

MOST_WORDS = 4000  # of one command in a batch
SCAN_FIELDS = 10_000  # fields of a hash in one answer, about

T = TypeVar("T")
log = get_logger("bus")

# redis-py types its answers for every mode at once; this module uses the mode that answers in bytes
_Client = Any
_Hash = dict[bytes, bytes]
_Word = str | bytes | int


class NotLeader(Exception):
    """A write was refused because the lease belongs to somebody else."""


class StateLost(Exception):
    """Redis does not have the batch that was written last: a failover took it back."""


_NOT_LEADER, _STATE_LOST = 1, 2

_ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held and redis.call('PTTL', KEYS[1]) > 0 then
  local token, holder = string.match(held, '^(%d+) (.*)$')
  if holder ~= ARGV[1] then return -math.max(0, redis.call('PTTL', KEYS[1])) end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return tonumber(token)
end
local now = redis.call('TIME')
local token = now[1] * 1000 + math.floor(now[2] / 1000)
token = string.format('%.0f', math.max(token, tonumber(redis.call('GET', KEYS[2]) or '0') + 1))
redis.call('SET', KEYS[2], token)
redis.call('SET', KEYS[1], token .. ' ' .. ARGV[1], 'PX', ARGV[2])
return tonumber(token)
"""
_RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


# KEYS: fence, number of the last batch, and all that is written. ARGV: the lease's token, this batch's number, commands.
_COMMIT = f"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {{{_NOT_LEADER}, 0}} end
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
if last ~= tonumber(ARGV[2]) - 1 and last ~= tonumber(ARGV[2]) then return {{{_STATE_LOST}, last}} end
local at = 3
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
redis.call('SET', KEYS[2], ARGV[2])
return {{0, last}}
"""


class Bus:
    """One cluster's place in Redis. Make it with `connect`; close it with `close`."""

    def __init__(self, redis: _Client, cluster: str) -> None:
        self._redis = redis
        self._prefix = f"ei:{{{cluster}}}:"
        self._commit = redis.register_script(_COMMIT)
        self.cluster = cluster

    @classmethod
    async def connect(cls, url: str, cluster: str = "main") -> Bus:
        """Raises BusError when the URL (`shared/redis_client.py`) is none or Redis cannot be used there."""
        redis: _Client = open_redis(url)
        bus = cls(redis, cluster)
        try:
            # Not PING: this also asks whether the user may read the cluster's keys.
            await redis.get(bus.key("commit"))
        except (RedisError, OSError, TimeoutError) as error:
            await bus.close()
            raise BusError(f"Redis at {safe_url(url)} cannot be used: {explain(error, url)}") from None
        return bus

    async def close(self) -> None:
        await self._redis.aclose()

    def key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    # ------------------------------------------------------------------------- streams

    def publisher(
        self,
        stream: str,
        producer: str,
        *,
        maxlen: int = 100_000,
        capacity: int = 50_000,
        keep: bool = True,
    ) -> Publisher:
        """`maxlen` trims the stream in Redis (about); see `Publisher` for the rest."""
        number_key = self.key("number", stream, producer)
        key = self.key("stream", stream)
        return Publisher(self._redis, key, number_key, stream, producer, maxlen, capacity, keep)

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
        except (ValueError, OverflowError) as error:
            raise BusError(f"Redis: cannot {what}: it holds what was not written here: {error}") from None

    # ------------------------------------------------------------------------- registry

    async def register_node(self, info: NodeInfo, ttl_s: float) -> None:
        """List the node for `ttl_s` more seconds. Raises BusError."""
        await self._register("node", info.node, msgspec.msgpack.encode(info), ttl_s)

    async def unregister_node(self, node: str) -> None:
        await self._unregister("node", node)

    async def nodes(self) -> dict[str, NodeInfo]:
        """Nodes whose lease runs. Raises BusError."""
        return dict(sorted(_readable(await self._registered("node"), NodeInfo).items()))

    async def register_service(self, info: ServiceInfo, ttl_s: float) -> None:
        await self._register("service", info.instance, msgspec.msgpack.encode(info), ttl_s)

    async def unregister_service(self, instance: str) -> None:
        await self._unregister("service", instance)

    async def services(self) -> list[ServiceInfo]:
        found = _readable(await self._registered("service"), ServiceInfo).values()
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
                with contextlib.suppress(RedisError):  # who only asks may do so while writes are refused
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
        """Write one batch of the directory in one step, unless another has taken the lease since.

        Raises NotLeader when one has, or the lease was given up, and StateLost when the batch before is not there
        (nothing is written either time); BusError when Redis fails (the batch may or may not be written: all values
        are absolute, so it is safe to commit it again).
        """
        keys, words = self._commands(commit)
        fence, number = self.key("fence", lease.name), self.key("commit")
        try:
            # The fence, not the lease: another one has the lease exactly when the fence has another token.
            done, last = await self._commit(
                keys=[fence, number, *keys], args=[lease.token or 0, commit.number, *words]
            )
        except (RedisError, OSError, TimeoutError) as error:
            raise BusError(f"Redis: cannot commit: {error or type(error).__name__}") from None
        if done == _NOT_LEADER:
            raise NotLeader(f"the {lease.name} lease was lost")
        if done == _STATE_LOST:
            raise StateLost(f"Redis has batch {last} where {commit.number - 1} was written")

    def _commands(self, commit: Commit) -> tuple[list[str], list[_Word]]:
        """The keys of the batch, and its commands: the number of words, then the words, of each."""
        keys: list[str] = []
        words: list[_Word] = []

        def add(command: str, key: str, arguments: Sequence[_Word], together: int = 1) -> None:
            keys.append(key)
            # Lua cannot pass more than some thousands of arguments at once; `together` ones must not be parted.
            most = MOST_WORDS // together * together
            for at in range(0, len(arguments), most):
                part = arguments[at : at + most]
                words.extend((len(part) + 2, command, key, *part))

        def hash_(key: str, fields: Mapping[str, bytes | None]) -> None:
            present = {field: value for field, value in fields.items() if value is not None}
            add("HSET", key, list(itertools.chain.from_iterable(present.items())), 2)
            add("HDEL", key, [field for field, value in fields.items() if value is None])

        counted = self.key("counted")
        for node, change in commit.counts.items():
            key = self.key("count", node)
            if change.empty:
                keys.append(key)
                words.extend((2, "DEL", key))
                add("SREM", counted, [node])
                continue
            positive = change.counts > 0
            # A void of 8 bytes is a field as it stands.
            fields = change.pages[positive].astype("<i8", copy=False).view("V8").tolist()
            if fields:
                values = change.counts[positive].tolist()
                add("SADD", counted, [node])
                add("HSET", key, list(itertools.chain.from_iterable(zip(fields, values, strict=True))), 2)
            add("HDEL", key, change.pages[~positive].astype("<i8", copy=False).view("V8").tolist())
        hash_(self.key("branches"), commit.branches)
        hash_(self.key("segments"), {str(n): blob for n, blob in commit.segments.items()})
        for n, blob in commit.segments.items():
            if blob is None:
                key = self.key("pages", str(n))
                keys.append(key)
                words.extend((2, "DEL", key))
        for n, (first, pages) in commit.pages.items():
            key = self.key("pages", str(n))
            if first:
                add("SETRANGE", key, [first * 8, pages], 2)
            else:
                add("SET", key, [pages])
        hash_(self.key("directory"), commit.state)
        return keys, words

    async def committed(self) -> int:
        """Number of the batch that was written last; 0 when there is none. Raises BusError."""
        return int(await self._call(lambda: self._redis.get(self.key("commit")), "read the state") or 0)

    async def load_directory(self) -> Stored:
        """Everything that `commit` wrote; a batch written meanwhile may be read in part. Raises BusError."""

        async def read() -> Stored:
            number, state, branches, segments, nodes = await self._heads()
            numbers = list(segments)
            pages: dict[int, bytes] = {}
            for start in range(0, len(numbers), BATCH):
                part = numbers[start : start + BATCH]
                blobs = await self._redis.mget([self.key("pages", n.decode()) for n in part])
                pages |= {int(n): blob or b"" for n, blob in zip(part, blobs, strict=True)}
            counts = {}
            for node in nodes:
                table: dict[bytes, bytes] = {}
                cursor: int | None = None
                while cursor != 0:
                    key = self.key("count", node)
                    cursor, found = await self._redis.hscan(key, cursor or 0, count=SCAN_FIELDS)
                    table |= found
                counts[node] = _node_counts(table)
            return _stored(number, state, branches, segments, pages, counts)

        return await self._call(read, "load the directory")

    async def load_directory_at_once(self) -> Stored:
        """Everything that `commit` wrote, between two batches. Redis stands still for about 0.5 s for a million
        counts: for checks, not for services. Raises BusError."""

        async def read() -> Stored:
            while True:
                async with self._redis.pipeline(transaction=True) as pipe:
                    await pipe.watch(self.key("commit"))
                    numbers = await pipe.hkeys(self.key("segments"))
                    nodes = sorted(node.decode() for node in await pipe.smembers(self.key("counted")))
                    pipe.multi()
                    self._ask_heads(pipe)
                    for n in numbers:
                        pipe.get(self.key("pages", n.decode()))
                    for node in nodes:
                        pipe.hgetall(self.key("count", node))
                    try:
                        heads, rest = _split(await pipe.execute(), _HEADS)
                    except WatchError:
                        continue
                    blobs, tables = _split(rest, len(numbers))
                    pages = {int(n): blob or b"" for n, blob in zip(numbers, blobs, strict=True)}
                    counts = {n: _node_counts(table) for n, table in zip(nodes, tables, strict=True)}
                    number, state, branches, segments, _ = heads
                    return _stored(number, state, branches, segments, pages, counts)

        return await self._call(read, "read the directory's state")

    async def load_branch(self, branch: str) -> bytes | None:
        """The branch's record; None when it is not active. Raises BusError."""
        key = self.key("branches")
        return await self._call(lambda: self._redis.hget(key, branch), f"read branch {branch}")

    async def load_branches(self) -> dict[str, bytes]:
        """The records of all active branches. Raises BusError."""
        found: _Hash = await self._call(lambda: self._redis.hgetall(self.key("branches")), "list branches")
        return {name.decode(): blob for name, blob in found.items()}

    async def leader(self, lease: str) -> str | None:
        """Who holds the lease. Raises BusError."""
        held: bytes | None = await self._call(
            lambda: self._redis.get(self.key("lease", lease)), f"read the {lease} lease"
        )
        return None if held is None else held.decode().partition(" ")[2]

    async def load_segment(self, number: int) -> tuple[bytes | None, bytes]:
        """A segment's record, None when it does not exist, and its pages. Raises BusError."""

        async def read() -> tuple[bytes | None, bytes]:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hget(self.key("segments"), str(number))
                pipe.get(self.key("pages", str(number)))
                record, pages = await pipe.execute()
                return record, pages or b""

        return await self._call(read, f"read segment {number}")

    async def load_counts(self, node: str, pages: PageArray) -> npt.NDArray[np.int32]:
        """R of these pages on the node (int32[n]). Raises BusError."""
        if not pages.size:
            return np.empty(0, dtype=np.int32)
        fields = pages.astype("<i8").view("V8").tolist()
        found = await self._call(
            lambda: self._redis.hmget(self.key("count", node), fields), f"read counts of {node}"
        )
        return np.array([int(n or 0) for n in found], dtype=np.int32)

    def _ask_heads(self, pipe: _Client) -> None:
        pipe.get(self.key("commit"))
        for name in ("directory", "branches", "segments"):
            pipe.hgetall(self.key(name))
        pipe.smembers(self.key("counted"))

    async def _heads(self) -> tuple[bytes | None, _Hash, _Hash, _Hash, list[str]]:
        async with self._redis.pipeline(transaction=True) as pipe:
            self._ask_heads(pipe)
            number, state, branches, segments, nodes = await pipe.execute()
        return number, state, branches, segments, sorted(node.decode() for node in nodes)


_HEADS = 5


def _split(items: list[Any], at: int) -> tuple[list[Any], list[Any]]:
    return items[:at], items[at:]


Info = TypeVar("Info", bound=msgspec.Struct)


def _readable(blobs: Mapping[str, bytes], kind: type[Info]) -> dict[str, Info]:
    """The entries that this version can read."""
    found: dict[str, Info] = {}
    for name, blob in blobs.items():
        try:
            found[name] = msgspec.msgpack.decode(blob, type=kind)
        except msgspec.MsgspecError as error:
            log.warning("entry_unreadable", name=name, error=error)
    return found


def _node_counts(table: _Hash) -> NodeCounts:
    pages = np.frombuffer(b"".join(table), dtype="<i8").astype(np.int64, copy=False)
    return NodeCounts(pages, np.array(list(map(int, table.values())), dtype=np.int32), empty=not table)


def _stored(
    number: bytes | None,
    state: _Hash,
    branches: _Hash,
    segments: _Hash,
    pages: dict[int, bytes],
    counts: dict[str, NodeCounts],
) -> Stored:
    return Stored(
        number=int(number or 0),
        counts=counts,
        branches={name.decode(): blob for name, blob in branches.items()},
        segments={int(n): blob for n, blob in segments.items()},
        pages=pages,
        state={name.decode(): value for name, value in state.items()},
    )


class NodeCounts(NamedTuple):
    """Pages of a node (int64[n]) and R of each (int32[n]); `empty`: no page of the node has a positive count."""

    pages: PageArray
    counts: npt.NDArray[np.int32]
    empty: bool = False


NO_COUNTS = NodeCounts(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32), empty=True)


class Commit(msgspec.Struct):
    """One batch of the directory: absolute counts, changed branches and segments of paths, positions."""

    number: int  # one more than the batch before
    counts: dict[str, NodeCounts] = {}  # changed pages; 0 deletes
    branches: dict[str, bytes | None] = {}  # None deletes
    segments: dict[int, bytes | None] = {}  # records of path segments; None deletes the record and the pages
    pages: dict[int, tuple[int, bytes]] = {}  # segment -> (first changed page, pages from there on)
    state: dict[str, bytes | None] = {}  # None deletes


class Stored(msgspec.Struct):
    """What `commit` wrote. A segment may have more pages than its record says: cut it there."""

    number: int = 0
    counts: dict[str, NodeCounts] = {}
    branches: dict[str, bytes] = {}
    segments: dict[int, bytes] = {}
    pages: dict[int, bytes] = {}
    state: dict[str, bytes] = {}


class Lease:
    """A named right that one holder has at a time."""

    def __init__(self, bus: Bus, name: str, holder: str, ttl_s: float) -> None:
        self._bus, self.name, self.holder, self.ttl_s = bus, name, holder, ttl_s
        self.token: int | None = None
        self.free_in_s = 0.0  # when `acquire` failed: unless it is renewed, the lease ends then
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
        self.token = int(answer) if int(answer) > 0 else None
        if self.token is not None:
            self._renewed = asked
        else:
            self.free_in_s = -int(answer) / 1000
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
