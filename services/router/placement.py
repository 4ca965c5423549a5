"""Which prefill node and which decode node serve a request (paper, sections 5.3 and E.3: the inner loop).

Rules that hold here
- No I/O, no clock: `now` is an argument, in cluster seconds. The same facts give the same answer; ties go to
  the node with the longest own prefix, then to the smaller name.
- A node's wait is found by replaying its chunked prefill iterations in service order: the running one to its
  end, then what the node reported, then what was sent to it and not yet reported. Requests that share an
  iteration are charged once for it.
- Only the part of a fetch that outlasts the wait is charged, and every fetched token costs the copy price.
- A state older than `max_state_age_s` is not used. Nodes without a usable state serve only when no node has
  one.
- A decode node is bound when the prefill starts, so a queued request holds no decode memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shared.messages import NodeState
from shared.timing import FetchModel, PrefillModel, query_key_pairs


class Prefill(msgspec.Struct, frozen=True):
    """Prefill work that a node has still to do: `t_uc` tokens to compute after `t_c` cached ones."""

    rid: str
    t_uc: int
    t_c: int


class PrefillNode(msgspec.Struct, frozen=True):
    """What the router knows of one prefill node."""

    node: str
    model: PrefillModel
    chunk_tokens: int
    idle_gap_s: float
    restored_fraction: float  # f: part of the cached tokens that comes from host memory
    state: NodeState | None
    sent: Sequence[Prefill]  # sent there, not finished, in order; may repeat what the state lists


class DecodeNode(msgspec.Struct, frozen=True):
    node: str
    state: NodeState | None
    sent: Mapping[str, int]  # request -> tokens of KV that it needs; may repeat what the state lists
    l1_tokens: int


class Candidate(msgspec.Struct, frozen=True):
    """The terms of the predicted TTFT on one node, seconds (Equation 7 and E.3, line 9)."""

    node: str
    predicted_s: float  # the sum, what is compared
    wait_s: float  # until its first chunk starts
    service_s: float  # from there to the end of its prefill
    exposed_fetch_s: float  # the part of the fetch that outlasts the wait
    copy_s: float  # the price of the copy
    own_pages: int  # leading pages in the node's own memory
    fetch_pages: int  # pages to fetch after these
    source: str | None  # where from
    cached_tokens: int
    fresh: bool


class Costs(msgspec.Struct, frozen=True):
    """What placement charges beyond the models."""

    fetch: FetchModel  # tau
    copy_s_per_token: float = 1e-6  # kappa
    max_state_age_s: float = 5.0


def longest_source(longest: Sequence[tuple[str, int]], node: str) -> tuple[str | None, int]:
    """The other node with the most leading pages, and how many. `longest`: the two nodes with the most, best first."""
    for other, pages in longest:
        if other != node and pages:
            return other, pages
    return None, 0


def waiting_work(view: PrefillNode) -> list[Prefill]:
    """What the node computes before a new request, in order: as reported, then as sent."""
    state = view.state
    if state is None:
        return list(view.sent)
    work = [Prefill(queued.rid, queued.t_uc, queued.t_c) for queued in state.queue]
    known = {queued.rid for queued in state.queue} | set(state.running_prefills)
    work += [prefill for prefill in view.sent if prefill.rid not in known]
    return work


def replay(view: PrefillNode, work: Iterable[Prefill], mine: Prefill, now: float) -> tuple[float, float]:
    """Seconds from `now` to the start of `mine` and to its end, when it comes after `work`."""
    busy_until = view.state.busy_until if view.state is not None else now
    clock = max(0.0, busy_until - now)
    start: float | None = None
    room = view.chunk_tokens
    tokens, pairs, restored = 0, 0.0, 0.0
    queue = [*work, mine]
    index, done = 0, 0  # the request being filled in, and how many of its tokens went before
    while index < len(queue):
        prefill = queue[index]
        take = min(room, prefill.t_uc - done)
        if prefill is mine and start is None:
            start = clock
        if take > 0:
            if done == 0:
                restored += view.restored_fraction * prefill.t_c
            pairs += query_key_pairs(take, prefill.t_c + done)
            tokens += take
            room -= take
            done += take
        if done >= prefill.t_uc:
            index, done = index + 1, 0
        if room == 0 or index == len(queue):
            clock += view.model.iteration_s(tokens, pairs, restored)
            if index < len(queue):
                clock += view.idle_gap_s
            room, tokens, pairs, restored = view.chunk_tokens, 0, 0.0, 0.0
    return (start if start is not None else clock), clock


def candidates(
    prompt_tokens: int,
    page_size: int,
    holders: Mapping[str, int],
    nodes: Sequence[PrefillNode],
    costs: Costs,
    now: float,
    rid: str = "",
) -> list[Candidate]:
    """Every prefill node with its predicted TTFT, best first.

    `holders` gives the leading pages of the request's path on each node of the cluster. At least one prompt
    token is always computed, as an engine needs its logits.
    """
    most_pages = max(0, (prompt_tokens - 1) // page_size)
    found = []
    longest = sorted(holders.items(), key=lambda held: (-held[1], held[0]))[:2]
    for view in nodes:
        own = min(holders.get(view.node, 0), most_pages)
        source, other = longest_source(longest, view.node)
        other = min(other, most_pages)
        fetch_pages = other - own if other > own else 0
        if fetch_pages * page_size < costs.fetch.min_tokens:
            fetch_pages, source = 0, None
        cached = (own + fetch_pages) * page_size
        fresh = view.state is not None and now - view.state.t <= costs.max_state_age_s
        usable = view if fresh else msgspec.structs.replace(view, state=None)
        mine = Prefill(rid, prompt_tokens - cached, cached)
        wait_s, end_s = replay(usable, waiting_work(usable), mine, now)
        exposed_s = max(0.0, costs.fetch.seconds(fetch_pages * page_size) - wait_s) if fetch_pages else 0.0
        copy_s = costs.copy_s_per_token * fetch_pages * page_size
        found.append(
            Candidate(
                node=view.node,
                predicted_s=end_s + exposed_s + copy_s,
                wait_s=wait_s,
                service_s=end_s - wait_s,
                exposed_fetch_s=exposed_s,
                copy_s=copy_s,
                own_pages=own,
                fetch_pages=fetch_pages,
                source=source,
                cached_tokens=cached,
                fresh=fresh,
            )
        )
    found.sort(key=lambda c: (not c.fresh, c.predicted_s, -c.own_pages, c.node))
    return found


def bind_decode(
    needed_tokens: int,
    nodes: Sequence[DecodeNode],
    max_state_age_s: float,
    now: float,
    prefer: str | None = None,
) -> str | None:
    """The decode node for a request that needs `needed_tokens` of KV: with room, then fewest requests.

    Without room anywhere the node with the most room is taken, where the request waits for it. `prefer` wins a
    tie (the node that already holds the KV). None when there is no node.
    """
    best: tuple[bool, bool, float, bool, str] | None = None
    for view in nodes:
        state = view.state
        fresh = state is not None and now - state.t <= max_state_age_s
        if fresh and state is not None:
            reported = set(state.decodes)
            unreported = [tokens for rid, tokens in view.sent.items() if rid not in reported]
            requests = len(reported) + len(unreported)
            room = state.l1_free_tokens - sum(unreported)
        else:
            requests = len(view.sent)
            room = view.l1_tokens - sum(view.sent.values())
        fits = room >= needed_tokens
        order = float(requests) if fits else float(-room)
        key = (not fresh, not fits, order, view.node != prefer, view.node)
        if best is None or key < best:
            best = key
    return best[4] if best is not None else None
