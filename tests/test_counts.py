"""Algorithm E.2: the cases of Figure 4 by name, then random histories against plain sets."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.directory.core import Batch, Directory
from services.directory.rewind import Replay, Rewind
from services.directory.saved import NodeRecord
from services.directory.verify import verify
from shared.kvfollow import KV_STREAM
from shared.messages import (
    BranchRequest,
    KvSnapshot,
    Phase,
    RoleAck,
    RoleStage,
    StreamMessage,
    Tier,
    pack_pages,
)
from shared.streams import Event
from tests.directory_oracle import (
    PURE,
    Oracle,
    Path,
    RouterSide,
    Store,
    Streams,
    begun,
    cleared,
    ended,
    milliseconds,
    node_info,
    page_names,
    placed,
    removed,
    snapshot_of,
    stored,
)

P, D, BOTH = Phase.PREFILL, Phase.DECODE, Phase.BOTH
SYSTEM = page_names("ss")


class Cluster:
    """A directory fed with the events of a small cluster, and the oracle beside it."""

    def __init__(self, phases: dict[str, Phase], *, idle_s: float = 7200.0, grace_s: float = 10.0) -> None:
        self.idle_s, self.grace_s = idle_s, grace_s
        self.streams, self.store, self.oracle = Streams(), Store(), Oracle()
        self.router = RouterSide()
        self.now, self.epoch = 1.0, 0
        self.lives = dict.fromkeys(phases, 0)
        self.started = dict.fromkeys(phases, 0.0)
        self.oracle.phase = dict(phases)
        self.infos = {node: node_info(node, f"{node}.0", phase) for node, phase in phases.items()}
        self.worker: dict[str, set[int]] = {node: set() for node in phases}
        self.directory = Directory(idle_s, grace_s)
        self.directory.registered(self.infos, 0.0)
        for node, phase in phases.items():
            self.kv(node, begun(phase))

    # -------------------------------------------------------------- what happens in the cluster

    def request(self, branch: str, path: Path) -> None:
        self.send(self.router.request(branch, path, self.tick()))
        self.oracle.request(branch, path)

    def place(self, branch: str, node: str, phase: Phase | None = None) -> None:
        phase = self.oracle.phase[node] if phase is None else phase
        self.send(placed(branch, node, phase, self.tick()))
        self.oracle.place(branch, node, phase)

    def end(self, branch: str) -> None:
        self.router.paths.pop(branch, None)
        self.send(ended(branch, self.tick()))
        self.oracle.end(branch)

    def store_pages(self, node: str, pages: Path, tier: Tier = Tier.L2) -> None:
        new = [page for page in pages if page not in self.oracle.tiers.get((node, tier), set())]
        self.kv(node, stored(tier, new))
        self.oracle.store(node, tier, new)

    def remove_pages(self, node: str, pages: Path, tier: Tier = Tier.L2) -> None:
        held = [page for page in pages if page in self.oracle.tiers.get((node, tier), set())]
        self.kv(node, removed(tier, held))
        self.oracle.remove(node, tier, held)

    def clear(self, node: str, tier: Tier | None) -> None:
        self.kv(node, cleared(tier))
        self.oracle.clear(node, Tier if tier is None else (tier,))

    def switch(self, node: str, phase: Phase) -> None:
        self.epoch += 1
        self.apply("roles", node, RoleAck(node, self.epoch, phase, RoleStage.DRAINED, self.tick()))
        self.apply("roles", node, RoleAck(node, self.epoch, phase, RoleStage.SWITCHED, self.tick()))
        self.oracle.switch(node, phase)

    def restart(self, node: str) -> None:
        self.lives[node] += 1
        self.started[node] = self.tick()
        self.infos[node] = node_info(
            node, f"{node}.{self.lives[node]}", self.oracle.phase[node], epoch=self.epoch,
            started_t=self.started[node],
        )  # fmt: skip
        self.worker[node] = set()
        self.oracle.lose(node)
        self.kv(node, begun(self.oracle.phase[node], self.epoch, self.started[node]))
        registry = self.directory.registered(self.infos, self.now)
        assert not registry.begun and not registry.lost

    def serve(self, branch: str, path: Path, *nodes: str) -> None:
        """A request whose KV ends up on the nodes."""
        self.request(branch, path)
        for node in nodes:
            self.place(branch, node)
            self.store_pages(node, path)

    # -------------------------------------------------------------- machinery

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def kv(self, node: str, message: StreamMessage) -> None:
        self.apply(KV_STREAM + node, f"{node}.{self.lives[node]}", message)

    def send(self, message: StreamMessage) -> None:
        self.apply("branch", "router", message)

    def apply(self, stream: str, producer: str, message: StreamMessage) -> Event:
        event = self.streams.publish(stream, producer, message)
        assert not self.directory.apply(event, self.now), "no snapshot was due"
        return event

    def take(self) -> Batch:
        batch = self.directory.take()
        self.store.commit(batch.commit)
        for node in batch.full:
            self.worker[node] = set(self.directory.counts.positive(node).tolist())
        for node, change in batch.changes.items():
            if node not in batch.full:
                positive, zero = set(change.positive.tolist()), set(change.zero.tolist())
                assert not self.worker[node] & positive
                assert zero <= self.worker[node]
                self.worker[node] |= positive
                self.worker[node] -= zero
        return batch

    def crash(self) -> None:
        """Begin again from the store, as a new leader does."""
        self.directory = Directory(self.idle_s, self.grace_s)
        assert not self.directory.restore(self.store.load())
        assert not self.directory.registered(self.infos, self.now).lost
        backlog: list[Event] = []
        for stream, position in self.directory.positions.items():
            backlog += self.streams.after(stream, position)
        for node, record in self.directory.nodes.items():
            events = self.streams.after(KV_STREAM + node, record.position)
            backlog += events
            assert self.directory.snapshot(node, self.pages_then(node, record, events))
        for event in sorted(backlog, key=lambda event: milliseconds(event.position)):
            assert not self.directory.apply(event, self.now)
        self.directory.want_full()

    def pages_then(self, node: str, record: NodeRecord, events: list[Event]) -> KvSnapshot:
        """The node's pages as of the last event that was written."""
        now = f"{node}.{self.lives[node]}"
        if record.incarnation == now:
            stream = KV_STREAM + node
            rewind = Rewind(record.seq, snapshot_of(self.oracle, node, now, self.streams.seq(stream, now)))
            for event in events:
                rewind.feed(event)
            assert rewind.done and not rewind.broken
            if rewind.exact:
                return rewind.result()
        replay = Replay(node, record.incarnation, record.seq)
        for event in self.streams.after(KV_STREAM + node, "0"):
            replay.feed(event)
        result = replay.result()
        assert result is not None
        return result

    def R(self, node: str, page: int) -> int:
        return self.directory.counts.count(node, page)

    def check(self) -> None:
        counts, oracle = self.directory.counts, self.oracle
        for node in oracle.phase:
            assert counts.table(node) == oracle.table(node), node
            assert set(counts.positive(node).tolist()) == set(oracle.table(node))
            assert counts.counted_pages(node) == len(oracle.table(node))
        assert {branch.name for branch in self.directory.table} == set(oracle.path)
        for name, path in oracle.path.items():
            branch = self.directory.table.get(name)
            assert branch is not None
            assert branch.version == oracle.version[name]
            assert branch.path.tolist() == list(path)
            assert set(counts.of(name)) == set(oracle.holders(name))
            for node, c in counts.of(name).items():
                kept = {page for at, page in enumerate(path[: c.pages]) if at not in c.holes}
                assert kept == oracle.counted[name, node]
                assert len(c) == len(kept)
        for name in oracle.path:
            for phase in PURE:
                copies = oracle.copies(name, phase)
                # A move waits, or the branch counts at most one copy in the phase.
                if (name, phase) not in oracle.waiting and (name, phase) not in oracle.unsettled:
                    assert len(copies) <= 1, (name, phase, copies)

    def check_stored(self) -> None:
        self.take()
        for node in self.oracle.phase:
            assert self.store.counts.get(node, {}) == self.oracle.table(node)
            assert self.worker[node] == set(self.oracle.table(node))
        assert set(self.store.branches) == set(self.oracle.path)
        assert set(self.store.segments) == set(self.store.pages)
        stored_pages = sum(len(blob) // 8 for blob in self.store.pages.values())
        # A segment that got shorter keeps its old tail in Redis until it grows again.
        assert stored_pages >= len({page for path in self.oracle.path.values() for page in path})
        report = verify(self.store.load(), self.snapshots())
        assert report.differences == []
        assert report.moves == self.directory.counts.pending_moves

    def snapshots(self) -> dict[str, KvSnapshot]:
        """What the nodes hold now."""
        found = {}
        for node, life in self.lives.items():
            incarnation = f"{node}.{life}"
            seq = self.streams.seq(KV_STREAM + node, incarnation)
            found[node] = snapshot_of(self.oracle, node, incarnation, seq)
        return found


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


# ------------------------------------------------------------------------------------ random histories

NODES = {"P1": P, "P2": P, "D1": D, "D2": D, "B1": BOTH}
nodes = st.sampled_from(sorted(NODES))
branches = st.sampled_from(["a", "b", "c", "d"])
tiers = st.sampled_from(list(Tier))
contexts = st.text(alphabet="xy", max_size=7)


class Histories(RuleBasedStateMachine):
    """Anything that a cluster can do to its counts, in any order."""

    @initialize()
    def begin(self) -> None:
        self.c = Cluster(NODES)
        self.contexts: dict[str, str] = {}

    @rule(branch=branches, context=contexts)
    def request(self, branch: str, context: str) -> None:
        """New, forked or sub-agent branch, append, compaction, truncation: whatever it is to this branch."""
        self.contexts[branch] = context
        self.c.request(branch, page_names(context))

    @rule(branch=branches, more=st.text(alphabet="xy", min_size=1, max_size=3))
    def append(self, branch: str, more: str) -> None:
        before = self.contexts.get(branch, "") if branch in self.c.oracle.path else ""
        self.request(branch, before + more)

    @rule(branch=branches, node=nodes, phase=st.sampled_from(PURE), fill=st.booleans())
    def place(self, branch: str, node: str, phase: Phase, fill: bool) -> None:
        here = self.c.oracle.phase[node]
        self.c.place(branch, node, phase if here is BOTH else here)
        if fill:
            self.c.store_pages(node, self.c.oracle.path.get(branch, ()))

    @rule(branch=branches)
    def end(self, branch: str) -> None:
        self.c.end(branch)

    @rule(branch=branches, node=nodes, tier=tiers, first=st.integers(0, 5), count=st.integers(1, 8))
    def store(self, branch: str, node: str, tier: Tier, first: int, count: int) -> None:
        self.c.store_pages(node, self.c.oracle.path.get(branch, ())[first : first + count], tier)

    @rule(node=nodes, tier=tiers, seed=st.integers(0, 2**16), all_of_it=st.booleans())
    def evict(self, node: str, tier: Tier, seed: int, all_of_it: bool) -> None:
        held = sorted(self.c.oracle.tiers.get((node, tier), set()))
        rng = random.Random(seed)
        self.c.remove_pages(node, tuple(p for p in held if all_of_it or rng.random() < 0.4), tier)

    @rule(node=nodes, tier=st.sampled_from([*Tier, None]))
    def clear(self, node: str, tier: Tier | None) -> None:
        self.c.clear(node, tier)

    @rule(node=nodes, phase=st.sampled_from(list(Phase)))
    def switch(self, node: str, phase: Phase) -> None:
        self.c.switch(node, phase)

    @rule(node=nodes)
    def restart(self, node: str) -> None:
        self.c.restart(node)

    @rule(back=st.integers(1, 30))
    def see_again(self, back: int) -> None:
        """Redis delivers again what the directory had, with the same numbers."""
        for event in self.c.streams.log[-back:]:
            self.c.directory.apply(event, self.c.now)

    @precondition(lambda self: bool(self.c.streams.log))
    @rule(node=nodes, branch=branches, late=st.floats(0.1, 5.0))
    def late_placement(self, node: str, branch: str, late: float) -> None:
        """Another router's placement that is older than what is known."""
        known = self.c.directory.table.get(branch)
        if known is not None and known.request_t > late:
            self.c.apply("branch", "late", placed(branch, node, P, known.request_t - late))

    @rule()
    def write(self) -> None:
        self.c.check_stored()

    @rule()
    def crash(self) -> None:
        self.c.crash()

    @invariant()
    def same_as_the_pseudocode(self) -> None:
        self.c.check()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
