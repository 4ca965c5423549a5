"""Why a request went where it went, for people: the terms of every candidate (Equation 7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from services.router.flight import Flight

MOST_NODES = 16  # a header has to stay small


def explained(flight: Flight) -> str:
    """JSON of one line, ASCII: the branch and how it was found, the candidates best first, the decode node."""
    identity = flight.identity
    told = {
        "branch": flight.branch,
        "source": identity.source if identity is not None else "",
        "kind": identity.kind.value if identity is not None else "",
        "prompt_tokens": flight.prompt_tokens,
        "prefill": [
            {
                "node": c.node,
                "predicted_s": _ms(c.predicted_s),
                "wait_s": _ms(c.wait_s),
                "service_s": _ms(c.service_s),
                "exposed_fetch_s": _ms(c.exposed_fetch_s),
                "copy_s": _ms(c.copy_s),
                "own_pages": c.own_pages,
                "fetch_pages": c.fetch_pages,
                "from": c.source,
                "fresh": c.fresh,
            }
            for c in flight.candidates[:MOST_NODES]
        ],
        "nodes": len(flight.candidates),
        "decode": flight.decode_node,
        "predicted_ttft_s": _ms(flight.predicted_ttft_s),
    }
    return msgspec.json.encode(told).decode().encode("ascii", "backslashreplace").decode()


def _ms(seconds: float) -> float:
    return round(seconds, 4)
