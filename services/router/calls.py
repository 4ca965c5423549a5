"""What the router reads of a client's request, whatever API it uses: the few fields that routing needs.

Rules that hold here
- A body is decoded once, into `Call`; fields that are not listed are not looked at and go to the engine as they came.
- Every API has its own names for the same things (`max_tokens`, `max_output_tokens`, `sampling_params`): what is
  asked here (`output_limit`, `choices`, `prompt_ids`) has one name.
- Only what routing needs is refused here, in the shape of the API's errors; the rest is the engine's business.
"""

from __future__ import annotations

import zlib
from enum import StrEnum

import msgspec

from services.router.claims import Hints
from shared.openai import ApiError, TokenArray, prompt_ids, read_json

MOST_CHOICES = 128
MOST_MEMBERS = 16
BYTES_A_TOKEN = 12  # of an id in JSON, at most
_ABSENT = msgspec.Raw(b"")
_NOTHING = (b"", b"null", b"[]", b'""')


class Api(StrEnum):
    """The APIs whose requests are split in prefill and decode; the value is the path."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    GENERATE = "/generate"


class _Sampling(msgspec.Struct):
    max_new_tokens: int | None = None
    n: int | None = None


class Call(Hints):
    model: str = ""
    stream: bool | None = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    prompt: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT
    input_ids: msgspec.Raw = _ABSENT
    sampling_params: _Sampling | None = None

    @property
    def output_limit(self) -> int | None:
        """Largest number of output tokens of a choice, None when the client set none."""
        if self.sampling_params is not None and self.sampling_params.max_new_tokens is not None:
            return self.sampling_params.max_new_tokens
        for limit in (self.max_completion_tokens, self.max_output_tokens, self.max_tokens):
            if limit is not None:
                return limit
        return None

    @property
    def choices(self) -> int:
        """Answers that are wanted."""
        if self.n is not None:
            return self.n
        wanted = self.sampling_params.n if self.sampling_params is not None else None
        return 1 if wanted is None else wanted


_decoder = msgspec.json.Decoder(Call)
_WHAT = {  # the field that holds the prompt, and what to say without it
    Api.CHAT: ("messages", "messages must hold at least one message."),
    Api.COMPLETION: ("prompt", "You must give a prompt."),
    Api.RESPONSES: ("input", "You must give an input."),
    Api.MESSAGES: ("messages", "messages must hold at least one message."),
}
_LIMIT_NAMES = ("max_completion_tokens", "max_output_tokens", "max_tokens")


def read_call(body: bytes, api: Api) -> Call:
    """Raises ApiError 400 for JSON that is none, fields of the wrong type, and requests without model or prompt."""
    if not body.strip():
        raise ApiError(400, "The request body is empty; send a JSON object.")
    call = read_json(_decoder, body)
    if not call.model and api is not Api.GENERATE:
        raise ApiError(400, "You must give a model.", param="model", code="missing_model")
    limit = call.output_limit
    if limit is not None and limit < (0 if api is Api.GENERATE else 1):
        name = next(
            (name for name in _LIMIT_NAMES if getattr(call, name) == limit), "sampling_params.max_new_tokens"
        )
        raise ApiError(400, f"{name} must be at least 1, not {limit}.", param=name, code="invalid_value")
    if not 1 <= call.choices <= MOST_CHOICES:
        raise ApiError(
            400, f"n must be 1 to {MOST_CHOICES}, not {call.choices}.", param="n", code="invalid_value"
        )
    if api is Api.GENERATE:
        if bytes(call.text).strip() in _NOTHING and bytes(call.input_ids).strip() in _NOTHING:
            raise ApiError(400, "You must give text or input_ids.", param="text")
    else:
        field, text = _WHAT[api]
        if bytes(getattr(call, field)).strip() in _NOTHING:
            raise ApiError(400, text, param=field)
    return call


def ids_given(call: Call, api: Api, max_context: int) -> TokenArray | None:
    """int32[n] when the client sent token ids; None when a worker has to tokenize. Raises ApiError 400, also for more
    than `max_context` ids.
    """
    given = call.prompt if api is Api.COMPLETION else call.input_ids if api is Api.GENERATE else _ABSENT
    size = memoryview(given).nbytes
    if size > BYTES_A_TOKEN * max_context and bytes(memoryview(given)[:64]).lstrip(b" \t\r\n[")[:1].isdigit():
        raise ApiError(
            400,
            f"This model's maximum context length is {max_context} tokens; the prompt has more.",
            param="prompt",
            code="context_length_exceeded",
        )
    if bytes(given).strip() in _NOTHING:
        return None
    return prompt_ids(given)


def plain_body(body: bytes, encoding: str, limit: int) -> bytes:
    """A request's body without its content encoding (gzip or deflate), at most `limit` bytes.

    Raises ApiError 415 for another encoding, 413 for what is too large, 400 for bytes that are not in it.
    """
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case "gzip" | "x-gzip" | "deflate":
            plain = b""
            for _ in range(MOST_MEMBERS):  # gzip may come in several; each copies what follows it
                unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # either header
                try:
                    plain += unpacker.decompress(body, limit + 1 - len(plain))
                except zlib.error as error:
                    raise ApiError(
                        400, f"The request body is not in {encoding}: {error}", code="unreadable_body"
                    ) from None
                if len(plain) > limit:
                    raise ApiError(
                        413, f"The request body is too large: more than {limit} bytes.", code="body_too_large"
                    )
                if not unpacker.eof:
                    raise ApiError(400, f"The request body's {encoding} is cut off.", code="unreadable_body")
                body = unpacker.unused_data
                if not body:
                    break
            else:
                raise ApiError(
                    400,
                    f"The request body has more than {MOST_MEMBERS} gzip members.",
                    code="unreadable_body",
                )
            return plain
        case _:
            raise ApiError(
                415,
                f"Content-Encoding {encoding!r} is not known here: send gzip, deflate or none.",
                code="unsupported_encoding",
            )
