"""What `GET /v1/plan` shows: the plan, the models, the last decision with its terms, and what is waited for."""

from __future__ import annotations

import math

import msgspec

from services.planner.core import PlannerCore, Refusal
from services.planner.fitting import Fit
from services.planner.roles import Life, Pending
from services.planner.split import Decision
from shared.messages import Phase
from shared.split import split_text


class WarmUp(msgspec.Struct, frozen=True):
    """Progress is 0 to 1; `records` are the prefill and decode records kept of each node being learned."""

    warmup_s: float
    left_s: float
    progress: float
    records: dict[str, tuple[int, int]]


class PlanView(msgspec.Struct, frozen=True):
    active: bool
    instance: str
    t: float
    epoch: int
    life: Life
    split: str
    target: str
    phases: dict[str, Phase]
    draining: dict[str, Pending]
    hold: bool
    automatic: bool
    warmup: WarmUp
    models: dict[str, Fit]
    newest_slice_t: float | None  # None: telemetry has published none yet
    next_decision_t: float | None  # None in the warm-up
    node_switches: int
    decision: Decision | None
    refusal: Refusal | None


def plan_view(core: PlannerCore, instance: str, t: float) -> PlanView:
    state = core.roles.state
    left_s = core.roles.warmup_left_s(t)
    collocated = state.life is Life.WARMUP
    newest_t = core.window.newest_t
    return PlanView(
        active=True,
        instance=instance,
        t=t,
        epoch=state.epoch,
        life=state.life,
        split=split_text(core.roles.phases),
        target=str(state.target),
        phases=dict(state.phases),
        draining=dict(state.pending),
        hold=state.hold,
        automatic=core.rules.automatic,
        warmup=WarmUp(
            warmup_s=core.rules.warmup_s,
            left_s=left_s,
            progress=1 - left_s / core.rules.warmup_s if core.rules.warmup_s else 1.0,
            records=core.learner.progress(),
        ),
        models=core.fits(),
        newest_slice_t=newest_t if math.isfinite(newest_t) else None,
        next_decision_t=None if collocated else core.window.state.window_t0 + core.rules.window_s,
        node_switches=core.state.node_switches,
        decision=core.state.decision,
        refusal=core.state.refusal,
    )
