"""The process that owns one Mooncake engine: `python -m worker.transport.mooncake_process SOCKET_FD ARENA_FD PARENT`.

Why a process of its own: an engine can crash, can wait 60 s for one silent peer, and may go on writing after it
reported an error. Only the end of the process that holds it is certain, and `worker/transport/mooncake.py` uses that.

It talks over one end of a socket pair that keeps messages apart (SOCK_SEQPACKET):
    parent: a JSON object of settings (`Settings`)       process: {"port", "base", "mark"}, or {"error", "missing"}
    parent: a batch (`BATCH`, address, int64 arrays)     process: its number and how it went (`RESULT`)

Rules that hold here
- The environment of the engine is set before it is imported, and nothing of it is called before `initialize`.
- Only the synchronous batch read is used, from one of THREADS threads, with at most MAX_ENTRIES entries a call.
- Every batch also reads the peer's mark, a few bytes that say which boot it is, so bytes of another boot are noticed.
- The process ends when its parent does, and answers every batch that it was given unless it is killed.
- It imports nothing but the standard library and the engine, so that it starts fast.
"""

from __future__ import annotations

import array
import ctypes
import json
import mmap
import os
import queue
import signal
import socket
import struct
import sys
import threading
from typing import Protocol, TypedDict

BATCH = struct.Struct("<QHHQ32s")  # number, bytes of the address, entries, the peer's mark: where and what
RESULT = struct.Struct("<Qi")  # number, one of the following
READ, FAILED, OTHER_BOOT = range(3)

# A call that waits keeps a core busy, and the process that serves the pages needs one, too.
THREADS = 2 if (os.cpu_count() or 1) >= 4 else 1
MAX_ENTRIES = 256  # of one call of the engine, the mark's included
MESSAGE_BYTES = BATCH.size + 1024 + 3 * 8 * MAX_ENTRIES
MARK_BYTES = 32
_ENVIRONMENT = {
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TRANSFER_TIMEOUT": "5",
}
_PR_SET_PDEATHSIG = 1


class Settings(TypedDict):
    host: str  # what peers reach this machine as
    protocol: str  # tcp, rdma
    devices: str  # RDMA devices, comma separated; empty: all
    interface: str  # the address of this machine that Mooncake binds to; empty: all
    mapped_bytes: int
    nbytes: int
    boot: str  # MARK_BYTES long


class Engine(Protocol):
    """What is used of mooncake.engine.TransferEngine."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int: ...
    def register_memory(self, address: int, nbytes: int) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_transfer_sync_read(
        self, peer: str, local: list[int], remote: list[int], lengths: list[int]
    ) -> int: ...


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    arena_fd = int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[3]):
        return  # it ended before it could be watched
    try:
        settings: Settings = json.loads(channel.recv(MESSAGE_BYTES))
    except ValueError:
        return
    arena = mmap.mmap(arena_fd, settings["mapped_bytes"])
    base = ctypes.addressof(ctypes.c_char.from_buffer(arena))
    # A page of its own: first this node's mark, then what each thread reads of a peer's.
    marks = mmap.mmap(-1, mmap.PAGESIZE)
    marks[:MARK_BYTES] = settings["boot"].encode()
    mark = ctypes.addressof(ctypes.c_char.from_buffer(marks))
    try:
        engine = _engine(settings, [(base, settings["nbytes"]), (mark, mmap.PAGESIZE)])
    except ImportError as error:
        channel.send(json.dumps({"error": str(error), "missing": True}).encode())
        return
    except OSError as error:
        channel.send(json.dumps({"error": str(error), "missing": False}).encode())
        return
    channel.send(json.dumps({"port": engine.get_rpc_port(), "base": base, "mark": mark}).encode())
    batches: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for thread in range(1, THREADS + 1):
        work = (channel, engine, batches, marks, mark, thread * MARK_BYTES)
        threading.Thread(target=_read_batches, args=work, daemon=True).start()
    while message := _next(channel):
        batches.put(message)
    # The engine's own end can hang or crash, and nobody waits for it.
    os._exit(0)


def _next(channel: socket.socket) -> bytes:
    """The next message; nothing when the parent is gone."""
    try:
        return channel.recv(MESSAGE_BYTES)
    except OSError:
        return b""


def _silence() -> None:
    """Keep the engine's own log, which reports an error at every good start, off the standard error; Python's stays."""
    os.environ["MC_LOG_LEVEL"] = "ERROR"
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _engine(settings: Settings, memory: list[tuple[int, int]]) -> Engine:
    """A started engine with the memory (address, bytes) registered. Raises ImportError, OSError."""
    if "MC_LOG_LEVEL" not in os.environ:
        _silence()
    os.environ.update(_ENVIRONMENT)
    os.environ.pop("MC_LOG_DIR", None)
    if settings["protocol"] == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
    if settings["interface"]:
        os.environ["MC_TCP_BIND_ADDRESS"] = settings["interface"]
    from mooncake.engine import TransferEngine

    engine: Engine = TransferEngine()
    code = engine.initialize(settings["host"], "P2PHANDSHAKE", settings["protocol"], settings["devices"])
    if code:
        raise OSError(f"Mooncake did not start with {settings['protocol']} on {settings['host']}: {code}")
    for address, nbytes in memory:
        code = engine.register_memory(address, nbytes)
        if code:
            raise OSError(f"Mooncake did not take {nbytes} bytes of memory: {code}")
    return engine


def _read_batches(
    channel: socket.socket,
    engine: Engine,
    batches: queue.SimpleQueue[bytes],
    marks: mmap.mmap,
    mark: int,
    seen: int,
) -> None:
    """Thread: one batch after the other. `seen`: where in `marks` it may put the peer's mark."""
    while True:
        message = batches.get()
        number, address_bytes, entries, peer_mark, boot = BATCH.unpack_from(message)
        body = message[BATCH.size + address_bytes :]
        peer = message[BATCH.size : BATCH.size + address_bytes].decode()
        numbers = array.array("q", body).tolist()
        local = numbers[:entries]
        remote = numbers[entries : 2 * entries]
        lengths = numbers[2 * entries :]
        marks[seen : seen + MARK_BYTES] = bytes(MARK_BYTES)
        code = engine.batch_transfer_sync_read(
            peer, [*local, mark + seen], [*remote, peer_mark], [*lengths, MARK_BYTES]
        )
        if code:
            result = FAILED
        elif marks[seen : seen + MARK_BYTES] != boot:
            result = OTHER_BOOT
        else:
            result = READ
        try:
            channel.send(RESULT.pack(number, result))
        except OSError:
            return  # the parent is gone


if __name__ == "__main__":
    main()
