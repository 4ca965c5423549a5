"""The planner without its surroundings: roles, models and split decisions put together (Algorithm E.3).

Rules that hold here
- No I/O, no clock, no randomness. The live service feeds it from Redis, a simulator from its event queue.
- `state` holds all that a restart needs besides the newest slices and, while models are being learned, the
  samples. It is to be saved before a plan that `step` or `wish` returned is published.
- Iteration-time models are fitted when the warm-up ends. A node that has told too little by then is fitted as
  soon as it, or its peers, have told enough: the cluster does not stay collocated for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from services.planner.fitting import Fit, Learner, LearnerState, NodeSamples
from services.planner.roles import Answer, Life, Roles, RolesState, Step
from services.planner.split import Decision, IterationModels, PlannerState, SplitPlanner, moves, prefill_worth
from shared.messages import (
    Iterations,
    Models,
    NodeInfo,
    NodeModel,
    Phase,
    RoleAck,
    RolePlan,
    Slice,
    SplitWanted,
)
from shared.split import Split

REFIT_S = 60.0  # cluster seconds between tries to fit nodes that had told too little


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's parameters. Times are cluster seconds; the defaults are the paper's (Appendix E.3)."""

    initial: Split | None = None  # first split, None for half of the nodes each
    warmup_s: float = 1800.0
    window_s: float = 600.0
    slices: int = 10
    skip_s: float = 120.0
    drain_timeout_s: float = 600.0
    automatic: bool = True  # False: the split changes only when an operator asks


class Refusal(msgspec.Struct, frozen=True):
    t: float
    wish: SplitWanted
    reason: str


class CoreState(msgspec.Struct):
    roles: RolesState
    window: PlannerState
    learned: LearnerState
    decision: Decision | None = None
    refusal: Refusal | None = None
    node_switches: int = 0  # nodes moved from one phase to the other since the warm-up


class Outcome(msgspec.Struct, frozen=True):
    """What a step led to. `plan` is to be published after `state` was saved."""

    plan: RolePlan | None = None
    decision: Decision | None = None
    joined: list[str] = []
    left: list[str] = []
    late: list[str] = []
    warmed_up: bool = False


class PlannerCore:
    def __init__(
        self,
        rules: Rules,
        state: CoreState | None = None,
        samples: Mapping[str, NodeSamples] | None = None,
    ) -> None:
        self.rules = rules
        self.roles = Roles(
            initial=rules.initial,
            warmup_s=rules.warmup_s,
            drain_timeout_s=rules.drain_timeout_s,
            state=state.roles if state else None,
        )
        self.window = SplitPlanner(
            window_s=rules.window_s,
            slices=rules.slices,
            skip_s=rules.skip_s,
            state=state.window if state else None,
        )
        self.learner = Learner(state.learned if state else None, samples)
        self.state = state or CoreState(self.roles.state, self.window.state, self.learner.state)
        self._profiles: dict[str, str] = {}
        self._last_fit_t = -math.inf

    # ------------------------------------------------------------------------- events

    def iterations(self, message: Iterations) -> None:
        profile = self._profiles.get(message.node)
        if profile is not None:
            self.learner.add(message, profile)

    def slice(self, message: Slice) -> None:
        self.window.add(message)

    def ack(self, t: float, message: RoleAck) -> bool:
        known = self.roles.ack(message)
        self._settle(t)
        return known

    def wish(self, t: float, message: SplitWanted) -> Answer:
        """An operator's request. A split ends the warm-up: call `fit` before one that comes in it."""
        collocated = self.roles.state.life is Life.WARMUP
        before = dict(self.roles.phases)
        answer = self.roles.wish(t, message, self._worth())
        if answer.refusal:
            self.state.refusal = Refusal(t, message, answer.refusal)
        else:
            self.state.refusal = None
        if collocated and self.roles.state.life is Life.SPLIT:
            self.window.begin(t)
        if answer.plan is not None:
            self._switching(t, before, answer.plan)
        return answer

    def step(self, t: float, live: Mapping[str, NodeInfo]) -> Outcome:
        """Look at the registry and the slices that have come; call about once a second, after `fit` if due."""
        self._profiles = {node: info.profile for node, info in live.items()}
        before = dict(self.roles.phases)
        step: Step = self.roles.step(t, live, self._worth())
        if step.warmed_up:
            self.window.begin(t)
        for node in step.left:
            self.window.forget(node)
        if step.plan is not None and step.plan.phases != before:
            self._switching(t, before, step.plan)
        self._settle(t)
        plan, decision = step.plan, None
        if plan is None and self.roles.state.life is Life.SPLIT and self.window.due:
            decision = self._decide(t)
            if decision.phases is not None:
                plan = self.roles.apply(t, decision.phases, decision.reason)
                self._switching(t, before, plan)
        return Outcome(plan, decision, step.joined, step.left, step.late, step.warmed_up)

    def _decide(self, t: float) -> Decision:
        decision = self.window.decide(t, self.roles.phases, self.models(), self.roles.draining)
        held = "an operator holds the split" if self.roles.state.hold else ""
        if not self.rules.automatic:
            held = "automatic changes are off"
        if held and decision.phases is not None:
            decision = msgspec.structs.replace(
                decision, phases=None, reason=f"{held}; else: {decision.reason}"
            )
        self.state.decision = decision
        return decision

    # ------------------------------------------------------------------------- models

    def fit_wanted(self, t: float) -> bool:
        """Whether `fit` should be called now: nodes lack models and the warm-up is over."""
        if not self._profiles or self.roles.warmup_left_s(t) > 0 or t - self._last_fit_t < REFIT_S:
            return False
        return bool(self.learner.wants(self._profiles))

    def fit(self, t: float) -> list[str]:
        """Fit the nodes that can be; returns them. Takes seconds the first time: call it off the event loop,
        and feed nothing meanwhile."""
        self._last_fit_t = t
        return self.learner.freeze(self._profiles)

    @property
    def learning(self) -> bool:
        """Whether iteration records are of use."""
        return not self._profiles or bool(self.learner.wants(self._profiles))

    def fits(self) -> dict[str, Fit]:
        """Of the live nodes, those that have models, with them."""
        return self.learner.fits(self._profiles)

    def models(self) -> dict[str, IterationModels]:
        return {node: fit.models for node, fit in self.fits().items()}

    def told_models(self, t: float) -> Models:
        """The prefill models of the live nodes, for the routers."""
        known = sorted(self.models().items())
        return Models(
            [NodeModel(node, m.prefill.c0, m.prefill.c1, m.prefill.c2, m.prefill.c3) for node, m in known], t
        )

    # ------------------------------------------------------------------------- inside

    def _worth(self) -> dict[str, float]:
        return prefill_worth(self.roles.phases, self.window.rates(self.models()), self.window.slices())

    def _switching(self, t: float, before: Mapping[str, Phase], plan: RolePlan) -> None:
        self.window.switching(t)
        self.state.node_switches += sum(
            Phase.BOTH not in (before[node], phase)
            for node, phase in moves(before, plan.phases).items()
            if node in before
        )

    def _settle(self, t: float) -> None:
        if self.window.state.switch_t1 == math.inf and not self.roles.draining:
            self.window.switched(t)
