"""Keeps a `KvIndex` equal to what the nodes hold, from their `kv:<node>` streams.

Rules that hold here
- A node's pages are in the index only while every event since a known state has been applied. After a gap, or
  at a first event that is not number 1, they are unknown: taken out of the index until a snapshot comes.
- A new incarnation whose first event is seen starts empty, so it needs no snapshot.
- A snapshot says after which event it was taken; events that came meanwhile are kept (bounded) and applied
  after it, older ones are dropped. So a snapshot may be taken while events go on.
- An event of an incarnation that was replaced changes nothing.
- A message whose page list cannot be read counts as missing.
- No I/O: `feed` says when a snapshot is wanted, the caller fetches it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from shared.kvindex import KvIndex
from shared.messages import (
    KvSnapshot,
    PageArray,
    PageListError,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    StreamMessage,
    Tier,
    unpack_pages,
)
from shared.streams import Event

KV_STREAM = "kv:"
MAX_BUFFERED = 20_000  # events kept while a snapshot is on its way; more means another snapshot

PagesCall = Callable[[str, PageArray], None]


class Follow(Enum):
    OK = "ok"
    WANT_SNAPSHOT = "want_snapshot"


class _Node:
    def __init__(self) -> None:
        self.incarnation = ""
        self.next_seq = 1
        self.synced = False
        self.replaced: deque[str] = deque(maxlen=8)  # incarnations that are over
        self.buffer: deque[Event] = deque()


class KvFollower:
    """`stored(node)` is told that a node may hold more than before, `gone(node, pages)` which pages it does not hold
    in any tier any more, `reset(node)` that its pages are unknown or known anew (ask the index)."""

    def __init__(
        self,
        index: KvIndex,
        *,
        stored: Callable[[str], None] | None = None,
        gone: PagesCall | None = None,
        reset: Callable[[str], None] | None = None,
    ) -> None:
        self.index = index
        self._stored, self._gone, self._reset = stored, gone, reset
        self._nodes: dict[str, _Node] = {}

    def feed(self, event: Event) -> Follow:
        """Apply one event of a `kv:<node>` stream. WANT_SNAPSHOT once, when the node's pages become unknown."""
        name = event.stream.removeprefix(KV_STREAM)
        node = self._nodes.setdefault(name, _Node())
        if event.producer in node.replaced:
            return Follow.OK
        if event.producer != node.incarnation and event.seq == 1:
            self._start(name, node, event.producer)
        if node.synced and event.producer == node.incarnation:
            if event.seq < node.next_seq:
                return Follow.OK
            if event.seq == node.next_seq and self._apply(name, node, event.message):
                return Follow.OK
        was_waiting = bool(node.buffer)
        if node.synced:
            self._unknown(name, node)
        if len(node.buffer) >= MAX_BUFFERED:
            node.buffer.popleft()
        node.buffer.append(event)
        return Follow.OK if was_waiting else Follow.WANT_SNAPSHOT

    def snapshot(self, name: str, snapshot: KvSnapshot) -> bool:
        """Take a node's pages from its snapshot. False when events after it were missed: fetch another."""
        node = self._nodes.setdefault(name, _Node())
        if snapshot.incarnation in node.replaced:
            return False
        if node.synced and node.incarnation == snapshot.incarnation and snapshot.seq < node.next_seq:
            return True
        if node.incarnation and node.incarnation != snapshot.incarnation:
            node.replaced.append(node.incarnation)
        node.incarnation, node.next_seq, node.synced = snapshot.incarnation, snapshot.seq + 1, True
        self.index.clear(name)
        self.index.store(name, Tier.L1, unpack_pages(snapshot.l1))
        self.index.store(name, Tier.L2, unpack_pages(snapshot.l2))
        waiting, node.buffer = node.buffer, deque()
        if self._reset is not None:
            self._reset(name)
        wanted = False
        for event in waiting:
            if event.producer == node.incarnation or event.seq == 1:
                wanted = self.feed(event) is Follow.WANT_SNAPSHOT or wanted
        return not wanted

    def lost(self, name: str) -> None:
        """The node is gone for good, with its pages."""
        self._nodes.pop(name, None)
        self.index.drop_node(name)
        if self._reset is not None:
            self._reset(name)

    def synced(self, name: str) -> bool:
        """Whether the node's pages are known."""
        node = self._nodes.get(name)
        return node is not None and node.synced

    def unsynced(self) -> list[str]:
        """Nodes whose pages are unknown."""
        return [name for name, node in self._nodes.items() if not node.synced]

    def _start(self, name: str, node: _Node, incarnation: str) -> None:
        if node.incarnation:
            node.replaced.append(node.incarnation)
        node.incarnation, node.next_seq, node.synced = incarnation, 1, True
        node.buffer.clear()
        self.index.clear(name)
        if self._reset is not None:
            self._reset(name)

    def _unknown(self, name: str, node: _Node) -> None:
        node.synced = False
        self.index.clear(name)
        if self._reset is not None:
            self._reset(name)

    def _apply(self, name: str, node: _Node, message: StreamMessage) -> bool:
        """Apply the next message; False when its page list is none: it then counts as one that is missing."""
        try:
            if isinstance(message, PagesStored):
                self.index.store(name, message.tier, unpack_pages(message.pages))
                if self._stored is not None:
                    self._stored(name)
            elif isinstance(message, PagesRemoved):
                self._tell_gone(name, self.index.remove(name, message.tier, unpack_pages(message.pages)))
            elif isinstance(message, PagesCleared):
                self._tell_gone(name, self.index.clear(name, message.tier))
        except PageListError:
            return False
        node.next_seq += 1
        return True

    def _tell_gone(self, name: str, pages: PageArray) -> None:
        if self._gone is not None and pages.size:
            self._gone(name, pages)
