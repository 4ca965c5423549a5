"""What tells one workload of agents from another, and what a run may vary in it.

Rules that hold here
- Tokens of contexts are given at context_scale 1; what a step adds and gives, and times, are not scaled.
- Sessions of a workload that are alike in seed and number are alike in all but what `Knobs` change.
"""

from __future__ import annotations

import msgspec

from loadtest.workloads.draws import Lognormal, Mixture


class Subagents(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of sub-agents of one type, started after a step of the main branch."""

    spawns: float  # steps followed by a group
    background: float  # groups that the parent does not wait for
    largest_group: int
    types: tuple[str, ...]
    prefix_tokens: int  # system prompt and tools of a type
    shared: float  # of a first prompt, its type's prefix
    steps: float  # mean requests, of the main branch's mean
    added: Lognormal | Mixture
    pause: Lognormal


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """first_tokens, compacted_tokens: means of what the first prompt and one after a compaction have after system
    and tools. added: tokens that a step's prompt has after the previous prompt and its answer. pause: seconds
    before a step, after what it waited for."""

    name: str
    salt: tuple[int, ...]  # told apart from other workloads of the same seed
    model: str
    steps: float  # mean requests of a session's main branch
    steps_sigma: float
    system_tokens: int
    tool_tokens: int
    first_tokens: int
    limit_tokens: tuple[float, float]  # longest prompt: bounds of a uniform draw a session
    compacted_tokens: int | None  # None: no context management, the session ends where the limit is reached
    added: Lognormal | Mixture
    output: Lognormal | Mixture
    pause: Lognormal | Mixture
    first_token_s: float  # of a recorded request, until its first token
    token_s: float
    subagents: Subagents | None = None


class Knobs(msgspec.Struct, frozen=True, kw_only=True):
    """steps: mean requests of a session's main branch, None for the workload's own. max_pause_s: cap on recorded
    pauses."""

    steps: float | None = None
    context_scale: float = 1.0
    max_pause_s: float | None = None
    seed: int = 0
