"""Steps of agents as a router and workers would tell of them."""

from __future__ import annotations

import numpy as np

from services.directory.core import Directory
from shared.messages import (
    Began,
    BranchPlaced,
    BranchRequest,
    NodeInfo,
    PagesCleared,
    PagesStored,
    Phase,
    StreamMessage,
    Tier,
    pack_pages,
)
from shared.streams import Event

STEP_PAGES = 100
NODES = 64
BRANCHES = 1000


class Agents:
    """Steps of many branches as a router and workers would tell of them."""

    def __init__(self, branches: int = BRANCHES, nodes: int = NODES, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)
        self._system = self._pages(STEP_PAGES)
        self._paths = {f"branch-{i}": np.empty(0, dtype=np.int64) for i in range(branches)}
        self._nodes = [f"n{i}" for i in range(nodes)]
        self._t = 0.0

    def _pages(self, n: int) -> np.ndarray:
        return self._rng.integers(-(2**63), 2**63 - 1, n, dtype=np.int64)

    def step(self, number: int, t: float = 0.0) -> list[tuple[str, StreamMessage]]:
        """Stream and message of one step: request, placement, and what the node stored for it."""
        names = list(self._paths)
        name = names[number % len(names)]
        node = self._nodes[number % len(names) % len(self._nodes)]
        path = self._paths[name]
        self._t = t or self._t + 0.001
        base = path.size
        pages = self._pages(STEP_PAGES) if base else self._system
        self._paths[name] = kept_and_new = np.concatenate((path, pages))
        return [
            ("branch", BranchRequest(name, base, int(path[-1]) if base else 0, pack_pages(pages), t=self._t)),
            ("branch", BranchPlaced(name, node, Phase.PREFILL, self._t)),
            (f"kv:{node}", PagesStored(Tier.L2, pack_pages(kept_and_new[base:]))),
        ]

    def info(self, node: str, url: str) -> NodeInfo:
        return NodeInfo(
            node=node, url=url, incarnation=f"{node}.0", model="m", profile="tiny", page_size=16,
            max_context=1 << 20, l1_tokens=1 << 20, l2_tokens=1 << 24, chunk_tokens=8192, phase=Phase.PREFILL,
        )  # fmt: skip


class Feed:
    """Numbers messages as the streams do."""

    def __init__(self) -> None:
        self._seq: dict[str, int] = {}
        self._at = 1_000_000

    def event(self, stream: str, message: StreamMessage) -> Event:
        self._at += 1
        seq = self._seq[stream] = self._seq.get(stream, 0) + 1
        producer = f"{stream.removeprefix('kv:')}.0" if stream.startswith("kv:") else "router"
        return Event(stream, f"{self._at}-0", producer, seq, message)


def begin(directory: Directory, agents: Agents, feed: Feed) -> None:
    directory.registered({n: agents.info(n, "http://-") for n in agents._nodes}, 0.0)
    for node in agents._nodes:
        directory.apply(feed.event(f"kv:{node}", PagesCleared(began=Began(Phase.PREFILL))), 0.0)
