"""What the hooks of Claude Code end and compact."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from services.router.claims import Hints
from services.router.hooks import HookAction, read_hook
from services.router.identity import Identifier
from shared.openai import ApiError


def hook(event: object, **more: object) -> HookAction:
    said = {"hook_event_name": event, "session_id": "S", "cwd": "/tmp", "transcript_path": "/x.jsonl"} | more
    return read_hook(msgspec.json.encode(said))


@pytest.mark.parametrize(
    ("event", "more", "ends", "ends_session", "compacts"),
    [
        ("SubagentStop", {"agent_id": "A"}, ("claude:S/A",), False, None),
        ("SubagentStop", {}, (), False, None),
        ("SubagentStop", {"agent_id": 7.5}, (), False, None),
        ("SubagentStart", {"agent_id": "A"}, (), False, None),
        ("SessionEnd", {"reason": "logout"}, (), True, None),
        ("PreCompact", {"trigger": "auto"}, (), False, "claude:S"),
        ("PostCompact", {}, (), False, "claude:S"),
        ("PreCompact", {"agent_id": "A"}, (), False, "claude:S/A"),
        ("SessionStart", {"source": "compact"}, (), False, "claude:S"),
        ("SessionStart", {"source": "clear"}, (), False, "claude:S"),
        ("SessionStart", {"source": "startup"}, (), False, None),
        ("SessionStart", {"source": "resume"}, (), False, None),
        ("SessionStart", {"source": ["clear"]}, (), False, None),
        ("Stop", {"agent_id": "A"}, (), False, None),
        ("SomethingNew", {}, (), False, None),
        (None, {}, (), False, None),
        (["SessionEnd"], {}, (), False, None),
    ],
)
def test_what_each_event_does(event, more, ends, ends_session, compacts):
    action = hook(event, **more)
    assert action.session == "claude:S"
    assert (action.ends, action.ends_session, action.compacts) == (ends, ends_session, compacts)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"SessionEnd"',
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b'{"hook_event_name": "SessionEnd"}',
        b'{"session_id": ""}',
        b'{"session_id": null}',
        b'{"session_id": ["S"]}',
        b'{"session_id": "a\\nb"}',
        b'{"session_id": "' + b"x" * 300 + b'"}',
    ],
)
def test_what_is_no_hook_is_refused_with_a_reason(body):
    with pytest.raises(ApiError) as caught:
        read_hook(body)
    assert caught.value.status == 400 and "hook" in caught.value.message


@pytest.mark.parametrize("session", ["0b1c-22", "a/b", "a~b", "a%2Fb"])
def test_the_ids_are_those_of_the_requests(session):
    who, path = Identifier("auto-"), np.arange(1, 99, dtype=np.int64)
    headers = {"x-claude-code-session-id": session}
    main = who.identify(headers, Hints(), path, 0.0)
    agent = who.identify(headers | {"x-claude-code-agent-id": "x/1"}, Hints(), path, 0.0)
    assert hook("PreCompact", session_id=session).compacts == main.branch
    assert hook("SubagentStop", session_id=session, agent_id="x/1").ends == (agent.branch,)
    ended = who.branches_of(hook("SessionEnd", session_id=session).session)
    assert ended == [main.branch, agent.branch]
    for branch in ended:
        who.end(branch)
    assert who.branches_of(main.branch) == [main.branch]
