"""What a request's headers and body say of its branch: the rows of the table in `identity.py`, one function each.

Rules that hold here
- Pure functions. Nothing a client sends raises here: what is no id (too long, unprintable, no string) says nothing.
- Ids of harnesses get a prefix, so that two harnesses never mean the same branch; "/" and "~" part branch ids, and are
  escaped in what a client sends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

MOST_HINT_BYTES = 2**16  # of a body field that may hold an id
MAX_FOREIGN_LENGTH = 100  # of a harness's id, so that two of them and a prefix are a branch id
_ABSENT = msgspec.Raw(b"")
_CLAUDE_USER = re.compile(r"_session_([0-9A-Za-z-]+)$")
_MARKS = str.maketrans({"%": "%25", "/": "%2F", "~": "%7E"})


class RequestKind(StrEnum):
    """What the harness says that the request is for."""

    TURN = "turn"
    PREWARM = "prewarm"
    COMPACTION = "compaction"
    MEMORY = "memory"


class Hints(msgspec.Struct):
    """The body fields that may name a branch, as raw JSON: an odd value must not fail a request.

    `previous_response_id` names no branch (it changes with every request).
    """

    metadata: msgspec.Raw = _ABSENT
    nvext: msgspec.Raw = _ABSENT
    program_id: msgspec.Raw = _ABSENT
    prompt_cache_key: msgspec.Raw = _ABSENT
    session_id: msgspec.Raw = _ABSENT
    conversation: msgspec.Raw = _ABSENT
    previous_response_id: msgspec.Raw = _ABSENT

    @property
    def given(self) -> bool:
        """Whether one of the fields that name a branch is there."""
        return any(
            field is not _ABSENT
            for field in (
                self.metadata, self.nvext, self.program_id, self.prompt_cache_key, self.session_id, self.conversation,
            )
        )  # fmt: skip


def foreign_id(value: object) -> str:
    """A harness's id as a part of a branch id, empty when it is none. "/" and "~" part branch ids: escaped."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        value = str(value)
    if not isinstance(value, str):
        return ""
    value = value.strip()
    if not value or len(value) > MAX_FOREIGN_LENGTH or not value.isprintable():
        return ""
    value = value.translate(_MARKS)
    return value if len(value) <= MAX_FOREIGN_LENGTH else ""


def claude_branch(session: str, agent: str = "") -> str:
    """Branch of a Claude Code session or of one of its agents; both are `foreign_id`s."""
    return f"claude:{session}/{agent}" if agent else f"claude:{session}"


class Claim(msgspec.Struct, frozen=True):
    """What a row says. With `branch` it is exact; otherwise the path decides within `session`."""

    source: str
    session: str  # main branch of the session; empty: none
    branch: str = ""
    parent: str = ""
    kind: RequestKind = RequestKind.TURN
    final: bool = False
    own_agents: bool = False  # the harness's sub-agents have ids of their own
    prefix_breaks: bool = False  # its long requests are its main agent's, even with another beginning
    vouched: bool = True  # the id stays the same from request to request

    @property
    def pool(self) -> str:
        """Where a changing id's earlier branch is looked for; empty: nowhere."""
        return "" if self.vouched else self.session.partition(":")[0]


_PATH_ONLY = Claim("path", "")
# One of these names a row's id, if it is not the body that does.
_NAMES = frozenset(
    (
        "x-dynamo-session-id", "x-claude-code-session-id", "x-codex-turn-metadata", "thread-id", "x-session-id",
        "x-session-affinity", "x-smg-routing-key", "x-correlation-id",
    )
)  # fmt: skip


def claim_of(headers: Mapping[str, str], hints: Hints) -> Claim:
    """The first row that the request fills, below our own headers."""
    if _NAMES.isdisjoint(headers) and not hints.given:
        return _PATH_ONLY
    return (
        _dynamo(headers, hints)
        or _claude(headers, hints)
        or _codex(headers)
        or _opencode(headers)
        or _generic("routing_key", "route", headers.get("x-smg-routing-key"))
        or _generic("session", "session", headers.get("x-session-id"))
        or _generic("program", "program", _value(hints.program_id), vouched=True)
        or _generic("conversation", "conversation", _conversation(hints), vouched=True)
        or _generic("body_session", "session", _value(hints.session_id))
        or _generic("cache_key", "cache", _value(hints.prompt_cache_key))
        or _generic("correlation", "correlation", headers.get("x-correlation-id"))
        or _PATH_ONLY
    )


def _dynamo(headers: Mapping[str, str], hints: Hints) -> Claim | None:
    name, parent, final, session = foreign_id(headers.get("x-dynamo-session-id")), "", False, ""
    if name:
        parent = foreign_id(headers.get("x-dynamo-parent-session-id"))
    else:
        context = _object(_object(_value(hints.nvext)).get("agent_context"))
        session = foreign_id(context.get("session_id"))
        name = foreign_id(context.get("trajectory_id")) or session
        parent = foreign_id(context.get("parent_trajectory_id")) or foreign_id(
            context.get("parent_session_id")
        )
        final = context.get("session_final") is True
    if not name:
        return None
    return Claim(
        "dynamo",
        f"dynamo:{session or name}",
        branch=f"dynamo:{name}",
        parent=f"dynamo:{parent}" if parent else "",
        final=final,
    )


def _claude(headers: Mapping[str, str], hints: Hints) -> Claim | None:
    session = foreign_id(headers.get("x-claude-code-session-id")) or claude_session(_value(hints.metadata))
    if not session:
        return None
    main = claude_branch(session)
    agent = foreign_id(headers.get("x-claude-code-agent-id"))
    if not agent:
        return Claim("claude", main, own_agents=True, prefix_breaks=True)
    parent = foreign_id(headers.get("x-claude-code-parent-agent-id"))
    return Claim("claude", main, branch=claude_branch(session, agent), parent=claude_branch(session, parent))


def claude_session(metadata: object) -> str:
    """Session in Anthropic's `metadata`: `user_id` is JSON with a session_id, or ends in `_session_<uuid>`."""
    user = _object(metadata).get("user_id")
    if not isinstance(user, str):
        return ""
    if user.lstrip().startswith("{"):
        return foreign_id(_object(_json(user.encode(errors="replace"))).get("session_id"))
    found = _CLAUDE_USER.search(user.strip())
    return foreign_id(found[1]) if found else ""


_CODEX_KINDS = {
    "prewarm": RequestKind.PREWARM,
    "compaction": RequestKind.COMPACTION,
    "compact": RequestKind.COMPACTION,
    "memory": RequestKind.MEMORY,
    "memory_consolidation": RequestKind.MEMORY,
}


def _codex(headers: Mapping[str, str]) -> Claim | None:
    """Children share the root's session-id and prompt_cache_key: only the thread names a branch."""
    turn = _object(_json(headers.get("x-codex-turn-metadata", "").encode(errors="replace")))
    thread = foreign_id(headers.get("thread-id")) or foreign_id(turn.get("thread_id"))
    if not thread:
        return None
    root = foreign_id(headers.get("session-id")) or foreign_id(turn.get("session_id"))
    subagent = headers.get("x-openai-subagent", "").strip()
    parent = foreign_id(headers.get("x-codex-parent-thread-id")) or foreign_id(turn.get("parent_thread_id"))
    if not parent and subagent and root != thread:
        parent = root
    said = turn.get("request_kind")
    kind = _CODEX_KINDS.get(said if isinstance(said, str) else subagent, RequestKind.TURN)
    branch = f"codex:{thread}"
    if kind is RequestKind.MEMORY:  # about the thread, not a step of it
        branch, parent = f"{branch}/memory", thread
    return Claim(
        "codex",
        f"codex:{root or thread}",
        branch=branch,
        parent=f"codex:{parent}" if parent else "",
        kind=kind,
    )


def _opencode(headers: Mapping[str, str]) -> Claim | None:
    affinity, parent = headers.get("x-session-affinity"), foreign_id(headers.get("x-parent-session-id"))
    if not affinity and not parent and not headers.get("user-agent", "").lower().startswith("opencode/"):
        return None
    session = foreign_id(headers.get("x-session-id")) or foreign_id(affinity)
    if not session:
        return None
    return Claim(
        "opencode", f"session:{session}", parent=f"session:{parent}" if parent else "", own_agents=True
    )


def _generic(source: str, prefix: str, value: object, vouched: bool = False) -> Claim | None:
    session = foreign_id(value)
    return Claim(source, f"{prefix}:{session}", vouched=vouched) if session else None


def _conversation(hints: Hints) -> object:
    value = _value(hints.conversation)
    return value.get("id") if isinstance(value, dict) else value


def _value(raw: msgspec.Raw) -> object:
    return _json(bytes(raw)) if memoryview(raw).nbytes <= MOST_HINT_BYTES else None


def _json(data: bytes) -> object:
    """The decoded value, None for what is no JSON."""
    if not data:
        return None
    try:
        value: object = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def said_yes(value: str | None) -> bool:
    return (value or "").strip().lower() in ("1", "true", "yes")
