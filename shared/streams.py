"""Numbered streams over Redis: a publisher that keeps what Redis does not have yet, a reader that drops what it
has seen. Keys come from `shared/bus.py`, which makes both.

Rules that hold here
- A stream entry has four fields: `v` schema, `p` producer (the incarnation that numbers), `n` sequence number
  (1, 2, ... without gaps for one producer on one stream), `m` the message (`shared/messages.py`).
- A message arrives once and in order, or its absence shows as a gap in `n`.
- Redis keeps each producer's last number on a stream beside the stream, and both change in one step (`_APPEND`).
  So whatever a crash or a failover of Redis took back, it took back both, and the publisher sees where to go on.
- A publisher forgets a message when Redis still has it SAFE_S after it took it: by then it is in the file of
  every server that may take over, or the server was lost and came back with it.
- A reader has a definite position on every stream. `follow` fixes that of one that is read from now on at once,
  not at the next read: what is sent between the two is not missed. After a failure it reads the last REWIND_S
  again, for a server that took over may have a clock that is behind.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from shared import messages
from shared.log import get_logger
from shared.messages import StreamMessage

COMMAND_TIMEOUT_S = 5.0
BATCH = 512
SAFE_S = 15.0  # above `min-replicas-max-lag` and the second between two fsyncs of the append-only file
PROBE_S = 1.0  # between looks whether Redis still has what it took
NUMBER_TTL_S = 86_400  # a producer's last number is kept for that long after its last word
REWIND_S = 5.0
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


# KEYS: stream, last number. ARGV: producer, schema, maxlen, seconds to keep the number, number of the first message
# that the publisher still has, number of the first one that follows, messages. Appends what the stream lacks, unless
# earlier messages that the publisher has are missing. Returns the last number on the stream.
_APPEND = """
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local first = tonumber(ARGV[6])
if first > math.max(last + 1, tonumber(ARGV[5])) then return last end
for i = 7, #ARGV do
  local n = first + i - 7
  if n > last then
    redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', 'v', ARGV[2], 'p', ARGV[1], 'n', n, 'm', ARGV[i])
    last = n
  end
end
redis.call('SET', KEYS[2], last, 'EX', ARGV[4])
return last
"""


class Publisher:
    """Numbers messages and sends them in order; `run` must be running for anything to go out.

    `capacity` bounds the messages held here, those that Redis lacks and those that it may lose again. With
    `keep=False` a message that Redis took is forgotten at once: for streams whose next message makes up for it.
    """

    def __init__(
        self,
        redis: _Client,
        key: str,
        number_key: str,
        stream: str,
        producer: str,
        maxlen: int,
        capacity: int,
        keep: bool,
        linger_s: float = 0.0,
    ) -> None:
        """`linger_s`: how long a message may wait for others, to be sent with them."""
        self._linger_s = linger_s
        self._keys = [key, number_key]
        self._append = redis.register_script(_APPEND)
        self._stream, self._producer = stream, producer
        self._maxlen, self._capacity, self._keep = maxlen, capacity, keep
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._kept: deque[tuple[int, bytes, float]] = deque()  # taken by Redis at a monotonic time
        self._seq = 0
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self.dropped = 0  # messages given up because Redis stayed away for too long
        self.repeated = 0  # messages sent again because Redis lost them

    @property
    def seq(self) -> int:
        return self._seq

    @property
    def kept(self) -> int:
        """Messages that Redis took and that are not forgotten yet."""
        return len(self._kept)

    def publish(self, message: StreamMessage) -> int:
        """Queue a message and return its number. When the queue is full the oldest goes (readers see a gap)."""
        self._seq += 1
        if len(self._kept) + len(self._waiting) >= self._capacity:
            self._drop_one()
        self._waiting.append((self._seq, messages.encode(message)))
        self._empty.clear()
        self._wake.set()
        return self._seq

    def _drop_one(self) -> None:
        if self._kept:
            self._kept.popleft()
            return
        self._waiting.popleft()
        self.dropped += 1
        if self.dropped == 1 or self.dropped % 10_000 == 0:
            log.warning("publisher_full", stream=self._stream, dropped=self.dropped)

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            if not self._waiting:
                await self._rest()
                if self._linger_s and self._waiting:
                    await asyncio.sleep(self._linger_s)
            try:
                await self._send()
            except (RedisError, OSError, TimeoutError) as error:
                log.warning("publish_failed", stream=self._stream, waiting=len(self._waiting), error=error)
                await backoff.wait()
            else:
                backoff.reset()

    async def _rest(self) -> None:
        """Wait for something to send or, while messages are kept, for the next look at them."""
        self._wake.clear()
        self._empty.set()
        if not self._kept:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout(PROBE_S):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _send(self) -> None:
        """Send the next messages, none to only look; then forget what is safe and take back what was lost."""
        asked = time.monotonic()
        batch = [self._waiting[i] for i in range(min(BATCH, len(self._waiting)))]
        first = batch[0][0] if batch else self._seq + 1
        # What is kept ends just before what waits, unless messages were given up in between.
        oldest = self._kept[0][0] if self._kept and self._kept[-1][0] == first - 1 else first
        last = int(
            await self._append(
                keys=self._keys,
                args=[
                    self._producer, messages.SCHEMA, self._maxlen, NUMBER_TTL_S, oldest, first,
                    *(payload for _, payload in batch),
                ],
            )
        )  # fmt: skip
        while self._kept and self._kept[0][0] <= last and self._kept[0][2] <= asked - SAFE_S:
            self._kept.popleft()
        lost = 0
        while self._kept and self._kept[-1][0] > last:
            seq, payload, _ = self._kept.pop()
            self._waiting.appendleft((seq, payload))
            lost += 1
        if lost:
            self.repeated += lost
            self._empty.clear()
            log.warning("lost_by_redis", stream=self._stream, sent_again=lost)
        while self._waiting and self._waiting[0][0] <= last:
            seq, payload = self._waiting.popleft()
            if self._keep:
                self._kept.append((seq, payload, asked))

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until everything is in Redis. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._empty.wait()


class Reader:
    """Reads several streams from positions on; survives Redis restarts; duplicates are dropped."""

    def __init__(self, redis: _Client, prefix: str, streams: dict[str, str]) -> None:
        self._redis, self._prefix = redis, prefix
        self.positions = streams
        self._begun = dict(streams)  # where each stream was first read from
        self._seen: dict[tuple[str, str], int] = {}
        self.whole_ms = (
            0  # up to that millisecond of Redis' clock no later read finds more, but for full batches
        )
        self._failing = False
        self._backoff = Backoff()
        self._ignored = b""

    def ignore(self, producer: str) -> None:
        """Pass over what that producer sends, before it is decoded: the reader's own messages."""
        self._ignored = producer.encode()

    def add(self, stream: str, position: str) -> None:
        """Read the stream from `position` on ("0": from its start), unless it is read already."""
        if stream not in self.positions:
            self.positions[stream] = self._begun[stream] = position

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
        self._begun.pop(stream, None)
        for key in [key for key in self._seen if key[0] == stream]:
            del self._seen[key]

    async def read(self, block_s: float = 1.0) -> list[Event]:
        """What has come, in stream order; [] when nothing came within `block_s` or Redis was away. 0: do not wait."""
        if not self.positions:
            await asyncio.sleep(block_s)
            return []
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.time()
                pipe.xread(
                    {self._prefix + stream: position for stream, position in self.positions.items()},
                    count=BATCH,
                    block=max(1, int(min(block_s, COMMAND_TIMEOUT_S / 2) * 1000)) if block_s else None,
                )
                (seconds, micros), reply = await pipe.execute()
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("read_failed", streams=len(self.positions), error=error)
            if not self._failing:
                self._failing = True
                self._rewind()
            await self._backoff.wait()
            return []
        self._failing = False
        self._backoff.reset()
        self.whole_ms = seconds * 1000 + micros // 1000 - 1
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
                if self._ignored and fields.get(b"p") == self._ignored:
                    continue
                event = read_entry(stream, entry_id, fields)
                if event is None:
                    continue
                key_seen = (stream, event.producer)
                if event.seq <= self._seen.get(key_seen, 0):
                    continue
                self._seen[key_seen] = event.seq
                found.append(event)
        return found

    def _rewind(self) -> None:
        """Go back by REWIND_S, not further than where reading began; what was seen is dropped again."""
        for stream, position in self.positions.items():
            earlier = f"{max(0, order(position)[0] - int(REWIND_S * 1000))}-0"
            self.positions[stream] = max(earlier, self._begun[stream], key=order)


def order(position: str) -> tuple[int, int]:
    """Milliseconds of Redis' clock, and the number among those of that millisecond."""
    milliseconds, _, number = position.partition("-")
    return int(milliseconds), int(number or 0)


def is_position(text: str) -> bool:
    """Whether it is a place in a stream: "0", or milliseconds and a number."""
    parts = text.split("-")
    return len(parts) <= 2 and all(part.isascii() and part.isdigit() for part in parts)


def read_entry(stream: str, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Event | None:
    """The message of a stream entry; None, and a line in the log, when it cannot be read."""
    try:
        schema, producer, seq = int(fields[b"v"]), fields[b"p"].decode(), int(fields[b"n"])
        payload = fields[b"m"]
        if not 0 < seq < 2**63:
            raise ValueError(seq)
    except (KeyError, ValueError, UnicodeDecodeError):
        log.warning("entry_unreadable", stream=stream, id=entry_id.decode())
        return None
    message = messages.decode(schema, payload)
    if message is None:
        log.warning("message_skipped", stream=stream, id=entry_id.decode(), schema=schema, producer=producer)
        return None
    return Event(stream, entry_id.decode(), producer, seq, message)
