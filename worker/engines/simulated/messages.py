"""Anthropic's messages: a request as a conversation, and the shape of the answer."""

from __future__ import annotations

import msgspec

from shared.openai import ApiError, Call, read_json
from worker.engines.simulated.conversation import (
    Conversation,
    Image,
    Piece,
    Role,
    Text,
    Thought,
    ToolCall,
    Turn,
    canonical,
    image,
    tools_of,
    unsupported,
)
from worker.engines.simulated.forms import Form, event
from worker.engines.simulated.text import Answer, Delta, Part

_ROLES = {"user": Role.USER, "assistant": Role.ASSISTANT, "system": Role.SYSTEM}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Source(msgspec.Struct):
    type: str
    media_type: str = ""
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    data: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.Raw(b"")
    content: str | list[_Block] | None = None
    source: _Source | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Block]


_messages_decoder = msgspec.json.Decoder(list[_Message])
_system_decoder = msgspec.json.Decoder(str | list[_Block] | None)


def conversation(call: Call) -> Conversation:
    """Raises ApiError 400 for what is not of the API's shape, an unknown role, and content of another kind."""
    turns: list[Turn] = []
    system = read_json(_system_decoder, call.system, "system") if bytes(call.system) else None
    if system:
        turns.append(Turn(Role.SYSTEM, _pieces(system, "system")))
    listed = read_json(_messages_decoder, call.messages, "messages")
    for at, message in enumerate(listed):
        turns += _turns(message, at)
    return Conversation(turns, tools_of(call.tools), open=turns[-1].role is Role.ASSISTANT)


def _turns(message: _Message, at: int) -> list[Turn]:
    """A message's results of tools are turns of their own, as they are messages of their own elsewhere."""
    where = f"messages[{at}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise ApiError(
            400,
            f"{where}.role {message.role!r} is unknown (known: {', '.join(_ROLES)}).",
            param=f"{where}.role",
        )
    if isinstance(message.content, str):
        return [Turn(role, [Text(message.content)])]
    turns: list[Turn] = []
    rest: list[Piece] | None = None
    for number, block in enumerate(message.content):
        place = f"{where}.content[{number}]"
        if block.type == "tool_result" and role is Role.USER:
            turns.append(Turn(Role.TOOL, _pieces(block.content or "", place)))
            rest = None
            continue
        if rest is None:
            rest = []
            turns.append(Turn(role, rest))
        rest.append(_piece(block, place, role))
    return turns or [Turn(role, [])]


def _pieces(content: str | list[_Block], where: str) -> list[Piece]:
    if isinstance(content, str):
        return [Text(content)]
    return [_piece(block, f"{where}[{number}]", Role.USER) for number, block in enumerate(content)]


def _piece(block: _Block, where: str, role: Role) -> Piece:
    match block.type:
        case "text" if block.text is not None:
            return Text(block.text)
        case "document" if block.source is not None and block.source.type == "text":
            return Text(block.source.data or "")
        case "image" | "document" if block.source is not None:
            return _image(block.source, where)
        case "thinking" if role is Role.ASSISTANT and block.thinking is not None:
            return Thought(block.thinking)
        case "redacted_thinking" if role is Role.ASSISTANT and block.data is not None:
            return Thought(block.data)
        case "tool_use" if role is Role.ASSISTANT:
            if not block.name:
                raise ApiError(400, f"{where}.name: Field required", param=f"{where}.name")
            return ToolCall(block.name, canonical(block.input))
    raise unsupported(where, block.type)


def _image(source: _Source, where: str) -> Image:
    if source.type == "base64" and source.data is not None:
        return image(f"data:{source.media_type};base64,{source.data}")
    found = source.url or source.file_id
    if not found:
        raise ApiError(400, f"{where}.source has neither data nor url.", param=f"{where}.source")
    return image(found)


class MessagesForm(Form):
    """Blocks of content."""

    def whole(self, iterations: int) -> bytes:
        return msgspec.json.encode(self._message(self.answer, iterations))

    def chunk(self, produced: int) -> bytes:
        (cursor,) = self.cursors
        out: list[bytes] = []
        if not cursor.tokens and produced:
            started = {"type": "message_start", "message": self._message(None, 0)}
            out += [event(started, "message_start"), event({"type": "ping"}, "ping")]
        for delta in cursor.advance(produced):
            out += self._block(delta)
        return b"".join(out)

    def end(self, iterations: int) -> bytes:
        delta = {"stop_reason": self._stop_reason(self.answer), "stop_sequence": self.answer.stopped_by}
        told = {"type": "message_delta", "delta": delta, "usage": self._usage(self.answer, iterations)}
        return (
            event(told, "message_delta")
            + self.comment(iterations)
            + event({"type": "message_stop"}, "message_stop")
        )

    def _block(self, delta: Delta) -> list[bytes]:
        part, out = delta.part, []
        if delta.begins:
            out.append(self._content("content_block_start", delta.place, content_block=self._empty(part)))
        if delta.text:
            match part.kind:
                case "text":
                    told = {"type": "text_delta", "text": delta.text}
                case "reason":
                    told = {"type": "thinking_delta", "thinking": delta.text}
                case "call":
                    told = {"type": "input_json_delta", "partial_json": delta.text}
            out.append(self._content("content_block_delta", delta.place, delta=told))
        if delta.ends:
            if part.kind == "reason":
                signed = {"type": "signature_delta", "signature": _signature(self)}
                out.append(self._content("content_block_delta", delta.place, delta=signed))
            out.append(self._content("content_block_stop", delta.place))
        return out

    @staticmethod
    def _content(name: str, index: int, **fields: object) -> bytes:
        return event({"type": name, "index": index} | fields, name)

    def _empty(self, part: Part) -> dict[str, object]:
        match part.kind:
            case "text":
                return {"type": "text", "text": ""}
            case "reason":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "call":
                return {"type": "tool_use", "id": f"toolu_{part.key}", "name": part.name, "input": {}}

    def _full(self, part: Part) -> dict[str, object]:
        match part.kind:
            case "text":
                return {"type": "text", "text": part.text}
            case "reason":
                return {"type": "thinking", "thinking": part.text, "signature": _signature(self)}
            case "call":
                return self._empty(part) | {"input": _input(part)}

    def _message(self, answer: Answer | None, iterations: int) -> dict[str, object]:
        """The message with that answer, or as it is when it begins."""
        return {
            "id": f"msg_{self.rid}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [self._full(part) for part in answer.parts] if answer is not None else [],
            "stop_reason": self._stop_reason(answer) if answer is not None else None,
            "stop_sequence": answer.stopped_by if answer is not None else None,
            "usage": self._usage(answer, iterations),
        }

    @staticmethod
    def _stop_reason(answer: Answer) -> str:
        return "stop_sequence" if answer.stopped_by is not None else _STOP_REASONS[answer.finish]

    def _usage(self, answer: Answer | None, iterations: int) -> dict[str, object]:
        """Nothing is charged for what enters the cache, so nothing is told of it."""
        return {
            "input_tokens": self.job.tokens.size - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": answer.ids.size if answer is not None else 1,
            "decode_iterations": iterations,
        }


def _signature(form: Form) -> str:
    return f"sig_{form.rid}"


def _input(part: Part) -> object:
    """The arguments; none when the limit on the output cut them."""
    try:
        return msgspec.json.decode(part.data)
    except msgspec.DecodeError:
        return {}
