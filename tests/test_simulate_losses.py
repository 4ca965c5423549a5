"""Requests that are given up and nodes that are lost, at any moment: nothing stays pinned on any node, nobody is told."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.simulate.node import SimNode
from shared.messages import PageArray, Phase
from tests.test_simulate_node import PAGE_S, Rig, prefilled
from worker.engines.simulated.requests import Request
from worker.engines.simulated.transfers import TRANSFER_LATENCY_S

COMES = 20 * PAGE_S + TRANSFER_LATENCY_S
# At once; in the transfer; as it ends; in the first and second chunk; in the gap; in decode; after all.
MOMENTS = [0.0, 0.0005, 0.01, 20 * PAGE_S, COMES, COMES + 0.001, 0.028, 0.0305, 0.04, 0.06, 0.2]


class Work:
    """Two nodes that fetch from a third, and pull, compute, decode and wait for room."""

    def __init__(self, inline: bool = False) -> None:
        self.rig = rig = Rig(Phase.BOTH, Phase.BOTH, Phase.BOTH, inline=inline, l1_tokens=1600)
        self.pages = pages = [prefilled(rig, "n1", 320, f"p{n}") for n in range(4)]
        rig.told.clear()
        self.t = rig.loop.now
        n2, n3 = rig["n2"], rig["n3"]
        self.made: list[tuple[SimNode, Request]] = [
            (n2, n2.prefill("fetches", 700, self.longer(pages[0], 380), "n1", 20)),
            (n2, n2.prefill("computes", 600, rig.pages(600), None, 0)),
            (n2, n2.prefill("fetches too", 340, self.longer(pages[1], 20), "n1", 20)),
            (n3, n3.generate("pulls", 320, self.longer(pages[2], 64), 64, "n1", None)),
            (n3, n3.generate("recomputes", 200, rig.pages(240), 40, None, None)),
            (n3, n3.generate("waits for room", 320, self.longer(pages[3], 960), 960, "n1", None)),
            (n3, n3.prefill("queues", 320, self.longer(pages[3], 0), "n1", 20)),
        ]

    def longer(self, pages: PageArray, tokens: int) -> PageArray:
        return np.concatenate((pages, self.rig.pages(tokens)))

    def ended(self) -> set[str]:
        return {rid for what, rid, _ in self.rig.told if what in ("prefilled", "done")}

    def finish(self) -> None:
        """Run to the end, letting go of what prefills have kept."""
        self.rig.run()
        self.let_go(*self.rig.nodes)

    def let_go(self, *names: str) -> None:
        for node, request in self.made:
            if node.name in names:
                node.let_go(request)


@pytest.mark.parametrize("inline", [False, True])
def test_all_of_it_ends_by_itself(inline: bool) -> None:
    work = Work(inline)
    work.finish()
    assert work.ended() == {request.rid for _, request in work.made}
    work.rig.check_empty()


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_aborts_at_any_moment_leave_nothing_pinned(moment: float, inline: bool) -> None:
    work = Work(inline)
    work.rig.run(work.t + moment)
    before = work.ended()
    for node, request in work.made:
        node.abort(request)
        node.abort(request)
        node.let_go(request)
    work.rig.check_empty()  # at once, the peer's pages too
    work.finish()
    assert work.ended() == before
    work.rig.check_empty()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", range(7))
def test_an_abort_of_one_lets_the_others_end(number: int, moment: float) -> None:
    work = Work()
    work.rig.run(work.t + moment)
    node, request = work.made[number]
    node.abort(request)
    work.finish()
    others = {each.rid for _, each in work.made if each is not request}
    assert work.ended() >= others
    work.rig.check_empty()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("lost", ["n1", "n2", "n3"])
def test_a_lost_node_leaves_nothing_pinned_on_others_and_begins_empty(
    lost: str, moment: float, again: bool
) -> None:
    work = Work()
    rig = work.rig
    rig.run(work.t + moment)
    before = work.ended()
    rig[lost].fail()
    work.let_go(lost)  # nobody asks for what was there
    assert not rig[lost].up
    if again:
        _begin(rig, lost)
        # What it begins with is its own: ends of older transfers change nothing there.
        pages = rig.pages(1600)
        rig[lost].generate("new", 800, pages, 800, None, None)
    work.finish()
    on_lost = {request.rid for node, request in work.made if node is rig[lost]}
    ended = work.ended()
    assert ended & on_lost == before & on_lost
    assert ended >= {request.rid for _, request in work.made} - on_lost
    assert ("new" in ended) == again
    if not again:
        _begin(rig, lost)
    rig.check_empty()


def _begin(rig: Rig, name: str) -> None:
    rig.held = {key: pages for key, pages in rig.held.items() if key[0] != name}
    rig[name].begin(Phase.BOTH, 0)
    cache = rig[name].cache
    assert rig[name].up and (cache.l1_used, cache.l2_used, cache.l1_free) == (0, 0, cache.l1_pages)


def test_what_a_peer_was_sending_as_it_was_lost_did_not_come() -> None:
    rig = Rig(Phase.PREFILL, Phase.PREFILL)
    pages = prefilled(rig, "n1", 320)
    request = rig["n2"].prefill("b", 320, pages, "n1", 20)
    rig.run(1.0 + 10 * PAGE_S)
    rig["n1"].fail()
    rig.run()
    assert (request.fetched, request.cached) == (0, 0)
    assert rig["n2"].scheduler.recomputed["peer_failed"] == 319
