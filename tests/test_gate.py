"""Waiting for a place: turns in order, and no place is lost, whoever gives up when."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.access import PRIORITIES, KeyEntry
from services.router.gate import Gate
from services.router.limits import Ticket
from shared.openai import ApiError


def entry(name: str = "k", **fields) -> KeyEntry:
    return KeyEntry(name=name, sha256="0" * 64, **fields)


ANY = entry(priority="interactive")


async def admitted(gate: Gate, key: KeyEntry) -> Ticket:
    """In flight at the end of it; whoever gives up before leaves, as a request's handler does."""
    ticket = gate.enter(key)
    try:
        await gate.turn(ticket)
    except BaseException:
        gate.leave(ticket, 0)
        raise
    return ticket


async def ticks(n: int = 5) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def assert_empty(gate: Gate) -> None:
    assert (gate.admission.in_flight, gate.admission.waiting) == (0, 0)
    assert not gate._waiting


async def line(gate: Gate, *keys: KeyEntry) -> list[asyncio.Task[Ticket]]:
    """Tasks that wait for a place, in that order."""
    tasks = []
    for key in keys:
        tasks.append(asyncio.create_task(admitted(gate, key)))
        await ticks()
    return tasks


async def test_with_room_nobody_waits():
    gate = Gate(2, 2)
    first = await admitted(gate, ANY)
    await admitted(gate, ANY)
    assert gate.admission.in_flight == 2 and not first.waiting


async def test_who_waits_goes_when_a_place_is_free():
    gate = Gate(1, 2)
    first = await admitted(gate, ANY)
    second, third = await line(gate, ANY, ANY)
    assert not second.done() and gate.admission.waiting == 2
    gate.leave(first, 0)
    await ticks()
    assert second.done() and not third.done()
    assert not second.result().waiting
    gate.leave(second.result(), 0)
    gate.leave(await third, 0)
    assert_empty(gate)


async def test_the_urgent_go_first_and_the_rest_in_the_order_of_their_coming():
    gate = Gate(1, 100)
    held = await admitted(gate, ANY)
    order: list[str] = []

    async def one(name: str, key: KeyEntry) -> None:
        ticket = await admitted(gate, key)
        order.append(name)
        gate.leave(ticket, 0)

    tasks = []
    for n in range(2):
        for priority in reversed(PRIORITIES):
            tasks.append(asyncio.create_task(one(f"{priority}{n}", entry(priority, priority=priority))))
            await ticks()
    gate.leave(held, 0)
    await asyncio.gather(*tasks)
    assert order == [f"{priority}{n}" for priority in PRIORITIES for n in range(2)]
    assert_empty(gate)


async def test_a_full_line_refuses_at_once():
    gate = Gate(1, 1)
    held = await admitted(gate, ANY)
    (waiting,) = await line(gate, ANY)
    with pytest.raises(ApiError) as caught:
        async with asyncio.timeout(1.0):
            await admitted(gate, ANY)
    assert (caught.value.status, caught.value.code) == (429, "overloaded")
    gate.leave(held, 0)
    gate.leave(await waiting, 0)
    assert_empty(gate)


async def test_without_a_line_nobody_waits():
    gate = Gate(1, 0)
    await admitted(gate, ANY)
    with pytest.raises(ApiError):
        await admitted(gate, ANY)


async def test_a_keys_own_limits_refuse_at_once_and_take_nothing():
    gate = Gate(10, 10)
    one = entry("one", max_in_flight=1)
    first = await admitted(gate, one)
    with pytest.raises(ApiError) as caught:
        await admitted(gate, one)
    assert caught.value.code == "too_many_in_flight"
    gate.leave(first, 0)
    gate.leave(await admitted(gate, one), 0)
    assert_empty(gate)


async def test_tokens_are_charged():
    gate = Gate(10, 10)
    limited = entry("limited", tokens_per_minute=100)
    ticket = await admitted(gate, limited)
    gate.charge(ticket, 60)
    with pytest.raises(ApiError) as caught:
        gate.charge(ticket, 60)
    assert caught.value.code == "rate_limit_tokens"
    gate.leave(ticket, 1000)  # the output counts, too
    with pytest.raises(ApiError):
        await admitted(gate, limited)
    assert_empty(gate)


async def test_leaving_twice_frees_one_place():
    gate = Gate(1, 10)
    first = await admitted(gate, ANY)
    second, third = await line(gate, ANY, ANY)
    gate.leave(first, 0)
    gate.leave(first, 0)
    await ticks()
    assert second.done() and not third.done()
    gate.leave(first, 0)
    await ticks()
    assert not third.done() and gate.admission.in_flight == 1
    gate.leave(second.result(), 0)
    gate.leave(await third, 0)
    assert_empty(gate)


async def test_who_gives_up_leaves_the_line():
    gate = Gate(1, 10)
    held = await admitted(gate, ANY)
    quits, stays = await line(gate, ANY, ANY)
    quits.cancel()
    await ticks()
    assert quits.cancelled() and gate.admission.waiting == 1
    gate.leave(held, 0)
    gate.leave(await stays, 0)
    assert_empty(gate)


@pytest.mark.parametrize(("first", "ticks_between"), [("turn", 0), ("cancel", 0), ("cancel", 1)])
async def test_a_turn_that_comes_as_its_request_gives_up_is_the_next_ones(first, ticks_between):
    gate = Gate(1, 10)
    held = await admitted(gate, ANY)
    quits, stays = await line(gate, ANY, ANY)
    acts = [lambda: gate.leave(held, 0), quits.cancel]
    for act in acts if first == "turn" else reversed(acts):
        act()
        await ticks(ticks_between)
    await ticks()
    assert quits.cancelled()
    assert stays.done() and gate.admission.in_flight == 1
    gate.leave(stays.result(), 0)
    assert_empty(gate)


async def test_several_that_give_up_in_one_tick_lose_no_place():
    gate = Gate(2, 10)
    held = [await admitted(gate, ANY), await admitted(gate, ANY)]
    tasks = await line(gate, *[ANY] * 6)
    for ticket in held:
        gate.leave(ticket, 0)
    for task in tasks[:5]:
        task.cancel()
    await ticks()
    assert [task.cancelled() for task in tasks[:5]] == [True] * 5
    assert tasks[5].done() and gate.admission.in_flight == 1 and gate.admission.waiting == 0
    gate.leave(tasks[5].result(), 0)
    assert_empty(gate)


async def test_a_deadline_ends_the_waiting():
    gate = Gate(1, 10)
    held = await admitted(gate, ANY)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await admitted(gate, ANY)
    gate.leave(held, 0)
    assert_empty(gate)


async def storm(seed: int, places: int, waiting: int, requests: int) -> None:
    """Requests that come, work, give up and end in any order."""
    rng = random.Random(seed)
    gate = Gate(places, waiting)
    inside = most = served = 0

    async def one() -> None:
        nonlocal inside, most, served
        key = entry(
            f"k{rng.randrange(3)}", priority=rng.choice(PRIORITIES), max_in_flight=rng.choice([0, 50])
        )
        await ticks(rng.randrange(20))
        try:
            ticket = await admitted(gate, key)
        except ApiError as error:
            assert error.status == 429
            return
        inside += 1
        most = max(most, inside)
        try:
            await ticks(rng.randrange(6))
            served += 1
        finally:
            inside -= 1
            gate.leave(ticket, rng.randrange(5))
            if rng.random() < 0.2:
                gate.leave(ticket, 1)

    tasks = [asyncio.create_task(one()) for _ in range(requests)]
    for _ in range(60):
        for task in rng.sample(tasks, k=min(len(tasks), rng.randrange(4))):
            task.cancel()
        assert gate.admission.in_flight <= places
        assert gate.admission.waiting <= waiting
        await asyncio.sleep(0)
    async with asyncio.timeout(5.0):  # whoever waits gets a turn
        await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert most <= places and inside == 0
    assert_empty(gate)
    assert all(gate.admission.used_by(f"k{n}") == 0 for n in range(3))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 12), st.integers(1, 40))
def test_no_place_is_lost_whatever_happens(seed, places, waiting, requests):
    asyncio.run(storm(seed, places, waiting, requests))
