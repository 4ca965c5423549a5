"""Statistics of a trace, in the terms in which agent workloads are described.

Rules that hold here
- "Uncached" is what an infinite cache of prompts would not hold: blocks that no earlier step of the session, in
  order of branches and steps, had, and the tail.
- A compaction is a step whose prompt is shorter than the branch's previous one by more than
  COMPACTION_DROP_TOKENS and shares less than half of that prompt.
- A pause counts where a step has a predecessor in its branch.
"""

from __future__ import annotations

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from loadtest.traces import Branch, Session, Trace

COMPACTION_DROP_TOKENS = 8192


class TraceStats(msgspec.Struct, frozen=True):
    """Tokens are means a request, pauses seconds; `main` is over main branches only."""

    sessions: int
    requests: int
    main_steps: float  # a session
    all_steps: float  # a session, with sub-agents
    subagents: int
    compactions: int
    main_prompt_tokens: float
    main_uncached_tokens: float
    main_reuse: float  # 1 - uncached / prompt
    prompt_tokens: float
    uncached_tokens: float
    output_tokens: float
    largest_prompt_tokens: int
    sibling_reuse: float  # of first prompts of sub-agents after the session's first, median
    pause_p50_s: float
    pause_p99_s: float
    pauses_over_60_s: float  # fraction


def trace_stats(trace: Trace) -> TraceStats:
    prompts: list[int] = []
    uncached: list[int] = []
    main: list[bool] = []
    pauses: list[float] = []
    sibling_reuse: list[float] = []
    compactions = outputs = subagents = 0
    for session in trace.sessions:
        seen: set[int] = set()
        for number, branch in enumerate(session.branches):
            subagents += branch.parent >= 0
            compactions += _compactions(session, branch)
            for step, path in zip(branch.steps, branch.paths(), strict=True):
                held = sum(block_id in seen for block_id in path.tolist()) * session.block_size
                seen.update(step.fresh.tolist())
                prompts.append(step.prompt_tokens)
                uncached.append(step.prompt_tokens - held)
                main.append(branch.parent < 0)
                outputs += step.output_tokens
                if step is not branch.steps[0]:
                    pauses.append(step.pause_s)
                elif number > 1:
                    sibling_reuse.append(held / step.prompt_tokens)
    is_main = np.array(main)
    prompt_array, uncached_array = np.array(prompts, dtype=float), np.array(uncached, dtype=float)
    main_prompt = float(prompt_array[is_main].mean())
    main_uncached = float(uncached_array[is_main].mean())
    pause_array = np.array(pauses or [0.0])
    return TraceStats(
        sessions=len(trace.sessions),
        requests=len(prompts),
        main_steps=float(is_main.sum()) / len(trace.sessions),
        all_steps=len(prompts) / len(trace.sessions),
        subagents=subagents,
        compactions=compactions,
        main_prompt_tokens=main_prompt,
        main_uncached_tokens=main_uncached,
        main_reuse=1.0 - main_uncached / main_prompt,
        prompt_tokens=float(prompt_array.mean()),
        uncached_tokens=float(uncached_array.mean()),
        output_tokens=outputs / len(prompts),
        largest_prompt_tokens=max(prompts),
        sibling_reuse=float(np.median(sibling_reuse)) if sibling_reuse else 0.0,
        pause_p50_s=float(np.median(pause_array)),
        pause_p99_s=float(np.percentile(pause_array, 99)),
        pauses_over_60_s=float((pause_array > 60).mean()),
    )


def _compactions(session: Session, branch: Branch) -> int:
    found = 0
    for before, step in zip(branch.steps, branch.steps[1:], strict=False):
        dropped = before.prompt_tokens - step.prompt_tokens > COMPACTION_DROP_TOKENS
        found += dropped and step.shared * session.block_size * 2 < before.prompt_tokens
    return found


def print_stats(trace: Trace, console: Console) -> None:
    stats = trace_stats(trace)
    table = Table(title=f"{trace.path} ({trace.format})", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = (
        ("sessions", f"{stats.sessions}"),
        ("requests", f"{stats.requests}"),
        ("steps a session, main branch", f"{stats.main_steps:.1f}"),
        ("steps a session, with sub-agents", f"{stats.all_steps:.1f}"),
        ("sub-agents", f"{stats.subagents}"),
        ("compactions", f"{stats.compactions}"),
        ("prompt tokens, main branch", f"{stats.main_prompt_tokens:,.0f}"),
        ("uncached tokens, main branch", f"{stats.main_uncached_tokens:,.0f}"),
        ("reuse, main branch", f"{100 * stats.main_reuse:.1f} %"),
        ("prompt tokens, all", f"{stats.prompt_tokens:,.0f}"),
        ("uncached tokens, all", f"{stats.uncached_tokens:,.0f}"),
        ("largest prompt", f"{stats.largest_prompt_tokens:,}"),
        ("output tokens", f"{stats.output_tokens:,.0f}"),
        ("reuse of a later sub-agent's first prompt", f"{100 * stats.sibling_reuse:.1f} %"),
        ("pause p50", f"{stats.pause_p50_s:.1f} s"),
        ("pause p99", f"{stats.pause_p99_s:.0f} s"),
        ("pauses over 60 s", f"{100 * stats.pauses_over_60_s:.1f} %"),
    )
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
