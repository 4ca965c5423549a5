"""Arrow: in-place moves on predicted TTFT and TPOT, blind to where KV is (arXiv 2505.11916; paper, sections 3, A.1).

Arrow's code is not public. This follows the paper's account of it, with the simplest rule where that is silent.

Rules that hold here
- A prefill is predicted to take what the node's prefill model says of the full prompt, cached prefixes included. The
  predicted TTFT is that, after the same for the requests sent to the node and not yet done; of one that runs, what
  its prediction leaves. The least wins.
- The decode node is the one with the fewest context tokens sent to it, bound when the prefill starts.
- The planner looks at the predictions since it last looked. TPOT first: where it misses its target on any decode
  node, the prefill node with the fewest queued tokens moves to decode. Otherwise, where any request's TTFT was
  predicted to miss its target, the decode node with the fewest context tokens moves to prefill, unless TPOT would
  then miss its target. A phase keeps one node; nothing is decided while a node moves.
- A node moves in place and keeps its cache, but in decode no later prefill can read its KV.
"""

from __future__ import annotations

import msgspec

from loadtest.baselines.policy import (
    Arrival,
    ClusterView,
    KvAfterMove,
    Moves,
    Moving,
    Placement,
    Planner,
    Router,
)
from shared.messages import Phase
from shared.timing import Profile


class ArrowRouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """There is nothing to set."""


class ArrowPlannerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Targets are the user's in Arrow. These are the paper's for P95 TTFT (section D.3), and 20 tokens/s."""

    period_s: float = 1.0
    start_s: float = 0.0
    ttft_s: float = 15.0
    tpot_s: float = 0.05
    switch_s: float = 0.7


def prefill_s(profile: Profile, prompt_tokens: int) -> float:
    """Seconds that the prefill of a whole prompt is predicted to take, all of it uncached, in full chunks."""
    return profile.prefill.request_s(prompt_tokens, 0, profile.chunk_tokens, 0.0)


def tpot_s(profile: Profile, requests: float) -> float:
    """Seconds a token of so many requests that decode together."""
    return profile.decode.iteration_s(requests) / profile.t_acc if requests else 0.0


class _Sent:
    """A prefill that is not done."""

    __slots__ = ("seconds", "started")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.started: float | None = None

    def left_s(self, now: float) -> float:
        return self.seconds if self.started is None else max(0.0, self.seconds - (now - self.started))


class ArrowRouter(Router):
    binds_at_routing = False

    def __init__(self, settings: ArrowRouterSettings | None = None) -> None:
        self._sent: dict[str, dict[str, _Sent]] = {}  # prefill node -> request -> its work
        self._prefilling: dict[str, str] = {}  # rid -> prefill node
        self._decode_tokens: dict[str, int] = {}  # decode node -> context tokens
        self._decoding: dict[str, tuple[str, int]] = {}  # rid -> decode node, context tokens

    def waiting_s(self, node: str, now: float) -> float:
        """Seconds of prefill that are predicted to be left on the node."""
        return sum(sent.left_s(now) for sent in self._sent.get(node, {}).values())

    def decode_tokens(self, node: str) -> int:
        """Context tokens sent to the node to decode."""
        return self._decode_tokens.get(node, 0)

    def place(self, arrival: Arrival, view: ClusterView, now: float) -> Placement:
        best, best_s, best_own_s = "", 0.0, 0.0
        profile, own_s = None, 0.0
        for node in view.prefill_nodes:
            before, profile = profile, view.profile(node)
            if profile is not before:  # nodes mostly share one
                own_s = prefill_s(profile, arrival.prompt_tokens)
            ttft_s = own_s + (self.waiting_s(node, now) if self._sent.get(node) else 0.0)
            if not best or ttft_s < best_s:
                best, best_s, best_own_s = node, ttft_s, own_s
        if not best:
            raise ValueError("no node serves this phase")
        self._sent.setdefault(best, {})[arrival.rid] = _Sent(best_own_s)
        self._prefilling[arrival.rid] = best
        return Placement(best, predicted_ttft_s=best_s)

    def bind(self, arrival: Arrival, prefill_node: str, view: ClusterView, now: float) -> str:
        if not view.decode_nodes:
            raise ValueError("no node serves this phase")
        before = self._decoding.pop(arrival.rid, None)
        if before is not None:  # that node handed it back
            self._decode_tokens[before[0]] -= before[1]
        node = min(view.decode_nodes, key=self.decode_tokens)
        self._decode_tokens[node] = self.decode_tokens(node) + arrival.prompt_tokens
        self._decoding[arrival.rid] = (node, arrival.prompt_tokens)
        return node

    def prefill_started(self, rid: str, now: float) -> None:
        node = self._prefilling.get(rid)
        if node is not None:
            self._sent[node][rid].started = now

    def prefill_done(self, rid: str, now: float) -> None:
        node = self._prefilling.pop(rid, None)
        if node is not None:
            del self._sent[node][rid]

    def ended(self, rid: str, context_tokens: int, now: float) -> None:
        self.prefill_done(rid, now)
        decoding = self._decoding.pop(rid, None)
        if decoding is not None:
            node, tokens = decoding
            self._decode_tokens[node] -= tokens


class ArrowPlanner(Planner):
    def __init__(self, settings: ArrowPlannerSettings | None = None) -> None:
        self.settings = settings or ArrowPlannerSettings()
        self.period_s = self.settings.period_s
        self.moving = Moving(
            drains=True,
            out_s=(self.settings.switch_s, self.settings.switch_s),
            kv=KvAfterMove.UNREACHABLE,
        )
        self._worst_ttft_s = 0.0

    def placed(self, placement: Placement, now: float) -> None:
        """Raises ValueError when the router predicts no TTFT."""
        if placement.predicted_ttft_s is None:
            raise ValueError("the arrow planner needs a router that predicts TTFT, as arrow does")
        self._worst_ttft_s = max(self._worst_ttft_s, placement.predicted_ttft_s)

    def decide(self, view: ClusterView, now: float) -> Moves | None:
        settings = self.settings
        ttft_s, self._worst_ttft_s = self._worst_ttft_s, 0.0
        if now < settings.start_s or view.moving:
            return None
        prefill_nodes, decode_nodes = view.prefill_nodes, view.decode_nodes
        present_s = max(
            (tpot_s(view.profile(node), view.decode_requests(node)) for node in decode_nodes), default=0.0
        )
        if present_s > settings.tpot_s:
            if len(prefill_nodes) < 2:
                return None
            node = min(prefill_nodes, key=view.queued_prefill_tokens)
            return Moves({node: Phase.DECODE}, f"TPOT {present_s:.3g} s above {settings.tpot_s:.3g} s")
        if ttft_s > settings.ttft_s and len(decode_nodes) >= 2:
            node = min(decode_nodes, key=view.decode_kv_tokens)
            requests = sum(view.decode_requests(other) for other in decode_nodes)
            share = requests / (len(decode_nodes) - 1)
            after_s = max(tpot_s(view.profile(other), share) for other in decode_nodes if other != node)
            if after_s <= settings.tpot_s:
                return Moves({node: Phase.PREFILL}, f"TTFT {ttft_s:.3g} s above {settings.ttft_s:.3g} s")
        return None
