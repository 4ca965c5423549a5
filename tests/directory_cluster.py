"""A directory fed with the events of a small cluster, what it writes, and the oracle beside it: in memory."""

from __future__ import annotations

from services.directory.core import Batch, Directory
from services.directory.rewind import Replay, Rewind
from services.directory.saved import NodeRecord
from services.directory.verify import verify
from shared.kvfollow import KV_STREAM
from shared.messages import (
    KvSnapshot,
    Phase,
    RoleAck,
    RoleStage,
    StreamMessage,
    Tier,
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
    placed,
    removed,
    snapshot_of,
    stored,
)


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
