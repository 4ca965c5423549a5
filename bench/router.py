"""What our router adds to a request and costs, beside Rust routers in the same minutes.

    python bench/router.py [--seconds 2] [--rounds 7] [--only short,agents] [--peers DIR] [--json FILE] [--check]

| part | what is measured | bound (--check) |
|---|---|---|
| short | two hops of a short prompt, 1 client: added p50; 32 clients: requests/s | <= 1.5x, >= 0.7x sglang-router |
| chat | the same as a chat, which a worker has to tokenize for us first: a third hop | |
| first | the first chunk of a stream on a kept-alive connection: added p50 | < 1 ms |
| agents | steps of 20,000 tokens that append 500, as the two above | < 1.5 ms, >= 1x sglang-router |
| unnamed | the same from agents that do not name their branch | |
| stream | CPU of the router for each streamed chunk; chunks/s that come through | <= 20 us, >= 60,000/s |
| unique | prompts of 20,000 tokens that share nothing, 32 clients: requests/s | >= 10x Dynamo |

Routers run as processes with all that they do in service, pinned to one core; the clients, the engines, which answer
at once, and Redis share another. Added is the time through a router less that of two calls made by the same client
directly, one to a prefill engine and then one to a decode engine; all targets take turns, and what counts is the
median of the rounds. sglang-router calls both engines at once, so what it adds by itself is more than is said here.
Peers are installed into `--peers` when they are not there; bounds that need one that cannot be had are not checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from bounds import Bound
from process import cpu_s
from router_dynamo import Dynamo
from router_fakes import ANSWER, Fakes
from router_load import Agent, Client, Short, closed_loop, median, post, streams
from router_peers import Missing, Router, ours, sglang

from shared.embedded import EmbeddedRedis
from shared.messages import PrefillCall

CLUSTER = "bench"
NODES = ["p1", "p2", "d1", "d2"]
CLIENTS = 32
PARTS = ("short", "chat", "first", "agents", "unnamed", "stream", "unique")
FIRST_TOKENS, LAST_TOKENS, STEP_TOKENS = 16_000, 24_000, 500
BLOCK = 10  # requests to one target before the next one's turn
STREAMS, HALF_CORE_RATE, FULL_RATE = 256, 25_000, 66_000
OURS, SGLANG, DYNAMO = "evolving", "sglang-router", Dynamo.name
MOST_ADDED_RATIO, LEAST_RATE_RATIO = 1.5, 0.7
MOST_FIRST_MS, MOST_AGENT_MS, LEAST_AGENT_RATIO, LEAST_OF_DYNAMO = 1.0, 1.5, 1.0, 10.0
MOST_CHUNK_US, LEAST_CHUNKS = 20.0, 60_000.0
BUSY = 0.9  # of its core: a router below it was not offered more

Rows = dict[str, dict[str, float]]


def cores() -> tuple[int, int]:
    """For the clients, and for the router."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


class Bench:
    def __init__(
        self, fakes: Fakes, routers: list[Router], dynamo: Dynamo | None, seconds: float, rounds: int
    ) -> None:
        self.fakes, self.routers, self.dynamo = fakes, routers, dynamo
        self.seconds, self.rounds = seconds, rounds

    # -- one client

    async def added(self, kind: str) -> dict[str, float]:
        """Milliseconds that each router adds to a request: p50, the median of the rounds; and p5 of all of them."""
        self.fakes.streaming, self.fakes.paced = kind == "first", False
        names = [router.name for router in self.routers]
        clients = {router.name: await Client.open(router.url) for router in self.routers}
        prefill = await Client.open(self.fakes.urls["p1"])
        decode = await Client.open(self.fakes.urls["d1"])
        sources = {name: _source(kind) for name in ("direct", *names)}
        expect = b"[DONE]" if kind == "first" else ANSWER
        took: dict[str, list[float]] = {name: [] for name in names}
        plain = _prefill_post(FIRST_TOKENS if kind in ("agents", "unnamed") else 12)

        async def one(name: str) -> float | None:
            source = sources[name]
            request = source.next()
            if name == "direct":
                call_s = await prefill.ask(plain, b'"done"')
                whole_s = await decode.ask(request, expect)
                seconds = call_s + (decode.first_s if kind == "first" else whole_s)
            else:
                whole_s = await clients[name].ask(request, expect)
                seconds = clients[name].first_s if kind == "first" else whole_s
            return None if isinstance(source, Agent) and source.fresh else seconds

        loop = asyncio.get_running_loop()
        ever: dict[str, list[float]] = {name: [] for name in sources}
        for turn in range(self.rounds + 1):
            seen: dict[str, list[float]] = {name: [] for name in sources}
            until = loop.time() + (self.seconds if turn else 1.0)
            while loop.time() < until or min(map(len, seen.values())) < BLOCK:
                for name, values in seen.items():
                    for _ in range(BLOCK):
                        seconds = await one(name)
                        if seconds is not None:
                            values.append(seconds)
            if turn:
                base = median(seen["direct"])
                for name, values in seen.items():
                    ever[name] += values
                for name in names:
                    took[name].append(1e3 * (median(seen[name]) - base))
        for client in (*clients.values(), prefill, decode):
            client.close()
        low = {name: 1e3 * float(np.quantile(values, 0.05)) for name, values in ever.items()}
        fast = {f"{name} p5": low[name] - low["direct"] for name in names}
        return {name: median(values) for name, values in took.items()} | fast | {"direct p5": low["direct"]}

    # -- many clients

    async def rates(self, kind: str) -> dict[str, float]:
        """Requests a second through each router, and CPU milliseconds of a request (also of the cheapest round);
        ratios to each peer."""
        self.fakes.streaming = False
        took: dict[str, list[float]] = {}
        for turn in range(self.rounds + 1):
            seconds = self.seconds if turn else 1.0
            found: dict[str, tuple[float, float]] = {}
            for router in self.routers:
                sources = [_source(kind) for _ in range(CLIENTS)]
                found[router.name] = await closed_loop(router.url, router.pid, sources, seconds)
            if kind == "unique" and self.dynamo is not None:
                found[DYNAMO] = await self.dynamo.rate(seconds, CLIENTS)
            for name, (rate, cpu_ms) in found.items() if turn else ():
                took.setdefault(name, []).append(rate)
                took.setdefault(f"{name} cpu ms", []).append(cpu_ms)
                if name != OURS:
                    took.setdefault(f"of {name}", []).append(found[OURS][0] / rate)
        least = {f"{name} least": min(values) for name, values in took.items() if name.endswith(" cpu ms")}
        return {name: median(values) for name, values in took.items()} | least

    # -- streams

    async def chunks(self, offered: float) -> dict[str, float]:
        """CPU microseconds of a streamed chunk for each router, chunks/s that came through and that were offered."""
        self.fakes.streaming = self.fakes.paced = True
        took: dict[str, list[float]] = {}
        loop = asyncio.get_running_loop()
        for _ in range(self.rounds):
            for router in self.routers:
                clients, ends = await streams(router.url, STREAMS)
                while len(self.fakes.streams) < STREAMS * (2 if router.name == SGLANG else 1):
                    await asyncio.sleep(0.01)
                if router.name == SGLANG:  # the prefill engine's answer is a stream of its own there
                    for stream in [s for s in self.fakes.streams if s.node.startswith("p")]:
                        del self.fakes.streams[stream]
                        stream.chunk()
                        stream.end()
                await asyncio.sleep(0.2)
                begun, cpu = loop.time(), cpu_s(router.pid)
                await self.fakes.pace(offered, self.seconds)
                sent_s = loop.time() - begun
                await asyncio.gather(*ends)
                whole_s, cpu = loop.time() - begun, cpu_s(router.pid) - cpu
                for client in clients:
                    if client.error is not None:
                        raise client.error
                    client.close()
                # Every stream ended as it should; a chunk that is cut in two by the framing is not counted.
                sent, arrived = self.fakes.sent, sum(client.chunks for client in clients)
                if arrived < 0.99 * sent:
                    raise SystemExit(f"{router.name} passed on {arrived} of {sent} chunks")
                took.setdefault(f"{router.name} us", []).append(1e6 * cpu / sent)
                took.setdefault(router.name, []).append(sent / whole_s)
                took.setdefault(f"{router.name} offered", []).append(sent / sent_s)
                took.setdefault(f"{router.name} busy", []).append(cpu / whole_s)
        self.fakes.streaming = self.fakes.paced = False
        return {name: median(values) for name, values in took.items()}


def _source(kind: str) -> Short | Agent:
    match kind:
        case "short":
            return Short(chat=False)
        case "chat":
            return Short(chat=True)
        case "first":
            return Short(chat=True, stream=True)
        case "unique":
            return Agent((FIRST_TOKENS + LAST_TOKENS) // 2, 0, 0)
        case _:
            return Agent(FIRST_TOKENS, LAST_TOKENS, STEP_TOKENS, named=kind == "agents")


def _prefill_post(tokens: int) -> bytes:
    ids = np.arange(tokens, dtype="<i4").tobytes()
    return post("/ei/v1/prefill", msgspec.msgpack.encode(PrefillCall("r0", "b0", ids)))


# ------------------------------------------------------------------------------------- the whole


async def measure(args: argparse.Namespace) -> tuple[Rows, dict[str, str]]:
    """Values by row, and why a peer is missing."""
    load_core, router_core = cores()
    os.sched_setaffinity(0, {load_core})
    rows: Rows = {}
    missing: dict[str, str] = {}
    fakes = Fakes(NODES)
    await fakes.start()
    with EmbeddedRedis() as redis:
        words = [sys.executable, str(Path(__file__).with_name("router_fakes.py"))]
        teller = await asyncio.create_subprocess_exec(*words, redis.url, CLUSTER, json.dumps(fakes.urls))
        routers: list[Router] = []
        dynamo: Dynamo | None = None
        try:
            routers.append(await ours(redis.url, CLUSTER, router_core).ready())
            try:
                peer = sglang(args.peers, fakes.urls, router_core)
                routers.append(await peer.ready())
            except Missing as error:
                missing[SGLANG] = str(error)
            if "unique" in args.only:
                try:
                    dynamo = await Dynamo(args.peers, load_core, router_core).ready()
                except Missing as error:
                    missing[DYNAMO] = str(error)
            bench = Bench(fakes, routers, dynamo, args.seconds, args.rounds)
            for part in args.only:
                if part in ("short", "chat", "first", "agents", "unnamed"):
                    rows[f"{part}, 1 client"] = await bench.added(part)
                    print(line(f"{part}, 1 client", rows), flush=True)
                if part in ("short", "chat", "agents", "unnamed", "unique"):
                    rows[f"{part}, {CLIENTS} clients"] = await bench.rates(part)
                    print(line(f"{part}, {CLIENTS} clients", rows), flush=True)
                if part == "stream":
                    for rate in (HALF_CORE_RATE, FULL_RATE):
                        rows[f"stream, {rate}/s"] = await bench.chunks(rate)
                        print(line(f"stream, {rate}/s", rows), flush=True)
        finally:
            for router in (*routers, *((dynamo,) if dynamo is not None else ())):
                router.stop()
            teller.terminate()
            await teller.wait()
    return rows, missing


def line(name: str, rows: Rows) -> str:
    """A row of the table."""
    row = rows[name]
    words = []
    for router in (OURS, SGLANG, DYNAMO):
        if router not in row:
            text = "-"
        elif name.startswith("stream"):
            text = f"{row[router]:,.0f}/s {row[f'{router} us']:.1f} us"
        elif f"{router} cpu ms" in row:
            text = f"{row[router]:,.0f}/s {row[f'{router} cpu ms']:.3f} ms"
        else:
            text = f"{row[router]:.3f} ms ({row[f'{router} p5']:.3f})"
        words.append(f"{text:>24}")
    return f"  {name:22}{''.join(words)}"


def bounds(rows: Rows) -> tuple[list[Bound], list[str]]:
    """What was measured beside its bound, and what could not be."""
    found: list[Bound] = []
    unmeasured: list[str] = []

    def bound(what: str, row: str, key: str, limit: float, *, at_most: bool, over: str = "") -> None:
        values = rows.get(row)
        if values is None:
            return
        if key not in values or (over and over not in values):
            unmeasured.append(what)
            return
        found.append(Bound(what, values[key] / (values[over] if over else 1.0), limit, at_most))

    many = f"{CLIENTS} clients"
    ratio = f"of {SGLANG}"
    bound(
        "short, added at 1 client / sglang-router's",
        "short, 1 client",
        OURS,
        MOST_ADDED_RATIO,
        at_most=True,
        over=SGLANG,
    )
    bound(
        f"short, requests/s at {many} / sglang-router's",
        f"short, {many}",
        ratio,
        LEAST_RATE_RATIO,
        at_most=False,
    )
    bound("first chunk, ms added", "first, 1 client", OURS, MOST_FIRST_MS, at_most=True)
    bound("agents, ms added at 1 client", "agents, 1 client", OURS, MOST_AGENT_MS, at_most=True)
    bound(
        f"agents, requests/s at {many} / sglang-router's",
        f"agents, {many}",
        ratio,
        LEAST_AGENT_RATIO,
        at_most=False,
    )
    half, full = f"stream, {HALF_CORE_RATE}/s", f"stream, {FULL_RATE}/s"
    bound(f"stream, CPU us a chunk at {HALF_CORE_RATE:,}/s", half, f"{OURS} us", MOST_CHUNK_US, at_most=True)
    if full in rows and rows[full][f"{OURS} offered"] < LEAST_CHUNKS and rows[full][f"{OURS} busy"] < BUSY:
        offered, busy = rows[full][f"{OURS} offered"], rows[full][f"{OURS} busy"]
        unmeasured.append(
            f"stream, chunks/s: {offered:,.0f} were offered, which took {busy:.0%} of the router's core"
        )
    else:
        bound("stream, chunks/s", full, OURS, LEAST_CHUNKS, at_most=False)
    bound(
        f"unique, requests/s at {many} / Dynamo's",
        f"unique, {many}",
        f"of {DYNAMO}",
        LEAST_OF_DYNAMO,
        at_most=False,
    )
    return found, unmeasured


def spin() -> tuple[float, float]:
    """Wall nanoseconds of a step of an empty loop, and the part of that time in which this process ran."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(4_000_000):
        pass
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return 1e9 * wall / 4_000_000, cpu / wall


def main() -> int:
    parser = argparse.ArgumentParser(description="What the router adds and costs, beside Rust routers.")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--peers", type=Path, default=Path("~/.cache/evolving-bench").expanduser())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    args.only = [part for part in args.only.split(",") if part]
    unknown = [part for part in args.only if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    spins = [spin()]
    print(
        "1 client: ms added, p50 (p5); 32 clients: requests/s, CPU a request; stream: chunks/s, CPU a chunk"
    )
    print(f"  {'':22}{OURS:>24}{SGLANG:>24}{DYNAMO:>24}", flush=True)
    rows, missing = uvloop.run(measure(args))
    spins.append(spin())
    for when, (step_ns, ran) in zip(("before", "after"), spins, strict=True):
        print(
            f"{when}: a step of an empty Python loop took {step_ns:.0f} ns, and had a core for {ran:.0%} of that"
        )
    for why in missing.values():
        print(f"not there: {why}")
    found, unmeasured = bounds(rows)
    for one in found:
        sign = "<=" if one.at_most else ">="
        print(f"{one.name:52} {one.value:10.3f} {sign} {one.limit:<8g} {'met' if one.met else 'MISSED'}")
    for what in unmeasured:
        print(f"not measured: {what}")
    if args.json:
        told = {"rows": rows, "missing": missing, "spins": spins, "not_measured": unmeasured}
        told["bounds"] = [one._asdict() | {"met": one.met} for one in found]
        args.json.write_text(json.dumps(told, indent=2) + "\n")
    return int(args.check and not all(one.met for one in found))


if __name__ == "__main__":
    sys.exit(main())
