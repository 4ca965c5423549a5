"""The phases of nodes over the life of a cluster, and the planner core that decides over them."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.core import CoreState, PlannerCore, Rules
from services.planner.roles import LOOKS, Life, Roles, RolesState
from shared.messages import Iterations, NodeInfo, RoleAck, RolePlan, RoleStage, SplitWanted
from shared.split import Split, parse_split, split_of
from shared.timing import PROFILES
from tests.planner_cases import BOTH, D, P, decode_record, node_info, prefill_record, slice_

GLM = PROFILES["glm-5.2-4xgb300"]


class Cluster:
    """Workers that obey plans when told to."""

    def __init__(self, n: int) -> None:
        self.live: dict[str, NodeInfo] = {f"n{i + 1}": node_info(f"n{i + 1}") for i in range(n)}

    def obey(self, plan: RolePlan) -> None:
        for node, info in self.live.items():
            self.live[node] = msgspec.structs.replace(info, phase=plan.phases[node], epoch=plan.epoch)


def made(n: int, initial: str = "", **more: float) -> tuple[Roles, Cluster]:
    values = {"warmup_s": 100.0, "drain_timeout_s": 50.0, **more}
    return Roles(initial=parse_split(initial) if initial else None, **values), Cluster(n)


def split_up(n: int, initial: str = "") -> tuple[Roles, Cluster]:
    """A cluster after its warm-up, every node in its phase; the time is 100."""
    roles, cluster = made(n, initial)
    first = roles.step(0.0, cluster.live)
    assert first.plan is not None and set(first.plan.phases.values()) == {BOTH}
    second = roles.step(100.0, cluster.live)
    assert second.warmed_up and second.plan is not None
    cluster.obey(second.plan)
    assert roles.step(100.0, cluster.live).plan is None
    assert roles.draining == []
    return roles, cluster


def ack(roles: Roles, node: str, stage: RoleStage = RoleStage.SWITCHED, **more: object) -> bool:
    values = {"epoch": roles.state.epoch, "phase": roles.phases[node], **more}
    return roles.ack(RoleAck(node=node, stage=stage, t=0.0, **values))


# ----------------------------------------------------------------- words


@pytest.mark.parametrize(("text", "split"), [("6P3D", (6, 3)), (" 2p1d ", (2, 1)), ("10P 20D", (10, 20))])
def test_a_split_is_read(text, split):
    assert parse_split(text) == split


@pytest.mark.parametrize("text", ["", "PD", "0P3D", "3P0D", "3D2P", "2P1", "-1P2D", "2P2D2", "99999P1D"])
def test_what_is_no_split_is_refused(text):
    with pytest.raises(ValueError, match="split"):
        parse_split(text)


@pytest.mark.parametrize(
    ("target", "nodes", "prefill"),
    [
        ((1, 1), 4, 2),
        ((1, 1), 9, 5),
        ((1, 1), 2, 1),
        ((6, 3), 9, 6),
        ((6, 3), 3, 2),
        ((1, 8), 3, 1),
        ((8, 1), 3, 2),
    ],
)
def test_a_target_keeps_its_ratio_and_both_phases(target, nodes, prefill):
    assert Split(*target).prefill_of(nodes) == prefill


# ----------------------------------------------------------------- warm-up and first split


def test_the_warm_up_is_collocated_and_ends_in_the_first_split():
    roles, cluster = made(4, "3P1D")
    assert roles.step(0.0, {}).plan is None
    assert roles.step(50.0, {}).plan is None  # nobody is there: the warm-up has not begun
    first = roles.step(60.0, cluster.live)
    assert first.plan.phases == dict.fromkeys(cluster.live, BOTH) and first.plan.epoch == 1
    assert roles.warmup_left_s(100.0) == 60.0
    assert roles.step(159.0, cluster.live).plan is None
    last = roles.step(160.0, cluster.live)
    assert last.warmed_up and split_of(last.plan.phases) == (3, 1) and last.plan.epoch == 2
    assert "warm-up ended" in last.plan.reason
    assert roles.draining == ["n1", "n2", "n3", "n4"]
    assert roles.step(161.0, cluster.live).plan is None


def test_workers_that_start_split_are_told_to_serve_both_in_the_warm_up():
    roles, cluster = made(2)
    cluster.live["n1"] = node_info("n1", P, epoch=7)
    roles.raise_epoch(7)
    plan = roles.step(0.0, cluster.live).plan
    assert plan.epoch == 8 and plan.phases["n1"] is BOTH and roles.draining == ["n1"]


def test_half_of_the_nodes_prefill_by_default_one_more_when_odd():
    for n, want in ((2, (1, 1)), (4, (2, 2)), (5, (3, 2)), (9, (5, 4))):
        assert split_up(n)[0].split == want


def test_the_best_prefillers_prefill_first():
    roles, cluster = made(3, "1P2D")
    worth = {"n1": 1.0, "n2": 3.0, "n3": 2.0}
    roles.step(0.0, cluster.live, worth)
    assert roles.step(100.0, cluster.live, worth).plan.phases == {"n1": D, "n2": P, "n3": D}


def test_a_single_node_serves_both_until_there_is_a_second():
    roles, cluster = made(1)
    roles.step(0.0, cluster.live)
    assert roles.step(100.0, cluster.live).plan is None
    assert roles.state.life is Life.SPLIT and roles.phases == {"n1": BOTH}
    cluster.live["n2"] = node_info("n2")
    assert roles.step(101.0, cluster.live).plan.phases == {"n1": P, "n2": D}


# ----------------------------------------------------------------- acknowledgements


def test_a_node_drains_until_it_says_that_it_switched():
    roles, cluster = split_up(4)
    plan = roles.apply(200.0, {"n1": P, "n2": D, "n3": D, "n4": D}, "test")
    assert roles.draining == ["n2"]
    assert ack(roles, "n2", RoleStage.DRAINED) and roles.state.pending["n2"].drained
    assert roles.draining == ["n2"]
    assert not ack(roles, "n2", epoch=plan.epoch - 1)
    assert not ack(roles, "n2", phase=P)
    assert not ack(roles, "n1")
    assert ack(roles, "n2")
    assert roles.draining == []
    # The registry may still say the old phase for a moment: that is no new drain.
    roles.step(201.0, cluster.live)
    assert roles.draining == []


def test_a_lost_acknowledgement_is_made_up_by_the_registry():
    roles, cluster = split_up(4)
    cluster.obey(roles.apply(200.0, {"n1": P, "n2": D, "n3": D, "n4": D}, "test"))
    assert roles.draining == ["n2"]
    roles.step(201.0, cluster.live)
    assert roles.draining == []


def test_a_node_that_does_not_obey_is_reported_and_told_again():
    roles, cluster = split_up(4)
    roles.apply(200.0, {"n1": P, "n2": D, "n3": D, "n4": D}, "test")
    epoch = roles.state.epoch
    assert roles.step(250.0, cluster.live).late == []
    late = roles.step(251.0, cluster.live)
    assert late.late == ["n2"] and late.plan.epoch == epoch + 1 and late.plan.phases == roles.phases
    assert roles.state.pending["n2"].late and roles.state.pending["n2"].since_t == 200.0
    assert roles.step(252.0, cluster.live).plan is None
    assert roles.step(302.0, cluster.live).late == ["n2"]
    assert ack(roles, "n2", epoch=epoch)  # of the plan that moved it, still good
    assert roles.draining == []


def test_a_worker_that_restarts_in_the_wrong_phase_is_noticed():
    roles, cluster = split_up(4)
    cluster.live["n1"] = node_info("n1", BOTH, incarnation="n1-2")
    for _ in range(LOOKS):
        assert roles.step(200.0, cluster.live).plan is None
    assert roles.draining == ["n1"]
    assert roles.step(251.0, cluster.live).plan.phases["n1"] is P


# ----------------------------------------------------------------- nodes that come and go


def look(roles: Roles, cluster: Cluster, t: float = 300.0, times: int = LOOKS) -> RolePlan | None:
    plan = None
    for _ in range(times):
        plan = roles.step(t, cluster.live).plan or plan
    return plan


def test_a_node_that_joins_gets_the_phase_that_keeps_the_split_nearest_to_its_target():
    roles, cluster = split_up(3, "2P1D")
    cluster.live["n4"] = node_info("n4")
    assert roles.step(200.0, cluster.live).plan.phases["n4"] is P  # 3:1 is nearer to 2:1 than 2:2
    cluster.live["n5"] = node_info("n5")
    assert roles.step(201.0, cluster.live).plan.phases["n5"] is D
    assert roles.split == (3, 2)


def test_a_node_that_leaves_is_left_out_and_finds_its_phase_again():
    roles, cluster = split_up(4)
    gone = cluster.live.pop("n4")
    assert look(roles, cluster, times=LOOKS - 1) is None
    plan = look(roles, cluster, times=1)
    assert plan.phases == {"n1": P, "n2": P, "n3": D}
    cluster.live["n4"] = gone
    assert roles.step(301.0, cluster.live).plan.phases["n4"] is D
    assert roles.draining == []


def test_a_phase_is_never_left_without_a_node():
    roles, cluster = split_up(4, "1P3D")
    del cluster.live["n1"]
    plan = look(roles, cluster)
    assert split_of(plan.phases) == (1, 2) and roles.draining == ["n2"]
    cluster.obey(plan)
    del cluster.live["n3"], cluster.live["n4"]
    plan = look(roles, cluster)
    assert plan.phases == {"n2": BOTH}


def test_a_registry_that_lost_everything_changes_nothing():
    roles, cluster = split_up(4)
    live = dict(cluster.live)
    cluster.live.clear()
    assert look(roles, cluster, times=5 * LOOKS) is None
    cluster.live |= live
    assert look(roles, cluster) is None
    assert roles.split == (2, 2)


# ----------------------------------------------------------------- an operator's wishes


def test_an_operator_sets_the_split_and_holds_it():
    roles, cluster = split_up(4)
    answer = roles.wish(200.0, SplitWanted(3, 1, hold=True))
    assert split_of(answer.plan.phases) == (3, 1) and answer.refusal == ""
    assert roles.state.hold and roles.state.target == (3, 1)
    assert roles.wish(201.0, SplitWanted(3, 1, hold=True)) == (None, "")
    assert roles.wish(202.0, SplitWanted(0, 0, release=True)) == (None, "")
    assert not roles.state.hold and roles.split == (3, 1)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (SplitWanted(4, 0), "leaves a phase without a node"),
        (SplitWanted(-1, 5), "leaves a phase without a node"),
        (SplitWanted(3, 2), "needs 5 nodes, not 4"),
        (SplitWanted(1, 1), "needs 2 nodes, not 4"),
    ],
)
def test_an_impossible_split_is_refused_and_changes_nothing(wish, reason):
    roles, _ = split_up(4)
    before = msgspec.msgpack.encode(roles.state)
    answer = roles.wish(200.0, wish)
    assert answer.plan is None and reason in answer.refusal
    assert msgspec.msgpack.encode(roles.state) == before


def test_a_wish_in_the_warm_up_ends_it():
    roles, cluster = made(4)
    roles.step(0.0, cluster.live)
    answer = roles.wish(10.0, SplitWanted(1, 3))
    assert split_of(answer.plan.phases) == (1, 3)
    assert roles.state.life is Life.SPLIT
    cluster.obey(answer.plan)
    assert roles.step(11.0, cluster.live).plan is None


def test_a_wish_that_turns_a_draining_node_back_waits_for_it_again():
    roles, _ = split_up(4)
    roles.wish(200.0, SplitWanted(1, 3))
    assert roles.draining == ["n1"]
    first = roles.state.epoch
    back = roles.wish(201.0, SplitWanted(2, 2))
    assert back.plan.epoch == first + 1 and roles.state.pending["n1"].phase is P
    assert not ack(roles, "n1", epoch=first, phase=D)
    assert ack(roles, "n1")


# ----------------------------------------------------------------- whatever happens

event = st.one_of(
    st.tuples(st.just("join"), st.integers(1, 7)),
    st.tuples(st.just("leave"), st.integers(1, 7)),
    st.tuples(st.just("wish"), st.integers(0, 7)),
    st.tuples(st.just("obey"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 90)),
    st.tuples(st.just("restart"), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(event, max_size=40), st.sampled_from(["", "1P3D", "3P1D"]))
def test_epochs_rise_and_both_phases_have_a_node_whatever_happens(events, initial):
    roles, cluster = made(3, initial)
    t, last = 0.0, 0
    told: RolePlan | None = None
    for kind, n in events:
        node, plans = f"n{n}", []
        if kind == "join":
            cluster.live.setdefault(node, node_info(node))
        elif kind == "leave":
            cluster.live.pop(node, None)
        elif kind == "wish":
            plans.append(roles.wish(t, SplitWanted(n, len(roles.phases) - n)).plan)
        elif kind == "obey" and told is not None and cluster.live.keys() <= told.phases.keys():
            cluster.obey(told)
        elif kind == "wait":
            t += n
        elif kind == "restart":
            blob = msgspec.msgpack.encode(roles.state)
            roles, _ = made(0, initial), None
            roles = Roles(
                initial=None,
                warmup_s=100.0,
                drain_timeout_s=50.0,
                state=msgspec.msgpack.decode(blob, type=RolesState),
            )
        for _ in range(LOOKS):
            t += 1
            plans.append(roles.step(t, cluster.live).plan)
        for plan in plans:
            if plan is not None:
                assert plan.epoch > last
                last, told = plan.epoch, plan
        if cluster.live:
            assert roles.phases.keys() == cluster.live.keys()
        if told is not None:
            assert told.phases == roles.phases
        assert set(roles.draining) <= roles.phases.keys()
        if roles.state.life is Life.WARMUP or len(roles.phases) == 1:
            assert set(roles.phases.values()) <= {BOTH}
        elif roles.phases:
            assert set(roles.phases.values()) == {P, D}


# ----------------------------------------------------------------- all of the planner together


def core_of(cluster: Cluster, **more: object) -> PlannerCore:
    return PlannerCore(Rules(warmup_s=100.0, **more))


def learn(core: PlannerCore, nodes: list[str], seed: int = 0) -> None:
    rng = random.Random(seed)
    for node in nodes:
        for _ in range(60):
            prefill = prefill_record(GLM.prefill, rng.randint(1, 8192), rng.randint(0, 100_000))
            decode = decode_record(GLM.decode, rng.randint(1, 40))
            core.iterations(Iterations(node, 1.0, BOTH, [prefill, decode]))


AGENTS = {
    "t_uc": 4600.0,
    "t_c": 120_000.0,
    "pairs": 6e8,
    "t_out": 440.0,
    "t_acc": 1.4,
    "in_decode": 60.0,
    "t_bar": 4000.0,
}


def run_window(core: PlannerCore, t0: float, **values: float) -> None:
    for i in range(10):
        core.slice(slice_(t0 + 60 * i, dict(core.roles.phases), **{**AGENTS, **values}))


def test_warm_up_fit_split_window_switch():
    cluster = Cluster(4)
    for node in cluster.live:
        cluster.live[node] = node_info(node, profile=GLM.name)
    core = core_of(cluster, initial=Split(1, 3))
    cluster.obey(core.step(0.0, cluster.live).plan)
    learn(core, list(cluster.live))
    assert not core.fit_wanted(99.0) and core.learning
    assert core.fit_wanted(100.0)
    assert core.fit(100.0) == ["n1", "n2", "n3", "n4"]
    assert not core.learning
    out = core.step(100.0, cluster.live)
    assert out.warmed_up and split_of(out.plan.phases) == (1, 3)
    cluster.obey(out.plan)
    core.step(106.0, cluster.live)
    assert core.window.state.switch_t1 == 106.0
    run_window(core, 120.0)
    out = core.step(721.0, cluster.live)
    assert out.decision is not None and out.decision.slices == 8  # those before 226 do not count
    assert out.plan is not None and out.plan.phases == out.decision.phases
    assert split_of(out.plan.phases).prefill > 1
    assert core.roles.state.target == split_of(out.plan.phases)
    assert core.state.node_switches == len(core.roles.draining) > 0
    # While a node drains there is no second decision, whatever the slices say.
    run_window(core, 720.0)
    out = core.step(1321.0, cluster.live)
    assert out.plan is None and out.decision.reason.startswith("still draining")


def test_a_held_split_is_not_changed_but_what_would_be_done_is_said():
    for rules, hold, word in (
        ({}, True, "an operator holds"),
        ({"automatic": False}, False, "automatic changes"),
    ):
        cluster = Cluster(4)
        for node in cluster.live:
            cluster.live[node] = node_info(node, profile=GLM.name)
        core = core_of(cluster, **rules)
        cluster.obey(core.step(0.0, cluster.live).plan)
        learn(core, list(cluster.live))
        core.fit(1.0)
        cluster.obey(core.wish(2.0, SplitWanted(1, 3, hold=hold)).plan)
        core.step(3.0, cluster.live)
        run_window(core, 180.0)
        out = core.step(781.0, cluster.live)
        assert out.plan is None and out.decision.phases is None
        assert out.decision.reason.startswith(word) and "predicted to serve" in out.decision.reason
        assert core.roles.split == (1, 3)


def test_a_refused_wish_is_remembered_until_the_next_good_one():
    cluster = Cluster(4)
    core = core_of(cluster)
    core.step(0.0, cluster.live)
    core.wish(1.0, SplitWanted(9, 9))
    assert core.state.refusal.reason == "9P9D needs 18 nodes, not 4"
    core.wish(2.0, SplitWanted(2, 2))
    assert core.state.refusal is None


def test_a_restart_goes_on_where_it_was():
    cluster = Cluster(4)
    for node in cluster.live:
        cluster.live[node] = node_info(node, profile=GLM.name)
    core = core_of(cluster, initial=Split(1, 3))
    cluster.obey(core.step(0.0, cluster.live).plan)
    learn(core, list(cluster.live))
    core.fit(100.0)
    cluster.obey(core.step(100.0, cluster.live).plan)
    core.step(101.0, cluster.live)
    run_window(core, 120.0)
    again = PlannerCore(
        core.rules, msgspec.msgpack.decode(msgspec.msgpack.encode(core.state), type=CoreState)
    )
    run_window(again, 120.0)
    one, two = core.step(721.0, cluster.live), again.step(721.0, cluster.live)
    assert one == two and one.plan is not None
    third = PlannerCore(
        core.rules, msgspec.msgpack.decode(msgspec.msgpack.encode(core.state), type=CoreState)
    )
    assert third.roles.phases == core.roles.phases and third.roles.draining == core.roles.draining
    assert third.step(722.0, cluster.live).plan is None


def test_an_idle_warm_up_still_ends_and_models_follow_with_the_load():
    cluster = Cluster(2)
    for node in cluster.live:
        cluster.live[node] = node_info(node, profile=GLM.name)
    core = core_of(cluster)
    cluster.obey(core.step(0.0, cluster.live).plan)
    assert core.fit_wanted(100.0) and core.fit(100.0) == []
    cluster.obey(core.step(100.0, cluster.live).plan)
    core.step(101.0, cluster.live)
    assert core.roles.split == (1, 1) and core.learning
    run_window(core, 120.0)
    assert "no iteration-time models yet" in core.step(721.0, cluster.live).decision.reason
    learn(core, ["n1", "n2"])
    assert not core.fit_wanted(150.0) and core.fit_wanted(721.0)
    assert core.fit(721.0) == ["n1", "n2"]
