"""The Dynamo KV router, and its variant that fetches from a shared pool (Dynamo 1.5.1 and 1.6.1; paper, A.3).

Rules that hold here
- The cost of a prefill node, in blocks: prefill_load_scale x (blocks of the prompt - credit for leading blocks that
  the node holds + prefill blocks already assigned to it) + blocks that it would have active. The least cost wins,
  the first in order among equals: temperature 0.
- Credit: 1.0 for a leading block in GPU memory, 0.75 for one that follows these in host memory.
- Loads are the router's own book, not the nodes' reports. A request counts on its prefill node from routing to the
  end of its prefill: with the blocks it got no credit for as prefill work, and with all its prompt's as active ones.
  It counts on its decode node, with its prompt's blocks, from routing to its end.
- The decode node is the one with the fewest active blocks: the peer gives no overlap credit and counts no prefill
  work in its decode pool. Blocks that two requests share count twice, as the peer's documents ask for where decode
  nodes do not reuse KV (`--no-router-assume-kv-reuse`).
- With `pool`, the node that was chosen by the same cost fetches the leading pages that it lacks from the node that
  has the most. The load is in line with the prefill, and both nodes keep a copy.
"""

from __future__ import annotations

import msgspec

from loadtest.baselines.policy import Arrival, ClusterView, Placement, Router


class DynamoRouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named as the peer's flags, with its defaults. It has no disk here."""

    overlap_score_credit: float = 1.0  # of a block in GPU memory
    host_cache_hit_weight: float = 0.75  # of a block in host memory
    prefill_load_scale: float = 1.0
    pool: bool = False


class _Load:
    """Blocks assigned to one node."""

    __slots__ = ("active", "prefill", "requests")

    def __init__(self) -> None:
        self.prefill, self.active, self.requests = 0.0, 0.0, 0

    def add(self, prefill: float, active: float) -> None:
        self.prefill += prefill
        self.active += active
        self.requests += 1

    def drop(self, prefill: float, active: float) -> None:
        self.requests -= 1
        if self.requests:
            self.prefill -= prefill
            self.active -= active
        else:  # so that no rounding is left
            self.prefill, self.active = 0.0, 0.0


class DynamoRouter(Router):
    binds_at_routing = True

    def __init__(self, settings: DynamoRouterSettings | None = None) -> None:
        self.settings = settings or DynamoRouterSettings()
        self.fetches_inline = self.settings.pool
        self._prefill_loads: dict[str, _Load] = {}
        self._decode_loads: dict[str, _Load] = {}
        self._prefilling: dict[
            str, tuple[str, float, float]
        ] = {}  # rid -> node, prefill blocks, active blocks
        self._decoding: dict[str, tuple[str, float]] = {}  # rid -> node, active blocks

    def prefill_load(self, node: str) -> tuple[float, float]:
        """Prefill blocks and active blocks assigned to the node as a prefill node."""
        load = self._prefill_loads.get(node)
        return (load.prefill, load.active) if load else (0.0, 0.0)

    def decode_load(self, node: str) -> float:
        """Active blocks assigned to the node as a decode node."""
        load = self._decode_loads.get(node)
        return load.active if load else 0.0

    def place(self, arrival: Arrival, view: ClusterView, now: float) -> Placement:
        settings = self.settings
        gpu_credit, host_credit = settings.overlap_score_credit, settings.host_cache_hit_weight
        scale = settings.prefill_load_scale
        blocks = arrival.prompt_tokens / view.page_size
        held, held_l1 = view.leading(arrival.path), view.leading_l1(arrival.path)
        best, best_cost, best_credit = "", 0.0, 0.0
        for node in view.prefill_nodes:
            l1 = held_l1.get(node, 0)
            credit = gpu_credit * l1 + host_credit * (held.get(node, 0) - l1)
            load = self._prefill_loads.get(node)
            assigned, active = (load.prefill, load.active) if load else (0.0, 0.0)
            cost = scale * max(0.0, blocks - credit + assigned) + active + blocks
            if not best or cost < best_cost:
                best, best_cost, best_credit = node, cost, credit
        if not best:
            raise ValueError("no node serves this phase")
        work = max(0.0, blocks - best_credit)
        self._prefilling[arrival.rid] = (best, work, blocks)
        self._prefill_loads.setdefault(best, _Load()).add(work, blocks)
        most_pages = max(0, (arrival.prompt_tokens - 1) // view.page_size)
        own = min(held.get(best, 0), most_pages)
        if not settings.pool:
            return Placement(best, own_pages=own)
        source, longest = None, own
        for node, pages in held.items():
            if min(pages, most_pages) > longest:
                source, longest = node, min(pages, most_pages)
        return Placement(best, own_pages=own, fetch_pages=longest - own, source=source)

    def bind(self, arrival: Arrival, prefill_node: str, view: ClusterView, now: float) -> str:
        if not view.decode_nodes:
            raise ValueError("no node serves this phase")
        node = min(view.decode_nodes, key=self.decode_load)
        blocks = arrival.prompt_tokens / view.page_size
        self._decoding[arrival.rid] = (node, blocks)
        self._decode_loads.setdefault(node, _Load()).add(0.0, blocks)
        return node

    def prefill_done(self, rid: str, now: float) -> None:
        prefilling = self._prefilling.pop(rid, None)
        if prefilling is not None:
            node, work, blocks = prefilling
            self._prefill_loads[node].drop(work, blocks)

    def ended(self, rid: str, context_tokens: int, now: float) -> None:
        self.prefill_done(rid, now)
        decoding = self._decoding.pop(rid, None)
        if decoding is not None:
            node, blocks = decoding
            self._decode_loads[node].drop(0.0, blocks)
