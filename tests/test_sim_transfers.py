"""Pages between simulated nodes: what is fetched, loaded, shared and computed again, and how long it takes."""

from __future__ import annotations

import pytest

from shared.messages import Phase, Tier
from shared.timing import TINY, query_key_pairs
from tests.sim_node import (
    GAP,
    PAGE,
    bring,
    check_empty,
    drain,
    ends,
    generate,
    make,
    of,
    pages,
    prefill,
    tail,
    wanted_of,
)
from worker.engines.simulated.requests import (
    FetchWanted,
    Progress,
    Source,
    Stage,
    Started,
)
from worker.engines.simulated.transfers import TRANSFER_LATENCY_S, transfer_s
from worker.kv.path import Path


def test_a_late_fetch_is_overtaken_and_counts_as_cached() -> None:
    node = make()
    far = prefill("far", 330, 100, Source("http://peer", 20))
    node.submit(far, 0.0)
    node.submit(prefill("near", 256, 5000), 0.0)
    (wanted,) = of(FetchWanted, node.take_events())
    assert wanted.url == "http://peer" and wanted.path.pages.tolist() == pages(100, 320)
    state = node.state("n")
    assert state.running_prefills == ["near"]
    assert [(q.rid, q.t_uc, q.t_c) for q in state.queue] == [("far", 10, 320)] and state.queue[0].ready_t > 0
    bring(node, wanted, 20, 0.001)
    events = drain(node)
    assert [e.request.rid for e in of(Started, events)] == ["far"]
    assert (far.cached, far.fetched, far.restored) == (320, 320, 320)
    assert set(node.cache.pages(Tier.L2)) >= set(pages(100, 330))
    assert ends(events)["near"] < ends(events)["far"]
    check_empty(node)


def test_a_fetch_takes_its_transfer_time_from_its_arrival_on() -> None:
    node = make()
    request = prefill("a", 330, 100, Source("http://peer", 20))
    node.submit(request, 2.0)
    bring(node, wanted_of(node), 20, 2.001)
    (started,) = of(Started, drain(node))
    assert started.t == pytest.approx(2.0 + TRANSFER_LATENCY_S + 320 * 64 / 1e9)


@pytest.mark.parametrize(("held", "cached", "reason"), [(12, 192, "peer_missing"), (None, 0, "peer_failed")])
def test_what_a_peer_lacks_is_recomputed(held: int | None, cached: int, reason: str) -> None:
    node = make()
    request = prefill("a", 330, 100, Source("http://peer", 20))
    node.submit(request, 0.0)
    bring(node, wanted_of(node), held, 0.001)
    drain(node)
    assert (request.cached, request.fetched) == (cached, cached)
    assert node.recomputed[reason] == 320 - cached
    assert sum(r.t_uc for r in node.take_records()) == 330 - cached
    check_empty(node)


def test_a_decode_node_pulls_everything_and_computes_nothing() -> None:
    node = make(Phase.DECODE)
    request = generate("a", 70, 100, 20, routed=True, url="http://p")
    node.submit(request, 1.0)
    (wanted,) = of(FetchWanted, node.take_events())
    assert wanted.path.pages.tolist() == [*pages(100, 70), *tail(70, 100).pages] and wanted.tail
    assert node.state("n").decodes == ["a"]
    bring(node, wanted, 5, 1.001)
    events = drain(node)
    begin = 1.0 + transfer_s(TINY, 70)
    tau = TINY.decode.iteration_s(1)
    assert ends(events) == {"a": pytest.approx(begin + 20 * tau)}
    assert of(Progress, events)[0].t == pytest.approx(begin + tau)
    assert {r.phase for r in node.take_records()} == {Phase.DECODE}
    assert node.cache.held(Path.bare(pages(100, 80)).pages) == 5
    check_empty(node)


@pytest.mark.parametrize(("held", "t_uc"), [(5, 0), (4, 6), (3, 22), (0, 70), (None, 70)])
def test_a_decode_node_recomputes_what_it_cannot_pull(held: int | None, t_uc: int) -> None:
    node = make(Phase.DECODE)
    request = generate("a", 70, 100, 20, routed=True, url="http://p")
    node.submit(request, 1.0)
    bring(node, wanted_of(node), held, 1.001)
    drain(node)
    assert sum(r.t_uc for r in node.take_records()) == t_uc
    assert sum(node.recomputed.values()) == t_uc
    assert request.produced == 20
    check_empty(node)


def test_a_decode_with_every_page_here_still_asks_for_the_tail() -> None:
    node = make(Phase.DECODE)
    node.submit(generate("first", 70, 100, 1), 0.0)
    drain(node)
    node.take_records()
    for held, t_uc in ((None, 6), (1, 0)):
        request = generate("again", 70, 100, 5, routed=True, url="http://p")
        node.submit(request, 1.0)
        wanted = wanted_of(node)
        assert wanted.path.pages.tolist() == tail(70, 100).pages.tolist() and wanted.tail
        bring(node, wanted, held, 1.0)
        drain(node)
        assert sum(r.t_uc for r in node.take_records()) == t_uc
    assert int(tail(70, 100).pages[0]) not in node.cache.pages(Tier.L2), "nobody is told of a tail"


def test_a_collocated_node_decodes_what_it_prefilled_without_computing_again() -> None:
    node = make(Phase.BOTH)
    node.submit(prefill("a", 70, 100), 0.0)
    drain(node)
    node.take_records()
    node.submit(generate("a", 70, 100, 5, routed=True), 1.0)
    node.submit(generate("b", 69, 100, 5, routed=True), 1.0)  # another prompt: its tail is not here
    drain(node)
    assert sum(r.t_uc for r in node.take_records()) == 5
    check_empty(node)


def test_fewer_tokens_than_the_least_fetch_are_computed() -> None:
    node = make()
    least = TINY.fetch.min_tokens // PAGE
    node.submit(prefill("few", 330, 100, Source("http://peer", least - 1)), 0.0)
    assert not of(FetchWanted, node.take_events())
    drain(node)
    node.submit(prefill("enough", 330, 500, Source("http://peer", least)), 1.0)
    assert len(wanted_of(node).path) == least


def test_what_queued_prefills_reuse_is_loaded_while_they_wait() -> None:
    node = make(l1_pages=70)
    node.submit(prefill("early", 320, 100), 0.0)
    drain(node)
    node.submit(prefill("push", 1000, 500), 1.0)
    drain(node)
    assert not set(pages(100, 320)) <= set(node.cache.pages(Tier.L1).tolist())
    node.submit(prefill("runs", 256, 2000), 2.0)
    node.submit(prefill("runs on", 256, 2500), 2.0)
    again = prefill("again", 320, 100)
    node.submit(again, 2.0)
    runs = TINY.prefill.iteration_s(256, query_key_pairs(256, 0), 0) + GAP
    node.advance(2.0 + 1.5 * runs)
    assert again.stage is Stage.WAITING and again.lease is not None
    assert set(pages(100, 320)) <= set(node.cache.pages(Tier.L1).tolist())
    drain(node)
    assert again.restored > 0 and again.cached == 319
    check_empty(node)


def test_what_was_computed_after_a_prefill_was_loaded_is_shared_all_the_same() -> None:
    node = make()
    node.submit(prefill("runs", 256, 2000), 0.0)
    first, second = prefill("first", 320, 100), prefill("second", 330, 100)
    node.submit(first, 0.0)
    node.submit(second, 0.0)
    drain(node)
    assert (first.cached, second.cached) == (0, 256)
    check_empty(node)


def test_a_prefill_that_was_loaded_ahead_runs_though_an_older_one_waits_for_its_room() -> None:
    node = make(l1_pages=100)
    node.submit(prefill("runs", 38 * PAGE, 0), 0.0)
    older = prefill("older", 60 * PAGE, 1000, Source("http://peer", 60))
    node.submit(older, 0.0)
    younger = prefill("younger", 60 * PAGE, 5000)
    node.submit(younger, 0.0)
    wanted = wanted_of(node)
    while younger.lease is None:
        t = node.next_t()
        assert t is not None
        node.advance(t)
    assert younger.stage is Stage.WAITING
    bring(node, wanted, None, t)
    node.submit(generate("later", 20, 9000, 3), t)
    assert {"older", "younger", "later"} <= set(ends(drain(node)))
    check_empty(node)


def test_the_time_for_which_a_fetch_held_its_request_up() -> None:
    node = make()
    request = prefill("a", 330, 100, Source("http://peer", 20))
    node.submit(request, 2.0)
    bring(node, wanted_of(node), 20, 2.5)
    drain(node)
    assert request.exposed_s == pytest.approx(0.5)
    hidden = prefill("b", 330, 500, Source("http://peer", 20))
    node.submit(prefill("busy", 256, 5000), 3.0)
    node.submit(hidden, 3.0)
    (wanted,) = of(FetchWanted, node.take_events())
    bring(node, wanted, 20, 3.0)
    drain(node)
    assert hidden.exposed_s == 0.0 and hidden.cached == 320
