"""`evolving replay` and `evolving generate`: settings in, exit code out.

Exit codes: 0 all well; 1 some requests failed; 2 it could not be done, said in one line; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console

from loadtest.client import ServerError
from loadtest.formats import read_trace
from loadtest.generate import GenerateError, Shape, write_trace
from loadtest.progress import show_progress
from loadtest.replay import Plan, Replay
from loadtest.report import Report, check_writable, print_report, write_report
from loadtest.trace_stats import print_stats
from loadtest.traces import InnerT, TraceError
from loadtest.workloads.agents import Workload
from shared.config import ConfigError, Doc, load

DEMO = Path(__file__).parent / "data" / "demo.jsonl.gz"


class ReplaySettings(msgspec.Struct, kw_only=True):
    trace: Annotated[
        str, Doc("trace file or folder: Weka, Trie or Mooncake; plain, .gz or .xz; `demo` is the bundled one")
    ]
    url: Annotated[str, Doc("OpenAI-compatible server")] = "http://127.0.0.1:8000"
    agents: Annotated[int, Doc("agents at once")] = 8
    duration: Annotated[
        float | None, Doc("repeat the trace for so many seconds of it (default: play it once)")
    ] = None
    speedup: Annotated[float | None, Doc("trace seconds per wall second (default: the cluster's)")] = None
    max_pause: Annotated[float | None, Doc("cap on the agents' pauses, seconds of the trace")] = None
    report: Annotated[str, Doc("file for the report as JSON")] = ""
    model: Annotated[str, Doc("model id (default: the first that the server lists)")] = ""
    inner_t: Annotated[InnerT, Doc("what times inside Weka sub-agents count from")] = "spawn"
    timeout: Annotated[float, Doc("wall seconds that one request may take")] = 600.0
    run_id: Annotated[str, Doc("start of the branches' names and seed of the tokens (default: made up)")] = ""

    api_key: Annotated[str, Doc("key of the router, when it asks for one")] = ""
    untagged: Annotated[
        bool, Doc("send no branch headers, as a harness that says nothing; the router infers the branches")
    ] = False

    def __post_init__(self) -> None:
        if self.agents < 1:
            raise ValueError(f"agents must be at least 1, not {self.agents}")
        for name, value in (
            ("duration", self.duration),
            ("speedup", self.speedup),
            ("timeout", self.timeout),
        ):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0, not {value}")
        if self.max_pause is not None and not self.max_pause >= 0:
            raise ValueError(f"max-pause must be at least 0, not {self.max_pause}")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, not be {self.url!r}")
        if not all(c.isalnum() or c in "._-" for c in self.run_id) or not self.run_id.isascii():
            raise ValueError(f"run-id takes letters, digits and ._- only, not {self.run_id!r}")


class GenerateSettings(msgspec.Struct, kw_only=True):
    out: Annotated[str, Doc("file to write: .jsonl, .jsonl.gz or .jsonl.xz")]
    workload: Annotated[Workload, Doc("kind of agents")] = "claude-code"
    sessions: Annotated[int, Doc("agents' sessions")] = 50
    steps: Annotated[
        float | None, Doc("mean requests of a session's main branch (default: the workload's)")
    ] = None
    context_scale: Annotated[float, Doc("factor on the contexts' lengths")] = 1.0
    max_pause: Annotated[float | None, Doc("cap on recorded pauses, seconds")] = None
    seed: Annotated[int, Doc("equal seeds give equal files")] = 0

    def __post_init__(self) -> None:
        if self.sessions < 1:
            raise ValueError(f"sessions must be at least 1, not {self.sessions}")
        if self.steps is not None and not 1 <= self.steps <= 10_000:
            raise ValueError(f"steps must be 1 to 10000, not {self.steps}")
        if not 0.02 <= self.context_scale <= 10:
            raise ValueError(f"context-scale must be 0.02 to 10, not {self.context_scale}")
        if self.max_pause is not None and not self.max_pause >= 0:
            raise ValueError(f"max-pause must be at least 0, not {self.max_pause}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, not {self.seed}")


def replay(argv: Sequence[str]) -> int:
    """`evolving replay TRACE ...`"""
    try:
        settings = load(
            ReplaySettings,
            "replay",
            argv,
            positional=("trace",),
            summary="Play a recorded agent trace against a server and report what it did.",
        )
        if settings.report:
            check_writable(settings.report)
        trace = read_trace(trace_path(settings.trace), inner_t=settings.inner_t)
        plan = Plan(
            url=settings.url,
            agents=settings.agents,
            model=settings.model,
            speedup=settings.speedup,
            duration_s=settings.duration,
            max_pause_s=settings.max_pause,
            api_key=settings.api_key,
            untagged=settings.untagged,
            timeout_s=settings.timeout,
            run_id=settings.run_id,
        )
        console = Console()
        report = asyncio.run(_replay(Replay(trace, plan), settings, console))
        print_report(report, console)
        if settings.report:
            write_report(settings.report, report)
            console.print(f"report written to {settings.report}", soft_wrap=True, highlight=False)
    except (ConfigError, TraceError, ServerError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or settings.report}: cannot be written: {error.strerror or error}")
    except KeyboardInterrupt:
        return 130
    if report.interrupted:
        return 130
    return 1 if report.failed else 0


async def _replay(run: Replay, settings: ReplaySettings, console: Console) -> Report:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Not possible outside the main thread; then the process's own handler ends it.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, run.interrupt)
    shown = asyncio.create_task(show_progress(run.progress, console), name="progress")
    try:
        await run.run()
    finally:
        shown.cancel()
        await asyncio.wait([shown])
    return run.report(msgspec.structs.asdict(settings), installed_version())


def generate(argv: Sequence[str]) -> int:
    """`evolving generate --out FILE ...`"""
    try:
        settings = load(
            GenerateSettings,
            "generate",
            argv,
            summary="Write a synthetic agent trace in Weka's format and print its statistics.",
        )
        shape = Shape(
            workload=settings.workload,
            sessions=settings.sessions,
            steps=settings.steps,
            context_scale=settings.context_scale,
            max_pause_s=settings.max_pause,
            seed=settings.seed,
        )
        write_trace(settings.out, shape)
        print_stats(read_trace(settings.out), Console())
    except (ConfigError, TraceError, GenerateError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def trace_path(name: str) -> str:
    """The bundled trace for `demo`, unless a file has that name."""
    return str(DEMO) if name == "demo" and not Path(name).exists() else name


def installed_version() -> str:
    try:
        return version("evolving-infra")
    except PackageNotFoundError:
        return "not installed"


def _refuse(message: str) -> int:
    print(f"evolving: {message}", file=sys.stderr)
    return 2
