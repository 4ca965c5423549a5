"""Which branch a request belongs to, tagged and inferred, and what the directory is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.branches import Branches, common_pages
from services.router.identity import Identifier
from shared.messages import unpack_pages
from shared.openai import ApiError


def path(*pages):
    return np.array(pages, dtype=np.int64)


def test_tagged_requests_belong_to_the_branch_they_name():
    who = Identifier("auto-")
    found = who.identify({"X-EI-Branch": " a/1 ", "X-EI-Parent-Branch": "a"}, path(1), 0.0)
    assert (found.branch, found.parent, found.final, found.tagged) == ("a/1", "a", False, True)
    assert who.identify({"X-EI-Branch": "a", "X-EI-Branch-Final": "TRUE"}, path(9), 0.0).final


@pytest.mark.parametrize("bad", ["", " ", "x" * 257, "a\nb", "\x00"])
def test_bad_branch_ids_are_refused(bad):
    with pytest.raises(ApiError) as caught:
        Identifier("auto-").identify({"X-EI-Branch": bad}, path(), 0.0)
    assert caught.value.status == 400


def test_the_next_step_of_a_conversation_continues_its_branch():
    who = Identifier("auto-")
    first = who.identify({}, path(1, 2), 0.0).branch
    assert who.identify({}, path(1, 2, 3), 1.0).branch == first
    assert who.identify({}, path(1, 2, 3), 2.0).branch == first


def test_a_request_that_shares_only_a_part_is_a_branch_of_its_own():
    who = Identifier("auto-")
    first = who.identify({}, path(1, 2, 3), 0.0).branch
    fork = who.identify({}, path(1, 2, 9), 1.0).branch
    assert fork != first
    assert who.identify({}, path(1, 2, 3, 4), 2.0).branch == first
    assert who.identify({}, path(1, 2, 9, 10), 3.0).branch == fork


def test_prompts_below_one_page_never_share_a_branch():
    who = Identifier("auto-")
    assert who.identify({}, path(), 0.0).branch != who.identify({}, path(), 0.0).branch


def test_ended_and_idle_branches_are_not_continued():
    who = Identifier("auto-", idle_s=10.0)
    first = who.identify({}, path(1), 0.0).branch
    who.end(first)
    second = who.identify({}, path(1, 2), 1.0).branch
    assert second != first
    assert who.identify({}, path(1, 2, 3), 12.0).branch != second


def test_inferred_branches_are_bounded():
    who = Identifier("auto-", limit=3)
    made = [who.identify({}, path(i), float(i)).branch for i in range(10)]
    assert who.identify({}, path(9, 1), 11.0).branch == made[9]
    assert who.identify({}, path(0, 100), 12.0).branch not in made
    assert len(who._by_tail) <= 3 and len(who._by_branch) <= 3


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=40))
def test_interleaved_conversations_keep_apart(steps):
    who = Identifier("auto-")
    paths = {agent: [1000 + agent] for agent in range(5)}
    branch: dict[int, str] = {}
    for t, (agent, grows) in enumerate(steps):
        if agent in branch:
            paths[agent] += [agent * 100_000 + len(paths[agent]) + i for i in range(grows)]
        found = who.identify({}, path(*paths[agent]), float(t)).branch
        assert branch.setdefault(agent, found) == found
    assert len(set(branch.values())) == len(branch)


def test_only_what_differs_from_the_last_path_is_published():
    branches = Branches()
    first = branches.request("b", None, True, path(1, 2, 3), 0.0)
    assert (first.base, first.base_page, unpack_pages(first.pages).tolist()) == (0, 0, [1, 2, 3])
    grown = branches.request("b", None, True, path(1, 2, 3, 4), 1.0)
    assert (grown.base, grown.base_page, unpack_pages(grown.pages).tolist()) == (3, 3, [4])
    compacted = branches.request("b", None, True, path(1, 9), 2.0)
    assert (compacted.base, compacted.base_page, unpack_pages(compacted.pages).tolist()) == (1, 1, [9])
    same = branches.request("b", None, True, path(1, 9), 3.0)
    assert (same.base, unpack_pages(same.pages).tolist()) == (2, [])
    branches.path_wanted("b")
    assert branches.request("b", None, True, path(1, 9), 4.0).base == 0


def test_branch_list_is_bounded_and_expires():
    branches = Branches(limit=2)
    for i in range(4):
        branches.request(f"b{i}", None, True, path(i), float(i))
    assert [view.branch for view in branches.list()] == ["b2", "b3"]
    branches.expire(3.0)
    assert [view.branch for view in branches.list()] == ["b3"]
    assert branches.forget("b3") and not branches.forget("b3")
    assert len(branches._paths) == 0


def test_common_pages():
    assert common_pages(path(), path(1)) == 0
    assert common_pages(path(1, 2), path(1, 2)) == 2
    assert common_pages(path(1, 2, 3), path(1, 5, 3)) == 1
