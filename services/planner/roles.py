"""Which phase every node has: the warm-up, the split after it, and every change of it.

Rules that hold here
- No I/O, no clock, no randomness: time and the live nodes are arguments, a `RolePlan` to publish comes back.
- Every plan has a higher epoch than all before it. Whoever publishes one saves `Roles.state` first, so that
  this holds across restarts too.
- In the warm-up every node serves both phases. After it each serves one, and neither phase is ever without a
  node; a single node serves both.
- A plan is in force for a node once the node says so, by its acknowledgement or in the registry; until then
  the node is pending, and a node that stays pending too long is told again.
- The registry is believed only when it says the same `LOOKS` times in a row: one that was just restarted lists
  its nodes again within that, and an entry may be older than an acknowledgement.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from services.planner.split import moves, with_prefill_count
from shared.messages import NodeInfo, Phase, RoleAck, RolePlan, RoleStage, SplitWanted
from shared.split import HALVES, Split, split_of

LOOKS = 3


class Life(StrEnum):
    WARMUP = "warmup"
    SPLIT = "split"


class Pending(msgspec.Struct):
    """A node that has not reached its planned phase. Times are cluster seconds."""

    phase: Phase
    epoch: int  # the plan that moved it
    since_t: float
    told_t: float  # the plan was last announced
    drained: bool = False
    late: bool = False


class RolesState(msgspec.Struct):
    """All that a restart must not forget."""

    epoch: int = 0
    life: Life = Life.WARMUP
    phases: dict[str, Phase] = {}
    target: Split = HALVES
    warmup_t: float | None = None  # the warm-up began: the first node was there
    hold: bool = False
    pending: dict[str, Pending] = {}


class Step(NamedTuple):
    """What changed. `plan` is to be saved and published; `changed` names nodes that it moves to a phase."""

    plan: RolePlan | None = None
    joined: list[str] = []
    left: list[str] = []
    late: list[str] = []
    warmed_up: bool = False


class Answer(NamedTuple):
    """To an operator's wish: a plan when nodes must move, or why it cannot be done."""

    plan: RolePlan | None = None
    refusal: str = ""


class Roles:
    def __init__(
        self,
        *,
        initial: Split | None,
        warmup_s: float,
        drain_timeout_s: float,
        state: RolesState | None = None,
    ) -> None:
        """`initial` is the first split after the warm-up, None for half of the nodes each."""
        self.warmup_s, self.drain_timeout_s = warmup_s, drain_timeout_s
        self.state = state or RolesState(target=initial or HALVES)
        self._absent: dict[str, int] = {}
        self._contrary: dict[str, int] = {}

    # ------------------------------------------------------------------------- what is

    @property
    def phases(self) -> Mapping[str, Phase]:
        return self.state.phases

    @property
    def split(self) -> Split:
        return split_of(self.state.phases)

    @property
    def draining(self) -> list[str]:
        """Nodes that have not reached their planned phase."""
        return sorted(self.state.pending)

    def warmup_left_s(self, t: float) -> float:
        if self.state.life is not Life.WARMUP:
            return 0.0
        began = t if self.state.warmup_t is None else self.state.warmup_t
        return max(0.0, began + self.warmup_s - t)

    # ------------------------------------------------------------------------- events in, plans out

    def raise_epoch(self, epoch: int) -> bool:
        """Never number a plan at or below `epoch`, which was seen elsewhere. True when it was not known here."""
        unknown = epoch > self.state.epoch
        self.state.epoch = max(self.state.epoch, epoch)
        return unknown

    def announce(self, t: float, reason: str) -> RolePlan:
        """The present phases as a new plan."""
        return self._plan(t, dict(self.state.phases), reason)

    def step(self, t: float, live: Mapping[str, NodeInfo], worth: Mapping[str, float] | None = None) -> Step:
        """Look at the registry; call about once a second.

        `worth` says who prefills best (see `split.prefill_worth`); nodes without one count as equal.
        """
        state = self.state
        joined, left = self._membership(live)
        if state.warmup_t is None and live:
            state.warmup_t = t
        began = state.warmup_t is not None and state.life is Life.WARMUP
        warmed_up = began and self.warmup_left_s(t) <= 0
        if warmed_up:
            state.life = Life.SPLIT
        wanted = self._arranged(live, worth or {})
        plan = None
        if joined or left or wanted != state.phases:
            reason = self._why(joined, left, warmed_up, split_of(wanted))
            plan = self._plan(t, wanted, reason, reported={n: info.phase for n, info in live.items()})
        self._confirm(t, live)
        late = self._overdue(t)
        if late and plan is None:
            plan = self.announce(t, f"no acknowledgement from {', '.join(late)}")
        return Step(plan, joined, left, late, warmed_up)

    def ack(self, ack: RoleAck) -> bool:
        """A worker's progress; False when it is not about the plan in force."""
        pending = self.state.pending.get(ack.node)
        if pending is None or pending.phase is not ack.phase or ack.epoch < pending.epoch:
            return False
        if ack.stage is RoleStage.SWITCHED:
            del self.state.pending[ack.node]
        else:
            pending.drained = True
        return True

    def wish(self, t: float, wish: SplitWanted, worth: Mapping[str, float] | None = None) -> Answer:
        """An operator's split, hold or release. In the warm-up a split ends it."""
        if wish.release:
            self.state.hold = False
            return Answer()
        n = len(self.state.phases)
        if wish.prefill < 1 or wish.decode < 1:
            return Answer(
                refusal=f"{wish.prefill}P{wish.decode}D leaves a phase without a node; each needs one"
            )
        if wish.prefill + wish.decode != n:
            return Answer(
                refusal=f"{wish.prefill}P{wish.decode}D needs {wish.prefill + wish.decode} nodes, not {n}"
            )
        self.state.hold = wish.hold
        self.state.target = Split(wish.prefill, wish.decode)
        self.state.life = Life.SPLIT
        wanted = self._towards(wish.prefill, worth or {})
        if wanted == self.state.phases:
            return Answer()
        return Answer(self._plan(t, wanted, f"an operator asked for {wish.prefill}P{wish.decode}D"))

    def apply(self, t: float, phases: Mapping[str, Phase], reason: str) -> RolePlan:
        """The planner's own decision: `phases` names the same nodes as before."""
        self.state.target = split_of(phases)
        return self._plan(t, dict(phases), reason)

    # ------------------------------------------------------------------------- inside

    def _membership(self, live: Mapping[str, NodeInfo]) -> tuple[list[str], list[str]]:
        """Nodes that joined, and those that are gone for good."""
        known = self.state.phases
        for node in known:
            self._absent[node] = 0 if node in live else self._absent.get(node, 0) + 1
        left = [node for node in known if self._absent[node] >= LOOKS]
        if len(left) == len(known) and not live:
            left = []  # nobody is there to serve: when they come back, they find their phases
        for node in left:
            del self._absent[node]
            self._contrary.pop(node, None)
            self.state.pending.pop(node, None)
        joined = [node for node in live if node not in known]
        self.state.phases = {node: phase for node, phase in known.items() if node not in left}
        return joined, left

    def _arranged(self, live: Mapping[str, NodeInfo], worth: Mapping[str, float]) -> dict[str, Phase]:
        """Phases with every live node in; nodes that have one phase keep it while both phases have a node."""
        known = self.state.phases
        everyone = [*known, *(node for node in live if node not in known)]
        if self.state.life is Life.WARMUP or len(everyone) < 2:
            return dict.fromkeys(everyone, Phase.BOTH)
        placed = dict(known)
        for node in [node for node, phase in known.items() if phase is Phase.BOTH]:
            del placed[node]
        fresh = [node for node in everyone if node not in placed]
        target = self.state.target.prefill_of(len(everyone))
        more = min(max(target - split_of(placed).prefill, 0), len(fresh))
        # A node that already serves a phase, from a plan before it was missed, had better keep it.
        first = {node: 0 if node in live and live[node].phase is Phase.PREFILL else 1 for node in fresh}
        fresh.sort(key=lambda node: (-worth.get(node, 1.0), first[node], node))
        for i, node in enumerate(fresh):
            placed[node] = Phase.PREFILL if i < more else Phase.DECODE
        split = split_of(placed)
        if split.prefill == 0 or split.decode == 0:
            placed = with_prefill_count(placed, 1 if split.prefill == 0 else len(placed) - 1, worth)
        return placed

    def _towards(self, prefill: int, worth: Mapping[str, float]) -> dict[str, Phase]:
        """All nodes split with `prefill` of them in prefill; those that serve both now are free to choose."""
        phases = self.state.phases
        free = sorted(
            (node for node, phase in phases.items() if phase is Phase.BOTH),
            key=lambda node: (-worth.get(node, 1.0), node),
        )
        more = min(max(prefill - self.split.prefill, 0), len(free))
        placed = dict(phases)
        for i, node in enumerate(free):
            placed[node] = Phase.PREFILL if i < more else Phase.DECODE
        return with_prefill_count(placed, prefill, worth)

    def _why(self, joined: list[str], left: list[str], warmed_up: bool, split: Split) -> str:
        parts = []
        if joined:
            parts.append(f"joined: {', '.join(joined)}")
        if left:
            parts.append(f"left: {', '.join(left)}")
        if warmed_up:
            parts.append(f"warm-up ended: {split}")
        return "; ".join(parts) or f"split {split}"

    def _plan(
        self, t: float, phases: dict[str, Phase], reason: str, reported: Mapping[str, Phase] | None = None
    ) -> RolePlan:
        state = self.state
        state.epoch += 1
        before = dict(reported or {}) | dict(state.phases)
        for node, phase in moves(before, phases).items():
            state.pending[node] = Pending(phase=phase, epoch=state.epoch, since_t=t, told_t=t)
        for pending in state.pending.values():
            pending.told_t = t
        state.phases = phases
        return RolePlan(epoch=state.epoch, phases=dict(phases), reason=reason, t=t)

    def _confirm(self, t: float, live: Mapping[str, NodeInfo]) -> None:
        """Compare what the registry says with the plan: it heals what a lost acknowledgement left open."""
        for node, info in live.items():
            wanted = self.state.phases[node]
            if info.phase is wanted:
                self._contrary.pop(node, None)
                self.state.pending.pop(node, None)
                continue
            self._contrary[node] = self._contrary.get(node, 0) + 1
            if node not in self.state.pending and self._contrary[node] >= LOOKS:
                self.state.pending[node] = Pending(wanted, self.state.epoch, since_t=t, told_t=t)

    def _overdue(self, t: float) -> list[str]:
        late = []
        for node, pending in self.state.pending.items():
            if t - pending.told_t > self.drain_timeout_s:
                pending.late = True
                late.append(node)
        return sorted(late)
