"""The cluster that the baselines' tests put before them, and what holds for every router whatever its rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.baselines.names import ROUTERS, make_router
from loadtest.baselines.policy import Arrival, Router
from shared.messages import NodeState, PageArray, Phase
from shared.timing import TINY, Profile

PAGE = 16  # tokens, as in the tiny profile


class View:
    """A cluster of nodes that hold what they are told to hold."""

    def __init__(self, prefill: str = "", decode: str = "", /, **profile: object) -> None:
        self.page_size = PAGE
        self.prefill_nodes: list[str] = prefill.split()
        self.decode_nodes: list[str] = decode.split()
        self.moving: Sequence[str] = ()
        self.l1: dict[str, PageArray] = {}
        self.l2: dict[str, PageArray] = {}
        self.queued: dict[str, int] = {}
        self.kv: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self.profiles: dict[str, Profile] = {}
        self._profile = msgspec.structs.replace(TINY, **profile)

    def leading(self, path: PageArray) -> Mapping[str, int]:
        nodes = [*self.l1, *(node for node in self.l2 if node not in self.l1)]
        none = np.empty(0, dtype=np.int64)
        held = {
            node: leading(path, np.union1d(self.l1.get(node, none), self.l2.get(node, none)))
            for node in nodes
        }
        return {node: pages for node, pages in held.items() if pages}

    def leading_l1(self, path: PageArray) -> Mapping[str, int]:
        held = {node: leading(path, pages) for node, pages in self.l1.items()}
        return {node: pages for node, pages in held.items() if pages}

    def profile(self, node: str) -> Profile:
        return self.profiles.get(node, self._profile)

    def state(self, node: str) -> NodeState | None:
        return None

    def queued_prefill_tokens(self, node: str) -> int:
        return self.queued.get(node, 0)

    def decode_kv_tokens(self, node: str) -> int:
        return self.kv.get(node, 0)

    def decode_requests(self, node: str) -> int:
        return self.requests.get(node, 0)


def leading(path: PageArray, pages: PageArray) -> int:
    missing = np.flatnonzero(~np.isin(path, pages))
    return int(missing[0]) if missing.size else len(path)


def pages(*parts: tuple[int, int]) -> PageArray:
    """A path of runs: (first page, how many). Runs with the same beginning are the same content."""
    runs = [np.arange(first, first + many, dtype=np.int64) for first, many in parts]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)


def arrival(
    rid: str = "r", path: PageArray | None = None, session: str = "s", tokens: int | None = None
) -> Arrival:
    path = pages((0, 10)) if path is None else path
    prompt = len(path) * PAGE if tokens is None else tokens
    return Arrival(rid, session, session, path, prompt, 100)


# ----------------------------------------------------------------- every router


def left_of(router: Router) -> dict[str, object]:
    """Attributes that keep something by request, by what they are called."""
    kept = {}
    for name in ("_prefilling", "_decoding", "_placed", "_sessions"):
        if hasattr(router, name):
            kept[name] = getattr(router, name)
    return kept


def loads_of(router: Router) -> list[float]:
    names = "prefill_load", "decode_load", "load", "waiting_s", "decode_tokens"
    found = []
    for node in "abcdef":
        for name in names:
            if hasattr(router, name):
                load = getattr(router, name)(*((node, math.inf) if name == "waiting_s" else (node,)))
                found += list(load) if isinstance(load, tuple) else [load]
    return found


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["place", "place", "start", "done", "end", "move", "tick", "finish"]),
        st.integers(0, 5),
        st.integers(1, 40),
        st.integers(0, 8),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_any_life_of_requests_ends_with_nothing_booked_and_is_repeatable(name, steps):
    first, router = live(name, steps)
    assert live(name, steps)[0] == first
    assert all(not kept for kept in left_of(router).values())
    assert all(load == 0 for load in loads_of(router))


def live(name: str, steps: list[tuple[str, int, int, int]]) -> tuple[list[object], Router]:
    router = make_router(name)
    view = View("a b c", "d e f")
    held: dict[str, Arrival] = {}
    running: dict[str, tuple[Arrival, bool]] = {}  # request, whether it has a decode node
    answers: list[object] = []

    def place(request: Arrival, now: float) -> None:
        placement = router.place(request, view, now)
        answers.append(placement)
        if placement is None:
            held[request.rid] = request
            return
        held.pop(request.rid, None)
        assert placement.node in view.prefill_nodes
        assert (placement.source is None) == (placement.fetch_pages == 0)
        bound = router.binds_at_routing
        if bound:
            answers.append(router.bind(request, placement.node, view, now))
            assert answers[-1] in view.decode_nodes
        running[request.rid] = (request, bound)

    for now, (what, who, many, which) in enumerate(steps):
        oldest = next(iter(running), None)
        if what == "place":
            place(arrival(f"r{now}", pages((1000 * which, many)), f"s{who}"), now)
        elif what == "start" and oldest is not None:
            router.prefill_started(oldest, now)
            request, bound = running[oldest]
            if not bound:
                answers.append(router.bind(request, "a", view, now))
                running[oldest] = (request, True)
        elif what == "done" and oldest is not None:
            router.prefill_done(oldest, now)
        elif what == "end" and oldest is not None:
            del running[oldest]
            router.ended(oldest, 16 * many, now)
        elif what == "move" and len(view.prefill_nodes) > 1:
            node = view.prefill_nodes.pop(which % len(view.prefill_nodes))
            view.decode_nodes.append(node)
            router.node_changed(node, Phase.DECODE, now)
        elif what == "tick":
            for rid in router.tick(view, now):
                place(held[rid], now)
    for rid in [*running, *held]:
        router.ended(rid, 10, len(steps))
    for session in {f"s{who}" for _, who, _, _ in steps}:
        router.session_ended(session, len(steps))
    return answers, router


@pytest.mark.parametrize("name", ROUTERS)
def test_without_a_node_of_the_phase_there_is_no_answer(name):
    router = make_router(name)
    with pytest.raises(ValueError, match="no node serves this phase"):
        router.place(arrival(), View("", "d"), 0.0)
    with pytest.raises(ValueError, match="no node serves this phase"):
        router.bind(arrival(), "a", View("a", ""), 0.0)


@pytest.mark.parametrize("name", ROUTERS)
def test_what_ended_or_never_was_is_ended_again_without_harm(name):
    router, view = make_router(name), View("a b", "c d")
    router.place(arrival("x"), view, 0.0)
    for rid in ("x", "x", "never"):
        router.prefill_started(rid, 1.0)
        router.prefill_done(rid, 1.0)
        router.ended(rid, 5, 1.0)
    router.session_ended("never", 2.0)
    assert all(load == 0 for load in loads_of(router))
    assert router.place(arrival("x"), view, 3.0) is not None  # placed again after it lost its node


def test_when_the_decode_node_is_bound_and_how_a_fetch_is_done():
    at_start = {name for name in ROUTERS if not make_router(name).binds_at_routing}
    assert at_start == {"arrow"}
    assert {name for name in ROUTERS if make_router(name).fetches_inline} == {"dynamo-pool"}
    ticks = {name: make_router(name).tick_s for name in ROUTERS}
    assert {name: s for name, s in ticks.items() if s is not None} == {
        "cache-aware": 120.0,
        "thunder-agent": 5.0,
    }
