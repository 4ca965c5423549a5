"""A conversation as the engine sees it, whatever API it came by.

Rules that hold here
- What the APIs say alike is alike here, so that the same conversation has the same token ids in each: tools are
  a name, a description and a schema; a call is a name and JSON; a call's id, cache marks and the like are left
  out.
- JSON that the engine writes and JSON that comes back from a client, which may have parsed it and written it
  anew, have one form: compact, keys in their order.
"""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from shared.openai import ApiError, read_json


class Role(Enum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Text(NamedTuple):
    text: str


class Thought(NamedTuple):
    """What the assistant thought before it spoke."""

    text: str


class ToolCall(NamedTuple):
    name: str
    arguments: bytes  # of `canonical`, or what else the client sent


class Image(NamedTuple):
    digest: bytes


Piece = Text | Thought | ToolCall | Image


class Turn(NamedTuple):
    role: Role
    pieces: list[Piece]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Text))


class Tool(NamedTuple):
    name: str
    text: bytes  # how it stands in the prompt
    schema: object  # of its arguments


class Conversation(NamedTuple):
    """`open`: the last turn is the assistant's, and the answer goes on with it."""

    turns: list[Turn]
    tools: list[Tool]
    open: bool = False


class Choice(NamedTuple):
    """What a client wants of the tools: `none`, `auto` or `required`, or the one of that name."""

    mode: str = "auto"
    name: str = ""


_tools_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_value_decoder = msgspec.json.Decoder()


def canonical(data: bytes | str | msgspec.Raw) -> bytes:
    """The one form of that JSON; what is no JSON stays as it is, nothing becomes an empty object."""
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else bytes(data)
    try:
        return msgspec.json.encode(_value_decoder.decode(raw)) if raw.strip() else b"{}"
    except (msgspec.DecodeError, msgspec.MsgspecError, ValueError, RecursionError):
        return raw


def image(source: str) -> Image:
    """`source` is its URL; data is a `data:` URL in every API."""
    return Image(blake2b(source.encode("utf-8", "replace"), digest_size=32).digest())


def image_of_url(raw: msgspec.Raw, name: str) -> Image:
    """OpenAI's ways to give an image: a URL, or an object with one. Raises ApiError 400."""
    value = read_json(_value_decoder, raw, name) if bytes(raw) else None
    if isinstance(value, dict):
        value = value.get("url")
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{name} has no image_url.", param=name)
    return image(value)


def unsupported(name: str, kind: str) -> ApiError:
    return ApiError(
        400,
        f"{name} is of type {kind!r}: this engine does not read that.",
        param=name.partition("].")[0] + "].content" if "]." in name else name,
        code="unsupported_content",
    )


def tools_of(raw: bytes | msgspec.Raw) -> list[Tool]:
    """Tools as any of the APIs lists them. Raises ApiError 400."""
    if bytes(raw).strip() in (b"", b"null"):
        return []
    try:
        listed = _tools_decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"tools are not a list: {error}", param="tools") from None
    return [
        _tool(read_json(_value_decoder, each, f"tools[{at}]"), f"tools[{at}]")
        for at, each in enumerate(listed)
    ]


def _tool(value: object, where: str) -> Tool:
    if not isinstance(value, dict):
        raise ApiError(400, f"{where} must be an object.", param=where)
    kind = value.get("type")
    if kind is not None and not isinstance(kind, str):
        raise ApiError(400, f"{where}.type must be a string.", param=f"{where}.type")
    inner = value.get(kind) if kind in ("function", "custom") else None
    if inner is not None:
        if not isinstance(inner, dict):
            raise ApiError(400, f"{where}.{kind} must be an object.", param=f"{where}.{kind}")
        value, where = inner, f"{where}.{kind}"
    name, schema = value.get("name"), value.get("parameters", value.get("input_schema"))
    if kind not in (None, "function", "custom"):
        # A tool that a provider runs itself: it stands in the prompt and is never called here.
        text = msgspec.json.encode({key: field for key, field in value.items() if key != "cache_control"})
        return Tool(name if isinstance(name, str) else "", text, schema)
    if not isinstance(name, str) or not name:
        raise ApiError(400, f"{where}.name must be a string.", param=f"{where}.name")
    if schema is not None and not isinstance(schema, dict):
        field = "parameters" if "parameters" in value else "input_schema"
        raise ApiError(400, f"{where}.{field} must be an object.", param=f"{where}.{field}")
    described = {"name": name, "description": value.get("description"), "parameters": schema}
    text = msgspec.json.encode({key: field for key, field in described.items() if field is not None})
    return Tool(name, text, schema or {})


def choice_of(raw: bytes | msgspec.Raw, tools: list[Tool]) -> Choice:
    """`tool_choice` of any of the APIs. Raises ApiError 400 for what cannot be met."""
    if bytes(raw).strip() in (b"", b"null"):
        return Choice()
    value = read_json(_value_decoder, raw, "tool_choice")
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        inner = value.get("allowed_tools", value)
        value = inner.get("mode") if isinstance(inner, dict) else None
    mode = value.get("type") if isinstance(value, dict) else value
    choice: Choice
    if mode in ("auto", "none"):
        choice = Choice(mode)
    elif mode in ("required", "any"):
        choice = Choice("required")
    elif isinstance(value, dict) and mode in ("function", "custom", "tool"):
        inner = value.get(mode)
        name = (inner if isinstance(inner, dict) else value).get("name")
        choice = Choice("required", name if isinstance(name, str) else "")
        if not any(tool.name == choice.name for tool in tools):
            raise ApiError(
                400, f"tool_choice names {choice.name!r}, which is not in tools.", param="tool_choice"
            )
    else:
        raise ApiError(
            400, f"tool_choice {msgspec.json.encode(value).decode()} is unknown.", param="tool_choice"
        )
    if choice.mode == "required" and not any(tool.name for tool in tools):
        raise ApiError(400, "tool_choice asks for a call and there are no tools.", param="tool_choice")
    return choice
