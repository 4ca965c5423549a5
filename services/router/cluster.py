"""What one router knows of the cluster: nodes, their states and phases, where KV is, what it sent where.

Rules that hold here
- Routing reads only what is here; it never waits for another service. Everything is fed from Redis streams and
  the node registry by the service's loop.
- A node may prefill (decode) when the plan in force and the phase that it reports both allow it: a node that
  changes phase gets nothing new that it would hand back.
- A node that the registry does not list any more is kept while it answers, `MISSING_S` at most.
- A node that could not be reached, or does not answer, is left out as `health.py` says. One that goes down takes
  the calls to it with it: their tasks are woken (`Node.calls`), so that a frozen node holds up nobody.
- What other routers placed counts like what this one sent, until the node has reported since.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit

from services.router.fetch_times import FetchTimes
from services.router.health import Breaker, Fitness
from services.router.placement import START_RESTORED_FRACTION, DecodeNode, Prefill, PrefillNode
from shared.clock import Clock
from shared.kvfollow import KvFollower
from shared.kvindex import KvIndex
from shared.messages import BranchPlaced, Models, NodeInfo, NodeState, Phase, RolePlan, Slice
from shared.timing import GLM_52_4XGB300, PROFILES, FetchModel, PrefillModel, Profile

MISSING_S = 10.0  # wall seconds for which a node that the registry has lost is kept, if it answers
MOST_FETCH_S = 3600.0
CLOCK_OFF_S = 600.0  # wall seconds
REFIT_S = 0.1  # wall seconds after which nodes that were left out are looked at again
REPORTED_S = 1.0  # wall seconds after which a node's state lists what another router sent it


def unusable(info: NodeInfo) -> str:
    """What is wrong with a node's registration; empty when nothing is."""
    for field in ("page_size", "max_context", "chunk_tokens", "l1_tokens"):
        if getattr(info, field) < 1:
            return f"{field} is {getattr(info, field)}"
    try:
        parts = urlsplit(info.url)
        fine = (
            parts.scheme == "http" and bool(parts.hostname) and (parts.port or 80) > 0 and info.url.isascii()
        )
    except ValueError:
        fine = False
    return "" if fine and " " not in info.url else f"its address {info.url!r} is none"


class NodeDown(Exception):
    """The node stopped answering while it worked on a call."""


class Calling:
    """A part of a task that ends with NodeDown when its node goes down. Entered by the task itself."""

    __slots__ = ("_node", "_others", "_task", "_woken")

    def __init__(self, node: Node) -> None:
        self._node = node
        self._woken = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._others = task.cancelling()  # by whoever else wants the task to end
        self._node.calls.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._node.calls.discard(self)
        if self._woken:
            left = self._task.uncancel()
            if kind is asyncio.CancelledError and left <= self._others:
                raise NodeDown(f"node {self._node.info.node} does not answer any more") from None
        elif kind is None:
            self._node.breaker.succeeded()

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._task.cancel()


class Node:
    """A registered node. `prefill` and `decode` hold what is known of its work, whatever its phase."""

    def __init__(self, info: NodeInfo, heard_t: float, model: PrefillModel | None = None) -> None:
        """`model`: fitted by the planner; the profile's until there is one."""
        self.info = info
        self.profile: Profile = PROFILES.get(info.profile, GLM_52_4XGB300)
        self.breaker = Breaker()
        self.missing_since: float | None = None  # wall time since which the registry does not list it
        self.heard_t = heard_t  # wall time of its last state or answered probe
        self.prefill = PrefillNode(
            info.node, model or self.profile.prefill, info.chunk_tokens, self.profile.idle_gap_s,
            START_RESTORED_FRACTION,
        )  # fmt: skip
        self.decode = DecodeNode(info.node, info.l1_tokens)
        self.foreign: dict[str, float] = {}  # requests that other routers sent there -> when
        self.calls: set[Calling] = set()

    @property
    def state(self) -> NodeState | None:
        """The last that it reported."""
        return self.prefill.state

    @property
    def load(self) -> int:
        """Requests that routers have there."""
        return len(self.prefill.sent) + len(self.decode.sent)

    def report(self, state: NodeState) -> None:
        self.prefill.report(state)
        self.decode.report(state)

    def forget(self, rid: str) -> None:
        """A request is not there any more."""
        self.prefill.finished(rid)
        self.decode.finished(rid)
        self.foreign.pop(rid, None)

    def calling(self) -> Calling:
        """`with node.calling(): ...` raises NodeDown inside when the node goes down."""
        return Calling(self)


class _Fit(NamedTuple):
    """The nodes that may get work of a model, as they are until `until` (wall time) or the next change."""

    until: float
    prefill: list[PrefillNode]
    decode: list[DecodeNode]


class Cluster:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.nodes: dict[str, Node] = {}
        self.index = KvIndex()
        self.follower = KvFollower(self.index)
        self.plan: RolePlan | None = None
        self.switches = 0  # nodes seen to go from prefill to decode or back
        self._models: dict[str, PrefillModel] = {}
        self._fetch_times: dict[str, FetchTimes] = {}  # by profile
        self._handoff = FetchTimes(FetchModel(0.05, 1e-6, 0))
        self._waiters: list[asyncio.Future[None]] = []
        self._fit: dict[str, _Fit] = {}  # by model

    # ------------------------------------------------------------------ what comes in

    def registered(self, infos: dict[str, NodeInfo]) -> tuple[list[NodeInfo], list[str]]:
        """Take the registry's answer; returns nodes that are new (or restarted) and names that are gone."""
        new = []
        for name, info in infos.items():
            node = self.nodes.get(name)
            if node is None or node.info.incarnation != info.incarnation:
                self.nodes[name] = Node(info, self.wall(), self._models.get(name))
                if node is not None:
                    self._wake(node)
                new.append(info)
            else:
                if node.missing_since is not None or node.info != info:
                    node.info, node.missing_since = info, None
                    self.notify()
        gone = [name for name in self.nodes if name not in infos and self._is_gone(self.nodes[name])]
        for name in gone:
            self._wake(self.nodes.pop(name))
            self.follower.lost(name)
        if new or gone:
            self.notify()
        return new, gone

    def _is_gone(self, node: Node) -> bool:
        """Whether a node that the registry does not list is no more: Redis may have forgotten one that is well, but one
        that also fails a call or a probe is none."""
        if node.missing_since is None:
            node.missing_since = self.wall()
            self.notify()
        now = self.wall()
        return not node.breaker.usable(now) or now - node.missing_since > MISSING_S

    def reported(self, state: NodeState) -> None:
        node = self.nodes.get(state.node)
        if node is not None and (node.state is None or state.t >= node.state.t):
            before = self._phase(node)
            if before is not state.phase:
                self._fit.clear()
                self.switches += Phase.BOTH not in (before, state.phase)
            node.report(state)
            node.heard_t = self.wall()
            node.breaker.heard()
            if node.foreign:
                old = state.t - REPORTED_S * self._clock.speedup
                for rid in [rid for rid, t in node.foreign.items() if t <= old]:
                    node.forget(rid)
            self._wake_waiters()

    def planned(self, plan: RolePlan) -> None:
        if self.plan is None or plan.epoch > self.plan.epoch:
            self.plan = plan
            self.notify()

    def fitted(self, models: Models) -> None:
        """Predict with these coefficients from now on (section 5.1)."""
        for one in models.models:
            model = PrefillModel(one.c0, one.c1, one.c2, one.c3)
            self._models[one.node] = model
            if one.node in self.nodes:
                self.nodes[one.node].prefill.predict_with(model)

    def measured(self, part: Slice) -> None:
        """Take f of the nodes that prefilled in the slice."""
        for one in part.nodes:
            if one.iterations and one.node in self.nodes:
                self.nodes[one.node].prefill.predict_with(restored_fraction=min(1.0, max(0.0, one.f)))

    def clocks_differ(self) -> bool:
        """Whether what the nodes report is nowhere near now."""
        now = self._clock.now()
        states = [node.state for node in self.nodes.values() if node.state is not None]
        off_s = CLOCK_OFF_S * max(1.0, self._clock.speedup)
        return bool(states) and all(abs(state.t - now) > off_s for state in states)

    def placed(self, placed: BranchPlaced) -> None:
        """Another router sent a request to a node."""
        node = self.nodes.get(placed.node)
        if node is None or not placed.rid:
            return
        if placed.phase is Phase.DECODE:  # then its prefill has begun, wherever that is
            for other in self.nodes.values():
                if placed.rid in other.foreign:
                    other.forget(placed.rid)
            node.decode.send(placed.rid, placed.tokens)
        else:
            node.prefill.send(Prefill(placed.rid, placed.tokens, placed.cached))
        node.foreign[placed.rid] = placed.t

    def fetched(self, name: str, tokens: int, seconds: float) -> None:
        """A fetch was seen on that node."""
        node = self.nodes.get(name)
        if node is not None and tokens >= node.profile.fetch.min_tokens and 0 <= seconds < MOST_FETCH_S:
            self._times(node).observed(tokens, seconds)

    def fetch_model(self, node: Node) -> FetchModel:
        """tau, as learned."""
        return self._times(node).model

    def mean_held(self, model: str, holders: Mapping[str, int]) -> int:
        """Leading pages that a decode node of the model holds, the mean over all: what a decode need not pull."""
        nodes = self.decode_nodes(model)
        return sum(holders.get(view.node, 0) for view in nodes) // len(nodes) if nodes and holders else 0

    def handoff_s(self, tokens: int) -> float:
        """Cluster seconds from the end of a prefill to the answer's first byte, when the decode node has to pull so many
        tokens; as seen so far."""
        return self._handoff.model.seconds(max(tokens, 1))

    def handed_off(self, tokens: int, seconds: float) -> None:
        """That was seen once more."""
        self._handoff.observed(max(tokens, 1), seconds)

    def _times(self, node: Node) -> FetchTimes:
        times = self._fetch_times.get(node.profile.name)
        if times is None:
            times = self._fetch_times[node.profile.name] = FetchTimes(node.profile.fetch)
        return times

    def failed(self, name: str) -> bool:
        """The node did not answer a call or a probe. Whether it went down with that."""
        node = self.nodes.get(name)
        if node is None:
            return False
        self._fit.clear()
        if not node.breaker.failed(self.wall()):
            return False
        self._wake(node)
        return True

    def answered(self, name: str) -> bool:
        """The node answered a probe. Whether it came up with that."""
        node = self.nodes.get(name)
        if node is None:
            return False
        node.heard_t = self.wall()
        if not node.breaker.succeeded():
            return False
        self.notify()
        return True

    def doubtful(self, seconds: float) -> list[Node]:
        """Nodes to be probed: not heard of for that many wall seconds, suspect, or on trial."""
        now = self.wall()
        return [
            node
            for node in self.nodes.values()
            if (
                not node.breaker.usable(now) or now - node.heard_t > seconds or node.missing_since is not None
            )
            and node.breaker.fitness is not Fitness.DOWN
        ]

    def wall(self) -> float:
        """Wall seconds, for what has nothing to do with the speed-up."""
        return self._clock.now() / self._clock.speedup

    def _wake(self, node: Node) -> None:
        for call in list(node.calls):
            call.wake()
        self.notify()

    def notify(self) -> None:
        """Nodes or plan have changed."""
        self._fit.clear()
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self) -> None:
        """Wait for the next change of nodes, states or plan."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    # ------------------------------------------------------------------ what placement reads

    def phases(self, node: Node) -> tuple[bool, bool]:
        """Whether the node may get prefill requests, and decode requests."""
        shown = node.state.phase if node.state is not None else node.info.phase
        planned = self.plan.phases.get(node.info.node, shown) if self.plan is not None else shown
        return planned.prefills and shown.prefills, planned.decodes and shown.decodes

    def live(self, without: Iterable[str] = ()) -> list[Node]:
        """Nodes that can be reached as far as is known."""
        now = self.wall()
        left_out = set(without)
        found = [
            node for name, node in self.nodes.items() if name not in left_out and node.breaker.usable(now)
        ]
        # Those that the registry has lost sight of only while there are no others: they may be about to end.
        return [node for node in found if node.missing_since is None] or found

    def prefill_nodes(self, model: str, without: Iterable[str] = ()) -> list[PrefillNode]:
        """Nodes of the model that may get prefills; do not change the list."""
        return self._fit_for(model, without).prefill

    def decode_nodes(self, model: str, without: Iterable[str] = ()) -> list[DecodeNode]:
        """Nodes of the model that may get decodes; do not change the list."""
        return self._fit_for(model, without).decode

    def _fit_for(self, model: str, without: Iterable[str]) -> _Fit:
        if without:
            return self._fit_of(model, self.live(without), 0.0)
        now = self.wall()
        fit = self._fit.get(model)
        if fit is None or now >= fit.until:
            live = self.live()
            # Time alone brings one back that is left out now.
            until = math.inf if len(live) == len(self.nodes) else now + REFIT_S
            fit = self._fit[model] = self._fit_of(model, live, until)
        return fit

    def _fit_of(self, model: str, live: list[Node], until: float) -> _Fit:
        nodes = [(node, *self.phases(node)) for node in live if node.info.model == model]
        return _Fit(
            until,
            [node.prefill for node, prefills, _ in nodes if prefills],
            [node.decode for node, _, decodes in nodes if decodes],
        )

    def models(self) -> dict[str, NodeInfo]:
        """Served models, each with a node that serves it."""
        return {node.info.model: node.info for node in self.nodes.values()}

    def split(self) -> tuple[int, int]:
        """Prefill and decode nodes now; a node of both phases counts in both."""
        phases = [self._phase(node) for node in self.nodes.values()]
        return sum(p.prefills for p in phases), sum(p.decodes for p in phases)

    def _phase(self, node: Node) -> Phase:
        return node.state.phase if node.state is not None else node.info.phase
