"""Answers that a test writes into the prompt: `<<script>>[step, ...]<</script>>`.

Rules that hold here
- Nothing is kept between requests: answer k after the message that holds the script is step k, where k is the
  number of assistant turns between that message and the end.
- Only what a system or user message says is a script, and the last one counts. After its last step the engine
  says what it would say without.
- A step is {"say": text}, {"tool": {"name": ..., "arguments": {...}}}, or {"say": ..., "tools": [...]}, each with
  an optional "reason": text.
"""

from __future__ import annotations

import re

import msgspec

from shared.openai import ApiError
from worker.engines.simulated.conversation import Conversation, Piece, Role, Text, Thought, ToolCall

_MARK = "<<script>>"
_script = re.compile(r"<<script>>(.*?)<</script>>", re.DOTALL)


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, object] = {}


class Step(msgspec.Struct, forbid_unknown_fields=True):
    say: str = ""
    reason: str = ""
    tool: _Call | None = None
    tools: list[_Call] = []

    def pieces(self, *, text_only: bool = False) -> list[Piece]:
        """The assistant's turn that it stands for."""
        text: list[Piece] = [Text(self.say)] if self.say else []
        if text_only:
            return text
        thought: list[Piece] = [Thought(self.reason)] if self.reason else []
        calls = [*([self.tool] if self.tool is not None else []), *self.tools]
        return thought + text + [ToolCall(call.name, msgspec.json.encode(call.arguments)) for call in calls]


_decoder = msgspec.json.Decoder(list[Step])


def step_of_text(text: str, number: int = 0) -> Step | None:
    """Step `number` of the script in that text. Raises ApiError 400 for a script that is none."""
    if _MARK not in text:
        return None
    found = _script.search(text)
    if found is None:
        raise ApiError(400, "The prompt's <<script>> has no end.", code="invalid_script")
    try:
        steps = _decoder.decode(found[1].encode("utf-8", "replace"))
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The prompt's script is not valid: {error}", code="invalid_script") from None
    return steps[number] if number < len(steps) else None


def step_of(conversation: Conversation) -> Step | None:
    """What the script in that conversation says next; None without one and when it is over."""
    turns = conversation.turns[:-1] if conversation.open else conversation.turns
    answers = 0
    for turn in reversed(turns):
        if turn.role is Role.ASSISTANT:
            answers += 1
        elif turn.role is not Role.TOOL and _MARK in turn.text:
            return step_of_text(turn.text, answers)
    return None
