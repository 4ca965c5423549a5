"""Text to token ids and back, and the chat template, of the simulated engine.

Rules that hold here
- Ids 0 to 255 are the bytes of UTF-8 text; the special tokens of the template follow. Any id below
  VOCABULARY may stand in a prompt given as ids.
- The template only appends: rendering turns t1..tn gives a prefix of rendering t1..tn, tn+1 without its
  generation prompt, so an agent's next step shares the pages of its last one. An answer sent back as an
  assistant's turn, its thoughts and tool calls too, continues the very ids that were generated.
- The same input always gives the same ids, in whichever API it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from hashlib import shake_128

import numpy as np
import numpy.typing as npt

from shared.openai import ApiError, TokenArray
from worker.engines.simulated.conversation import Conversation, Image, Piece, Role, Text, Thought, ToolCall

VOCABULARY = 131_072
IMAGE_TOKENS = 64  # an image's pseudo-tokens, beside the special one before them
_IMAGE_IDS = 1024  # the first id that they may have


class Special(IntEnum):
    """Special tokens; `BOS` begins a chat, `END` a message's end, `EOS` the end of an output.

    A thought stands between `THINK` and `THOUGHT`, a tool call is `CALL` name `ARGUMENTS` JSON.
    """

    BOS = 256
    SYSTEM = 257
    USER = 258
    ASSISTANT = 259
    TOOL = 260
    END = 261
    EOS = 262
    THINK = 263
    THOUGHT = 264
    CALL = 265
    ARGUMENTS = 266
    IMAGE = 267


_ROLES = {
    Role.SYSTEM: Special.SYSTEM,
    Role.USER: Special.USER,
    Role.ASSISTANT: Special.ASSISTANT,
    Role.TOOL: Special.TOOL,
}


def encode(text: str) -> TokenArray:
    """int32[bytes of the text in UTF-8]; a lone surrogate becomes `?`."""
    return byte_ids(text.encode("utf-8", "replace"))


def byte_ids(data: bytes) -> TokenArray:
    """int32[bytes of the data]."""
    return np.frombuffer(data, dtype=np.uint8).astype(np.int32)


def decode(ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
    """The text of the byte ids; other ids have none and are left out."""
    array = np.asarray(ids, dtype=np.int64)
    return array[(array >= 0) & (array < 256)].astype(np.uint8).tobytes().decode("utf-8", "replace")


def check_ids(ids: TokenArray) -> None:
    """Raises ApiError 400 for an id that is not in the vocabulary."""
    if ids.size and (int(ids.max()) >= VOCABULARY or int(ids.min()) < 0):
        raise ApiError(400, f"prompt holds a token id outside 0 to {VOCABULARY - 1}.", param="prompt")


def render(conversation: Conversation) -> TokenArray:
    """The ids of a conversation up to where the assistant begins, or goes on, to speak."""
    turns = conversation.turns
    tools = b"Tools:\n" + b"\n".join(tool.text for tool in conversation.tools) if conversation.tools else b""
    ids = [_special(Special.BOS)]
    if tools and (not turns or turns[0].role is not Role.SYSTEM):
        ids += [_special(Special.SYSTEM), byte_ids(tools), _special(Special.END)]
        tools = b""
    for turn in turns:
        ids.append(_special(_ROLES[turn.role]))
        ids += [piece_ids(piece) for piece in turn.pieces]
        if tools:
            ids.append(byte_ids(b"\n" + tools))
            tools = b""
        ids.append(_special(Special.END))
    if conversation.open:
        ids.pop()
    else:
        ids.append(_special(Special.ASSISTANT))
    return np.concatenate(ids)


def piece_ids(piece: Piece) -> TokenArray:
    """The ids of one piece of a turn, in a prompt as in an answer."""
    match piece:
        case Text(text):
            return encode(text)
        case Thought(text):
            return np.concatenate([_special(Special.THINK), encode(text), _special(Special.THOUGHT)])
        case ToolCall(name, arguments):
            return np.concatenate(
                [_special(Special.CALL), encode(name), _special(Special.ARGUMENTS), byte_ids(arguments)]
            )
        case Image(digest):
            made_up = np.frombuffer(shake_128(digest).digest(4 * IMAGE_TOKENS), dtype="<u4")
            ids = (made_up % (VOCABULARY - _IMAGE_IDS) + _IMAGE_IDS).astype(np.int32)
            return np.concatenate([_special(Special.IMAGE), ids])


def _special(token: Special) -> TokenArray:
    return np.array([token], dtype=np.int32)
