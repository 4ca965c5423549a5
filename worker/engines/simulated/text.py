"""What the simulated engine says: text that depends on the prompt alone.

Rules that hold here
- Token i of an answer is a function of (digest of the prompt's tokens, i), so a stream and its repetition
  agree, on every node. A temperature above 0 with a seed mixes the seed in.
- One token is one printable ASCII byte. The text is lower-case words in blocks of BLOCK tokens.
- An answer ends by itself after MIN_TOKENS to MAX_TOKENS tokens unless the request forbids it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, NamedTuple

from shared.openai import TokenArray

BLOCK = 64
MIN_TOKENS = 32
MAX_TOKENS = 256

FinishReason = Literal["stop", "length"]

_VOCABULARY = (
    "the a an of to and in on at by with from into over under after before between read write open close test "
    "build check find list call send wait hold move copy count file line page path tree leaf node branch root "
    "token batch queue cache host peer link clock phase plan split agent tool shell patch change review commit "
    "small large quick slow first last next old new warm cold full empty exact safe plain clear open ready done "
    "is was runs stays grows keeps makes takes gives shows needs holds returns starts stops fails passes merges "
    "value key name type field error result answer reason step turn task case loop table index score limit"
)
_WORDS = _VOCABULARY.split()


class Answer(NamedTuple):
    """The whole answer to a prompt."""

    ids: bytes  # one token a byte: every token that is generated
    text: str  # what the client reads: without the stop string
    finish: FinishReason


def prompt_seed(tokens: TokenArray, seed: int | None = None) -> bytes:
    """16 bytes that stand for the prompt (and the client's seed, when its temperature uses one)."""
    digest = blake2b(tokens.tobytes(), digest_size=16)
    if seed is not None:
        digest.update(b"seed" + str(seed).encode())
    return digest.digest()


def answer(seed: bytes, limit: int, *, ignore_eos: bool = False, stop: Sequence[str] = ()) -> Answer:
    """The answer of at most `limit` tokens, cut after the first of the `stop` strings.

    With `ignore_eos` it has exactly `limit` tokens, unless a stop string comes.
    """
    natural = MIN_TOKENS + int.from_bytes(seed[:4], "little") % (MAX_TOKENS - MIN_TOKENS + 1)
    tokens = limit if ignore_eos else min(limit, natural)
    text = "".join(_block(seed, at) for at in range(-(-tokens // BLOCK)))[:tokens]
    finish: FinishReason = "length" if ignore_eos or limit <= natural else "stop"
    ends = [(at + len(word), at) for word in stop if word and (at := text.find(word)) >= 0]
    if ends:
        end, shown = min(ends)
        return Answer(text[:end].encode(), text[:shown], "stop")
    return Answer(text.encode(), text, finish)


@lru_cache(maxsize=4096)
def _block(seed: bytes, at: int) -> str:
    """BLOCK characters: words with a blank after each, the last one cut to fit."""
    picks = blake2b(seed + at.to_bytes(4, "little"), digest_size=BLOCK // 2).digest()
    return " ".join(_WORDS[pick % len(_WORDS)] for pick in picks)[: BLOCK - 1] + " "
