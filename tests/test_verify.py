"""`evolving directory verify` and `show`: what they find wrong, and what they print."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

import msgspec
import pytest

from services.directory.paths import SegmentRecord
from services.directory.saved import BranchRecord
from services.directory.verify import Report, verify
from shared.bus import Bus
from shared.messages import Phase, Tier
from shared.store import Commit, DirectoryStore
from tests.directory_cluster import Cluster
from tests.directory_oracle import Store, page_names


def cluster() -> Cluster:
    """Two branches that share a prefix; one has moved from P1 to P2, one is on its way there."""
    c = Cluster({"P1": Phase.PREFILL, "P2": Phase.PREFILL, "D1": Phase.DECODE})
    c.serve("one", page_names("sys-one"), "P1", "D1")
    c.serve("one", page_names("sys-one-more"), "P2", "D1")
    c.serve("two", page_names("sys-two"), "P1")
    c.place("two", "P2")
    c.remove_pages("D1", page_names("sys-one-more")[-2:])
    c.check_stored()
    return c


def report_of(c: Cluster) -> Report:
    return verify(c.store.load(), c.snapshots())


def test_report_of_a_sound_state() -> None:
    c = cluster()
    report = report_of(c)
    assert report.differences == []
    assert (report.branches, report.moves) == (2, 1)
    assert (report.path_pages, report.stored_pages) == (12 + 7, 15)
    p1, p2, d1 = (report.nodes[node] for node in ("P1", "P2", "D1"))
    assert (p1.branches, p1.counted, p1.references, p1.held, p1.absent) == (1, 7, 7, 10, 0)
    assert (p2.branches, p2.counted, p2.references, p2.held, p2.absent) == (2, 15, 19, 12, 3)
    assert (d1.counted, d1.held, d1.absent) == (10, 10, 0)
    assert p1.phase is Phase.PREFILL


def test_a_node_that_did_not_answer_or_is_ahead_is_not_compared() -> None:
    c = cluster()
    assert verify(c.store.load(), {}).nodes["P2"].held is None
    c.streams.publish("kv:P2", "P2.0", c.streams.log[-1].message)
    assert report_of(c).nodes["P2"].held is None


def edit(store: Store, branch: str, change: Callable[[BranchRecord], None]) -> None:
    record = msgspec.msgpack.decode(store.branches[branch], type=BranchRecord)
    change(record)
    store.branches[branch] = msgspec.msgpack.encode(record)


def segment_of(store: Store, branch: str) -> int:
    return msgspec.msgpack.decode(store.branches[branch], type=BranchRecord).segment


def wrong_count(store: Store) -> None:
    store.counts["P2"][page_names("sys-")[0]] = 1


def lost_count(store: Store) -> None:
    del store.counts["P1"][page_names("sys-")[0]]


def count_too_many(store: Store) -> None:
    store.counts["ghost"] = {5: 1}


def lost_branch(store: Store) -> None:
    del store.branches["two"]


def unreadable_branch(store: Store) -> None:
    store.branches["two"] = b"\xc1"


def lost_segment(store: Store) -> None:
    del store.segments[segment_of(store, "one")]


def short_segment(store: Store) -> None:
    number = segment_of(store, "one")
    store.pages[number] = store.pages[number][:-8]


def unused_segment(store: Store) -> None:
    store.segments[99] = msgspec.msgpack.encode(SegmentRecord(0, 0, 1))
    store.pages[99] = b"12345678"


def counts_beyond_its_path(store: Store) -> None:
    def longer(record: BranchRecord) -> None:
        record.counted["P1"].pages = 20

    edit(store, "two", longer)


def unsettled_move(store: Store) -> None:
    def moving(record: BranchRecord) -> None:
        record.pending[Phase.PREFILL] = "P2"

    edit(store, "one", moving)


def unreadable_node(store: Store) -> None:
    store.state["node:P1"] = b"\xc1"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (wrong_count, "R is 1, 2 branches count it"),
        (lost_count, "R is 0, 1 branches count it"),
        (count_too_many, "node ghost: page 0000000000000005: R is 1, 0 branches count it"),
        (lost_branch, "pages that no branch's path has"),
        (unreadable_branch, "branch two: the record cannot be read"),
        (lost_segment, "has no record"),
        (short_segment, "branch one: its path of 12 pages is damaged"),
        (unused_segment, "segment 99: keeps 1 pages"),
        (counts_beyond_its_path, "branch two: counts 20 pages on P1 of a path of 7"),
        (unsettled_move, "its prefill move to P2 has not settled, though P2 holds the whole path"),
        (unreadable_node, "node P1: the record cannot be read"),
    ],
)
def test_damage_is_found(damage: Callable[[Store], None], says: str) -> None:
    c = cluster()
    damage(c.store)
    found = [f"{difference.where}: {difference.what}" for difference in report_of(c).differences]
    assert any(says in line for line in found), found


# ------------------------------------------------------------------------------------ the commands


async def evolving(redis_url: str, cluster: str, *words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "directory", *words, "--redis", redis_url, "--cluster", cluster,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def write(bus: Bus, store: Store) -> None:
    lease = bus.lease("directory", "test", 30.0)
    await lease.acquire()
    stored = store.load()
    number = await DirectoryStore(bus).committed() + 1
    await DirectoryStore(bus).commit(
        lease,
        Commit(
            number, counts=stored.counts, branches=dict(stored.branches), segments=dict(stored.segments),
            pages={n: (0, blob) for n, blob in stored.pages.items()}, state=dict(stored.state),
        ),
    )  # fmt: skip


async def test_commands(redis_url: str, cluster_name: str) -> None:
    bus = await Bus.connect(redis_url, cluster_name)
    code, _, err = await evolving(redis_url, cluster_name, "verify")
    assert code == 2 and "no directory has written anything" in err
    c = cluster()
    await write(bus, c.store)

    code, out, _ = await evolving(redis_url, cluster_name, "verify")
    assert code == 0, out
    assert "2 branches, 1 move under way; paths of 19 pages in all, stored as 15" in out
    assert (
        "test leads" in out
        and "not compared with what the node holds (busy, or no answer): D1, P1, P2" in out
    )
    assert out.endswith("no difference\n")
    code, out, _ = await evolving(redis_url, cluster_name, "verify", "--json")
    assert code == 0 and json.loads(out)["nodes"]["P2"]["counted"] == 15

    code, out, _ = await evolving(redis_url, cluster_name, "show", "one")
    assert code == 0
    assert out.splitlines() == [
        "branch one: version 1, 12 pages, stored in 1 segment",
        "  last placed for prefill on P2",
        "  last placed for decode on D1",
        "  D1: counts 10 pages for decode; each is counted by 1 to 1 branches",
        "  P2: counts 12 pages for prefill; each is counted by 1 to 2 branches",
    ]
    code, out, _ = await evolving(redis_url, cluster_name, "show", "two", "--json")
    assert code == 0
    shown = json.loads(out)
    assert (shown["version"], shown["path_pages"], shown["segments"]) == (1, 7, 2)
    assert shown["moving_to"] == {"prefill": "P2"} and shown["nodes"]["P1"]["pages"] == 7
    code, _, err = await evolving(redis_url, cluster_name, "show", "nobody")
    assert code == 1 and "no branch 'nobody' is active" in err
    code, out, _ = await evolving(redis_url, cluster_name, "show")
    assert code == 0 and out.startswith("2 active branches") and "one: version 1, 12 pages on D1, P2" in out
    code, _, err = await evolving(redis_url, cluster_name, "verfy")
    assert code == 2 and "known: verify, show" in err

    wrong_count(c.store)
    await write(bus, c.store)
    code, out, _ = await evolving(redis_url, cluster_name, "verify")
    assert code == 1 and "R is 1, 2 branches count it" in out and out.endswith("1 difference\n")
    await bus.close()


async def test_verify_says_when_redis_is_not_there() -> None:
    code, _, err = await evolving("redis://127.0.0.1:1/0", "main", "verify")
    assert code == 2 and err.startswith("evolving: ") and err.count("\n") == 1


async def test_tier_of_the_snapshot_does_not_matter() -> None:
    c = cluster()
    c.store_pages("P2", page_names("sys-two"), Tier.L1)
    c.check_stored()
    assert report_of(c).moves == 0
