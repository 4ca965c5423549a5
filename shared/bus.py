"""A cluster's place in Redis: its keys, streams, registry, small state and leases.

Rules that hold here
- Every key starts with `ei:{CLUSTER}:`; the literal braces put one cluster's keys in one Redis Cluster slot.
- Nothing here waits for ever: commands have a time limit, failures back off with jitter.
- A lease is a key with a time to live; taking it yields a fencing token that only grows, also when a failover of
  Redis took the last ones back: it is a time in milliseconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from redis.exceptions import RedisError

from shared.log import get_logger
from shared.messages import NodeInfo, ServiceInfo
from shared.redis_client import explain, open_redis, safe_url
from shared.streams import BusError, Event, Publisher, Reader, read_entry

T = TypeVar("T")
log = get_logger("bus")

# redis-py types its answers for every mode at once; this module uses the mode that answers in bytes
_Client = Any


class NotLeader(Exception):
    """A write was refused because the lease belongs to somebody else."""


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


class Bus:
    """One cluster's place in Redis. Make it with `connect`; close it with `close`."""

    def __init__(self, redis: _Client, cluster: str) -> None:
        self.redis = redis  # the client that answers in bytes, for what knows keys of its own
        self._prefix = f"ei:{{{cluster}}}:"
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
        await self.redis.aclose()

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
        linger_s: float = 0.0,
    ) -> Publisher:
        """`maxlen` trims the stream in Redis (about); see `Publisher` for the rest."""
        number_key = self.key("number", stream, producer)
        key = self.key("stream", stream)
        return Publisher(self.redis, key, number_key, stream, producer, maxlen, capacity, keep, linger_s)

    def reader(self, streams: Mapping[str, str]) -> Reader:
        """Reads `streams` (name -> position, "0" for the start); `Reader.follow` adds what is read from now on."""
        return Reader(self.redis, self.key("stream", ""), dict(streams))

    async def last(self, stream: str, n: int = 1) -> list[Event]:
        """The newest `n` readable messages, oldest first. Raises BusError."""
        entries = await self.call(
            lambda: self.redis.xrevrange(self.key("stream", stream), count=n), f"read {stream}"
        )
        found = [event for event in (read_entry(stream, *entry) for entry in entries) if event is not None]
        return found[::-1]

    async def call(self, command: Callable[[], Awaitable[T]], what: str) -> T:
        """The command's answer; every failure as a BusError that says what could not be done."""
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
            async with self.redis.pipeline(transaction=True) as pipe:
                pipe.set(self.key(kind, name), blob, px=int(ttl_s * 1000))
                pipe.sadd(self.key(kind + "s"), name)
                await pipe.execute()

        await self.call(write, f"register {kind} {name}")

    async def _unregister(self, kind: str, name: str) -> None:
        async def write() -> None:
            async with self.redis.pipeline(transaction=True) as pipe:
                pipe.delete(self.key(kind, name))
                pipe.srem(self.key(kind + "s"), name)
                await pipe.execute()

        await self.call(write, f"unregister {kind} {name}")

    async def _registered(self, kind: str) -> dict[str, bytes]:
        async def read() -> dict[str, bytes]:
            members: set[bytes] = await self.redis.smembers(self.key(kind + "s"))
            names = sorted(member.decode() for member in members)
            if not names:
                return {}
            blobs = await self.redis.mget([self.key(kind, name) for name in names])
            dead = [name for name, blob in zip(names, blobs, strict=True) if blob is None]
            if dead:
                with contextlib.suppress(RedisError):  # who only asks may do so while writes are refused
                    await self.redis.srem(self.key(kind + "s"), *dead)
            return {name: blob for name, blob in zip(names, blobs, strict=True) if blob is not None}

        return await self.call(read, f"list {kind}s")

    # ------------------------------------------------------------------------- small state

    async def save(self, name: str, blob: bytes) -> None:
        await self.call(lambda: self.redis.set(self.key("saved", name), blob), f"save {name}")

    async def load(self, name: str) -> bytes | None:
        return await self.call(lambda: self.redis.get(self.key("saved", name)), f"load {name}")

    # ------------------------------------------------------------------------- leases

    def lease(self, name: str, holder: str, ttl_s: float) -> Lease:
        return Lease(self, name, holder, ttl_s)

    async def leader(self, lease: str) -> str | None:
        """Who holds the lease. Raises BusError."""
        held: bytes | None = await self.call(
            lambda: self.redis.get(self.key("lease", lease)), f"read the {lease} lease"
        )
        return None if held is None else held.decode().partition(" ")[2]


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


class Lease:
    """A named right that one holder has at a time."""

    def __init__(self, bus: Bus, name: str, holder: str, ttl_s: float) -> None:
        self._bus, self.name, self.holder, self.ttl_s = bus, name, holder, ttl_s
        self.token: int | None = None
        self.free_in_s = 0.0  # when `acquire` failed: unless it is renewed, the lease ends then
        self._renewed = 0.0
        redis = bus.redis
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
        answer = await self._bus.call(
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
        done = await self._bus.call(
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
        await self._bus.call(
            lambda: self._release(keys=[self._bus.key("lease", self.name)], args=[value]),
            f"release the {self.name} lease",
        )
