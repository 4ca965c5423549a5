"""What count order keeps that LRU order loses: one agent trace through two clusters with little host memory.

    python bench/reuse.py TRACE [--agents 12] [--speedup 5] [--max-pause 60] [--l1-tokens N] [--l2-tokens N]
                          [--transport mooncake] [--json FILE] [--check]

TRACE: 12 Claude Code sessions in the Weka format; the defaults for memory are for them. Each run is a whole cluster
(`evolving up`, four simulated workers, 2P2D, real pages between them) and a whole replay, the second with the same
trace and settings as the first but for the order in which pages leave host memory.

| figure | bound (--check) |
|---|---|
| KV reuse that LRU loses, 1 - h/h* | 5 % to 15 %: otherwise memory was too large or too small to compare |
| KV reuse that count order loses | at most half of that |
| pages that moved between nodes, each run | at least 10,000 |
| pages that came with wrong bytes, or were found wrong | 0 |
| failed requests | 0 |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from services.up import Supervisor, UpSettings
from shared.split import parse_split

LEAST_PAGES = 10_000
LRU_LOSES = (0.05, 0.15)


async def replay(args: argparse.Namespace, eviction: str, folder: Path) -> dict[str, float]:
    os.environ.update(
        EI_WORKER_EVICTION=eviction,
        EI_WORKER_TRANSPORT=args.transport,
        EI_WORKER_L1_TOKENS=str(args.l1_tokens),
        EI_WORKER_L2_TOKENS=str(args.l2_tokens),
    )
    # A short warm-up, and a window that does not end: the split stays what it is.
    settings = UpSettings(
        port=0, page_port=0, split=args.split, speedup=args.speedup, warmup_s=1.0, window_s=36_000.0, slice_s=60.0,
        logs=str(folder / eviction),
    )  # fmt: skip
    supervisor = Supervisor(settings, quiet=True)
    try:
        await supervisor.start()
        await split_reached(supervisor.url, args.split)
        report = folder / f"{eviction}.json"
        until = ["--duration", str(args.duration)] if args.duration else []
        await evolving(
            "replay", str(args.trace), *until, "--url", supervisor.url, "--agents", str(args.agents), "--speedup",
            str(args.speedup), "--max-pause", str(args.max_pause), "--report", str(report),
        )  # fmt: skip
        found = json.loads(report.read_text())
    finally:
        await supervisor.stop()
    kv = found["kv"]
    return {
        "lost": found["lost_kv_reuse"],
        "hit rate": found["kv_hit_rate"],
        "ideal": found["ideal_hit_rate"],
        "requests": found["requests"],
        "failed": found["failed"],
        "ttft mean s": found["ttft_s"]["mean"],
        "e2e mean s": found["e2e_s"]["mean"],
        "pages moved": kv["fetched_pages"],
        "corrupt pages": kv["corrupt_pages"],
        "evicted, in use": kv["evicted_counted_pages"],
        "evicted, not": kv["evicted_uncounted_pages"],
    } | {f"recomputed, {reason}": tokens for reason, tokens in kv["recomputed_tokens"].items()}


async def split_reached(url: str, split: str) -> None:
    wanted = parse_split(split)
    deadline = time.monotonic() + 60.0
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < deadline:
            async with http.get(url + "/ei/v1/cluster") as answer:
                phases = [node["phase"] for node in (await answer.json())["nodes"]]
            if (phases.count("prefill"), phases.count("decode")) == wanted:
                return
            await asyncio.sleep(0.2)
    raise SystemExit(f"the cluster did not come to {split} within a minute")


async def evolving(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", *words, stdout=sys.stderr, stderr=sys.stderr
    )
    if await process.wait():
        raise SystemExit(f"evolving {words[0]} ended with {process.returncode}")


def missed(lru: dict[str, float], count: dict[str, float]) -> list[str]:
    found = []
    if not LRU_LOSES[0] <= lru["lost"] <= LRU_LOSES[1]:
        found.append(f"LRU loses {100 * lru['lost']:.2f} %, not 5 to 15 %")
    if count["lost"] > lru["lost"] / 2:
        found.append(
            f"count order loses {count['lost'] / lru['lost']:.2f} of what LRU loses, not at most 0.5"
        )
    for name, run in (("lru", lru), ("count", count)):
        if run["pages moved"] < LEAST_PAGES:
            found.append(f"{name}: {run['pages moved']:.0f} pages moved, not {LEAST_PAGES:,}")
        wrong = ("corrupt pages", "failed")
        found += [f"{name}: {what}: {run[what]:.0f}" for what in wrong if run[what]]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="KV reuse that LRU and count order lose on one agent trace.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--speedup", type=float, default=5.0)
    parser.add_argument("--max-pause", type=float, default=60.0)
    parser.add_argument(
        "--duration", type=float, help="seconds of the trace; sessions begin again until then"
    )
    parser.add_argument("--split", default="2P2D", help="of four nodes")
    parser.add_argument("--l1-tokens", type=int, default=409_600)
    parser.add_argument("--l2-tokens", type=int, default=600_064)
    parser.add_argument("--transport", default="mooncake")
    parser.add_argument("--only", choices=("lru", "count"), help="one run, to find a size of memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    runs: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for eviction in [args.only] if args.only else ["lru", "count"]:
            runs[eviction] = asyncio.run(replay(args, eviction, Path(folder)))
    print(f"L1 {args.l1_tokens:,} and L2 {args.l2_tokens:,} tokens a node, pages over {args.transport}")
    print(f"{'':26}" + "".join(f"{eviction:>14}" for eviction in runs))
    for name in dict.fromkeys(name for run in runs.values() for name in run):
        print(f"{name:26}" + "".join(f"{run.get(name, 0.0):14,.6g}" for run in runs.values()))
    if args.json:
        args.json.write_text(json.dumps({"settings": vars(args) | {"trace": str(args.trace), "json": str(args.json)},
                                         "runs": runs}, indent=2) + "\n")  # fmt: skip
    if args.only:
        return 0
    bad = missed(runs["lru"], runs["count"])
    if args.check and bad:
        print(f"missed: {'; '.join(bad)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
