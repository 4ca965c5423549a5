"""Which branch a request belongs to, named and inferred, and what the directory is told."""

from __future__ import annotations

import itertools
import random
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.router.branches import Branches, common_pages
from services.router.claims import Hints, RequestKind
from services.router.identity import OBSERVED_BUSY_S, Identifier, Identity
from shared.messages import BranchRequest, pack_pages, unpack_pages
from shared.openai import ApiError
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


# ------------------------------------------------------------------------------- the rows


CC = {"x-claude-code-session-id": "S"}
OC = {"user-agent": "opencode/1.2", "x-session-id": "S"}
ROWS = [
    # headers, body, branch, parent, source
    ({"x-ei-branch": " a/1 ", "x-ei-parent-branch": "a"}, {}, "a/1", "a", "ei"),
    ({"x-ei-branch": "a", "x-dynamo-session-id": "d"} | CC, {}, "a", None, "ei"),
    ({"x-dynamo-session-id": "d"} | CC, {}, "dynamo:d", None, "dynamo"),
    ({"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "p"}, {}, "dynamo:d", "dynamo:p", "dynamo"),
    ({}, {"nvext": {"agent_context": {"session_id": "d"}}}, "dynamo:d", None, "dynamo"),
    (
        {},
        {"nvext": {"agent_context": {"session_id": "d", "parent_session_id": "p"}}},
        "dynamo:d",
        "dynamo:p",
        "dynamo",
    ),
    (
        {"x-session-id": "g"},
        {"nvext": {"agent_context": {"session_id": "d", "trajectory_id": "t", "parent_trajectory_id": "u"}}},
        "dynamo:t",
        "dynamo:u",
        "dynamo",
    ),
    (CC, {}, "claude:S", None, "claude"),
    (CC | {"x-claude-code-agent-id": "A"}, {}, "claude:S/A", "claude:S", "claude"),
    (
        CC | {"x-claude-code-agent-id": "A", "x-claude-code-parent-agent-id": "B"},
        {},
        "claude:S/A",
        "claude:S/B",
        "claude",
    ),
    ({}, {"metadata": {"user_id": f"user_ab_account__session_{UUID}"}}, f"claude:{UUID}", None, "claude"),
    (
        {},
        {"metadata": {"user_id": f'{{"device_id": "d", "session_id": "{UUID}"}}'}},
        f"claude:{UUID}",
        None,
        "claude",
    ),
    (
        {"x-claude-code-agent-id": "A"},
        {"metadata": {"user_id": f"user_a_session_{UUID}"}},
        f"claude:{UUID}/A",
        f"claude:{UUID}",
        "claude",
    ),
    ({"x-claude-code-agent-id": "A"}, {}, "auto-1", None, "path"),
    ({"thread-id": "T", "session-id": "R"}, {"prompt_cache_key": "R"}, "codex:T", None, "codex"),
    ({"thread-id": "T", "x-codex-parent-thread-id": "P"}, {}, "codex:T", "codex:P", "codex"),
    ({"thread-id": "T", "session-id": "R", "x-openai-subagent": "review"}, {}, "codex:T", "codex:R", "codex"),
    ({"x-codex-turn-metadata": '{"thread_id": "T", "session_id": "R"}'}, {}, "codex:T", None, "codex"),
    ({"x-session-affinity": "S"}, {}, "session:S", None, "opencode"),
    ({"x-session-id": "S", "x-parent-session-id": "P"}, {}, "session:S", "session:P", "opencode"),
    (OC, {}, "session:S", None, "opencode"),
    ({"x-smg-routing-key": "K", "x-session-id": "S"}, {}, "route:K", None, "routing_key"),
    ({"x-session-id": "S", "x-correlation-id": "C"}, {}, "session:S", None, "session"),
    ({"x-correlation-id": "C"}, {"program_id": "P"}, "program:P", None, "program"),
    ({}, {"program_id": 17}, "program:17", None, "program"),
    ({}, {"conversation": "c1"}, "conversation:c1", None, "conversation"),
    ({}, {"conversation": {"id": "c1"}}, "conversation:c1", None, "conversation"),
    ({}, {"session_id": "S", "prompt_cache_key": "K"}, "session:S", None, "body_session"),
    ({"x-correlation-id": "C"}, {"prompt_cache_key": "K"}, "cache:K", None, "cache_key"),
    ({"x-correlation-id": "C"}, {}, "correlation:C", None, "correlation"),
    ({}, {"previous_response_id": "resp_1"}, "auto-1", None, "path"),
    ({}, {}, "auto-1", None, "path"),
]


@pytest.mark.parametrize(("headers", "body", "branch", "parent", "source"), ROWS)
def test_the_first_row_that_a_request_fills_names_its_branch(headers, body, branch, parent, source):
    found = identify(headers, said(**body))
    assert (found.branch, found.parent, found.source) == (branch, parent, source)
    assert found.tagged == (source != "path") and not found.final


@pytest.mark.parametrize(
    ("headers", "branch", "parent", "kind"),
    [
        ({"x-codex-turn-metadata": '{"request_kind": "turn"}'}, "codex:T", None, "turn"),
        ({"x-codex-turn-metadata": '{"request_kind": "prewarm"}'}, "codex:T", None, "prewarm"),
        ({"x-codex-turn-metadata": '{"request_kind": "compaction"}'}, "codex:T", None, "compaction"),
        ({"x-codex-turn-metadata": '{"request_kind": "memory"}'}, "codex:T/memory", "codex:T", "memory"),
        ({"x-openai-subagent": "compact"}, "codex:T", None, "compaction"),
        ({"x-openai-subagent": "memory_consolidation"}, "codex:T/memory", "codex:T", "memory"),
        ({"x-codex-turn-metadata": '{"request_kind": ["turn"]}'}, "codex:T", None, "turn"),
        ({"x-codex-turn-metadata": "{"}, "codex:T", None, "turn"),
        ({"x-codex-turn-metadata": "[" * 50_000}, "codex:T", None, "turn"),
        ({"x-codex-turn-metadata": '{"request_kind": "else"}'}, "codex:T", None, "turn"),
    ],
)
def test_what_codex_says_of_its_turns(headers, branch, parent, kind):
    found = identify({"thread-id": "T"} | headers)
    assert (found.branch, found.parent, found.kind) == (branch, parent, RequestKind(kind))


def test_a_client_that_says_so_ends_its_branch():
    assert identify({"x-ei-branch": "a", "x-ei-branch-final": "TRUE"}).final
    assert identify({"x-ei-branch-final": "1"}).final
    assert identify({"x-dynamo-session-id": "d", "x-dynamo-session-final": "true"}).final
    assert identify({}, said(nvext={"agent_context": {"session_id": "d", "session_final": True}})).final
    assert not identify({"x-dynamo-session-id": "d", "x-dynamo-session-final": "false"}).final


@pytest.mark.parametrize("last", [(), ("bye",), ("sys*40", "bye")])
def test_a_last_request_ends_the_main_branch_however_small_it_is(last):
    client = Client(headers=CC)
    assert client.ask("sys*40", "a*40") == "claude:S"
    assert client.ask(*last, x_dynamo_session_final="true") == "claude:S"


@pytest.mark.parametrize("bad", ["", " ", "x" * 257, "a\nb", "\x00"])
@pytest.mark.parametrize("name", ["x-ei-branch", "x-ei-parent-branch"])
def test_bad_ids_in_our_own_headers_are_refused(name, bad):
    if name == "x-ei-parent-branch" and not bad:
        return
    with pytest.raises(ApiError) as caught:
        identify({"x-ei-branch": "a"} | {name: bad})
    assert caught.value.status == 400


THEIRS = [
    "x-dynamo-session-id", "x-dynamo-parent-session-id", "x-claude-code-session-id", "x-claude-code-agent-id",
    "x-claude-code-parent-agent-id", "thread-id", "session-id", "x-codex-parent-thread-id", "x-openai-subagent",
    "x-codex-turn-metadata", "x-session-affinity", "x-session-id", "x-parent-session-id", "x-smg-routing-key",
    "x-correlation-id", "user-agent", "x-dynamo-session-final",
]  # fmt: skip


@pytest.mark.parametrize("bad", ["", " ", "x" * 101, "/" * 40, "a\nb", "\x00", "\ud800"])
@pytest.mark.parametrize("name", [name for name in THEIRS if name.startswith("x-") or name == "thread-id"])
def test_bad_ids_in_other_headers_are_passed_over(name, bad):
    found = identify({name: bad}, said(prompt_cache_key="K"))
    assert (found.branch, found.source) == ("cache:K", "cache_key")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["user_id", "session_id", "agent_context", "trajectory_id", "id"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(THEIRS), st.text(max_size=12), max_size=6),
    st.dictionaries(st.sampled_from(Hints.__struct_fields__), json_values, max_size=4),
)
def test_no_value_of_another_harness_fails_a_request(headers, fields):
    found = identify(headers, said(**fields))
    assert 0 < len(found.branch) <= 256 and found.branch.isprintable()


def test_ids_of_two_harnesses_do_not_meet():
    ids = [
        identify({"x-ei-branch": "1"}),
        identify({"x-dynamo-session-id": "1"}),
        identify({"x-claude-code-session-id": "1"}),
        identify({"thread-id": "1"}),
        identify({"x-session-id": "1"}),
        identify({"x-smg-routing-key": "1"}),
        identify({"x-correlation-id": "1"}),
        identify({}, said(program_id="1")),
        identify({}, said(prompt_cache_key="1")),
        identify({}, said(conversation="1")),
        identify({}),
    ]
    assert len({found.branch for found in ids}) == len(ids)
    assert identify({"x-session-id": "a/b~c"}).branch == "session:a%2Fb%7Ec"


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


# ------------------------------------------------------------------------------- interleaved agents


class Agents(RuleBasedStateMachine):
    """Agents of all kinds, interleaved; each appends, retries and forks. The machine knows who is who."""

    @initialize(routers=st.integers(1, 2))
    def start(self, routers: int) -> None:
        self.who = [Identifier(f"auto-{i}-", limit=1000) for i in range(routers)]
        self.agents: list[dict] = []
        self.owners: dict[str, int] = {}  # branch -> agent
        self.made = itertools.count()
        self.now = 0.0

    def add(self, headers: dict[str, str], session: object, *parts: str, exact: bool = False) -> None:
        self.agents.append(
            {"headers": headers, "session": session, "parts": list(parts), "branch": None, "exact": exact}
        )  # fmt: skip
        self.ask(len(self.agents) - 1, 0)

    def ask(self, index: int, router: int, finish: bool = True) -> None:
        agent = self.agents[index]
        self.now += 20.0
        who = self.who[router % len(self.who)]
        pages = chain(*agent["parts"])
        found = who.identify(agent["headers"], Hints(), pages, self.now)
        for other in self.who:
            if other is not who:
                other.observe(found.branch, pages, self.now)
        if agent["branch"] is None:
            agent["branch"] = found.branch
            assert found.branch not in self.owners, "two agents were merged"
            self.owners[found.branch] = index
        assert found.branch == agent["branch"], "an agent lost its branch"
        who.done(found.branch, self.now)

    @rule(kind=st.sampled_from(["none", "session", "claude", "agent", "codex"]), system=st.integers(0, 1))
    def new_conversation(self, kind: str, system: int) -> None:
        n = next(self.made)
        headers = {
            "none": {},
            "session": {"x-session-id": f"s{n}"},
            "claude": {"x-claude-code-session-id": f"s{n}"},
            "agent": {"x-claude-code-session-id": f"s{n}", "x-claude-code-agent-id": "A"},
            "codex": {"thread-id": f"s{n}", "session-id": "root"},
        }[kind]
        self.add(headers, None if kind == "none" else n, f"sys{system}*40", f"task {n}*3")

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), shares=st.booleans())
    def sub_agent(self, data: st.DataObject, shares: bool) -> None:
        """Under its parent's session id, or without any: siblings share a system prompt, some with the parent."""
        parent = data.draw(st.sampled_from(self.agents))
        claude = "x-claude-code-session-id" in parent["headers"]
        if (
            parent["exact"]
            or "thread-id" in parent["headers"]
            or "x-claude-code-agent-id" in parent["headers"]
        ):
            return
        system = parent["parts"][0] if shares and not claude else "sub sys*12"
        self.add(parent["headers"], parent["session"], system, f"sub task {next(self.made)}*2")

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), pages=st.integers(1, 90), router=st.integers(0, 1))
    def step(self, data: st.DataObject, pages: int, router: int) -> None:
        index = data.draw(st.integers(0, len(self.agents) - 1))
        self.agents[index]["parts"].append(f"step {next(self.made)}*{pages}")
        self.ask(index, router)

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), router=st.integers(0, 1))
    def retry(self, data: st.DataObject, router: int) -> None:
        self.ask(data.draw(st.integers(0, len(self.agents) - 1)), router)

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), samples=st.integers(1, 3))
    def parallel_samples(self, data: st.DataObject, samples: int) -> None:
        """While a step is in flight, others of the same prompt come, and are never heard of again."""
        index = data.draw(st.integers(0, len(self.agents) - 1))
        agent = self.agents[index]
        if agent["headers"].keys() & {"x-claude-code-agent-id", "thread-id"}:
            return
        agent["parts"].append(f"step {next(self.made)}*3")
        pages, who = chain(*agent["parts"]), self.who[0]
        self.now += 20.0
        begun = [who.identify(agent["headers"], Hints(), pages, self.now).branch for _ in range(samples + 1)]
        assert begun[0] == agent["branch"] and len(set(begun)) == samples + 1
        assert not self.owners.keys() & set(begun[1:])
        for branch in begun:
            who.done(branch, self.now)
        for branch in begun[1:]:
            self.who[0].end(branch)
        for other in self.who[1:]:
            other.observe(begun[0], pages, self.now)

    @precondition(lambda self: any(len(agent["parts"]) > 3 for agent in self.agents))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """An untagged copy of a conversation goes another way, from before its last step's prompt."""
        parent = data.draw(st.sampled_from([a for a in self.agents if len(a["parts"]) > 3]))
        if parent["headers"]:
            return
        keep = data.draw(st.integers(2, len(parent["parts"]) - 2))
        self.add({}, None, *parent["parts"][:keep], f"fork {next(self.made)}*2")

    @precondition(lambda self: self.agents)
    @rule(data=st.data(), size=st.integers(60, 120))
    def compaction(self, data: st.DataObject, size: int) -> None:
        """Of a Claude Code session's main agent: the system prompt and a summary."""
        found = [
            i
            for i, a in enumerate(self.agents)
            if a["branch"].startswith("claude:") and "~" not in a["branch"]
        ]
        if not found:
            return
        index = data.draw(st.sampled_from(found))
        agent = self.agents[index]
        agent["parts"] = [agent["parts"][0], f"summary {next(self.made)}*{size}"]
        self.ask(index, 0)

    @invariant()
    def books_agree(self) -> None:
        for who in getattr(self, "who", ()):
            assert who._pages == sum(known.path.size for known in who._known.values())
            assert sum(len(found) for found in who._sessions.values()) == len(who._known)
            assert len(who._ends) <= 3 * len(who._known) and len(who._firsts) <= len(who._known)
            assert all(known.in_flight == 0 for known in who._known.values())
            for marks in (who._ends, who._firsts):
                assert all(marks._filter[key & marks._mask] for key in marks._by_key)
                for key, marked in marks._by_key.items():
                    for name, known in marked.items():
                        assert who._known.get(name) is known
                        ends, first = who._keys(known)
                        assert key in ends or key == first


TestAgents = Agents.TestCase
TestAgents.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(5))
def test_agents_that_only_append_keep_their_branches_under_load(seed):
    """Many agents over few system prompts, some in one session, with requests in flight at the same time."""
    rng, who = random.Random(seed), Identifier("auto-", limit=2000)
    agents = [
        {"headers": {} if i % 3 else {"x-session-id": f"s{i % 4}"}, "parts": [f"sys{i % 2}*20", f"task {i}"]}
        for i in range(60)
    ]
    flying: dict[int, str] = {}
    for t in range(1500):
        index = rng.randrange(len(agents))
        if index in flying:
            who.done(flying.pop(index), float(t))
            continue
        agent = agents[index]
        if "branch" in agent:
            agent["parts"].append(f"step {t}*{rng.randint(1, 9)}")
        branch = who.identify(agent["headers"], Hints(), chain(*agent["parts"]), float(t)).branch
        assert agent.setdefault("branch", branch) == branch
        flying[index] = branch
    seen = [agent["branch"] for agent in agents if "branch" in agent]
    assert len(set(seen)) == len(seen)
    assert len(who._known) == len(seen)


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
