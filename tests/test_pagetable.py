"""The page table against a dict: any int64, duplicates, full buckets, dead rows, growth and return of memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import PageArray
from shared.pagetable import PageTable

EDGES = [0, -1, 1, 2**63 - 1, -(2**63), 2**62, -(2**62)]


def array(pages: list[int]) -> PageArray:
    return np.array(pages, dtype=np.int64)


def put(table: PageTable, pages: PageArray, value: int) -> None:
    slots = table.insert(pages)
    table.columns[0][slots] = value


def write(
    table: PageTable, model: dict[int, tuple[int, ...]], pages: list[int], row: tuple[int, ...]
) -> None:
    slots = table.insert(array(pages))
    for column, value in zip(table.columns, row, strict=True):
        column[slots] = value
    model.update(dict.fromkeys(pages, row))


def kill(table: PageTable, model: dict[int, tuple[int, ...]], pages: list[int]) -> None:
    slots = table.find(array(pages))
    for column in table.columns:
        column[slots[slots >= 0]] = 0
    for page in pages:
        model.pop(page, None)


def same(table: PageTable, model: dict[int, tuple[int, ...]], pages: list[int]) -> None:
    slots = table.find(array(pages))
    none = (0,) * len(table.columns)
    got = list(zip(*(column[slots].tolist() for column in table.columns), strict=True))
    assert got == [model.get(page, none) for page in pages]
    found = slots >= 0
    assert table.pages(slots[found]).tolist() == array(pages)[found].tolist()
    live = np.logical_or.reduce([column != 0 for column in table.columns]).nonzero()[0]
    assert sorted(table.pages(live).tolist()) == sorted(model)


some_pages = st.lists(
    st.one_of(st.sampled_from(EDGES), st.integers(-40, 40), st.integers(-(2**63), 2**63 - 1)), max_size=60
)
steps = st.lists(
    st.tuples(st.sampled_from(["write", "kill", "shrink"]), some_pages, st.integers(1, 9)), max_size=20
)


@settings(max_examples=200)
@given(steps, st.integers(1, 3))
def test_equals_a_dict(steps: list[tuple[str, list[int], int]], width: int) -> None:
    """A row is dead only when all its columns are 0."""
    table, model = PageTable(width), dict[int, tuple[int, ...]]()
    for what, pages, value in steps:
        if what == "write":
            write(table, model, pages, tuple(value if i == value % width else 0 for i in range(width)))
        elif what == "kill":
            kill(table, model, pages)
        else:
            table.shrink(len(model))
        same(table, model, [*pages, *EDGES, *range(-3, 3)])


@pytest.mark.parametrize("spread", ["random", "near", "far"])
def test_thousands_of_pages(spread: str) -> None:
    rng = np.random.default_rng(1)
    near = np.arange(-5000, 15_000)
    pages = {"near": near, "far": near << 44, "random": rng.integers(-(2**63), 2**63 - 1, 20_000)}[spread]
    pages = np.unique(pages)
    values = np.arange(1, pages.size + 1, dtype=np.int32)
    table = PageTable()
    for at in range(0, pages.size, 777):
        slots = table.insert(pages[at : at + 777])
        table.columns[0][slots] = values[at : at + 777]
    assert (table.columns[0][table.find(pages)] == values).all()
    again = table.insert(pages)
    assert np.unique(again).size == pages.size and (table.columns[0][again] == values).all()
    absent = np.setdiff1d(pages ^ 12345, pages)
    assert (table.find(absent) == -1).all() and not table.columns[0][-1]


def test_pages_of_one_place_go_on_in_the_next_ones() -> None:
    """Pages that all have the last place of the index as their home: they go round to the first."""
    table = PageTable()
    mine = np.arange(1, 4000, dtype=np.int64)
    mine = mine[table._home(mine) == table._last_place][:20]
    put(table, mine[:3], 5)
    slots = table.insert(mine)
    assert np.unique(slots).size == 20 and (table.pages(slots) == mine).all()
    assert (table.find(mine) == slots).all()
    table.columns[0][slots] = 6
    assert (table.columns[0][table.find(mine)] == 6).all()


@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize("size", [4, 10_000])
def test_the_same_page_many_times_in_a_call(size: int, with_zero: bool) -> None:
    rng = np.random.default_rng(2)
    pages = rng.integers(0 if with_zero else 1, 1 + size // 2, size)
    table = PageTable()
    slots = table.insert(pages)
    assert np.unique(slots).size == np.unique(pages).size and (table.pages(slots) == pages).all()
    assert not table.columns[0].any()


def test_told_new_only_when_all_are_new_and_distinct() -> None:
    table = PageTable()
    pages = array([10, 20, 30])
    slots, fresh = table.insert_told(pages)
    assert fresh and not table.columns[0].any()
    table.columns[0][slots] = 7
    assert table.insert_told(pages)[1] is False
    assert table.insert_told(array([20, 40]))[1] is False
    assert table.insert_told(array([50, 50]))[1] is False
    assert table.columns[0][table.find(array([10, 20, 30, 40, 50]))].tolist() == [7, 7, 7, 0, 0]


def test_a_dead_row_is_revived_in_its_place_and_dropped_by_a_rebuild() -> None:
    table = PageTable()
    pages = np.arange(1, 21, dtype=np.int64)
    slots = table.insert(pages)
    table.columns[0][slots] = 1
    table.columns[0][slots[:10]] = 0
    assert (table.find(pages) == slots).all() and (table.insert(pages) == slots).all()
    put(table, np.arange(100, 3000), 2)
    assert (table.find(pages[:10]) == -1).all()
    assert (table.columns[0][table.find(pages[10:])] == 1).all()


def test_turnover_does_not_grow_the_table() -> None:
    table = PageTable()
    last = np.empty(0, dtype=np.int64)
    sizes = set()
    for step in range(400):
        table.columns[0][table.find(last)] = 0
        last = np.arange(100, dtype=np.int64) + 1000 * step + 1
        put(table, last, 1)
        sizes.add(table.nbytes)
    assert max(sizes) < 8000


def test_memory_returns_and_an_entry_is_small() -> None:
    pages = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 200_000)
    table = PageTable()
    small = table.nbytes
    put(table, pages, 1)
    assert table.nbytes / table.columns[0].size < 29
    assert table.nbytes / pages.size < 90
    for at in range(0, pages.size, 1000):
        table.columns[0][table.find(pages[at : at + 1000])] = 0
        table.shrink(pages.size - at - 1000)
        left = pages.size - at - 1000
        assert table.nbytes <= max(small, left * 28.5 / 0.25 + 2500)
    assert table.nbytes == small


def test_read_only_and_strided_pages() -> None:
    pages = np.arange(1, 41, dtype=np.int64)
    read_only = np.frombuffer(pages.tobytes(), dtype="<i8")
    table = PageTable()
    put(table, read_only, 1)
    assert table.columns[0][table.find(pages[::-3])].all()


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, 100])
def test_paths_of_runs_here_and_there(cut: int) -> None:
    """What a lookup guesses from every 16th page is right only within a run of rows."""
    rng = np.random.default_rng(4)
    pages = rng.integers(-(2**63), 2**63 - 1, 4000)
    pages[[5, 1000]] = [0, -1]
    table = PageTable()
    order = rng.permutation(40)
    for part in order.tolist():
        slots = table.insert(pages[part * 100 : part * 100 + 100])
        table.columns[0][slots] = part + 1
    unknown = rng.integers(-(2**63), 2**63 - 1, 50)
    path = np.concatenate(
        (pages[cut:700], unknown, pages[900:1500], unknown[:3], pages[:40], [0], pages[3950:])
    )
    model = dict(zip(pages.tolist(), np.repeat(np.arange(1, 41), 100).tolist(), strict=True))
    found = table.columns[0][table.find(path)]
    assert found.tolist() == [model.get(page, 0) for page in path.tolist()]
    assert (table.find(path[found > 0]) >= 0).all() and (table.find(unknown) == -1).all()
