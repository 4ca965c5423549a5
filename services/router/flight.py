"""One request on its way through the router, and the record that it becomes."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.identity import Identity
from services.router.placement import Candidate
from services.router.upstream import Usage
from shared.messages import Outcome, RequestDone


class Flight:
    """Filled in as the request goes on; times are cluster seconds, 0.0 for what has not happened."""

    def __init__(self, rid: str, t_arrive: float, key: str = "") -> None:
        self.rid = rid
        self.request_id = rid  # the client's own name for it, echoed
        self.key = key
        self.tenant = ""
        self.salt = ""
        self.branch = ""
        self.identity: Identity | None = None
        self.t_arrive = t_arrive
        self.prompt_tokens = 0
        self.prefill_node = ""
        self.decode_node = ""
        self.candidates: Sequence[Candidate] = ()
        self.predicted_ttft_s = 0.0
        self.to_pull = (
            0  # tokens of KV that the decode node will lack, as guessed when the prefill was placed
        )
        self.t_prefill_start = 0.0
        self.t_prefill_end = 0.0
        self.t_first_token = 0.0
        self.cached_tokens = 0
        self.fetched_tokens = 0
        self.restored_tokens = 0
        self.usage = Usage()
        self.outcome = Outcome.FAILED
        self.error = ""
        self.trace_headers: list[tuple[bytes, bytes]] = []
        self.kept_at = ""  # URL of the prefill node, as long as it keeps the request's pages

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
            output_tokens=self.usage.output,
            decode_iterations=self.usage.decode_iterations,
            prefill_node=self.prefill_node,
            decode_node=self.decode_node,
            error=self.error,
            predicted_ttft_s=self.predicted_ttft_s,
            key=self.key,
            kind=self.identity.kind.value if self.identity is not None else "",
        )
