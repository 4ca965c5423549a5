"""A running Mooncake process, as its parent sees it (`worker/transport/mooncake_process.py` is what runs there)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections import deque

import msgspec

from worker.kv.arena import Arena
from worker.transport import mooncake_process as process

EXIT_S = 0.5  # for a process that ends by itself
FIRST_PAUSE_S = 0.2  # before a process that did not last is started again; doubles
LAST_PAUSE_S = 10.0
LASTED_S = 10.0
_MODULE = "worker.transport.mooncake_process"


class _Hello(msgspec.Struct):
    """What a process says first: where it serves, or why it cannot."""

    port: int = 0
    base: int = 0
    mark: int = 0
    error: str = ""
    missing: bool = False


_hellos = msgspec.json.Decoder(_Hello)


class Helper:
    """A running helper. What it sends is in `messages` once `news` is set; `gone` says that it ended."""

    def __init__(
        self, child: asyncio.subprocess.Process, channel: socket.socket, news: asyncio.Event
    ) -> None:
        self.messages: deque[bytes] = deque()
        self.gone = False
        self.hello: _Hello | None = None
        self.boots: dict[str, str] = {}  # what it knows of addresses
        self.delivered: set[str] = set()  # addresses that it has read from
        self.since = time.monotonic()
        self._child = child
        self._channel = channel
        self._news = news
        asyncio.get_running_loop().add_reader(channel.fileno(), self._receive)

    @property
    def pid(self) -> int:
        return self._child.pid

    def _receive(self) -> None:
        try:
            while message := self._channel.recv(process.MESSAGE_BYTES):
                self.messages.append(message)
            self._close_channel()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._close_channel()
        if self.hello is None and self.messages:
            self.hello = _hellos.decode(self.messages.popleft())
        self._news.set()

    def send(self, message: bytes) -> None:
        """What cannot be sent shows as `gone`."""
        try:
            self._channel.send(message)
        except OSError:
            self._close_channel()
            self._news.set()

    def _close_channel(self) -> None:
        self.gone = True
        if self._channel.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()

    async def end(self) -> int:
        """Kill it; returns its exit code when it is dead. A second call does nothing more."""
        if self.gone:  # by itself: its own exit code says why
            try:
                async with asyncio.timeout(EXIT_S):
                    return await self._child.wait()
            except TimeoutError:
                pass
        self._close_channel()
        if self._child.returncode is None:
            try:
                self._child.kill()
            except ProcessLookupError:
                pass  # it is dead and about to be noticed
        return await self._child.wait()


async def spawn(arena: Arena, settings: process.Settings, news: asyncio.Event) -> Helper:
    """Start a helper; it says hello later. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.setblocking(False)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE, str(theirs.fileno()), str(arena.fd), str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), arena.fd),
        )
        helper = Helper(child, ours, news)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    helper.send(json.dumps(settings).encode())
    return helper


class Pauses:
    """How long to wait before a process that did not last is started again."""

    def __init__(self) -> None:
        self._failures = 0

    def next_s(self, lasted_s: float) -> float:
        self._failures = 1 if lasted_s > LASTED_S else self._failures + 1
        return float(min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10)))
