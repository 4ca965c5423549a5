"""What workers answer: their errors as ours, and the usage at an answer's end."""

from __future__ import annotations

import re

import msgspec

from shared.openai import ApiError


class Moved(Exception):
    """The node did not take or finish the work; another one should."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one answer; `decode_iterations` is 0 when the engine does not say."""

    output: int = 0
    decode_iterations: int = 0


class _ErrorText(msgspec.Struct):
    message: str = ""
    type: str = "server_error"
    param: str | None = None
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorText


def relayed(status: int, body: bytes) -> ApiError:
    """A worker's error as our own."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = _ErrorText(message=body[:200].decode(errors="replace") or f"a worker answered {status}")
    return ApiError(
        status,
        error.message,
        type=error.type,
        param=error.param,
        code=None if error.code is None else str(error.code),
    )


_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens)":\s*(\d{1,9})')
_ITERATIONS = re.compile(rb'"decode_iterations":\s*(\d{1,9})')


def usage_in(tail: bytes) -> Usage:
    """What the end of an answer says last, in any API's names; zeros when it says nothing."""
    return Usage(_last(_OUTPUT, tail), _last(_ITERATIONS, tail))


def _last(pattern: re.Pattern[bytes], text: bytes) -> int:
    found = pattern.findall(text)
    return int(found[-1]) if found else 0
