"""Slices: what requests and nodes did in each minute, for the planner (section 5.2).

Rules that hold here
- No I/O, no clock: time is an argument, and every record carries its own.
- Slices lie on a grid (multiples of the slice's length), so that a restart makes the same ones. Each is made
  once; only slices that lie wholly after `start_t` are made.
- A slice is closed a grace time after its end. What comes later for it is dropped and counted.
- A node's last state stands for at most `stale_s`: a node that went silent holds no requests.

Symbols: t-bar is the mean of new tokens per prefill iteration, f the fraction of cached tokens restored from
host memory, q-bar the time average of the requests in decode.
"""

from __future__ import annotations

import math

import msgspec

from shared.messages import Iterations, NodeSlice, NodeState, Outcome, Phase, RequestDone, Slice
from shared.timing import query_key_pairs

MOST_OPEN = 64  # slices open at once: records further ahead come from a clock that is wrong
MOST_MISSED = 240  # slices closed in one go: after a longer sleep the older ones are not made


class _Node(msgspec.Struct):
    """Sums of one node's prefill iterations in a slice."""

    phase: Phase
    iterations: int = 0
    t_uc: int = 0
    t_rst: int = 0
    t_c: int = 0


class _Open(msgspec.Struct):
    """Sums of one slice."""

    requests: int = 0
    measured: int = 0  # of these, with a known output
    t_uc: int = 0
    t_c: int = 0
    pairs: float = 0.0
    t_out: int = 0
    decode_iterations: int = 0
    in_decode_s: float = 0.0  # integral of the requests in decode over time
    context_s: float = 0.0  # and of their context tokens
    nodes: dict[str, _Node] = {}


class _Last(msgspec.Struct):
    """A node's last state, of `state_t`, counted up to `t`; it stands until `until_t` at most."""

    state_t: float
    t: float
    until_t: float
    phase: Phase
    decodes: int
    tokens: int


class SliceBuilder:
    def __init__(self, *, start_t: float, slice_s: float = 60.0, grace_s: float, stale_s: float) -> None:
        self.slice_s, self.grace_s, self.stale_s = slice_s, grace_s, stale_s
        self.dropped = 0  # records whose slice was closed, or is too far ahead
        self._first = self._next = math.ceil(start_t / slice_s)  # the oldest slice that is not closed
        self._open: dict[int, _Open] = {}
        self._last: dict[str, _Last] = {}

    @property
    def open_t(self) -> float:
        """Start of the oldest slice that is not closed: records from then on count."""
        return self._next * self.slice_s

    def _at(self, t: float) -> _Open | None:
        index = math.floor(t / self.slice_s)
        if not self._next <= index < self._next + MOST_OPEN:
            self.dropped += index >= self._first  # what lies before the start is no loss
            return None
        return self._open.setdefault(index, _Open())

    def request(self, done: RequestDone) -> None:
        """A finished request counts in the slice in which it ended; one that was not served counts in none."""
        if done.outcome is not Outcome.OK:
            return
        slot = self._at(done.t_end)
        if slot is None:
            return
        t_uc = max(0, done.prompt_tokens - done.cached_tokens)
        slot.requests += 1
        slot.t_uc += t_uc
        slot.t_c += done.cached_tokens
        slot.pairs += query_key_pairs(t_uc, done.cached_tokens)
        if done.decode_iterations:  # else the engine did not say what it produced
            slot.measured += 1
            slot.t_out += done.output_tokens
            slot.decode_iterations += done.decode_iterations

    def iterations(self, message: Iterations) -> None:
        slot = self._at(message.t)
        if slot is None:
            return
        node = slot.nodes.setdefault(message.node, _Node(message.phase))
        node.phase = message.phase
        for record in message.records:
            if record.phase is Phase.PREFILL:
                node.iterations += record.count
                node.t_uc += record.t_uc * record.count
                node.t_rst += record.t_rst * record.count
                node.t_c += record.t_c * record.count

    def state(self, state: NodeState) -> None:
        last = self._last.get(state.node)
        t = state.t
        if last is not None:
            if state.t < last.state_t:
                return  # older than what is known
            self._integrate(last, state.t)
            t = max(t, last.t)
        until_t = state.t + self.stale_s
        self._last[state.node] = _Last(
            state.t, t, until_t, state.phase, len(state.decodes), state.decode_tokens
        )

    def _integrate(self, last: _Last, until_t: float) -> None:
        """Add `last` from `last.t` to `until_t` to the open slices, and move `last.t` there."""
        t, end = max(last.t, self.open_t), min(until_t, last.until_t)
        index = math.floor(t / self.slice_s)
        while last.decodes and t < end and index < self._next + MOST_OPEN:
            index += 1
            piece_end = min(end, index * self.slice_s)
            if piece_end > t:
                slot = self._open.setdefault(index - 1, _Open())
                slot.in_decode_s += last.decodes * (piece_end - t)
                slot.context_s += last.tokens * (piece_end - t)
                t = piece_end
        last.t = max(last.t, until_t)

    def close(self, now: float) -> list[Slice]:
        """Slices that ended `grace_s` or more before `now`, oldest first."""
        ended = math.floor((now - self.grace_s) / self.slice_s)
        if ended - self._next > MOST_MISSED:
            self._next = ended
            self._open = {index: slot for index, slot in self._open.items() if index >= ended}
        closed = []
        while self._next < ended:
            t0, t1 = self._next * self.slice_s, (self._next + 1) * self.slice_s
            for last in self._last.values():
                if last.t < t1:
                    self._integrate(last, t1)
            slot = self._open.pop(self._next, _Open())
            for name, last in self._last.items():
                if last.until_t > t0:
                    slot.nodes.setdefault(name, _Node(last.phase))
            closed.append(self._closed(slot, t0, t1))
            self._next += 1
        self._last = {name: last for name, last in self._last.items() if last.until_t > self.open_t}
        return closed

    def _closed(self, slot: _Open, t0: float, t1: float) -> Slice:
        n = max(1, slot.requests)
        return Slice(
            t0=t0,
            t1=t1,
            requests=slot.requests,
            t_uc=slot.t_uc / n,
            t_c=slot.t_c / n,
            pairs=slot.pairs / n,
            t_out=slot.t_out / max(1, slot.measured),
            t_acc=slot.t_out / slot.decode_iterations if slot.decode_iterations else 0.0,
            in_decode=slot.in_decode_s / (t1 - t0),
            nodes=[
                NodeSlice(
                    node=name,
                    phase=node.phase,
                    t_bar=node.t_uc / node.iterations if node.iterations else 0.0,
                    f=min(1.0, node.t_rst / node.t_c) if node.t_c else 0.0,
                    iterations=node.iterations,
                )
                for name, node in sorted(slot.nodes.items())
            ],
            context=slot.context_s / slot.in_decode_s if slot.in_decode_s else 0.0,
        )
