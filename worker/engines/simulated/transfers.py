"""Pages that come from a peer: to host memory for a prefill while it waits, to GPU memory for a decode.

Rules that hold here
- A PREFILL fetches the pages that its node lacks, up to page `source.last`, into host memory (section 4.2).
- A GENERATE pulls every prompt page that its node's GPUs lack, those in its own host memory too (Appendix D.6:
  a decode node only writes to host memory), and the tokens of the partial last page.
- A peer that cannot be asked, or holds less, means that the rest is recomputed, never that it is waited for.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.timing import Profile
from worker.engines.simulated.phase import Kind
from worker.engines.simulated.requests import LookupWanted, Request, Source

TRANSFER_LATENCY_S = 0.005


class Lost(NamedTuple):
    """Tokens that a peer did not have after all, and why."""

    reason: str  # peer_failed, peer_missing
    tokens: int


def transfer_s(profile: Profile, tokens: int) -> float:
    """Seconds that the KV of `tokens` tokens takes from one node's memory to another's."""
    return TRANSFER_LATENCY_S + tokens * profile.kv_bytes_per_token / profile.link_bytes_per_s


def usable_tokens(request: Request, pages: int, page_size: int) -> int:
    """Cached tokens of a prompt with `pages` leading pages held: its last token is always computed."""
    return min(pages * page_size, request.prompt - 1)


def begin(request: Request, profile: Profile, t: float) -> LookupWanted:
    """Start the transfer of a request with a source, of which the node holds `local_pages`."""
    assert request.source is not None
    prompt_pages = request.prompt // profile.page_size
    last = prompt_pages if request.kind is Kind.GENERATE else min(request.source.last, prompt_pages)
    first = request.local_pages
    if request.kind is Kind.GENERATE:
        # With no page left to ask for, the last one is: it tells whether the peer is there to give the tail.
        first = max(0, min(first, prompt_pages - 1))
    else:
        request.cached = usable_tokens(request, last, profile.page_size)
    request.source = Source(request.source.url, last)
    request.lookup_from = first
    request.ready = False
    request.pull_t = t
    request.ready_t = t + transfer_s(profile, (last - first) * profile.page_size)
    return LookupWanted(request, request.source.url, request.path[first:last])


def answered(request: Request, held: int | None, profile: Profile, now: float) -> Lost:
    """The peer holds the first `held` pages that it was asked for; None when it cannot be used.

    Sets `fetched` and `ready_t` of the request, and `computed` of a GENERATE to what it will have then.
    """
    assert request.source is not None
    wanted, page = request.source.last, profile.page_size
    reason = "peer_missing"
    if held is None:
        held, reason = 0, "peer_failed"
    complete = reason != "peer_failed" and request.lookup_from + held >= wanted
    last = max(request.local_pages, min(wanted, request.lookup_from + held))
    request.fetched = (last - request.local_pages) * page
    moved, lost = request.fetched, (wanted - last) * page
    if request.kind is Kind.GENERATE:
        assert request.lease is not None
        moved += request.lease.restored_pages * page
        if complete:
            moved += request.prompt - last * page
            request.computed = request.prompt
        else:
            request.computed = usable_tokens(request, last, page)
        lost = request.prompt - request.computed
    request.ready_t = now
    if moved or complete:
        request.ready_t = max(now, request.pull_t + transfer_s(profile, moved))
    return Lost(reason, lost)
