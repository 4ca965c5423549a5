"""Agent traces in one form, whatever they were recorded in (the files' formats are read by `formats.py`).

Rules that hold here
- A session is one agent's run: a main branch and its sub-agents' branches, each a sequence of steps. A step is
  one request. Step k + 1 of a branch follows step k.
- A prompt is a path of blocks of `block_size` tokens, named by ids: within a session (scope "local") or within
  the trace (scope "shared") equal ids mean equal tokens. The tokens after the last full block, the tail, begin
  a block too: the one that the next prompt has there when it goes on from this prompt, else one of their own.
- A sub-agent starts after the last step of its parent that began before it was spawned. A step waits for the
  step before it and for every sub-agent of its branch that had ended when it was sent; other sub-agents run
  beside it.
- A step's pause is its recorded start less the recorded end of what it waited for, never negative. A request
  recorded without a duration ended when it started.
- Times are seconds of the recording.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int64]
Scope = Literal["local", "shared"]
InnerT = Literal["spawn", "session"]

# Recorded starts are often rounded to whole seconds: a sub-agent that ended within this of a step had ended.
ROUNDING_S = 0.5
# How many steps back a prompt is looked for that a step goes on from: side requests come in between.
LOOK_BACK_STEPS = 8


class TraceError(Exception):
    """A file that cannot be played; the text is one line: file, line, what was wrong."""


class StepRef(NamedTuple):
    branch: int
    step: int


class Step(msgspec.Struct, frozen=True):
    """One request.

    prompt_tokens, output_tokens: at least 1.
    shared: leading full blocks equal to those of the branch's previous step.
    fresh: ids of the full blocks after these.
    tail: id of the block that the last prompt_tokens % block_size tokens begin; of no use when that is 0.
    continues: the branch's earlier step whose prompt this one goes on from, -1 for none.
    after: steps that must have ended.
    pause_s: seconds from the end of the last of them (of none: from the session's start) to the start.
    """

    prompt_tokens: int
    output_tokens: int
    shared: int
    fresh: IdArray
    tail: int
    continues: int
    after: tuple[StepRef, ...]
    pause_s: float


class Branch(msgspec.Struct, frozen=True):
    """One context. `parent` is the index of the branch that spawned it, -1 for the main branch."""

    key: str
    parent: int
    steps: list[Step]

    def paths(self) -> Iterator[IdArray]:
        """The full blocks' ids of each step's prompt, in step order."""
        path = np.empty(0, dtype=np.int64)
        for step in self.steps:
            path = np.concatenate((path[: step.shared], step.fresh))
            yield path


class Session(msgspec.Struct, frozen=True):
    id: str
    block_size: int
    scope: Scope
    branches: list[Branch]

    @property
    def requests(self) -> int:
        return sum(len(branch.steps) for branch in self.branches)


class Trace(msgspec.Struct, frozen=True):
    path: str
    format: str
    sessions: list[Session]

    @property
    def requests(self) -> int:
        return sum(session.requests for session in self.sessions)


class Recorded(msgspec.Struct):
    """One request as recorded: what `build_branch` needs of any format."""

    start_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: IdArray  # full blocks; one more when the format names the partial last block


class Spawned(NamedTuple):
    """A sub-agent as its parent sees it: the parent's step that it follows (-1 for none), its last step, and
    when that ended."""

    follows: int
    last: StepRef
    end_s: float


def build_branch(
    key: str,
    index: int,
    parent: int,
    records: Sequence[Recorded],
    *,
    block_size: int,
    spawned_after: tuple[StepRef, ...] = (),
    spawned_after_s: float = 0.0,
    subagents: Sequence[Spawned] = (),
    least_blocks: int = 1,
) -> Branch:
    """The branch `index` of a session from its requests in order of their starts.

    spawned_after: what its first step waits for, which ended at `spawned_after_s`. subagents: of this branch.
    least_blocks: a prompt of fewer full blocks is taken for no beginning of a later one.
    """
    full = [record.prompt_tokens // block_size for record in records]
    paths = [record.block_ids[:blocks] for record, blocks in zip(records, full, strict=True)]
    tails = _tails(index, records, paths, least_blocks)
    running = list(subagents)
    steps: list[Step] = []
    previous = np.empty(0, dtype=np.int64)
    for i, (record, path) in enumerate(zip(records, paths, strict=True)):
        after = [StepRef(index, i - 1)] if i else list(spawned_after)
        ready_s = records[i - 1].end_s if i else spawned_after_s
        # One that this very step spawned may seem to have ended with it: it cannot be waited for.
        ended = [sub for sub in running if sub.follows < i and sub.end_s <= record.start_s + ROUNDING_S]
        for sub in ended:
            running.remove(sub)
            after.append(sub.last)
            ready_s = max(ready_s, sub.end_s)
        shared = common_blocks(previous, path)
        steps.append(
            Step(
                prompt_tokens=record.prompt_tokens,
                output_tokens=max(1, record.output_tokens),
                shared=shared,
                fresh=path[shared:].copy(),
                tail=tails[i],
                continues=_continued(records, paths, i, least_blocks),
                after=tuple(after),
                pause_s=max(0.0, record.start_s - ready_s),
            )
        )
        previous = path
    return Branch(key=key, parent=parent, steps=steps)


def common_blocks(a: IdArray, b: IdArray) -> int:
    """Leading blocks that two paths share."""
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def _goes_on(
    records: Sequence[Recorded], paths: Sequence[IdArray], i: int, j: int, least_blocks: int
) -> bool:
    """Whether prompt j begins with all of prompt i, as far as blocks tell."""
    n = paths[i].size
    return (
        n >= least_blocks
        and records[j].prompt_tokens >= records[i].prompt_tokens
        and paths[j].size >= n
        and bool(np.array_equal(paths[j][:n], paths[i]))
    )


def _continued(records: Sequence[Recorded], paths: Sequence[IdArray], i: int, least_blocks: int) -> int:
    """Of the earlier prompts that prompt i begins with the one of most blocks, of these the latest; or -1."""
    earlier = range(max(0, i - LOOK_BACK_STEPS), i)
    begins = [j for j in earlier if _goes_on(records, paths, j, i, least_blocks)]
    return max(begins, key=lambda j: (paths[j].size, j), default=-1)


def _tails(
    index: int, records: Sequence[Recorded], paths: Sequence[IdArray], least_blocks: int
) -> dict[int, int]:
    """The id of the block that each prompt's tail begins. Ids made up here are negative."""
    tails: dict[int, int] = {}
    for i in range(len(records) - 1, -1, -1):
        n = paths[i].size
        own = records[i].block_ids
        tails[i] = int(own[n]) if own.size > n else -1 - (index << 32) - i
        for j in range(i + 1, min(len(records), i + 1 + LOOK_BACK_STEPS)):
            if _goes_on(records, paths, i, j, least_blocks):
                tails[i] = int(paths[j][n]) if paths[j].size > n else tails[j]
                break
    return tails
