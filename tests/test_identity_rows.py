"""Which branch each row of the identity table gives, and what it says of parents and ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.claims import Hints, RequestKind
from shared.openai import ApiError
from tests.test_identity import CC, OC, UUID, Client, identify, said

# ------------------------------------------------------------------------------- the rows


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
