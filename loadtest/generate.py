"""Synthetic agent traces in Weka's format, shaped like recorded coding agents.

Rules that hold here
- Equal shapes give equal files, bit for bit (with the same versions of numpy and of the compressor). Session n
  depends on the seed and n only.
- A prompt goes on from the branch's previous one, with its answer and what a tool or the user added, until the
  context reaches its limit. Then it is compacted: the next prompt keeps the system prompt and the tools only.
- Sub-agents start in groups after a step; the parent waits for them, or, for some groups, goes on beside them.
  A sub-agent shares nothing with its parent; those of one type share system prompt and tools.
- Lengths of contexts follow `context_scale`; what a step adds, its output and the pauses do not.

The constants are fitted to statistics of 710 recorded Claude Code sessions: 122 K prompt tokens a request, 4.5 K
of them uncached, 440 output tokens, 96.4 % of a sub-agent's first prompt shared with an earlier one of its type,
a median of 9 s before tool turns and of 127 s before user turns.
"""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import numpy as np

from loadtest.files import whole_file

BLOCK_TOKENS = 64
MODEL = "synthetic-agent"

# Tokens at context_scale 1.
SYSTEM_TOKENS = 3_300
TOOL_TOKENS = 12_200
FIRST_MESSAGE_TOKENS = 44_000
COMPACTED_TOKENS = 45_000  # summary and files that a compacted prompt has after system and tools
LIMIT_TOKENS = (180_000, 240_000)
SUBAGENT_PREFIX_TOKENS = 8_700
SUBAGENT_SHARED = 0.964  # of a sub-agent's first prompt, its type's prefix

# Tokens at any scale: means of what a step adds and gives.
ADDED_TOKENS = 2_980.0
SUBAGENT_ADDED_TOKENS = 2_400.0
OUTPUT_TOKENS = 440.0
ADDED_SPREAD, OUTPUT_SPREAD = 1.3, 1.1  # sigmas of their lognormals
STEPS_SPREAD = 0.35

# Seconds.
TOOL_PAUSE_S, TOOL_PAUSE_SPREAD = 9.0, 1.95  # median and sigma
USER_PAUSE_S, USER_PAUSE_SPREAD = 127.0, 1.5
FIRST_TOKEN_S, TOKEN_S = 1.5, 0.018

USER_TURNS = 0.05
SPAWNS = 0.09  # steps followed by a group of sub-agents
BACKGROUND = 0.2  # groups that the parent does not wait for
LARGEST_GROUP = 3
SUBAGENT_STEPS = 0.18  # of the main branch's mean
SUBAGENT_TYPES = ("Explore", "Plan", "general-purpose")


class GenerateError(Exception):
    """A trace that cannot be written; the text is one line."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """steps: mean requests of a session's main branch. max_pause_s: cap on recorded pauses."""

    sessions: int
    steps: float = 69.0
    context_scale: float = 1.0
    max_pause_s: float | None = None
    seed: int = 0


class _Request(msgspec.Struct, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    t: float
    type: str
    model: str
    prompt_tokens: int
    output_tokens: int
    hash_ids: list[int]
    stop: str
    api_time: float
    think_time: float

    @property
    def end_s(self) -> float:
        return self.t + self.api_time


class _Subagent(msgspec.Struct):
    t: float
    type: str
    agent_id: str
    subagent_type: str
    duration_ms: int
    status: str
    requests: list[_Request]


class _Record(msgspec.Struct):
    id: str
    models: list[str]
    block_size: int
    hash_id_scope: str
    tool_tokens: int
    system_tokens: int
    requests: list[_Request | _Subagent]


class _Context:
    """The prompt of a branch as it grows."""

    def __init__(self, session: _Session, path: list[int], tokens: int) -> None:
        self._session = session
        self.tokens = tokens
        self.path = path + session.new_blocks(tokens // BLOCK_TOKENS - len(path))

    def grow(self, tokens: int) -> None:
        """Go on from the prompt as it is: its partial last block becomes a new, full one."""
        self.tokens += tokens
        self.path = self.path + self._session.new_blocks(self.tokens // BLOCK_TOKENS - len(self.path))


class _Session:
    def __init__(self, shape: Shape, number: int) -> None:
        self._shape = shape
        self._number = number
        self._random = np.random.Generator(np.random.PCG64([shape.seed, number]))
        self._blocks = 0
        self._agents = 0
        self._type_paths: dict[str, list[int]] = {}

    def new_blocks(self, count: int) -> list[int]:
        first = self._blocks + 1
        self._blocks += max(0, count)
        return list(range(first, self._blocks + 1))

    def _scaled(self, tokens: float) -> int:
        return max(BLOCK_TOKENS, round(tokens * self._shape.context_scale))

    def _lognormal(self, mean: float, spread: float) -> float:
        return float(self._random.lognormal(math.log(mean) - spread**2 / 2, spread))

    def _steps(self, mean: float) -> int:
        return max(1, round(self._lognormal(mean, STEPS_SPREAD)))

    def _pause_s(self, user: bool) -> float:
        median, sigma = (USER_PAUSE_S, USER_PAUSE_SPREAD) if user else (TOOL_PAUSE_S, TOOL_PAUSE_SPREAD)
        pause_s = float(self._random.lognormal(math.log(median), sigma))
        return pause_s if self._shape.max_pause_s is None else min(pause_s, self._shape.max_pause_s)

    def _request(self, t: float, context: _Context, think_s: float, last: bool) -> _Request:
        output = max(1, round(min(8_000.0, self._lognormal(OUTPUT_TOKENS, OUTPUT_SPREAD))))
        return _Request(
            t=round(t, 3),
            type="s",
            model=MODEL,
            prompt_tokens=context.tokens,
            output_tokens=output,
            hash_ids=context.path,
            stop="end_turn" if last else "tool_use",
            api_time=round(FIRST_TOKEN_S + TOKEN_S * output, 3),
            think_time=round(think_s, 3),
        )

    def record(self) -> _Record:
        shape = self._shape
        system, tools = self._scaled(SYSTEM_TOKENS), self._scaled(TOOL_TOKENS)
        kept = self.new_blocks((system + tools) // BLOCK_TOKENS)
        context = self._first_context(kept, system + tools, FIRST_MESSAGE_TOKENS)
        limit = self._scaled(float(self._random.uniform(*LIMIT_TOKENS)))
        entries: list[_Request | _Subagent] = []
        steps = self._steps(shape.steps)
        t = pause_s = 0.0
        for number in range(steps):
            request = self._request(t, context, pause_s, number == steps - 1)
            entries.append(request)
            if number == steps - 1:
                break
            ready_s = request.end_s
            pause_s = self._pause_s(bool(self._random.random() < USER_TURNS))
            if self._random.random() < SPAWNS:
                group = self._group(ready_s)
                entries += group
                if self._random.random() >= BACKGROUND:
                    ready_s = max(sub.t + sub.requests[-1].end_s for sub in group)
            t = ready_s + pause_s
            added = request.output_tokens + round(self._added(ADDED_TOKENS))
            if context.tokens + added > limit:
                context = self._first_context(kept, system + tools, COMPACTED_TOKENS)
            else:
                context.grow(added)
        entries.sort(key=lambda entry: entry.t)
        return _Record(
            id=f"synthetic_{shape.seed}_{self._number:04d}",
            models=[MODEL],
            block_size=BLOCK_TOKENS,
            hash_id_scope="local",
            tool_tokens=tools,
            system_tokens=system,
            requests=entries,
        )

    def _first_context(self, kept: list[int], kept_tokens: int, mean: float) -> _Context:
        # Drawn within a factor of two, so that a compacted context is well below the limit.
        tokens = self._scaled(mean * float(self._random.uniform(0.5, 1.5)))
        return _Context(self, kept, kept_tokens + tokens)

    def _added(self, mean: float) -> float:
        """What a tool or the user adds, tokens: 20 at least, no more than a tool's output may have."""
        return min(30_000.0, 20.0 + self._lognormal(mean, ADDED_SPREAD))

    def _group(self, ready_s: float) -> list[_Subagent]:
        kind = SUBAGENT_TYPES[int(self._random.integers(len(SUBAGENT_TYPES)))]
        group = []
        for _ in range(int(self._random.integers(1, LARGEST_GROUP + 1))):
            ready_s += float(self._random.uniform(0.1, 1.0))
            group.append(self._subagent(kind, ready_s))
        return group

    def _subagent(self, kind: str, spawn_s: float) -> _Subagent:
        prefix = self._scaled(SUBAGENT_PREFIX_TOKENS) // BLOCK_TOKENS
        if kind not in self._type_paths:
            self._type_paths[kind] = self.new_blocks(prefix)
        first = round(prefix * BLOCK_TOKENS / SUBAGENT_SHARED)
        context = _Context(self, self._type_paths[kind], first)
        requests: list[_Request] = []
        steps = self._steps(max(2.0, self._shape.steps * SUBAGENT_STEPS))
        limit = self._scaled(LIMIT_TOKENS[0])
        t = pause_s = 0.0
        for number in range(steps):
            request = self._request(t, context, pause_s, number == steps - 1)
            requests.append(request)
            # A sub-agent's tools answer at once: nobody is asked.
            pause_s = min(self._pause_s(user=False), 30.0)
            t = request.end_s + pause_s
            added = request.output_tokens + round(self._added(SUBAGENT_ADDED_TOKENS))
            context.grow(min(added, max(0, limit - context.tokens)))
        self._agents += 1
        return _Subagent(
            t=round(spawn_s, 3),
            type="subagent",
            agent_id=f"agent_{self._agents:03d}",
            subagent_type=kind,
            duration_ms=round(1000 * requests[-1].end_s),
            status="completed",
            requests=requests,
        )


def sessions(shape: Shape) -> Iterator[bytes]:
    """The trace's records, one JSON text each."""
    for number in range(shape.sessions):
        yield msgspec.json.encode(_Session(shape, number).record())


def write_trace(path: str, shape: Shape) -> None:
    """Write a trace as .jsonl, .gz or .xz. Raises GenerateError; then nothing is written."""
    target = Path(path)
    if target.suffix not in (".jsonl", ".gz", ".xz"):
        raise GenerateError(f"{path}: must end in .jsonl, .jsonl.gz or .jsonl.xz")
    try:
        with whole_file(target) as raw, _compressed(raw, target.suffix) as file:
            for text in sessions(shape):
                file.write(text + b"\n")
    except OSError as error:
        raise GenerateError(f"{path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def _compressed(raw: BinaryIO, suffix: str) -> Iterator[BinaryIO]:
    if suffix == ".gz":
        # No name and no time in the archive, so that equal traces are equal files.
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
            yield cast(BinaryIO, file)
    elif suffix == ".xz":
        with lzma.open(raw, "wb") as file:
            yield cast(BinaryIO, file)
    else:
        yield raw
