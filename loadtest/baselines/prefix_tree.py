"""The tree of past requests by node that cache-aware routing keeps (`tree.rs` of SGLang Model Gateway 0.3.2).

Rules that hold here
- A segment is a run of pages that begin no other branch. It lists the nodes that were sent its pages, in the order
  in which they came, and every ancestor lists them too. A segment without nodes is gone.
- A page is in the tree only with all pages before it, so the longest match of a path is found by bisection, and what
  is done with a path costs Python work by segment, not by page.
- Only the segment in which a request's path ends gets its time stamp; a node that is added to segments before it
  gets 0 there. Eviction takes a node from its least recently stamped leaf, then the leaf's parent may be one.
- It is approximate: it knows what was sent to a node, not what the node still holds.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from itertools import repeat

from shared.messages import PageArray


class _Segment:
    __slots__ = ("children", "end", "pages", "parent", "stamps")

    def __init__(self, parent: _Segment | None, pages: list[int], end: int, stamps: dict[str, int]) -> None:
        self.parent = parent
        self.pages = pages
        self.end = end  # pages from the root to the segment's end
        self.stamps = stamps  # node -> time stamp
        self.children: dict[_Segment, None] = {}

    def leaf_of(self, node: str) -> bool:
        return node in self.stamps and not any(node in child.stamps for child in self.children)


class PrefixTree:
    def __init__(self) -> None:
        self._root = _Segment(None, [], 0, {})
        self._where: dict[int, _Segment] = {}  # page -> its segment
        self._pages: dict[str, int] = {}  # of each node
        self._stamp = 0

    def __len__(self) -> int:
        """Distinct pages."""
        return len(self._where)

    def pages(self, node: str) -> int:
        """How many pages the tree has for the node."""
        return self._pages.get(node, 0)

    def nodes(self) -> list[str]:
        """Nodes that the tree has something of."""
        return list(self._pages)

    def match(self, path: PageArray) -> tuple[int, Collection[str]]:
        """The most leading pages of the path that some node was sent, and the nodes that were sent all of these."""
        depth = self._leading(path)
        if not depth:
            return 0, ()
        return depth, self._where[path.item(depth - 1)].stamps.keys()

    def insert(self, path: PageArray, node: str, matched: int | None = None) -> None:
        """The node is sent this path. `matched`: its match, if known and nothing changed since."""
        if not len(path):
            return
        self._stamp += 1
        depth = self._leading(path) if matched is None else matched
        segment = self._where[path.item(depth - 1)] if depth else self._root
        if depth < segment.end:
            segment = self._split(segment, depth)
        if depth < len(path):
            fresh = path[depth:].tolist()
            leaf = _Segment(segment, fresh, len(path), {})
            segment.children[leaf] = None
            self._where.update(zip(fresh, repeat(leaf)))
            segment = leaf
        leaf = segment
        while segment.parent is not None and node not in segment.stamps:
            segment.stamps[node] = 0
            self._pages[node] = self._pages.get(node, 0) + len(segment.pages)
            segment = segment.parent
        leaf.stamps[node] = self._stamp

    def evict(self, node: str, most_pages: int) -> None:
        """Forget the node's least recently used leaves until it has at most so many pages."""
        if self.pages(node) <= most_pages:
            return
        leaves = [
            (segment.stamps[node], order, segment)
            for order, segment in enumerate(self._segments(node))
            if segment.leaf_of(node)
        ]
        heapify(leaves)
        order = len(self._where)  # above every order so far: ties never compare segments
        while self.pages(node) > most_pages:
            _, _, leaf = heappop(leaves)
            parent = self._forget(leaf, node)
            if parent.parent is not None and parent.leaf_of(node):
                order += 1
                heappush(leaves, (parent.stamps[node], order, parent))

    def drop(self, node: str) -> None:
        """Forget all about the node."""
        for segment in reversed(self._segments(node)):  # children before their parents
            self._forget(segment, node)

    # ------------------------------------------------------------------------- inside

    def _leading(self, path: PageArray) -> int:
        where, item = self._where, path.item
        low, high = 0, len(path)
        while low < high:
            middle = (low + high) // 2
            if item(middle) in where:
                low = middle + 1
            else:
                high = middle
        return low

    def _split(self, segment: _Segment, depth: int) -> _Segment:
        """Cut the segment in two at this depth; the first of them. The shorter one becomes a new object."""
        cut = depth - (segment.end - len(segment.pages))
        head, tail = segment.pages[:cut], segment.pages[cut:]
        parent = segment.parent
        assert parent is not None  # the root is never cut: it has no pages
        if len(head) <= len(tail):
            new = _Segment(parent, head, depth, dict(segment.stamps))
            del parent.children[segment]
            parent.children[new] = None
            new.children[segment] = None
            segment.parent, segment.pages = new, tail
            self._where.update(zip(head, repeat(new)))
            return new
        new = _Segment(segment, tail, segment.end, dict(segment.stamps))
        new.children = segment.children
        for child in new.children:
            child.parent = new
        segment.pages, segment.end, segment.children = head, depth, {new: None}
        self._where.update(zip(tail, repeat(new)))
        return segment

    def _segments(self, node: str) -> list[_Segment]:
        """The node's segments, parents before their children."""
        found, at = [self._root], 0
        while at < len(found):
            found += [child for child in found[at].children if node in child.stamps]
            at += 1
        return found[1:]

    def _forget(self, segment: _Segment, node: str) -> _Segment:
        """Take the node from a leaf of it; the leaf's parent."""
        del segment.stamps[node]
        left = self._pages[node] - len(segment.pages)
        if left:
            self._pages[node] = left
        else:
            del self._pages[node]
        parent = segment.parent
        assert parent is not None  # the root lists no nodes
        if not segment.stamps:
            del parent.children[segment]
            for page in segment.pages:
                del self._where[page]
        return parent
