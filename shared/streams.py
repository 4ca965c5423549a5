"""Numbered streams over Redis: a publisher that keeps what Redis does not have yet, a reader that drops what it
has seen. Keys come from `shared/bus.py`, which makes both.

Rules that hold here
- A stream entry has four fields: `v` schema, `p` producer (the incarnation that numbers), `n` sequence number
  (1, 2, ... without gaps for one producer on one stream), `m` the message (`shared/messages.py`).
- A message arrives once and in order, or its absence shows as a gap in `n`.
- A reader has a definite position on every stream. `follow` fixes that of one that is read from now on at once,
  not at the next read: what is sent between the two is not missed.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from shared import messages
from shared.log import get_logger
from shared.messages import StreamMessage

COMMAND_TIMEOUT_S = 5.0
BATCH = 512
log = get_logger("bus")

# redis-py types its answers for every mode at once; this module uses the mode that answers in bytes
_Client = Any


class BusError(Exception):
    """Redis cannot be used; the text is one line."""


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

    def add(self, stream: str, position: str) -> None:
        """Read the stream from `position` on ("0": from its start), unless it is read already."""
        self.positions.setdefault(stream, position)

    async def follow(self, *streams: str) -> None:
        """Add streams from their newest message on: nothing that comes after this call is missed.

        Raises BusError.
        """
        for stream in streams:
            if stream in self.positions:
                continue
            try:
                newest = await self._redis.xrevrange(self._prefix + stream, count=1)
            except (RedisError, OSError, TimeoutError) as error:
                raise BusError(f"Redis: cannot follow {stream}: {error or type(error).__name__}") from None
            self.add(stream, newest[0][0].decode() if newest else "0-0")

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
                event = read_entry(stream, entry_id, fields)
                if event is None:
                    continue
                key_seen = (stream, event.producer)
                if event.seq <= self._seen.get(key_seen, 0):
                    continue
                self._seen[key_seen] = event.seq
                found.append(event)
        return found


def read_entry(stream: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Event | None:
    """The message of a stream entry; None, and a line in the log, when it cannot be read."""
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
