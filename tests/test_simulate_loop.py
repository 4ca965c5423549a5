"""Simulated time: calls come in the order of their times, and each when it was asked for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.simulate.loop import Loop, Timer


def test_calls_come_in_the_order_of_their_times_and_see_their_time() -> None:
    loop, seen = Loop(), list[object]()
    for t in (3.0, 1.0, 2.0):
        loop.at(t, lambda t=t: seen.append((t, loop.now)))
    loop.after(0.5, lambda: seen.append((0.5, loop.now)))
    loop.run(10.0)
    assert seen == [(0.5, 0.5), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert loop.events == 4


def test_calls_of_one_time_come_in_the_order_in_which_they_were_asked_for() -> None:
    loop, seen = Loop(), list[object]()
    for number in range(20):
        loop.at(1.0, seen.append, number)
    loop.at(1.0, lambda: loop.at(1.0, seen.append, "asked for later"))
    loop.at(1.0, seen.append, "asked for before")
    loop.run(1.0)
    assert seen == [*range(20), "asked for before", "asked for later"]


def test_a_time_that_has_passed_is_now() -> None:
    loop, seen = Loop(), list[object]()
    loop.at(5.0, lambda: loop.at(1.0, lambda: seen.append(loop.now)))
    loop.run(9.0)
    assert seen == [5.0]


def test_run_stops_at_its_time_and_goes_on_from_there() -> None:
    loop, seen = Loop(), list[object]()
    loop.at(1.0, seen.append, "first")
    loop.at(2.0, seen.append, "at the end")
    loop.at(2.0001, seen.append, "after")
    assert loop.run(2.0) is True
    assert (seen, loop.now, loop.events) == (["first", "at the end"], 2.0, 2)
    loop.after(0.00005, seen.append, "between")
    assert loop.run(7.0) is False
    assert seen[2:] == ["between", "after"] and loop.now == 7.0


def test_a_run_without_calls_moves_the_time_and_never_back() -> None:
    loop = Loop()
    assert loop.run(4.0) is False and loop.now == 4.0
    loop.run(3.0)
    assert loop.now == 4.0


def test_a_cancelled_call_is_not_made() -> None:
    loop, seen = Loop(), list[object]()
    loop.at(1.0, seen.append, "kept")
    first, second = loop.at(1.0, seen.append, "x"), loop.at(2.0, seen.append, "y")
    first.cancel()
    first.cancel()
    loop.at(1.5, second.cancel)
    loop.run(5.0)
    assert seen == ["kept"]
    assert loop.events == 2  # a cancelled call is no event
    first.cancel()  # nor does it matter after its time


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 5), st.booleans()), max_size=40), st.integers(0, 5)
)
@settings(deadline=None)
def test_any_calls_are_made_once_and_in_order(calls: list[tuple[int, int, bool]], stop: int) -> None:
    """`calls`: the time, the seconds after which it asks for another call (-1: none), whether it is cancelled."""
    loop = Loop()
    seen: list[tuple[float, int]] = []
    asked: list[tuple[float, int]] = []
    timers: list[Timer] = []

    def ask(t: float, then: int) -> None:
        number = len(timers)
        timers.append(loop.at(t, made, number, then))
        asked.append((max(t, loop.now), number))

    def made(number: int, then: int) -> None:
        seen.append((loop.now, number))
        if then >= 0:
            ask(loop.now + then, -1)

    for t, then, _ in calls:
        ask(t, then)
    gone = {number for number, (_, _, cancelled) in enumerate(calls) if cancelled}
    for number in gone:
        timers[number].cancel()
    loop.run(stop)
    assert all(t <= stop for t, _ in seen)
    loop.run(100.0)
    assert seen == sorted(seen)
    assert seen == sorted(each for each in asked if each[1] not in gone)
