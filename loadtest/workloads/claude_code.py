"""`claude-code`: a coding agent with groups of sub-agents, compactions and long pauses.

Fitted to statistics of 710 recorded Claude Code sessions. "Given" is of 40 sessions, seed 3.

| figure | target | source | given |
|---|---|---|---|
| steps, main branch | 69 | recorded | 69 |
| prompt tokens, main branch | 122 K | recorded | 122 K |
| uncached tokens of these, prompts only | 4.5 K | recorded | 4.6 K |
| output tokens | 440 | recorded | 443 |
| sub-agent's first prompt shared with its type | 96.4 % | recorded | 96.4 % |
| pause before a tool's turn, median | 9 s | recorded | 9 s |
| pause before a user's turn, median | 127 s | recorded | 127 s |
| T_pause, with pauses capped at 30 s | 12.9-14.1 s | Table C.3 | 13 s |
| branches | 1.24-1.27 | Little's law on Table C.3: 112, 135, 160 at 90, 108, 126 agents | 1.5 |
| prompt shared after a tool, a sub-agent, a compaction | 99.8 97.9 14.3 % | Figure 2c, one trace | 97.1 97.0 26 % |

The paper's runs have T_pause of 12.9 to 18.6 s: cap pauses at 30 s (`max_pause_s`) to compare with them. Its outputs
are about twice as long (4.3 s of decode at 4.5 ms a token, Table D.1, against 440 tokens recorded here).
"""

from __future__ import annotations

from loadtest.workloads.draws import Lognormal, Mixture
from loadtest.workloads.profile import Profile, Subagents

TOOL_PAUSE = Lognormal.of_median(9.0, 1.95)
USER_PAUSE = Lognormal.of_median(127.0, 1.5)

PROFILE = Profile(
    name="synthetic",
    salt=(),
    model="synthetic-agent",
    steps=69.0,
    steps_sigma=0.35,
    system_tokens=3_300,
    tool_tokens=12_200,
    first_tokens=44_000,
    limit_tokens=(180_000, 240_000),
    compacted_tokens=45_000,  # a summary and files
    added=Lognormal.of_mean(2_980.0, 1.3, plus=20.0, most=30_000.0),
    output=Lognormal.of_mean(440.0, 1.1, most=8_000.0),
    pause=Mixture(0.05, USER_PAUSE, TOOL_PAUSE),
    first_token_s=1.5,
    token_s=0.018,
    subagents=Subagents(
        spawns=0.09,
        background=0.2,
        largest_group=3,
        types=("Explore", "Plan", "general-purpose"),
        prefix_tokens=8_700,
        shared=0.964,
        steps=0.18,
        added=Lognormal.of_mean(2_400.0, 1.3, plus=20.0, most=30_000.0),
        # A sub-agent's tools answer at once: nobody is asked.
        pause=Lognormal.of_median(9.0, 1.95, most=30.0),
    ),
)
