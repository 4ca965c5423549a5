"""Every error of an HTTP handler in the shape of the API that the client uses: what routers and engines answer.

Rules that hold here
- The path alone chooses the shape: Anthropic's below /v1/messages, OpenAI's everywhere else.
- An error in mid-stream is one event, whole; who writes it ends a line that is cut off before it.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from shared.openai import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ANTHROPIC = "/v1/messages"
_RESPONSES = "/v1/responses"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Whether clients of that path expect Anthropic's shape."""
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")


def new_request_id() -> str:
    """What Anthropic's clients show of a call, from the header `request-id` and from errors."""
    return "req_" + uuid.uuid4().hex


def error_body(error: ApiError, path: str, request_id: str = "") -> bytes:
    """The JSON of an error for a client of the API at `path`; `request_id` is made up where it is needed."""
    if not is_anthropic(path):
        return error.body()
    kind = _ANTHROPIC_TYPES.get(error.status)
    if kind is None:
        # A call that was aborted (499) is no mistake of its sender.
        kind = "api_error" if error.status >= 499 else "invalid_request_error"
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # by these words harnesses know that they must compact
    return msgspec.json.encode(
        {
            "type": "error",
            "error": {"type": kind, "message": message},
            "request_id": request_id or new_request_id(),
        }
    )


def error_event(error: ApiError, path: str, sequence_number: int = 0) -> bytes:
    """The event that ends a stream of the API at `path`; `sequence_number` is its place in one of responses."""
    if path == _RESPONSES:
        value = {
            "type": "error",
            "code": error.code or error.type,
            "message": error.message,
            "param": error.param,
            "sequence_number": sequence_number,
        }
        return b"event: error\ndata: " + msgspec.json.encode(value) + b"\n\n"
    name = b"event: error\n" if is_anthropic(path) else b""
    return name + b"data: " + error_body(error, path) + b"\n\n"


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns `ApiError`, and aiohttp's own refusals, into their JSON answers."""
    try:
        return await handler(request)
    except ApiError as error:
        failed = error
    except web.HTTPNotFound:
        failed = ApiError(404, f"There is no {request.method} {request.path} here.", code="unknown_url")
    except web.HTTPMethodNotAllowed:
        failed = ApiError(405, f"{request.path} does not take {request.method}.", code="method_not_allowed")
    except web.HTTPRequestEntityTooLarge as large:
        failed = ApiError(413, f"The request body is too large: {large.text}", code="body_too_large")
    except (HttpProcessingError, web.RequestPayloadError) as unreadable:
        failed = ApiError(400, f"The request body cannot be read: {unreadable}", code="unreadable_body")
    headers, request_id = failed.headers(), ""
    if is_anthropic(request.path):
        request_id = headers["request-id"] = new_request_id()
    return web.Response(
        body=error_body(failed, request.path, request_id),
        status=failed.status,
        headers=headers,
        content_type="application/json",
    )
