"""Which agent branch a request belongs to (paper, sections 4.3 and E.1).

Rules that hold here
- No I/O, no clock: `now` is an argument, in cluster seconds.
- A tagged request (`X-EI-Branch`) belongs to the branch it names, whatever its prompt.
- An untagged request continues the untagged branch whose whole last path its own path begins with (the longest
  one), as the next step of a conversation does. Any other starts a branch of its own: one that shares only a
  part of another's path is a fork or a new conversation.
- Inferred branches that are idle for `idle_s`, and the oldest beyond `limit`, are forgotten here; the
  directory ends them by its own idle time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from shared.messages import PageArray
from shared.openai import ApiError

BRANCH = "X-EI-Branch"
PARENT = "X-EI-Parent-Branch"
FINAL = "X-EI-Branch-Final"
MAX_ID_LENGTH = 256


class Identity(msgspec.Struct, frozen=True):
    branch: str
    parent: str | None = None
    final: bool = False  # the branch ends with this request
    tagged: bool = True


def check_branch_id(value: str, where: str) -> str:
    """The id, stripped. Raises ApiError 400 when it is empty, too long or not printable."""
    value = value.strip()
    if not value or len(value) > MAX_ID_LENGTH or not value.isprintable():
        raise ApiError(
            400, f"{where} must be 1 to {MAX_ID_LENGTH} printable characters.", param=where, code="bad_branch"
        )
    return value


class _Inferred(msgspec.Struct):
    branch: str
    tail: int
    last_t: float


class Identifier:
    """Names the branch of each request."""

    def __init__(self, prefix: str, idle_s: float = 7200.0, limit: int = 50_000) -> None:
        self._prefix, self._idle_s, self._limit = prefix, idle_s, limit
        self._made = 0
        self._by_branch: OrderedDict[str, _Inferred] = OrderedDict()  # least recently used first
        self._by_tail: dict[int, str] = {}  # last page of a branch's path -> branch

    def identify(self, headers: Mapping[str, str], path: PageArray, now: float) -> Identity:
        """Raises ApiError 400 for a header that is no branch id."""
        final = headers.get(FINAL, "").strip().lower() in ("1", "true", "yes")
        tagged = headers.get(BRANCH)
        if tagged is not None:
            parent = headers.get(PARENT)
            return Identity(
                check_branch_id(tagged, BRANCH),
                check_branch_id(parent, PARENT) if parent else None,
                final,
            )
        return Identity(self._infer(path, now), None, final, tagged=False)

    def end(self, branch: str) -> None:
        """The branch is over: no later request continues it."""
        known = self._by_branch.pop(branch, None)
        if known is not None and self._by_tail.get(known.tail) == branch:
            del self._by_tail[known.tail]

    def _infer(self, path: PageArray, now: float) -> str:
        self._expire(now)
        branch = None
        for page in reversed(path.tolist()):
            branch = self._by_tail.get(page)
            if branch is not None:
                break
        if branch is None:
            self._made += 1
            branch = f"{self._prefix}{self._made}"
        else:
            self.end(branch)
        if path.size:
            tail = int(path[-1])
            taken = self._by_tail.get(tail)
            if taken is not None:
                self.end(taken)
            self._by_branch[branch] = _Inferred(branch, tail, now)
            self._by_tail[tail] = branch
        return branch

    def _expire(self, now: float) -> None:
        while self._by_branch:
            oldest = next(iter(self._by_branch.values()))
            if len(self._by_branch) < self._limit and now - oldest.last_t <= self._idle_s:
                return
            self.end(oldest.branch)
