"""A replay's progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from loadtest.report import percent, seconds
from loadtest.tally import Progress

BAR_PERIOD_S = 0.25
LINE_PERIOD_S = 5.0


def figures(now: Progress) -> str:
    done = f"{now.done}/{now.total}" if now.total is not None else f"{now.done}"
    split = "" if now.split is None else f", {now.split[0]}P{now.split[1]}D"
    return (
        f"{done} requests, {now.req_per_s:.2f} req/s, TTFT p50 {seconds(now.ttft_p50_s)},"
        f" KV hit {percent(now.kv_hit_rate)}, {now.failed} failed{split}"
    )


async def show_progress(look: Callable[[], Progress], console: Console) -> None:
    """Shows what `look` returns until cancelled, then its last state."""
    if console.is_terminal:
        await _show_bar(look, console)
    else:
        await _show_lines(look, console)


async def _show_bar(look: Callable[[], Progress], console: Console) -> None:
    columns = (
        TextColumn("replay"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Bar(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("replay", total=None, figures="")

        def draw() -> None:
            now = look()
            if now.total is not None:
                completed, total = float(now.done), float(now.total)
            else:
                total = now.duration_s or 0.0
                completed = min(now.elapsed_s, total)
            bar.update(task, completed=completed, total=total, figures=figures(now), refresh=True)

        try:
            while True:
                draw()
                await asyncio.sleep(BAR_PERIOD_S)
        finally:
            draw()


async def _show_lines(look: Callable[[], Progress], console: Console) -> None:
    def line() -> None:
        now = look()
        if now.done:
            console.print(figures(now), soft_wrap=True, highlight=False)

    try:
        while True:
            await asyncio.sleep(LINE_PERIOD_S)
            line()
    finally:
        line()
