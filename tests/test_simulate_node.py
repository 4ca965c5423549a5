"""A simulated node on the tiny profile: times worked out by hand, transfers between nodes, and nothing left pinned."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from loadtest.simulate.loop import Loop
from loadtest.simulate.node import SimNode
from loadtest.simulate.pages import PageNames
from shared.messages import Iteration, PageArray, Phase, RoleStage, Tier
from shared.timing import TINY, query_key_pairs
from worker.engines.simulated.phase import Ack
from worker.engines.simulated.requests import Request
from worker.engines.simulated.transfers import TRANSFER_LATENCY_S
from worker.kv.cache import KvChange

PAGE, P, GAP = TINY.page_size, TINY.prefill, TINY.idle_gap_s
SLOW = msgspec.structs.replace(TINY, link_bytes_per_s=1e6)
PAGE_S = PAGE * TINY.kv_bytes_per_token / 1e6  # 1.024 ms a page
TAU = TINY.decode.iteration_s(1)


class Rig:
    """Nodes that are each other's peers, and what they told."""

    def __init__(self, *phases: Phase, inline: bool = False, **changes: object) -> None:
        self.loop, self.names = Loop(), PageNames(PAGE)
        self.told: list[tuple[str, str, float]] = []  # what, request, when it was
        self.heard: list[tuple[str, float]] = []  # what, when it was told
        self.acks: list[Ack] = []
        self.records: list[Iteration] = []
        self.held: dict[tuple[str, Tier], set[int]] = {}
        self.after: Callable[[str, Request], None] = lambda what, request: None
        profile = msgspec.structs.replace(SLOW, **changes)
        self.nodes = {
            name: SimNode(
                name, profile, self.loop, self.names, self, eviction="count", phase=phase, inline=inline
            )
            for name, phase in zip(("n1", "n2", "n3"), phases, strict=False)
        }
        for node in self.nodes.values():
            node.peers = self.nodes

    def __getitem__(self, name: str) -> SimNode:
        return self.nodes[name]

    def pages(self, tokens: int) -> PageArray:
        first = self.names.take(tokens // PAGE)
        return np.arange(first, first + tokens // PAGE)

    def when(self, what: str, rid: str) -> float:
        (t,) = [t for each, of, t in self.told if (each, of) == (what, rid)]
        return t

    def run(self, until: float = 1e3) -> None:
        self.loop.run(until)

    def check_empty(self) -> None:
        """Nothing runs or is pinned, promised or being read; what was told is what is held."""
        for node in self.nodes.values():
            cache = node.cache
            assert node.scheduler.requests == 0
            assert (cache.l1_pinned, cache.l1_room, cache.l2_pinned) == (0, 0, 0), node.name
            assert cache.l1_free + cache.l1_used == cache.l1_pages
            node.pump()
            for tier in Tier:
                assert self.held.get((node.name, tier), set()) == set(cache.pages(tier).tolist())

    # What nodes tell.

    def _tell(self, what: str, node: SimNode, request: Request, t: float) -> None:
        self.told.append((what, request.rid, t))
        self.heard.append((what, self.loop.now))
        assert t <= self.loop.now
        self.after(what, request)

    def started(self, node: SimNode, request: Request, t: float) -> None:
        self._tell("started", node, request, t)

    def prefilled(self, node: SimNode, request: Request, t: float) -> None:
        self._tell("prefilled", node, request, t)

    def progressed(self, node: SimNode, request: Request, t: float, done: bool) -> None:
        self._tell("done" if done else "first", node, request, t)

    def moved_out(self, node: SimNode, request: Request) -> None:
        self._tell("moved", node, request, self.loop.now)

    def acked(self, node: SimNode, ack: Ack) -> None:
        self.acks.append(ack)

    def kv_changed(self, node: SimNode, changes: list[KvChange]) -> None:
        for stored, tier, pages in changes:
            held = self.held.setdefault((node.name, tier), set())
            assert held.isdisjoint(pages.tolist()) if stored else held.issuperset(pages.tolist())
            held.symmetric_difference_update(pages.tolist())

    def iterated(self, node: SimNode, records: list[Iteration]) -> None:
        self.records += records

    def changed(self, node: SimNode) -> None:
        pass


def two(**changes: int) -> Rig:
    return Rig(Phase.PREFILL, Phase.DECODE, inline=False, **changes)


def prefilled(rig: Rig, node: str, tokens: int, rid: str = "a") -> PageArray:
    """Pages of a prompt that the node has computed and nobody needs."""
    pages = rig.pages(tokens)
    request = rig[node].prefill(rid, tokens, pages, None, 0)
    rig.run(rig.loop.now + 1.0)
    rig[node].let_go(request)
    rig.records.clear()
    return pages


def test_a_prefill_takes_its_chunks_and_keeps_its_pages_until_let_go() -> None:
    rig = two()
    rig.run(1.0)
    request = rig["n1"].prefill("a", 300, rig.pages(300), None, 0)
    rig.run()
    one, other = (
        P.iteration_s(256, query_key_pairs(256, 0), 0),
        P.iteration_s(44, query_key_pairs(44, 256), 0),
    )
    assert rig.when("started", "a") == 1.0
    assert rig.when("prefilled", "a") == pytest.approx(1.0 + one + GAP + other, abs=1e-12)
    assert [record.t_uc for record in rig.records] == [256, 44]
    assert rig["n1"].cache.l2_pinned == 300 // PAGE
    rig["n1"].let_go(request)
    rig.check_empty()


def test_a_prefill_fetches_what_its_peer_has() -> None:
    rig = Rig(Phase.PREFILL, Phase.PREFILL)
    pages = prefilled(rig, "n1", 320)
    request = rig["n2"].prefill("b", 400, np.concatenate((pages, rig.pages(80))), "n1", 20)
    rig.run(1.0 + 20 * PAGE_S)  # the bytes are over, the latency is not
    assert rig["n1"].cache.l2_pinned == 20 and ("started", "b") not in [each[:2] for each in rig.told]
    rig.run(2.0)
    come = 1.0 + 20 * PAGE_S + TRANSFER_LATENCY_S
    assert rig.when("started", "b") == pytest.approx(come, abs=1e-12)
    # The pages came into host memory: they are restored.
    assert (request.cached, request.fetched, request.restored) == (320, 320, 320)
    took = P.iteration_s(80, query_key_pairs(80, 320), 320)
    assert rig.when("prefilled", "b") == pytest.approx(come + took, abs=1e-12)
    assert (rig["n2"].fetches, rig["n2"].fetched_pages, rig["n1"].fetches) == (1, 20, 0)
    rig["n2"].let_go(request)
    rig.check_empty()


def test_only_pages_before_the_last_wanted_one_are_fetched_and_few_are_not() -> None:
    rig = Rig(Phase.PREFILL, Phase.PREFILL)
    pages = prefilled(rig, "n1", 320)
    few = rig["n2"].prefill("few", 320, pages, "n1", 1)  # 16 tokens, less than the profile's least fetch
    rig.run(1.5)
    assert (few.fetched, rig["n2"].fetches) == (0, 0) and rig.when("started", "few") == 1.0
    part = prefilled(rig, "n1", 320, "c")
    some = rig["n2"].prefill("some", 320, part, "n1", 7)
    rig.run()
    assert (some.cached, some.fetched, rig["n2"].fetched_pages) == (112, 112, 7)


def test_transfers_take_turns_on_a_link_and_directions_do_not_meet() -> None:
    rig = Rig(Phase.PREFILL, Phase.PREFILL, Phase.PREFILL)
    first, second = prefilled(rig, "n1", 320), prefilled(rig, "n1", 160, "a2")
    third, back = prefilled(rig, "n3", 160, "a3"), prefilled(rig, "n2", 160, "a4")
    t = rig.loop.now
    rig["n2"].prefill("b", 321, first, "n1", 20)
    rig["n3"].prefill("c", 161, second, "n1", 10)  # after b: n1 sends one at a time
    rig["n2"].prefill("d", 161, third, "n3", 10)  # after b: n2 receives one at a time
    rig["n1"].prefill("e", 161, back, "n2", 10)  # at once: n1 receives nothing else, n2 sends nothing else
    rig.run(t + 1.0)
    came = {rid: rig.when("started", rid) - t - TRANSFER_LATENCY_S for rid in "bcde"}
    expected = {"b": 20 * PAGE_S, "c": 30 * PAGE_S, "d": 30 * PAGE_S, "e": 10 * PAGE_S}
    assert came == pytest.approx(expected, abs=1e-9)


def test_a_fetch_in_line_delays_the_iteration_and_not_the_queue() -> None:
    rig = Rig(Phase.PREFILL, Phase.PREFILL, inline=True)
    pages = prefilled(rig, "n1", 320)
    request = rig["n2"].prefill("b", 321, pages, "n1", 20)
    rig.run()
    assert rig.when("started", "b") == 1.0
    took = P.iteration_s(1, query_key_pairs(1, 320), 320)
    assert rig.when("prefilled", "b") == pytest.approx(1.0 + took, abs=1e-12)
    assert (request.fetched, rig["n2"].fetched_pages) == (320, 20)
    rig["n2"].let_go(request)
    rig.check_empty()


@pytest.mark.parametrize("why", ["unknown", "down", "lost", "partly lost"])
def test_what_a_peer_does_not_have_is_computed(why: str) -> None:
    rig = Rig(Phase.PREFILL, Phase.PREFILL)
    pages = prefilled(rig, "n1", 160)
    if why == "down":
        rig["n1"].fail()
    if why == "lost":
        rig["n1"].fail()
        rig["n1"].begin(Phase.PREFILL, 0)
        rig.held.clear()
    path = np.concatenate((pages, rig.pages(160)))
    request = rig["n2"].prefill("b", 321, path, "n9" if why == "unknown" else "n1", 20)
    rig.run()
    held = 160 if why == "partly lost" else 0
    took = [P.iteration_s(321 - held, query_key_pairs(321 - held, held), held)]
    if not held:
        took = [
            P.iteration_s(256, query_key_pairs(256, 0), 0),
            GAP,
            P.iteration_s(65, query_key_pairs(65, 256), 0),
        ]
    assert request.fetched == held
    assert rig.when("prefilled", "b") - rig.when("started", "b") == pytest.approx(sum(took), abs=1e-12)


def test_a_decode_pulls_the_prompt_and_takes_equation_2() -> None:
    rig = two()
    pages = prefilled(rig, "n1", 330)
    context = np.concatenate((pages, rig.pages(48)))
    rig["n2"].generate("b", 330, context, 40, "n1", None)
    rig.run(1.001)
    assert rig["n2"].cache.l1_room + rig["n2"].cache.l1_pinned == 24  # 370 tokens
    rig.run()
    come = 1.0 + 20 * PAGE_S + TRANSFER_LATENCY_S
    assert rig.when("first", "b") == pytest.approx(come + TAU, abs=1e-9)
    assert rig.when("done", "b") == pytest.approx(come + 40 * TAU, abs=1e-9)
    assert rig["n2"].fetches == 0  # those are prefills'
    # 369 tokens have KV: the newest one never gets it.
    assert rig["n2"].cache.held(context) == 369 // PAGE
    rig.check_empty()


def test_a_first_token_is_told_of_when_it_is_there() -> None:
    rig = two()
    rig["n2"].generate("b", 10, rig.pages(0), 500, None, None)
    rig.run()
    assert [what for what, _ in rig.heard] == ["first", "done"]
    (_, first), (_, done) = rig.heard
    assert first == pytest.approx(TAU, abs=1e-9) and done == pytest.approx(500 * TAU, abs=1e-9)


def test_reserved_room_is_held_used_and_given_back() -> None:
    rig = two(l1_tokens=320)
    context = rig.pages(160)
    cache = rig["n2"].cache
    held = rig["n2"].reserve("a", 100, context, 60)
    assert held is not None and cache.l1_room == 10
    other = rig["n2"].reserve("b", 100, context, 60)
    assert other is not None and cache.l1_room == 20
    assert rig["n2"].reserve("c", 16, rig.pages(16), 1) is None
    rig["n2"].unreserve(other)
    rig["n2"].unreserve(other)
    assert cache.l1_room == 10
    # The one that reserved it needs no more, and what waits does not take it.
    rig["n2"].generate("a", 100, context, 60, None, held)
    rig["n2"].generate("w", 160, rig.pages(176), 16, None, None)
    assert held.lease is None and cache.l1_room + cache.l1_pinned == 10
    rig.run()
    assert rig.when("done", "w") > rig.when("done", "a")
    rig.check_empty()


def test_room_that_is_given_back_goes_to_what_waits_for_it_from_then_on() -> None:
    rig = two(l1_tokens=320)
    held = rig["n2"].reserve("a", 100, rig.pages(160), 200)
    rig["n2"].generate("w", 160, rig.pages(160), 16, None, None)
    rig.run(5.0)
    assert held is not None and not rig.told
    rig["n2"].unreserve(held)
    rig.run()
    first = P.iteration_s(160, query_key_pairs(160, 0), 0)  # its pages are nowhere: it computes them
    assert rig.when("started", "w") == 5.0 and rig.when("first", "w") == pytest.approx(5.0 + first, abs=1e-9)
    rig.check_empty()


def test_a_role_is_drained_then_switched_and_what_waits_is_moved_out() -> None:
    rig = two(l1_tokens=320)
    rig["n2"].generate("runs", 16, rig.pages(160), 144, None, None)
    rig["n2"].generate("waits", 160, rig.pages(320), 160, None, None)
    rig.run(0.01)
    rig["n2"].set_role(1, Phase.PREFILL)
    assert rig.when("moved", "waits") == 0.01
    late = rig["n2"].generate("late", 16, rig.pages(32), 16, None, None)
    assert rig.when("moved", "late") == 0.01 and late.lease is None
    rig.run()
    drained, switched = rig.acks
    assert (drained.stage, switched.stage) == (RoleStage.DRAINED, RoleStage.SWITCHED)
    assert drained.t == pytest.approx(rig.when("done", "runs")) and rig["n2"].phase is Phase.PREFILL
    assert switched.t == pytest.approx(drained.t + TINY.switch_s)
    rig.check_empty()


def test_one_that_reserved_room_on_a_node_that_leaves_its_phase_gives_it_back() -> None:
    rig = two()
    context = rig.pages(160)
    held = rig["n2"].reserve("a", 100, context, 60)
    rig["n2"].set_role(1, Phase.PREFILL)
    rig["n2"].generate("a", 100, context, 60, None, held)
    assert rig.when("moved", "a") == 0.0
    rig.run()
    rig.check_empty()
