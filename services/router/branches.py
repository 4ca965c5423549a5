"""What the router tells the directory about branches, and the list of live branches that it serves to people.

Rules that hold here
- A request's path is published as what differs from the branch's last published path, with the hash of the
  last kept page as proof of the kept part; whole when the directory asked for it (`PathWanted`).
- Other routers' messages move what is known of a branch's path here, as they do in the directory: a client may
  go to another router at any request. Only branches that this router serves are in its list.
- No I/O and no clock; bounded: beyond `limit` branches, or `max_pages` of paths, the least recently used one is
  forgotten (its next request is published whole).
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np

from shared.messages import BranchRequest, PageArray, PageListError, pack_pages, unpack_pages

_NO_PATH: PageArray = np.empty(0, dtype=np.int64)


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
    """Length of the longest common prefix of two paths. Names are chained, so halving finds it."""
    low, high = 0, min(a.size, b.size)
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class _Path(msgspec.Struct, eq=False):
    pages: PageArray
    t: float  # of the last request


class Branches:
    def __init__(self, limit: int = 50_000, max_pages: int = 2**25) -> None:
        self._limit, self._max_pages = limit, max_pages
        self._views: OrderedDict[str, BranchView] = OrderedDict()
        self._paths: OrderedDict[str, _Path] = OrderedDict()  # as last published by any router
        self._pages = 0  # of all paths

    def request(
        self, branch: str, parent: str | None, tagged: bool, path: PageArray, now: float
    ) -> BranchRequest:
        """Note a request and return what to publish of it."""
        known = self._paths.get(branch)
        base = common_pages(known.pages, path) if known is not None else 0
        view = self._views.get(branch)
        if view is None:
            view = self._views[branch] = BranchView(branch, parent, tagged, 0, 0, now)
        view.requests += 1
        view.pages, view.last_t = path.size, now
        self._views.move_to_end(branch)
        while len(self._views) > self._limit:
            self.forget(next(iter(self._views)))
        self._keep(branch, path, now)
        return BranchRequest(
            branch=branch,
            base=base,
            base_page=int(path[base - 1]) if base else 0,
            pages=pack_pages(path[base:]),
            parent=parent,
            t=now,
        )

    def observed(self, message: BranchRequest, now: float) -> PageArray | None:
        """The branch's path after another router's request of it.

        None when the message builds on a path that is not known here: then nothing is known of the branch, and its
        next request is published whole.
        """
        known = self._paths.get(message.branch)
        old = known.pages if known is not None else _NO_PATH
        base = message.base
        try:
            pages = unpack_pages(message.pages)
        except PageListError:
            return None
        if not 0 <= base <= old.size or (base and int(old[base - 1]) != message.base_page):
            self.path_wanted(message.branch)
            return None
        if base == old.size and pages.size == 0:
            path = old
        else:
            path = np.concatenate((old[:base], pages))
        self._keep(message.branch, path, now)
        return path

    def expire(self, before: float) -> None:
        """Forget branches whose last request came before that time."""
        while self._views:
            oldest = next(iter(self._views.values()))
            if oldest.last_t >= before:
                break
            del self._views[oldest.branch]
        while self._paths:
            branch, path = next(iter(self._paths.items()))
            if path.t >= before:
                break
            self.path_wanted(branch)

    def path_wanted(self, branch: str) -> None:
        """The next request of the branch is published whole."""
        known = self._paths.pop(branch, None)
        if known is not None:
            self._pages -= known.pages.size

    def forget(self, branch: str) -> bool:
        """Whether the branch was known."""
        self.path_wanted(branch)
        return self._views.pop(branch, None) is not None

    def get(self, branch: str) -> BranchView | None:
        return self._views.get(branch)

    def list(self) -> list[BranchView]:
        return list(self._views.values())

    def _keep(self, branch: str, path: PageArray, now: float) -> None:
        self.path_wanted(branch)
        self._paths[branch] = _Path(path, now)
        self._pages += path.size
        while len(self._paths) > self._limit or (self._pages > self._max_pages and len(self._paths) > 1):
            self.path_wanted(next(iter(self._paths)))
