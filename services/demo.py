"""`evolving demo`: a cluster of simulated workers, a bundled agent trace replayed against it, the report."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Annotated

from services.up import Supervisor, UpSettings, check_parts
from shared.config import ConfigError, Doc, load
from shared.embedded import EmbeddedError
from shared.streams import BusError


class DemoSettings(UpSettings, kw_only=True):
    port: Annotated[int, Doc("port of the router, 0 for a free one")] = 0
    page_port: Annotated[int, Doc("port of the live page, 0 for a free one")] = 0
    speedup: Annotated[float, Doc("simulated seconds per wall second")] = 30.0
    warmup_s: Annotated[float, Doc("cluster seconds of collocated warm-up")] = 300.0
    window_s: Annotated[float, Doc("cluster seconds of a planning window")] = 240.0
    slice_s: Annotated[float, Doc("cluster seconds of a slice of the window")] = 30.0
    trace: Annotated[str, Doc("trace to replay")] = "demo"
    agents: Annotated[int, Doc("agents at a time")] = 8
    max_pause: Annotated[float, Doc("longest pause between steps, trace seconds")] = 200.0
    report: Annotated[str, Doc("JSON file for the report")] = ""
    keep: Annotated[bool, Doc("leave the cluster running after the replay, until Ctrl-C")] = False


async def _demo(settings: DemoSettings, config: str | None) -> int:
    supervisor = Supervisor(settings, config=config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, supervisor.stop_requested.set)
    try:
        await supervisor.start()
        print(f"router     {supervisor.url}/v1")
        print(f"live page  {supervisor.page}", flush=True)
        argv = [
            sys.executable, "-m", "services.cli", "replay", settings.trace, "--url", supervisor.url,
            "--agents", str(settings.agents), "--max-pause", str(settings.max_pause),
        ]  # fmt: skip
        if settings.report:
            argv += ["--report", settings.report]
        replay = await asyncio.create_subprocess_exec(*argv, env=dict(os.environ))
        ended = asyncio.ensure_future(replay.wait())
        stopped = asyncio.ensure_future(supervisor.stop_requested.wait())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            if replay.returncode is None:
                replay.terminate()
            await ended
            return 130
        code = ended.result()
        print(
            f"live page  {supervisor.page}"
            + ("" if settings.keep else "  (ends with the demo; --keep leaves it)")
        )
        if settings.keep and code == 0:
            print("Ctrl-C stops.", flush=True)
            await stopped
        stopped.cancel()
        return code
    except (ConfigError, BusError, EmbeddedError) as error:
        print(f"evolving: {error}", file=sys.stderr)
        return 2
    finally:
        await supervisor.stop()


def main(argv: list[str]) -> int:
    settings = load(
        DemoSettings, "demo", argv, summary="Start a cluster, replay a bundled agent trace, print the report."
    )
    return asyncio.run(_demo(settings, check_parts(argv)))
