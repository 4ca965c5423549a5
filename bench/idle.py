"""What the control plane costs while nothing happens: memory and CPU of each service of an idle cluster.

    python bench/idle.py [--seconds 30] [--json FILE] [--check]

`--check` exits with 1 when a service has 120 MB or more resident, or uses 2 % or more of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from process import cpu_s, rss_mb

from services.up import Supervisor, UpSettings

SERVICES = ("router", "directory", "planner", "telemetry")
MOST_RSS_MB, MOST_CPU = 120.0, 0.02
SETTLE_S = 10.0


async def measure(seconds: float) -> dict[str, dict[str, float]]:
    supervisor = Supervisor(UpSettings(port=0, page_port=0), quiet=True)
    try:
        await supervisor.start()
        await asyncio.sleep(SETTLE_S)
        names = [*SERVICES, "worker-1"]
        pids = {name: supervisor.pid(name) for name in names}
        before = {name: cpu_s(pid) for name, pid in pids.items() if pid}
        begun = time.monotonic()
        await asyncio.sleep(seconds)
        passed = time.monotonic() - begun
        return {
            name: {"rss_mb": rss_mb(pid), "cpu": (cpu_s(pid) - before[name]) / passed}
            for name, pid in pids.items()
            if pid
        }
    finally:
        await supervisor.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory and CPU of an idle cluster's services.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    found = asyncio.run(measure(args.seconds))
    print(f"{'process':10} {'RSS MB':>8} {'CPU %':>7}")
    for name, row in found.items():
        print(f"{name:10} {row['rss_mb']:8.1f} {100 * row['cpu']:7.2f}")
    if args.json:
        args.json.write_text(json.dumps({"seconds": args.seconds, "processes": found}, indent=2) + "\n")
    missing = [name for name in SERVICES if name not in found]
    over = [
        name
        for name in SERVICES
        if name in found and (found[name]["rss_mb"] >= MOST_RSS_MB or found[name]["cpu"] >= MOST_CPU)
    ]
    if args.check and (missing or over):
        print(
            f"missed: {', '.join(missing + over)} (bounds: {MOST_RSS_MB:g} MB, {100 * MOST_CPU:g} %)",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
