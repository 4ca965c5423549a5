"""What the hooks of Claude Code say about branches: its JSON, posted unchanged.

Rules that hold here
- No I/O and no clock. Branch ids are those that `identity.py` gives the same session's and agents' requests.
- Events that say nothing about a branch, and events that are not known, do nothing.

| event | branch |
|---|---|
| SubagentStop | the agent's ends |
| SessionEnd | the session's main branch and all others of it end |
| PreCompact, PostCompact | the agent's, else the main branch, is about to be rewritten |
| SessionStart after "compact" or "clear" | the main branch is about to be rewritten |
"""

from __future__ import annotations

import msgspec

from services.router.claims import claude_branch, foreign_id
from shared.openai import ApiError

MOST_HOOK_BYTES = 2**20


class HookAction(msgspec.Struct, frozen=True):
    """What to do. `ends` end; with `ends_session`, so does every branch of `session`; `compacts` is rewritten."""

    event: str
    session: str  # main branch of the session
    ends: tuple[str, ...] = ()
    ends_session: bool = False
    compacts: str | None = None


def read_hook(body: bytes) -> HookAction:
    """Raises ApiError 400 for a body that is no JSON object, or has no `session_id` that can be one."""
    if len(body) > MOST_HOOK_BYTES:
        raise ApiError(413, f"A hook has at most {MOST_HOOK_BYTES} bytes.", code="body_too_large")
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"The hook's body is not valid JSON: {error}", code="bad_hook") from None
    except RecursionError:
        raise ApiError(400, "The hook's body is nested too deeply.", code="bad_hook") from None
    if not isinstance(said, dict):
        raise ApiError(
            400, "The hook's body must be a JSON object, as the harness writes it.", code="bad_hook"
        )
    session = foreign_id(said.get("session_id"))
    if not session:
        raise ApiError(
            400,
            "The hook's body names no session: session_id must be a printable string.",
            param="session_id",
            code="bad_hook",
        )
    main, agent = claude_branch(session), foreign_id(said.get("agent_id"))
    event = said.get("hook_event_name")
    match event:
        case "SubagentStop" if agent:
            return HookAction(event, main, ends=(claude_branch(session, agent),))
        case "SessionEnd":
            return HookAction(event, main, ends_session=True)
        case "PreCompact" | "PostCompact":
            return HookAction(event, main, compacts=claude_branch(session, agent))
        case "SessionStart" if said.get("source") in ("compact", "clear"):
            return HookAction(event, main, compacts=main)
    return HookAction(event if isinstance(event, str) else "", main)
