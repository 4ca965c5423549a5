"""One simulated node: the worker's own scheduler and cache, with transfers between the nodes' host memories.

Rules that hold here
- The node is brought up to now before anything is asked of it or told to it; what happened comes out as calls of
  `Listener`, in order.
- A fetch reads the pages that its peer holds when it begins, which stay pinned there until it ends or is given up. It
  takes its turn on both nodes' links, which each carry one transfer at a time in either direction. One whose peer is
  lost brings nothing.
- Loads in line with the prefill (`inline`): nothing waits for a fetch in the queue; what is restored or fetched delays
  the iteration instead, as the profile says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from loadtest.simulate.dense import DenseIndex
from loadtest.simulate.loop import Loop, Timer
from loadtest.simulate.pages import PageNames
from shared.messages import Iteration, NodeState, PageArray, Phase
from shared.timing import Profile
from worker.engines.simulated.phase import Ack, Kind
from worker.engines.simulated.requests import (
    FetchWanted,
    Launched,
    Moved,
    Prefilled,
    Progress,
    Request,
    Source,
    Stage,
    Started,
)
from worker.engines.simulated.scheduler import Scheduler
from worker.engines.simulated.transfers import TRANSFER_LATENCY_S
from worker.kv.cache import KvChange, NodeCache
from worker.kv.eviction import Eviction
from worker.kv.path import Path, Slots


class Listener(Protocol):
    """Who is told what a node does."""

    def started(self, node: SimNode, request: Request, t: float) -> None: ...

    def prefilled(self, node: SimNode, request: Request, t: float) -> None: ...

    def progressed(self, node: SimNode, request: Request, t: float, done: bool) -> None:
        """The request's first token is there, or its last."""

    def moved_out(self, node: SimNode, request: Request) -> None:
        """The node changes its phase and hands the request back."""

    def acked(self, node: SimNode, ack: Ack) -> None: ...

    def kv_changed(self, node: SimNode, changes: list[KvChange]) -> None: ...

    def iterated(self, node: SimNode, records: list[Iteration]) -> None: ...

    def changed(self, node: SimNode) -> None:
        """The node's state should be reported before long."""


class Link:
    """One direction of a node's network: when it is free again."""

    __slots__ = ("free_t",)

    def __init__(self) -> None:
        self.free_t = 0.0


class Fetch(NamedTuple):
    """A transfer under way: `cache`, the peer's, has the slots `lent` pinned for it. No peer: nothing will come."""

    timer: Timer
    peer: SimNode | None = None
    cache: NodeCache | None = None
    lent: Slots | None = None


def path_of(pages: PageArray) -> Path:
    """A path without keys: the names are unique."""
    return Path(pages, np.empty((pages.size, 0), dtype=np.uint8))


_NO_TAIL = path_of(np.empty(0, dtype=np.int64))


class SimNode:
    def __init__(
        self,
        name: str,
        profile: Profile,
        loop: Loop,
        names: PageNames,
        listener: Listener,
        *,
        eviction: Eviction,
        phase: Phase,
        inline: bool,
    ) -> None:
        self.name, self.profile = name, profile
        self._loop, self._names, self._listener = loop, names, listener
        self._eviction, self._inline = eviction, inline
        self.peers: Mapping[str, SimNode] = {}
        self.up = True
        self.fetches = self.fetched_pages = 0
        self._timer: Timer | None = None
        self._wake_t = float("inf")
        self._sent, self._received = Link(), Link()
        self._fetching: dict[Request, Fetch] = {}
        self.begin(phase, 0)

    def begin(self, phase: Phase, epoch: int) -> None:
        """Begin, or begin anew after `fail`, with an empty cache."""
        page = self.profile.page_size
        self.cache = NodeCache(
            self.profile.l1_tokens // page,
            self.profile.l2_tokens // page,
            eviction=self._eviction,
            index=lambda: DenseIndex(self._names),
            key_bytes=0,
        )
        self.scheduler = Scheduler(
            self.profile, self.cache, phase=phase, epoch=epoch, now=self._loop.now, write_at_end=True
        )
        self._begun: set[Request] = set()  # whose first token was told of
        self.up = True

    def fail(self) -> None:
        """The node is gone, with all that it had."""
        self.up = False
        for request in list(self._fetching):
            self._give_up_fetch(request)
        if self._timer is not None:
            self._timer.cancel()
        self._wake_t = float("inf")

    @property
    def phase(self) -> Phase:
        return self.scheduler.role.phase

    # ------------------------------------------------------------------------------ calls

    def prefill(self, rid: str, prompt: int, pages: PageArray, source: str | None, last: int) -> Request:
        """Compute the KV of a prompt; of its pages before `last`, `source` has what the node lacks."""
        request = Request(
            rid, Kind.PREFILL, prompt, path_of(pages), tail=_NO_TAIL, routed=True, keep=True,
            source=Source(source, last) if source else None,
        )  # fmt: skip
        self.scheduler.submit(request, self._loop.now)
        self.pump()
        return request

    def generate(
        self, rid: str, prompt: int, pages: PageArray, output: int, source: str | None, held: Request | None
    ) -> Request:
        """Produce an answer; `source` has the prompt's KV. `held`: what `reserve` returned for it."""
        request = Request(
            rid, Kind.GENERATE, prompt, path_of(pages), tail=_NO_TAIL, output=output, routed=True,
            source=Source(source, pages.size) if source else None,
        )  # fmt: skip
        if held is not None:
            request.lease, held.lease = held.lease, None
        self.scheduler.submit(request, self._loop.now)
        self.pump()
        return request

    def reserve(self, rid: str, prompt: int, pages: PageArray, output: int) -> Request | None:
        """Hold GPU memory for a request that will decode here; None while there is no room."""
        request = Request(rid, Kind.GENERATE, prompt, path_of(pages), output=output)
        page = self.profile.page_size
        self.scheduler.advance(self._loop.now)
        lease = self.cache.lease(pages[: prompt // page], -(-(prompt + output) // page))
        if lease is None:
            return None
        request.lease = lease
        self._listener.changed(self)
        return request

    def unreserve(self, held: Request) -> None:
        if held.lease is not None and self.up:
            self.scheduler.advance(self._loop.now)  # up to here without that room
            self.cache.release(held.lease)
            held.lease = None
            self.scheduler.advance(self._loop.now)
            self.pump()

    def let_go(self, request: Request) -> None:
        """Nobody needs the pages any more that a finished prefill keeps."""
        self.scheduler.let_go(request)

    def abort(self, request: Request) -> None:
        self._give_up_fetch(request)
        self._begun.discard(request)
        self.scheduler.abort(request, self._loop.now)
        self.pump()

    def set_role(self, epoch: int, phase: Phase) -> None:
        self.scheduler.set_role(epoch, phase, self._loop.now)
        self.pump()

    def set_counts(self, positive: PageArray, zero: PageArray) -> None:
        self.cache.set_counts(positive, zero)

    def state(self) -> NodeState:
        """As of now."""
        self.scheduler.advance(self._loop.now)
        self.pump()
        return self.scheduler.state(self.name)

    # ------------------------------------------------------------------------------ the loop

    def _woken(self) -> None:
        self._timer, self._wake_t = None, float("inf")
        self.scheduler.advance(self._loop.now)
        self.pump()

    def pump(self) -> None:
        """Tell what happened, and be woken when something will."""
        listener = self._listener
        while events := self.scheduler.take_events():
            for event in events:
                match event:
                    case Progress(request, t, _, done):
                        if request not in self._begun:
                            self._begun.add(request)
                            listener.progressed(self, request, t, False)
                        if done:
                            self._begun.discard(request)
                            listener.progressed(self, request, t, True)
                            listener.changed(self)
                    case Launched(phase, _):
                        if phase is Phase.PREFILL:
                            listener.changed(self)
                    case Started(request, t):
                        listener.started(self, request, t)
                    case Prefilled(request, t):
                        listener.prefilled(self, request, t)
                        listener.changed(self)
                    case FetchWanted():
                        self._fetch(event)
                    case Moved(request, _):
                        self._give_up_fetch(request)
                        if request.lease is not None:  # one that `reserve` gave it
                            self.cache.release(request.lease)
                        listener.moved_out(self, request)
                        listener.changed(self)
                    case Ack():
                        listener.acked(self, event)
                        listener.changed(self)
        records = self.scheduler.take_records()
        if records:
            listener.iterated(self, records)
        changes = self.cache.take_changes()
        if changes:
            listener.kv_changed(self, changes)
        next_t = self.scheduler.next_t()
        if next_t is not None and next_t < self._wake_t:
            if self._timer is not None:
                self._timer.cancel()
            self._wake_t = next_t
            self._timer = self._loop.at(next_t, self._woken)

    # ------------------------------------------------------------------------------ fetches

    def _give_up_fetch(self, request: Request) -> None:
        fetch = self._fetching.pop(request, None)
        if fetch is not None:
            fetch.timer.cancel()
            if fetch.cache is not None and fetch.lent is not None:
                fetch.cache.end_loan(fetch.lent)

    def _fetch(self, wanted: FetchWanted) -> None:
        request, now = wanted.request, self._loop.now
        peer = self.peers.get(wanted.url)
        if request.stage is Stage.ENDED:
            return
        if peer is None or not peer.up:
            timer = self._loop.at(now, self._came, request, wanted.path[:0], "peer_failed")
            self._fetching[request] = Fetch(timer)
            return
        slots, lent = peer.cache.lend(wanted.path)
        path = wanted.path[: lent.size]
        reason = "" if lent.size == slots.size else "peer_missing"
        seconds = (
            len(path)
            * self.profile.page_size
            * self.profile.kv_bytes_per_token
            / (self.profile.link_bytes_per_s)
        )
        start = max(now, peer._sent.free_t, self._received.free_t)
        peer._sent.free_t = self._received.free_t = start + seconds
        end = start + seconds + TRANSFER_LATENCY_S
        prefill = request.kind is Kind.PREFILL
        if prefill:
            self.fetches += 1
            self.fetched_pages += len(path)
        at = now if prefill and self._inline else end
        timer = self._loop.at(at, self._came, request, path, reason)
        self._fetching[request] = Fetch(timer, peer, peer.cache, lent)

    def _came(self, request: Request, path: Path, reason: str) -> None:
        _, peer, cache, lent = self._fetching.pop(request)
        if peer is not None and cache is not None and lent is not None:
            cache.end_loan(lent)
            if not peer.up or peer.cache is not cache:
                path, reason = path[:0], "peer_failed"
        now = self._loop.now
        new = path.take(~self.cache.in_host(path.pages))
        slots = self.cache.reserve(len(new))
        if slots.size < len(new):
            reason = reason or "no_room"
            new = new[: slots.size]
        self.cache.arrived(new, slots)
        present = self.cache.in_host(path.pages)
        pages = path.pages.size if present.all() else int(present.argmin())
        held = self.cache.hold(path.pages[:pages])
        if self._inline and request.kind is Kind.PREFILL:
            request.pull_t = now - 1e9  # the iteration that uses it pays for it
        self.scheduler.fetched(request, pages, held, reason, now)
        self.pump()
