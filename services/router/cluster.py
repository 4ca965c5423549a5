"""What one router knows of the cluster: nodes, their states and phases, where KV is, what it sent where.

Rules that hold here
- Routing reads only what is here; it never waits for another service. Everything is fed from Redis streams and
  the node registry by the service's loop.
- A node may prefill (decode) when the plan in force and the phase that it reports both allow it: a node that
  changes phase gets nothing new that it would hand back.
- A node that could not be reached is left out for `SUSPECT_S` wall seconds, or until its next state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from services.router.placement import DecodeNode, Prefill, PrefillNode
from shared.clock import Clock
from shared.kvfollow import KvFollower
from shared.kvindex import KvIndex
from shared.messages import Models, NodeInfo, NodeState, Phase, RolePlan, Slice
from shared.timing import GLM_52_4XGB300, PROFILES, PrefillModel, Profile

SUSPECT_S = 2.0
# f of Equation 3 before the cluster has measured it: agents mostly come back while their KV is in GPU memory.
START_RESTORED_FRACTION = 0.1


class Node(msgspec.Struct):
    info: NodeInfo
    profile: Profile
    state: NodeState | None = None
    suspect_until: float = 0.0  # cluster time
    model: PrefillModel | None = None  # fitted by the planner; the profile's until then
    restored_fraction: float = START_RESTORED_FRACTION  # f, as last measured
    prefills: dict[str, Prefill] = {}  # sent by this router and not finished
    decodes: dict[str, int] = {}  # bound by this router and not finished -> tokens of KV


class Cluster:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.nodes: dict[str, Node] = {}
        self.index = KvIndex()
        self.follower = KvFollower(self.index)
        self.plan: RolePlan | None = None
        self.switches = 0  # nodes seen to go from prefill to decode or back
        self._models: dict[str, PrefillModel] = {}
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------ what comes in

    def registered(self, infos: dict[str, NodeInfo]) -> tuple[list[NodeInfo], list[str]]:
        """Take the registry's answer; returns nodes that are new (or restarted) and names that are gone."""
        new = []
        for name, info in infos.items():
            node = self.nodes.get(name)
            if node is None or node.info.incarnation != info.incarnation:
                profile = PROFILES.get(info.profile, GLM_52_4XGB300)
                self.nodes[name] = Node(info, profile, model=self._models.get(name))
                new.append(info)
            else:
                node.info = info
        gone = [name for name in self.nodes if name not in infos]
        for name in gone:
            del self.nodes[name]
            self.follower.lost(name)
        if new or gone:
            self.notify()
        return new, gone

    def reported(self, state: NodeState) -> None:
        node = self.nodes.get(state.node)
        if node is not None and (node.state is None or state.t >= node.state.t):
            before = self._phase(node)
            self.switches += before != state.phase and Phase.BOTH not in (before, state.phase)
            node.state = state
            node.suspect_until = 0.0
            self.notify()

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
                self.nodes[one.node].model = model

    def measured(self, part: Slice) -> None:
        """Take f of the nodes that prefilled in the slice."""
        for one in part.nodes:
            if one.iterations and one.node in self.nodes:
                self.nodes[one.node].restored_fraction = min(1.0, max(0.0, one.f))

    def suspect(self, name: str) -> None:
        """The node could not be reached just now."""
        node = self.nodes.get(name)
        if node is not None:
            node.suspect_until = self._clock.now() + SUSPECT_S * self._clock.speedup

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait for the next change of nodes, states or plan."""
        await self._changed.wait()

    # ------------------------------------------------------------------ what placement reads

    def phases(self, node: Node) -> tuple[bool, bool]:
        """Whether the node may get prefill requests, and decode requests."""
        shown = node.state.phase if node.state is not None else node.info.phase
        planned = self.plan.phases.get(node.info.node, shown) if self.plan is not None else shown
        return planned.prefills and shown.prefills, planned.decodes and shown.decodes

    def live(self, without: Iterable[str] = ()) -> list[Node]:
        """Nodes that can be reached as far as is known."""
        now = self._clock.now()
        left_out = set(without)
        return [
            node for name, node in self.nodes.items() if name not in left_out and node.suspect_until <= now
        ]

    def prefill_nodes(self, model: str, without: Iterable[str] = ()) -> list[PrefillNode]:
        return [
            PrefillNode(
                node=node.info.node,
                model=node.model or node.profile.prefill,
                chunk_tokens=node.info.chunk_tokens,
                idle_gap_s=node.profile.idle_gap_s,
                restored_fraction=node.restored_fraction,
                state=node.state,
                sent=list(node.prefills.values()),
            )
            for node in self.live(without)
            if node.info.model == model and self.phases(node)[0]
        ]

    def decode_nodes(self, model: str, without: Iterable[str] = ()) -> list[DecodeNode]:
        return [
            DecodeNode(node.info.node, node.state, node.decodes, node.info.l1_tokens)
            for node in self.live(without)
            if node.info.model == model and self.phases(node)[1]
        ]

    def models(self) -> dict[str, NodeInfo]:
        """Served models, each with a node that serves it."""
        return {node.info.model: node.info for node in self.nodes.values()}

    def split(self) -> tuple[int, int]:
        """Prefill and decode nodes now; a node of both phases counts in both."""
        phases = [self._phase(node) for node in self.nodes.values()]
        return sum(p.prefills for p in phases), sum(p.decodes for p in phases)

    def _phase(self, node: Node) -> Phase:
        return node.state.phase if node.state is not None else node.info.phase
