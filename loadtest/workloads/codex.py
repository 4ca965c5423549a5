"""`codex`: Codex CLI. A main thread that grows to a context limit and is compacted, few sub-agents, long pauses.

The paper replays Codex traces (section D.2) but gives no number of them. "Given" is of 200 sessions, seed 1.

| figure | target | source | given |
|---|---|---|---|
| longest prompt | 244.8 K | Codex compacts at 90 % of its window of 272 K (openai/codex, issue 40095) | 244.8 K |
| after a compaction: system, tools and | 4-24 K | up to 20 K of the user's messages, and a summary (same code) | 7-21 K |
| a tool's output | at most 10 K | Codex cuts it there | 10 K |
| pauses | as claude-code | no other source; a user's turn every 25 steps | median 9.7 s |
| T_pause, with pauses capped at 30 s | 12.9-14.1 s | Table C.3, Claude Code | 13.4 s |
| sub-agents a session | 1 | assumed | 1.3 |
| steps, main branch | 110 | assumed: about one compaction in two sessions | 111 |
| prompt tokens, main branch | 117 K | follows | 117 K |
| output tokens | 600 | assumed: reasoning is part of it | 600 |
| h* | 97-98 % | Table C.1, Claude Code: 97.3 % | 98.0 % |
"""

from __future__ import annotations

from loadtest.workloads.claude_code import TOOL_PAUSE, USER_PAUSE
from loadtest.workloads.draws import Lognormal, Mixture
from loadtest.workloads.profile import Profile, Subagents

PROFILE = Profile(
    name="codex",
    salt=tuple(b"codex"),
    model="codex-agent",
    steps=110.0,
    steps_sigma=0.5,
    system_tokens=5_000,
    tool_tokens=4_000,
    first_tokens=10_000,
    limit_tokens=(244_800, 244_800),
    compacted_tokens=14_000,
    added=Lognormal.of_mean(2_100.0, 1.2, plus=20.0, most=10_000.0),
    output=Lognormal.of_mean(600.0, 1.2, most=16_000.0),
    pause=Mixture(0.04, USER_PAUSE, TOOL_PAUSE),
    first_token_s=1.5,
    token_s=0.018,
    subagents=Subagents(
        spawns=0.008,
        background=0.5,
        largest_group=2,
        types=("default", "explorer"),
        prefix_tokens=9_000,
        shared=0.9,
        steps=0.15,
        added=Lognormal.of_mean(2_100.0, 1.2, plus=20.0, most=10_000.0),
        pause=Lognormal.of_median(9.0, 1.95, most=30.0),
    ),
)
