"""Cache-aware routing of SGLang Model Gateway 0.3.2 (`cache_aware` in its PD mode).

Rules that hold here
- Load is the number of requests in flight, which a prefill node has from routing to the request's end. If the most
  load exceeds the least by more than `balance_abs_threshold` and by more than `balance_rel_threshold` times, the node
  with the least load serves. Otherwise the node with the longest match, if it covers more than `cache_threshold` of
  the prompt, and else the node with the least load.
- Of several nodes with the longest match, the one that was sent these pages first serves.
- The match is against the router's own tree of past requests, bounded every `eviction_interval_s`: a node that has
  more than `max_tree_size` characters there loses its least recently used leaves.
- Decode nodes come by round robin, bound at routing as in SGLang's PD mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadtest.baselines.policy import Arrival, ClusterView, Placement, Router
from loadtest.baselines.prefix_tree import PrefixTree
from loadtest.baselines.round_robin import Rotation
from shared.messages import Phase


class CacheAwareSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named as the peer's flags, with its defaults."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_s: float = 120.0
    max_tree_size: int = 67_108_864  # characters of each node
    chars_per_token: float = 4.0  # the peer's tree is of text, ours of pages


class CacheAware(Router):
    binds_at_routing = True

    def __init__(self, settings: CacheAwareSettings | None = None) -> None:
        self.settings = settings or CacheAwareSettings()
        self.tick_s = self.settings.eviction_interval_s
        self.tree = PrefixTree()
        self._decode = Rotation()
        self._loads: dict[str, int] = {}  # node -> requests in flight
        self._placed: dict[str, str] = {}  # rid -> node

    def load(self, node: str) -> int:
        """Requests in flight that were sent to the node for prefill."""
        return self._loads.get(node, 0)

    def place(self, arrival: Arrival, view: ClusterView, now: float) -> Placement:
        nodes = view.prefill_nodes
        if not nodes:
            raise ValueError("no node serves this phase")
        settings = self.settings
        loads = [self._loads.get(node, 0) for node in nodes]
        most, least = max(loads), min(loads)
        node = nodes[loads.index(least)]
        unbalanced = (
            most - least > settings.balance_abs_threshold and most > settings.balance_rel_threshold * least
        )
        pages = None
        if not unbalanced:
            pages, matched = self.tree.match(arrival.path)
            if pages * view.page_size > settings.cache_threshold * arrival.prompt_tokens:
                node = next((sent for sent in matched if sent in nodes), node)
        self.tree.insert(arrival.path, node, pages)
        self._loads[node] = self._loads.get(node, 0) + 1
        self._placed[arrival.rid] = node
        return Placement(node)

    def bind(self, arrival: Arrival, prefill_node: str, view: ClusterView, now: float) -> str:
        return self._decode.next(view.decode_nodes)

    def ended(self, rid: str, context_tokens: int, now: float) -> None:
        node = self._placed.pop(rid, None)
        if node is not None:
            self._loads[node] -= 1

    def node_changed(self, node: str, phase: Phase | None, now: float) -> None:
        if phase is None or not phase.prefills:
            self.tree.drop(node)

    def tick(self, view: ClusterView, now: float) -> Sequence[str]:
        most_pages = int(self.settings.max_tree_size / self.settings.chars_per_token) // view.page_size
        for node in self.tree.nodes():
            self.tree.evict(node, most_pages)
        return ()
