"""Names of pages against the truth: the hashes of the pages' tokens, which `loadtest.content` makes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.content import Blocks, BranchPrompts, TokenArray
from loadtest.simulate.pages import PageNames, SessionPages
from loadtest.traces import Branch, Recorded, Scope, Session, TraceError, build_branch
from shared.messages import PageArray
from shared.pages import page_hashes

Tree = dict[
    tuple[int, ...], int
]  # the blocks from a prompt's start -> id of the last: ids chain, as recorded ones do
# block size, page size: equal, pages of whole blocks, blocks of whole pages
SIZES = [(8, 8), (4, 8), (2, 8), (8, 4), (8, 2)]


def ids_of(tree: Tree, parts: list[int]) -> list[int]:
    return [tree.setdefault(tuple(parts[: n + 1]), len(tree) + 1) for n in range(len(parts))]


def make_session(
    tree: Tree,
    block: int,
    scope: Scope,
    *branches: list[tuple[list[int], int, int]],
    name: str = "s",
    named_tails: bool = False,
) -> Session:
    """`branches`: of each prompt its blocks, the tokens of its tail, and its output tokens."""
    made = []
    for index, prompts in enumerate(branches):
        records = []
        for parts, tail, output in prompts:
            ids = ids_of(tree, [*parts, 7] if named_tails and tail else parts)
            records.append(
                Recorded(0.0, 0.0, len(parts) * block + tail, output, np.array(ids, dtype=np.int64))
            )
        made.append(build_branch(f"b{index}", index, -1 if not index else 0, records, block_size=block))
    return Session(id=name, block_size=block, scope=scope, branches=made)


class Sent(NamedTuple):
    """One step of one playing: names of its pages beside its tokens."""

    playing: Playing
    branch: Branch
    step: int
    prompt: PageArray
    context: PageArray
    tokens: TokenArray
    output: TokenArray


class Playing:
    """A playing of a session, step by step in both worlds."""

    def __init__(self, session: Session, pages: SessionPages, instance: str, seed: int) -> None:
        self._pages, self._branches = pages, session.branches
        blocks = Blocks(instance, session.block_size, session.scope)
        self._prompts = [BranchPrompts(blocks, branch) for branch in session.branches]
        self._next = [0] * len(session.branches)
        self._random = np.random.default_rng(seed)

    def send(self, index: int) -> Sent | None:
        """The branch's next step, answered at once; None after its last one."""
        branch, number = self._branches[index], self._next[index]
        if number == len(branch.steps):
            return None
        self._next[index] += 1
        step = branch.steps[number]
        names = self._pages.step(index, number)
        tokens = self._prompts[index].next().tokens
        output = self._random.integers(32, 1000, step.output_tokens).astype(np.int32)
        self._prompts[index].output(number, output.tolist())
        if number == len(branch.steps) - 1:
            self._pages.forget(index)
        return Sent(self, branch, number, names.prompt, names.context, tokens, output)


def check(sent: list[Sent], page: int, *, complete: bool = True) -> None:
    """Prompt pages have one name exactly where they have one hash; with `complete` False, only where they have one.

    An output that the next prompt carries gives its pages that prompt's names; others have names of their own.
    """
    hash_of: dict[int, int] = {}
    name_of: dict[int, int] = {}
    for one in sent:
        hashes = page_hashes(one.tokens, page).tolist()
        assert len(hashes) == one.prompt.size
        for name, hashed in zip(one.prompt.tolist(), hashes, strict=True):
            assert hash_of.setdefault(name, hashed) == hashed
            if complete:
                assert name_of.setdefault(hashed, name) == name
    given_once: set[int] = set()
    for one in sent:
        context = np.concatenate((one.tokens, one.output))
        assert np.array_equal(one.context[: one.prompt.size], one.prompt)
        assert one.context.size == context.size // page
        carrying = next((s for s in sent if carries(s, one)), None)
        for at, hashed in list(enumerate(page_hashes(context, page).tolist()))[one.prompt.size :]:
            name = int(one.context[at])
            if carrying is not None and at < carrying.prompt.size:
                assert name == carrying.prompt[at]
                # What another branch said in these places first is not said again (see `loadtest.content`).
                if np.array_equal(carrying.tokens[: (at + 1) * page], context[: (at + 1) * page]):
                    assert hash_of[name] == hashed
            else:
                assert name not in hash_of and name not in given_once
                given_once.add(name)


def carries(later: Sent, one: Sent) -> bool:
    """Whether this is the first prompt that goes on from that one."""
    begun = (number for number, step in enumerate(one.branch.steps) if step.continues == one.step)
    return later.playing is one.playing and later.branch is one.branch and later.step == next(begun, -1)


@st.composite
def sessions(draw: st.DrawFn, tree: Tree, block: int, scope: Scope, name: str) -> Session:
    """A main branch and its sub-agents over one tree of blocks: prompts go on, are cut, rewritten, or come from aside."""
    branches: list[list[tuple[list[int], int, int]]] = []
    for _ in range(draw(st.integers(1, 3))):
        # A sub-agent begins as one of the main branch's prompts does, or with nothing of it.
        known = [parts for parts, _, _ in branches[0]] if branches else []
        begun = bool(known) and draw(st.booleans())
        parts: list[int] = list(draw(st.sampled_from(known))) if begun else []
        prompts = []
        for _ in range(draw(st.integers(1, 5))):
            if draw(st.integers(0, 3)) == 0:
                parts = parts[: draw(st.integers(0, len(parts)))]
            parts = [*parts, *draw(st.lists(st.integers(0, 2), max_size=5))]
            tail = draw(st.integers(0 if parts else 1, block - 1))
            prompts.append((parts, tail, draw(st.integers(1, 5 * block))))
        branches.append(prompts)
    return make_session(tree, block, scope, *branches, name=name, named_tails=draw(st.booleans()))


@st.composite
def playings(draw: st.DrawFn) -> tuple[int, int, list[tuple[Session, int]], list[tuple[int, int]]]:
    """Block and page size; sessions with how often each is played; and in which order their branches send."""
    block, page = draw(st.sampled_from(SIZES))
    shared: Tree = {}
    played = []
    for number in range(draw(st.integers(1, 3))):
        scope: Scope = draw(st.sampled_from(["local", "shared"]))
        tree = shared if scope == "shared" else {}
        session = draw(sessions(tree, block, scope, f"s{number}"))
        played.append((session, draw(st.integers(1, 2))))
    count = sum(times for _, times in played)
    order = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, 2)), max_size=30))
    return block, page, played, order


@given(playings())
@settings(max_examples=200, deadline=None)
def test_pages_have_one_name_exactly_where_they_have_one_hash(
    given: tuple[int, int, list[tuple[Session, int]], list[tuple[int, int]]],
) -> None:
    block, page, played, order = given
    names = PageNames(page)
    all_playings: list[tuple[Playing, Session]] = []
    for session, times in played:
        for time in range(times):
            instance = "trace" if session.scope == "shared" else f"{session.id}-{time}"
            made = Playing(session, names.play(session), instance, len(all_playings))
            all_playings.append((made, session))
    sent = []
    for number, index in order:
        made, session = all_playings[number]
        sent.append(made.send(index % len(session.branches)))
    for made, session in all_playings:
        for index, branch in enumerate(session.branches):
            sent += [made.send(index) for _ in branch.steps]
    check([one for one in sent if one is not None], page, complete=block <= page)


@pytest.mark.parametrize(("block", "page"), SIZES)
def test_a_prompt_that_goes_on_has_the_pages_of_the_prompt_and_output_before_it(
    block: int, page: int
) -> None:
    first, second = [0, 1, 0, 1], [0, 1, 0, 1] + [2] * 12
    session = make_session({}, block, "local", [(first, 1, 5 * block), (second, 1, 1)])
    playing = Playing(session, PageNames(page).play(session), "s", 0)
    sent = [playing.send(0), playing.send(0)]
    one, two = (each for each in sent if each is not None)
    assert one.context.size == (9 * block + 1) // page
    assert np.array_equal(one.context, two.prompt[: one.context.size])
    check([one, two], page)


def test_the_second_prompt_that_goes_on_does_not_carry_the_output() -> None:
    session = make_session({}, 8, "local", [([0], 0, 16), ([0, 1, 1], 0, 1), ([0, 2, 2], 0, 1)])
    assert [step.continues for step in session.branches[0].steps] == [-1, 0, 0]
    pages = PageNames(8).play(session)
    first, second, third = (pages.step(0, number) for number in range(3))
    assert first.context.tolist() == second.prompt.tolist() == [0, 1, 2]
    assert third.prompt.tolist() == [0, 3, 4]
    assert second.context.size == 3 and third.context.size == 3  # their single tokens fill no page


def test_a_local_session_shares_nothing_with_its_second_playing_and_a_shared_one_does() -> None:
    for scope in ("local", "shared"):
        session = make_session({}, 8, scope, [([0, 1], 3, 40)])
        names = PageNames(8)
        once, again = names.play(session).step(0, 0), names.play(session).step(0, 0)
        assert (once.prompt.tolist() == again.prompt.tolist()) == (scope == "shared")
        # What no prompt carries is no other playing's, either way.
        assert set(once.context[2:].tolist()).isdisjoint(again.context.tolist())
        assert names.count == 14 if scope == "local" else 12


def test_two_shared_sessions_share_what_their_ids_say() -> None:
    tree: Tree = {}
    one = make_session(tree, 8, "shared", [([0, 1, 1], 0, 1)])
    other = make_session(tree, 8, "shared", [([0, 1, 2], 0, 1)])
    names = PageNames(16)
    assert names.play(one).step(0, 0).prompt.tolist() == names.play(other).step(0, 0).prompt.tolist() == [0]


@pytest.mark.parametrize(("block", "page"), [(3, 2), (2, 3), (64, 48), (48, 64)])
def test_blocks_that_do_not_fit_pages_are_refused(block: int, page: int) -> None:
    session = make_session({}, block, "local", [([0], 0, 1)], name="odd")
    with pytest.raises(TraceError, match=f"session odd: blocks of {block} tokens and pages of {page}"):
        PageNames(page).play(session)


class Rooms:
    def __init__(self) -> None:
        self.told: list[int] = []

    def grow(self, room: int) -> None:
        self.told.append(room)


def test_tables_are_told_before_a_name_is_used_that_they_have_no_row_for() -> None:
    names, table = PageNames(8), Rooms()
    names.tables.add(table)
    assert names.take(1024) == 0 and not table.told
    assert names.take(1) == 1024 and table.told == [2048]
    assert names.take(10_000) == 1025 and table.told == [2048, 11_025] and names.room == 11_025
    assert names.count == 11_025
