"""The branch table S: version and path of every active branch (Algorithm E.1).

Rules that hold here
- A branch is known from its first request until it ends or has been idle for too long; nothing but a request
  makes one. Its path is that of its last request.
- A request that extends the path keeps the version; any other path, a shorter one too, is a rewrite and gives
  the next version. Hashes are chained, so two paths share exactly their common prefix and nothing after it.
- A request names its path relative to the branch's last one. When that is not what this table has, the path
  is unknown: the branch then has an empty path until a request brings the whole one.
- A placement older than what the branch last did in that phase, seen before, or of an unknown branch changes
  nothing; nor does a request that is older than the branch's end.
- No I/O and no clock: `now` and `t` are cluster seconds, and 0 where a sender gave none.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from services.directory.paths import EMPTY_PATH, NO_TIP, PathStore, Tip, common_pages
from shared.messages import BranchEnded, BranchPlaced, BranchRequest, PageArray, Phase, unpack_pages

MAX_ENDED = 256  # ends remembered, so that a late request does not bring a branch back


class Change(StrEnum):
    """What a request did to its branch."""

    NEW = "new"  # its first request: new, forked or sub-agent branch
    APPENDED = "appended"  # the path grew, or stayed
    REWRITTEN = "rewritten"  # by compaction, say: the version grew
    UNKNOWN = "unknown"  # the kept part is not known here: the whole path is wanted
    STALE = "stale"  # older than the branch's end: nothing changed


class Step(NamedTuple):
    """Output of Algorithm E.1: version v, previous path, pages that previous and new path share."""

    change: Change
    version: int
    old: PageArray
    common: int


class Branch:
    """One entry of S. `path` is int64[pages], page hashes, and `tip` its end among the stored paths; times are
    cluster seconds."""

    __slots__ = ("last_t", "name", "path", "placed", "request_t", "tip", "version")

    def __init__(
        self,
        name: str,
        version: int = 1,
        path: PageArray = EMPTY_PATH,
        tip: Tip = NO_TIP,
        last_t: float = 0.0,
        request_t: float = 0.0,
        placed: dict[Phase, tuple[float, str]] | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.path = path
        self.tip = tip
        self.last_t = last_t  # last sign of life
        self.request_t = request_t  # last request
        self.placed = placed if placed is not None else {}  # last placement in each phase: time, node


class BranchTable:
    """All active branches, the longest idle first."""

    def __init__(self) -> None:
        self._branches: dict[str, Branch] = {}
        self.paths = PathStore()
        self.ended: dict[str, float] = {}  # newest ends, oldest first

    def __len__(self) -> int:
        return len(self._branches)

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._branches.values())

    def get(self, name: str) -> Branch | None:
        return self._branches.get(name)

    def path(self, name: str) -> PageArray:
        """The branch's path, empty when it is unknown."""
        branch = self._branches.get(name)
        return EMPTY_PATH if branch is None else branch.path

    def restore(self, branches: list[Branch], ended: dict[str, float]) -> None:
        """Replace everything by what was saved."""
        self._branches = {b.name: b for b in sorted(branches, key=lambda b: b.last_t)}
        self.ended = dict(ended)

    def request(self, message: BranchRequest, now: float) -> Step:
        """Algorithm E.1 for one request. Raises ValueError when its page list is no list of pages."""
        pages = unpack_pages(message.pages)
        branch = self._branches.get(message.branch)
        if branch is None and 0.0 < message.t <= self.ended.get(message.branch, 0.0):
            return Step(Change.STALE, 0, EMPTY_PATH, 0)
        old = EMPTY_PATH if branch is None else branch.path
        base = message.base
        if base < 0 or base > old.size or (base and int(old[base - 1]) != message.base_page):
            if branch is None:
                return Step(Change.UNKNOWN, 0, EMPTY_PATH, 0)
            if old.size:
                branch.version += 1
                self._set_path(branch, EMPTY_PATH, 0)
            self._touch(branch, message.t, now)
            branch.request_t = max(branch.request_t, message.t)
            return Step(Change.UNKNOWN, branch.version, old, 0)
        common = base + common_pages(old[base:], pages)
        if branch is None:
            change = Change.NEW
            branch = self._branches[message.branch] = Branch(message.branch)
            self.ended.pop(message.branch, None)
        elif common < old.size:
            change = Change.REWRITTEN
            branch.version += 1
        else:
            change = Change.APPENDED
        if common < old.size or base + pages.size > old.size:
            self._set_path(branch, np.concatenate((old[:base], pages)) if base else pages, common)
        branch.request_t = max(branch.request_t, message.t)
        self._touch(branch, message.t, now)
        return Step(change, branch.version, old, common)

    def place(self, message: BranchPlaced, now: float) -> bool:
        """Whether the placement is the branch's newest in its phase, and so to be counted."""
        branch = self._branches.get(message.branch)
        if branch is None:
            return False
        last_t, last_node = branch.placed.get(message.phase, (0.0, ""))
        if message.t > 0.0:
            if message.t < max(last_t, branch.request_t):
                return False
            if message.t == last_t and message.node == last_node:
                return False
        branch.placed[message.phase] = (message.t, message.node)
        self._touch(branch, message.t, now)
        return True

    def end(self, message: BranchEnded) -> Branch | None:
        """Remove the branch from S and return it; None when it is not in S (any more)."""
        branch = self._branches.get(message.branch)
        if branch is not None and 0.0 < message.t < branch.request_t:
            return None  # the branch was opened again since
        if message.t > 0.0:
            self.ended.pop(message.branch, None)
            self.ended[message.branch] = message.t
            if len(self.ended) > MAX_ENDED:
                del self.ended[next(iter(self.ended))]
        if branch is not None:
            self._remove(branch)
        return branch

    def expire(self, before: float) -> list[Branch]:
        """Remove and return the branches whose last sign of life came before that time."""
        gone: list[Branch] = []
        for branch in self._branches.values():
            if branch.last_t >= before:
                break
            gone.append(branch)
        for branch in gone:
            self._remove(branch)
        return gone

    def _remove(self, branch: Branch) -> None:
        """Take it out of S; its `path` stays, for what follows from its end."""
        del self._branches[branch.name]
        self.paths.release(branch.tip)
        branch.tip = NO_TIP

    def _set_path(self, branch: Branch, path: PageArray, common: int) -> None:
        branch.tip = self.paths.move(branch.tip, path, common)
        branch.path = path

    def _touch(self, branch: Branch, t: float, now: float) -> None:
        # A sender's clock that runs ahead must not keep its branches for ever.
        branch.last_t = max(branch.last_t, min(t, now) if t > 0.0 else now)
        del self._branches[branch.name]
        self._branches[branch.name] = branch
