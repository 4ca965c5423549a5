"""Which split of the nodes between prefill and decode serves most requests (section 5.2, Algorithm E.3).

Rules that hold here
- No I/O, no clock, no randomness: time is an argument, equal inputs give equal decisions.
- A split is chosen only when its predicted gain over the present one, measured slice by slice, is more than
  twice its standard error. Everything that led to a decision, or to none, is in the `Decision`.
- Nodes may differ: each has its own models, t-bar and f.
- A slice counts only when it was measured wholly outside a change of the split and the time skipped after it.

Symbols: Theta is the cluster's throughput, P and D the sets of prefill and decode nodes, w-bar the mean work of
a request, q-bar the mean number of requests in decode, mu a node's requests per second, g a slice's gain.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shared.messages import Phase, Slice
from shared.timing import DecodeModel, PrefillModel, Work

ROUNDING = 1e-9  # gains below this part of the throughput are the arithmetic's, not the split's


class IterationModels(msgspec.Struct, frozen=True):
    """The iteration-time models of one node (Equations 1 and 2)."""

    prefill: PrefillModel
    decode: DecodeModel


class NodeRates(msgspec.Struct, frozen=True):
    """What the throughput of one node follows from: its models and, as last measured, t-bar and f."""

    models: IterationModels
    t_bar: float  # new tokens per prefill iteration
    f: float  # fraction of cached tokens restored from host memory

    def prefill_per_s(self, work: Work, pairs: float) -> float:
        """mu_P: requests per second in prefill (Equation 3); infinite when the models predict no time."""
        return _rate(self.models.prefill.request_s(work.t_uc, work.t_c, self.t_bar, self.f, pairs))

    def decode_per_s(self, work: Work, batch: float) -> float:
        """mu_D: requests per second in decode with `batch` running requests (Equation 4); 0 without any."""
        if batch <= 0:
            return 0.0
        return _rate(self.models.decode.request_s(work.t_out, work.t_acc, batch))


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else math.inf


def throughput(
    prefill_nodes: Iterable[NodeRates],
    decode_nodes: Iterable[NodeRates],
    work: Work,
    in_decode: float,
    pairs: float | None = None,
) -> float:
    """Theta (Equation 5): requests per second of the slower phase, with the batch B = q-bar / |D|.

    `in_decode` is q-bar over the cluster; `pairs` the mean of A, by default A of the mean lengths. 0 when a
    phase has no node.
    """
    decode_nodes = list(decode_nodes)
    if not decode_nodes:
        return 0.0
    pairs = work.pairs if pairs is None else pairs
    batch = in_decode / len(decode_nodes)
    return min(
        sum(node.prefill_per_s(work, pairs) for node in prefill_nodes),
        sum(node.decode_per_s(work, batch) for node in decode_nodes),
    )


def with_prefill_count(
    phases: Mapping[str, Phase], prefill: int, prefill_worth: Mapping[str, float] | None = None
) -> dict[str, Phase]:
    """The split with `prefill` prefill nodes that changes the fewest of `phases` (all prefill or decode).

    Of the nodes that could move, those go whose worth in prefill against decode suits best: on unequal nodes,
    the best prefiller among the decode nodes, or the worst among the prefill nodes. Equal ones go by name.
    """
    worth = prefill_worth or {}
    present = sum(phase is Phase.PREFILL for phase in phases.values())
    towards = Phase.PREFILL if prefill > present else Phase.DECODE
    sign = -1 if towards is Phase.PREFILL else 1
    movable = sorted(
        (node for node, phase in phases.items() if phase is not towards),
        key=lambda node: (sign * worth.get(node, 1.0), node),
    )
    return dict(phases) | dict.fromkeys(movable[: abs(prefill - present)], towards)


def moves(before: Mapping[str, Phase], after: Mapping[str, Phase]) -> dict[str, Phase]:
    """Nodes whose phase differs, with the new one."""
    return {node: phase for node, phase in after.items() if before.get(node) is not phase}


class Candidate(msgspec.Struct, frozen=True):
    """One split that was considered, with the terms of its test."""

    prefill: int
    decode: int
    moves: dict[str, Phase]
    req_per_s: float  # mean of Theta over the slices
    mean_gain: float  # g-bar, requests per second
    standard_error: float  # sigma_g / sqrt(m)
    qualifies: bool
    refusal: str  # why it does not qualify; empty when it does


class Decision(msgspec.Struct, frozen=True):
    """The outcome of one planning window. `phases` is the split to apply, None to stay."""

    t: float
    reason: str
    window_t0: float = 0.0
    window_t1: float = 0.0
    slices: int = 0  # m, those that counted
    slices_skipped: int = 0
    prefill: int = 0
    decode: int = 0
    req_per_s: float = 0.0  # mean of Theta of the present split
    candidates: list[Candidate] = []
    phases: dict[str, Phase] | None = None


def evaluate(
    phases: Mapping[str, Phase], nodes: Mapping[str, NodeRates], slices: Sequence[Slice]
) -> tuple[float, list[Candidate]]:
    """Mean Theta of the present split, and every split with another prefill count, tested over `slices`.

    `phases` names at least one node of each phase, and `nodes` every node of it; `slices` has at least two.
    """
    measured = [(Work(s.t_uc, s.t_c, s.t_out, s.t_acc), s.in_decode, s.pairs) for s in slices]

    def theta(split: Mapping[str, Phase]) -> list[float]:
        prefill = [nodes[node] for node, phase in split.items() if phase is Phase.PREFILL]
        decode = [nodes[node] for node, phase in split.items() if phase is Phase.DECODE]
        return [throughput(prefill, decode, work, q, pairs) for work, q, pairs in measured]

    present = theta(phases)
    prefill_count = sum(phase is Phase.PREFILL for phase in phases.values())
    worth = prefill_worth(phases, nodes, slices)
    candidates = []
    for prefill in range(1, len(phases)):
        if prefill == prefill_count:
            continue
        split = with_prefill_count(phases, prefill, worth)
        predicted = theta(split)
        candidates.append(_tested(phases, split, prefill, present, predicted))
    return sum(present) / len(present), candidates


def _tested(
    phases: Mapping[str, Phase],
    split: Mapping[str, Phase],
    prefill: int,
    present: Sequence[float],
    predicted: Sequence[float],
) -> Candidate:
    """Equation 6 and its test. Further conditions on a candidate belong here, each with its own refusal."""
    m = len(present)
    gains = [new - old for new, old in zip(predicted, present, strict=True)]
    mean = sum(gains) / m
    deviation = math.sqrt(sum((g - mean) ** 2 for g in gains) / (m - 1))
    error = deviation / math.sqrt(m)
    refusal = ""
    if mean <= ROUNDING * sum(present) / m:
        refusal = "predicted to serve no more requests"
    elif mean <= 2 * error:
        refusal = "gain is within twice its standard error"
    return Candidate(
        prefill=prefill,
        decode=len(phases) - prefill,
        moves=moves(phases, split),
        req_per_s=sum(predicted) / m,
        mean_gain=mean,
        standard_error=error,
        qualifies=not refusal,
        refusal=refusal,
    )


def prefill_worth(
    phases: Iterable[str], nodes: Mapping[str, NodeRates], slices: Sequence[Slice]
) -> dict[str, float]:
    """mu_P / mu_D of each node for the mean work of `slices`, decoding an equal share: who prefills best.

    Empty when the slices or the models say nothing about it; then all nodes count as equal.
    """
    names = list(phases)
    used = [s for s in slices if s.requests > 0 and s.t_acc > 0]
    if not used or any(node not in nodes for node in names):
        return {}
    m = len(used)
    work = Work(
        t_uc=sum(s.t_uc for s in used) / m,
        t_c=sum(s.t_c for s in used) / m,
        t_out=sum(s.t_out for s in used) / m,
        t_acc=sum(s.t_acc for s in used) / m,
    )
    pairs = sum(s.pairs for s in used) / m
    batch = sum(s.in_decode for s in used) / m / len(names)
    worth = {}
    for node in names:
        decode = nodes[node].decode_per_s(work, batch)
        prefill = nodes[node].prefill_per_s(work, pairs)
        if not (0 < decode < math.inf and prefill < math.inf):
            return {}
        worth[node] = prefill / decode
    return worth


class PlannerState(msgspec.Struct):
    """What a restart must not forget of the planning window."""

    window_t0: float = 0.0  # the running window began then
    switch_t0: float = -math.inf  # the last change of the split began
    switch_t1: float = -math.inf  # and its last node had switched
    measured: dict[str, tuple[float, float]] = {}  # node -> (t-bar, f) as last measured


class SplitPlanner:
    """Collects slices, and decides once at the end of every window (the outer loop of Algorithm E.3)."""

    def __init__(
        self,
        *,
        window_s: float,
        slices: int,
        skip_s: float,
        state: PlannerState | None = None,
    ) -> None:
        self.window_s, self.skip_s = window_s, skip_s
        # Fewer than half a window's slices would let one burst weigh as much as the workload itself.
        self.least_slices = max(2, math.ceil(slices / 2))
        self.state = state or PlannerState()
        self._slices: deque[Slice] = deque(maxlen=slices)

    def begin(self, t: float) -> None:
        """PD disaggregation starts: the first window begins."""
        self.state.window_t0 = t

    def switching(self, t: float) -> None:
        """A change of the split was announced; slices count again `skip_s` after `switched`."""
        self.state.switch_t0, self.state.switch_t1 = t, math.inf

    def switched(self, t: float) -> None:
        """The last node of the change serves in its new phase."""
        self.state.switch_t1 = t

    def add(self, new: Slice) -> None:
        """A slice, in order of time; one that was seen is ignored."""
        if self._slices and new.t0 < self._slices[-1].t1:
            return
        self._slices.append(new)
        prefilled = [node for node in new.nodes if node.iterations > 0]
        self.state.measured |= {node.node: (node.t_bar, node.f) for node in prefilled}

    def forget(self, node: str) -> None:
        self.state.measured.pop(node, None)

    @property
    def newest_t(self) -> float:
        """End of the newest slice; minus infinity before the first."""
        return self._slices[-1].t1 if self._slices else -math.inf

    @property
    def due(self) -> bool:
        """Whether the running window has ended: a slice at its end, or past it, has arrived."""
        return self.newest_t >= self.state.window_t0 + self.window_s

    def slices(self) -> list[Slice]:
        """Slices of the window that ends with the newest one."""
        return [s for s in self._slices if s.t0 >= self.newest_t - self.window_s]

    def rates(self, models: Mapping[str, IterationModels]) -> dict[str, NodeRates]:
        """IterationModels with t-bar and f remeasured over the window.

        A node that did not prefill in the window, as a decode node does not, gets the mean of those that did:
        it would serve the same work. When none did, its own last measurement stands. Nodes for which nothing
        was ever measured are left out.
        """
        sums: dict[str, tuple[float, float, int]] = {}
        for part in self.slices():
            for seen in part.nodes:
                t_bar, f, n = sums.get(seen.node, (0.0, 0.0, 0))
                weight = seen.iterations
                sums[seen.node] = (t_bar + seen.t_bar * weight, f + seen.f * weight, n + weight)
        sums = {node: total for node, total in sums.items() if total[2] > 0}
        every = sum(n for _, _, n in sums.values())
        rates = {}
        for node, model in models.items():
            if node in sums:
                t_bar, f, n = sums[node]
                measured = (t_bar / n, f / n)
            elif every:
                measured = (
                    sum(t_bar for t_bar, _, _ in sums.values()) / every,
                    sum(f for _, f, _ in sums.values()) / every,
                )
            elif node in self.state.measured:
                measured = self.state.measured[node]
            else:
                continue
            if measured[0] > 0:
                rates[node] = NodeRates(models=model, t_bar=measured[0], f=measured[1])
        return rates

    def decide(
        self,
        t: float,
        phases: Mapping[str, Phase],
        models: Mapping[str, IterationModels],
        draining: Iterable[str] = (),
    ) -> Decision:
        """End the running window with the newest slice, begin the next, and say what to do.

        `phases` is the split in force, `draining` the nodes that have not yet reached their phase in it.
        """
        window = self.slices()
        self.state.window_t0 = window[-1].t1 if window else t
        usable = [s for s in window if self._usable(s)]
        prefill = sum(phase is Phase.PREFILL for phase in phases.values())
        decode = sum(phase is Phase.DECODE for phase in phases.values())
        rates = self.rates(models)
        terms = Decision(
            t=t,
            reason="",
            window_t0=window[0].t0 if window else t,
            window_t1=window[-1].t1 if window else t,
            slices=len(usable),
            slices_skipped=len(window) - len(usable),
            prefill=prefill,
            decode=decode,
        )
        waiting = self._not_now(t, phases, sorted(draining), usable, models, rates)
        if waiting:
            return msgspec.structs.replace(terms, reason=waiting)
        req_per_s, candidates = evaluate(phases, rates, usable)
        if not all(math.isfinite(theta) for theta in (req_per_s, *(c.req_per_s for c in candidates))):
            return msgspec.structs.replace(terms, reason="the models predict no time for this work")
        terms = msgspec.structs.replace(terms, req_per_s=req_per_s, candidates=candidates)
        qualified = [c for c in candidates if c.qualifies]
        if not qualified:
            return msgspec.structs.replace(terms, reason="no other split is certain to serve more")
        best = max(qualified, key=lambda c: c.mean_gain)
        return msgspec.structs.replace(
            terms,
            phases=dict(phases) | best.moves,
            reason=(
                f"{best.prefill}P{best.decode}D is predicted to serve {best.mean_gain:.3g} req/s more than"
                f" {prefill}P{decode}D (standard error {best.standard_error:.2g})"
            ),
        )

    def _usable(self, part: Slice) -> bool:
        skipped = part.t0 < self.state.switch_t1 + self.skip_s and part.t1 > self.state.switch_t0
        return not skipped and part.requests > 0 and part.t_acc > 0 and part.in_decode > 0

    def _not_now(
        self,
        t: float,
        phases: Mapping[str, Phase],
        draining: Sequence[str],
        usable: Sequence[Slice],
        models: Mapping[str, IterationModels],
        rates: Mapping[str, NodeRates],
    ) -> str:
        """Why no split can be compared now; empty when it can."""
        if draining:
            return f"still draining: {', '.join(draining)}"
        if t < self.state.switch_t1 + self.skip_s:
            return f"the split changed less than {self.skip_s:g} s ago"
        if {Phase.PREFILL, Phase.DECODE} != set(phases.values()):
            return "the nodes are not split"
        unknown = sorted(node for node in phases if node not in models)
        if unknown:
            return f"no iteration-time models yet for {', '.join(unknown)}"
        unmeasured = sorted(node for node in phases if node not in rates)
        if unmeasured:
            return f"no prefill iteration was measured that tells t-bar of {', '.join(unmeasured)}"
        if len(usable) < self.least_slices:
            return f"{len(usable)} slices with finished requests are too few; {self.least_slices} are needed"
        return ""
