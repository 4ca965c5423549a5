"""What the workers did with KV during a replay: the difference of their counters, read before and after.

Rules that hold here
- Best effort: workers that cannot be reached from here are left out, and without any there is no `KvWork`.
- A counter that is lower than before belongs to a worker that began anew: it counts from zero. What a worker did before
  it died is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from prometheus_client.parser import text_string_to_metric_families

Counters = Mapping[str, float]


class KvWork(msgspec.Struct, frozen=True):
    """Sums over the workers that were reached."""

    workers: int
    fetched_pages: int  # from other nodes
    fetched_bytes: int
    corrupt_pages: int  # bytes that had changed, on the way or in memory
    evicted_counted_pages: int  # from host memory, while an active branch referenced them
    evicted_uncounted_pages: int
    recomputed_tokens: dict[str, int]  # expected from a cache and computed, by reason
    fetch_s: float  # seconds of the trace that prefills' fetches took
    exposed_fetch_s: float  # and for how much of it they held a prefill up


def read_counters(text: str) -> dict[str, float]:
    """Counters of a worker's `/metrics`, by name and labels as Prometheus writes them. Raises ValueError."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type != "counter" or not family.name.startswith("ei_worker_"):
            continue
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("ei_worker_").removesuffix("_total") + f"{{{labels}}}"] = (
                sample.value
            )
    return found


def kv_work(before: Mapping[str, Counters], after: Mapping[str, Counters]) -> KvWork | None:
    """From the counters of each worker before and after; None when none of them could be read afterwards."""
    if not after:
        return None
    done = [_since(before.get(node, {}), counters) for node, counters in after.items()]

    def total(name: str) -> float:
        return sum(each.get(name, 0.0) for each in done)

    prefix = "recomputed_tokens{reason="
    reasons = sorted({name for each in done for name in each if name.startswith(prefix)})
    return KvWork(
        workers=len(done),
        fetched_pages=round(total("fetched_pages{}")),
        fetched_bytes=round(total("fetched_bytes{}")),
        corrupt_pages=round(total("fetch_corrupt_pages{}") + total("kv_corrupt_pages{}")),
        evicted_counted_pages=round(total("kv_evicted_pages{count=positive,tier=l2}")),
        evicted_uncounted_pages=round(total("kv_evicted_pages{count=zero,tier=l2}")),
        recomputed_tokens={
            name.removeprefix(prefix).removesuffix("}"): round(total(name)) for name in reasons if total(name)
        },
        fetch_s=total("fetch_seconds{}"),
        exposed_fetch_s=total("exposed_fetch_seconds{}"),
    )


def _since(before: Counters, after: Counters) -> Counters:
    began_anew = any(value < before.get(name, 0.0) for name, value in after.items())
    return after if began_anew else {name: value - before.get(name, 0.0) for name, value in after.items()}


def shown(work: KvWork) -> Sequence[tuple[str, str]]:
    """Rows of the report's table."""
    moved = f"{work.fetched_pages:,} between {work.workers} nodes ({work.fetched_bytes / 1e6:,.0f} MB of their arenas)"
    rows = [
        ("KV pages moved", moved),
        ("KV pages corrupt", str(work.corrupt_pages)),
        (
            "host memory evicted",
            f"{work.evicted_counted_pages:,} pages of active branches, {work.evicted_uncounted_pages:,} of none",
        ),
    ]
    if work.fetch_s:
        part = 100 * work.exposed_fetch_s / work.fetch_s
        rows.append(("prefill held up", f"by fetches, for {part:.1f} % of their {work.fetch_s:.1f} s"))
    if work.recomputed_tokens:
        why = ", ".join(f"{tokens:,} ({reason})" for reason, tokens in work.recomputed_tokens.items())
        rows.append(("tokens recomputed", why))
    return rows
