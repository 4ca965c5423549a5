"""Calls to workers: what failed, what an answer's tail says, who tokenizes.

Rules that hold here
- A worker that cannot be reached is reported to `Cluster.suspect`; the caller decides where to try next.
- A worker's error becomes an `ApiError` with its own words.
"""

from __future__ import annotations

import aiohttp
import msgspec

from services.router.cluster import Cluster
from shared.log import get_logger
from shared.openai import ApiError

TOKENIZE_TIMEOUT_S = 30.0
NETWORK_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)
log = get_logger("router")


class Moved(Exception):
    """The node did not take or finish the work; another one should."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one answer; `decode_iterations` is 0 when the engine does not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    decode_iterations: int = 0


_usage_decoder = msgspec.json.Decoder(Usage)


async def ask_any(
    cluster: Cluster, http: aiohttp.ClientSession, model: str, path: str, body: bytes, accept: str
) -> tuple[int, str, bytes]:
    """Status, content type and body of a POST to the least busy worker of the model that answers.

    Raises ApiError 503 when three of them do not.
    """
    nodes = [node for node in cluster.live() if node.info.model == model]
    nodes.sort(key=lambda node: len(node.prefills) + len(node.decodes))
    for node in nodes[:3]:
        try:
            async with http.post(
                node.info.url + path,
                data=body,
                headers={"Accept": accept or "application/json", "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=TOKENIZE_TIMEOUT_S, sock_connect=3.0),
            ) as answer:
                return answer.status, answer.content_type, await answer.read()
        except NETWORK_ERRORS as error:
            cluster.suspect(node.info.node)
            log.warning("ask_failed", node=node.info.node, path=path, error=error)
    raise ApiError(
        503, f"No worker can serve {path} right now.", type="server_error", code="no_worker", retry_after_s=1
    )


class _ErrorText(msgspec.Struct):
    message: str = ""
    type: str = "server_error"
    param: str | None = None
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorText


def relayed(status: int, body: bytes) -> ApiError:
    """A worker's error as our own."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        error = _ErrorText(message=body[:200].decode(errors="replace") or f"a worker answered {status}")
    return ApiError(status, error.message, type=error.type, param=error.param, code=error.code)


def usage_in(tail: bytes) -> Usage:
    """The usage object near the end of an answer; zeros when it has none."""
    at = max(tail.rfind(b'"usage":{'), tail.rfind(b'"usage": {'))
    if at < 0:
        return Usage()
    start = tail.index(b"{", at)
    depth = 0
    for i in range(start, len(tail)):
        if tail[i] == 0x7B:
            depth += 1
        elif tail[i] == 0x7D:
            depth -= 1
            if depth == 0:
                try:
                    return _usage_decoder.decode(tail[start : i + 1])
                except msgspec.DecodeError:
                    return Usage()
    return Usage()
