"""What the simulated engine's API reads of a request, and the shape of its answers.

Rules that hold here
- A field that the engine cannot honour and that changes the answer is refused with 400; unknown ones are
  ignored, as an engine with a model ignores them.
- A stream's deltas put together equal the text of the same request without streaming.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from shared.openai import ApiError, Call, Kind, TokenArray, check_length, prompt_ids, prompt_text
from worker.engines.simulated import tokenizer
from worker.engines.simulated.text import MAX_TOKENS, Answer, answer, prompt_seed

FinishReason = Literal["stop", "length"]


class _Sampling(msgspec.Struct):
    stop: str | list[str] | None = None
    temperature: float | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False


_sampling_decoder = msgspec.json.Decoder(_Sampling)


class Job(msgspec.Struct):
    """A request that can run: its prompt, and the answer that it will get."""

    tokens: TokenArray
    answer: Answer
    room_tokens: int  # most output tokens that it may need KV for
    token_ids: bool  # whether the client wants the output's ids


def prompt_of(call: Call, kind: Kind) -> TokenArray:
    """Token ids of the prompt. Raises ApiError 400."""
    if kind == "chat":
        return tokenizer.render(call.messages, call.tools)
    ids = prompt_ids(call.prompt)
    if ids is None:
        return tokenizer.encode(prompt_text(call.prompt))
    tokenizer.check_ids(ids)
    return ids


def job_of(call: Call, kind: Kind, body: bytes, max_context: int) -> Job:
    """Raises ApiError 400 for what the engine cannot serve."""
    sampling = _read(body)
    tokens = prompt_of(call, kind)
    check_length(tokens.size, max_context)
    limit = call.output_limit
    room = max_context - tokens.size
    if limit is not None and limit > room:
        raise ApiError(
            400,
            f"This model's maximum context length is {max_context} tokens; the prompt has {tokens.size} and "
            f"max_tokens asks for {limit} more.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if limit is None and sampling.ignore_eos:
        raise ApiError(400, "ignore_eos needs max_tokens.", param="max_tokens")
    most = min(room, MAX_TOKENS) if limit is None else limit
    stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
    seed = sampling.seed if sampling.temperature else None
    said = answer(prompt_seed(tokens, seed), most, ignore_eos=sampling.ignore_eos, stop=stop)
    room_tokens = len(said.ids) if limit is None else limit
    return Job(tokens, said, room_tokens, sampling.return_token_ids)


def _read(body: bytes) -> _Sampling:
    try:
        sampling = _sampling_decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The request body is not valid: {error}") from None
    if (sampling.n or 1) != 1 or (sampling.best_of or 1) != 1:
        raise ApiError(400, "The simulated engine gives one choice: n and best_of must be 1.", param="n")
    # Completions take 0 logprobs as "those of the chosen tokens", chats false as none.
    if (sampling.logprobs is not None and sampling.logprobs is not False) or sampling.top_logprobs:
        raise ApiError(400, "The simulated engine has no log probabilities.", param="logprobs")
    if sampling.echo or sampling.suffix:
        name = "echo" if sampling.echo else "suffix"
        raise ApiError(400, f"The simulated engine does not support {name}.", param=name)
    if sampling.temperature is not None and not 0 <= sampling.temperature <= 2:
        raise ApiError(400, f"temperature must be 0 to 2, not {sampling.temperature}.", param="temperature")
    return sampling


class Form:
    """The JSON of one answer, whole or in chunks."""

    def __init__(
        self,
        kind: Kind,
        rid: str,
        model: str,
        job: Job,
        cached_tokens: int,
        *,
        with_usage: bool = False,
        routed: bool = False,
    ) -> None:
        self._kind, self._model, self._job, self._cached = kind, model, job, cached_tokens
        self._id = ("chatcmpl-" if kind == "chat" else "cmpl-") + rid
        self._created = int(time.time())
        self._with_usage = with_usage
        self._routed = routed
        self._sent = 0  # tokens

    def usage(self, iterations: int) -> dict[str, object]:
        prompt, output = self._job.tokens.size, len(self._job.answer.ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "decode_iterations": iterations,
        }

    def whole(self, iterations: int) -> bytes:
        """The answer of a request without streaming."""
        said = self._job.answer
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": said.finish}
        if self._kind == "chat":
            choice["message"] = {"role": "assistant", "content": said.text, "refusal": None}
        else:
            choice["text"] = said.text
        if self._job.token_ids:
            choice["token_ids"] = list(said.ids)
        return msgspec.json.encode(self._frame([choice], chunk=False) | {"usage": self.usage(iterations)})

    def chunk(self, produced: int, *, done: bool) -> bytes:
        """The event that takes the client from what it has to `produced` tokens; with `done` the last one."""
        said = self._job.answer
        text = said.text[self._sent : produced]
        choice: dict[str, object] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": said.finish if done else None,
        }
        if self._kind == "chat":
            delta: dict[str, object] = {} if self._sent else {"role": "assistant"}
            choice["delta"] = delta | ({"content": text} if text or not self._sent else {})
        else:
            choice["text"] = text
        if self._job.token_ids:
            choice["token_ids"] = list(said.ids[self._sent : produced])
        self._sent = produced
        frame = self._frame([choice], chunk=True)
        if self._with_usage:
            frame["usage"] = None
        return _event(frame)

    def end(self, iterations: int) -> bytes:
        """What follows the last chunk."""
        done = b"data: [DONE]\n\n"
        if not self._with_usage:
            # A comment, which clients pass over: the router accounts every stream, asked for usage or not.
            comment = msgspec.json.encode({"usage": self.usage(iterations)})
            return b": " + comment + b"\n\n" + done if self._routed else done
        return _event(self._frame([], chunk=True) | {"usage": self.usage(iterations)}) + done

    def _frame(self, choices: list[dict[str, object]], *, chunk: bool) -> dict[str, object]:
        name = "text_completion" if self._kind == "completion" else "chat.completion"
        if chunk and self._kind == "chat":
            name += ".chunk"
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
