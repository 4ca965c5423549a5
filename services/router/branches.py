"""What the router tells the directory about branches, and the list of live branches that it serves to people.

Rules that hold here
- A request's path is published as what differs from the branch's last published path, with the hash of the
  last kept page as proof of the kept part; whole when the directory asked for it (`PathWanted`).
- No I/O and no clock; bounded: beyond `limit` the least recently used branch is forgotten (its next request
  is published whole).
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np

from shared.messages import BranchRequest, PageArray, pack_pages


class BranchView(msgspec.Struct):
    """A branch as this router knows it; served by `GET /v1/branches`."""

    branch: str
    parent: str | None
    tagged: bool
    requests: int
    pages: int
    last_t: float
    prefill_node: str = ""
    decode_node: str = ""


def common_pages(a: PageArray, b: PageArray) -> int:
    """Length of the longest common prefix of two paths."""
    n = min(a.size, b.size)
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


class Branches:
    def __init__(self, limit: int = 50_000) -> None:
        self._limit = limit
        self._views: OrderedDict[str, BranchView] = OrderedDict()
        self._paths: dict[str, PageArray] = {}

    def request(
        self, branch: str, parent: str | None, tagged: bool, path: PageArray, now: float
    ) -> BranchRequest:
        """Note a request and return what to publish of it."""
        known = self._paths.get(branch)
        base = common_pages(known, path) if known is not None else 0
        view = self._views.get(branch)
        if view is None:
            view = self._views[branch] = BranchView(branch, parent, tagged, 0, 0, now)
        view.requests += 1
        view.pages, view.last_t = path.size, now
        self._paths[branch] = path
        self._views.move_to_end(branch)
        while len(self._views) > self._limit:
            self.forget(next(iter(self._views)))
        return BranchRequest(
            branch=branch,
            base=base,
            base_page=int(path[base - 1]) if base else 0,
            pages=pack_pages(path[base:]),
            parent=parent,
            t=now,
        )

    def expire(self, before: float) -> None:
        """Forget branches whose last request came before that time."""
        while self._views:
            oldest = next(iter(self._views.values()))
            if oldest.last_t >= before:
                return
            self.forget(oldest.branch)

    def path_wanted(self, branch: str) -> None:
        """The next request of the branch is published whole."""
        self._paths.pop(branch, None)

    def forget(self, branch: str) -> bool:
        """Whether the branch was known."""
        self._paths.pop(branch, None)
        return self._views.pop(branch, None) is not None

    def get(self, branch: str) -> BranchView | None:
        return self._views.get(branch)

    def list(self) -> list[BranchView]:
        return list(self._views.values())
