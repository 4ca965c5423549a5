"""The simulated node: golden iteration times, batching, room, aborts, and that calling it seldom changes nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import Phase, Tier
from shared.timing import TINY, query_key_pairs
from tests.sim_node import GAP, PAGE, P, bring, check_empty, drain, ends, generate, make, of, pages, prefill
from worker.engines.simulated.requests import (
    Event,
    FetchWanted,
    Moved,
    NeverFits,
    Progress,
    Request,
    Source,
    Stage,
    Started,
)
from worker.engines.simulated.scheduler import Scheduler
from worker.kv.path import Path

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
