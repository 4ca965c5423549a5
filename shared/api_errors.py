"""Every error of an HTTP handler in OpenAI's shape: what routers and engines answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from shared.openai import ApiError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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
    return web.Response(
        body=failed.body(), status=failed.status, headers=failed.headers(), content_type="application/json"
    )
