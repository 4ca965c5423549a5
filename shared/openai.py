"""The part of the APIs that routers and engines both read: errors, and the few request fields they need.

OpenAI's chat completions, completions and responses, Anthropic's messages, SGLang's own generate. Nothing here
knows a whole request: fields that are not listed pass through untouched.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
MOVED = "X-EI-Moved"  # on a 503: this node does not serve the phase any more, another one does
Kind = Literal["chat", "completion", "messages", "responses", "generate"]
PATHS: dict[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/generate": "generate",
}
GENERATE_TOKENS = 128  # SGLang's limit where a call of /generate sets none


class ApiError(Exception):
    """An error for the client, in OpenAI's terms; `shared.api_errors` shapes it for the others."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.param, self.code, self.retry_after_s = param, code, retry_after_s

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after_s is None else {"Retry-After": str(max(1, round(self.retry_after_s)))}
        if self.code == "moved":
            found[MOVED] = "1"
        if self.code == "deadline_exceeded":
            found["x-should-retry"] = (
                "false"  # else OpenAI's and Anthropic's clients begin it again, and again
            )
        return found


_ABSENT = msgspec.Raw(b"")
_NOTHING = (b"", b"null", b"[]", b'""')


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Call(msgspec.Struct):
    """What placement needs of a request; what makes up the prompt stays raw JSON until a tokenizer reads it.

    `max_tokens` is the limit on the output, whatever the API calls it.
    """

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    prompt: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    tool_choice: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _ABSENT  # messages
    input: msgspec.Raw = _ABSENT  # responses, as the next one
    instructions: msgspec.Raw = _ABSENT
    text: msgspec.Raw = (
        _ABSENT  # generate: the prompt, if it is not `input_ids`; responses: the output's format
    )
    input_ids: msgspec.Raw = _ABSENT

    @property
    def output_limit(self) -> int | None:
        """Largest number of output tokens, None when the client set none."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class _Responses(msgspec.Struct):
    max_output_tokens: int | None = None
    previous_response_id: str | None = None


class _SamplingParams(msgspec.Struct):
    max_new_tokens: int | None = None


class _Generate(msgspec.Struct):
    sampling_params: _SamplingParams | None = None


_call_decoder = msgspec.json.Decoder(Call)
_responses_decoder = msgspec.json.Decoder(_Responses)
_generate_decoder = msgspec.json.Decoder(_Generate)
_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]])

# The fields that make up the prompt, of which one must be there, and what is said when none is.
_PROMPTS: dict[Kind, tuple[tuple[str, ...], str]] = {
    "chat": (("messages",), "messages must hold at least one message."),
    "completion": (("prompt",), "You must give a prompt."),
    "messages": (("messages",), "messages must hold at least one message."),
    "responses": (("input",), "You must give an input."),
    "generate": (("text", "input_ids"), "You must give text or input_ids."),
}

Read = TypeVar("Read")


def read_json(decoder: msgspec.json.Decoder[Read], data: bytes | msgspec.Raw, name: str = "") -> Read:
    """Decode the body, or the field `name` of it. Raises ApiError 400."""
    what = f"{name} is" if name else "The request body is"
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else None
        raise ApiError(400, f"{what} not valid: {error}", param=name or field) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"{what} not valid JSON: {error}", param=name or None) from None
    except UnicodeDecodeError:
        raise ApiError(400, f"{what} not UTF-8.", param=name or None) from None
    except RecursionError:
        raise ApiError(400, f"{what} nested too deeply.", param=name or None) from None


def parse_call(body: bytes, kind: Kind, *, counting: bool = False) -> Call:
    """Read a request of that API; with `counting` nothing is to be generated for it.

    Raises ApiError 400 for JSON that is none, fields of the wrong type, and values that no engine takes.
    """
    call = read_json(_call_decoder, body)
    limit_name = "max_tokens"
    if kind == "responses":
        asked = read_json(_responses_decoder, body)
        call.max_tokens, call.max_completion_tokens = asked.max_output_tokens, None
        limit_name = "max_output_tokens"
        if asked.previous_response_id:
            raise ApiError(
                400,
                "Responses are not stored here, so there is no previous_response_id to go on from: send the whole "
                "conversation as input.",
                param="previous_response_id",
                code="unsupported_parameter",
            )
    elif kind == "generate":
        params = read_json(_generate_decoder, body).sampling_params
        limit = params.max_new_tokens if params is not None else None
        call.max_tokens, call.max_completion_tokens = GENERATE_TOKENS if limit is None else limit, None
        limit_name = "max_new_tokens"
    elif call.max_completion_tokens is not None:
        limit_name = "max_completion_tokens"
    if not call.model and kind != "generate":
        raise ApiError(400, "You must give a model.", param="model", code="missing_model")
    limit = call.output_limit
    if limit is None and kind == "messages" and not counting:
        raise ApiError(400, "max_tokens: Field required", param="max_tokens")
    if limit is not None and limit < 1 and not counting:
        raise ApiError(
            400, f"{limit_name} must be at least 1, not {limit}.", param=limit_name, code="invalid_value"
        )
    if call.n is not None and call.n < 1:
        raise ApiError(400, f"n must be at least 1, not {call.n}.", param="n", code="invalid_value")
    fields, missing = _PROMPTS[kind]
    if all(bytes(getattr(call, field)).strip() in _NOTHING for field in fields):
        raise ApiError(400, missing, param=fields[0])
    return call


def prompt_ids(prompt: bytes | msgspec.Raw) -> TokenArray | None:
    """Token ids of a completion's `prompt` when it is a list of ids (or a list of one such list), else None.

    Raises ApiError 400 for a list of another kind, an id out of range, and more than one prompt.
    """
    text = bytes(prompt).strip()
    if not text.startswith(b"["):
        return None
    inner = text[1:].lstrip()
    if inner.startswith(b'"'):
        return None
    if inner.startswith(b"["):
        text = inner[: inner.rfind(b"]")].rstrip()
        if b"[" in text[1:]:
            raise ApiError(
                400, "One request takes one prompt; send several requests for several.", param="prompt"
            )
    try:
        return np.array(_ids_decoder.decode(text), dtype=np.int32)
    except msgspec.ValidationError as error:
        if "<=" in str(error) or ">=" in str(error):
            raise ApiError(
                400, "prompt holds a token id below 0 or above 2147483647.", param="prompt"
            ) from None
        raise ApiError(
            400, "prompt must be a string or a list of token ids (integers).", param="prompt"
        ) from None
    except (msgspec.DecodeError, RecursionError):
        raise ApiError(
            400, "prompt must be a string or a list of token ids (integers).", param="prompt"
        ) from None


def prompt_text(prompt: bytes | msgspec.Raw) -> str:
    """Text of a completion's `prompt` given as a string or a list of one string; ApiError 400 otherwise."""
    try:
        value = msgspec.json.decode(bytes(prompt))
    except msgspec.DecodeError as error:
        raise ApiError(400, f"prompt is not valid JSON: {error}", param="prompt") from None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise ApiError(400, "prompt must be a string or a list of token ids.", param="prompt")
    return value


def check_length(tokens: int, max_context: int) -> None:
    """Raise ApiError 400 when a prompt of `tokens` leaves no room for one output token, or is empty."""
    if tokens == 0:
        raise ApiError(400, "The prompt is empty.", param="prompt")
    if tokens >= max_context:
        raise ApiError(
            400,
            f"This model's maximum context length is {max_context} tokens; the prompt has {tokens}.",
            param="prompt",
            code="context_length_exceeded",
        )


def unknown_model(model: str, known: list[str]) -> ApiError:
    return ApiError(
        404,
        f"The model {model!r} does not exist here (served: {', '.join(known) or 'none yet'}).",
        param="model",
        code="model_not_found",
    )
