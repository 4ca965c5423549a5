"""What the simulated engine says: made-up text that depends on the prompt alone, or what it is told to say.

Rules that hold here
- Token i of an answer is a function of (digest of the prompt's tokens, i), so a stream and its repetition
  agree, on every node. A temperature above 0 with a seed mixes the seed in.
- One token is one byte that the client reads, or a special token around it. Made-up text is lower-case words in
  blocks of BLOCK tokens.
- Made-up text ends by itself after MIN_TOKENS to MAX_TOKENS tokens unless the request forbids it.
- The ids of an answer are those of its rendering as an assistant's turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np

from shared.openai import TokenArray
from worker.engines.simulated.conversation import Piece, Text, Thought, ToolCall
from worker.engines.simulated.tokenizer import Special, byte_ids, piece_ids

BLOCK = 64
MIN_TOKENS = 32
MAX_TOKENS = 256

FinishReason = Literal["stop", "length", "tool_calls"]

_VOCABULARY = (
    "the a an of to and in on at by with from into over under after before between read write open close test "
    "build check find list call send wait hold move copy count file line page path tree leaf node branch root "
    "token batch queue cache host peer link clock phase plan split agent tool shell patch change review commit "
    "small large quick slow first last next old new warm cold full empty exact safe plain clear open ready done "
    "is was runs stays grows keeps makes takes gives shows needs holds returns starts stops fails passes merges "
    "value key name type field error result answer reason step turn task case loop table index score limit"
)
_WORDS = _VOCABULARY.split()


class Part(NamedTuple):
    """A run of an answer's tokens that a client sees as one thing."""

    kind: Literal["reason", "text", "call"]
    at: int  # the token that stands for data[0], if there is any
    end: int  # tokens of the answer with which it is complete
    data: bytes  # what the client reads, UTF-8: token at + i for data[i], without a stop string
    name: str = ""  # of a call, as the next one
    key: str = ""  # what its id is made of

    @property
    def text(self) -> str:
        return self.data.decode()


class Answer(NamedTuple):
    """The whole answer to a prompt."""

    ids: TokenArray  # every token that is generated, at least one
    parts: tuple[Part, ...]
    finish: FinishReason
    stopped_by: str | None = None  # the stop string that ended it

    def part_text(self, kind: Literal["reason", "text"]) -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def text(self) -> str:
        return self.part_text("text")

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.kind == "call"]


class Delta(NamedTuple):
    """What a client learns of a part: the bytes from `start` to `stop` of its data."""

    place: int  # of the part among the answer's
    part: Part
    start: int
    stop: int
    begins: bool
    ends: bool

    @property
    def text(self) -> str:
        return self.part.data[self.start : self.stop].decode()


class Cursor:
    """How much of an answer a stream has told."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.tokens = 0
        self._part = 0  # the first one that is not told whole
        self._begun = False  # it was
        self._bytes = 0  # and so many bytes of it

    @property
    def done(self) -> bool:
        return self.tokens >= self.answer.ids.size

    def advance(self, tokens: int) -> list[Delta]:
        """What is new when the answer has `tokens` tokens; characters that are not whole wait."""
        self.tokens = tokens
        found: list[Delta] = []
        while self._part < len(self.answer.parts):
            part = self.answer.parts[self._part]
            if tokens < part.at + (part.kind != "call"):  # a call begins with its name, which stands before
                break
            stop, ends = _whole(part.data, tokens - part.at), tokens >= part.end
            if not self._begun or ends or stop > self._bytes:
                found.append(Delta(self._part, part, self._bytes, stop, not self._begun, ends))
            self._begun, self._bytes = True, stop
            if not ends:
                break
            self._part, self._begun, self._bytes = self._part + 1, False, 0
        return found


def prompt_seed(tokens: TokenArray, seed: int | None = None) -> bytes:
    """16 bytes that stand for the prompt (and the client's seed, when its temperature uses one)."""
    digest = blake2b(tokens.tobytes(), digest_size=16)
    if seed is not None:
        digest.update(b"seed" + str(seed).encode())
    return digest.digest()


def choice_seed(seed: bytes, number: int) -> bytes:
    """The seed of a request's choice `number`; the first one's is the request's own."""
    return blake2b(seed + number.to_bytes(4, "little"), digest_size=16).digest() if number else seed


def answer(seed: bytes, limit: int, *, ignore_eos: bool = False, stop: Sequence[str] = ()) -> Answer:
    """Made-up text of at most `limit` tokens, cut after the first of the `stop` strings.

    With `ignore_eos` it has exactly `limit` tokens, unless a stop string comes.
    """
    natural = MIN_TOKENS + int.from_bytes(seed[:4], "little") % (MAX_TOKENS - MIN_TOKENS + 1)
    tokens = limit if ignore_eos else min(limit, natural)
    text = words(seed, tokens)
    shown, said, stopped_by = _stopped(text, stop)
    part = Part("text", 0, len(said), shown.encode())
    finish: FinishReason = "length" if (ignore_eos or limit <= natural) and stopped_by is None else "stop"
    return Answer(byte_ids(said.encode()), (part,), finish, stopped_by)


def words(seed: bytes, characters: int) -> str:
    """The first `characters` of the made-up text."""
    return "".join(_block(seed, at) for at in range(-(-characters // BLOCK)))[:characters]


def scripted(seed: bytes, pieces: Sequence[Piece], limit: int, *, stop: Sequence[str] = ()) -> Answer:
    """An answer of those pieces, cut after `limit` tokens and after the first of the `stop` strings in a text."""
    ids: list[TokenArray] = []
    parts: list[Part] = []
    at, stopped_by = 0, None
    for piece in pieces:
        match piece:
            case Thought(text):
                part = Part("reason", at + 1, 0, text.encode("utf-8", "replace"))
            case ToolCall(name, arguments):
                key = blake2b(seed + len(parts).to_bytes(4, "little"), digest_size=12).hexdigest()
                part = Part("call", at + 2 + len(name.encode("utf-8", "replace")), 0, arguments, name, key)
            case Text(text):
                shown, said, stopped_by = _stopped(text, stop)
                part, piece = Part("text", at, 0, shown.encode("utf-8", "replace")), Text(said)
            case _:
                raise TypeError(f"an answer holds no {type(piece).__name__}")
        ids.append(piece_ids(piece))
        at += ids[-1].size
        if at > part.at or part.kind == "call":
            parts.append(part._replace(end=at))
        if stopped_by is not None:
            break
    if not at:  # the end of its turn, as it will stand in the next prompt
        ids, parts = [np.array([Special.END], dtype=np.int32)], [Part("text", 0, 1, b"")]
    every = np.concatenate(ids)
    finish: FinishReason = "tool_calls" if any(part.kind == "call" for part in parts) else "stop"
    if every.size > limit:
        cut = [
            part._replace(end=min(part.end, limit), data=part.data[: _whole(part.data, limit - part.at)])
            for part in parts
            if limit >= part.at + (part.kind != "call")
        ]
        return Answer(every[:limit], tuple(cut), "length")
    return Answer(every, tuple(parts), finish, stopped_by)


def _stopped(text: str, stop: Sequence[str]) -> tuple[str, str, str | None]:
    """What the client reads, what is generated, and the stop string that ended it."""
    ends = [(at + len(word), at, word) for word in stop if word and (at := text.find(word)) >= 0]
    if not ends:
        return text, text, None
    end, shown, word = min(ends)
    return text[:shown], text[:end], word


def _whole(data: bytes, size: int) -> int:
    """The largest number up to `size` of leading bytes that are whole characters."""
    size = min(size, len(data))
    while 0 < size < len(data) and data[size] & 0xC0 == 0x80:
        size -= 1
    return max(size, 0)


@lru_cache(maxsize=4096)
def _block(seed: bytes, at: int) -> str:
    """BLOCK characters: words with a blank after each, the last one cut to fit."""
    picks = blake2b(seed + at.to_bytes(4, "little"), digest_size=BLOCK // 2).digest()
    return " ".join(_WORDS[pick % len(_WORDS)] for pick in picks)[: BLOCK - 1] + " "
