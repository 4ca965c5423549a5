"""The live picture of a cluster: what people and `evolving status` see.

Rules that hold here
- No I/O, no clock: time is an argument, and every record carries its own.
- Memory is bounded: requests of the last `WINDOW_S`, a fixed number of history points and of changes.
- A node is shown while the registry lists it; its state is shown with its age.
- Latencies and rates are over the last `WINDOW_S` cluster seconds, counts since this process first saw any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from shared.messages import NodeInfo, NodeState, Outcome, Phase, RequestDone, RoleAck, RolePlan, RoleStage
from shared.split import split_of, split_text

WINDOW_S = 120.0
MOST_REQUESTS = 20_000
MOST_POINTS = 720
MOST_CHANGES = 512


class Percentiles(msgspec.Struct, frozen=True):
    """Of one latency, seconds; None when nothing was measured."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class NodeView(msgspec.Struct, frozen=True):
    """One node now. `age_s` is how old its state is; None before its first."""

    node: str
    url: str
    engine: str
    profile: str
    phase: Phase
    planned: Phase
    draining: bool
    queue: int  # requests that wait for prefill, or are partly computed
    queue_tokens: int  # uncached tokens that these have still to compute
    prefills: int  # requests in the running prefill iteration that it finishes
    decodes: int  # requests in decode, running or waiting for KV
    decode_tokens: int
    l1_pages: int
    l2_pages: int
    l2_counted_pages: int
    l1_capacity_pages: int
    l2_capacity_pages: int
    age_s: float | None


class SplitChange(NamedTuple):
    t: float
    prefill: int
    decode: int


class SwitchDone(NamedTuple):
    """A node that reached its new phase. Cluster seconds."""

    t: float
    node: str
    phase: Phase
    drain_s: float
    switch_s: float


class Point(NamedTuple):
    """One point of the history, what the page's charts show."""

    t: float
    req_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    kv_hit_rate: float | None
    prefill: int
    decode: int
    queue: int
    decodes: int
    e2e_p50_s: float | None
    e2e_p95_s: float | None


class Summary(msgspec.Struct, frozen=True):
    """`GET /v1/summary`."""

    cluster: str
    speedup: float
    t: float
    split: str
    epoch: int
    reason: str  # of the plan in force
    nodes: list[NodeView]
    req_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    kv_hit_rate: float | None  # cached tokens over prompt tokens
    requests: int
    failed: int
    outcomes: dict[str, int]
    switches: int  # changes of the split
    node_switches: int  # nodes moved by them
    splits: list[SplitChange]
    switched: list[SwitchDone]
    window_s: float


class _Served(NamedTuple):
    t_end: float
    ttft_s: float
    tpot_s: float  # negative when there was one token only
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int


def times(done: RequestDone) -> tuple[float, float | None, float]:
    """TTFT, TPOT (None with fewer than two tokens) and E2E of a served request, seconds."""
    ttft_s = max(0.0, done.t_first_token - done.t_arrive)
    tpot_s = None
    if done.output_tokens > 1:
        tpot_s = max(0.0, done.t_end - done.t_first_token) / (done.output_tokens - 1)
    return ttft_s, tpot_s, max(0.0, done.t_end - done.t_arrive)


class ClusterView:
    def __init__(self, *, cluster: str, speedup: float = 1.0, point_every_s: float = 10.0) -> None:
        self.cluster, self.speedup, self.point_every_s = cluster, speedup, point_every_s
        self.plan: RolePlan | None = None
        self.switches = 0
        self.node_switches = 0
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.points: deque[Point] = deque(maxlen=MOST_POINTS)
        self.splits: deque[SplitChange] = deque(maxlen=MOST_CHANGES)
        self.switched: deque[SwitchDone] = deque(maxlen=MOST_CHANGES)
        self._infos: dict[str, NodeInfo] = {}
        self._states: dict[str, NodeState] = {}
        self._served: deque[_Served] = deque(maxlen=MOST_REQUESTS)
        self._first_t: float | None = None

    # ------------------------------------------------------------------------- events

    def nodes(self, live: Mapping[str, NodeInfo]) -> None:
        """The registry as it is now."""
        for node, info in live.items():
            known = self._infos.get(node)
            if known is not None and known.incarnation != info.incarnation:
                self._states.pop(node, None)
        self._infos = dict(live)
        self._states = {node: state for node, state in self._states.items() if node in live}

    def state(self, state: NodeState) -> None:
        known = self._states.get(state.node)
        if known is None or state.t >= known.t:
            self._states[state.node] = state

    def request(self, done: RequestDone) -> None:
        self.outcomes[done.outcome] += 1
        if self._first_t is None:
            self._first_t = done.t_arrive
        if done.outcome is not Outcome.OK:
            return
        ttft_s, tpot_s, e2e_s = times(done)
        self._served.append(
            _Served(
                done.t_end,
                ttft_s,
                -1.0 if tpot_s is None else tpot_s,
                e2e_s,
                done.prompt_tokens,
                done.cached_tokens,
            )
        )

    def planned(self, plan: RolePlan) -> None:
        """A plan; an older epoch than the one in force is ignored."""
        if self.plan is not None and plan.epoch <= self.plan.epoch:
            return
        before = self.plan.phases if self.plan is not None else {}
        moved = sum(
            Phase.BOTH not in (phase, before[node]) and phase is not before[node]
            for node, phase in plan.phases.items()
            if node in before
        )
        self.plan = plan
        self.switches += moved > 0
        self.node_switches += moved
        prefill, decode = split_of(plan.phases)
        last = self.splits[-1] if self.splits else None
        if (prefill or decode) and (last is None or (last.prefill, last.decode) != (prefill, decode)):
            self.splits.append(SplitChange(plan.t, prefill, decode))

    def ack(self, ack: RoleAck) -> None:
        if ack.stage is RoleStage.SWITCHED:
            self.switched.append(SwitchDone(ack.t, ack.node, ack.phase, ack.drain_s, ack.switch_s))

    # ------------------------------------------------------------------------- pictures

    def node_views(self, t: float) -> list[NodeView]:
        return [self._node(t, info) for info in self._infos.values()]

    def _node(self, t: float, info: NodeInfo) -> NodeView:
        state = self._states.get(info.node)
        phase = state.phase if state is not None else info.phase
        return NodeView(
            node=info.node,
            url=info.url,
            engine=info.engine,
            profile=info.profile,
            phase=phase,
            planned=self.plan.phases.get(info.node, phase) if self.plan is not None else phase,
            draining=state is not None and state.draining,
            queue=len(state.queue) if state is not None else 0,
            queue_tokens=sum(waiting.t_uc for waiting in state.queue) if state is not None else 0,
            prefills=len(state.running_prefills) if state is not None else 0,
            decodes=len(state.decodes) if state is not None else 0,
            decode_tokens=state.decode_tokens if state is not None else 0,
            l1_pages=state.l1_pages if state is not None else 0,
            l2_pages=state.l2_pages if state is not None else 0,
            l2_counted_pages=state.l2_counted_pages if state is not None else 0,
            l1_capacity_pages=info.l1_tokens // info.page_size,
            l2_capacity_pages=info.l2_tokens // info.page_size,
            age_s=max(0.0, t - state.t) if state is not None else None,
        )

    def summary(self, t: float) -> Summary:
        served = self._recent(t)
        nodes = self.node_views(t)
        return Summary(
            cluster=self.cluster,
            speedup=self.speedup,
            t=t,
            split=split_text({node.node: node.phase for node in nodes}),
            epoch=self.plan.epoch if self.plan is not None else 0,
            reason=self.plan.reason if self.plan is not None else "",
            nodes=nodes,
            req_per_s=self._rate(t, len(served)),
            ttft_s=_percentiles([request.ttft_s for request in served]),
            tpot_s=_percentiles([request.tpot_s for request in served if request.tpot_s >= 0]),
            e2e_s=_percentiles([request.e2e_s for request in served]),
            kv_hit_rate=_hit_rate(served),
            requests=sum(self.outcomes.values()),
            failed=self.outcomes[Outcome.FAILED],
            outcomes={outcome.value: n for outcome, n in self.outcomes.items()},
            switches=self.switches,
            node_switches=self.node_switches,
            splits=list(self.splits),
            switched=list(self.switched)[-50:],
            window_s=WINDOW_S,
        )

    def take_point(self, t: float) -> Point | None:
        """A new point of the history when it is time for one, else None."""
        if self.points and t - self.points[-1].t < self.point_every_s:
            return None
        served = self._recent(t)
        ttft = _percentiles([request.ttft_s for request in served])
        e2e = _percentiles([request.e2e_s for request in served])
        states = self._states.values()
        prefill, decode = split_of({node.node: node.phase for node in self.node_views(t)})
        point = Point(
            t=t,
            req_per_s=self._rate(t, len(served)),
            ttft_p50_s=ttft.p50,
            ttft_p95_s=ttft.p95,
            kv_hit_rate=_hit_rate(served),
            prefill=prefill,
            decode=decode,
            queue=sum(len(state.queue) for state in states),
            decodes=sum(len(state.decodes) for state in states),
            e2e_p50_s=e2e.p50,
            e2e_p95_s=e2e.p95,
        )
        self.points.append(point)
        return point

    def hit_rate(self, t: float) -> float | None:
        return _hit_rate(self._recent(t))

    def _recent(self, t: float) -> deque[_Served]:
        while self._served and self._served[0].t_end < t - WINDOW_S:
            self._served.popleft()
        return self._served

    def _rate(self, t: float, served: int) -> float:
        if self._first_t is None:
            return 0.0
        # A cluster that has just begun is measured over its life, but never over a moment.
        return served / min(WINDOW_S, max(t - self._first_t, WINDOW_S / 10))


def _percentiles(values: list[float]) -> Percentiles:
    if not values:
        return Percentiles()
    measured = np.asarray(values)
    p50, p95, p99 = np.percentile(measured, (50, 95, 99)).tolist()
    return Percentiles(float(measured.mean()), p50, p95, p99)


def _hit_rate(served: deque[_Served]) -> float | None:
    prompt = sum(request.prompt_tokens for request in served)
    return sum(request.cached_tokens for request in served) / prompt if prompt else None
