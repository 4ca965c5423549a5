"""The directory's state in Redis: what `commit` writes, and how it is read back.

Rules that hold here
- A batch is written in one step, and only while the writer's token is the lease's: a deposed leader cannot write.
- Batches are numbered, and one is written only on top of the one before: a leader learns from that when a failover
  of Redis took back what it wrote.
- Values are absolute, so a batch may be written twice.
- Records are bytes here; `services/directory/saved.py` knows what is in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from redis.exceptions import RedisError, WatchError

from shared.bus import Bus, Lease, NotLeader
from shared.messages import PageArray
from shared.streams import BATCH, BusError

MOST_WORDS = 4000  # of one command in a batch
SCAN_FIELDS = 10_000  # fields of a hash in one answer, about

_Client = Any
_Hash = dict[bytes, bytes]
_Word = str | bytes | int


class StateLost(Exception):
    """Redis does not have the batch that was written last: a failover took it back."""


_NOT_LEADER, _STATE_LOST = 1, 2

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


class DirectoryStore:
    """One cluster's directory in Redis."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._commit = bus.redis.register_script(_COMMIT)

    async def commit(self, lease: Lease, commit: Commit) -> None:
        """Write one batch of the directory in one step, unless another has taken the lease since.

        Raises NotLeader when one has, or the lease was given up, and StateLost when the batch before is not there
        (nothing is written either time); BusError when Redis fails (the batch may or may not be written: all values
        are absolute, so it is safe to commit it again).
        """
        keys, words = self._commands(commit)
        fence, number = self._bus.key("fence", lease.name), self._bus.key("commit")
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

        counted = self._bus.key("counted")
        for node, change in commit.counts.items():
            key = self._bus.key("count", node)
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
        hash_(self._bus.key("branches"), commit.branches)
        hash_(self._bus.key("segments"), {str(n): blob for n, blob in commit.segments.items()})
        for n, blob in commit.segments.items():
            if blob is None:
                key = self._bus.key("pages", str(n))
                keys.append(key)
                words.extend((2, "DEL", key))
        for n, (first, pages) in commit.pages.items():
            key = self._bus.key("pages", str(n))
            if first:
                add("SETRANGE", key, [first * 8, pages], 2)
            else:
                add("SET", key, [pages])
        hash_(self._bus.key("directory"), commit.state)
        return keys, words

    async def committed(self) -> int:
        """Number of the batch that was written last; 0 when there is none. Raises BusError."""
        return int(
            await self._bus.call(lambda: self._bus.redis.get(self._bus.key("commit")), "read the state") or 0
        )

    async def load(self) -> Stored:
        """Everything that `commit` wrote; a batch written meanwhile may be read in part. Raises BusError."""

        async def read() -> Stored:
            number, state, branches, segments, nodes = await self._heads()
            numbers = list(segments)
            pages: dict[int, bytes] = {}
            for start in range(0, len(numbers), BATCH):
                part = numbers[start : start + BATCH]
                blobs = await self._bus.redis.mget([self._bus.key("pages", n.decode()) for n in part])
                pages |= {int(n): blob or b"" for n, blob in zip(part, blobs, strict=True)}
            counts = {}
            for node in nodes:
                table: dict[bytes, bytes] = {}
                cursor: int | None = None
                while cursor != 0:
                    key = self._bus.key("count", node)
                    cursor, found = await self._bus.redis.hscan(key, cursor or 0, count=SCAN_FIELDS)
                    table |= found
                counts[node] = _node_counts(table)
            return _stored(number, state, branches, segments, pages, counts)

        return await self._bus.call(read, "load the directory")

    async def load_at_once(self) -> Stored:
        """Everything that `commit` wrote, between two batches. Redis stands still for about 0.5 s for a million
        counts: for checks, not for services. Raises BusError."""

        async def read() -> Stored:
            while True:
                async with self._bus.redis.pipeline(transaction=True) as pipe:
                    await pipe.watch(self._bus.key("commit"))
                    numbers = await pipe.hkeys(self._bus.key("segments"))
                    nodes = sorted(node.decode() for node in await pipe.smembers(self._bus.key("counted")))
                    pipe.multi()
                    self._ask_heads(pipe)
                    for n in numbers:
                        pipe.get(self._bus.key("pages", n.decode()))
                    for node in nodes:
                        pipe.hgetall(self._bus.key("count", node))
                    try:
                        heads, rest = _split(await pipe.execute(), _HEADS)
                    except WatchError:
                        continue
                    blobs, tables = _split(rest, len(numbers))
                    pages = {int(n): blob or b"" for n, blob in zip(numbers, blobs, strict=True)}
                    counts = {n: _node_counts(table) for n, table in zip(nodes, tables, strict=True)}
                    number, state, branches, segments, _ = heads
                    return _stored(number, state, branches, segments, pages, counts)

        return await self._bus.call(read, "read the directory's state")

    async def load_branch(self, branch: str) -> bytes | None:
        """The branch's record; None when it is not active. Raises BusError."""
        key = self._bus.key("branches")
        return await self._bus.call(lambda: self._bus.redis.hget(key, branch), f"read branch {branch}")

    async def load_branches(self) -> dict[str, bytes]:
        """The records of all active branches. Raises BusError."""
        found: _Hash = await self._bus.call(
            lambda: self._bus.redis.hgetall(self._bus.key("branches")), "list branches"
        )
        return {name.decode(): blob for name, blob in found.items()}

    async def load_segment(self, number: int) -> tuple[bytes | None, bytes]:
        """A segment's record, None when it does not exist, and its pages. Raises BusError."""

        async def read() -> tuple[bytes | None, bytes]:
            async with self._bus.redis.pipeline(transaction=True) as pipe:
                pipe.hget(self._bus.key("segments"), str(number))
                pipe.get(self._bus.key("pages", str(number)))
                record, pages = await pipe.execute()
                return record, pages or b""

        return await self._bus.call(read, f"read segment {number}")

    async def load_counts(self, node: str, pages: PageArray) -> npt.NDArray[np.int32]:
        """R of these pages on the node (int32[n]). Raises BusError."""
        if not pages.size:
            return np.empty(0, dtype=np.int32)
        fields = pages.astype("<i8").view("V8").tolist()
        found = await self._bus.call(
            lambda: self._bus.redis.hmget(self._bus.key("count", node), fields), f"read counts of {node}"
        )
        return np.array([int(n or 0) for n in found], dtype=np.int32)

    def _ask_heads(self, pipe: _Client) -> None:
        pipe.get(self._bus.key("commit"))
        for name in ("directory", "branches", "segments"):
            pipe.hgetall(self._bus.key(name))
        pipe.smembers(self._bus.key("counted"))

    async def _heads(self) -> tuple[bytes | None, _Hash, _Hash, _Hash, list[str]]:
        async with self._bus.redis.pipeline(transaction=True) as pipe:
            self._ask_heads(pipe)
            number, state, branches, segments, nodes = await pipe.execute()
        return number, state, branches, segments, sorted(node.decode() for node in nodes)


_HEADS = 5


def _split(items: list[Any], at: int) -> tuple[list[Any], list[Any]]:
    return items[:at], items[at:]


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
