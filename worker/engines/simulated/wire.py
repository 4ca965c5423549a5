"""What a request of any API asks of the simulated engine: its prompt, and the answer that it will get.

Rules that hold here
- A field that the engine cannot honour and that changes the answer is refused with 400; unknown ones are
  ignored, as an engine with a model ignores them.
- The answer is the script's next step if there is a script, else a tool call where one must be made, else JSON
  where that is asked for, else made-up text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from shared.openai import (
    ApiError,
    Call,
    Kind,
    TokenArray,
    check_length,
    prompt_ids,
    prompt_text,
    read_json,
)
from worker.engines.simulated import chat, messages, responses, schema, script, tokenizer
from worker.engines.simulated.completions import CompletionForm
from worker.engines.simulated.conversation import Choice, Conversation, Piece, Text, Tool, ToolCall, choice_of
from worker.engines.simulated.forms import Form, Job, Options
from worker.engines.simulated.native import NativeForm
from worker.engines.simulated.text import MAX_TOKENS, Answer, answer, choice_seed, prompt_seed, scripted

MAX_CHOICES = 128
MAX_LOGPROBS = 20

_CONVERSATIONS: dict[Kind, Callable[[Call], Conversation]] = {
    "chat": chat.conversation,
    "messages": messages.conversation,
    "responses": responses.conversation,
}
FORMS: dict[Kind, type[Form]] = {
    "chat": chat.ChatForm,
    "completion": CompletionForm,
    "messages": messages.MessagesForm,
    "responses": responses.ResponsesForm,
    "generate": NativeForm,
}


class Prompt(NamedTuple):
    tokens: TokenArray
    conversation: Conversation | None  # None for a prompt that is text or ids


# ------------------------------------------------------------------------------ the prompt


def prompt_of(call: Call, kind: Kind) -> Prompt:
    """Raises ApiError 400."""
    read = _CONVERSATIONS.get(kind)
    if read is not None:
        conversation = read(call)
        return Prompt(tokenizer.render(conversation), conversation)
    given = call.prompt
    if kind == "generate":
        by_ids = bytes(call.input_ids).strip() not in (b"", b"null")
        given = call.input_ids if by_ids else call.text
        if by_ids != bytes(given).strip().startswith(b"["):
            raise ApiError(
                400, "Send one prompt: text as a string, or input_ids as a list of integers.", param="text"
            )
    ids = prompt_ids(given)
    if ids is None:
        return Prompt(tokenizer.encode(prompt_text(given)), None)
    tokenizer.check_ids(ids)
    return Prompt(ids, None)


# ------------------------------------------------------------------------------ the options


class _Format(msgspec.Struct):
    type: str = "text"
    json_schema: msgspec.Raw = msgspec.Raw(b"")
    schema: msgspec.Raw = msgspec.Raw(b"")


class _TextConfig(msgspec.Struct):
    format: _Format | None = None


class _Common(msgspec.Struct):
    temperature: float | None = None
    seed: int | None = None
    ignore_eos: bool = False


class _OpenAi(_Common):
    stop: str | list[str] | None = None
    n: int | None = None
    best_of: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    response_format: _Format | None = None
    echo: bool = False
    suffix: str | None = None
    return_token_ids: bool = False


class _Messages(_Common):
    stop_sequences: list[str] | None = None
    output_config: _TextConfig | None = None


class _Responses(_Common):
    text: _TextConfig | None = None


class _SamplingParams(_Common):
    stop: str | list[str] | None = None


class _Native(msgspec.Struct):
    sampling_params: _SamplingParams | None = None


_openai_decoder = msgspec.json.Decoder(_OpenAi)
_messages_decoder = msgspec.json.Decoder(_Messages)
_responses_decoder = msgspec.json.Decoder(_Responses)
_native_decoder = msgspec.json.Decoder(_Native)
_value_decoder = msgspec.json.Decoder()


def options_of(call: Call, kind: Kind, body: bytes) -> Options:
    """Raises ApiError 400 for what the engine cannot do."""
    options = Options(with_usage=call.stream_options is not None and call.stream_options.include_usage)
    common: _Common
    match kind:
        case "messages":
            common = asked = read_json(_messages_decoder, body)
            options.stop = asked.stop_sequences or []
            options.json_schema = _format(asked.output_config, "output_config.format")
        case "responses":
            common = told = read_json(_responses_decoder, body)
            options.json_schema = _format(told.text, "text.format")
        case "generate":
            common = params = read_json(_native_decoder, body).sampling_params or _SamplingParams()
            options.stop = _stops(params.stop)
        case _:
            common = sampling = read_json(_openai_decoder, body)
            _openai(options, sampling, kind)
    options.temperature, options.seed, options.ignore_eos = common.temperature, common.seed, common.ignore_eos
    if common.temperature is not None and not 0 <= common.temperature <= 2:
        raise ApiError(400, f"temperature must be 0 to 2, not {common.temperature}.", param="temperature")
    return options


def _openai(options: Options, sampling: _OpenAi, kind: Kind) -> None:
    options.stop, options.n = _stops(sampling.stop), sampling.n or 1
    options.token_ids = sampling.return_token_ids
    if options.n > MAX_CHOICES:
        raise ApiError(400, f"n must be at most {MAX_CHOICES}, not {options.n}.", param="n")
    if (sampling.best_of or options.n) != options.n:
        raise ApiError(400, "The simulated engine cannot tell the best: best_of must be n.", param="best_of")
    if sampling.echo or sampling.suffix:
        name = "echo" if sampling.echo else "suffix"
        raise ApiError(400, f"The simulated engine does not support {name}.", param=name)
    # Completions take 0 logprobs as "those of the chosen tokens", chats false as none.
    wanted, top = sampling.logprobs, sampling.top_logprobs or 0
    if kind == "chat" and wanted is not None and not isinstance(wanted, bool):
        raise ApiError(400, "logprobs of a chat is true or false.", param="logprobs")
    if wanted is not None and wanted is not False:
        options.logprobs = top if wanted is True else wanted
    elif top:
        raise ApiError(400, "top_logprobs needs logprobs.", param="top_logprobs")
    if not 0 <= (options.logprobs or 0) <= MAX_LOGPROBS:
        name = "top_logprobs" if kind == "chat" else "logprobs"
        raise ApiError(400, f"{name} must be 0 to {MAX_LOGPROBS}.", param=name)
    if kind == "chat":
        options.json_schema = _format(_TextConfig(sampling.response_format), "response_format")


def _stops(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []


def _format(config: _TextConfig | None, name: str) -> object:
    """The schema that the answer must meet; None when it may be any text."""
    wanted = config.format if config is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object", "required": ["answer"]}
    if wanted.type != "json_schema":
        raise ApiError(400, f"{name}.type {wanted.type!r} is unknown.", param=name)
    # Chats have the schema in an object beside its name, the others right here.
    given = wanted.schema if bytes(wanted.schema) else wanted.json_schema
    value = read_json(_value_decoder, given, name) if bytes(given) else None
    if isinstance(value, dict) and not bytes(wanted.schema):
        value = value.get("schema")
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} has no schema.", param=name)
    return value


# ------------------------------------------------------------------------------ the job


def job_of(call: Call, kind: Kind, body: bytes, max_context: int) -> Job:
    """Raises ApiError 400 for what the engine cannot serve."""
    options = options_of(call, kind, body)
    prompt = prompt_of(call, kind)
    tokens = prompt.tokens
    check_length(tokens.size, max_context)
    limit, room = call.output_limit, max_context - tokens.size
    if limit is not None and limit > room:
        raise ApiError(
            400,
            f"This model's maximum context length is {max_context} tokens; the prompt has {tokens.size} and "
            f"max_tokens asks for {limit} more.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if limit is None and options.ignore_eos:
        raise ApiError(400, "ignore_eos needs max_tokens.", param="max_tokens")
    seed = prompt_seed(tokens, options.seed if options.temperature else None)
    pieces = _scripted_step(prompt)
    if prompt.conversation is not None:
        choice = choice_of(call.tool_choice, prompt.conversation.tools)
        if pieces is None:
            pieces = _asked_call(prompt.conversation.tools, choice, seed)
        elif choice.mode == "none":
            pieces = [piece for piece in pieces if not isinstance(piece, ToolCall)]
    answers = [_answer(choice_seed(seed, each), pieces, limit, room, options) for each in range(options.n)]
    produced = sum(said.ids.size for said in answers)
    return Job(tokens, answers, produced if limit is None else limit * options.n, options)


def _answer(
    seed: bytes, pieces: list[Piece] | None, limit: int | None, room: int, options: Options
) -> Answer:
    most = room if limit is None else limit
    if pieces is None and options.json_schema is not None:
        value = schema.example(options.json_schema, seed)
        pieces = [Text(msgspec.json.encode(value).decode())]
    if pieces is not None:
        return scripted(seed, pieces, most, stop=options.stop)
    most = min(room, MAX_TOKENS) if limit is None else limit
    return answer(seed, most, ignore_eos=options.ignore_eos, stop=options.stop)


def _scripted_step(prompt: Prompt) -> list[Piece] | None:
    if prompt.conversation is not None:
        step = script.step_of(prompt.conversation)
        return step.pieces() if step is not None else None
    step = script.step_of_text(tokenizer.decode(prompt.tokens)) if _may_hold_script(prompt.tokens) else None
    return step.pieces(text_only=True) if step is not None else None


def _may_hold_script(tokens: TokenArray) -> bool:
    """Whether the prompt has two `<` side by side; most prompts of a load test do not."""
    brackets = tokens == ord("<")
    return bool(np.any(brackets[1:] & brackets[:-1]))


def _asked_call(tools: list[Tool], choice: Choice, seed: bytes) -> list[Piece] | None:
    """The call that `tool_choice` demands."""
    if choice.mode != "required":
        return None
    callable_ = [tool for tool in tools if tool.name and choice.name in ("", tool.name)]
    return [ToolCall(callable_[0].name, msgspec.json.encode(schema.example(callable_[0].schema, seed)))]
