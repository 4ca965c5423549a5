"""The directory's store against a real Redis: fenced, numbered, absolute, and read back as it was written."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from shared import messages as m
from shared.bus import Bus, NotLeader
from shared.store import Commit, DirectoryStore, NodeCounts, StateLost
from tests.conftest import eventually


def counts_of(**pages: int) -> NodeCounts:
    """`p5=2`: page 5 has R = 2; `m7=1`: page -7."""
    keys = [int(name[1:]) * (-1 if name[0] == "m" else 1) for name in pages]
    return NodeCounts(np.array(keys, dtype=np.int64), np.array(list(pages.values()), dtype=np.int32))


def as_table(counts: NodeCounts) -> dict[int, int]:
    return dict(zip(counts.pages.tolist(), counts.counts.tolist(), strict=True))


async def test_commit_is_absolute_fenced_and_loads_back(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    one, two = bus.lease("directory", "one", 0.2), bus.lease("directory", "two", 30.0)
    await one.acquire()
    batch = Commit(
        1,
        counts={"n1": counts_of(p5=2, m7=1, p9=0), "n2": counts_of(p1=1)},
        branches={"b": b"record"},
        segments={1: b"segment", 2: b"other"},
        pages={1: (0, m.pack_pages([1, 2, 3])), 2: (0, m.pack_pages([4]))},
        state={"branch": b"1-1", "gone": b"x"},
    )
    await DirectoryStore(bus).commit(one, batch)
    await DirectoryStore(bus).commit(one, batch)
    for load in (DirectoryStore(bus).load, DirectoryStore(bus).load_at_once):
        stored = await load()
        assert {n: as_table(c) for n, c in stored.counts.items()} == {"n1": {5: 2, -7: 1}, "n2": {1: 1}}
        assert stored.number == 1 and stored.branches == {"b": b"record"}
        assert stored.segments == {1: b"segment", 2: b"other"}
        assert stored.pages == {1: m.pack_pages([1, 2, 3]), 2: m.pack_pages([4])}
        assert stored.state == {"branch": b"1-1", "gone": b"x"}
    batch = Commit(
        2,
        counts={"n1": counts_of(p5=0), "n2": counts_of(p1=0)._replace(empty=True)},
        segments={2: None},
        pages={1: (2, m.pack_pages([8, 9]))},
        state={"gone": None},
    )
    await DirectoryStore(bus).commit(one, batch)
    stored = await DirectoryStore(bus).load()
    assert {n: as_table(c) for n, c in stored.counts.items()} == {"n1": {-7: 1}}
    assert stored.segments == {1: b"segment"} and stored.pages == {1: m.pack_pages([1, 2, 8, 9])}
    assert stored.state == {"branch": b"1-1"}
    await eventually(two.acquire, 5.0)
    with pytest.raises(NotLeader):
        await DirectoryStore(bus).commit(one, Commit(3, counts={"n1": counts_of(p1=1)}))
    await DirectoryStore(bus).commit(two, Commit(3, branches={"b": None}))
    assert (await DirectoryStore(bus).load()).branches == {} and await DirectoryStore(bus).committed() == 3
    await bus.close()


async def test_commit_on_top_of_a_batch_that_redis_lost_is_refused(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    lease = bus.lease("directory", "one", 30.0)
    await lease.acquire()
    for number in (1, 2, 3):
        await DirectoryStore(bus).commit(lease, Commit(number, state={"s": b"%d" % number}))
    await bus.redis.set(bus.key("commit"), 2)  # as a replica that lagged has it
    with pytest.raises(StateLost):
        await DirectoryStore(bus).commit(lease, Commit(4, state={"s": b"4"}))
    assert (await DirectoryStore(bus).load()).state == {"s": b"3"}
    await bus.close()


async def test_tokens_grow_when_a_failover_took_the_fence_back(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    one, two = bus.lease("directory", "one", 30.0), bus.lease("directory", "two", 30.0)
    first = await one.acquire()
    await asyncio.sleep(0.005)
    await bus.redis.delete(bus.key("lease", "directory"), bus.key("fence", "directory"))
    second = await two.acquire()
    assert first is not None and second is not None and second > first
    with pytest.raises(NotLeader):
        await DirectoryStore(bus).commit(one, Commit(1))
    await bus.close()


async def test_renewing_the_lease_during_a_commit_is_no_loss_of_it(redis_url, cluster_name):
    bus = await Bus.connect(redis_url, cluster_name)
    lease = bus.lease("directory", "one", 30.0)
    await lease.acquire()
    stop = False

    async def renew():
        while not stop:
            assert await lease.renew()

    renewing = asyncio.create_task(renew())
    for i in range(100):
        await DirectoryStore(bus).commit(lease, Commit(i + 1, counts={"n1": counts_of(**{f"p{i}": 1})}))
    stop = True
    await renewing
    assert len((await DirectoryStore(bus).load()).counts["n1"].pages) == 100
    await bus.close()
