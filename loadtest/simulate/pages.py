"""Names for the pages of a trace's prompts and outputs: whole numbers from 0 on, given out as they are needed.

Rules that hold here
- A page is named by its own tokens and all before it, as a chained hash names it: equal beginnings have equal
  names, everything else differs. The trace says what is equal, by its block ids; no token is ever made.
- Sessions of scope "local" share nothing, a session that is played twice included; those of scope "shared" share
  what their ids say.
- The first prompt that goes on from a step carries that step's output, as an agent's does: the output's full
  pages have its names. What no prompt carries has names of its own.
- A block is whole pages, or a page whole blocks.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import numpy as np

from loadtest.traces import LOOK_BACK_STEPS, Branch, Session, TraceError
from shared.messages import PageArray

_NONE: PageArray = np.empty(0, dtype=np.int64)
_ROOT = -1


class StepPages(NamedTuple):
    """`prompt`: the prompt's full pages. `context`: those of prompt and output together, the prompt's first."""

    prompt: PageArray
    context: PageArray


class Table(Protocol):
    """What has a row for every name."""

    def grow(self, room: int) -> None:
        """There may be so many names from now on."""


class PageNames:
    """Gives out names, all below `room`; `count` is the next one."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.count = 0
        self.room = 1024
        self.tables: weakref.WeakSet[Table] = weakref.WeakSet()  # that grow with the names
        self._shared: dict[tuple[int, object], int] = {}

    def play(self, session: Session) -> SessionPages:
        """The pages of one more playing of the session. Raises TraceError for blocks that do not fit pages."""
        block, page = session.block_size, self.page_size
        if block % page and page % block:
            raise TraceError(
                f"session {session.id}: blocks of {block} tokens and pages of {page} do not divide each other"
            )
        return SessionPages(self, session, self._shared if session.scope == "shared" else {})

    def take(self, count: int) -> int:
        """The first of so many new names."""
        first = self.count
        self.count += count
        if self.count > self.room:
            self.room = max(2 * self.room, self.count)
            for table in self.tables:
                table.grow(self.room)
        return first


class SessionPages:
    def __init__(self, names: PageNames, session: Session, children: dict[tuple[int, object], int]) -> None:
        self._names, self._session, self._children = names, session, children
        self._branches: dict[int, _BranchPages] = {}

    def step(self, branch: int, step: int) -> StepPages:
        """Pages of a step; the steps of a branch are asked for in their order."""
        pages = self._branches.get(branch)
        if pages is None:
            branches = self._session.branches
            pages = self._branches[branch] = _BranchPages(
                self._names, branches[branch], self._session.block_size, self._children
            )
        return pages.step(step)

    def forget(self, branch: int) -> None:
        """The branch has ended."""
        self._branches.pop(branch, None)


class _BranchPages:
    def __init__(
        self, names: PageNames, branch: Branch, block_size: int, children: dict[tuple[int, object], int]
    ) -> None:
        self._names, self._branch, self._children = names, branch, children
        self._block = block_size
        self._made = 0  # steps whose path was made
        self._paths: dict[int, PageArray] = {}
        self._blocks: PageArray = _NONE  # ids of the latest path
        self._begun: dict[int, int] = {}  # step -> the first later one that goes on from it
        for number, step in enumerate(branch.steps):
            if step.continues >= 0:
                self._begun.setdefault(step.continues, number)

    def step(self, number: int) -> StepPages:
        step, size = self._branch.steps[number], self._names.page_size
        prompt = self._path(number)
        last = (step.prompt_tokens + step.output_tokens) // size
        context = prompt
        if last > prompt.size:
            later = self._begun.get(number)
            carried = self._path(later)[prompt.size : last] if later is not None else _NONE
            own = last - prompt.size - carried.size
            first = self._names.take(own)
            context = np.concatenate((prompt, carried, np.arange(first, first + own)))
        for old in [made for made in self._paths if made < number - LOOK_BACK_STEPS]:
            del self._paths[old]
        return StepPages(prompt, context)

    def _path(self, number: int) -> PageArray:
        while self._made <= number:
            self._paths[self._made] = self._next()
            self._made += 1
        return self._paths[number]

    def _next(self) -> PageArray:
        step, size, block = self._branch.steps[self._made], self._names.page_size, self._block
        before = self._paths[self._made - 1] if self._made else _NONE
        kept = min(step.shared * block // size, before.size)
        pages = before[:kept].tolist()
        parent = pages[-1] if pages else _ROOT
        if block >= size:
            each = block // size
            ids = step.fresh.tolist()
            full = step.prompt_tokens // size
            if full > kept + len(ids) * each:  # full pages of a block that is not full
                ids.append(step.tail)
            for block_id in ids:
                first = self._child(parent, block_id, each)
                pages.extend(range(first, first + each))
                parent = first + each - 1
            del pages[full:]
        else:
            each = size // block
            self._blocks = np.concatenate((self._blocks[: step.shared], step.fresh))
            for at in range(kept * each, self._blocks.size - each + 1, each):
                parent = self._child(parent, self._blocks[at : at + each].tobytes(), 1)
                pages.append(parent)
        return np.array(pages, dtype=np.int64)

    def _child(self, parent: int, key: object, pages: int) -> int:
        first = self._children.get((parent, key))
        if first is None:
            first = self._children[parent, key] = self._names.take(pages)
        return first
