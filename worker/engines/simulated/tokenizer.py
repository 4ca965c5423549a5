"""Text to token ids and back, and the chat template, of the simulated engine.

Rules that hold here
- Ids 0 to 255 are the bytes of UTF-8 text; the special tokens of the template follow. Any id below
  VOCABULARY may stand in a prompt given as ids.
- The template only appends: rendering messages m1..mn gives a prefix of rendering m1..mn, mn+1 without its
  generation prompt, so an agent's next step shares the pages of its last one. An answer's text, sent back as
  an assistant message, continues the very ids that were generated.
- The same input always gives the same ids: JSON is kept as the client wrote it, key order and all.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt

from shared.openai import ApiError, TokenArray

VOCABULARY = 131_072


class Special(IntEnum):
    """Special tokens; `BOS` begins a chat, `END` a message's end, `EOS` the end of an output."""

    BOS = 256
    SYSTEM = 257
    USER = 258
    ASSISTANT = 259
    TOOL = 260
    END = 261
    EOS = 262


_ROLES = {
    "system": Special.SYSTEM,
    "developer": Special.SYSTEM,
    "user": Special.USER,
    "assistant": Special.ASSISTANT,
    "tool": Special.TOOL,
    "function": Special.TOOL,
}


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


_messages_decoder = msgspec.json.Decoder(list[_Message])
_tools_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def encode(text: str) -> TokenArray:
    """int32[bytes of the text in UTF-8]; a lone surrogate becomes `?`."""
    return _bytes_to_ids(text.encode("utf-8", "replace"))


def decode(ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
    """The text of the byte ids; other ids have none and are left out."""
    array = np.asarray(ids, dtype=np.int64)
    return array[(array >= 0) & (array < 256)].astype(np.uint8).tobytes().decode("utf-8", "replace")


def check_ids(ids: TokenArray) -> None:
    """Raises ApiError 400 for an id that is not in the vocabulary."""
    if ids.size and (int(ids.max()) >= VOCABULARY or int(ids.min()) < 0):
        raise ApiError(400, f"prompt holds a token id outside 0 to {VOCABULARY - 1}.", param="prompt")


def render(messages: bytes | msgspec.Raw, tools: bytes | msgspec.Raw = b"") -> TokenArray:
    """The ids of a chat: JSON of OpenAI's `messages` and `tools`, up to where the assistant begins to speak.

    Raises ApiError 400 for messages or tools of another shape, an unknown role, and content that is not text.
    """
    try:
        parsed = _messages_decoder.decode(bytes(messages))
    except msgspec.DecodeError as error:
        raise ApiError(400, f"messages are not valid: {error}", param="messages") from None
    if not parsed:
        raise ApiError(400, "messages must hold at least one message.", param="messages")
    tool_text = _tools(bytes(tools))
    ids: list[TokenArray] = [_special(Special.BOS)]
    if tool_text and parsed[0].role not in ("system", "developer"):
        ids += [_special(Special.SYSTEM), _bytes_to_ids(tool_text), _special(Special.END)]
        tool_text = b""
    for at, message in enumerate(parsed):
        role = _ROLES.get(message.role)
        if role is None:
            raise ApiError(
                400,
                f"messages[{at}].role {message.role!r} is unknown (known: {', '.join(_ROLES)}).",
                param=f"messages[{at}].role",
            )
        body = _body(message, at)
        if tool_text:
            body, tool_text = body + b"\n" + tool_text, b""
        ids += [_special(role), _bytes_to_ids(body), _special(Special.END)]
    ids.append(_special(Special.ASSISTANT))
    return np.concatenate(ids)


def _tools(tools: bytes) -> bytes:
    if tools.strip() in (b"", b"null", b"[]"):
        return b""
    try:
        listed = _tools_decoder.decode(tools)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"tools are not a list: {error}", param="tools") from None
    return b"Tools:\n" + b"\n".join(bytes(tool) for tool in listed)


def _body(message: _Message, at: int) -> bytes:
    parts: list[str] = []
    if message.name:
        parts.append(f"[{message.name}] ")
    if message.tool_call_id:
        parts.append(f"[{message.tool_call_id}] ")
    if isinstance(message.content, str):
        parts.append(message.content)
    elif message.content is None:
        if not message.tool_calls and message.role != "assistant":
            raise ApiError(400, f"messages[{at}] has no content.", param=f"messages[{at}].content")
    else:
        for number, part in enumerate(message.content):
            if part.type not in ("text", "input_text", "output_text", "refusal") or part.text is None:
                raise ApiError(
                    400,
                    f"messages[{at}].content[{number}] is of type {part.type!r}: this engine reads text only.",
                    param=f"messages[{at}].content",
                    code="unsupported_content",
                )
            parts.append(part.text)
    body = "".join(parts).encode("utf-8", "replace")
    for call in message.tool_calls or []:
        body += b"\nTool call: " + bytes(call)
    return body


def _bytes_to_ids(data: bytes) -> TokenArray:
    return np.frombuffer(data, dtype=np.uint8).astype(np.int32)


def _special(token: Special) -> TokenArray:
    return np.array([token], dtype=np.int32)
