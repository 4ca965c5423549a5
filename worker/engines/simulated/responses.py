"""OpenAI's responses: a request's items as a conversation, and the shape of the answer.

Rules that hold here
- Nothing is stored: a request brings its whole conversation.
- The items of one answer (reasoning, message, calls) are one turn, as they are one message elsewhere. An item
  that cannot follow the one before in an answer begins another turn.
- Events are numbered from 0.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

from shared.openai import ApiError, Call, read_json
from worker.engines.simulated.conversation import (
    Conversation,
    Piece,
    Role,
    Text,
    Thought,
    ToolCall,
    Turn,
    canonical,
    image,
    image_of_url,
    tools_of,
    unsupported,
)
from worker.engines.simulated.forms import Form, event
from worker.engines.simulated.text import Delta, Part

_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
_RAW = msgspec.Raw(b"")


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: msgspec.Raw = _RAW
    file_id: str | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[_Part] | None = None
    name: str | None = None
    arguments: str = ""
    input: str = ""
    output: str | list[_Part] | None = None
    summary: list[_Part] | None = None
    encrypted_content: str | None = None


class _Echo(msgspec.Struct):
    """What an answer repeats of its request."""

    instructions: msgspec.Raw = msgspec.Raw(b"null")
    max_output_tokens: msgspec.Raw = msgspec.Raw(b"null")
    metadata: msgspec.Raw = msgspec.Raw(b"{}")
    parallel_tool_calls: msgspec.Raw = msgspec.Raw(b"true")
    reasoning: msgspec.Raw = msgspec.Raw(b'{"effort":null,"summary":null}')
    temperature: msgspec.Raw = msgspec.Raw(b"1.0")
    text: msgspec.Raw = msgspec.Raw(b'{"format":{"type":"text"}}')
    tool_choice: msgspec.Raw = msgspec.Raw(b'"auto"')
    tools: msgspec.Raw = msgspec.Raw(b"[]")
    top_p: msgspec.Raw = msgspec.Raw(b"1.0")
    user: msgspec.Raw = msgspec.Raw(b"null")


_items_decoder = msgspec.json.Decoder(str | list[_Item])
_instructions_decoder = msgspec.json.Decoder(str | None)
_echo_decoder = msgspec.json.Decoder(_Echo)
_ORDER = (Thought, Text, ToolCall)  # in an answer


def conversation(call: Call) -> Conversation:
    """Raises ApiError 400 for what is not of the API's shape, an unknown role, and items of another kind."""
    turns: list[Turn] = []
    instructions = (
        read_json(_instructions_decoder, call.instructions, "instructions")
        if bytes(call.instructions)
        else None
    )
    if instructions:
        turns.append(Turn(Role.SYSTEM, [Text(instructions)]))
    items = read_json(_items_decoder, call.input, "input")
    if isinstance(items, str):
        turns.append(Turn(Role.USER, [Text(items)]))
    else:
        for at, item in enumerate(items):
            turn = _turn(item, f"input[{at}]")
            if turn.role is Role.ASSISTANT and turns and _goes_on(turns[-1], turn):
                turns[-1].pieces.extend(turn.pieces)
            else:
                turns.append(turn)
    return Conversation(turns, tools_of(call.tools))


def _goes_on(last: Turn, turn: Turn) -> bool:
    """Whether an item can belong to the same answer as the one before."""
    if last.role is not Role.ASSISTANT or not last.pieces or not turn.pieces:
        return False
    before, now = (
        _ORDER.index(type(piece)) if type(piece) in _ORDER else 1
        for piece in (last.pieces[-1], turn.pieces[0])
    )
    return before < now or before == now == _ORDER.index(ToolCall)


def _turn(item: _Item, where: str) -> Turn:
    match item.type:
        case "message":
            role = _ROLES.get(item.role or "")
            if role is None:
                raise ApiError(
                    400,
                    f"{where}.role {item.role!r} is unknown (known: {', '.join(_ROLES)}).",
                    param=f"{where}.role",
                )
            if item.content is None:
                raise ApiError(400, f"{where} has no content.", param=f"{where}.content")
            return Turn(role, _pieces(item.content, where))
        case "function_call" | "custom_tool_call":
            if not item.name:
                raise ApiError(400, f"{where} has no name.", param=f"{where}.name")
            arguments = item.arguments if item.type == "function_call" else item.input
            return Turn(Role.ASSISTANT, [ToolCall(item.name, canonical(arguments))])
        case "function_call_output" | "custom_tool_call_output":
            return Turn(Role.TOOL, _pieces(item.output or "", where))
        case "reasoning":
            return Turn(Role.ASSISTANT, [Thought(_reason(item))])
    raise unsupported(where, item.type)


def _pieces(content: str | list[_Part], where: str) -> list[Piece]:
    if isinstance(content, str):
        return [Text(content)]
    return [_piece(part, f"{where}.content[{number}]") for number, part in enumerate(content)]


def _piece(part: _Part, where: str) -> Piece:
    text = part.refusal if part.type == "refusal" and part.refusal is not None else part.text
    if part.type in ("input_text", "output_text", "text", "refusal") and text is not None:
        return Text(text)
    if part.type == "input_image":
        return image(part.file_id) if part.file_id else image_of_url(part.image_url, where)
    raise unsupported(where, part.type)


def _reason(item: _Item) -> str:
    """What was thought; clients may send the encrypted form only."""
    if isinstance(item.content, list) and item.content:
        return "".join(part.text or "" for part in item.content)
    if item.encrypted_content:
        try:
            return base64.b64decode(item.encrypted_content, validate=True).decode()
        except (binascii.Error, ValueError):
            return item.encrypted_content
    return "".join(part.text or "" for part in item.summary or [])


class ResponsesForm(Form):
    """Items of output."""

    _events = 0

    @property
    def events_sent(self) -> int:
        return self._events

    def whole(self, iterations: int) -> bytes:
        return msgspec.json.encode(self._response(iterations))

    def chunk(self, produced: int) -> bytes:
        (cursor,) = self.cursors
        out: list[bytes] = []
        if not cursor.tokens and produced:
            begun = self._response(0, begun=True)
            out += [self._event("response.created", response=begun)]
            out += [self._event("response.in_progress", response=begun)]
        for delta in cursor.advance(produced):
            out += self._part(delta)
        return b"".join(out)

    def end(self, iterations: int) -> bytes:
        name = "response.incomplete" if self.answer.finish == "length" else "response.completed"
        return self._event(name, response=self._response(iterations)) + self.comment(iterations)

    def _part(self, delta: Delta) -> list[bytes]:
        part, at = delta.part, delta.place
        full = self._item(part, at, "completed" if self._complete(part) else "incomplete")
        item_id, out = full["id"], []
        if delta.begins:
            out.append(
                self._event(
                    "response.output_item.added", output_index=at, item=self._item(part, at, "in_progress")
                )
            )
            if part.kind == "text":
                out.append(self._content("part.added", item_id, at, part=_output_text("")))
        if delta.text:
            match part.kind:
                case "text":
                    out.append(self._text("output_text.delta", item_id, at, delta=delta.text, logprobs=[]))
                case "reason":
                    out.append(self._text("reasoning_text.delta", item_id, at, delta=delta.text))
                case "call":
                    out.append(self._arguments("delta", item_id, at, delta=delta.text))
        if delta.ends:
            match part.kind:
                case "text":
                    out.append(self._text("output_text.done", item_id, at, text=part.text, logprobs=[]))
                    out.append(self._content("part.done", item_id, at, part=_output_text(part.text)))
                case "reason":
                    out.append(self._text("reasoning_text.done", item_id, at, text=part.text))
                case "call":
                    out.append(self._arguments("done", item_id, at, name=part.name, arguments=part.text))
            out.append(self._event("response.output_item.done", output_index=at, item=full))
        return out

    def _text(self, name: str, item_id: object, at: int, **fields: object) -> bytes:
        return self._event(f"response.{name}", item_id=item_id, output_index=at, content_index=0, **fields)

    def _content(self, name: str, item_id: object, at: int, **fields: object) -> bytes:
        return self._text(f"content_{name}", item_id, at, **fields)

    def _arguments(self, event_name: str, item_id: object, at: int, **fields: object) -> bytes:
        name = f"response.function_call_arguments.{event_name}"
        return self._event(name, item_id=item_id, output_index=at, **fields)

    def _event(self, event_name: str, **fields: object) -> bytes:
        numbered = {"type": event_name, "sequence_number": self._events} | fields
        self._events += 1
        return event(numbered, event_name)

    def _complete(self, part: Part) -> bool:
        """Only what the limit on the output ended is not."""
        return self.answer.finish != "length" or part is not self.answer.parts[-1]

    def _item(self, part: Part, at: int, status: str) -> dict[str, object]:
        """An item of the output; without its content while it is `in_progress`."""
        begun = status == "in_progress"
        text = "" if begun else part.text
        match part.kind:
            case "text":
                content = [] if begun else [_output_text(text)]
                fields: dict[str, object] = {"type": "message", "role": "assistant", "content": content}
                prefix = "msg"
            case "reason":
                thought = [] if begun else [{"type": "reasoning_text", "text": text}]
                fields = {"type": "reasoning", "summary": [], "content": thought}
                fields["encrypted_content"] = None if begun else base64.b64encode(part.data).decode()
                prefix = "rs"
            case "call":
                fields = {"type": "function_call", "call_id": f"call_{part.key}"}
                fields |= {"name": part.name, "arguments": text}
                prefix = "fc"
        return {"id": f"{prefix}_{self.rid}_{at}", "status": status} | fields

    def _response(self, iterations: int, *, begun: bool = False) -> dict[str, object]:
        cut = self.answer.finish == "length" and not begun
        parts = [] if begun else list(enumerate(self.answer.parts))
        output = [
            self._item(part, at, "completed" if self._complete(part) else "incomplete") for at, part in parts
        ]
        echoed = msgspec.structs.asdict(_echo_decoder.decode(self.body))
        return echoed | {
            "id": f"resp_{self.rid}",
            "object": "response",
            "created_at": self.created,
            "status": "in_progress" if begun else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if begun else self._usage(iterations),
        }

    def _usage(self, iterations: int) -> dict[str, object]:
        prompt, output = self.job.tokens.size, self.job.output_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": prompt + output,
            "decode_iterations": iterations,
        }


def _output_text(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
