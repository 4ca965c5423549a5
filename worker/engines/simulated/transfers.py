"""Pages that come from a peer, for a prefill while it waits or for a decode: what to ask for, how long it takes.

Rules that hold here
- A PREFILL fetches the pages that its node lacks, up to page `source.last`, and none when they are fewer than the
  profile's least fetch (section 4.2, Appendix E.3: 512 tokens).
- A GENERATE pulls the prompt pages that its node lacks, and the tokens of the partial last page. Those in its host
  memory it has; they cost as much time as if they came over the link, but nobody waits for a batch that stands still
  (Appendix D.6).
- A peer that cannot be asked, or holds less, means that the rest is recomputed, never that it is waited for.
- A transfer takes as long as the profile's link says, or as long as it really took when that was more.
"""

from __future__ import annotations

from shared.timing import Profile
from worker.engines.simulated.phase import Kind
from worker.engines.simulated.requests import FetchWanted, Request, Source

TRANSFER_LATENCY_S = 0.005


def transfer_s(profile: Profile, tokens: int) -> float:
    """Seconds that the KV of `tokens` tokens takes from one node's memory to another's."""
    return TRANSFER_LATENCY_S + tokens * profile.kv_bytes_per_token / profile.link_bytes_per_s


def usable_tokens(request: Request, pages: int, page_size: int) -> int:
    """Cached tokens of a prompt with `pages` leading pages held: its last token is always computed."""
    return min(pages * page_size, request.prompt - 1)


def begin(request: Request, profile: Profile, t: float) -> FetchWanted | None:
    """Start the transfer of a request of which the node holds `local_pages`; None when nothing is to come."""
    assert request.source is not None
    page = profile.page_size
    prompt_pages = request.prompt // page
    pulls = request.kind is Kind.GENERATE
    last = prompt_pages if pulls else min(request.source.last, prompt_pages)
    path = request.path[request.local_pages : max(last, request.local_pages)]
    tokens = len(path) * page
    if pulls:
        path = path.plus(request.tail)
        tokens = request.prompt - request.local_pages * page
        if request.lease is not None:
            tokens += request.lease.restored_pages * page
    elif tokens < profile.fetch.min_tokens:
        return None
    else:
        request.cached = usable_tokens(request, last, page)
    if not len(path):
        return None
    request.source = Source(request.source.url, last)
    request.ready = False
    request.pull_t = t
    request.ready_t = t + transfer_s(profile, tokens)
    return FetchWanted(request, request.source.url, path, pulls and len(request.tail) > 0)


def came(request: Request, pages: int, reason: str, profile: Profile, now: float) -> None:
    """The first `pages` of the pages asked for are here; sets when the request has them."""
    request.lost = reason
    request.fetched = pages * profile.page_size
    request.ready_t = now
    if pages:
        tokens = request.fetched
        if request.lease is not None:
            tokens += request.lease.restored_pages * profile.page_size
        request.ready_t = max(now, request.pull_t + transfer_s(profile, tokens))
