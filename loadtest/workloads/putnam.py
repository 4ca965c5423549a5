"""`putnam`: mini-SWE-agent on PutnamBench. Decode-heavy, one branch a session, no context management.

"Given" is of 500 sessions, seed 1. Figure 2a's bars have no numbers in the text; "derived" is explained below.

| figure | target | source | given |
|---|---|---|---|
| branches | 1 | section 6.1; Little's law on Table D.1: 9.2 (14.0 + 10.0) = 221 of 224 agents | 1 |
| T_pause | 10.0 s | Table C.3 (9.9 to 10.1) | 9.9 s |
| h* | 99.0 % | Table C.1, the same from all six rows; hit rates 98.5 to 98.9 % | 99.0 % |
| hit rate, prompts only | 96.4-96.6 % | Table C.1, Dynamo, derived (1) | 96.6 % |
| output tokens, mean | 1,900 | derived (2) | 1,815 |
| output tokens, 95th percentile | 10.2 K | derived (2) | 10.1 K |
| uncached tokens with outputs held | 750 | derived (3) | 750 |
| prompt tokens | 60-79 K | derived (3) | 75 K |
| steps | 52 | derived (3); below Figure 2a's upper tick of 200 | 52 |

1. Dynamo's loss is the same 2.5 % at every load, so it is no eviction: it is what outputs make of a prompt.
2. Table D.1, 2P7D: E2E exceeds TTFT by 13.4 s (mean) and 71.4 s (95th percentiles), with 9.2 * 13.4 / 7 = 17.6 requests
   running on a decode node. 7 ms a token there (4.5 ms at the 4 of Claude Code) give 1,900 and 10.2 K tokens. A
   tail five times the mean is more than any lognormal has: hence a mixture.
3. Uncached tokens are what tools add, a; context grows by a + 1,900 a step, so that mean prompts are half of steps
   times that. h* fixes the ratio of a and steps; prompts of at most 79 K let 288 agents' decodes into 7 nodes of
   2.06 M tokens (26 on each), and one prefill node near its limit at 10 req/s (Figure C.1: 1P8D and 2P7D) needs
   most of that.

An engine model must take the paper's 7 ms a token: a decode iteration of 17.6 requests (Figure 5d: 23 ms) accepts
3.3 tokens a request. With 1.4, which suits the recorded outputs of `claude-code`, E2E is twice as long.
"""

from __future__ import annotations

from loadtest.workloads.draws import Lognormal, Mixture
from loadtest.workloads.profile import Profile

PROFILE = Profile(
    name="putnam",
    salt=tuple(b"putnam"),
    model="putnam-agent",
    steps=52.0,
    steps_sigma=0.35,
    system_tokens=1_000,
    tool_tokens=200,
    first_tokens=1_500,
    limit_tokens=(1_000_000, 1_000_000),
    compacted_tokens=None,
    added=Lognormal.of_mean(680.0, 1.0, plus=20.0, most=10_000.0),
    # A long search for a proof now and then, else a repair of the last try.
    output=Mixture(
        0.12,
        Lognormal.of_mean(12_000.0, 0.8, most=32_000.0),
        Lognormal.of_mean(600.0, 0.9, most=32_000.0),
    ),
    pause=Lognormal.of_mean(10.2, 1.0, most=120.0),
    first_token_s=0.6,
    token_s=0.007,
)
