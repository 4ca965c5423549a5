"""Placement: the replayed wait, the fetch's exposed part, ties, stale states, late binding of decode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.placement import (
    Costs,
    DecodeNode,
    Prefill,
    PrefillNode,
    bind_decode,
    candidates,
    longest_source,
)
from shared.messages import NodeState, Phase, QueuedPrefill
from shared.timing import FetchModel, PrefillModel, query_key_pairs

MODEL = PrefillModel(c0=0.0125, c1=5e-5, c2=2.5e-10, c3=1.5e-7)
COSTS = Costs(FetchModel(0.45, 1e-6, 512))
PAGE = 64


def state(node="a", t=100.0, busy_until=0.0, queue=(), decodes=(), free=1_000_000, running=()):
    return NodeState(
        node, t, Phase.PREFILL, 1, False, busy_until, list(running), list(queue), list(decodes), 0, free
    )


def node(name="a", sent=(), model=MODEL, reported="fresh", **kw):
    return PrefillNode(
        name, model, 8192, 0.010, 0.0, state(name, **kw) if reported == "fresh" else reported, sent
    )


def waiting(*work):
    return [QueuedPrefill(f"q{i}", *lengths) for i, lengths in enumerate(work)]


def replayed(work, mine, f=0.0, chunk=8192):
    """Start and end of `mine` after `work`, iteration by iteration, all anew."""
    clock, start, room = 0.0, None, chunk
    tokens, pairs, restored = 0, 0.0, 0.0
    queue = [*work, mine]
    index, done = 0, 0
    while index < len(queue):
        prefill = queue[index]
        take = min(room, prefill.t_uc - done)
        if prefill is mine and start is None:
            start = clock
        if take > 0:
            restored += f * prefill.t_c if done == 0 else 0.0
            pairs += query_key_pairs(take, prefill.t_c + done)
            tokens, room, done = tokens + take, room - take, done + take
        if done >= prefill.t_uc:
            index, done = index + 1, 0
        if room == 0 or index == len(queue):
            clock += MODEL.iteration_s(tokens, pairs, restored)
            clock += 0.010 if index < len(queue) else 0.0
            room, tokens, pairs, restored = chunk, 0, 0.0, 0.0
    return start, clock


def test_idle_node_waits_for_nothing_and_serves_by_equation_1():
    start, end = node().predict(Prefill("me", 1000, 20_000), 100.0)
    assert start == 0
    assert end == pytest.approx(MODEL.iteration_s(1000, query_key_pairs(1000, 20_000), 0))


def test_running_iteration_and_queue_come_first_and_share_iterations():
    view = node(busy_until=100.2, queue=waiting((3000, 0), (3000, 640)))
    start, end = view.predict(Prefill("me", 5000, 0), 100.0)
    first = MODEL.iteration_s(
        8192,
        query_key_pairs(3000, 0) + query_key_pairs(3000, 640) + query_key_pairs(2192, 0),
        0,
    )
    second = MODEL.iteration_s(2808, query_key_pairs(2808, 2192), 0)
    assert start == pytest.approx(0.2)
    assert end == pytest.approx(0.2 + first + 0.010 + second)


def test_a_request_that_does_not_fit_the_running_chunk_starts_after_it():
    start, _ = node(queue=waiting((8192, 0))).predict(Prefill("me", 10, 0), 100.0)
    assert start == pytest.approx(MODEL.iteration_s(8192, query_key_pairs(8192, 0), 0) + 0.010)


@given(st.lists(st.integers(1, 20_000), max_size=6), st.integers(1, 30_000))
def test_replayed_time_is_the_work_plus_iteration_costs(queue, mine):
    """However requests share iterations, tokens and pairs are charged once each (Equation 1 summed)."""
    view = node(queue=waiting(*((tokens, 0) for tokens in queue)))
    start, end = view.predict(Prefill("me", mine, 0), 100.0)
    total = sum(queue) + mine
    iterations = -(-total // 8192)
    pairs = sum(query_key_pairs(tokens, 0) for tokens in [*queue, mine])
    assert end == pytest.approx(
        iterations * MODEL.c0 + (iterations - 1) * 0.010 + MODEL.c1 * total + MODEL.c2 * pairs
    )
    assert 0 <= start <= end


rids = st.sampled_from([f"r{i}" for i in range(6)])
works = st.builds(Prefill, rids, st.integers(1, 20_000), st.integers(0, 50_000))
what_happens = st.lists(
    st.one_of(
        st.tuples(st.just("send"), works),
        st.tuples(st.just("finished"), rids),
        st.tuples(st.just("report"), st.lists(works, max_size=3, unique_by=lambda w: w.rid), st.sets(rids, max_size=2)),
        st.tuples(st.just("f"), st.floats(0, 1)),
    ),
    max_size=12,
)  # fmt: skip


@given(what_happens, works, st.booleans())
def test_what_is_kept_of_the_work_is_what_a_replay_of_all_of_it_gives(happens, mine, stated):
    view = node()
    sent, queue, running, f = {}, [], set(), 0.0
    for what, *args in happens:
        if what == "send":
            sent.pop(args[0].rid, None)
            sent[args[0].rid] = args[0]
            view.send(args[0])
        elif what == "finished":
            sent.pop(args[0], None)
            view.finished(args[0])
        elif what == "report":
            queue, running = args
            queue = [QueuedPrefill(w.rid, w.t_uc, w.t_c) for w in queue]
            view.report(state(queue=queue, running=running))
        else:
            f = args[0]
            view.predict_with(restored_fraction=f)
        view.predict(mine, 100.0, stated)  # which is kept
    known = {w.rid for w in queue} | running
    work = [*queue, *(w for rid, w in sent.items() if rid not in known)] if stated else list(sent.values())
    assert view.predict(mine, 100.0, stated) == pytest.approx(replayed(work, mine, f))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), rids, st.integers(0, 9)),
            st.tuples(st.just("finished"), rids),
            st.tuples(st.just("report"), st.sets(rids)),
        )
    )
)
def test_a_decode_nodes_load_is_that_of_the_reported_and_the_sent_requests_together(happens):
    view = DecodeNode("d", 1000, state(free=500))
    sent, reported = {}, set()
    for what, *args in happens:
        if what == "send":
            sent[args[0]] = args[1]
            view.send(*args)
        elif what == "finished":
            sent.pop(args[0], None)
            view.finished(args[0])
        else:
            reported = args[0]
            view.report(state(decodes=reported, free=500))
    new = {rid: tokens for rid, tokens in sent.items() if rid not in reported}
    assert view.load(True) == (len(reported) + len(new), 500 - sum(new.values()))
    assert view.load(False) == (len(sent), 1000 - sum(sent.values()))


def test_unreported_requests_count_and_reported_ones_count_once():
    sent = [Prefill("q1", 8192, 0), Prefill("new", 8192, 0)]
    view = node("a", sent=sent, queue=[QueuedPrefill("q1", 8192, 0)])
    only_reported = node("b", queue=[QueuedPrefill("q1", 8192, 0)])
    a, b = (
        next(c for c in candidates(1000, PAGE, {}, [view, only_reported], COSTS, 100.0) if c.node == name)
        for name in "ab"
    )
    assert a.wait_s == pytest.approx(2 * b.wait_s)


def test_a_request_in_the_running_iteration_is_not_counted_again():
    view = node("a", sent=[Prefill("r", 5000, 0)], running=["r"], busy_until=100.3)
    assert candidates(1000, PAGE, {}, [view], COSTS, 100.0)[0].wait_s == pytest.approx(0.3)


def test_fetch_is_charged_only_beyond_the_wait():
    holders = {"b": 1000}
    busy = node("a", busy_until=110.0)
    idle = node("c")
    by_name = {c.node: c for c in candidates(70_000, PAGE, holders, [busy, idle], COSTS, 100.0)}
    assert by_name["a"].exposed_fetch_s == 0
    assert by_name["c"].exposed_fetch_s == pytest.approx(0.45 + 64_000e-6)
    for candidate in by_name.values():
        assert (candidate.source, candidate.own_pages, candidate.fetch_pages) == ("b", 0, 1000)
        assert candidate.copy_s == pytest.approx(64_000e-6)
        assert candidate.ttft_s == pytest.approx(candidate.predicted_s - candidate.copy_s)


def test_the_holder_wins_while_idle_and_loses_when_its_queue_costs_more_than_a_fetch():
    holders = {"a": 1500}
    idle = candidates(100_000, PAGE, holders, [node("a"), node("b")], COSTS, 100.0)
    assert idle[0].node == "a" and idle[0].own_pages == 1500 and idle[0].source is None
    queued = candidates(100_000, PAGE, holders, [node("a", busy_until=103.0), node("b")], COSTS, 100.0)
    assert queued[0].node == "b" and queued[0].fetch_pages == 1500


def test_less_than_512_tokens_are_not_fetched():
    holders = {"a": 107, "b": 100}
    found = {c.node: c for c in candidates(8000, PAGE, holders, [node("a"), node("b")], COSTS, 100.0)}
    assert found["b"].fetch_pages == 0 and found["b"].cached_tokens == 6400
    holders = {"a": 108, "b": 100}
    found = {c.node: c for c in candidates(8000, PAGE, holders, [node("a"), node("b")], COSTS, 100.0)}
    assert found["b"].fetch_pages == 8


def test_a_prompt_that_is_cached_whole_still_computes_its_last_page():
    found = candidates(128, PAGE, {"a": 2}, [node("a")], COSTS, 100.0)
    assert found[0].cached_tokens == 64


def test_ties_go_to_the_longest_own_prefix():
    free = PrefillModel(0, 0, 0, 0)
    costs = Costs(FetchModel(0, 0, 512), copy_s_per_token=0)
    nodes = [node(name, model=free) for name in "abc"]
    assert candidates(6400, PAGE, {"b": 50, "c": 10}, nodes, costs, 100.0)[0].node == "b"
    assert candidates(6400, PAGE, {}, nodes, costs, 100.0)[0].node == "a"


def test_a_stale_or_missing_state_is_used_only_when_no_other_is():
    stale = node("a", t=94.9)
    missing = node("b", reported=None)
    fresh = node("c", busy_until=500.0)
    assert candidates(100, PAGE, {}, [stale, missing, fresh], COSTS, 100.0)[0].node == "c"
    assert candidates(100, PAGE, {}, [stale, missing], COSTS, 100.0)[0].node == "a"
    just_fresh = node("d", t=95.0)
    assert candidates(100, PAGE, {}, [stale, just_fresh], COSTS, 100.0)[0].node == "d"


def test_source_is_the_longest_other_holder():
    assert longest_source([("b", 7), ("c", 7)], "b") == ("c", 7)
    assert longest_source([("b", 7), ("c", 7)], "a") == ("b", 7)
    assert longest_source([("a", 5)], "a") == longest_source([("b", 0)], "a") == (None, 0)
    holders = {"a": 10, "b": 20, "c": 20, "d": 20}
    found = {
        c.node: c.source for c in candidates(5000, PAGE, holders, [node(n) for n in "abcd"], COSTS, 100.0)
    }
    assert found == {"a": "b", "b": None, "c": None, "d": None}  # the smaller name when equal


def decode(name, requests=0, free=1_000_000, sent=None, t=100.0):
    reported = state(name, t=t, decodes=[f"{name}{i}" for i in range(requests)], free=free)
    return DecodeNode(name, 2_000_000, reported, sent)


def test_decode_goes_to_the_fewest_requests_that_has_room():
    assert bind_decode(1000, [decode("a", 3), decode("b", 1), decode("c", 2)], 5.0, 100.0) == "b"
    assert bind_decode(1000, [decode("a", 3), decode("b", 1, free=999)], 5.0, 100.0) == "a"


def test_bound_requests_that_the_node_has_not_reported_take_room_and_count():
    full = decode("a", 0, free=10_000, sent={"x": 9_500})
    assert bind_decode(1000, [full, decode("b", 5)], 5.0, 100.0) == "b"
    reported = decode("a", 1, free=10_000, sent={"a0": 9_500})
    assert bind_decode(1000, [reported, decode("b", 5)], 5.0, 100.0) == "a"


def test_without_room_anywhere_the_node_with_most_room_is_taken():
    assert bind_decode(5000, [decode("a", 0, free=10), decode("b", 9, free=4000)], 5.0, 100.0) == "b"


def test_decode_ties_prefer_the_node_that_has_the_kv_and_stale_comes_last():
    assert bind_decode(10, [decode("a", 1), decode("b", 1)], 5.0, 100.0, prefer="b") == "b"
    assert bind_decode(10, [decode("a", 0, t=90.0), decode("b", 7)], 5.0, 100.0) == "b"
    assert bind_decode(10, [], 5.0, 100.0) is None
