"""The simulated node: golden iteration times, batching, transfers, phase changes, and that calling it seldom
changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import Phase, RoleStage, Tier
from shared.timing import TINY, Profile, query_key_pairs
from worker.engines.simulated.phase import Ack, Kind
from worker.engines.simulated.requests import (
    Event,
    FetchWanted,
    Moved,
    NeverFits,
    Prefilled,
    Progress,
    Request,
    Source,
    Stage,
    Started,
)
from worker.engines.simulated.scheduler import Scheduler
from worker.engines.simulated.transfers import TRANSFER_LATENCY_S, transfer_s
from worker.kv.cache import NodeCache
from worker.kv.path import EMPTY, Path

E = TypeVar("E", bound=Event)
PAGE = TINY.page_size
P = TINY.prefill
GAP = TINY.idle_gap_s


def make(
    phase: Phase = Phase.BOTH, *, l1_pages: int = 200, l2_pages: int = 800, profile: Profile = TINY
) -> Scheduler:
    return Scheduler(profile, NodeCache(l1_pages, l2_pages), phase=phase)


def pages(first: int, tokens: int) -> list[int]:
    return list(range(first, first + tokens // PAGE))


def tail(tokens: int, first: int) -> Path:
    """The page that a prompt ends in when it is not full."""
    return Path.bare([10**9 + first * 1000 + tokens]) if tokens % PAGE else EMPTY


def prefill(rid: str, tokens: int, first: int, source: Source | None = None) -> Request:
    path = Path.bare(pages(first, tokens))
    return Request(rid, Kind.PREFILL, tokens, path, tail=tail(tokens, first), routed=True, source=source)


def generate(
    rid: str, tokens: int, first: int, output: int, *, routed: bool = False, url: str = "", room: int = 0
) -> Request:
    source = Source(url, 0) if url else None
    return Request(
        rid,
        Kind.GENERATE,
        tokens,
        Path.bare(pages(first, tokens + output)),
        tail=tail(tokens, first),
        output=output,
        room_tokens=room,
        routed=routed,
        source=source,
    )


def bring(node: Scheduler, wanted: FetchWanted, came: int | None, t: float) -> None:
    """What a fetcher does: the first `came` of the pages that are wanted come into host memory; None: the peer fails."""
    cache, path = node.cache, wanted.path[: came or 0]
    new = path.take(~cache.in_host(path.pages))
    slots = cache.reserve(len(new))
    ends_in_tail = wanted.tail and len(path) == len(wanted.path)
    if slots.size == len(new):
        cache.arrived(new, slots, tail=ends_in_tail and len(new) > 0 and new.pages[-1] == path.pages[-1])
    else:
        cache.give_back(slots)
        path = path[:0]
    reason = "peer_failed" if came is None else "peer_missing" if slots.size == len(new) else "no_room"
    full = len(path) == len(wanted.path)
    node.fetched(wanted.request, len(path), cache.hold(path.pages), "" if full else reason, t)


def wanted_of(node: Scheduler) -> FetchWanted:
    (wanted,) = of(FetchWanted, node.take_events())
    return wanted


def drain(node: Scheduler, until: float = math.inf) -> list[Event]:
    """Step from event to event until the node is idle or would pass `until`."""
    events = node.take_events()
    while (t := node.next_t()) is not None and t <= until:
        node.advance(t)
        events += node.take_events()
    return events


def of(kind: type[E], events: Iterable[Event]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def ends(events: Iterable[Event]) -> dict[str, float]:
    """When each request ended."""
    done = {event.request.rid: event.t for event in of(Prefilled, events)}
    return done | {event.request.rid: event.t for event in of(Progress, events) if event.done}


def check_empty(node: Scheduler) -> None:
    """Nothing runs, nothing is pinned or promised, free + indexed pages = all pages."""
    cache = node.cache
    assert node.requests == 0
    assert cache.l1_pinned == cache.l1_room == cache.l2_pinned == 0
    assert cache.l1_free + cache.l1_used == cache.l1_pages


# ------------------------------------------------------------------------------------- iterations


def test_prefill_in_chunks_takes_equation_1() -> None:
    node = make()
    node.submit(prefill("a", 300, 100), 10.0)
    events = drain(node)
    one = P.iteration_s(256, query_key_pairs(256, 0), 0)
    two = P.iteration_s(44, query_key_pairs(44, 256), 0)
    assert [e.t for e in of(Started, events)] == [10.0]
    assert ends(events) == {"a": pytest.approx(10.0 + one + GAP + two, abs=1e-12)}
    first, second = node.take_records()
    assert (first.t_uc, first.begun, first.batch, first.count) == (256, 1, 1, 1)
    assert (second.t_uc, second.begun, second.t_c) == (44, 0, 0)
    assert first.pairs + second.pairs == query_key_pairs(300, 0)
    assert (first.seconds, second.seconds) == (one, two)
    assert node.cache.held(Path.bare(pages(100, 300)).pages) == 300 // PAGE
    check_empty(node)


def test_requests_share_a_chunk_in_arrival_order() -> None:
    node = make()
    for number, tokens in enumerate((100, 200, 40)):
        node.submit(prefill(f"r{number}", tokens, 1000 * number), 0.0)
    events = drain(node)
    # The first was alone on the node when it came; the others share what follows.
    first, second = node.take_records()
    assert (first.batch, first.t_uc, first.begun) == (1, 100, 1)
    assert (second.batch, second.t_uc, second.begun) == (2, 240, 2)
    assert second.pairs == query_key_pairs(200, 0) + query_key_pairs(40, 0)
    assert ends(events)["r1"] == ends(events)["r2"]

    node = make()
    node.submit(prefill("busy", 16, 5000), 0.0)
    node.submit(prefill("long", 400, 1000), 0.0)
    node.submit(prefill("late", 400, 2000), 0.0)
    drain(node)
    # The budget of 256: long 256; long 144 + late 112; late 256; late 32.
    assert [r.t_uc for r in node.take_records()] == [16, 256, 256, 256, 32]


def test_cached_pages_are_not_computed_but_the_last_token_is() -> None:
    node = make()
    node.submit(prefill("a", 64, 100), 0.0)
    drain(node)
    node.take_records()
    longer = prefill("b", 100, 100)
    same = prefill("c", 64, 100)
    node.submit(longer, 1.0)
    node.submit(same, 1.0)
    drain(node)
    assert (longer.cached, longer.restored, same.cached) == (64, 0, 63)
    first, second = node.take_records()
    assert (first.t_uc, first.t_c, first.pairs) == (36, 64, query_key_pairs(36, 64))
    assert (second.t_uc, second.t_c) == (1, 63)


def test_pages_in_host_memory_only_are_restored() -> None:
    node = make(l1_pages=10)
    node.submit(prefill("a", 160, 100), 0.0)
    node.submit(prefill("b", 80, 500), 0.0)  # pushes five pages of a out of GPU memory
    drain(node)
    node.take_records()
    again = prefill("c", 160, 100)
    node.submit(again, 1.0)
    drain(node)
    assert (again.cached, again.restored) == (159, 80)
    (record,) = node.take_records()
    assert record.t_rst == 80
    assert record.seconds == P.iteration_s(1, query_key_pairs(1, 159), 80)


def test_decode_takes_equation_2_and_accepts_t_acc_tokens() -> None:
    profile = msgspec.structs.replace(TINY, t_acc=1.4)
    node = make(profile=profile)
    request = generate("a", 33, 100, 8)
    node.submit(request, 0.0)
    first = P.iteration_s(33, query_key_pairs(33, 0), 0)
    tau = TINY.decode.iteration_s(1)
    seen: list[tuple[float, int]] = []
    for step in range(60):
        node.advance(step * tau / 4)
        news = of(Progress, node.take_events())
        assert all(event.t <= step * tau / 4 for event in news)
        seen += [(event.t, event.produced) for event in news]
    # The prefill gives the first token; then 1, 1, 2, 1, 2 tokens an iteration.
    assert [n for _, n in seen] == [1, 2, 3, 5, 6, 8]
    begin = first + GAP
    assert [t for t, _ in seen] == pytest.approx([first] + [begin + i * tau for i in range(1, 6)], abs=1e-12)
    assert request.iterations == 5 and request.stage is Stage.ENDED
    decode = [r for r in node.take_records() if r.phase is Phase.DECODE]
    assert sum(r.count for r in decode) == 5 and sum(r.tokens for r in decode) == 7
    assert sum(r.seconds for r in decode) == pytest.approx(5 * tau)
    check_empty(node)


def test_a_newcomer_joins_the_batch_at_the_next_iteration() -> None:
    node = make(Phase.DECODE)
    for rid, first in (("a", 100), ("b", 200)):
        node.submit(prefill_direct(rid, first), 0.0)
    drain(node)
    node.take_records()
    node.submit(generate("a", 33, 100, 50), 1.0)
    events = drain(node, until=1.0)
    tau = TINY.decode.iteration_s(1)
    start = 1.0 + P.iteration_s(1, query_key_pairs(1, 32), 0) + GAP
    node.submit(generate("b", 33, 200, 10), start + 2.5 * tau)
    events += drain(node)
    records = node.take_records()
    prefill_at = next(i for i, r in enumerate(records) if i and r.phase is Phase.PREFILL)
    assert sum(r.count for r in records[1:prefill_at]) == 3
    both = [r for r in records if r.batch == 2]
    assert sum(r.count for r in both) == 9
    assert both[0].seconds / both[0].count == pytest.approx(TINY.decode.iteration_s(2))


def prefill_direct(rid: str, first: int) -> Request:
    """Two pages of prompt computed on any node, whatever its phase: a direct call for one token."""
    return generate(rid, 33, first, 1)


def test_prefill_goes_before_decode_on_one_node() -> None:
    node = make()
    node.submit(generate("d", 33, 100, 100), 0.0)
    events = drain(node, until=0.01)
    node.submit(prefill("p", 600, 500), 0.02)
    events += drain(node)
    phases = [r.phase for r in node.take_records()]
    at = phases.index(Phase.PREFILL, 1)
    assert phases[1] is Phase.DECODE and phases[at : at + 4] == [Phase.PREFILL] * 3 + [Phase.DECODE]
    assert ends(events)["p"] < ends(events)["d"]


def test_generated_pages_are_reused_by_the_next_step() -> None:
    node = make()
    node.submit(generate("a", 33, 100, 31), 0.0)
    drain(node)
    # 33 + 31 tokens fill four pages, but the newest token has no KV yet.
    assert node.cache.held(Path.bare(pages(100, 64)).pages) == 3
    longer = generate("b", 100, 100, 5)
    node.submit(longer, 1.0)
    drain(node)
    assert longer.cached == 48


# ------------------------------------------------------------------------------------- room


def test_a_decode_waits_for_room_and_one_that_never_fits_is_refused() -> None:
    node = make(l1_pages=10)
    node.submit(generate("a", 32, 100, 64, room=128), 0.0)  # all ten pages
    node.submit(generate("b", 32, 200, 4), 0.0)
    events = drain(node)
    assert of(Started, events)[1].t >= ends(events)["a"]
    with pytest.raises(NeverFits, match="192 tokens; this node has room for 160"):
        node.submit(generate("c", 32, 300, 160), 10.0)
    check_empty(node)


def test_one_that_waits_for_room_starts_as_soon_as_there_is_enough() -> None:
    node = make(l1_pages=10)
    node.submit(generate("long", 16, 100, 112), 0.0)  # eight pages
    node.submit(generate("short", 16, 200, 16), 0.0)  # two
    node.submit(generate("waits", 16, 300, 16), 0.0)
    times = ends(drain(node))
    assert times["short"] < times["waits"] < times["long"]


def test_what_waits_for_room_is_not_starved_by_what_came_later() -> None:
    node = make(l1_pages=10)
    node.submit(generate("running", 32, 100, 48), 0.0)  # five pages
    node.submit(prefill("wide", 160, 500), 0.001)  # all ten
    for number in range(4):
        node.submit(generate(f"small{number}", 16, 1000 * (number + 1), 16), 0.002)
    events = drain(node)
    times = ends(events)
    assert times["wide"] < min(times[f"small{n}"] for n in range(4))
    check_empty(node)


def test_a_blocked_request_that_goes_away_lets_the_others_in() -> None:
    node = make(l1_pages=10)
    node.submit(generate("running", 32, 100, 48), 0.0)
    wide = prefill("wide", 160, 500)
    node.submit(wide, 0.001)
    node.submit(generate("small", 16, 1000, 16), 0.002)
    node.advance(0.01)
    node.abort(wide, 0.01)
    times = ends(drain(node))
    assert set(times) == {"running", "small"}


# ------------------------------------------------------------------------------------- transfers


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


# ------------------------------------------------------------------------------------- phase changes


def test_a_phase_change_hands_back_the_queue_and_finishes_what_runs() -> None:
    node = make(Phase.PREFILL)
    node.submit(prefill("running", 300, 100), 0.0)
    node.submit(prefill("queued", 300, 500), 0.0)
    node.submit(generate("direct", 20, 900, 3), 0.0)
    node.set_role(5, Phase.DECODE, 0.001)
    events = node.take_events()
    assert [e.request.rid for e in of(Moved, events)] == ["queued"]
    state = node.state("n")
    assert (state.draining, state.phase, state.epoch) == (True, Phase.PREFILL, 0)
    late = prefill("late", 10, 700)
    node.submit(late, 0.002)
    node.submit(generate("early", 20, 800, 3, routed=True), 0.002)
    assert {e.request.rid for e in of(Moved, node.take_events())} == {"late", "early"}
    events = drain(node)
    drained, switched = of(Ack, events)
    ended = ends(events)["running"]
    # The next launch may be when the gap after the last iteration is over.
    assert (drained.stage, drained.epoch, drained.phase) == (RoleStage.DRAINED, 5, Phase.DECODE)
    assert drained.t == pytest.approx(ended + GAP, abs=1e-12)
    assert drained.drain_s == pytest.approx(ended + GAP - 0.001)
    assert switched.stage is RoleStage.SWITCHED and switched.switch_s == TINY.switch_s
    assert switched.t == pytest.approx(drained.t + TINY.switch_s)
    assert ends(events)["direct"] > 0
    after = node.state("n")
    assert (after.phase, after.epoch, after.draining) == (Phase.DECODE, 5, False)
    assert node.cache.held(Path.bare(pages(100, 300)).pages) == 18
    node.submit(generate("served", 20, 800, 3, routed=True), 1.0)
    assert "served" in ends(drain(node))
    check_empty(node)


def test_a_switch_stops_the_engine_for_its_time() -> None:
    node = make(Phase.BOTH)
    node.set_role(1, Phase.PREFILL, 1.0)
    node.submit(prefill("a", 100, 100), 1.01)  # both the old and the new phase serve it
    events = drain(node)
    assert of(Started, events)[0].t == pytest.approx(1.0 + TINY.switch_s)


def test_a_newer_epoch_while_draining_replaces_the_goal() -> None:
    node = make(Phase.DECODE)
    node.submit(generate("runs", 20, 100, 50, routed=True), 0.0)
    node.set_role(2, Phase.PREFILL, 0.005)
    node.set_role(3, Phase.BOTH, 0.006)
    node.set_role(2, Phase.DECODE, 0.007)  # older than the goal: ignored
    kept = generate("kept", 20, 300, 3, routed=True)
    node.submit(kept, 0.008)  # decode is served before and after
    events = drain(node)
    assert not of(Moved, events)
    assert [(a.stage, a.epoch, a.phase) for a in of(Ack, events)] == [
        (RoleStage.DRAINED, 3, Phase.BOTH),
        (RoleStage.SWITCHED, 3, Phase.BOTH),
    ]
    assert node.role.phase is Phase.BOTH


def test_a_newer_epoch_back_to_the_old_phase_ends_the_change_at_once() -> None:
    node = make(Phase.DECODE)
    node.submit(generate("runs", 20, 100, 50, routed=True), 0.0)
    node.set_role(2, Phase.PREFILL, 0.005)
    node.set_role(3, Phase.DECODE, 0.006)
    (ack,) = of(Ack, node.take_events())
    assert (ack.stage, ack.epoch, ack.phase) == (RoleStage.SWITCHED, 3, Phase.DECODE)
    node.submit(generate("new", 20, 300, 3, routed=True), 0.007)
    assert set(ends(drain(node))) == {"runs", "new"} and node.role.epoch == 3


def test_a_newer_epoch_during_the_switch_sets_the_phase_that_comes_out() -> None:
    node = make(Phase.DECODE)
    node.set_role(2, Phase.PREFILL, 1.0)
    node.set_role(3, Phase.DECODE, 1.01)
    events = drain(node)
    assert [(a.stage, a.epoch) for a in of(Ack, events)] == [
        (RoleStage.DRAINED, 2),
        (RoleStage.SWITCHED, 3),
    ]
    assert (node.role.phase, node.role.epoch) == (Phase.DECODE, 3)


def test_the_same_phase_only_takes_the_epoch() -> None:
    node = make(Phase.DECODE)
    node.set_role(7, Phase.DECODE, 1.0)
    node.set_role(6, Phase.PREFILL, 1.1)
    assert node.take_events() == [] and (node.role.epoch, node.role.draining) == (7, False)


def test_queued_decodes_that_have_not_begun_to_pull_are_handed_back() -> None:
    node = make(Phase.DECODE, l1_pages=10)
    first = generate("pulls", 64, 100, 90, routed=True, url="http://p")
    node.submit(first, 0.0)
    node.submit(generate("waits", 64, 500, 20, routed=True, url="http://p"), 0.0)
    node.set_role(1, Phase.PREFILL, 0.001)
    events = node.take_events()
    assert [e.request.rid for e in of(Moved, events)] == ["waits"]
    (wanted,) = of(FetchWanted, events)
    bring(node, wanted, 4, 0.002)
    events = drain(node)
    assert set(ends(events)) == {"pulls"} and node.role.phase is Phase.PREFILL


def test_stopping_hands_back_what_has_not_begun() -> None:
    node = make(Phase.BOTH)
    node.submit(prefill("runs", 300, 100), 0.0)
    node.submit(prefill("queued", 300, 500), 0.0)
    node.hand_back(0.001)
    assert [e.request.rid for e in of(Moved, node.take_events())] == ["queued"]
    assert set(ends(drain(node))) == {"runs"}


# ------------------------------------------------------------------------------------- abort and the rest

MOMENTS = [0.0, 0.0004, 0.001, 0.004, 0.0052, 0.0056, 0.006, 0.01, 0.02]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("answered", [True, False])
def test_an_abort_at_any_moment_frees_everything(moment: float, answered: bool) -> None:
    node = make(l1_pages=30)
    requests = [
        prefill("p", 330, 100, Source("http://peer", 20)),
        prefill("q", 300, 1000),
        generate("g", 70, 2000, 30, routed=True, url="http://peer"),
        generate("d", 70, 3000, 30),
        generate("w", 70, 4000, 300),
    ]
    for request in requests:
        node.submit(request, 0.0)
    fetches = of(FetchWanted, node.take_events())
    for wanted in fetches:
        if answered:
            bring(node, wanted, len(wanted.path), 0.0003)
    for request in requests:
        node.abort(request, moment)
        node.abort(request, moment)
    check_empty(node)
    node.take_events()
    assert ends(drain(node)) == {}
    for wanted in fetches:
        bring(node, wanted, 3, 1.0)
    check_empty(node)
    state = node.state("n")
    assert (state.queue, state.running_prefills, state.decodes, state.decode_tokens) == ([], [], [], 0)
    assert state.l1_free_tokens == 30 * PAGE


def test_an_idle_node_asks_for_no_wakeup() -> None:
    node = make()
    assert node.next_t() is None
    node.submit(prefill("a", 20, 100), 5.0)
    drain(node)
    assert node.next_t() is None
    node.advance(9.0)
    assert node.next_t() is None and node.state("n").busy_until <= 9.0


OPS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "fetch", "generate", "pull", "abort", "answer", "role"]),
        st.integers(1, 400),
        st.floats(0.0, 0.02),
    ),
    min_size=1,
    max_size=14,
)


def play(ops: list[tuple[str, int, float]], every_s: float | None) -> tuple[dict[str, object], Scheduler]:
    """Run the calls; with `every_s` also call `advance` that often in between."""
    node = make(l1_pages=60, profile=msgspec.structs.replace(TINY, t_acc=1.3))
    events: list[Event] = []
    live: list[Request] = []
    pending: list[FetchWanted] = []
    t, stepped = 0.0, 0.0

    def collect() -> None:
        new = node.take_events()
        pending.extend(of(FetchWanted, new))
        events.extend(new)

    def step_to(goal: float) -> None:
        nonlocal stepped
        while every_s is not None and stepped + every_s < goal:
            stepped += every_s
            node.advance(stepped)
            collect()

    for number, (op, size, wait) in enumerate(ops):
        t += wait
        step_to(t)
        # Both ways the node stands at `t` before the call, as any driver's does.
        node.advance(t)
        collect()
        rid, first = f"r{number}", 1000 * (size % 4)
        if op == "prefill":
            live.append(prefill(rid, size, first))
        elif op == "fetch":
            live.append(prefill(rid, size, first, Source("http://p", size // PAGE)))
        elif op == "generate":
            live.append(generate(rid, size, first, 1 + size % 60))
        elif op == "pull":
            live.append(generate(rid, size, first, 1 + size % 60, routed=True, url="http://p"))
        if op in ("prefill", "fetch", "generate", "pull"):
            node.submit(live[-1], t)
        elif op == "abort" and live:
            node.abort(live.pop(size % len(live)), t)
        elif op == "answer":
            while pending:
                bring(node, pending.pop(0), size % 7 if size % 3 else None, t)
        elif op == "role":
            node.set_role(number + 1, list(Phase)[size % 3], t)
        collect()
    while node.requests:
        for wanted in pending:
            bring(node, wanted, len(wanted.path), t)
        pending.clear()
        t += 0.05
        step_to(t)
        node.advance(t)
        collect()
    records = node.take_records()
    decode = [r for r in records if r.phase is Phase.DECODE]
    return {
        "ends": ends(events),
        "starts": {e.request.rid: e.t for e in of(Started, events)},
        "moved": {e.request.rid for e in of(Moved, events)},
        "prefills": [(r.t_uc, r.pairs, r.t_rst, r.begun, r.t_c) for r in records if r.phase is Phase.PREFILL],
        "decode": (
            sum(r.count for r in decode),
            sum(r.tokens for r in decode),
            pytest.approx(sum(r.seconds for r in decode)),
        ),
        "recomputed": node.recomputed,
        "pages": (sorted(node.cache.pages(Tier.L1)), sorted(node.cache.pages(Tier.L2))),
    }, node


@given(OPS, st.floats(0.0002, 0.003))
@settings(max_examples=200, deadline=None)
def test_passing_over_iterations_equals_going_step_by_step(
    ops: list[tuple[str, int, float]], every_s: float
) -> None:
    jumped, node = play(ops, None)
    stepped, other = play(ops, every_s)
    assert jumped == stepped
    check_empty(node)
    check_empty(other)
