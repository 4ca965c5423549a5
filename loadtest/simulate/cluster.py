"""The simulated cluster: nodes, what the router knows of them, and each request's way through them.

Rules that hold here
- One request's way is the live one: placed, prefilled, bound, pulled by its decode node, decoded. What a policy may
  see and is told is in `loadtest.baselines.policy`.
- What the router knows is late, as `Delays` says.
- A policy that binds at routing holds its decode node's memory from then on; a request that finds no room there is
  prefilled when it has some, in order.
- A request that loses its node begins anew elsewhere, and keeps its time of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from loadtest.baselines.policy import KvAfterMove, Moves, Moving, Planner, Router
from loadtest.simulate.agents import Agent
from loadtest.simulate.flight import Flight
from loadtest.simulate.knowledge import Delays, Knowledge
from loadtest.simulate.loop import Loop
from loadtest.simulate.node import SimNode
from loadtest.simulate.pages import PageNames, StepPages
from loadtest.traces import StepRef
from shared.messages import Iteration, Iterations, NodeState, PageArray, Phase, RoleStage, Tier
from shared.timing import Profile
from worker.engines.simulated.phase import Ack, Kind
from worker.engines.simulated.requests import Request
from worker.kv.cache import KvChange
from worker.kv.eviction import Eviction


class Cluster:
    """Serves `Agent`s' steps. `finished` is called with every request that was answered."""

    def __init__(
        self,
        loop: Loop,
        names: PageNames,
        profiles: Mapping[str, Profile],
        phases: Mapping[str, Phase],
        router: Router,
        *,
        eviction: Eviction,
        counted: bool,
        inline: bool,
        delays: Delays,
        finished: Callable[[Flight], None],
    ) -> None:
        self._loop, self._names, self._router, self._delays = loop, names, router, delays
        self._finished = finished
        self.nodes = {
            name: SimNode(
                name, profile, loop, names, self, eviction=eviction, phase=phases[name], inline=inline
            )
            for name, profile in profiles.items()
        }
        for node in self.nodes.values():
            node.peers = self.nodes
        self.known = Knowledge(loop, names, self.nodes, delays, counted=counted)
        self.flights: dict[str, Flight] = {}
        self.planner: Planner | None = None
        self.on_iterations: Callable[[Iterations], None] | None = None
        self.on_state: Callable[[NodeState], None] | None = None
        self.on_ack: Callable[[str, Ack], None] | None = None
        self.on_switch: Callable[[str, float, float], None] | None = None  # node, drain, out of service
        self.page_size = names.page_size
        self._states: dict[str, NodeState | None] = dict.fromkeys(self.nodes)
        self._reporting: set[str] = set()
        self._serves: dict[str, Phase | None] = dict(phases)  # as the router may use it; None: in neither
        self._lists: tuple[list[str], list[str]] | None = None
        self._before: dict[str, Phase] = dict(phases)
        self._epoch = 0
        self._unplaced: deque[Flight] = deque()
        self._holding: dict[str, Flight] = {}  # held back by the router
        self._rooms: dict[str, deque[Flight]] = {name: deque() for name in self.nodes}
        self._made = 0
        for name in self.nodes:
            self._beat(name)
        if router.tick_s is not None:
            loop.after(router.tick_s, self._tick)

    # ------------------------------------------------------------------------------ what policies see

    @property
    def prefill_nodes(self) -> Sequence[str]:
        return self._by_phase()[0]

    @property
    def decode_nodes(self) -> Sequence[str]:
        return self._by_phase()[1]

    @property
    def moving(self) -> Sequence[str]:
        return [name for name, phase in self._serves.items() if phase is None]

    def _by_phase(self) -> tuple[list[str], list[str]]:
        if self._lists is None:
            serves = [(name, phase) for name, phase in self._serves.items() if phase is not None]
            self._lists = (
                [name for name, phase in serves if phase.prefills],
                [name for name, phase in serves if phase.decodes],
            )
        return self._lists

    def leading(self, path: PageArray) -> Mapping[str, int]:
        return self.known.index.match(path)

    def leading_l1(self, path: PageArray) -> Mapping[str, int]:
        return self.known.index.match_tier(path, Tier.L1)

    def profile(self, node: str) -> Profile:
        return self.nodes[node].profile

    def state(self, node: str) -> NodeState | None:
        return self._states[node]

    def queued_prefill_tokens(self, node: str) -> int:
        return sum(
            flight.prompt_tokens
            for flight in self.flights.values()
            if flight.prefill_node == node and not (flight.t_prefill_start or flight.t_prefill_end)
        )

    def decode_kv_tokens(self, node: str) -> int:
        return sum(
            flight.prompt_tokens + (flight.decode.produced if flight.decode is not None else 0)
            for flight in self.flights.values()
            if flight.decode_node == node
        )

    def decode_requests(self, node: str) -> int:
        return sum(flight.decode_node == node for flight in self.flights.values())

    # ------------------------------------------------------------------------------ a request's way

    def request(self, agent: Agent, ref: StepRef, ideal_tokens: int, pages: StepPages) -> Flight:
        self._made += 1
        step = agent.session.branches[ref.branch].steps[ref.step]
        flight = Flight(f"r{self._made}", agent, ref, step, pages, self._loop.now)
        flight.ideal_tokens = ideal_tokens
        self.flights[flight.arrival.rid] = flight
        parent = agent.session.branches[ref.branch].parent
        self.known.requested(
            flight.arrival.branch,
            f"{agent.name}/{parent}" if parent >= 0 else None,
            pages.prompt,
            step.shared * agent.session.block_size // self.page_size,
        )
        self._place(flight)
        return flight

    def branch_ended(self, branch: str) -> None:
        self.known.ended(branch)

    def session_ended(self, session: str) -> None:
        self._router.session_ended(session, self._loop.now)

    def _place(self, flight: Flight) -> None:
        now, rid = self._loop.now, flight.arrival.rid
        if not self.prefill_nodes or (self._router.binds_at_routing and not self.decode_nodes):
            self._unplaced.append(flight)
            return
        placement = self._router.place(flight.arrival, self, now)
        if placement is None:
            self._holding[rid] = flight
            return
        flight.attempts += 1
        flight.placement, flight.t_placed = placement, now
        flight.prefill_node = placement.node
        if self.planner is not None:
            self.planner.placed(placement, now)
        self.known.placed(flight.arrival.branch, placement.node, Phase.PREFILL, rid)
        if self._router.binds_at_routing:
            self._bind(flight)
            self._rooms[flight.decode_node].append(flight)
            self._give_room(flight.decode_node)
        else:
            self._prefill(flight)

    def _bind(self, flight: Flight) -> None:
        now = self._loop.now
        flight.decode_node = self._router.bind(flight.arrival, flight.prefill_node, self, now)
        self.known.placed(flight.arrival.branch, flight.decode_node, Phase.DECODE, flight.arrival.rid)

    def _give_room(self, name: str) -> None:
        """Memory on a decode node for those that wait for it, in order, before their prefill."""
        waiting, node = self._rooms[name], self.nodes[name]
        while waiting and node.up:
            flight = waiting[0]
            held = node.reserve(
                flight.arrival.rid, flight.prompt_tokens, flight.pages.context, flight.output_tokens
            )
            if held is None:
                return
            waiting.popleft()
            flight.held = held
            self._prefill(flight)

    def _prefill(self, flight: Flight) -> None:
        placement = flight.placement
        assert placement is not None
        last = placement.own_pages + placement.fetch_pages
        node = self.nodes[placement.node]
        if not node.up or not node.scheduler.role.phase.prefills:
            self._again(flight)
            return
        source = placement.source if placement.fetch_pages else None
        flight.prefill = node.prefill(
            flight.arrival.rid, flight.prompt_tokens, flight.pages.prompt, source, last
        )

    def started(self, node: SimNode, request: Request, t: float) -> None:
        flight = self.flights.get(request.rid)
        if flight is None or request.kind is Kind.GENERATE or flight.prefill_node != node.name:
            return  # a decode that computes again what was lost, or a request that was withdrawn
        flight.t_prefill_start = t
        self._router.prefill_started(request.rid, t)
        if request.pull_t > 0 and request.fetched:
            seconds = request.ready_t - request.pull_t
            self._router.fetched(node.name, node.profile, request.fetched, seconds)
        if not flight.decode_node and self.decode_nodes:
            self._bind(flight)

    def prefilled(self, node: SimNode, request: Request, t: float) -> None:
        flight = self.flights.get(request.rid)
        if flight is None or request is not flight.prefill:
            node.let_go(request)
            return
        flight.t_prefill_end = t
        flight.cached_tokens, flight.fetched_tokens = request.cached, request.fetched
        flight.restored_tokens = request.restored
        self._router.prefill_done(request.rid, t)
        self._decode(flight)

    def _decode(self, flight: Flight) -> None:
        if not flight.decode_node:
            if not self.decode_nodes:
                self._unplaced.append(flight)
                return
            self._bind(flight)
        node = self.nodes[flight.decode_node]
        if not node.up:
            self._again(flight)
            return
        source = flight.prefill_node if flight.prefill_node != flight.decode_node else None
        # After what is going on in the node that prefilled it.
        self._loop.at(self._loop.now, self._generate, flight, flight.attempts, node, source)

    def _generate(self, flight: Flight, attempt: int, node: SimNode, source: str | None) -> None:
        if flight.attempts != attempt or flight.t_end:
            return
        held, flight.held = flight.held, None
        flight.decode = node.generate(
            flight.arrival.rid, flight.prompt_tokens, flight.pages.context, flight.output_tokens, source, held
        )

    def progressed(self, node: SimNode, request: Request, t: float, done: bool) -> None:
        flight = self.flights.get(request.rid)
        if flight is None or request is not flight.decode:
            return
        flight.t_first = flight.t_first or t
        self._let_go(flight)
        if done:
            flight.t_end = t
            self._loop.at(t, self._end, flight)

    def _let_go(self, flight: Flight) -> None:
        if flight.prefill is not None and flight.t_prefill_end:
            self.nodes[flight.prefill_node].let_go(flight.prefill)
            flight.prefill = None

    def _end(self, flight: Flight) -> None:
        rid = flight.arrival.rid
        if self.flights.pop(rid, None) is None:
            return
        context = flight.prompt_tokens + flight.output_tokens
        self._router.ended(rid, context, self._loop.now)
        self._finished(flight)
        self._give_room(flight.decode_node)

    def _again(self, flight: Flight) -> None:
        """The request lost its node: it begins anew."""
        self._router.ended(flight.arrival.rid, flight.prompt_tokens, self._loop.now)
        self._withdraw(flight)
        self._loop.at(self._loop.now, self._place, flight)

    def _withdraw(self, flight: Flight) -> None:
        if flight.held is not None:
            self.nodes[flight.decode_node].unreserve(flight.held)
            flight.held = None
        for waiting in self._rooms.values():
            if flight in waiting:
                waiting.remove(flight)
        if flight in self._unplaced:
            self._unplaced.remove(flight)
        if flight.t_prefill_end:
            self._let_go(flight)
        flight.attempts += 1
        flight.prefill = flight.decode = flight.placement = None
        flight.prefill_node = flight.decode_node = ""
        flight.t_prefill_start = flight.t_prefill_end = 0.0

    def moved_out(self, node: SimNode, request: Request) -> None:
        flight = self.flights.get(request.rid)
        if flight is None:
            return
        if request.kind is Kind.GENERATE and flight.t_prefill_end and not self._router.binds_at_routing:
            flight.decode, flight.decode_node = None, ""
            self._loop.at(self._loop.now, self._decode, flight)
        else:
            self._again(flight)

    def _tick(self) -> None:
        assert self._router.tick_s is not None
        for rid in self._router.tick(self, self._loop.now):
            flight = self._holding.pop(rid, None)
            if flight is not None:
                self._place(flight)
        self._loop.after(self._router.tick_s, self._tick)

    # ------------------------------------------------------------------------------ what nodes tell

    def changed(self, node: SimNode) -> None:
        """Report the node's state before long."""
        if node.name not in self._reporting and node.up:
            self._reporting.add(node.name)
            self._loop.after(self._delays.state_s, self._report, node)

    def _report(self, node: SimNode) -> None:
        self._reporting.discard(node.name)
        if not node.up:
            return
        state = self._states[node.name] = node.state()
        self._router.reported(state, self._loop.now)
        if self.on_state is not None:
            self.on_state(state)
        if self._rooms[node.name]:
            self._give_room(node.name)

    def _beat(self, name: str) -> None:
        """A node that has nothing to tell reports once in a while."""
        state, every_s = self._states[name], self._delays.idle_report_s
        if state is None or self._loop.now - state.t >= every_s / 2:
            self._report(self.nodes[name])
        self._loop.after(every_s, self._beat, name)

    def iterated(self, node: SimNode, records: list[Iteration]) -> None:
        if self.on_iterations is not None:
            self.on_iterations(Iterations(node.name, self._loop.now, node.phase, records))

    def kv_changed(self, node: SimNode, changes: list[KvChange]) -> None:
        self.known.changed(node.name, changes)

    # ------------------------------------------------------------------------------ phases

    def plan(self, epoch: int, phases: Mapping[str, Phase]) -> None:
        """A role plan: nodes change in place (section 4.1)."""
        self._epoch = max(self._epoch, epoch)
        for name, phase in phases.items():
            node = self.nodes[name]
            if not node.up:
                continue
            if node.phase is not phase or node.scheduler.role.draining:
                self._serve(name, None)
            node.set_role(epoch, phase)
            if node.phase is phase and not node.scheduler.role.draining:
                self._serve(name, phase)

    def acked(self, node: SimNode, ack: Ack) -> None:
        if ack.stage is RoleStage.SWITCHED:
            before, self._before[node.name] = self._before[node.name], ack.phase
            self.known.switched(node.name, before, ack.phase)
            # Leaving the collocated warm-up is no switch.
            if ack.switch_s and before is not Phase.BOTH and self.on_switch is not None:
                self.on_switch(node.name, ack.drain_s, ack.switch_s)
            self._serve(node.name, ack.phase)
            if self.planner is not None:
                self.planner.moved(node.name, ack.phase, self._loop.now)
        if self.on_ack is not None:
            self.on_ack(node.name, ack)

    def _serve(self, name: str, phase: Phase | None) -> None:
        if self._serves[name] is phase:
            return
        self._serves[name] = phase
        self._lists = None
        self._router.node_changed(name, phase, self._loop.now)
        if phase is not None and self._unplaced:
            waiting, self._unplaced = self._unplaced, deque()
            for flight in waiting:
                if flight.t_prefill_end:
                    self._decode(flight)
                else:
                    self._place(flight)

    def move(self, moves: Moves, moving: Moving, out_s: float) -> None:
        """A baseline planner's moves, done its way."""
        for name, phase in moves.phases.items():
            node = self.nodes[name]
            self._serve(name, None)
            if moving.kv is KvAfterMove.EMPTY:
                self.fail(name)
                self._loop.after(out_s, self.join, name, phase)
                if self.on_switch is not None:
                    self.on_switch(name, 0.0, out_s)
            else:
                self._epoch += 1
                if moving.kv is KvAfterMove.UNREACHABLE:
                    self.known.hidden(name)
                node.set_role(self._epoch, phase)

    def fail(self, name: str) -> None:
        """A node is gone at once; its requests begin anew elsewhere."""
        node = self.nodes[name]
        node.fail()
        self._states[name] = None
        self._serve(name, None)
        self.known.lost(name)
        for flight in list(self.flights.values()):
            # One whose decode has begun needs its prefill node no more.
            prefills = flight.prefill_node == name and (
                flight.prefill is not None or not flight.t_prefill_end
            )
            if flight.t_end or not (prefills or flight.decode_node == name):
                continue
            running = [(flight.decode_node, flight.decode)]
            if not flight.t_prefill_end:
                running.append((flight.prefill_node, flight.prefill))
            self._again(flight)
            for other, request in running:
                if request is not None and other != name:
                    self.nodes[other].abort(request)

    def join(self, name: str, phase: Phase) -> None:
        """A node (re)joins with an empty cache."""
        self.nodes[name].begin(phase, self._epoch)
        self.known.switched(name, None, phase)
        self._before[name] = phase
        self._serve(name, phase)
        if self.planner is not None:
            self.planner.moved(name, phase, self._loop.now)
        self.changed(self.nodes[name])

    @property
    def split(self) -> tuple[int, int]:
        """Prefill and decode nodes in service."""
        return len(self.prefill_nodes), len(self.decode_nodes)
