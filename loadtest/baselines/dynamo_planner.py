"""The Dynamo planner with its `throughput` target, of releases 1.5.1 and 1.6.1 (paper, section 3.2, Appendix A.1).

Rules that hold here
- Each phase proposes one node more, one less or none, apart from the other. Prefill: one more if any node has at
  least `context_length` queued tokens, one less if all have fewer than a tenth of it. Decode: one more if the running
  and queued KV of any node exceeds its capacity, one less if all use less than 0.6 of it. A phase with one node
  proposes none less.
- The total N is pinned. Proposals that keep it (an opposing pair) move a node. Proposals below it leave a node
  without work that nobody asked for, so nothing moves.
- Proposals (p, d) above it: release 1.5.1 clamps to p' = floor(p N / (p + d)), the rest to decode, at least one of
  each. So decode +1 takes a node from prefill, prefill +1 takes none from decode, and both +1 take one from prefill
  where it has more than half of the nodes. Release 1.6.1 holds.
- A move relaunches the worker: its requests are cut off, the node is out of service for minutes and comes back with
  an empty cache. There is no decision while a node moves, nor before `start_s`.
- The newest node of a phase goes: the last in the view's order.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadtest.baselines.policy import ClusterView, KvAfterMove, Moves, Moving, Planner
from shared.messages import Phase

Release = Literal["1.5.1", "1.6.1"]


class DynamoPlannerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The peer's constants. The context length is the model's, by default that of GLM-5.2."""

    period_s: float = 5.0
    start_s: float = 1800.0  # the end of the warm-up
    context_length: int = 200_000
    prefill_up: float = 1.0  # of the context length, at least
    prefill_down: float = 0.1  # of the context length, below
    decode_up: float = 1.0  # of the KV capacity, above
    decode_down: float = 0.6  # of the KV capacity, below
    relaunch_from_s: float = 681.0
    relaunch_to_s: float = 800.0


def clamp(prefill: int, decode: int, total: int) -> tuple[int, int]:
    """The split of `total` nodes (at least 2) that release 1.5.1 makes of an oversized proposal."""
    kept = max(1, prefill * total // (prefill + decode))  # below total, as decode is not 0
    return kept, total - kept


class DynamoPlanner(Planner):
    def __init__(self, release: Release, settings: DynamoPlannerSettings | None = None) -> None:
        self.release = release
        self.settings = settings or DynamoPlannerSettings()
        self.period_s = self.settings.period_s
        self.moving = Moving(
            drains=False,
            out_s=(self.settings.relaunch_from_s, self.settings.relaunch_to_s),
            kv=KvAfterMove.EMPTY,
        )

    def proposals(self, view: ClusterView) -> tuple[int, int]:
        """What each phase asks for: +1, 0 or -1 nodes of prefill, and of decode."""
        settings = self.settings
        queued = [view.queued_prefill_tokens(node) / settings.context_length for node in view.prefill_nodes]
        used = [view.decode_kv_tokens(node) / view.profile(node).l1_tokens for node in view.decode_nodes]
        prefill = decode = 0
        if any(part >= settings.prefill_up for part in queued):
            prefill = 1
        elif len(queued) > 1 and all(part < settings.prefill_down for part in queued):
            prefill = -1
        if any(part > settings.decode_up for part in used):
            decode = 1
        elif len(used) > 1 and all(part < settings.decode_down for part in used):
            decode = -1
        return prefill, decode

    def target(self, prefill: int, decode: int, more_prefill: int, more_decode: int) -> tuple[int, int]:
        """The split to make of a split and its phases' proposals. The total stays."""
        if more_prefill + more_decode == 0:
            return prefill + more_prefill, decode + more_decode
        if more_prefill + more_decode > 0 and self.release == "1.5.1":
            return clamp(prefill + more_prefill, decode + more_decode, prefill + decode)
        return prefill, decode

    def decide(self, view: ClusterView, now: float) -> Moves | None:
        prefill_nodes, decode_nodes = view.prefill_nodes, view.decode_nodes
        if now < self.settings.start_s or view.moving or not prefill_nodes or not decode_nodes:
            return None
        more_prefill, more_decode = self.proposals(view)
        before = len(prefill_nodes), len(decode_nodes)
        after = self.target(*before, more_prefill, more_decode)
        leaving = before[0] - after[0]
        if leaving > 0:
            phases = dict.fromkeys(prefill_nodes[-leaving:], Phase.DECODE)
        elif leaving < 0:
            phases = dict.fromkeys(decode_nodes[leaving:], Phase.PREFILL)
        else:
            return None
        return Moves(
            phases,
            f"prefill {more_prefill:+d}, decode {more_decode:+d}:"
            f" {before[0]}P{before[1]}D to {after[0]}P{after[1]}D",
        )
