"""What the shapes of all APIs' answers have in common.

Rules that hold here
- A stream's deltas put together equal the text of the same request without streaming.
- A stream that goes through a router ends with the usage in a comment, which clients pass over: the router
  accounts every stream, in whatever API, asked for usage or not.
- Choices follow one another: the first one's tokens are produced before the second one's.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import msgspec

from shared.openai import TokenArray
from worker.engines.simulated.text import Answer, Cursor


class Options(msgspec.Struct):
    """What a request says of how to answer."""

    stop: list[str] = []
    temperature: float | None = None
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    token_ids: bool = False  # whether the client wants the output's ids
    logprobs: int | None = None  # with so many alternatives
    json_schema: object = None  # of the answer, None when it may be any text
    with_usage: bool = False  # in a stream


class Job(msgspec.Struct):
    """A request that can run: its prompt, and the answers that it will get."""

    tokens: TokenArray
    answers: list[Answer]
    room_tokens: int  # most output tokens that it may need KV for
    options: Options

    @property
    def output_tokens(self) -> int:
        return sum(answer.ids.size for answer in self.answers)


class Form(ABC):
    """The bytes of one answer, whole or in chunks."""

    def __init__(
        self, rid: str, model: str, job: Job, cached_tokens: int, body: bytes, *, routed: bool
    ) -> None:
        self.rid, self.model, self.job, self.cached, self.body = rid, model, job, cached_tokens, body
        self.created = int(time.time())
        self.routed = routed
        self.cursors = [Cursor(answer) for answer in job.answers]

    @property
    def answer(self) -> Answer:
        """The only answer, for the APIs that give one."""
        return self.job.answers[0]

    @abstractmethod
    def whole(self, iterations: int) -> bytes:
        """The answer of a request without streaming; `iterations` of decode it took."""

    @abstractmethod
    def chunk(self, produced: int) -> bytes:
        """The events that take the client from what it has to `produced` tokens."""

    @abstractmethod
    def end(self, iterations: int) -> bytes:
        """What follows the last chunk."""

    @property
    def events_sent(self) -> int:
        """For the APIs whose events have numbers."""
        return 0

    def usage(self, iterations: int) -> dict[str, object]:
        prompt, output = self.job.tokens.size, self.job.output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "decode_iterations": iterations,
        }

    @property
    def reasoning_tokens(self) -> int:
        return sum(
            part.end - part.at + 1
            for answer in self.job.answers
            for part in answer.parts
            if part.kind == "reason"
        )

    def comment(self, iterations: int) -> bytes:
        """The usage for a router; empty when none asked."""
        if not self.routed:
            return b""
        return b": " + msgspec.json.encode({"usage": self.usage(iterations)}) + b"\n\n"


def event(value: object, name: str = "") -> bytes:
    """One event of a stream."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"
