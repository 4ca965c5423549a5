"""The load test's HTTP client: an OpenAI-compatible server, its streams, and the cluster behind it.

Rules that hold here
- Times are wall seconds. Every call has a timeout; connections are bounded.
- A stream counts as answered when it ended with a finish reason or `[DONE]` and its usage; anything else is a
  RequestFailed whose reason is short enough to count by.
- A request that was turned away (429, 503 with Retry-After) or found no connection is sent again, a bounded
  number of times, later each time. A request that got any other answer is not.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Mapping
from types import TracebackType
from urllib.parse import quote

import aiohttp
import msgspec

RETRIES = 6
FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 15.0
CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 10.0
_MAX_EVENT_BYTES = 16 << 20


_ABSENT = msgspec.Raw(b"")


class ServerError(Exception):
    """The server cannot be used at all; the text is one line for the operator."""


class RequestFailed(Exception):
    """One request got no full answer; the text is its reason, alike for alike failures."""


class ModelEntry(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    page_size: int | None = None


class _Models(msgspec.Struct):
    data: list[ModelEntry]


class NodeEntry(msgspec.Struct):
    node: str
    phase: str
    url: str = ""


class Cluster(msgspec.Struct):
    """What the load test reads of `GET /ei/v1/cluster`."""

    speedup: float = 1.0
    page_size: int | None = None
    nodes: list[NodeEntry] = []
    split: dict[str, int] = {}
    switches: int | None = None  # since the router started; None from one that does not count


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = _ABSENT


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


class Answer(msgspec.Struct):
    """A finished request. Seconds are wall seconds from its first sending, waits before retries included.

    cached_tokens: None when the server does not say. token_ids: empty when it does not send them.
    """

    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    token_ids: list[int]
    retries: int = 0


_chunk_decoder = msgspec.json.Decoder(_Chunk)
_error_decoder = msgspec.json.Decoder(_ErrorBody)


class _Turned(Exception):
    """Turned away; `wait_s` is what the server asked for."""

    def __init__(self, reason: str, wait_s: float) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Client:
    """Use as an async context manager. `timeout_s`: of one request, wall seconds."""

    def __init__(self, url: str, *, connections: int, timeout_s: float, api_key: str = "") -> None:
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/").removesuffix("/v1")
        self._connections = connections
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self.retries = 0
        self.cluster_refused = False  # the server has one, and does not show it to this key

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=1 << 18,
            headers=self._headers,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is not open")
        return self._session

    async def models(self) -> list[ModelEntry]:
        """Raises ServerError when there is no OpenAI-compatible server at the URL."""
        try:
            status, body = await self._get("/v1/models")
        except aiohttp.InvalidURL:
            raise ServerError(f"{self._url}: is not a URL (like http://127.0.0.1:8000)") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerError(
                f"{self._url}: no server answers ({_short(error)}); is the router up?"
            ) from None
        if status != 200:
            raise ServerError(f"{self._url}/v1/models: HTTP {status}: {_error_text(body)}")
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except msgspec.DecodeError as error:
            raise ServerError(
                f"{self._url}/v1/models: not the answer of an OpenAI-compatible server ({error})"
            ) from None
        if not models:
            raise ServerError(f"{self._url}: serves no model yet; are the workers up?")
        return models

    async def cluster(self) -> Cluster | None:
        """None when the server is no Evolving Infra router, or does not answer now."""
        try:
            status, body = await self._get("/ei/v1/cluster")
            self.cluster_refused = status in (401, 403)
            return msgspec.json.decode(body, type=Cluster) if status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            return None

    async def node_metrics(self, url: str) -> str | None:
        """A worker's `/metrics`; None when it cannot be reached from here."""
        timeout = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S)
        try:
            async with self._http.get(url + "/metrics", timeout=timeout) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    async def end_branch(self, branch: str) -> None:
        """Best effort: a server without branches is fine."""
        timeout = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S)
        url = f"{self._url}/v1/branches/{quote(branch, safe='')}"
        try:
            async with self._http.delete(url, timeout=timeout):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass

    async def _get(self, path: str) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S)
        async with self._http.get(self._url + path, timeout=timeout) as response:
            return response.status, await response.read()

    async def complete(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """One streamed completion. Raises RequestFailed."""
        sent = time.monotonic()
        for attempt in range(RETRIES + 1):
            try:
                answer = await self._stream(body, headers, sent)
                answer.retries = attempt
                return answer
            except _Turned as turned:
                if attempt == RETRIES:
                    raise RequestFailed(str(turned)) from None
                self.retries += 1
                backoff_s = FIRST_BACKOFF_S * 2**attempt
                await asyncio.sleep(min(LONGEST_BACKOFF_S, max(turned.wait_s, backoff_s)))
            except TimeoutError:
                raise RequestFailed("timeout") from None
            except (aiohttp.ClientError, OSError) as error:
                raise RequestFailed(f"connection: {type(error).__name__}") from None
        raise AssertionError("unreachable")

    async def _stream(self, body: bytes, headers: Mapping[str, str], sent: float) -> Answer:
        try:
            response = await self._http.post(
                self._url + "/v1/completions",
                data=io.BytesIO(body),
                headers={**headers, "Content-Type": "application/json", "Content-Length": str(len(body))},
            )
        except aiohttp.ClientConnectorError as error:
            raise _Turned(f"connection: {type(error).__name__}", 0.0) from None
        async with response:
            if response.status != 200:
                text = await response.read()
                reason = f"HTTP {response.status}: {_error_kind(text)}"
                retry_after = response.headers.get("Retry-After")
                if response.status in (429, 503) and retry_after is not None:
                    raise _Turned(reason, _seconds(retry_after))
                raise RequestFailed(reason)
            return await _read_stream(response.content, sent)


async def _read_stream(content: aiohttp.StreamReader, sent: float) -> Answer:
    first_s: float | None = None
    usage: _Usage | None = None
    token_ids: list[int] = []
    finished = False
    pending = b""
    async for data in content.iter_any():
        *lines, pending = (pending + data).split(b"\n")
        if len(pending) > _MAX_EVENT_BYTES:
            raise RequestFailed("stream: an event without end")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                finished = True
                continue
            try:
                chunk = _chunk_decoder.decode(event)
            except msgspec.DecodeError:
                raise RequestFailed("stream: an event that is no completion chunk") from None
            if bytes(chunk.error) not in (b"", b"null"):
                raise RequestFailed(f"stream: {_error_kind(event)}")
            for choice in chunk.choices:
                if first_s is None and (choice.text or choice.token_ids):
                    first_s = time.monotonic() - sent
                if choice.token_ids:
                    token_ids += choice.token_ids
                finished = finished or choice.finish_reason is not None
            usage = chunk.usage or usage
    if not finished:
        raise RequestFailed("stream: ended early")
    if usage is None:
        raise RequestFailed("stream: without usage")
    end_s = time.monotonic() - sent
    details = usage.prompt_tokens_details
    return Answer(
        ttft_s=end_s if first_s is None else first_s,
        e2e_s=end_s,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=details.cached_tokens if details is not None else None,
        token_ids=token_ids,
    )


def _seconds(retry_after: str) -> float:
    """Retry-After also may be a date: then the backoff alone decides."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return 0.0


def _short(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.strerror:
        return error.os_error.strerror
    return str(error) or type(error).__name__


def _error_text(body: bytes) -> str:
    try:
        return _error_decoder.decode(body).error.message[:200]
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace").replace("\n", " ")


def _error_kind(body: bytes) -> str:
    """The error's code or type, which are alike for alike errors; else its text."""
    try:
        error = _error_decoder.decode(body).error
    except msgspec.DecodeError:
        return _error_text(body)[:80]
    return str(error.code or error.type or error.message[:80])
