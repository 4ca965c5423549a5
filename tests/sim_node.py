"""The simulated node's scheduler as its tests drive it: requests, what a fetcher does, what came of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

from shared.messages import Phase
from shared.timing import TINY, Profile
from worker.engines.simulated.phase import Kind
from worker.engines.simulated.requests import (
    Event,
    FetchWanted,
    Prefilled,
    Progress,
    Request,
    Source,
)
from worker.engines.simulated.scheduler import Scheduler
from worker.kv.cache import NodeCache
from worker.kv.path import EMPTY, Path

E = TypeVar("E", bound=Event)
PAGE = TINY.page_size
P = TINY.prefill
GAP = TINY.idle_gap_s


def make(
    phase: Phase = Phase.BOTH, *, l1_pages: int = 200, l2_pages: int = 800, profile: Profile = TINY
) -> Scheduler:
    return Scheduler(profile, NodeCache(l1_pages, l2_pages), phase=phase)


def pages(first: int, tokens: int) -> list[int]:
    return list(range(first, first + tokens // PAGE))


def tail(tokens: int, first: int) -> Path:
    """The page that a prompt ends in when it is not full."""
    return Path.bare([10**9 + first * 1000 + tokens]) if tokens % PAGE else EMPTY


def prefill(rid: str, tokens: int, first: int, source: Source | None = None) -> Request:
    path = Path.bare(pages(first, tokens))
    return Request(rid, Kind.PREFILL, tokens, path, tail=tail(tokens, first), routed=True, source=source)


def generate(
    rid: str, tokens: int, first: int, output: int, *, routed: bool = False, url: str = "", room: int = 0
) -> Request:
    source = Source(url, 0) if url else None
    return Request(
        rid,
        Kind.GENERATE,
        tokens,
        Path.bare(pages(first, tokens + output)),
        tail=tail(tokens, first),
        output=output,
        room_tokens=room,
        routed=routed,
        source=source,
    )


def bring(node: Scheduler, wanted: FetchWanted, came: int | None, t: float) -> None:
    """What a fetcher does: the first `came` of the pages that are wanted come into host memory; None: the peer fails."""
    cache, path = node.cache, wanted.path[: came or 0]
    new = path.take(~cache.in_host(path.pages))
    slots = cache.reserve(len(new))
    ends_in_tail = wanted.tail and len(path) == len(wanted.path)
    if slots.size == len(new):
        cache.arrived(new, slots, tail=ends_in_tail and len(new) > 0 and new.pages[-1] == path.pages[-1])
    else:
        cache.give_back(slots)
        path = path[:0]
    reason = "peer_failed" if came is None else "peer_missing" if slots.size == len(new) else "no_room"
    full = len(path) == len(wanted.path)
    node.fetched(wanted.request, len(path), cache.hold(path.pages), "" if full else reason, t)


def wanted_of(node: Scheduler) -> FetchWanted:
    (wanted,) = of(FetchWanted, node.take_events())
    return wanted


def drain(node: Scheduler, until: float = math.inf) -> list[Event]:
    """Step from event to event until the node is idle or would pass `until`."""
    events = node.take_events()
    while (t := node.next_t()) is not None and t <= until:
        node.advance(t)
        events += node.take_events()
    return events


def of(kind: type[E], events: Iterable[Event]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def ends(events: Iterable[Event]) -> dict[str, float]:
    """When each request ended."""
    done = {event.request.rid: event.t for event in of(Prefilled, events)}
    return done | {event.request.rid: event.t for event in of(Progress, events) if event.done}


def check_empty(node: Scheduler) -> None:
    """Nothing runs, nothing is pinned or promised, free + indexed pages = all pages."""
    cache = node.cache
    assert node.requests == 0
    assert cache.l1_pinned == cache.l1_room == cache.l2_pinned == 0
    assert cache.l1_free + cache.l1_used == cache.l1_pages
