"""Which branch a request belongs to, named and inferred, and what the directory is told."""

from __future__ import annotations

import itertools
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.branches import Branches, common_pages
from services.router.claims import Hints
from services.router.identity import OBSERVED_BUSY_S, Identifier, Identity
from shared.messages import BranchRequest, pack_pages, unpack_pages
from shared.pages import page_hashes

UUID = "0f3c2a9e-1b2c-4d5e-8f90-a1b2c3d4e5f6"


def path(*pages):
    return np.array(pages, dtype=np.int64)


def chain(*parts: str) -> np.ndarray:
    """Pages named by all the parts up to them, as chained hashes are: "sys*3" is three pages."""
    names, before = [], ""
    for part in parts:
        text, _, times = part.partition("*")
        for i in range(int(times or 1)):
            before += f"|{text}.{i}"
            names.append(hash(before))
    return np.array(names, dtype=np.int64)


def said(**fields: object) -> Hints:
    return msgspec.json.decode(msgspec.json.encode(fields), type=Hints)


CC = {"x-claude-code-session-id": "S"}
OC = {"user-agent": "opencode/1.2", "x-session-id": "S"}


class Client:
    """Requests that are over before the next one, unless they are `begun`."""

    def __init__(
        self, who: Identifier | None = None, headers: dict[str, str] | None = None, **fields: object
    ):
        self.who = who or Identifier("auto-")
        self.headers, self.hints, self.now = headers or {}, said(**fields), 0.0

    def begin(self, *parts: str, **headers: str) -> str:
        self.now += 1.0
        sent = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        return self.who.identify(sent, self.hints, chain(*parts), self.now).branch

    def ask(self, *parts: str, **headers: str) -> str:
        branch = self.begin(*parts, **headers)
        self.who.done(branch, self.now)
        return branch


def identify(
    headers: dict[str, str], hints: Hints | None = None, pages: np.ndarray | None = None
) -> Identity:
    pages = chain("x*50") if pages is None else pages
    return Identifier("auto-").identify(headers, hints or Hints(), pages, 0.0)


# ------------------------------------------------------------------------------- untagged clients


def test_the_next_step_and_a_retry_continue_the_branch():
    client = Client()
    first = client.ask("sys", "a")
    assert client.ask("sys", "a", "b") == first
    assert client.ask("sys", "a", "b") == first


def test_a_request_that_shares_only_a_part_is_a_branch_of_its_own():
    client = Client()
    first = client.ask("sys*2", "a")
    fork = client.ask("sys*2", "b")
    assert fork != first
    assert client.ask("sys*2", "a", "c") == first
    assert client.ask("sys*2", "b", "d") == fork


def test_the_longest_path_counts():
    client = Client()
    short = client.ask("sys")
    long = client.ask("sys", "a")
    assert long == short
    other = client.ask("sys", "b")
    assert client.ask("sys", "b", "c") == other and client.ask("sys", "a", "c") == long


def test_parallel_samples_of_one_prompt_are_branches_of_their_own_and_stay_so():
    client = Client()
    samples = [client.begin("sys", "a") for _ in range(4)]
    assert len(set(samples)) == 4
    for branch in samples:
        client.who.done(branch, client.now)
    went_on = [client.begin("sys", "a", f"answer {i}") for i in range(4)]
    assert set(went_on) == set(samples)
    for branch in went_on:
        client.who.done(branch, client.now)
    assert [client.ask("sys", "a", f"answer {i}", "more") for i in range(4)] == went_on


def test_what_goes_on_from_a_prompt_in_flight_is_another_branch():
    client = Client()
    client.ask("sys")
    first = client.begin("sys", "a")
    other = client.ask("sys", "a", "b")
    assert other != first
    client.who.done(first, client.now)
    assert client.ask("sys", "a", "c") == first


def test_a_shorter_idle_branch_does_not_take_what_goes_on_from_a_busy_one():
    client = Client()
    samples = [client.begin("sys"), client.begin("sys")]
    for branch in samples:
        client.who.done(branch, client.now)
    assert client.begin("sys", "a") in samples
    assert client.ask("sys", "a", "b") not in samples


def test_an_edit_of_the_last_message_keeps_the_branch():
    client = Client()
    first = client.ask("sys*3", "q1*2")
    assert client.ask("sys*3", "q1*2", "a1*2", "q2*5") == first
    assert client.ask("sys*3", "q1*2", "a1*2", "q2 edited*4") == first
    assert client.ask("sys*3", "q1*2", "a1*2", "q2 edited*4", "a2") == first
    far = client.ask("sys*3", "q1*2", "a1*2", "q2 again*4")
    assert far != first  # the edited step has its answer in the path now: this goes back further


def test_what_leaves_more_than_a_message_is_no_edit():
    client = Client()
    first = client.ask("sys*3", "q1*2")
    assert client.ask("sys*3", "q1*2", "a1*2", "q2*100") == first
    assert client.ask("sys*3", "q1*2", "a1*2", "q3") != first


def test_sharing_only_the_first_prompt_is_no_edit():
    """Two chats whose first messages are within the page that ends the shared system prompt."""
    client = Client()
    first = client.ask("sys*3")
    assert client.ask("sys*3", "mine*2") == first
    assert client.ask("sys*3", "yours*2") != first


def test_a_fork_that_was_taken_for_an_edit_is_told_apart_when_the_branch_goes_on():
    client = Client()
    first = client.ask("sys", "q1")
    assert client.ask("sys", "q1", "a1", "q2") == first
    assert client.ask("sys", "q1", "a1", "fork") == first
    assert client.ask("sys", "q1", "a1", "q2", "a2") == first
    other = client.ask("sys", "q1", "a1", "fork", "a2'")
    assert other != first
    assert client.ask("sys", "q1", "a1", "q2", "a2", "q3") == first
    assert client.ask("sys", "q1", "a1", "fork", "a2'", "q3'") == other


def test_prompts_below_one_page_never_share_a_branch():
    client = Client()
    assert client.ask() != client.ask()


def test_ended_and_idle_branches_are_not_continued():
    client = Client(Identifier("auto-", idle_s=10.0))
    first = client.ask("a")
    client.who.end(first)
    second = client.ask("a", "b")
    assert second != first
    client.now += 20.0
    assert client.ask("a", "b", "c") != second


TOKENS = np.arange(1000, dtype=np.int32)


def prompt(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_tokens_tell_two_conversations_apart_that_share_all_their_pages():
    who, page = Identifier("auto-"), 16
    system, ask, end = TOKENS[: 2 * page], prompt(7, 7, 7), prompt(90, 91, 92, 93)

    def of(*parts: np.ndarray) -> str:
        tokens = np.concatenate((system, *parts))
        branch = who.identify({}, Hints(), page_hashes(tokens, page), 1.0, tokens, page).branch
        who.done(branch, 1.0)
        return branch

    mine = of(ask, end)
    yours = of(ask + 1, end)
    assert mine != yours
    assert of(ask, end) == mine  # a retry
    answer = np.arange(500, 540, dtype=np.int32)
    assert of(ask + 1, end, answer) == yours
    assert of(ask, prompt(90, 91), answer) == mine  # the template writes the prompt's end anew
    assert of(ask + 2, end, answer) not in (mine, yours)


# ------------------------------------------------------------------------------- sessions


SESSIONS = [
    ({"x-session-id": "S"}, {}),
    ({"x-smg-routing-key": "S"}, {}),
    ({"x-correlation-id": "S"}, {}),
    ({}, {"program_id": "S"}),
    ({}, {"prompt_cache_key": "S"}),
    (OC, {}),
    (CC, {}),
    ({}, {"metadata": {"user_id": f"user_session_{UUID}"}}),
]


@pytest.mark.parametrize(("headers", "body"), SESSIONS)
def test_agents_that_share_a_session_id_get_branches_of_their_own(headers, body):
    client = Client(headers=headers, **body)
    main = client.ask("main sys*40", "task*80")
    one = client.ask("sub sys*20", "sub task one")
    two = client.ask("sub sys*20", "sub task two")
    assert len({main, one, two}) == 3
    assert "~" not in main and one.startswith(main + "~auto-") and two.startswith(main + "~auto-")
    for step in range(4):
        for name, parts in ((main, ("main sys*40", "task*80")), (one, ("sub sys*20", "sub task one"))):
            assert client.ask(*parts, *(f"step {i}*9" for i in range(step))) == name
    found = client.who.identify(
        client.headers, client.hints, chain("sub sys*20", "sub task two", "more"), 9.0
    )
    assert (found.branch, found.parent, found.session, found.tagged) == (two, main, main, True)


@pytest.mark.parametrize(("headers", "body"), SESSIONS)
def test_a_history_written_anew_keeps_the_branch(headers, body):
    """Reasoning left out of earlier turns, say."""
    client = Client(headers=headers, **body)
    main = client.ask("sys*40", "q1*10")
    assert client.ask("sys*40", "q1*10", "thought*70", "a1*9", "q2*99") == main
    assert client.ask("sys*40", "q1*10", "thought*70", "a1*9", "q2*9", "other*3") == main
    assert client.ask("sys*40", "q1*10", "thought*70", "a1*9", "q2*9", "other*3", "more") == main


@pytest.mark.parametrize(
    "parts",
    [
        (("sys*40",), ("sys*40", "a*5"), ("sys*40", "b*5")),  # all that it shares is the first prompt
        (("sys*4", "q"), ("sys*4", "q", "a*3", "x*400"), ("sys*4", "q", "a*3", "y")),  # or less than half
    ],
)
def test_what_shares_too_little_with_a_branch_of_its_session_is_another(parts):
    client = Client(headers={"x-session-id": "S"})
    first, second, other = (client.ask(*step) for step in parts)
    assert first == second != other
    assert client.ask(*parts[1], "more") == first and client.ask(*parts[2], "more") == other


def test_two_sessions_never_meet():
    client = Client()
    for a, b in itertools.pairwise(["1", "2", "3", "1"]):
        assert client.ask("sys*40", "q*20", x_session_id=a) != client.ask("sys*40", "q*20", x_session_id=b)
        assert client.ask("sys*40", "q*20", "a", x_session_id=a) == f"session:{a}"


@pytest.mark.parametrize(
    ("headers", "size", "takes"),
    [(CC, 100, True), (OC, 100, True), (CC, 25, False), ({"x-session-id": "S"}, 100, False)],
)
def test_only_a_harness_whose_agents_have_ids_compacts_unannounced(headers, size, takes):
    client = Client(headers=headers)
    main = client.ask("sys*40", "old*2000")
    assert (client.ask("sys*20", f"summary*{size - 20}") == main) == takes


@pytest.mark.parametrize("headers", [CC, OC])
def test_helpers_of_a_session_leave_its_main_branch_alone(headers):
    client = Client(headers=headers)
    main = client.ask("sys*40", "task*200")
    helpers = {
        client.ask(),
        client.ask("quota"),
        client.ask("title sys*5", "the task"),
        client.ask("sys*3", "x"),
        client.ask("agent sys*60"),  # long, but shares nothing and is much shorter
    }
    assert main not in helpers
    assert client.ask("sys*40", "task*200", "more") == main


def test_a_helper_that_comes_first_gives_its_place_away():
    client = Client(headers=CC)
    helper = client.begin("quota")
    assert client.ask("sys*200", "task*30") == "claude:S"
    client.who.done(helper, client.now)
    assert client.ask("quota") != "claude:S"
    assert client.ask("sys*200", "task*30", "more") == "claude:S"
    assert client.ask("title sys*3", "x") != "claude:S"


def test_a_prefix_that_breaks_with_every_step_is_still_one_branch_of_claude_code():
    client = Client(headers=CC)
    assert {client.ask(f"sys {i}*40", f"history*{100 + i}") for i in range(5)} == {"claude:S"}


def test_a_wrong_rewrite_is_undone():
    client = Client(headers=CC)
    main = client.ask("sys*40", "task*200")
    assert client.ask("other sys*220") == main
    assert client.ask("sys*40", "task*200", "more") == main
    other = client.ask("other sys*220", "more")
    assert other != main
    assert client.ask("sys*40", "task*200", "more", "more") == main
    assert client.ask("other sys*220", "more", "more") == other


def test_an_announced_compaction_rewrites_whatever_it_looks_like():
    client = Client(headers={"x-session-id": "S"})
    main = client.ask("sys*40", "old*200")
    client.who.compacting(main)
    assert client.ask("quota") != main
    assert client.ask("sys*40", "old*200", "summarize") == main
    assert client.ask("sys*2", "summary*3") == main
    assert client.ask("sys*2", "agent*50") != main
    assert client.ask("sys*2", "summary*3", "more") == main
    assert client.ask("sys*2", "agent*3") != main


def test_a_compaction_that_never_came_is_not_waited_for():
    client = Client(headers={"x-session-id": "S"})
    main = client.ask("sys*40", "old*200")
    client.who.compacting(main)
    for steps in range(1, 4):
        assert client.ask("sys*40", "old*200", *(f"s{i}" for i in range(steps))) == main
    assert client.ask("agent*50") != main
    client.who.compacting("session:unknown")


def test_small_prompts_share_one_branch_beside_the_main_one():
    client = Client(headers={"x-session-id": "S"})
    assert client.ask() == "session:S"
    assert client.ask("sys*2") == "session:S"
    assert client.ask() == client.ask() == "session:S~small"
    assert client.ask("sys*2", "a") == "session:S"


def test_a_correlation_id_that_changes_with_every_request_does_no_harm():
    client = Client()
    branches = set()
    for i in range(6):
        branches.add(client.ask("sys*4", *(f"s{j}" for j in range(i + 1)), x_correlation_id=f"c{i}"))
    assert branches == {"correlation:c0"}
    assert len(client.who._known) == 1


def test_a_correlation_id_that_comes_again_is_a_session():
    client = Client()
    for step in range(3):
        parts = ("sys*4", *(f"s{i}" for i in range(step + 1)))
        assert client.ask(*parts, x_correlation_id="c1") == "correlation:c1"
    fork = client.ask("sys*4", "s0", "s1", "s2", "fork", x_correlation_id="c2")
    assert fork == "correlation:c2"


def test_the_same_prompt_under_two_correlation_ids_is_two_branches():
    client = Client()
    assert client.ask("a*3", x_correlation_id="1") != client.ask("a*3", x_correlation_id="2")


def test_an_id_whose_branch_was_taken_over_gets_another():
    client = Client()
    assert client.ask("a", x_correlation_id="1") == "correlation:1"
    assert client.ask("a", "b", x_correlation_id="2") == "correlation:1"
    again = client.ask("a", "c", x_correlation_id="1")
    assert again.startswith("correlation:1~auto-")
    assert client.ask("a", "b", "b", x_correlation_id="2") == "correlation:1"
    assert client.ask("a", "c", "c", x_correlation_id="1") == again


@pytest.mark.parametrize("name", ["x-session-id", "x-smg-routing-key"])
def test_other_changing_ids_are_taken_over_only_where_the_tokens_prove_it(name):
    who, page = Identifier("auto-"), 16
    first, longer = TOKENS[: 5 * page + 12], TOKENS[: 9 * page + 3]
    other = np.concatenate((first[: 5 * page + 2], TOKENS[200:300]))

    def of(tokens: np.ndarray, session: str) -> str:
        branch = who.identify({name: session}, Hints(), page_hashes(tokens, page), 1.0, tokens, page).branch
        who.done(branch, 1.0)
        return branch

    mine = of(first, "1")
    assert of(other, "2") != mine
    assert of(longer, "3") == mine
    assert Client(who, {name: "4"}).ask("x*4") != Client(who, {name: "5"}).ask("x*4", "y")


def test_a_session_is_ended_with_all_its_branches():
    client = Client(headers=CC)
    main = client.ask("sys*40", "task")
    agent = client.ask("agent*9", x_claude_code_agent_id="A")
    helper = client.ask("title")
    assert client.who.branches_of(main) == [main, agent, helper]
    for branch in client.who.branches_of(main):
        client.who.end(branch)
    assert (
        not client.who._known and not client.who._sessions and not client.who._ends and not client.who._firsts
    )


# ------------------------------------------------------------------------------- other routers


def test_an_untagged_client_may_go_to_another_router_at_any_request():
    a, b = Identifier("auto-a-"), Identifier("auto-b-")
    sent: list[str] = []
    for step in range(8):
        here, there = (a, b) if step % 2 else (b, a)
        pages = chain("sys*3", *(f"s{i}" for i in range(step)))
        branch = here.identify({}, Hints(), pages, float(step)).branch
        there.observe(branch, pages, float(step))
        here.done(branch, float(step))
        sent.append(branch)
    assert set(sent) == {"auto-b-1"}


def test_a_session_is_known_to_the_other_routers():
    a, b = Client(Identifier("auto-a-"), CC), Client(Identifier("auto-b-"), CC)
    main, helper = a.ask("sys*40", "task*9"), a.ask("title")
    agent = a.ask("x*9", x_claude_code_agent_id="A")
    for branch, parts in ((main, ("sys*40", "task*9")), (helper, ("title",)), (agent, ("x*9",))):
        b.who.observe(branch, chain(*parts), 3.0)
    b.now = 50.0
    assert b.ask("title", "more") == helper
    assert b.ask("quota") not in (main, helper)
    assert b.ask("sys*40", "task*9", "more") == main
    assert set(b.who.branches_of(main)) >= {main, helper, agent}


def test_the_same_prompt_at_two_routers_at_once_is_two_samples():
    who = Identifier("auto-b-")
    who.observe("auto-a-1", chain("q"), 0.0)
    assert who.identify({}, Hints(), chain("q"), 0.1).branch != "auto-a-1"
    who.observe("auto-a-2", chain("r"), 0.0)
    assert who.identify({}, Hints(), chain("r"), OBSERVED_BUSY_S + 1).branch == "auto-a-2"


@pytest.mark.parametrize("branch", ["mine", "a/b", "dynamo:1", "codex:1", "other:1", ":", "~auto-1", ""])
def test_branches_that_need_no_inference_are_not_learned(branch):
    who = Identifier("auto-b-")
    who.observe(branch, chain("q"), 0.0)
    assert not who._known


# ------------------------------------------------------------------------------- bounds


def test_branches_are_bounded_by_number_and_by_pages():
    client = Client(Identifier("auto-", limit=3))
    made = [client.ask(f"p{i}") for i in range(10)]
    assert client.ask("p9", "x") == made[9]
    assert client.ask("p0", "x") not in made
    assert len(client.who._known) <= 3 and len(client.who._ends) <= 3

    client = Client(Identifier("auto-", max_pages=100), CC)
    for i in range(50):
        client.ask(f"p{i}*9")
        client.ask(f"q{i}*9", x_claude_code_session_id=str(i))
        assert sum(known.path.size for known in client.who._known.values()) == client.who._pages <= 120


def test_long_paths_and_many_branches_cost_little():
    who, rng = Identifier("auto-"), np.random.default_rng(1)
    system = rng.integers(-(2**63), 2**63 - 1, 100)
    for i in range(5_000):
        pages = np.concatenate((system, rng.integers(-(2**63), 2**63 - 1, 5)))
        who.done(who.identify({}, Hints(), pages, float(i) / 1e4).branch, 0.0)
    long = np.concatenate((system, rng.integers(-(2**63), 2**63 - 1, 20_000)))
    costs = []
    for i in range(20):
        begun = time.perf_counter()
        branch = who.identify({}, Hints(), long[: 19_000 + 40 * i], 1.0).branch
        costs.append(time.perf_counter() - begun)
        who.done(branch, 1.0)
    assert sorted(costs)[len(costs) // 2] < 0.005


# ------------------------------------------------------------------------------- what the directory is told


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


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(1, 3), max_size=5)), max_size=25))
def test_routers_that_observe_each_other_know_the_same_path(steps):
    """Whoever published last: the others know the path, as the directory does."""
    routers = [Branches() for _ in range(3)]
    for t, (at, pages) in enumerate(steps):
        now = path(*itertools.accumulate(pages, lambda a, b: a * 7 + b))
        message = routers[at].request("b", None, True, now, float(t))
        for router in routers:
            if router is not routers[at]:
                assert router.observed(message, float(t)).tolist() == now.tolist()


@pytest.mark.parametrize(
    "message",
    [
        BranchRequest("b", 3, 9, b""),
        BranchRequest("b", 2, 9, b""),
        BranchRequest("b", -1, 2, b""),
        BranchRequest("b", 2**40, 2, b""),
        BranchRequest("c", 1, 1, pack_pages([2])),
    ],
)
def test_a_delta_to_an_unknown_path_is_passed_over_and_the_next_request_is_whole(message):
    branches = Branches()
    branches.request("b", None, True, path(1, 2), 0.0)
    assert branches.observed(message, 1.0) is None
    assert branches.request(message.branch, None, True, path(1, 2), 2.0).base == 0
    assert branches.observed(BranchRequest("b", 0, 0, b"12345"), 3.0) is None


def test_observed_paths_are_bounded_expire_and_are_not_listed():
    branches = Branches(limit=3, max_pages=20)
    for i in range(9):
        branches.observed(BranchRequest(f"b{i}", 0, 0, pack_pages([i, i + 1])), float(i))
    assert list(branches._paths) == ["b6", "b7", "b8"] and branches._pages == 6 and branches.list() == []
    branches.observed(BranchRequest("long", 0, 0, pack_pages(list(range(50)))), 10.0)
    assert list(branches._paths) == ["long"]
    branches.expire(11.0)
    assert not branches._paths and branches._pages == 0


def test_common_pages():
    assert common_pages(path(), path(1)) == 0
    assert common_pages(path(1, 2), path(1, 2)) == 2
    assert common_pages(path(1, 2, 3), path(1, 5, 6)) == 1
