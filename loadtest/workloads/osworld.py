"""`osworld`: a computer-use agent on OSWorld 2.0. Prefill-heavy: each step appends a screenshot; some sub-agents.

"Given" is of 500 sessions, seed 1. Figure 2a's bars have no numbers in the text; "derived" is explained below.

| figure | target | source | given |
|---|---|---|---|
| h* | 94.0 % | Table C.1 (Dynamo's rows: 93.5 to 93.7 %); hit rates 93.8 % | 93.8 % |
| T_pause | 1.35 s | Table C.3 (1.3 to 1.4) | 1.34 s |
| output tokens | 400 | derived (1) | 400 |
| uncached tokens with outputs held | 4.3 K | derived (2) | 4.3 K |
| prompt tokens | 72 K | derived (2) | 68 K |
| steps, main branch | 30 | derived (2) | 29 |
| sub-agents a session | few | derived (3) | 0.8 |
| branches | 0.87-0.90 | Little's law on Table C.3: 111, 128, 143 at 128, 144, 160 agents | 1.2 |

1. Table D.1: E2E exceeds TTFT by 2.6 s on a single decode node, which 4.33 * 2.6 = 11 requests run on: 6.5 ms a
   token, between the 4.5 ms of Claude Code and the 7 ms of Putnam. As there, an engine model must accept about 3
   tokens an iteration.
2. Figure 2a's axis of tokens has its last tick at 4 K, and OSWorld is the prefill-heavy workload: its bar is the
   highest. One screenshot of 1920 x 1080 at 28 x 28 pixels a token is 2,700 tokens; some steps append two. h* then
   says how long prompts are, and growth by a screenshot and an answer a step, how many steps.
3. Section 6.1 calls it multi-agent, yet its branches are fewer than its agents (machines start and stop) and T_pause,
   which would include waits for sub-agents, is 1.3 s: so sub-agents are rare and mostly run beside their parent.

Run 0.75 times the paper's agents (95, 108, 120 at 128, 144, 160) for as many branches. The limit is that of Kimi K2.6.
Its prefill takes 8 / 4.33 = 1.85 s a request and node (Table D.1, 8P1D), far more than GLM-5.2's for as many tokens.
"""

from __future__ import annotations

from loadtest.workloads.draws import Lognormal, Mixture
from loadtest.workloads.profile import Profile, Subagents

SCREENSHOT_TOKENS = 2_700  # 1920 x 1080, 28 x 28 pixels a token
# One screenshot, or two: the whole screen and a zoom into it; and some text.
ADDED = Mixture(
    0.35,
    Lognormal.of_mean(450.0, 1.0, plus=2 * SCREENSHOT_TOKENS, most=12_000.0),
    Lognormal.of_mean(450.0, 1.0, plus=SCREENSHOT_TOKENS, most=12_000.0),
)

PROFILE = Profile(
    name="osworld",
    salt=tuple(b"osworld"),
    model="osworld-agent",
    steps=30.0,
    steps_sigma=0.35,
    system_tokens=1_500,
    tool_tokens=2_500,
    first_tokens=4_000,
    limit_tokens=(256_000, 256_000),
    compacted_tokens=None,
    added=ADDED,
    output=Lognormal.of_mean(400.0, 0.6, most=4_000.0),
    pause=Lognormal.of_mean(1.4, 0.7, most=30.0),
    first_token_s=2.0,
    token_s=0.0065,
    subagents=Subagents(
        spawns=0.02,
        background=0.75,
        largest_group=2,
        types=("computer", "browser"),
        prefix_tokens=3_500,
        shared=0.5,
        steps=0.4,
        added=ADDED,
        pause=Lognormal.of_mean(1.4, 0.7, most=30.0),
    ),
)
