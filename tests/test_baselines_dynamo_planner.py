"""The Dynamo planner by hand: thresholds at their edges, the clamp of 1.5.1, what 1.6.1 holds, and what never happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.baselines.dynamo_planner import DynamoPlanner, DynamoPlannerSettings, clamp
from shared.messages import Phase
from tests.test_baselines_view import View

P, D = Phase.PREFILL, Phase.DECODE
CAPACITY = 1000
MIDDLE_QUEUE, MIDDLE_KV = 100_000, 800  # asks for nothing


def cluster(prefill: int, decode: int, queued: int = MIDDLE_QUEUE, kv: int = MIDDLE_KV) -> View:
    """Prefill nodes p0, p1, ..., decode nodes d0, d1, ... with KV for 1,000 tokens; the same on all."""
    view = View(
        " ".join(f"p{i}" for i in range(prefill)),
        " ".join(f"d{i}" for i in range(decode)),
        page_size=10,
        chunk_tokens=100,
        l1_tokens=CAPACITY,
        l2_tokens=CAPACITY,
        max_context=CAPACITY,
    )
    view.queued = dict.fromkeys(view.prefill_nodes, queued)
    view.kv = dict.fromkeys(view.decode_nodes, kv)
    return view


def planner(release: str = "1.5.1", **settings: float) -> DynamoPlanner:
    assert release in ("1.5.1", "1.6.1")
    return DynamoPlanner(release, DynamoPlannerSettings(**{"start_s": 0.0, **settings}))


# ----------------------------------------------------------------- what a phase asks for


@pytest.mark.parametrize(
    ("queued", "more"),
    [
        ([200_000, 0, 0], 1),  # any node, at least the context length
        ([199_999, 0, 0], 0),
        ([20_000, 0, 0], 0),  # all, below a tenth of it
        ([19_999, 0, 0], -1),
        ([19_999, 19_999, 20_000], 0),
        ([0], 0),  # the last node stays
        ([200_000], 1),
    ],
)
def test_prefill_follows_queued_tokens(queued, more):
    view = cluster(len(queued), 2)
    view.queued = dict(zip(view.prefill_nodes, queued, strict=True))
    assert planner().proposals(view) == (more, 0)


@pytest.mark.parametrize(
    ("kv", "more"),
    [
        ([1001, 0, 0], 1),  # any node, above its capacity
        ([1000, 0, 0], 0),
        ([600, 0, 0], 0),  # all, below 0.6 of it
        ([599, 599, 599], -1),
        ([599, 599, 600], 0),
        ([0], 0),
        ([1001], 1),
    ],
)
def test_decode_follows_kv(kv, more):
    view = cluster(2, len(kv))
    view.kv = dict(zip(view.decode_nodes, kv, strict=True))
    assert planner().proposals(view) == (0, more)


def test_thresholds_and_context_length_are_settings():
    view = cluster(2, 2, queued=500, kv=500)
    assert planner(context_length=500).proposals(view) == (1, -1)
    assert planner(context_length=500, prefill_up=1.1, decode_down=0.4).proposals(view) == (0, 0)


# ----------------------------------------------------------------- the split that follows


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        # decode +1 takes from prefill: 6 * 9 / 10 = 5.4
        ((6, 3), (0, 1), (5, 4)),
        ((5, 4), (0, 1), (4, 5)),
        ((2, 7), (0, 1), (1, 8)),
        ((1, 8), (0, 1), (1, 8)),  # 0.9 would be none
        ((60, 36), (0, 1), (59, 37)),
        # prefill +1 alone never takes from decode: 7 * 9 / 10 = 6.3
        ((6, 3), (1, 0), (6, 3)),
        ((1, 8), (1, 0), (1, 8)),
        ((8, 1), (1, 0), (8, 1)),
        # both +1: 7 * 9 / 11 = 5.7; 5 * 9 / 11 = 4.1
        ((6, 3), (1, 1), (5, 4)),
        ((5, 4), (1, 1), (4, 5)),
        ((4, 5), (1, 1), (4, 5)),
        ((8, 1), (1, 1), (7, 2)),
        # an opposing pair keeps the total
        ((6, 3), (1, -1), (7, 2)),
        ((6, 3), (-1, 1), (5, 4)),
        # what leaves a node without work keeps the split
        ((6, 3), (-1, 0), (6, 3)),
        ((6, 3), (0, -1), (6, 3)),
        ((6, 3), (-1, -1), (6, 3)),
        ((6, 3), (0, 0), (6, 3)),
    ],
)
def test_release_1_5_1_clamps(before, asked, after):
    assert planner("1.5.1").target(*before, *asked) == after


@pytest.mark.parametrize("more_prefill", [-1, 0, 1])
@pytest.mark.parametrize("more_decode", [-1, 0, 1])
def test_release_1_6_1_moves_on_an_opposing_pair_only(more_prefill, more_decode):
    opposing = more_prefill * more_decode == -1
    after = (6 + more_prefill, 3 + more_decode) if opposing else (6, 3)
    assert planner("1.6.1").target(6, 3, more_prefill, more_decode) == after


@pytest.mark.parametrize(
    ("prefill", "decode", "total", "split"),
    [
        (7, 4, 9, (5, 4)),
        (6, 4, 9, (5, 4)),
        (2, 1, 2, (1, 1)),
        (1, 9, 9, (1, 8)),
        (9, 2, 9, (7, 2)),
        (9, 1, 8, (7, 1)),
    ],
)
def test_the_clamp_by_hand(prefill, decode, total, split):
    assert clamp(prefill, decode, total) == split


# ----------------------------------------------------------------- decisions


def test_decode_above_its_capacity_takes_the_newest_prefill_node():
    decision = planner().decide(cluster(6, 3, kv=1001), 5.0)
    assert decision is not None
    assert decision.phases == {"p5": D}
    assert decision.reason == "prefill +0, decode +1: 6P3D to 5P4D"
    assert planner("1.6.1").decide(cluster(6, 3, kv=1001), 5.0) is None


def test_an_opposing_pair_moves_in_both_releases():
    for release in ("1.5.1", "1.6.1"):
        to_prefill = planner(release).decide(cluster(4, 5, queued=200_000, kv=100), 5.0)
        to_decode = planner(release).decide(cluster(4, 5, queued=0, kv=1001), 5.0)
        assert to_prefill is not None
        assert to_prefill.phases == {"d4": P}
        assert to_decode is not None
        assert to_decode.phases == {"p3": D}


def test_prefill_alone_takes_nothing():
    assert planner().decide(cluster(4, 5, queued=10**6), 5.0) is None


def test_there_is_no_decision_while_a_node_moves_nor_before_the_start():
    view = cluster(6, 3, kv=1001)
    assert planner(start_s=1800).decide(view, 1799.9) is None
    assert planner(start_s=1800).decide(view, 1800.0) is not None
    view.moving = ["x"]
    assert planner().decide(view, 5.0) is None


def test_the_papers_drift_goes_on_until_prefill_has_one_node():
    splits = []
    view = cluster(6, 3, kv=1001)
    while (decision := planner().decide(view, 5.0)) is not None:
        (node,) = decision.phases
        view.prefill_nodes.remove(node)
        view.decode_nodes.append(node)
        view.kv[node] = 1001
        splits.append((len(view.prefill_nodes), len(view.decode_nodes)))
    assert splits == [(5, 4), (4, 5), (3, 6), (2, 7), (1, 8)]


@given(
    queued=st.lists(st.sampled_from([0, 19_999, 20_000, 199_999, 200_000]), min_size=1, max_size=40),
    kv=st.lists(st.sampled_from([0, 599, 600, 1000, 1001]), min_size=1, max_size=40),
    release=st.sampled_from(["1.5.1", "1.6.1"]),
)
def test_a_phase_keeps_a_node_the_total_stays_and_moved_nodes_change_phase(queued, kv, release):
    view = cluster(len(queued), len(kv))
    view.queued = dict(zip(view.prefill_nodes, queued, strict=True))
    view.kv = dict(zip(view.decode_nodes, kv, strict=True))
    decision = planner(release).decide(view, 5.0)
    if decision is None:
        return
    moved = decision.phases
    assert moved
    assert len(set(moved.values())) == 1
    left = [node for node in view.prefill_nodes if node not in moved]
    assert all(phase is (D if node in view.prefill_nodes else P) for node, phase in moved.items())
    assert 1 <= len(left) + sum(phase is P for phase in moved.values()) < len(queued) + len(kv)


@given(prefill=st.integers(1, 100), decode=st.integers(1, 100))
def test_the_clamps_rules_of_thumb(prefill, decode):
    made, total = planner(), prefill + decode
    assert made.target(prefill, decode, 0, 1) == (max(1, prefill - 1), total - max(1, prefill - 1))
    assert made.target(prefill, decode, 1, 0) == (prefill, decode)
    takes = 2 * prefill > total  # more than half of the nodes
    assert made.target(prefill, decode, 1, 1) == (prefill - takes, decode + takes)
