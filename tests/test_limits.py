"""How much of the router a key may use: buckets, places in flight, the line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router import access
from services.router.access import (
    PRIORITIES,
    KeyEntry,
    Keys,
)
from services.router.limits import SHARE, Admission, Bucket
from shared.openai import ApiError
from tests.key_cases import NOW, entry, refused

# ---------------------------------------------------------------------- buckets

# Whole microseconds near today's clock: floats that hold them exactly enough to be rounded back.
micros = st.integers(0, 200_000_000)


def clock(us: int) -> float:
    return NOW + us / 1e6


@given(st.integers(1, 5000), st.lists(st.tuples(micros, st.integers(1, 400)), max_size=60))
def test_no_span_sees_more_than_a_burst_and_its_refill(limit, tries):
    bucket, t, taken = Bucket(limit, NOW), 0, []
    for gap, amount in tries:
        t += gap // 20
        amount = min(amount, limit)
        if not bucket.wait_s(amount, clock(t)):
            bucket.take(amount, clock(t))
            taken.append((t, amount))
    for i in range(len(taken)):
        total = 0
        for end, amount in taken[i:]:
            total += amount
            # in whole numbers, so that nothing is allowed for rounding
            assert total * 60_000_000 <= limit * (60_000_000 + end - taken[i][0])


@given(st.integers(1, 10_000), st.lists(st.tuples(micros, st.integers(0, 20_000)), max_size=40))
def test_a_refill_is_exact_however_often_it_is_looked_at(limit, takes):
    bucket, t, level = Bucket(limit, NOW), 0, limit * 60_000_000
    for gap, amount in takes:
        for _ in range(2):
            t += gap
            level = min(limit * 60_000_000, level + gap * limit)
            assert bucket.level(clock(t)) == level / 60_000_000
        bucket.take(amount, clock(t))
        level -= amount * 60_000_000


@given(st.integers(1, 10_000), st.integers(0, 50_000), st.integers(1, 20_000), micros)
def test_the_wait_is_the_shortest(limit, used, amount, us):
    bucket = Bucket(limit, NOW)
    bucket.take(used, NOW)
    wait_us = round(bucket.wait_s(amount, clock(us)) * 1e6)
    if wait_us:
        assert bucket.wait_s(amount, clock(us + wait_us - 1)) > 0
    assert bucket.wait_s(amount, clock(us + wait_us)) == 0
    assert bucket.level(clock(us + wait_us)) >= min(amount, limit)


def test_a_clock_that_is_set_back_neither_refills_nor_stops():
    bucket = Bucket(60, NOW)
    bucket.take(60, NOW)
    assert bucket.level(NOW - 3600) == 0
    assert bucket.level(NOW - 3590) == 10


def test_another_limit_keeps_what_was_used():
    bucket = Bucket(60, NOW)
    bucket.take(50, NOW)
    bucket.resize(100, NOW + 10)  # 10 came back at the old pace
    assert bucket.level(NOW + 10) == 60
    bucket.resize(20, NOW + 10)
    assert bucket.level(NOW + 10) == -20
    bucket.resize(0, NOW + 10)
    bucket.take(1000, NOW + 10)
    assert bucket.wait_s(10**9, NOW + 10) == 0
    bucket.resize(20, NOW + 20)
    assert bucket.level(NOW + 20) == 20


# ---------------------------------------------------------------------- admission


def test_requests_a_minute():
    gate, who = Admission(100), entry(requests_per_minute=2)
    for _ in range(2):
        gate.admit(who, NOW).done(0, NOW)
    error = refused(gate.admit, who, NOW + 0.5)
    assert (error.code, error.retry_after_s) == ("rate_limit_requests", 30)
    assert refused(gate.admit, who, NOW + 29.5).retry_after_s == 1
    gate.admit(who, NOW + 30)
    assert gate.in_flight == 1
    gate.admit(entry("other"), NOW)


def test_tokens_a_minute():
    gate, who = Admission(100), entry(tokens_per_minute=600)
    first, second = gate.admit(who, NOW), gate.admit(who, NOW)
    first.charge_prompt(500, NOW)
    error = refused(second.charge_prompt, 200, NOW)
    assert (error.code, error.retry_after_s) == ("rate_limit_tokens", 10)
    second.charge_prompt(100, NOW)
    first.done(60, NOW)  # 60 below zero
    error = refused(gate.admit, who, NOW)
    assert (error.code, error.retry_after_s) == ("rate_limit_tokens", 7)  # 6.1 s
    third = gate.admit(who, NOW + 7)
    third.done(-1000, NOW + 7)
    assert refused(gate.admit(who, NOW + 7).charge_prompt, 100, NOW + 7).retry_after_s == 9, "no refund"


def test_a_prompt_beyond_the_limit_waits_for_a_full_bucket_and_is_paid_back():
    gate, who = Admission(100), entry(tokens_per_minute=600)
    gate.admit(who, NOW).charge_prompt(1, NOW)
    ticket = gate.admit(who, NOW)
    assert refused(ticket.charge_prompt, 1800, NOW).retry_after_s == 1
    ticket.charge_prompt(1800, NOW + 1)
    assert refused(gate.admit, who, NOW + 1).retry_after_s == 121
    gate.admit(who, NOW + 122)


def test_requests_in_flight_of_a_key():
    gate, who = Admission(100), entry(max_in_flight=2)
    first, _ = gate.admit(who, NOW), gate.admit(who, NOW)
    assert refused(gate.admit, who, NOW).code == "too_many_in_flight"
    first.done(0, NOW)
    first.done(0, NOW)
    gate.admit(who, NOW)
    assert refused(gate.admit, who, NOW).code == "too_many_in_flight"
    assert gate.in_flight == gate.used_by("k") == 2


def test_a_refusal_takes_nothing():
    gate, who = Admission(1), entry(requests_per_minute=2, max_in_flight=5)
    ticket = gate.admit(who, NOW)
    for _ in range(5):
        assert refused(gate.admit, who, NOW).code == "overloaded"
    ticket.done(0, NOW)
    gate.admit(who, NOW).done(0, NOW)
    assert refused(gate.admit, who, NOW).code == "rate_limit_requests"


@pytest.mark.parametrize(("places", "batch", "normal"), [(1, 1, 1), (2, 1, 1), (10, 8, 9), (100, 80, 95)])
def test_room_is_kept_for_what_is_more_urgent(places, batch, normal):
    gate = Admission(places)
    most = {"batch": batch, "normal": normal, "interactive": places}
    for priority in ("batch", "normal", "interactive"):
        who = entry(priority, priority=priority)
        while gate.in_flight < most[priority]:
            gate.admit(who, NOW)
        error = refused(gate.admit, who, NOW)
        assert error.code == "overloaded" and error.retry_after_s == 1
    assert gate.in_flight == places


def test_the_line_is_by_priority_then_by_arrival():
    gate = Admission(1, max_waiting=10)
    running = gate.admit(entry(), NOW)
    order = ["batch", "interactive", "normal", "batch", "interactive"]
    waiting = [gate.admit(entry(p, priority=p), NOW) for p in order]
    assert all(t.waiting for t in waiting) and gate.waiting == 5 and gate.in_flight == 1
    assert [t.position for t in waiting] == [3, 0, 2, 4, 1]
    came = []
    while gate.in_flight:
        started = running.done(0, NOW)
        assert len(started) <= 1
        came += started
        if started:
            running = started[0]
            assert not running.waiting and running.position == 0
    assert came == [waiting[i] for i in (1, 4, 2, 0, 3)]
    assert gate.waiting == 0


def test_who_gives_up_leaves_the_line():
    gate = Admission(1, max_waiting=10)
    running, first, second = (gate.admit(entry(), NOW) for _ in range(3))
    assert first.done(0, NOW) == [] and first.done(0, NOW) == []
    assert not first.waiting and first.position == 0
    assert (gate.in_flight, gate.waiting, second.position) == (1, 1, 0)
    assert running.done(0, NOW) == [second]
    assert gate.used_by("k") == 1


def test_nothing_overtakes_its_own_priority_but_urgent_requests_pass():
    gate = Admission(10, max_waiting=10)
    tickets = [gate.admit(entry(priority="batch"), NOW) for _ in range(9)]
    assert [t.waiting for t in tickets] == [False] * 8 + [True]
    assert not gate.admit(entry("i", priority="interactive"), NOW).waiting
    assert gate.admit(entry(priority="batch"), NOW).position == 1
    # two batch requests end: one place below 80 % is free again, and the first in the line has it
    assert tickets[0].done(0, NOW) == []
    assert tickets[1].done(0, NOW) == [tickets[8]]


def test_the_line_is_bounded_with_room_for_what_is_urgent():
    gate = Admission(1, max_waiting=10)
    gate.admit(entry(), NOW)
    for _ in range(8):
        assert gate.admit(entry("b", priority="batch"), NOW).waiting
    assert refused(gate.admit, entry("b", priority="batch"), NOW).code == "overloaded"
    assert gate.admit(entry(), NOW).waiting
    assert refused(gate.admit, entry(), NOW).code == "overloaded"
    assert gate.admit(entry("i", priority="interactive"), NOW).position == 0
    assert refused(gate.admit, entry("i", priority="interactive"), NOW).code == "overloaded"


def test_waiting_counts_as_in_flight_of_the_key():
    gate, who = Admission(1, max_waiting=10), entry(max_in_flight=2)
    gate.admit(who, NOW)
    assert gate.admit(who, NOW).waiting
    assert refused(gate.admit, who, NOW).code == "too_many_in_flight"


def test_what_a_key_used_survives_a_reload_and_goes_with_the_key():
    gate = Admission(100)
    old, new = Keys((entry(requests_per_minute=3),)), Keys((entry(requests_per_minute=4, max_in_flight=2),))
    first = gate.admit(old.entries[0], NOW)
    gate.admit(old.entries[0], NOW)
    gate.reloaded(new)
    assert refused(gate.admit, new.entries[0], NOW).code == "too_many_in_flight"
    first.done(0, NOW)
    gate.admit(new.entries[0], NOW).done(0, NOW)
    gate.admit(new.entries[0], NOW).done(0, NOW)
    assert refused(gate.admit, new.entries[0], NOW).code == "rate_limit_requests"
    gate.reloaded(Keys(()))
    assert gate.used_by("k") == 1, "a request of a key that is gone still has its slot"
    assert refused(gate.admit, new.entries[0], NOW).code == "rate_limit_requests"


def test_keys_that_are_gone_are_forgotten_once_idle():
    gate, who = Admission(100), entry(requests_per_minute=1)
    gate.admit(who, NOW).done(0, NOW)
    gate.reloaded(Keys((who,)))
    assert refused(gate.admit, who, NOW).code == "rate_limit_requests"
    gate.reloaded(Keys(()))
    gate.admit(who, NOW)


class Leaks(RuleBasedStateMachine):
    """No slot is lost or given twice, whatever comes in whatever order."""

    names = st.sampled_from(["a", "b", "c"])

    def __init__(self):
        super().__init__()
        self.now = NOW
        self.gate = Admission(6, max_waiting=4)
        self.entries: dict[str, KeyEntry] = {}
        self.open: list[tuple[str, access.Ticket]] = []
        self.ended: list[access.Ticket] = []

    @rule(
        name=names,
        priority=st.sampled_from(PRIORITIES),
        rpm=st.sampled_from([0, 3, 60]),
        tpm=st.sampled_from([0, 100]),
        most=st.sampled_from([0, 1, 3]),
    )
    def reload(self, name, priority, rpm, tpm, most):
        self.entries[name] = entry(
            name, priority=priority, requests_per_minute=rpm, tokens_per_minute=tpm, max_in_flight=most
        )
        self.gate.reloaded(Keys(tuple(self.entries.values())))

    @rule(name=names)
    def revoke(self, name):
        self.entries.pop(name, None)
        self.gate.reloaded(Keys(tuple(self.entries.values())))

    @rule(name=names)
    def admit(self, name):
        who = self.entries.setdefault(name, entry(name))
        before = (self.gate.in_flight, self.gate.waiting, self.gate.used_by(name))
        try:
            self.open.append((name, self.gate.admit(who, self.now)))
        except ApiError:
            assert before == (self.gate.in_flight, self.gate.waiting, self.gate.used_by(name))
        if who.max_in_flight:
            assert self.gate.used_by(name) <= max(who.max_in_flight, before[2])

    @rule(data=st.data(), tokens=st.integers(0, 300))
    def charge(self, data, tokens):
        if self.open:
            try:
                data.draw(st.sampled_from(self.open))[1].charge_prompt(tokens, self.now)
            except ApiError as error:
                assert error.code == "rate_limit_tokens"

    @rule(data=st.data(), tokens=st.integers(-5, 300))
    def done(self, data, tokens):
        if self.open:
            chosen = data.draw(st.sampled_from(self.open))
            self.open.remove(chosen)
            waited = {t for _, t in self.open if t.waiting}
            started = chosen[1].done(tokens, self.now)
            assert {t for t in waited if not t.waiting} == set(started)
            self.ended.append(chosen[1])

    @rule(data=st.data())
    def done_again(self, data):
        if self.ended:
            assert data.draw(st.sampled_from(self.ended)).done(5, self.now) == []

    @rule(seconds=st.floats(0, 90))
    def later(self, seconds):
        self.now += seconds

    @invariant()
    def slots_are_those_of_open_requests(self):
        waiting = [t for _, t in self.open if t.waiting]
        assert self.gate.waiting == len(waiting) <= 4
        assert self.gate.in_flight == len(self.open) - len(waiting) <= 6
        assert sorted(t.position for t in waiting) == list(range(len(waiting)))
        for name in ("a", "b", "c"):
            assert self.gate.used_by(name) == sum(n == name for n, _ in self.open)

    @invariant()
    def nobody_waits_beside_room(self):
        for _, ticket in self.open:
            if ticket.waiting and ticket.position == 0:
                assert self.gate.in_flight >= max(1, 6 * SHARE[ticket.priority] // 100)


Leaks.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
test_no_slot_leaks = Leaks.TestCase
