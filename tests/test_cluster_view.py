"""The live picture: nodes, rates, latencies, hit rate, splits and switches, all bounded."""

from __future__ import annotations

import msgspec
import pytest

from services.telemetry import cluster
from services.telemetry.cluster import ClusterView
from shared.messages import (
    Outcome,
    QueuedPrefill,
    RoleAck,
    RolePlan,
    RoleStage,
)
from shared.split import split_text
from tests.planner_cases import BOTH, D, P, node_info, node_state
from tests.test_windows import done


def view(**more: float) -> ClusterView:
    return ClusterView(cluster="main", **more)


def test_nodes_show_their_state_and_its_age():
    v = view()
    v.nodes({"n1": node_info("n1", P), "n2": node_info("n2", D)})
    v.state(node_state("n1", 98.0, queue=[QueuedPrefill("a", 100, 0), QueuedPrefill("b", 50, 5)]))
    v.state(node_state("n1", 97.0))  # older
    v.planned(RolePlan(3, {"n1": D, "n2": D}, "test", 90.0))
    one, two = v.summary(100.0).nodes
    assert (one.node, one.phase, one.planned, one.age_s) == ("n1", P, D, 2.0)
    assert (one.queue, one.queue_tokens, one.prefills) == (2, 150, 1)
    assert (one.l1_pages, one.l2_pages, one.l2_counted_pages) == (10, 30, 20)
    assert (one.l1_capacity_pages, one.l2_capacity_pages) == (512, 2048)
    assert (two.phase, two.age_s, two.queue) == (D, None, 0)


def test_a_node_that_left_or_restarted_loses_its_state():
    v = view()
    v.nodes({"n1": node_info("n1"), "n2": node_info("n2")})
    v.state(node_state("n1", 98.0))
    v.state(node_state("n2", 98.0))
    v.nodes({"n1": node_info("n1", incarnation="again")})
    (one,) = v.summary(100.0).nodes
    assert one.age_s is None


def test_rates_and_latencies_over_the_window():
    v = view()
    for i in range(100):
        # Arrived 10 s, first token 7 s before the end; 99 gaps of tokens in 7 s.
        v.request(done(1000.0 + i, prompt=1000, cached=900, out=100))
    v.request(done(1099.0, out=1, prompt=1000, cached=0))
    s = v.summary(1100.0)
    assert s.requests == 101 and s.outcomes["ok"] == 101 and s.failed == 0
    assert s.ttft_s.p50 == pytest.approx(3.0) and s.e2e_s.p95 == pytest.approx(10.0)
    assert s.tpot_s.mean == pytest.approx(7 / 99)
    assert s.kv_hit_rate == pytest.approx(90_000 / 101_000)
    assert s.req_per_s == pytest.approx(101 / 110)  # over the life of the cluster so far
    later = v.summary(1150.0)
    assert later.req_per_s == pytest.approx(71 / 120)
    assert later.requests == 101
    empty = v.summary(2000.0)
    assert empty.req_per_s == 0.0 and empty.ttft_s.p95 is None and empty.kv_hit_rate is None


def test_failures_count_by_outcome_and_not_as_served():
    v = view()
    v.request(done(10.0, outcome=Outcome.FAILED))
    v.request(done(11.0, outcome=Outcome.CLIENT_GONE))
    s = v.summary(12.0)
    assert (s.requests, s.failed, s.outcomes["client_gone"], s.req_per_s) == (2, 1, 1, 0.0)
    assert s.e2e_s.mean is None


def test_splits_over_time_and_switches():
    v = view()
    v.planned(RolePlan(1, {"a": BOTH, "b": BOTH, "c": BOTH}, "warm-up", 0.0))
    assert v.summary(1.0).splits == []
    v.planned(RolePlan(2, {"a": P, "b": D, "c": D}, "warm-up ended", 100.0))
    v.planned(RolePlan(3, {"a": P, "b": P, "c": D}, "better", 200.0))
    v.planned(RolePlan(4, {"a": P, "b": P, "c": D}, "told again", 210.0))
    v.planned(RolePlan(3, {"a": D, "b": D, "c": P}, "old", 220.0))
    v.planned(RolePlan(5, {"a": D, "b": P, "c": P}, "swapped", 300.0))
    v.planned(RolePlan(6, {"a": D, "b": P}, "left: c", 310.0))
    s = v.summary(400.0)
    assert s.splits == [(100.0, 1, 2), (200.0, 2, 1), (310.0, 1, 1)]
    assert (s.switches, s.node_switches, s.epoch, s.reason) == (2, 3, 6, "left: c")
    v.ack(RoleAck("b", 3, P, RoleStage.DRAINED, 203.0, 3.0))
    v.ack(RoleAck("b", 3, P, RoleStage.SWITCHED, 203.7, 3.0, 0.7))
    assert v.summary(400.0).switched == [(203.7, "b", P, 3.0, 0.7)]


@pytest.mark.parametrize(
    ("phases", "text"),
    [((P, D, D), "1P2D"), ((BOTH, BOTH), "2 collocated"), ((P, D, BOTH), "1P1D+1"), ((), "0P0D")],
)
def test_split_in_words(phases, text):
    assert split_text({str(i): phase for i, phase in enumerate(phases)}) == text


def test_history_is_sampled_and_bounded(monkeypatch):
    v = view(point_every_s=10.0)
    v.nodes({"n1": node_info("n1", P), "n2": node_info("n2", D)})
    v.state(node_state("n1", 0.0, queue=[QueuedPrefill("a", 1, 0)]))
    v.request(done(0.5))
    first = v.take_point(1.0)
    assert first is not None and (first.prefill, first.decode, first.queue) == (1, 1, 1)
    assert first.ttft_p95_s == pytest.approx(3.0) and first.kv_hit_rate == pytest.approx(0.8)
    assert v.take_point(10.9) is None
    for i in range(2 * cluster.MOST_POINTS):
        assert v.take_point(11.0 + 10 * i) is not None
    assert len(v.points) == cluster.MOST_POINTS
    for i in range(3 * cluster.MOST_CHANGES):
        v.planned(RolePlan(i + 1, {"a": P, "b": D, "c": P if i % 2 else D}, "", float(i)))
    assert len(v.splits) == cluster.MOST_CHANGES


def test_a_summary_is_json_with_the_promised_keys():
    v = view()
    v.nodes({"n1": node_info("n1", P)})
    v.state(node_state("n1", 1.0))
    got = msgspec.json.decode(msgspec.json.encode(v.summary(2.0)))
    for key in ("t", "split", "epoch", "nodes", "req_per_s", "ttft_s", "tpot_s", "e2e_s", "kv_hit_rate"):
        assert key in got
    for key in ("requests", "failed", "switches", "splits"):
        assert key in got
    assert got["ttft_s"].keys() == {"mean", "p50", "p95", "p99"}
    wanted = {"node", "phase", "draining", "queue", "decodes", "l1_pages", "l2_pages", "l2_counted_pages"}
    assert wanted <= got["nodes"][0].keys()
