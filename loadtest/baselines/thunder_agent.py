"""ThunderAgent: programs pinned to nodes and paused between requests (the scheduler that Dynamo ships; paper, D.5).

Rules that hold here
- A program is a session. It is pinned to a prefill node, counts there with the tokens of its context and
  `buffer_per_program`, and keeps the node until it is paused, ends, or the node no longer prefills. While it has
  requests in flight its context is the sum of theirs, between them that of the last.
- A node's capacity is its GPU memory and its host memory together.
- Every `scheduler_interval_s`, first some paused programs are resumed, then every node whose programs exceed
  `pause_threshold` of its capacity pauses some, smallest first, down to `pause_target`: programs that wait for tools
  now, and when these do not suffice the others as their requests end. A paused program counts nowhere and holds its
  next request back.
- Resumed are those that fit below `pause_threshold - resume_hysteresis` of the capacity: first those with a request,
  then new ones, then the rest, smallest first as long as all fit together; these are put on nodes largest first,
  each on the node with the most room. A request held for `resume_timeout_s` is let through at the next turn.
- A new program goes to a node with room for it: of these, the one with the least load, for which a program that
  waits for tools fades by half each `acting_decay_tau_s`. Without such a node, or while a program is paused, it is
  paused itself. A known program without a node goes to one with room or, without any, to the least loaded.
- Priorities within an engine's queue (soft demotion, the boost after a resume) are not part of this.
- Decode nodes come by round robin, bound at routing: ThunderAgent chooses prefill nodes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadtest.baselines.policy import Arrival, ClusterView, Placement, Router
from loadtest.baselines.round_robin import Rotation
from shared.messages import Phase


class ThunderAgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named as the peer's settings, with its defaults."""

    pause_threshold: float = 0.95
    pause_target: float = 0.80
    resume_hysteresis: float = 0.10
    resume_timeout_s: float = 1800.0
    scheduler_interval_s: float = 5.0
    acting_decay_tau_s: float = 1.0
    buffer_per_program: int = 100


class _Program:
    __slots__ = ("acting_since", "held", "in_flight", "last_tokens", "marked", "node", "paused", "steps")

    def __init__(self) -> None:
        self.node: str | None = None
        self.paused = False
        self.marked = False  # to be paused once it waits for tools
        self.steps = 0  # requests so far, the held ones too
        self.in_flight: dict[str, int] = {}  # rid -> context tokens
        self.held: dict[str, tuple[float, int]] = {}  # rid -> since when, context tokens
        self.last_tokens = 0  # context after its last request
        self.acting_since = 0.0

    @property
    def acting(self) -> bool:
        """Whether it waits for tools."""
        return not self.in_flight and not self.held

    @property
    def tokens(self) -> int:
        if self.in_flight:
            return sum(self.in_flight.values())
        if self.held:
            return sum(tokens for _, tokens in self.held.values())
        return self.last_tokens


class ThunderAgent(Router):
    binds_at_routing = True

    def __init__(self, settings: ThunderAgentSettings | None = None) -> None:
        self.settings = settings or ThunderAgentSettings()
        self.tick_s = self.settings.scheduler_interval_s
        self._decode = Rotation()
        self._programs: dict[str, _Program] = {}  # session -> its program
        self._sessions: dict[str, str] = {}  # rid in flight or held -> session

    def __len__(self) -> int:
        """Programs that have not ended."""
        return len(self._programs)

    def paused(self) -> list[str]:
        """Sessions of paused programs."""
        return [session for session, program in self._programs.items() if program.paused]

    def used_tokens(self, node: str) -> int:
        """Tokens that count on the node."""
        buffer = self.settings.buffer_per_program
        return sum(program.tokens + buffer for program in self._programs.values() if program.node == node)

    def place(self, arrival: Arrival, view: ClusterView, now: float) -> Placement | None:
        nodes = view.prefill_nodes
        if not nodes:
            raise ValueError("no node serves this phase")
        program = self._programs.get(arrival.session)
        new = program is None
        if program is None:
            program = self._programs[arrival.session] = _Program()
        if arrival.rid not in program.held:
            program.steps += 1
        if program.node not in nodes:
            program.node = None
        if program.node is None and not program.paused:
            others_wait = new and any(other.paused for other in self._programs.values())
            program.node = None if others_wait else self._roomiest(arrival.prompt_tokens, view, now)
            if program.node is None and new:
                program.paused = True
            elif program.node is None:
                program.node = self._least_loaded(view, now)
        self._sessions[arrival.rid] = arrival.session
        if program.node is None:
            program.held.setdefault(arrival.rid, (now, arrival.prompt_tokens))
            return None
        program.held.pop(arrival.rid, None)
        program.in_flight[arrival.rid] = arrival.prompt_tokens
        return Placement(program.node)

    def bind(self, arrival: Arrival, prefill_node: str, view: ClusterView, now: float) -> str:
        return self._decode.next(view.decode_nodes)

    def ended(self, rid: str, context_tokens: int, now: float) -> None:
        program = self._programs.get(self._sessions.pop(rid, ""))
        if program is None or program.held.pop(rid, None) is not None:
            return
        del program.in_flight[rid]
        program.last_tokens = context_tokens
        if program.acting:
            program.acting_since = now
            if program.marked:
                self._pause(program)

    def session_ended(self, session: str, now: float) -> None:
        program = self._programs.pop(session, None)
        for rid in (*program.in_flight, *program.held) if program else ():
            del self._sessions[rid]

    def node_changed(self, node: str, phase: Phase | None, now: float) -> None:
        if phase is None or not phase.prefills:
            for program in self._programs.values():
                if program.node == node:
                    program.node = None

    def tick(self, view: ClusterView, now: float) -> Sequence[str]:
        resumed = self._resume(view) + self._time_out(view, now)
        self._pause_until_safe(view)
        return [rid for program in resumed for rid in program.held]

    # ------------------------------------------------------------------------- inside

    def _capacity(self, view: ClusterView, node: str) -> int:
        profile = view.profile(node)
        return profile.l1_tokens + profile.l2_tokens

    def _usage(self, view: ClusterView) -> dict[str, list[_Program]]:
        """The active programs of each prefill node."""
        usage: dict[str, list[_Program]] = {node: [] for node in view.prefill_nodes}
        for program in self._programs.values():
            if program.node in usage:
                usage[program.node].append(program)
        return usage

    def _used(self, programs: Sequence[_Program]) -> int:
        return sum(program.tokens for program in programs) + len(programs) * self.settings.buffer_per_program

    def _faded(self, programs: Sequence[_Program], now: float) -> float:
        """The load of these programs, when those that wait for tools fade with time."""
        tau = self.settings.acting_decay_tau_s
        tokens = sum(
            program.tokens * (2.0 ** -((now - program.acting_since) / tau) if program.acting else 1.0)
            for program in programs
        )
        return tokens + len(programs) * self.settings.buffer_per_program

    def _roomiest(self, tokens: int, view: ClusterView, now: float) -> str | None:
        """The least loaded node that has room for so many tokens."""
        needed = tokens + self.settings.buffer_per_program
        best, best_load = None, 0.0
        for node, programs in self._usage(view).items():
            if self._capacity(view, node) - self._used(programs) < needed:
                continue
            load = self._faded(programs, now)
            if best is None or load < best_load:
                best, best_load = node, load
        return best

    def _least_loaded(self, view: ClusterView, now: float) -> str:
        usage = self._usage(view)
        return max(usage, key=lambda node: self._capacity(view, node) - self._faded(usage[node], now))

    def _pause(self, program: _Program) -> None:
        program.node, program.paused, program.marked = None, True, False

    def _pause_until_safe(self, view: ClusterView) -> None:
        settings = self.settings
        for node, programs in self._usage(view).items():
            capacity, used = self._capacity(view, node), self._used(programs)
            if used <= settings.pause_threshold * capacity:
                continue
            target = min(settings.pause_target, settings.pause_threshold) * capacity
            programs.sort(key=lambda program: program.tokens)
            for program in programs:
                if used > target and program.acting:
                    used -= program.tokens + settings.buffer_per_program
                    self._pause(program)
            if used > target:
                for program in programs:
                    program.marked = program.marked or not program.acting

    def _resume(self, view: ClusterView) -> list[_Program]:
        """Resume paused programs that fit. Returns them in the order in which they get their nodes."""
        settings = self.settings
        paused = [program for program in self._programs.values() if program.paused]
        if not paused:
            return []
        ceiling = max(0.0, settings.pause_threshold - settings.resume_hysteresis)
        room = {
            node: int(self._capacity(view, node) * ceiling) - self._used(programs)
            for node, programs in self._usage(view).items()
        }
        room = {node: tokens for node, tokens in room.items() if tokens > settings.buffer_per_program}
        paused.sort(key=lambda program: (_urgency(program), program.tokens))
        left, chosen = sum(room.values()), []
        for program in paused:
            needed = program.tokens + settings.buffer_per_program
            if needed <= left:
                chosen.append(program)
                left -= needed
        chosen.sort(key=lambda program: -program.tokens)
        resumed = []
        for program in chosen:
            needed = program.tokens + settings.buffer_per_program
            node = max(room, key=lambda node: room[node])
            if needed <= room[node]:
                room[node] -= needed
                program.node, program.paused = node, False
                resumed.append(program)
        return resumed

    def _time_out(self, view: ClusterView, now: float) -> list[_Program]:
        """Resume the programs that hold a request for too long."""
        late = [
            program
            for program in self._programs.values()
            if program.paused
            and any(now - since >= self.settings.resume_timeout_s for since, _ in program.held.values())
        ]
        for program in late:
            program.node, program.paused = self._least_loaded(view, now), False
        return late


def _urgency(program: _Program) -> int:
    """The group in which a paused program is resumed."""
    if program.steps <= 1:
        return 1
    return 2 if program.acting else 0
