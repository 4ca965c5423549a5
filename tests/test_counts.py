"""Algorithm E.2: the cases of Figure 4 by name, then its rules one by one."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest

from services.directory.core import Batch, Directory
from shared.kvfollow import KV_STREAM
from shared.messages import (
    BranchRequest,
    KvSnapshot,
    Phase,
    RoleAck,
    RoleStage,
    Tier,
    pack_pages,
)
from tests.directory_cluster import Cluster
from tests.directory_oracle import (
    ended,
    node_info,
    page_names,
    placed,
    removed,
    stored,
)

P, D, BOTH = Phase.PREFILL, Phase.DECODE, Phase.BOTH
SYSTEM = page_names("ss")


def written(batch: Batch) -> dict[str, dict[int, int]]:
    """R as the batch writes it."""
    return {
        node: dict(zip(found.pages.tolist(), found.counts.tolist(), strict=True))
        for node, found in batch.commit.counts.items()
    }


def two_and_one() -> Cluster:
    return Cluster({"P1": P, "P2": P, "D1": D})


# ------------------------------------------------------------------------------------ Figure 4


def test_figure_4_branches_share_the_system_prompt() -> None:
    """Both branches start on P1: 2 on the system prompt, 1 on each branch's own context."""
    c = two_and_one()
    one, two = page_names("ss11"), page_names("ss22")
    c.serve("1", one, "P1")
    c.serve("2", two, "P1")
    assert [c.R("P1", page) for page in one] == [2, 2, 1, 1]
    assert [c.R("P1", page) for page in two] == [2, 2, 1, 1]
    c.check()


def test_figure_4a_consecutive_request_counts_only_its_new_block() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "P1")
    c.take()
    longer = page_names("ss1n")
    c.serve("1", longer, "P1")
    batch = c.take()
    assert written(batch) == {"P1": {longer[3]: 1}}
    assert batch.changes["P1"].positive.tolist() == [longer[3]] and not batch.changes["P1"].zero.size
    assert list(batch.commit.pages.values()) == [(3, pack_pages([longer[3]]))]
    assert [c.R("P1", page) for page in longer] == [1, 1, 1, 1]
    c.check()


def test_figure_4b_compaction_releases_the_old_version() -> None:
    c = two_and_one()
    v1, v2 = page_names("ss1111"), page_names("ssv")
    c.serve("1", v1, "P1")
    c.serve("2", page_names("ss2"), "P1")
    c.take()
    c.request("1", v2)
    # The dropped history is released at the request, before the new version is placed.
    assert [c.R("P1", page) for page in v1] == [2, 2, 0, 0, 0, 0]
    assert c.R("P1", v2[2]) == 0
    c.place("1", "P1")
    assert [c.R("P1", page) for page in v2] == [2, 2, 1]
    branch = c.directory.table.get("1")
    assert branch is not None and branch.version == 2
    changes = c.take().changes["P1"]
    assert changes.positive.tolist() == [v2[2]] and sorted(changes.zero.tolist()) == sorted(v1[2:])
    c.check()


def test_figure_4c_move_between_prefill_nodes_moves_the_counts() -> None:
    c = two_and_one()
    path = page_names("ss1")
    c.serve("1", path, "P1")
    c.serve("2", page_names("ss2"), "P1")
    c.request("1", page_names("ss1n"))
    c.place("1", "P2")
    longer = page_names("ss1n")
    # P2 counts at once; P1 keeps its counts until P2 holds the current version.
    assert [c.R("P2", page) for page in longer] == [1, 1, 1, 1]
    assert [c.R("P1", page) for page in path] == [2, 2, 1]
    c.store_pages("P2", path)
    assert [c.R("P1", page) for page in path] == [2, 2, 1]
    c.store_pages("P2", longer)
    assert [c.R("P1", page) for page in path] == [1, 1, 0]
    assert [c.R("P2", page) for page in longer] == [1, 1, 1, 1]
    c.check()


def test_figure_4c_move_to_a_node_that_holds_all_settles_at_once() -> None:
    c = Cluster({"D1": D, "D2": D})
    path = page_names("ss1")
    c.store_pages("D2", path, Tier.L1)
    c.serve("1", path, "D1")
    c.place("1", "D2")
    assert [c.R("D1", page) for page in path] == [0, 0, 0]
    assert [c.R("D2", page) for page in path] == [1, 1, 1]
    assert c.directory.counts.pending_moves == 0
    c.check()


def test_figure_4d_alternating_between_phases_keeps_both_copies() -> None:
    c = two_and_one()
    path = page_names("ss1")
    c.serve("1", path, "P1", "D1")
    c.take()
    for step in ("ss1n", "ss1nm"):
        longer = page_names(step)
        c.serve("1", longer, "P1", "D1")
        batch = c.take()
        assert written(batch) == {"P1": {longer[-1]: 1}, "D1": {longer[-1]: 1}}
    assert all(c.R(node, page) == 1 for node in ("P1", "D1") for page in longer)
    c.check()


# ------------------------------------------------------------------------------------ the rules one by one


def test_end_releases_everything() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "P1", "D1")
    c.serve("2", page_names("ss2"), "P1")
    c.end("1")
    assert [c.R("P1", page) for page in page_names("ss1")] == [1, 1, 0]
    assert c.directory.counts.counted_pages("D1") == 0
    c.check_stored()


def test_fork_counts_what_it_reuses() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss11"), "P1")
    c.serve("fork", page_names("ss1f"), "P1")
    assert [c.R("P1", page) for page in page_names("ss1f")] == [2, 2, 2, 1]
    c.check()


def test_decode_to_prefill_resets_and_prefill_to_decode_keeps() -> None:
    c = two_and_one()
    path = page_names("ss1")
    c.serve("1", path, "P1", "D1")
    c.switch("D1", P)
    assert c.directory.counts.counted_pages("D1") == 0
    c.switch("P1", D)
    assert [c.R("P1", page) for page in path] == [1, 1, 1]
    c.check()
    # What P1 kept is now the decode copy: the next decode placement elsewhere moves it.
    c.switch("P2", D)
    c.place("1", "P2")
    c.store_pages("P2", path)
    assert c.directory.counts.counted_pages("P1") == 0
    c.check_stored()


def test_prefill_placement_that_is_heard_of_before_the_switch_survives_it() -> None:
    c = two_and_one()
    path = page_names("ss1")
    c.serve("old", page_names("sso"), "D1")
    c.request("1", path)
    c.send(placed("1", "D1", P, c.tick()))
    c.apply("roles", "D1", RoleAck("D1", 1, P, RoleStage.SWITCHED, c.tick()))
    assert [c.R("D1", page) for page in path] == [1, 1, 1]
    assert c.R("D1", page_names("sso")[2]) == 0


def test_collocated_nodes_hold_a_copy_for_each_phase() -> None:
    c = Cluster({"A": BOTH, "B": BOTH})
    path = page_names("ss1")
    c.request("1", path)
    c.place("1", "A", P)
    c.place("1", "A", D)
    c.store_pages("A", path)
    c.place("1", "B", D)
    c.store_pages("B", path)
    # The decode copy moved; the prefill copy stays.
    assert [c.R("A", page) for page in path] == [1, 1, 1]
    c.place("1", "B", P)
    assert c.directory.counts.counted_pages("A") == 0
    assert [c.R("B", page) for page in path] == [1, 1, 1]
    c.check()


def test_end_of_the_warm_up_keeps_the_counts() -> None:
    c = Cluster({"A": BOTH, "B": BOTH})
    path = page_names("ss1")
    c.request("1", path)
    c.place("1", "A", P)
    c.place("1", "B", D)
    c.switch("A", D)
    c.switch("B", P)
    assert all(c.R(node, page) == 1 for node in "AB" for page in path)
    c.check()


def test_page_leaves_the_counts_with_its_last_tier() -> None:
    c = two_and_one()
    path = page_names("ss1")
    c.serve("1", path, "P1")
    c.serve("2", page_names("ss2"), "P1")
    c.store_pages("P1", path, Tier.L1)
    c.take()
    c.remove_pages("P1", path[:1], Tier.L1)
    assert c.R("P1", path[0]) == 2
    c.remove_pages("P1", path[:1], Tier.L2)
    assert c.R("P1", path[0]) == 0
    assert c.take().changes["P1"].zero == [path[0]]
    # Stored again it has no count until a branch is placed there again.
    c.store_pages("P1", path[:1])
    assert c.R("P1", path[0]) == 0
    c.request("1", path)
    c.place("1", "P1")
    assert c.R("P1", path[0]) == 1
    c.end("2")
    assert c.R("P1", path[0]) == 1
    c.check_stored()


def test_count_comes_before_its_page() -> None:
    c = two_and_one()
    path = page_names("ss1")
    c.request("1", path)
    c.place("1", "P1")
    assert sorted(c.take().changes["P1"].positive) == sorted(path)
    c.store_pages("P1", path)
    assert not c.take().changes


def test_pending_move_is_cancelled_by_a_placement_elsewhere() -> None:
    c = Cluster({"P1": P, "P2": P, "P3": P})
    path = page_names("ss1")
    c.serve("1", path, "P1")
    c.place("1", "P2")
    c.place("1", "P1")
    # The branch is back on P1, which holds everything: P2 lets go at once, and a late copy there moves nothing.
    assert c.directory.counts.counted_pages("P2") == 0
    c.store_pages("P2", path)
    assert [c.R("P1", page) for page in path] == [1, 1, 1]
    c.check()


def test_pending_move_is_cancelled_by_a_rewrite() -> None:
    c = two_and_one()
    path, new = page_names("ss1"), page_names("sn")
    c.serve("1", path, "P1")
    c.place("1", "P2")
    c.request("1", new)
    c.store_pages("P2", path)
    c.store_pages("P2", new)
    assert [c.R("P1", page) for page in new] == [1, 0]
    c.place("1", "P2")
    assert c.directory.counts.counted_pages("P1") == 0
    c.check()


def test_pending_move_waits_for_pages_that_left_meanwhile() -> None:
    c = two_and_one()
    path = page_names("ss1234")
    c.serve("1", path, "P1")
    c.place("1", "P2")
    c.store_pages("P2", path[:4])
    c.remove_pages("P2", path[:1])
    c.store_pages("P2", path[4:])
    assert c.directory.counts.pending_moves == 1
    assert c.directory.counts.counted_pages("P1") == 6
    c.store_pages("P2", path[:1])
    assert c.directory.counts.pending_moves == 0
    assert c.directory.counts.counted_pages("P1") == 0
    c.check()


def test_dead_node_loses_its_counts_and_moves_after_a_grace_time() -> None:
    c = two_and_one()
    path = page_names("ss1")
    c.serve("1", path, "P1")
    c.place("1", "P2")
    c.take()
    alive = {node: info for node, info in c.infos.items() if node != "P2"}
    assert c.directory.registered(alive, 100.0).lost == []
    assert c.directory.registered(alive, 109.9).lost == []
    assert c.directory.registered(alive, 110.0).lost == ["P2"]
    c.oracle.lose("P2")
    c.check()
    assert [c.R("P1", page) for page in path] == [1, 1, 1]
    assert c.directory.counts.pending_moves == 0
    batch = c.take()
    assert batch.commit.state["node:P2"] is None
    assert written(batch)["P2"] == dict.fromkeys(path, 0) and batch.commit.counts["P2"].empty


def test_node_that_comes_back_within_the_grace_time_keeps_its_counts() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "P1")
    assert c.directory.registered({}, 100.0).lost == []
    assert c.directory.registered(c.infos, 105.0).lost == []
    assert c.directory.registered({}, 111.0).lost == []
    c.check()


def test_counts_on_a_node_that_never_registers_go() -> None:
    c = two_and_one()
    c.request("1", page_names("ss1"))
    c.send(placed("1", "ghost", P, c.tick()))
    assert c.R("ghost", SYSTEM[0]) == 1
    c.directory.registered(c.infos, 100.0)
    assert c.directory.registered(c.infos, 111.0).lost == ["ghost"]
    assert c.R("ghost", SYSTEM[0]) == 0


def test_restarted_node_begins_with_nothing_and_gets_its_full_set() -> None:
    c = two_and_one()
    path = page_names("ss1")
    c.serve("1", path, "P1", "D1")
    c.take()
    old = c.infos["P1"]
    c.restart("P1")
    assert c.directory.counts.counted_pages("P1") == 0
    assert c.take().full == {"P1"}
    # Words of its earlier life change nothing.
    late = c.streams.publish(KV_STREAM + "P1", old.incarnation, stored(Tier.L2, path))
    assert not c.directory.apply(late, c.now)
    assert not c.directory.index.holds("P1", np.array(path)).any()
    c.send(placed("1", "P1", P, c.started["P1"] - 0.5))
    c.check_stored()


def test_seen_and_late_events_change_nothing() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "P1", "D1")
    c.request("1", page_names("ss1n"))
    c.place("1", "P2")
    before = c.directory.counts.table("P1"), c.directory.counts.table("P2")
    for event in list(c.streams.log):
        c.directory.apply(event, c.now)
    assert (c.directory.counts.table("P1"), c.directory.counts.table("P2")) == before
    c.check()
    c.end("1")
    for event in list(c.streams.log):
        c.directory.apply(event, c.now)
    # The same again under other numbers: a router that lost count.
    for event in list(c.streams.log):
        if event.stream == "branch":
            again = c.streams.publish("branch", "router-2", event.message)
            c.directory.apply(again, c.now)
    assert not c.directory.counts.nodes()
    assert len(c.directory.table) == 0


def test_unknown_prefix_releases_and_asks_for_the_path() -> None:
    c = two_and_one()
    path = page_names("ss1")
    c.serve("1", path, "P1")
    c.send(BranchRequest("1", 5, 99, pack_pages([1]), t=c.tick()))
    assert c.directory.counts.counted_pages("P1") == 0
    assert c.take().wanted == ["1"]
    c.send(placed("1", "P1", P, c.tick()))
    assert c.directory.counts.counted_pages("P1") == 0
    c.send(BranchRequest("1", 0, 0, pack_pages(list(path)), t=c.tick()))
    c.send(placed("1", "P1", P, c.tick()))
    assert [c.R("P1", page) for page in path] == [1, 1, 1]
    assert not c.take().wanted


def test_idle_branch_expires() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "P1")
    c.directory.expire(c.now + 7199.0)
    assert len(c.directory.table) == 1
    c.directory.expire(c.now + 7201.0)
    assert len(c.directory.table) == 0 and not c.directory.counts.nodes()
    assert c.take().commit.branches == {"1": None}


def test_ack_of_an_older_epoch_changes_nothing() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "D1")
    c.apply("roles", "D1", RoleAck("D1", 5, D, RoleStage.SWITCHED, c.tick()))
    c.apply("roles", "D1", RoleAck("D1", 4, P, RoleStage.SWITCHED, c.tick()))
    assert c.directory.counts.counted_pages("D1") == 3
    c.apply("roles", "D1", RoleAck("D1", 6, P, RoleStage.DRAINED, c.tick()))
    assert c.directory.counts.counted_pages("D1") == 3
    c.apply("roles", "D1", RoleAck("D1", 6, P, RoleStage.SWITCHED, c.tick()))
    assert c.directory.counts.counted_pages("D1") == 0


def test_registry_tells_the_phase_when_the_acknowledgement_is_lost() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "D1")
    c.infos["D1"] = node_info("D1", "D1.0", P, epoch=3)
    c.directory.registered(c.infos, 100.0)
    assert c.directory.counts.counted_pages("D1") == 3
    c.directory.registered(c.infos, 106.0)
    assert c.directory.counts.counted_pages("D1") == 0


def test_node_first_seen_while_it_drains_switches_at_the_same_epoch() -> None:
    c = Cluster({"P1": P})
    c.infos["D1"] = node_info("D1", "D1.0", D, epoch=7)
    c.directory.registered(c.infos, 0.0)
    c.serve("1", page_names("ss1"), "P1")
    c.send(placed("1", "D1", D, c.tick()))
    c.apply("roles", "D1", RoleAck("D1", 7, P, RoleStage.SWITCHED, c.tick()))
    assert c.directory.nodes["D1"].phase is P
    assert c.directory.counts.counted_pages("D1") == 0


def test_gap_in_kv_events_takes_out_what_left_and_keeps_what_may_come() -> None:
    c = two_and_one()
    path = page_names("ss1234")
    c.request("1", path)
    c.place("1", "P1")
    c.store_pages("P1", path[:4])
    c.take()
    # Two events are lost: path[0] left, path[4] came. path[5] is still on its way.
    c.streams.publish(KV_STREAM + "P1", "P1.0", removed(Tier.L2, path[:1]))
    c.streams.publish(KV_STREAM + "P1", "P1.0", stored(Tier.L2, path[4:5]))
    after = c.streams.publish(KV_STREAM + "P1", "P1.0", removed(Tier.L2, path[1:2]))
    assert c.directory.apply(after, c.now), "a snapshot is wanted"
    position = c.directory.nodes["P1"].position
    assert c.directory.unsynced() == ["P1"]
    assert [c.R("P1", page) for page in path] == [1] * 6, "unknown is not evicted"
    seq = c.streams.seq(KV_STREAM + "P1", "P1.0")
    snapshot = KvSnapshot("P1", "P1.0", seq - 1, b"", pack_pages(list(path[1:5])))
    assert c.directory.snapshot("P1", snapshot)
    assert [c.R("P1", page) for page in path] == [0, 0, 1, 1, 1, 1]
    assert c.directory.nodes["P1"].position == after.position != position
    assert c.directory.unsynced() == []


def test_moves_do_not_settle_while_the_target_is_unknown() -> None:
    c = two_and_one()
    path = page_names("ss1")
    c.store_pages("P2", path)
    c.streams.publish(KV_STREAM + "P2", "P2.0", removed(Tier.L2, path))
    assert c.directory.apply(c.streams.publish(KV_STREAM + "P2", "P2.0", stored(Tier.L1, (1,))), c.now)
    c.serve("1", path, "P1")
    c.place("1", "P2")
    assert c.directory.counts.pending_moves == 1
    assert c.directory.snapshot("P2", KvSnapshot("P2", "P2.0", 4, pack_pages([1, *path]), b""))
    assert c.directory.counts.pending_moves == 0
    assert c.directory.counts.counted_pages("P1") == 0


def test_broken_page_lists_change_nothing() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "P1")
    c.send(BranchRequest("1", 0, 0, b"123", t=c.tick()))
    c.check()
    # A path that names a page twice is none, and must not end the directory.
    c.send(BranchRequest("2", 0, 0, pack_pages([7, 7, 8, 7]), t=c.tick()))
    c.send(placed("2", "P1", P, c.tick()))
    c.kv("P1", stored(Tier.L2, (7, 8)))
    c.kv("P1", removed(Tier.L2, (7,)))
    assert c.R("P1", 7) == 0
    c.send(placed("2", "P1", P, c.tick()))
    c.send(ended("2", c.tick()))
    c.check_stored()


def test_damaged_record_costs_only_its_branch() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "P1")
    c.serve("2", page_names("ss2"), "P1")
    c.take()
    c.store.branches["1"] = b"\xff"
    c.directory = Directory(7200.0, 10.0)
    assert c.directory.restore(c.store.load()) == (1, 0, 3, 0)
    assert [c.R("P1", page) for page in page_names("ss1")] == [1, 1, 0]
    c.oracle.end("1")
    c.worker["P1"].clear()
    c.directory.registered(c.infos, 0.0)
    c.directory.want_full()
    c.check_stored()


def test_state_that_cannot_be_read_is_left_out() -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "P1", "D1")
    c.take()
    c.store.state |= {"node:P1": b"\xc1", "producers": b"\xc1", "ended": b"\xc1"}
    c.store.state["streams"] = msgspec.msgpack.encode({"branch": "abc", "roles": "5-1"})
    c.directory = Directory(7200.0, 10.0)
    assert c.directory.restore(c.store.load()) == (0, 0, 0, 3)
    assert c.directory.positions["branch"] == "0" and c.directory.positions["roles"] == "5-1"
    assert set(c.directory.nodes) == {"P2", "D1"}
    assert c.R("P1", SYSTEM[0]) == 1 and c.directory.take().commit.state["node:P1"] is None


@pytest.mark.parametrize("t", [math.inf, -math.inf, math.nan])
def test_times_that_are_none_change_nothing(t: float) -> None:
    c = two_and_one()
    c.serve("1", page_names("ss1"), "P1")
    c.send(BranchRequest("1", 0, 0, pack_pages([1]), t=t))
    c.send(placed("1", "P2", P, t))
    c.send(ended("1", t))
    c.check()
    c.end("1")
    c.check_stored()


def test_memory_returns_when_the_counts_go() -> None:
    c = Cluster({"P1": P})
    rng = random.Random(1)
    path = tuple(rng.getrandbits(62) for _ in range(60_000))
    for i in range(3):
        c.serve(f"b{i}", path[: 20_000 * (i + 1)], "P1")
    for i in range(3):
        c.end(f"b{i}")
        c.take()
    counts = c.directory.counts
    assert not counts.nodes() and not counts.changed
    assert not counts._nodes and not counts._counted and not counts._branches
    assert not len(c.directory.table.paths)


def test_clear_that_is_seen_again_clears_nothing() -> None:
    c = two_and_one()
    c.clear("P1", Tier.L1)
    again = c.streams.log[-1]
    c.request("1", SYSTEM)
    c.place("1", "P1")
    c.directory.apply(again, c.now)
    assert c.directory.counts.counted_pages("P1") == 2
    c.clear("P1", None)
    assert c.directory.counts.counted_pages("P1") == 0
    c.check_stored()
