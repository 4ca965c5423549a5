"""How fast a cluster is simulated: requests a second on one core, and the wall time of the run that the tables are made of.

    python bench/simulate.py TRACE [--agents 126] [--minutes 90] [--page-size 512] [--json FILE] [--check]

TRACE: recorded sessions of coding agents in the Weka format. Nine nodes, 4P5D, this system's own router, directory and
eviction, a third of the time as warm-up.

| figure | bound (--check) |
|---|---|
| wall seconds of 90 simulated minutes | 30 |
| simulated requests a wall second | 2,000 |
| the same figures again, with the same seed | equal, bit for bit (a tenth of the time, twice) |
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
from bounds import Bound

from loadtest.formats import read_trace
from loadtest.simulate.command import sized
from loadtest.simulate.run import Load, Result, Shift, Simulation, System, repeated
from loadtest.traces import Trace
from shared.split import Split
from shared.timing import GLM_52_4XGB300

MOST_WALL_S, LEAST_RATE = 30.0, 2000.0


def simulate(trace: Trace, args: argparse.Namespace, minutes: float) -> Result:
    load = Load(
        shifts=(Shift(0.0, {"agents": args.agents}),),
        warmup_s=minutes * 20,
        measure_s=minutes * 40,
        max_pause_s=30.0,
    )
    node = sized(GLM_52_4XGB300, args.page_size)
    system = System(planner="static", split=Split(4, 5))
    return Simulation({"agents": repeated(trace, args.seed)}, system, load, node, seed=args.seed).run()


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast a cluster is simulated.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--agents", type=int, default=126)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--page-size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    result = simulate(trace, args, args.minutes)
    twice = [simulate(trace, args, args.minutes / 10) for _ in range(2)]
    for one in twice:
        one.wall_s = 0.0
    rows = {
        "wall s": result.wall_s,
        "wall s of 90 minutes": result.wall_s * 90 / args.minutes,
        "simulated requests/s": result.requests / result.wall_s,
        "requests": result.requests,
        "events a request": result.events / result.requests,
        "throughput, req/s": result.req_per_s,
        "lost KV reuse": result.lost_reuse,
    }
    for name, value in rows.items():
        print(f"{name:24}{value:14,.3f}")
    equal = msgspec.msgpack.encode(twice[0]) == msgspec.msgpack.encode(twice[1])
    found = [
        Bound("wall seconds of 90 minutes", rows["wall s of 90 minutes"], MOST_WALL_S, True),
        Bound("simulated requests/s", rows["simulated requests/s"], LEAST_RATE, False),
        Bound("equal seeds, equal results", float(equal), 1.0, False),
    ]
    for bound in found:
        sign = "<=" if bound.at_most else ">="
        print(
            f"{bound.name:32}{bound.value:12,.3f} {sign} {bound.limit:<8g} {'met' if bound.met else 'MISSED'}"
        )
    if args.json:
        told = rows | {"bounds": [bound._asdict() | {"met": bound.met} for bound in found]}
        args.json.write_text(json.dumps(told, indent=2) + "\n")
    return int(args.check and not all(bound.met for bound in found))


if __name__ == "__main__":
    sys.exit(main())
