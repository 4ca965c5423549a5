"""OpenAI's chat completions: their messages as a conversation, and the shape of their answers."""

from __future__ import annotations

import msgspec

from shared.openai import ApiError, Call, read_json
from worker.engines.simulated.completions import OpenAiForm, logprob_entry
from worker.engines.simulated.conversation import (
    Conversation,
    Piece,
    Role,
    Text,
    Thought,
    ToolCall,
    Turn,
    canonical,
    image_of_url,
    tools_of,
    unsupported,
)
from worker.engines.simulated.text import Answer, Delta, Part

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: msgspec.Raw = msgspec.Raw(b"")


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Custom(msgspec.Struct):
    name: str
    input: str = ""


class _Call(msgspec.Struct):
    function: _Function | None = None
    custom: _Custom | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


_messages_decoder = msgspec.json.Decoder(list[_Message])


def conversation(call: Call) -> Conversation:
    """Raises ApiError 400 for messages or tools of another shape, an unknown role, and content of another kind."""
    messages = read_json(_messages_decoder, call.messages, "messages")
    return Conversation([_turn(message, at) for at, message in enumerate(messages)], tools_of(call.tools))


def _turn(message: _Message, at: int) -> Turn:
    role = _ROLES.get(message.role)
    if role is None:
        raise ApiError(
            400,
            f"messages[{at}].role {message.role!r} is unknown (known: {', '.join(_ROLES)}).",
            param=f"messages[{at}].role",
        )
    pieces: list[Piece] = []
    if message.name:
        pieces.append(Text(f"[{message.name}] "))
    if message.reasoning_content and role is Role.ASSISTANT:
        pieces.append(Thought(message.reasoning_content))
    if isinstance(message.content, str):
        pieces.append(Text(message.content))
    elif message.content is None:
        if role is not Role.ASSISTANT:
            raise ApiError(400, f"messages[{at}] has no content.", param=f"messages[{at}].content")
    else:
        pieces += [_piece(part, f"messages[{at}].content[{n}]") for n, part in enumerate(message.content)]
    for number, tool in enumerate(message.tool_calls or []):
        if tool.function is not None:
            pieces.append(ToolCall(tool.function.name, canonical(tool.function.arguments)))
        elif tool.custom is not None:
            pieces.append(ToolCall(tool.custom.name, canonical(tool.custom.input)))
        else:
            where = f"messages[{at}].tool_calls[{number}]"
            raise ApiError(400, f"{where} has no function.", param=where)
    return Turn(role, pieces)


def _piece(part: _Part, where: str) -> Piece:
    text = part.refusal if part.type == "refusal" and part.refusal is not None else part.text
    if part.type in ("text", "input_text", "output_text", "refusal") and text is not None:
        return Text(text)
    if part.type in ("image_url", "input_image") and bytes(part.image_url):
        return image_of_url(part.image_url, where)
    raise unsupported(where, part.type)


class ChatForm(OpenAiForm):
    prefix, name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, answer: Answer) -> dict[str, object]:
        message: dict[str, object] = {
            "role": "assistant",
            "content": answer.text if answer.text or not answer.calls else None,
            "refusal": None,
        }
        reason = answer.part_text("reason")
        if reason:
            message["reasoning_content"] = reason
        if answer.calls:
            message["tool_calls"] = [_call(part) | {"function": _function(part)} for part in answer.calls]
        texts = [part for part in answer.parts if part.kind == "text"]
        logprobs = self._logprobs([(part, 0, len(part.data)) for part in texts])
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish}

    def deltas(self, index: int, found: list[Delta], *, first: bool, done: bool) -> list[dict[str, object]]:
        answer = self.job.answers[index]
        choices: list[dict[str, object]] = []
        for delta in found:
            part = delta.part
            if part.kind == "call":
                number = answer.calls.index(part)
                if delta.begins:
                    opened = (
                        {"index": number} | _call(part) | {"function": {"name": part.name, "arguments": ""}}
                    )
                    choices.append(self._delta(index, {"tool_calls": [opened]}))
                if delta.text:
                    more = {"index": number, "function": {"arguments": delta.text}}
                    choices.append(self._delta(index, {"tool_calls": [more]}))
            elif delta.text:
                field = "reasoning_content" if part.kind == "reason" else "content"
                choice = self._delta(index, {field: delta.text})
                if part.kind == "text":
                    choice["logprobs"] = self._logprobs([(part, delta.start, delta.stop)])
                choices.append(choice)
        if first:
            choices = choices or [self._delta(index, {"content": ""})]
            choices[0]["delta"] = {"role": "assistant"} | choices[0]["delta"]  # type: ignore[operator]
        if done:
            if not choices:
                choices.append(self._delta(index, {}))
            choices[-1]["finish_reason"] = answer.finish
        return choices

    def no_delta(self, index: int) -> dict[str, object]:
        return self._delta(index, {})

    @staticmethod
    def _delta(index: int, delta: dict[str, object]) -> dict[str, object]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, spans: list[tuple[Part, int, int]]) -> dict[str, object] | None:
        top = self.job.options.logprobs
        if top is None:
            return None
        content = [
            logprob_entry(byte, part.at + start + at, top)
            for part, start, stop in spans
            for at, byte in enumerate(part.data[start:stop])
        ]
        return {"content": content, "refusal": None}


def _call(part: Part) -> dict[str, object]:
    return {"id": f"call_{part.key}", "type": "function"}


def _function(part: Part) -> dict[str, object]:
    return {"name": part.name, "arguments": part.text}
