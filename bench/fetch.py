"""Pages between two nodes: our page service beside bare Mooncake batches, and how much of a fetch a queue hides.

    python bench/fetch.py [--rounds 20] [--pages 2048] [--json FILE] [--check]

| row | what is measured | bound (--check) |
|---|---|---|
| raw | Mooncake batches of 256 scattered pages of 64 KiB into a buffer, by one thread | |
| mooncake | the same pages by key: asked for, pinned, read, checked, told to the index, released | >= 85 % of raw |
| tcp | the same over plain TCP | |
| small | 16 such pages: milliseconds of a fetch | |
| hidden | fetches of requests that wait longer than those take: the part that holds a prefill up | < 5 % |
| idle | the same on a node without a queue | |

Both ends are processes of this machine. Raw, mooncake and tcp take turns; the ratio is the median of those of the
rounds, for the machine's speed changes from one to the next. `hidden` and `idle` are two workers
with the model's times, of which one fetches from the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web
from worker_node import metrics, ready

from shared.embedded import EmbeddedRedis, free_port
from shared.messages import FetchPlan, PrefillCall
from worker.agent.page_service import PageService
from worker.kv.arena import Arena
from worker.kv.cache import NodeCache
from worker.kv.memory import PageMemory
from worker.kv.path import Path as Pages
from worker.transport.base import TransportMissing
from worker.transport.choose import make_transport
from worker.transport.fetch import Fetcher
from worker.transport.peers import PeerClient

PAGE_BYTES = 2**16
BATCH = 256
SMALL = 16
LEAST_OF_RAW, MOST_EXPOSED = 0.85, 0.05


def path(pages: int) -> Pages:
    return Pages.bare(np.random.default_rng(1).integers(-(2**62), 2**62, pages).tolist())


# ------------------------------------------------------------------------------------- the node that is read from


async def serve(transport: str, pages: int) -> None:
    """A node that holds a path whose pages lie anywhere; says where on standard output, and ends with its input."""
    memory = PageMemory(Arena(1 + pages, PAGE_BYTES))
    memory.arena.memory[:] = np.random.default_rng(3).integers(0, 256, memory.arena.nbytes, np.uint8)
    cache = NodeCache(1, pages, memory=memory)
    wanted = path(pages)
    for at in np.random.default_rng(2).permutation(pages).tolist():
        lease = cache.lease(wanted.pages[at : at + 1], 1)
        assert lease is not None
        cache.write(lease, wanted[at : at + 1])
        cache.release(lease)
    server = await make_transport(transport, memory.arena, "127.0.0.1")
    service = PageService(cache, memory, "bench", pages)
    service.start(server)
    app = web.Application()
    service.routes(app)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    slots, lent = cache.lend(wanted)
    cache.end_loan(lent)
    said = {
        "url": f"http://127.0.0.1:{runner.addresses[0][1]}",
        "address": server.endpoint.address,
        "base": server.endpoint.base,
        "offsets": (slots * PAGE_BYTES).tolist(),
    }
    print(json.dumps(said), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


def raw(address: str, base: int, offsets: list[int]) -> None:
    """Read the pages with bare batches, once for each line of standard input; says how many seconds it took."""
    from worker.transport.mooncake_process import _ENVIRONMENT

    os.environ.update(_ENVIRONMENT, MC_FORCE_TCP="1")
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    arena = Arena(len(offsets), PAGE_BYTES)
    assert engine.register_memory(arena.address, arena.nbytes) == 0
    remote = [base + offset for offset in offsets]
    local = [arena.address + at * PAGE_BYTES for at in range(len(offsets))]
    print("ready", flush=True)
    for _ in sys.stdin:
        begun = time.perf_counter()
        for at in range(0, len(offsets), BATCH):
            part = slice(at, at + BATCH)
            sizes = [PAGE_BYTES] * len(remote[part])
            assert engine.batch_transfer_sync_read(address, local[part], remote[part], sizes) == 0
        print(time.perf_counter() - begun, flush=True)


def child(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise SystemExit(f"a process of the bench ended with {process.wait()}")
    return text


# ------------------------------------------------------------------------------------- the node that fetches


class Reader:
    """Fetches a whole path; with a new index for each round, so that it has to come again."""

    def __init__(self, pages: int) -> None:
        self.memory = PageMemory(Arena(1 + pages, PAGE_BYTES))
        self.pages = pages
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, transport: str) -> None:
        self.transport = await make_transport(transport, self.memory.arena, "127.0.0.1")
        self.http = aiohttp.ClientSession()

    async def stop(self) -> None:
        await self.transport.close()
        await self.http.close()

    def _spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> object:
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def fetch(self, url: str, wanted: Pages) -> float:
        """Seconds until all pages are readable here."""
        cache = NodeCache(1, self.pages, memory=self.memory)
        peers = PeerClient(self.http, PAGE_BYTES, 5.0)
        fetcher = Fetcher(cache, self.memory, self.transport, peers, self._spawn, timeout_s=30.0)
        begun = time.perf_counter()
        arrived = await fetcher.fetch(url, wanted)
        seconds = time.perf_counter() - begun
        assert arrived.pages == len(wanted), arrived
        if self._tasks:
            await asyncio.wait(self._tasks)
        fetcher.close()
        return seconds


async def transfers(pages: int, rounds: int) -> dict[str, float]:
    """Gigabytes a second of each way, and milliseconds of a small fetch; medians of the rounds."""
    wanted = path(pages)
    servers = {name: child("--serve", name, "--pages", str(pages)) for name in ("mooncake", "tcp")}
    said = {name: json.loads(line(process)) for name, process in servers.items()}
    bare = child("--raw", json.dumps(said["mooncake"]))
    line(bare)
    readers = {name: Reader(pages) for name in servers}
    seconds: dict[str, list[float]] = {
        name: [] for name in ("raw", "mooncake", "tcp", "small mooncake", "small tcp")
    }
    for name, reader in readers.items():
        await reader.start(name)
    for turn in range(rounds + 1):
        assert bare.stdin is not None
        bare.stdin.write("go\n")
        bare.stdin.flush()
        took = {"raw": float(await asyncio.to_thread(line, bare))}
        for name, reader in readers.items():
            took[name] = await reader.fetch(said[name]["url"], wanted)
            took[f"small {name}"] = await reader.fetch(said[name]["url"], wanted[:SMALL])
        if turn:  # the first one makes connections and touches memory
            for name, value in took.items():
                seconds[name].append(value)
    for reader in readers.values():
        await reader.stop()
    for process in (bare, *servers.values()):
        process.communicate()
    found = {name: pages * PAGE_BYTES / statistics.median(took) / 1e9 for name, took in seconds.items()}
    ratios = [bare_s / ours_s for bare_s, ours_s in zip(seconds["raw"], seconds["mooncake"], strict=True)]
    print(
        f"our page service over Mooncake / bare Mooncake, each round: {' '.join(f'{r:.2f}' for r in sorted(ratios))}"
    )
    for name in ("small mooncake", "small tcp"):
        found[name] = 1e3 * statistics.median(seconds[name])
    return found | {"of raw": statistics.median(ratios)}


# ------------------------------------------------------------------------------------- a fetch behind a queue

PROMPT_PAGES, FETCHED_PAGES, BUSY_PAGES, REQUESTS = 160, 128, 512, 8


def call(number: int, *, url: str = "", pages: int = PROMPT_PAGES) -> bytes:
    tokens = np.random.default_rng(number).integers(0, 100_000, BUSY_PAGES * 64)[: pages * 64].astype("<i4")
    fetch = FetchPlan(url, 0, FETCHED_PAGES) if url else None
    return msgspec.msgpack.encode(PrefillCall(f"r{number}", "b", tokens.tobytes(), fetch=fetch))


def exposed(transport: str, folder: Path) -> dict[str, float]:
    """Parts of the fetch times that held prefills up: behind a queue, and on an idle node."""
    with EmbeddedRedis() as redis:
        ports = [free_port(), free_port()]
        processes = []
        for port in ports:
            with (folder / f"{port}.log").open("wb") as log:
                words = [
                    sys.executable, "-m", "worker.agent", "--redis", redis.url, "--node", f"n{port}", "--port",
                    str(port), "--page-bytes", str(PAGE_BYTES), "--l1-tokens", "262144",
                    "--l2-tokens", "524288", "--transport", transport,
                ]  # fmt: skip
                processes.append(subprocess.Popen(words, stdout=log, stderr=log))
        try:
            return asyncio.run(queue_and_idle(*(f"http://127.0.0.1:{port}" for port in ports)))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


async def queue_and_idle(a: str, b: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as http:
        for url in (a, b):
            await ready(http, url)

        async def prefill(url: str, body: bytes) -> None:
            async with http.post(url + "/ei/v1/prefill", data=body) as answer:
                text = await answer.text()
                assert '"done"' in text, text

        for number in range(2 * REQUESTS):
            # Only what is fetched has to be there.
            await prefill(a, call(number, pages=FETCHED_PAGES))
        before = await fetch_seconds(http, b)
        busy = asyncio.create_task(prefill(b, call(999, pages=BUSY_PAGES)))
        await asyncio.sleep(0.05)
        await asyncio.gather(busy, *(prefill(b, call(number, url=a)) for number in range(REQUESTS)))
        queued = await fetch_seconds(http, b)
        for number in range(REQUESTS, 2 * REQUESTS):
            await prefill(b, call(number, url=a))
        idle = await fetch_seconds(http, b)
    return {
        "hidden": (queued[1] - before[1]) / (queued[0] - before[0]),
        "hidden fetch s": (queued[0] - before[0]) / REQUESTS,
        "idle": (idle[1] - queued[1]) / (idle[0] - queued[0]),
    }


async def fetch_seconds(http: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """Cluster seconds of fetches so far, and of these the exposed ones."""
    values = await metrics(http, url)
    return values["ei_worker_fetch_seconds_total"], values["ei_worker_exposed_fetch_seconds_total"]


# ------------------------------------------------------------------------------------- the whole


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetches of KV pages, beside bare Mooncake batches.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pages", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--raw", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve, args.pages))
        return 0
    if args.raw:
        said = json.loads(args.raw)
        raw(said["address"], said["base"], said["offsets"])
        return 0
    asyncio.run(_needs_mooncake())
    found = asyncio.run(transfers(args.pages, args.rounds))
    with tempfile.TemporaryDirectory() as folder:
        found |= exposed("mooncake", Path(folder))
    print(f"{args.pages} scattered pages of 64 KiB, medians of {args.rounds} rounds")
    for name, what in (
        ("raw", "bare Mooncake"),
        ("mooncake", "ours over Mooncake"),
        ("tcp", "ours over TCP"),
    ):
        print(f"  {what:20} {found[name]:7.2f} GB/s")
    for name, what in (("small mooncake", "ours over Mooncake"), ("small tcp", "ours over TCP")):
        print(f"  {what:20} {found[name]:7.2f} ms for {SMALL} pages")
    print(
        f"the part of a prefill's fetch ({FETCHED_PAGES} pages, {found['hidden fetch s']:.2f} s) for which it is held up"
    )
    print(f"  behind a queue       {100 * found['hidden']:7.2f} %")
    print(f"  on an idle node      {100 * found['idle']:7.2f} %   (nothing to hide behind)")
    bounds = [
        ("ours over Mooncake / bare, median of the rounds", found["of raw"], ">=", LEAST_OF_RAW),
        ("held up behind a queue", found["hidden"], "<", MOST_EXPOSED),
    ]
    missed = False
    for what, value, sign, limit in bounds:
        met = value >= limit if sign == ">=" else value < limit
        missed |= not met
        print(f"{what:50} {value:6.3f} {sign:>2} {limit:g}  {'met' if met else 'MISSED'}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(args.check and missed)


async def _needs_mooncake() -> None:
    try:
        transport = await make_transport("mooncake", Arena(1, PAGE_BYTES), "127.0.0.1")
    except TransportMissing as missing:
        raise SystemExit(f"This bench compares with Mooncake. {missing}") from None
    await transport.close()


if __name__ == "__main__":
    sys.exit(main())
