"""The directory's whole state, fed with events and asked for what to write and to send.

Rules that hold here
- The state is a function of the events applied, in their order. `take` returns everything that changed since
  the call before: absolute values, and the position of every stream up to which they hold.
- A node's record names its incarnation. Events and placements of an earlier one change nothing. A new one begins
  with its first kv event, in the order of all events: the node's counts, pages and pending moves go then. Where
  that event stays out for long, the registry's word counts.
- A node's phase changes by its own acknowledgement (`RoleAck`, switched); a higher epoch replaces a lower one.
  The registry's word counts for a node that is new, and where an acknowledgement stays out for long.
- While a node's pages are unknown (a gap in its events), no move to it settles and its position stays before
  the gap. When a snapshot comes, counted pages that were held before and are not now leave the counts. A
  counted page that was not held before stays counted: it may be on its way, and a count for a page that the
  node never gets is harmless and ends with the branch's next step there. For the same reason a directory that
  starts without the events in between takes no count away.
- No I/O and no clock: `now` is in cluster seconds, `wall_s` in monotonic wall seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from services.directory.branches import Branch, BranchTable, Change
from services.directory.counts import Counted, Counts, NodeChanges
from services.directory.paths import tip_number
from services.directory.saved import BranchRecord, CountedRecord, Damage, NodeRecord, encode, read
from shared.kvfollow import KV_STREAM, Follow, KvFollower
from shared.kvindex import KvIndex
from shared.messages import (
    Began,
    BranchEnded,
    BranchPlaced,
    BranchRequest,
    CountsWanted,
    KvSnapshot,
    NodeInfo,
    PageArray,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    Phase,
    RoleAck,
    RoleStage,
)
from shared.store import NO_COUNTS, Commit, NodeCounts, Stored
from shared.streams import Event

STREAMS = ("branch", "roles", "resync")
MAX_PRODUCERS = 64  # routers whose last number on `branch` is remembered
PATIENCE_S = 5.0  # wall seconds after which the registry's word is believed without the node's own

_KV_MESSAGES = (PagesStored, PagesRemoved, PagesCleared)


class Registry(NamedTuple):
    """What a look at the registry changed: nodes new or begun anew, and nodes lost for good."""

    begun: list[str]
    lost: list[str]


class Batch(NamedTuple):
    """What to write, and once it is written, what to send."""

    commit: Commit
    changes: dict[str, NodeChanges]  # for counts:<node>
    full: set[str]  # nodes whose full set is due
    wanted: list[str]  # branches whose whole path is wanted


class Directory:
    """Algorithms E.1 and E.2 for a cluster. `idle_s`: cluster seconds; `grace_s`: wall seconds."""

    def __init__(self, idle_s: float, grace_s: float) -> None:
        self._idle_s, self._grace_s = idle_s, grace_s
        self.table = BranchTable()
        self.index = KvIndex()
        self.counts = Counts(self.index, self.table.path)
        self.follower = KvFollower(
            self.index, stored=self.counts.stored, gone=self.counts.evicted, reset=self._pages_reset
        )
        self.nodes: dict[str, NodeRecord] = {}
        self.stats: Counter[str] = Counter()  # what happened, for the metrics
        self.positions: dict[str, str] = dict.fromkeys(STREAMS, "0")
        self._producers: dict[str, int] = {}  # router -> its last number on `branch`, newest last
        self._read: dict[str, tuple[str, int]] = {}  # node -> its last kv event seen, applied or not
        self._before_gap: dict[str, PageArray] = {}  # node -> counted pages that it held before a gap
        self._absent_since: dict[str, float] = {}
        self._behind_since: dict[str, float] = {}
        self._replaced_since: dict[str, float] = {}
        self._number = 0  # of the batch taken last
        self._dirty_branches: set[str] = set()
        self._dirty_nodes: set[str] = set()
        self._dirty_positions = False
        self._dirty_ended = False
        self._full: set[str] = set()
        self._wanted: dict[str, None] = {}

    # ------------------------------------------------------------------------- events

    def apply(self, event: Event, now: float) -> bool:
        """One event. True when a snapshot of the node of its kv stream is wanted."""
        message = event.message
        if isinstance(message, _KV_MESSAGES):
            return self._kv_event(event)
        if event.stream in self.positions:
            self.positions[event.stream] = event.position
            self._dirty_positions = True
        if event.stream == "branch":
            if self._is_new(event):
                self._branch_event(message, now)
        elif isinstance(message, RoleAck):
            if message.stage is RoleStage.SWITCHED:
                self._switched(message.node, message.phase, message.epoch)
        elif isinstance(message, CountsWanted):
            self.stats["counts_wanted"] += 1
            if message.node in self.nodes:
                self._full.add(message.node)
        return False

    def expire(self, now: float) -> None:
        """End the branches that have been idle for `idle_s`."""
        for branch in self.table.expire(now - self._idle_s):
            self.stats["expired"] += 1
            self._ended(branch)

    def _is_new(self, event: Event) -> bool:
        last = self._producers.pop(event.producer, None)
        self._producers[event.producer] = max(event.seq, last or 0)
        if len(self._producers) > MAX_PRODUCERS:
            del self._producers[next(iter(self._producers))]
        if last is None:
            return True
        if event.seq <= last:
            self.stats["duplicates"] += 1
            return False
        if event.seq > last + 1:
            # Paths prove themselves and idle branches expire, so nothing is asked again.
            self.stats["branch_gaps"] += 1
        return True

    def _branch_event(self, message: object, now: float) -> None:
        if isinstance(message, BranchRequest | BranchPlaced | BranchEnded) and not math.isfinite(message.t):
            self.stats["unreadable"] += 1
            return
        if isinstance(message, BranchRequest):
            self._request(message, now)
        elif isinstance(message, BranchPlaced):
            record = self.nodes.get(message.node)
            if record is not None and 0.0 < message.t < record.started_t:
                self.stats["stale"] += 1
            elif self.table.place(message, now):
                self._dirty_branches.add(message.branch)
                self.counts.place(message.branch, message.node, message.phase)
            else:
                self.stats["stale"] += 1
        elif isinstance(message, BranchEnded):
            branch = self.table.end(message)
            self._dirty_ended = True
            if branch is None:
                self.stats["stale"] += 1
            else:
                self._ended(branch)

    def _request(self, message: BranchRequest, now: float) -> None:
        try:
            step = self.table.request(message, now)
        except ValueError:
            self.stats["unreadable"] += 1
            return
        self.stats[f"request_{step.change}"] += 1
        if step.change is Change.UNKNOWN:
            self._wanted[message.branch] = None
        if self.table.get(message.branch) is None:
            return
        if step.common < step.old.size:
            self.counts.rewritten(message.branch, step.old, step.common)
        self._dirty_branches.add(message.branch)

    def _ended(self, branch: Branch) -> None:
        self.counts.end(branch.name, branch.path)
        self._dirty_branches.add(branch.name)

    def _switched(self, node: str, phase: Phase, epoch: int) -> None:
        record = self.nodes.get(node)
        if record is None or epoch < record.epoch:
            return
        # At the same epoch: the node was first seen while it drained.
        before, record.phase, record.epoch = record.phase, phase, epoch
        self._dirty_nodes.add(node)
        self._behind_since.pop(node, None)
        if before is not phase:
            self.stats["switches"] += 1
            self.counts.switched(node, before, phase)

    # ------------------------------------------------------------------------- pages

    def _kv_event(self, event: Event) -> bool:
        node = event.stream.removeprefix(KV_STREAM)
        message = event.message
        if event.seq == 1 and isinstance(message, PagesCleared) and message.began is not None:
            self._began(node, event, message.began)
        record = self.nodes.get(node)
        if record is None or event.producer != record.incarnation:
            return False
        if event.seq <= record.seq:
            return False
        if self.follower.synced(node) and event.seq > record.seq + 1:
            counted = self.counts.positive(node)
            self._before_gap[node] = counted[self.index.holds(node, counted)]
            self.stats["kv_gaps"] += 1
        wanted = self.follower.feed(event) is Follow.WANT_SNAPSHOT
        self._read[node] = (event.position, event.seq)
        if self.follower.synced(node):
            self._before_gap.pop(node, None)
            # A node's first event clears what it never had; placements may already count on it.
            if isinstance(message, PagesCleared) and event.seq > 1:
                counted = self.counts.positive(node)
                self.counts.evicted(node, counted[~self.index.holds(node, counted)])
            self._caught_up(node)
        return wanted

    def _began(self, node: str, event: Event, began: Began) -> None:
        """The first word of a life of the node."""
        record = self.nodes.get(node)
        if record is not None:
            if record.incarnation == event.producer and record.seq:
                return  # heard before
            if record.incarnation != event.producer:
                if began.t < record.started_t:
                    return  # of an earlier life
                self._drop_pages(node)
                self.stats["restarts"] += 1
        self._begin(node, NodeRecord(event.producer, began.phase, began.epoch, began.t))

    def _begin(self, node: str, record: NodeRecord) -> None:
        self.nodes[node] = record
        self.counts.switched(node, None, record.phase)
        self._behind_since.pop(node, None)
        self._replaced_since.pop(node, None)
        self._dirty_nodes.add(node)
        self._full.add(node)

    def snapshot(self, node: str, snapshot: KvSnapshot) -> bool:
        """The node's pages. False when another snapshot is needed."""
        record = self.nodes.get(node)
        if record is None or self.follower.synced(node):
            return True
        if snapshot.incarnation != record.incarnation:
            return False  # of a life that has not begun here, or is over
        self.stats["snapshots"] += 1
        done = self.follower.snapshot(node, snapshot)
        if done:
            self._caught_up(node)
        return done

    def _caught_up(self, node: str) -> None:
        read = self._read.get(node)
        record = self.nodes[node]
        if read is not None and read[1] > record.seq:
            record.position, record.seq = read
            self._dirty_nodes.add(node)

    def _pages_reset(self, node: str) -> None:
        if not self.follower.synced(node):
            return
        before = self._before_gap.pop(node, None)
        if before is not None:
            self.counts.evicted(node, before[~self.index.holds(node, before)])
        self.counts.stored(node)

    # ------------------------------------------------------------------------- nodes

    def registered(self, infos: dict[str, NodeInfo], wall_s: float) -> Registry:
        """Compare with the registry's live nodes."""
        begun: list[str] = []
        for node, info in infos.items():
            self._absent_since.pop(node, None)
            record = self.nodes.get(node)
            if record is None:
                self._begin(node, NodeRecord(info.incarnation, info.phase, info.epoch, info.started_t))
                begun.append(node)
            elif record.incarnation == info.incarnation:
                self._replaced_since.pop(node, None)
                self._compare_epochs(info, record, wall_s)
            elif info.started_t >= record.started_t and (
                wall_s - self._replaced_since.setdefault(node, wall_s) >= PATIENCE_S
            ):
                # Its first word was trimmed away.
                self._drop_pages(node)
                self.stats["restarts"] += 1
                position = record.position
                self._begin(
                    node, NodeRecord(info.incarnation, info.phase, info.epoch, info.started_t, position)
                )
                begun.append(node)
        absent = {*self.nodes, *self.counts.nodes()} - set(infos)
        lost = [
            node
            for node in sorted(absent)
            if wall_s - self._absent_since.setdefault(node, wall_s) >= self._grace_s
        ]
        for node in lost:
            self._drop_pages(node)
            self.nodes.pop(node, None)
            self._dirty_nodes.add(node)
            self._absent_since.pop(node, None)
            self._behind_since.pop(node, None)
            self._replaced_since.pop(node, None)
            self._full.discard(node)
            self.stats["lost"] += 1
        return Registry(begun, lost)

    def _compare_epochs(self, info: NodeInfo, record: NodeRecord, wall_s: float) -> None:
        if info.epoch < record.epoch or info.phase is record.phase:
            self._behind_since.pop(info.node, None)
        elif wall_s - self._behind_since.setdefault(info.node, wall_s) >= PATIENCE_S:
            self._switched(info.node, info.phase, info.epoch)

    def _drop_pages(self, node: str) -> None:
        self._before_gap.pop(node, None)
        self._read.pop(node, None)
        self.follower.lost(node)
        self.counts.drop_node(node)

    def unsynced(self) -> list[str]:
        """Registered nodes whose pages are unknown."""
        return [node for node in self.nodes if not self.follower.synced(node)]

    def want_full(self) -> None:
        """A new leader tells every node its whole set."""
        self._full.update(self.nodes)

    # ------------------------------------------------------------------------- what to write and to send

    @property
    def urgent(self) -> bool:
        """Something other than positions waits for `take`."""
        return bool(
            self._dirty_branches
            or self._full
            or self._wanted
            or self._dirty_ended
            or self.counts.changed
            or self.table.paths.changed
        )

    @property
    def written(self) -> int:
        """Number of the batch taken last."""
        return self._number

    @property
    def dirty(self) -> bool:
        """Something waits for `take`."""
        return self.urgent or self._dirty_positions or bool(self._dirty_nodes)

    def take(self) -> Batch:
        """What changed since the call before."""
        self._number += 1
        changes = self.counts.take_changes()
        commit = Commit(self._number)
        for node, found in changes.items():
            empty = not self.counts.counted_pages(node)
            commit.counts[node] = NodeCounts(found.pages, found.counts, empty)
        for name in self._dirty_branches | self.counts.take_touched():
            branch = self.table.get(name)
            commit.branches[name] = None if branch is None else encode(self._record(branch))
        segments, commit.pages = self.table.paths.take()
        for number, record in segments.items():
            commit.segments[number] = None if record is None else encode(record)
        commit.state["streams"] = encode(self.positions)
        commit.state["producers"] = encode(self._producers)
        if self._dirty_ended:
            commit.state["ended"] = encode(self.table.ended)
        for node in self._dirty_nodes:
            known = self.nodes.get(node)
            commit.state[f"node:{node}"] = None if known is None else encode(known)
        batch = Batch(commit, changes, self._full & set(self.nodes), list(self._wanted))
        self._full.difference_update(batch.full)
        self._wanted.clear()
        self._dirty_branches.clear()
        self._dirty_nodes.clear()
        self._dirty_positions = self._dirty_ended = False
        return batch

    def _record(self, branch: Branch) -> BranchRecord:
        return BranchRecord(
            version=branch.version,
            segment=tip_number(branch.tip),
            path_pages=branch.path.size,
            last_t=branch.last_t,
            request_t=branch.request_t,
            placed=branch.placed,
            counted={
                node: CountedRecord(c.pages, c.phases, sorted(c.holes))
                for node, c in self.counts.of(branch.name).items()
            },
            pending=self.counts.pending_of(branch.name),
        )

    def restore(self, stored: Stored) -> Damage:
        """Continue from what was written, in a new object. What is damaged is left out, and `take` writes it anew."""
        saved = read(stored)
        self._number = stored.number
        self.nodes, self._producers = saved.nodes, saved.producers
        self.positions.update(saved.streams)
        # A node whose record is damaged begins anew; what streams bring again is known by its number.
        self._dirty_nodes.update(saved.damaged_nodes)
        self._dirty_branches.update(saved.damaged_branches)
        paths = self.table.paths
        segments = paths.restore(saved.segments, stored.pages)
        branches: list[Branch] = []
        for name, record in saved.branches.items():
            tip = paths.claim(record.segment, record.path_pages)
            if tip is None:
                self._dirty_branches.add(name)
                continue
            path = paths.path(tip)
            branches.append(
                Branch(name, record.version, path, tip, record.last_t, record.request_t, record.placed)
            )
            counted = {n: Counted(c.pages, c.phases, set(c.holes)) for n, c in record.counted.items()}
            self.counts.restore(name, counted, record.pending, path)
        paths.sweep()
        self.table.restore(branches, saved.ended)
        self.counts.take_touched()
        differ = 0
        for node in sorted({*stored.counts, *self.counts.nodes()}):
            counts = stored.counts.get(node, NO_COUNTS)
            differ += self.counts.adopt(node, counts.pages, counts.counts)
        return Damage(len(self._dirty_branches), len(segments), differ, saved.damaged_others)
