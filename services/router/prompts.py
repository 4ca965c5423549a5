"""A prompt's token ids and page hashes: given by the client, or from a worker's tokenizer.

Rules that hold here
- A worker gets the request as the client sent it, and answers with the ids after those of the conversation's last prompt
  only, if the new prompt begins with them (`tokens.py`).
- Any worker of the model may be asked; one that does not answer is reported to the cluster, and another one asked.
"""

from __future__ import annotations

import numpy as np

from services.router.answer import Headers
from services.router.calls import Api, Call, ids_given
from services.router.cluster import Cluster, NodeDown
from services.router.exchange import Exchange
from services.router.flight import Flight
from services.router.tokens import Known, TokenCache, head_keys
from services.router.upstream import relayed
from services.router.upstream_answer import BadAnswer, UpstreamError
from services.router.upstream_http import Upstream
from shared.log import get_logger
from shared.messages import NodeInfo, PageArray
from shared.openai import ApiError, TokenArray, check_length

CONNECT_S = 3.0
TOKENIZE_S = 30.0
MOST_BYTES = 2**28
# Headers that name one conversation.
_NAMES = ("x-ei-branch", "x-claude-code-agent-id", "thread-id", "x-dynamo-session-id", "x-session-id")
_NO_PAGES: PageArray = np.empty(0, dtype=np.int64)
log = get_logger("router")


class Prompts:
    def __init__(self, cluster: Cluster, upstream: Upstream, limit: int) -> None:
        """`limit`: tokens that are kept for next steps."""
        self.cache = TokenCache(limit)
        self._cluster, self._upstream = cluster, upstream

    async def read(self, exchange: Exchange, api: Api, call: Call, info: NodeInfo, flight: Flight) -> Known:
        """The prompt's ids and page hashes. A worker tokenizes what the client did not give as ids, and sends only what
        it appended to the last prompt of the conversation."""
        tokens = ids_given(call, api, info.max_context)
        if tokens is not None and tokens.size < info.page_size:  # not worth to be kept
            return Known(tokens, info.page_size, flight.salt, [], _NO_PAGES)
        space = flight.tenant.encode() + b"\0" + info.model.encode() + b"\0"
        keys = [space + name for name in self._conversation(exchange, call)]
        if tokens is None:
            known = self.cache.known(keys)
            headers: Headers = [
                (b"Content-Type", b"application/json"),
                (b"Accept", b"application/octet-stream"),
                (b"X-EI-Path", api.value.encode()),
            ]
            if known is not None:
                headers.append((b"X-EI-Known-Tokens", str(known.tokens.size).encode()))
                headers.append((b"X-EI-Known-Digest", known.digest.hex().encode()))
            tokens = await self._tokenized(info.model, headers, exchange.body, known)
        check_length(tokens.size, info.max_context)  # before it costs anything more
        return self.cache.prompt(keys, tokens, info.page_size, flight.salt)

    @staticmethod
    def _conversation(exchange: Exchange, call: Call) -> list[bytes]:
        headers = exchange.headers
        for name in _NAMES:
            if name in headers:
                return [headers[name].encode("utf-8", "replace")]
        prompt = bytes(call.messages) or bytes(call.input) or bytes(call.prompt) or bytes(call.input_ids)
        return head_keys(prompt or bytes(call.text))

    async def _tokenized(self, model: str, headers: Headers, body: bytes, known: Known | None) -> TokenArray:
        """The prompt's ids, from the least busy worker of the model that can tell.

        Raises ApiError: the worker's own for a prompt that is wrong, 503 when three of them cannot tell.
        """
        nodes = [node for node in self._cluster.live() if node.info.model == model]
        nodes.sort(key=lambda node: node.load)
        for node in nodes[:3]:
            if self._cluster.nodes.get(node.info.node) is not node:
                continue  # it left, or began anew, while another one was asked
            try:
                with node.calling():
                    answer = await self._upstream.request(
                        node.info.url, "POST", b"/v1/tokenize", headers, body,
                        connect_timeout_s=CONNECT_S, head_timeout_s=TOKENIZE_S,
                    )  # fmt: skip
                    with answer:
                        data = await answer.read(MOST_BYTES)
                        if answer.status == 200:
                            return _ids(data, answer.headers.get("x-ei-from", "0"), known)
                        if 400 <= answer.status < 500 and answer.status != 429:
                            raise relayed(answer.status, data)
                        log.info("cannot_tokenize", node=node.info.node, status=answer.status)
            except UpstreamError as error:
                self._cluster.failed(node.info.node)
                log.warning("tokenize_failed", node=node.info.node, error=error)
            except NodeDown:
                pass
        raise ApiError(
            503,
            "No worker can read the prompt right now.",
            type="server_error",
            code="no_worker",
            retry_after_s=1,
        )


def _ids(data: bytes, begin: str, known: Known | None) -> TokenArray:
    """Raises BadAnswer for what are no ids."""
    if len(data) % 4:
        raise BadAnswer("token ids of 4 bytes have another length")
    tokens = np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False)
    if tokens.size and int(tokens.min()) < 0:
        raise BadAnswer("a token id is below 0")
    if begin == "0":
        return tokens
    if known is None or begin != str(known.tokens.size):
        raise BadAnswer(f"ids from {begin!r} on were not asked for")
    return np.concatenate([known.tokens, tokens])
