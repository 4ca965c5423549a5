"""Algorithm E.1: version and path of a branch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.directory.branches import MAX_ENDED, BranchTable, Change
from shared.messages import BranchRequest, Phase, pack_pages
from tests.directory_oracle import Path, RouterSide, ended, page_names, placed

OLD = page_names("abcdef")


def table_with(path: Path, t: float = 0.0) -> tuple[BranchTable, RouterSide]:
    table, router = BranchTable(), RouterSide()
    table.request(router.request("b", path, t), now=t)
    return table, router


def test_first_request_makes_version_one_with_an_empty_previous_path() -> None:
    table, router = BranchTable(), RouterSide()
    step = table.request(router.request("b", OLD), now=0.0)
    assert (step.change, step.version, step.old.size, step.common) == (Change.NEW, 1, 0, 0)
    assert table.path("b").tolist() == list(OLD)


def test_append_keeps_the_version() -> None:
    table, router = table_with(OLD)
    message = router.request("b", page_names("abcdefgh"))
    assert message.base == 6 and len(message.pages) == 16  # only what was appended travels
    step = table.request(message, now=1.0)
    assert (step.change, step.version, step.common) == (Change.APPENDED, 1, 6)
    assert table.path("b").tolist() == list(page_names("abcdefgh"))


def test_same_path_again_keeps_the_version() -> None:
    table, router = table_with(OLD)
    step = table.request(router.request("b", OLD), now=1.0)
    assert (step.change, step.version) == (Change.APPENDED, 1)


@pytest.mark.parametrize(("path", "common"), [("abcXY", 3), ("Z", 0), ("abc", 3), ("", 0)])
def test_rewrite_increments_the_version(path: str, common: int) -> None:
    """A path that the old one is no prefix of, a shorter one too."""
    table, router = table_with(OLD)
    step = table.request(router.request("b", page_names(path)), now=1.0)
    assert (step.change, step.version, step.common) == (Change.REWRITTEN, 2, common)
    assert step.old.tolist() == list(OLD)
    assert table.path("b").tolist() == list(page_names(path))


def test_whole_path_that_appends_is_no_rewrite() -> None:
    table, _ = table_with(OLD)
    whole = BranchRequest("b", 0, 0, pack_pages(list(page_names("abcdefg"))))
    step = table.request(whole, now=1.0)
    assert (step.change, step.version, step.common) == (Change.APPENDED, 1, 6)


def test_fork_leaves_its_parent_alone() -> None:
    table, router = table_with(OLD)
    step = table.request(router.request("child", page_names("abcdXX")), now=1.0)
    assert (step.change, step.version, step.old.size) == (Change.NEW, 1, 0)
    assert table.path("b").tolist() == list(OLD)


@pytest.mark.parametrize(("base", "base_page"), [(7, 0), (6, 12345), (3, OLD[3]), (-1, 0), (2**40, OLD[0])])
def test_unknown_prefix_empties_the_path_until_a_whole_one_comes(base: int, base_page: int) -> None:
    table, _ = table_with(OLD)
    step = table.request(BranchRequest("b", base, base_page, pack_pages([1, 2])), now=1.0)
    assert step.change is Change.UNKNOWN and step.old.tolist() == list(OLD)
    assert table.path("b").size == 0
    again = table.request(BranchRequest("b", base, base_page, b""), now=2.0)
    assert again.change is Change.UNKNOWN and again.old.size == 0
    whole = table.request(BranchRequest("b", 0, 0, pack_pages([5, 6])), now=3.0)
    assert whole.change is Change.APPENDED and table.path("b").tolist() == [5, 6]


def test_unknown_prefix_of_an_unknown_branch_makes_no_branch() -> None:
    table = BranchTable()
    assert table.request(BranchRequest("b", 2, 7, b""), now=0.0).change is Change.UNKNOWN
    assert len(table) == 0


def test_page_list_of_wrong_length_is_an_error_and_changes_nothing() -> None:
    table, _ = table_with(OLD)
    with pytest.raises(ValueError):
        table.request(BranchRequest("b", 0, 0, b"12345"), now=1.0)
    assert table.path("b").tolist() == list(OLD)


def test_placements_that_are_old_seen_or_late_are_not_taken() -> None:
    table, router = table_with(OLD, t=10.0)
    assert table.place(placed("b", "p1", Phase.PREFILL, 11.0), now=11.0)
    assert table.place(placed("b", "d1", Phase.DECODE, 12.0), now=12.0)
    assert not table.place(placed("b", "p1", Phase.PREFILL, 11.0), now=12.0)  # seen
    assert not table.place(placed("b", "p2", Phase.PREFILL, 10.5), now=12.0)  # older than the newest
    assert not table.place(placed("b", "d2", Phase.DECODE, 9.0), now=12.0)  # older than the request
    assert not table.place(placed("x", "p1", Phase.PREFILL, 11.0), now=12.0)  # unknown
    table.request(router.request("b", page_names("abcdefg"), 20.0), now=20.0)
    assert not table.place(placed("b", "p2", Phase.PREFILL, 11.5), now=20.0)
    assert table.place(placed("b", "p2", Phase.PREFILL, 20.5), now=20.0)
    assert table.end(ended("b", 30.0)) is not None
    assert not table.place(placed("b", "p1", Phase.PREFILL, 31.0), now=31.0)


def test_late_request_does_not_bring_an_ended_branch_back() -> None:
    table, router = table_with(OLD, t=10.0)
    assert table.end(ended("b", 20.0)) is not None
    assert table.end(ended("b", 20.0)) is None
    late = BranchRequest("b", 0, 0, pack_pages([1]), t=19.0)
    assert table.request(late, now=21.0).change is Change.STALE
    assert len(table) == 0
    fresh = BranchRequest("b", 0, 0, pack_pages([1]), t=21.0)
    assert table.request(fresh, now=21.0).change is Change.NEW
    assert table.end(ended("b", 20.0)) is None  # the earlier end again
    assert len(table) == 1


def test_remembered_ends_are_bounded() -> None:
    table = BranchTable()
    for i in range(MAX_ENDED + 50):
        table.end(ended(f"b{i}", 1.0 + i))
    assert len(table.ended) == MAX_ENDED


def test_idle_branches_expire_oldest_first() -> None:
    table, router = BranchTable(), RouterSide()
    for i in range(4):
        table.request(router.request(f"b{i}", OLD, t=10.0 + i), now=10.0 + i)
    table.place(placed("b0", "n", Phase.PREFILL, 50.0), now=50.0)
    assert [b.name for b in table.expire(12.5)] == ["b1", "b2"]
    assert [b.name for b in table] == ["b3", "b0"]


def test_a_fast_clock_does_not_keep_a_branch_for_ever() -> None:
    table, router = BranchTable(), RouterSide()
    table.request(router.request("b", OLD, t=1e9), now=10.0)
    assert [b.name for b in table.expire(11.0)] == ["b"]


@given(st.lists(st.text(alphabet="ab", max_size=6), min_size=1, max_size=12))
def test_any_history_matches_the_pseudocode(contexts: list[str]) -> None:
    table, router = BranchTable(), RouterSide()
    version, old = 0, page_names("")
    for i, context in enumerate(contexts):
        path = page_names(context)
        version += 1 if i == 0 or path[: len(old)] != old else 0
        step = table.request(router.request("b", path), now=float(i))
        assert step.version == version
        assert step.old.tolist() == list(old)
        assert step.old[: step.common].tolist() == list(path[: step.common])
        assert np.array_equal(table.path("b"), np.array(path, dtype=np.int64))
        old = path
