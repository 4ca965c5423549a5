"""Shared paths: what branches have in common is stored once, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.directory.paths import NO_TIP, PathStore, SegmentRecord, Tip, common_pages, tip_number
from shared.messages import PageArray
from tests.directory_oracle import page_names


def path_of(context: str) -> PageArray:
    return np.array(page_names(context), dtype=np.int64)


class Saved:
    """What Redis keeps: written by `take`, read by `restore`."""

    def __init__(self) -> None:
        self.records: dict[int, SegmentRecord] = {}
        self.pages: dict[int, bytes] = {}

    def write(self, store: PathStore) -> None:
        segments, pages = store.take()
        for number, record in segments.items():
            if record is None:
                self.records.pop(number, None)
                self.pages.pop(number, None)
            else:
                self.records[number] = record
        for number, (first, blob) in pages.items():
            old = self.pages.get(number, b"")
            assert len(old) >= first * 8, "a segment with a hole"
            self.pages[number] = old[: first * 8] + blob + old[first * 8 + len(blob) :]

    def read(self, tips: dict[str, Tip]) -> tuple[PathStore, dict[str, Tip]]:
        store = PathStore()
        assert store.restore(self.records, self.pages) == []
        found = {}
        for name, tip in tips.items():
            claimed = store.claim(tip_number(tip), tip.depth)
            assert claimed is not None
            found[name] = claimed
        assert store.sweep() == 0
        return store, found


class Branches:
    def __init__(self) -> None:
        self.store = PathStore()
        self.paths: dict[str, PageArray] = {}
        self.tips: dict[str, Tip] = {}

    def set(self, name: str, context: str) -> None:
        path = path_of(context)
        old = self.paths.get(name, path_of(""))
        self.tips[name] = self.store.move(self.tips.get(name, NO_TIP), path, common_pages(old, path))
        self.paths[name] = path

    def end(self, name: str) -> None:
        self.store.release(self.tips.pop(name, NO_TIP))
        self.paths.pop(name, None)

    def check(self) -> None:
        for name, path in self.paths.items():
            assert self.store.path(self.tips[name]).tolist() == path.tolist()
        distinct = {page for path in self.paths.values() for page in path.tolist()}
        assert self.store.pages == len(distinct), "a page is stored twice, or no path has it"


contexts = st.text("ab", max_size=8)
steps = st.lists(st.tuples(st.sampled_from("123456"), st.one_of(st.none(), contexts)), max_size=40)


@settings(max_examples=300)
@given(steps, st.integers(1, 5))
def test_every_page_is_stored_once_and_comes_back(history: list[tuple[str, str | None]], every: int) -> None:
    branches, saved = Branches(), Saved()
    for step, (name, context) in enumerate(history, 1):
        if context is None:
            branches.end(name)
        else:
            branches.set(name, context)
        branches.check()
        if step % every == 0:
            saved.write(branches.store)
        if step % (2 * every) == 0:
            branches.store, branches.tips = saved.read(branches.tips)
            branches.check()
    for name in list(branches.tips):
        branches.end(name)
    saved.write(branches.store)
    assert (len(branches.store), saved.records, saved.pages) == (0, {}, {})


def test_append_writes_only_what_is_new() -> None:
    branches = Branches()
    branches.set("a", "system" + "x" * 50)
    branches.store.take()
    branches.set("a", "system" + "x" * 50 + "yz")
    ((number, (first, blob)),) = branches.store.take().pages.items()
    assert (first, len(blob)) == (56, 16)
    assert number == tip_number(branches.tips["a"])


def test_fork_of_a_long_prefix_stores_its_tail_alone() -> None:
    branches = Branches()
    branches.set("parent", "system" * 100)
    branches.set("child", "system" * 100 + "task")
    branches.set("other", "system" * 50 + "!")
    branches.check()
    assert branches.store.pages == 605
    branches.end("parent")
    branches.check()
    branches.end("child")
    branches.check()
    assert branches.store.pages == 301


def test_compaction_drops_what_no_branch_has_any_more() -> None:
    branches, saved = Branches(), Saved()
    branches.set("a", "system" + "x" * 500)
    saved.write(branches.store)
    branches.set("a", "system" + "summary")
    saved.write(branches.store)
    assert branches.store.pages == 13
    store, tips = saved.read(branches.tips)
    assert store.path(tips["a"]).tolist() == path_of("systemsummary").tolist()


def test_page_at_two_places_breaks_nothing() -> None:
    """A sender that does not chain its hashes."""
    store = PathStore()
    paths = [[1, 2, 3], [3, 1, 2], [1, 1, 1], [2, 3], [1, 2, 9, 1]]
    tips = [store.move(NO_TIP, np.array(path), 0) for path in paths]
    assert [store.path(tip).tolist() for tip in tips] == paths
    for tip in tips:
        store.release(tip)
    assert len(store) == 0


@pytest.mark.parametrize("damage", ["pages", "length", "parent", "start"])
def test_damaged_segment_takes_what_hangs_from_it_and_nothing_else(damage: str) -> None:
    branches, saved = Branches(), Saved()
    for name, context in (("a", "abcd"), ("b", "abxy"), ("c", "zz")):
        branches.set(name, context)
    saved.write(branches.store)
    root = tip_number(branches.tips["a"])
    child = tip_number(branches.tips["b"])
    if damage == "pages":
        saved.pages[root] = b"123"
    elif damage == "length":
        saved.pages[root] = saved.pages[root][:8]
    elif damage == "parent":
        del saved.records[root]
    else:
        saved.records[child].start = 7
    store = PathStore()
    damaged = store.restore(saved.records, saved.pages)
    assert child in damaged
    assert store.claim(child, 4) is None
    other = branches.tips["c"]
    claimed = store.claim(tip_number(other), other.depth)
    assert claimed is not None
    if damage == "start":
        assert store.claim(root, 4) is not None
    store.sweep()
    assert store.path(claimed).tolist() == path_of("zz").tolist()
    segments = store.take().segments
    assert all(segments[number] is None for number in damaged)
