"""One request on its way through the router, and the record that it becomes."""

from __future__ import annotations

import aiohttp
import msgspec

from services.router.upstream import Usage
from shared.messages import Outcome, RequestDone


class Flight(msgspec.Struct):
    """Filled in as the request goes on; times are cluster seconds, 0.0 for what has not happened."""

    rid: str
    branch: str
    t_arrive: float
    prompt_tokens: int
    prefill_node: str = ""
    decode_node: str = ""
    t_prefill_start: float = 0.0
    t_prefill_end: float = 0.0
    t_first_token: float = 0.0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    restored_tokens: int = 0
    usage: Usage = Usage()
    outcome: Outcome = Outcome.FAILED
    error: str = ""
    prefilled: aiohttp.ClientResponse | None = None  # open as long as the prefill node is to keep the pages

    def let_pages_go(self) -> None:
        """The decode node has what it needs of the prefill node, or nobody will ask for it."""
        if self.prefilled is not None:
            self.prefilled.close()
            self.prefilled = None

    def record(self, t_end: float) -> RequestDone:
        return RequestDone(
            rid=self.rid,
            branch=self.branch,
            outcome=self.outcome,
            t_arrive=self.t_arrive,
            t_prefill_start=self.t_prefill_start,
            t_prefill_end=self.t_prefill_end,
            t_first_token=self.t_first_token,
            t_end=t_end,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            fetched_tokens=self.fetched_tokens,
            restored_tokens=self.restored_tokens,
            output_tokens=self.usage.completion_tokens,
            decode_iterations=self.usage.decode_iterations,
            prefill_node=self.prefill_node,
            decode_node=self.decode_node,
            error=self.error,
        )
