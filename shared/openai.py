"""The part of OpenAI's API that routers and engines both read: errors, and the few request fields they need.

Nothing here knows a whole request: fields that are not listed pass through untouched.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
MOVED = "X-EI-Moved"  # on a 503: this node does not serve the phase any more, another one does
Kind = Literal["chat", "completion"]


class ApiError(Exception):
    """An error for the client, in OpenAI's shape."""

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
        return found | {MOVED: "1"} if self.code == "moved" else found


_ABSENT = msgspec.Raw(b"")
_NOTHING = (b"", b"null", b"[]", b'""')


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Call(msgspec.Struct):
    """What placement needs of a request; `prompt` and `messages` stay raw JSON until a tokenizer reads them."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    prompt: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT

    @property
    def output_limit(self) -> int | None:
        """Largest number of output tokens, None when the client set none."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


_call_decoder = msgspec.json.Decoder(Call)
_ids_decoder = msgspec.json.Decoder(list[int])


def parse_call(body: bytes, kind: Kind) -> Call:
    """Read a chat or completion request.

    Raises ApiError 400 for JSON that is none, fields of the wrong type, and values that no engine takes.
    """
    try:
        call = _call_decoder.decode(body)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else None
        raise ApiError(400, f"The request body is not valid: {error}", param=field) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}") from None
    except UnicodeDecodeError:
        raise ApiError(400, "The request body is not UTF-8.") from None
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.") from None
    if not call.model:
        raise ApiError(400, "You must give a model.", param="model", code="missing_model")
    limit = call.output_limit
    if limit is not None and limit < 1:
        name = "max_completion_tokens" if call.max_completion_tokens is not None else "max_tokens"
        raise ApiError(400, f"{name} must be at least 1, not {limit}.", param=name, code="invalid_value")
    if call.n is not None and call.n < 1:
        raise ApiError(400, f"n must be at least 1, not {call.n}.", param="n", code="invalid_value")
    if kind == "chat" and bytes(call.messages).strip() in _NOTHING:
        raise ApiError(400, "messages must hold at least one message.", param="messages")
    if kind == "completion" and bytes(call.prompt).strip() in _NOTHING:
        raise ApiError(400, "You must give a prompt.", param="prompt")
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
        decoded = _ids_decoder.decode(text)
        ids = np.fromiter(decoded, dtype=np.int64, count=len(decoded))
    except (msgspec.DecodeError, OverflowError, RecursionError):
        raise ApiError(
            400, "prompt must be a string or a list of token ids (integers).", param="prompt"
        ) from None
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**31):
        raise ApiError(400, "prompt holds a token id below 0 or above 2147483647.", param="prompt")
    return ids.astype(np.int32)


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
