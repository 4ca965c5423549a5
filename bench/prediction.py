"""Predicted against observed TTFT: an agent trace through a whole cluster of simulated workers.

    python bench/prediction.py TRACE [--agents 24] [--split 2P2D] [--speedup 2] [--duration 600] [--max-pause 30]
                               [--json FILE] [--check]

Every request's record says when its first token was predicted to come, as the router chose its prefill node, and when it
came. Load is the part of the time that prefill nodes compute. The first tenth of the time warms up: the router learns
there how long fetches and hand-overs take.

| figure | bound (--check) |
|---|---|
| requests whose TTFT differs from the prediction by more than 20 % + 50 ms (cluster time) | under 2 % |
| load of the prefill nodes | 60 % to 80 %: otherwise there were too few or too many agents to say |
| failed requests | 0 |
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from reuse import evolving, split_reached

from services.up import Supervisor, UpSettings
from shared.bus import Bus
from shared.messages import Iterations, Outcome, Phase, RequestDone

LEAST_LOAD, MOST_LOAD = 0.6, 0.8
MOST_WRONG = 0.02


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    settings = UpSettings(
        port=0, page_port=0, split=args.split, speedup=args.speedup, warmup_s=1.0, window_s=36_000.0, slice_s=60.0,
        nodes=args.nodes, logs=str(folder / "logs"),
    )  # fmt: skip
    supervisor = Supervisor(settings, quiet=True)
    report = folder / "report.json"
    try:
        await supervisor.start()
        await split_reached(supervisor.url, args.split)
        bus = await Bus.connect(supervisor.redis_url, supervisor.settings.cluster)
        requests: list[RequestDone] = []
        busy: list[tuple[float, float]] = []  # end, seconds of prefill iterations
        reader = bus.reader({"requests": "0", "iterations": "$"})

        async def follow() -> None:
            while True:
                for event in await reader.read(0.5):
                    if isinstance(event.message, RequestDone):
                        requests.append(event.message)
                    elif isinstance(event.message, Iterations):
                        seconds = sum(r.seconds for r in event.message.records if r.phase is Phase.PREFILL)
                        busy.append((event.message.t, seconds))

        following = asyncio.create_task(follow())
        await evolving(
            "replay", str(args.trace), "--duration", str(args.duration), "--url", supervisor.url, "--agents",
            str(args.agents), "--speedup", str(args.speedup), "--max-pause", str(args.max_pause), "--report", str(report),
        )  # fmt: skip
        await asyncio.sleep(1.0)
        following.cancel()
        await bus.close()
        found = json.loads(report.read_text())
    finally:
        await supervisor.stop()
    if args.records:
        args.records.write_bytes(msgspec.json.encode([msgspec.structs.asdict(r) for r in requests]))
    begin = min(r.t_arrive for r in requests) + args.duration / 10
    end = begin + args.duration * 0.8
    kept = [r for r in requests if begin <= r.t_arrive <= end and r.outcome is Outcome.OK]
    ttft = np.array([r.t_first_token - r.t_arrive for r in kept])
    predicted = np.array([r.predicted_ttft_s for r in kept])
    wrong = np.abs(ttft - predicted) > 0.2 * ttft + 0.05
    prefill_nodes = int(args.split.partition("P")[0])
    error = predicted - ttft
    return {
        "requests": len(kept),
        "load": sum(s for t, s in busy if begin <= t <= end) / (end - begin) / prefill_nodes,
        "wrong": float(wrong.mean()),
        "ttft mean s": float(ttft.mean()),
        "ttft p95 s": float(np.quantile(ttft, 0.95)),
        "error p5 s": float(np.quantile(error, 0.05)),
        "error p50 s": float(np.median(error)),
        "error p95 s": float(np.quantile(error, 0.95)),
        "failed": found["failed"],
    }


def missed(run: dict[str, float]) -> list[str]:
    found = []
    if run["wrong"] >= MOST_WRONG:
        found.append(
            f"{100 * run['wrong']:.1f} % of the predictions were wrong, not under {100 * MOST_WRONG:g} %"
        )
    if not LEAST_LOAD <= run["load"] <= MOST_LOAD:
        found.append(f"the load was {100 * run['load']:.0f} %, not 60 % to 80 %")
    if run["failed"]:
        found.append(f"{run['failed']:.0f} requests failed")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted against observed TTFT on simulated workers.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--agents", type=int, default=24)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--split", default="2P2D")
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--duration", type=float, default=600.0, help="seconds of the trace")
    parser.add_argument("--max-pause", type=float, default=30.0)
    parser.add_argument("--records", type=Path, help="file for the records of all requests")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = asyncio.run(measure(args, Path(folder)))
    print(f"{args.agents} agents, {args.split}, {args.speedup:g} times as fast as the model")
    for name, value in run.items():
        print(f"{name:16}{value:14,.4g}")
    if args.json:
        settings = vars(args) | {name: str(getattr(args, name)) for name in ("trace", "json", "records")}
        args.json.write_text(json.dumps({"settings": settings, "run": run}, indent=2) + "\n")
    bad = missed(run)
    if args.check and bad:
        print(f"missed: {'; '.join(bad)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
