"""A node's phase and how it changes in place (section 4.1, 4.2).

Rules that hold here
- A plan of a higher epoch than any seen before sets the phase that the node is to have; others are ignored.
- While a change is under way the node takes new work of a kind only if its old and its new phase both serve
  it. It drains: queued work of the other kinds is handed back, running work of them finishes.
- Once drained it acknowledges DRAINED, takes `switch_s` to switch, and acknowledges SWITCHED. Nothing is
  computed during the switch; pages stay readable throughout.
- A newer plan during the drain replaces the goal; one that asks for the phase that the node still has ends the
  change at once. During the switch it changes the phase that the node comes out with.

Times are cluster seconds and come in as arguments.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from shared.messages import Phase, RoleStage


class Kind(Enum):
    """What a request asks of a node: the KV of a prompt, or output tokens."""

    PREFILL = "prefill"
    GENERATE = "generate"

    def served_in(self, phase: Phase) -> bool:
        return phase.prefills if self is Kind.PREFILL else phase.decodes


class Ack(NamedTuple):
    """A step of a phase change that was reached at `t`."""

    stage: RoleStage
    epoch: int
    phase: Phase
    t: float
    drain_s: float
    switch_s: float


class PhaseChange:
    """The phase of one node and the change under way, if any."""

    def __init__(self, phase: Phase, epoch: int, switch_s: float) -> None:
        self.phase = phase
        self.epoch = epoch
        self._switch_s = switch_s
        self._goal: tuple[int, Phase] | None = None
        self._drain_t0 = 0.0
        self._drain_s = 0.0
        self._switch_end: float | None = None

    @property
    def draining(self) -> bool:
        """Whether a change is under way, from the plan to the end of the switch."""
        return self._goal is not None

    @property
    def switch_end(self) -> float | None:
        """When the switch ends; None while the node is not switching."""
        return self._switch_end

    def takes(self, kind: Kind) -> bool:
        """Whether the node takes new work of this kind from the router."""
        return kind.served_in(self.phase) and (self._goal is None or kind.served_in(self._goal[1]))

    def plan(self, epoch: int, phase: Phase, now: float) -> list[Ack]:
        """A plan names this node's phase. The caller hands back what `takes` now refuses."""
        if epoch <= (self.epoch if self._goal is None else self._goal[0]):
            return []
        if self._goal is None:
            if phase is self.phase:
                self.epoch = epoch
                return []
            self._drain_t0 = now
        elif phase is self.phase and self._switch_end is None:
            self.epoch, self._goal = epoch, None
            return [Ack(RoleStage.SWITCHED, epoch, phase, now, now - self._drain_t0, 0.0)]
        self._goal = (epoch, phase)
        return []

    def step(self, t: float, busy: bool) -> list[Ack]:
        """Go on with a change between two iterations at `t`. `busy`: the node still has work that it no longer
        takes."""
        if self._goal is None:
            return []
        acks: list[Ack] = []
        if self._switch_end is None and not busy:
            self._drain_s = max(0.0, t - self._drain_t0)
            self._switch_end = t + self._switch_s
            acks.append(Ack(RoleStage.DRAINED, *self._goal, t, self._drain_s, 0.0))
        if self._switch_end is not None and t >= self._switch_end:
            end, (self.epoch, self.phase) = self._switch_end, self._goal
            self._goal = self._switch_end = None
            acks.append(Ack(RoleStage.SWITCHED, self.epoch, self.phase, end, self._drain_s, self._switch_s))
        return acks
