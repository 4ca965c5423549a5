"""Tables whose row is the page's name give what hash tables give, to all that is built on them, while names grow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.simulate.dense import DenseIndex, DenseTable
from loadtest.simulate.directory import SimDirectory
from loadtest.simulate.node import path_of
from loadtest.simulate.pages import PageNames
from shared.kvindex import KvIndex
from shared.messages import PageArray, Phase, Tier
from shared.pagetable import PageTable
from worker.kv.cache import Lease, NodeCache
from worker.kv.eviction import Eviction
from worker.kv.pool import DictIndex, SlotIndex

NODES = ["n1", "n2", "n3"]
MANY = 700  # names: two such runs are more than tables begin with room for


def paths_of(names: PageNames) -> Callable[[list[int]], PageArray]:
    """Chained paths: equal beginnings have equal names. A part of 9 or more is a long run of new names."""
    children: dict[tuple[int, int], PageArray] = {}

    def path(parts: list[int]) -> PageArray:
        pages: list[int] = []
        for part in parts:
            key = (pages[-1] if pages else -1, part)
            if key not in children:
                count = MANY if part >= 9 else 1 + part
                first = names.take(count)
                children[key] = np.arange(first, first + count)
            pages += children[key].tolist()
        return np.array(pages, dtype=np.int64)

    return path


def listed(pages: PageArray) -> list[int]:
    return sorted(pages.tolist())


PARTS = st.lists(st.integers(0, 9), max_size=4)
OPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "store", "store", "remove", "clear", "drop", "request", "request", "place", "place", "end",
                "evicted", "stored", "switched", "gone",
            ]
        ),
        st.integers(0, 2),
        st.integers(0, 3),
        PARTS,
    ),
    max_size=40,
)  # fmt: skip


@given(OPS)
@settings(max_examples=200, deadline=None)
def test_the_directory_answers_alike_on_both(ops: list[tuple[str, int, int, list[int]]]) -> None:
    names = PageNames(16)
    path_for = paths_of(names)
    indexes = [KvIndex(), KvIndex(DenseTable(names))]
    directories = [
        SimDirectory(indexes[0], lambda: PageTable(3)),
        SimDirectory(indexes[1], lambda: DenseTable(names, 3)),
    ]
    phases = list(Phase)
    for number, (op, at, other, parts) in enumerate(ops):
        node, tier, branch, phase = NODES[at], list(Tier)[other % 2], f"b{other}", phases[at]
        path = path_for(parts)
        told: list[object] = []
        for index, directory in zip(indexes, directories, strict=True):
            match op:
                case "store":
                    index.store(node, tier, path)
                case "remove":
                    gone = index.remove(node, tier, path[other:])
                    told.append(listed(gone))
                    directory.counts.evicted(node, gone)
                case "clear":
                    told.append(listed(index.clear(node, tier if other else None)))
                case "drop":
                    index.drop_node(node)
                case "request":
                    before = directory.branches.path(branch)
                    kept = min(before.size, path.size)
                    differ = np.flatnonzero(before[:kept] != path[:kept])
                    base = int(differ[0]) if differ.size else kept
                    directory.request(branch, "b0" if other else None, path, base, float(number))
                case "place":
                    directory.placed(branch, node, phases[len(parts) % 2], f"r{number}", float(number))
                case "end":
                    directory.ended(branch, float(number))
                case "evicted":
                    directory.counts.evicted(node, path[other:])
                case "stored":
                    directory.counts.stored(node)
                case "switched":
                    directory.counts.switched(node, phases[other % 3], phase)
                case "gone":
                    directory.counts.drop_node(node)
            told.append((len(index), index.match(path), index.match_tier(path, Tier.L1)))
            told.append([(index.holds(name, path).tolist(), index.count(name, tier)) for name in NODES])
            told.append([listed(index.pages(name, each)) for name in NODES for each in Tier])
            told.append(
                [(directory.counts.table(name), directory.counts.counted_pages(name)) for name in NODES]
            )
            if number % 3 == 0:
                changes = directory.take_changes()
                told.append(
                    {
                        name: (listed(change.positive), listed(change.zero), listed(change.pages))
                        for name, change in changes.items()
                    }
                )
        half = len(told) // 2
        assert told[:half] == told[half:]


CACHE_OPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["lease", "lease", "write", "load", "release", "arrive", "hold", "lend", "end", "count"]
        ),
        st.integers(0, 12),
        st.lists(st.integers(0, 4), max_size=4),
    ),
    max_size=50,
)


class Cached:
    """A cache, and what is taken of it in the course of a test."""

    def __init__(self, index: Callable[[], SlotIndex], eviction: Eviction) -> None:
        self.cache = NodeCache(30, 50, eviction=eviction, index=index, key_bytes=0)
        self.leases: list[tuple[Lease, PageArray]] = []
        self.held: list[PageArray] = []
        self.lent: list[PageArray] = []

    def act(self, op: str, size: int, path: PageArray) -> list[object]:
        cache, told = self.cache, list[object]()
        if op == "lease" and path.size <= 30:
            lease = cache.lease(path, min(30, path.size + size))
            told.append(lease and (lease.slots.tolist(), lease.room, lease.restored_pages))
            if lease is not None:
                self.leases.append((lease, path))
        elif op in ("write", "load", "release") and self.leases:
            lease, whole = self.leases[size % len(self.leases)]
            rest = whole[lease.pages : lease.pages + min(lease.room, size)]
            if op == "write":
                cache.write(lease, path_of(rest), follow=size % 2 == 1)
            elif op == "load":
                told.append(cache.load(lease, rest))
            else:
                cache.release(lease)
                self.leases.remove((lease, whole))
        elif op == "arrive":
            new = path_of(path[~cache.in_host(path)])
            slots = cache.reserve(len(new))
            cache.arrived(new[: slots.size], slots)
            told.append(slots.tolist())
        elif op == "hold":
            self.held.append(cache.hold(path))
            told.append(self.held[-1].tolist())
        elif op == "lend":
            slots, lent = cache.lend(path_of(path))
            self.lent.append(lent)
            told += [slots.tolist(), lent.tolist()]
        elif op == "end" and self.held + self.lent:
            cache.end_loan(self.lent.pop()) if self.lent else cache.let_go(self.held.pop())
        elif op == "count":
            cache.set_counts(path[:size], path[size:])
        told += [cache.held(path), cache.in_host(path).tolist(), [listed(cache.pages(tier)) for tier in Tier]]
        told += [(c.stored, c.tier, c.pages.tolist()) for c in cache.take_changes()]
        told += [cache.l1_used, cache.l1_pinned, cache.l1_room, cache.l2_used, cache.l2_pinned, cache.evicted]
        return told


@given(CACHE_OPS, st.sampled_from(["count", "count_lru", "lru"]))
@settings(max_examples=200, deadline=None)
def test_a_cache_does_the_same_with_both(ops: list[tuple[str, int, list[int]]], eviction: Eviction) -> None:
    names = PageNames(16)
    path_for = paths_of(names)
    real, dense = Cached(DictIndex, eviction), Cached(lambda: DenseIndex(names), eviction)
    for op, size, parts in ops:
        path = path_for(parts)
        assert real.act(op, size, path) == dense.act(op, size, path)
        if size == 12:
            names.take(MANY)


def test_rows_stay_and_new_ones_are_empty_when_names_grow() -> None:
    names = PageNames(16)
    table, index = DenseTable(names, 2), DenseIndex(names)
    pages = np.array([3, 1000], dtype=np.int64)
    names.take(1024)
    slots = table.insert(pages)
    table.columns[1][slots] = [7, 8]
    index.put(pages, np.array([5, 6]))
    before = table.nbytes
    names.take(10_000)
    beyond = np.array([3, 1000, 5000, 11_023], dtype=np.int64)
    assert table.columns[1][table.find(beyond)].tolist() == [7, 8, 0, 0]
    assert table.columns[0][table.find(beyond)].tolist() == [0, 0, 0, 0]
    assert table.pages(slots).tolist() == [3, 1000] and table.nbytes > before
    assert index.find(beyond).tolist() == [5, 6, -1, -1] and len(index) == 2
    index.put(beyond[3:], np.array([9]))
    index.drop(pages[:1])
    assert index.find(beyond).tolist() == [-1, 6, -1, 9] and len(index) == 2


@pytest.mark.parametrize("make", [lambda names: DenseIndex(names), lambda names: DenseTable(names)])
def test_a_table_that_nobody_has_any_more_does_not_grow(make: Callable[[PageNames], object]) -> None:
    names = PageNames(16)
    table = make(names)
    assert len(names.tables) == 1
    del table
    assert not names.tables


def test_what_an_index_found_is_the_askers_to_change() -> None:
    names = PageNames(16)
    index, pages = DenseIndex(names), np.arange(4)
    index.put(pages, np.arange(4))
    found = index.find(pages)
    found[:] = -1
    assert index.find(pages).tolist() == [0, 1, 2, 3]
