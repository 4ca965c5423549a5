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
from typing import NamedTuple

import msgspec

from shared.messages import NodeState, QueuedPrefill
from shared.timing import FetchModel, PrefillModel, query_key_pairs

DEFAULT_OUTPUT_TOKENS = 512  # room to look for when the client sets no limit
# f of Equation 3 before the cluster has measured it: agents mostly come back while their KV is in GPU memory.
START_RESTORED_FRACTION = 0.1


class Prefill(msgspec.Struct, frozen=True):
    """Prefill work that a node has still to do: `t_uc` tokens to compute after `t_c` cached ones."""

    rid: str
    t_uc: int
    t_c: int


class _Filled(NamedTuple):
    """Prefill iterations filled so far: seconds until the open one starts, and what is in it."""

    clock_s: float
    room: int  # tokens
    tokens: int
    pairs: float
    restored: float


class PrefillNode:
    """What the router knows of one prefill node: its last state, and what was sent there and is not finished.

    The work before a new request is replayed once and kept: a question costs the iterations of that request only.
    """

    __slots__ = (
        "_chunk",
        "_f",
        "_gap_s",
        "_model",
        "_reported",
        "_unstated",
        "_work",
        "node",
        "sent",
        "state",
    )

    def __init__(
        self,
        node: str,
        model: PrefillModel,
        chunk_tokens: int,
        idle_gap_s: float,
        restored_fraction: float = 0.0,
        state: NodeState | None = None,
        sent: Iterable[Prefill] = (),
    ) -> None:
        """`restored_fraction`: f, the part of the cached tokens that comes from host memory."""
        self.node = node
        self._model, self._f = model, restored_fraction
        self._chunk, self._gap_s = chunk_tokens, idle_gap_s
        self.sent: dict[str, Prefill] = {prefill.rid: prefill for prefill in sent}
        self.state: NodeState | None = None
        self._reported: set[str] = set()  # requests whose work `state` speaks of
        self._work: _Filled | None = None  # as reported, then as sent; None when it has to be replayed
        self._unstated: _Filled | None = None  # the same without a state
        if state is not None:
            self.report(state)

    def report(self, state: NodeState) -> None:
        """The node's state, the latest."""
        self.state = state
        self._reported = {queued.rid for queued in state.queue}
        self._reported.update(state.running_prefills)
        self._work = None

    def predict_with(self, model: PrefillModel | None = None, restored_fraction: float | None = None) -> None:
        """Another model or f from now on."""
        self._model = model or self._model
        self._f = self._f if restored_fraction is None else restored_fraction
        self._work = self._unstated = None

    def send(self, prefill: Prefill) -> None:
        """A request was sent there, after all others."""
        self.finished(prefill.rid)
        self.sent[prefill.rid] = prefill
        self._unstated = None
        if prefill.rid not in self._reported and self._work is not None:
            self._work = self._fill(self._work, prefill)[0]

    def finished(self, rid: str) -> None:
        """A request is not there any more, if it was."""
        if self.sent.pop(rid, None) is not None:
            self._unstated = None
            if rid not in self._reported:
                self._work = None

    def predict(self, mine: Prefill, now: float, stated: bool = True) -> tuple[float, float]:
        """Seconds from `now` to the start of a new request and to its end; from what was sent alone unless `stated`."""
        state = self.state if stated else None
        if state is None:
            if self._unstated is None:
                self._unstated = self._filled(self.sent.values())
            work, running_s = self._unstated, 0.0
        else:
            if self._work is None:
                unreported = (p for rid, p in self.sent.items() if rid not in self._reported)
                self._work = self._filled([*state.queue, *unreported])
            work, running_s = self._work, max(0.0, state.busy_until - now)
        filled, start_s = self._fill(work, mine)
        if filled.tokens:
            end_s = filled.clock_s + self._model.iteration_s(filled.tokens, filled.pairs, filled.restored)
        else:  # it ends with its last iteration, not with the gap after that
            end_s = filled.clock_s - self._gap_s
        return running_s + start_s, running_s + end_s

    def _filled(self, work: Iterable[Prefill | QueuedPrefill]) -> _Filled:
        filled = _Filled(0.0, self._chunk, 0, 0.0, 0.0)
        for prefill in work:
            filled = self._fill(filled, prefill)[0]
        return filled

    def _fill(self, filled: _Filled, prefill: Prefill | QueuedPrefill) -> tuple[_Filled, float]:
        """The iterations with one more request, and when that starts."""
        clock_s, room, tokens, pairs, restored = filled
        start_s, left, before = clock_s, prefill.t_uc, prefill.t_c
        if left > 0:
            restored += self._f * before
        while left > 0:
            take = min(room, left)
            pairs += query_key_pairs(take, before)
            tokens += take
            room -= take
            left -= take
            before += take
            if not room:
                clock_s += self._model.iteration_s(tokens, pairs, restored) + self._gap_s
                room, tokens, pairs, restored = self._chunk, 0, 0.0, 0.0
        return _Filled(clock_s, room, tokens, pairs, restored), start_s


class DecodeNode:
    """What the router knows of one decode node: its last state, and what was bound there and is not finished."""

    __slots__ = (
        "_l1_tokens",
        "_reported",
        "_sent_tokens",
        "_unreported",
        "_unreported_tokens",
        "node",
        "sent",
        "state",
    )

    def __init__(
        self, node: str, l1_tokens: int, state: NodeState | None = None, sent: Mapping[str, int] | None = None
    ) -> None:
        """`sent`: request -> tokens of KV that it needs; it may repeat what the state lists."""
        self.node = node
        self._l1_tokens = l1_tokens
        self.sent: dict[str, int] = dict(sent or {})
        self._sent_tokens = sum(self.sent.values())
        self.state: NodeState | None = None
        self._reported: frozenset[str] = frozenset()  # requests that `state` lists
        self._unreported = self._unreported_tokens = 0  # requests in `sent` only, and their tokens
        if state is not None:
            self.report(state)

    def report(self, state: NodeState) -> None:
        """The node's state, the latest."""
        self.state = state
        self._reported = frozenset(state.decodes)
        unreported = [tokens for rid, tokens in self.sent.items() if rid not in self._reported]
        self._unreported, self._unreported_tokens = len(unreported), sum(unreported)

    def send(self, rid: str, tokens: int) -> None:
        """A request was bound to it."""
        self.finished(rid)
        self.sent[rid] = tokens
        self._sent_tokens += tokens
        if rid not in self._reported:
            self._unreported += 1
            self._unreported_tokens += tokens

    def finished(self, rid: str) -> None:
        """A request is not there any more, if it was."""
        tokens = self.sent.pop(rid, None)
        if tokens is None:
            return
        self._sent_tokens -= tokens
        if rid not in self._reported:
            self._unreported -= 1
            self._unreported_tokens -= tokens

    def load(self, stated: bool) -> tuple[int, int]:
        """Requests there, and tokens of KV that are free; from what was sent alone unless `stated`."""
        if not stated or self.state is None:
            return len(self.sent), self._l1_tokens - self._sent_tokens
        return len(self._reported) + self._unreported, self.state.l1_free_tokens - self._unreported_tokens


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

    @property
    def ttft_s(self) -> float:
        """Until the end of its prefill: the sum without the copy, which has a price but takes no time."""
        return self.wait_s + self.service_s + self.exposed_fetch_s


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
        state = view.state
        fresh = state is not None and now - state.t <= costs.max_state_age_s
        wait_s, end_s = view.predict(Prefill(rid, prompt_tokens - cached, cached), now, fresh)
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
        requests, room = view.load(fresh)
        fits = room >= needed_tokens
        order = float(requests) if fits else float(-room)
        key = (not fresh, not fits, order, view.node != prefer, view.node)
        if best is None or key < best:
            best = key
    return best[4] if best is not None else None
