"""OpenAI's completions, and what their answers share with those of chats.

Log probabilities are made up: a function of the token and its place.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import msgspec

from worker.engines.simulated.forms import Form, event
from worker.engines.simulated.text import Answer, Delta, Part


class OpenAiForm(Form):
    """Frames with choices."""

    prefix: ClassVar[str]
    name: ClassVar[str]
    chunk_name: ClassVar[str]

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, object]:
        """A whole answer."""

    @abstractmethod
    def deltas(self, index: int, found: list[Delta], *, first: bool, done: bool) -> list[dict[str, object]]:
        """The choices of as many chunks; the last one of an answer that is `done` says why it ended."""

    @abstractmethod
    def no_delta(self, index: int) -> dict[str, object]:
        """A chunk's choice that brings no text."""

    def whole(self, iterations: int) -> bytes:
        choices = []
        for index, answer in enumerate(self.job.answers):
            choice = self.choice(index, answer)
            if self.job.options.token_ids:
                choice["token_ids"] = answer.ids.tolist()
            choices.append(choice)
        return msgspec.json.encode(self._frame(choices, self.name) | {"usage": self.usage(iterations)})

    def chunk(self, produced: int) -> bytes:
        sent: list[dict[str, object]] = []
        for index, cursor in enumerate(self.cursors):
            had, size = cursor.tokens, cursor.answer.ids.size
            now, produced = min(produced, size), max(0, produced - size)
            if now > had:
                choices = self.deltas(index, cursor.advance(now), first=not had, done=now == size)
                if self.job.options.token_ids:
                    choices = choices or [self.no_delta(index)]
                    for choice in choices:
                        choice["token_ids"] = []
                    choices[-1]["token_ids"] = cursor.answer.ids[had:now].tolist()
                sent += choices
        return b"".join([event(self._streamed([choice])) for choice in sent])

    def end(self, iterations: int) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self.job.options.with_usage:
            return self.comment(iterations) + done
        return event(self._frame([], self.chunk_name) | {"usage": self.usage(iterations)}) + done

    def _streamed(self, choices: list[dict[str, object]]) -> dict[str, object]:
        frame = self._frame(choices, self.chunk_name)
        return frame | {"usage": None} if self.job.options.with_usage else frame

    def _frame(self, choices: list[dict[str, object]], name: str) -> dict[str, object]:
        return {
            "id": self.prefix + self.rid,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class CompletionForm(OpenAiForm):
    prefix, name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, answer: Answer) -> dict[str, object]:
        parts = [part for part in answer.parts if part.kind == "text"]
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs([(part, 0, len(part.data)) for part in parts]),
            "finish_reason": answer.finish,
        }

    def deltas(self, index: int, found: list[Delta], *, first: bool, done: bool) -> list[dict[str, object]]:
        shown = [delta for delta in found if delta.part.kind == "text"]
        text = "".join(delta.text for delta in shown)
        if not (text or first or done):
            return []
        logprobs = self._logprobs([(delta.part, delta.start, delta.stop) for delta in shown])
        finish = self.job.answers[index].finish if done else None
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}]

    def no_delta(self, index: int) -> dict[str, object]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def _logprobs(self, spans: list[tuple[Part, int, int]]) -> dict[str, object] | None:
        top = self.job.options.logprobs
        if top is None:
            return None
        places = [(part, at) for part, start, stop in spans for at in range(start, stop)]
        entries = [_ranked(part.data[at], part.at + at, top) for part, at in places]
        return {
            "tokens": [_token(part.data[at]) for part, at in places],
            "token_logprobs": [logprob for logprob, _ in entries],
            "top_logprobs": [{_token(byte): value for byte, value in tops} for _, tops in entries]
            if top
            else None,
            "text_offset": [len(part.data[:at].decode("utf-8", "ignore")) for part, at in places],
        }


def logprob_entry(byte: int, place: int, top: int) -> dict[str, object]:
    """The entry of a chat's logprobs for a token, with `top` alternatives."""
    logprob, ranked = _ranked(byte, place, top)
    entry: dict[str, object] = {"token": _token(byte), "bytes": [byte], "logprob": logprob}
    tops = [{"token": _token(other), "bytes": [other], "logprob": value} for other, value in ranked]
    return entry | {"top_logprobs": tops}


def _ranked(byte: int, place: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """A token's log probability, and the likeliest tokens there, itself first."""
    best = -((byte * 31 + place * 17) % 97 + 1) / 200
    ranked = [(byte, best)]
    other = 97 + (byte + place) % 26
    while len(ranked) < top:
        if other != byte:
            ranked.append((other, best - 0.75 * len(ranked)))
        other = 97 + (other - 96) % 26
    return best, ranked[:top]


def _token(byte: int) -> str:
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"
