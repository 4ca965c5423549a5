"""Phase changes of the simulated node: what is handed back, what ends, which epoch wins."""

from __future__ import annotations

import pytest

from shared.messages import Phase, RoleStage
from shared.timing import TINY
from tests.sim_node import GAP, bring, check_empty, drain, ends, generate, make, of, pages, prefill
from worker.engines.simulated.phase import Ack
from worker.engines.simulated.requests import (
    FetchWanted,
    Moved,
    Started,
)
from worker.kv.path import Path


def test_a_phase_change_hands_back_the_queue_and_finishes_what_runs() -> None:
    node = make(Phase.PREFILL)
    node.submit(prefill("running", 300, 100), 0.0)
    node.submit(prefill("queued", 300, 500), 0.0)
    node.submit(generate("direct", 20, 900, 3), 0.0)
    node.set_role(5, Phase.DECODE, 0.001)
    events = node.take_events()
    assert [e.request.rid for e in of(Moved, events)] == ["queued"]
    state = node.state("n")
    assert (state.draining, state.phase, state.epoch) == (True, Phase.PREFILL, 0)
    late = prefill("late", 10, 700)
    node.submit(late, 0.002)
    node.submit(generate("early", 20, 800, 3, routed=True), 0.002)
    assert {e.request.rid for e in of(Moved, node.take_events())} == {"late", "early"}
    events = drain(node)
    drained, switched = of(Ack, events)
    ended = ends(events)["running"]
    # The next launch may be when the gap after the last iteration is over.
    assert (drained.stage, drained.epoch, drained.phase) == (RoleStage.DRAINED, 5, Phase.DECODE)
    assert drained.t == pytest.approx(ended + GAP, abs=1e-12)
    assert drained.drain_s == pytest.approx(ended + GAP - 0.001)
    assert switched.stage is RoleStage.SWITCHED and switched.switch_s == TINY.switch_s
    assert switched.t == pytest.approx(drained.t + TINY.switch_s)
    assert ends(events)["direct"] > 0
    after = node.state("n")
    assert (after.phase, after.epoch, after.draining) == (Phase.DECODE, 5, False)
    assert node.cache.held(Path.bare(pages(100, 300)).pages) == 18
    node.submit(generate("served", 20, 800, 3, routed=True), 1.0)
    assert "served" in ends(drain(node))
    check_empty(node)


def test_a_switch_stops_the_engine_for_its_time() -> None:
    node = make(Phase.BOTH)
    node.set_role(1, Phase.PREFILL, 1.0)
    node.submit(prefill("a", 100, 100), 1.01)  # both the old and the new phase serve it
    events = drain(node)
    assert of(Started, events)[0].t == pytest.approx(1.0 + TINY.switch_s)


def test_a_newer_epoch_while_draining_replaces_the_goal() -> None:
    node = make(Phase.DECODE)
    node.submit(generate("runs", 20, 100, 50, routed=True), 0.0)
    node.set_role(2, Phase.PREFILL, 0.005)
    node.set_role(3, Phase.BOTH, 0.006)
    node.set_role(2, Phase.DECODE, 0.007)  # older than the goal: ignored
    kept = generate("kept", 20, 300, 3, routed=True)
    node.submit(kept, 0.008)  # decode is served before and after
    events = drain(node)
    assert not of(Moved, events)
    assert [(a.stage, a.epoch, a.phase) for a in of(Ack, events)] == [
        (RoleStage.DRAINED, 3, Phase.BOTH),
        (RoleStage.SWITCHED, 3, Phase.BOTH),
    ]
    assert node.role.phase is Phase.BOTH


def test_a_newer_epoch_back_to_the_old_phase_ends_the_change_at_once() -> None:
    node = make(Phase.DECODE)
    node.submit(generate("runs", 20, 100, 50, routed=True), 0.0)
    node.set_role(2, Phase.PREFILL, 0.005)
    node.set_role(3, Phase.DECODE, 0.006)
    (ack,) = of(Ack, node.take_events())
    assert (ack.stage, ack.epoch, ack.phase) == (RoleStage.SWITCHED, 3, Phase.DECODE)
    node.submit(generate("new", 20, 300, 3, routed=True), 0.007)
    assert set(ends(drain(node))) == {"runs", "new"} and node.role.epoch == 3


def test_a_newer_epoch_during_the_switch_sets_the_phase_that_comes_out() -> None:
    node = make(Phase.DECODE)
    node.set_role(2, Phase.PREFILL, 1.0)
    node.set_role(3, Phase.DECODE, 1.01)
    events = drain(node)
    assert [(a.stage, a.epoch) for a in of(Ack, events)] == [
        (RoleStage.DRAINED, 2),
        (RoleStage.SWITCHED, 3),
    ]
    assert (node.role.phase, node.role.epoch) == (Phase.DECODE, 3)


def test_the_same_phase_only_takes_the_epoch() -> None:
    node = make(Phase.DECODE)
    node.set_role(7, Phase.DECODE, 1.0)
    node.set_role(6, Phase.PREFILL, 1.1)
    assert node.take_events() == [] and (node.role.epoch, node.role.draining) == (7, False)


def test_queued_decodes_that_have_not_begun_to_pull_are_handed_back() -> None:
    node = make(Phase.DECODE, l1_pages=10)
    first = generate("pulls", 64, 100, 90, routed=True, url="http://p")
    node.submit(first, 0.0)
    node.submit(generate("waits", 64, 500, 20, routed=True, url="http://p"), 0.0)
    node.set_role(1, Phase.PREFILL, 0.001)
    events = node.take_events()
    assert [e.request.rid for e in of(Moved, events)] == ["waits"]
    (wanted,) = of(FetchWanted, events)
    bring(node, wanted, 4, 0.002)
    events = drain(node)
    assert set(ends(events)) == {"pulls"} and node.role.phase is Phase.PREFILL


def test_stopping_hands_back_what_has_not_begun() -> None:
    node = make(Phase.BOTH)
    node.submit(prefill("runs", 300, 100), 0.0)
    node.submit(prefill("queued", 300, 500), 0.0)
    node.hand_back(0.001)
    assert [e.request.rid for e in of(Moved, node.take_events())] == ["queued"]
    assert set(ends(drain(node))) == {"runs"}
