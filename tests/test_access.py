"""Keys, limits and the waiting line of the router."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router import access
from services.router.access import (
    PRIORITIES,
    KeyEntry,
    KeyFile,
    Keys,
    Unauthorized,
    check_listen,
    is_loopback,
    key_digest,
    new_key,
)
from services.router.limits import SHARE, Admission, Bucket
from shared.config import ConfigError
from shared.openai import ApiError
from shared.pages import page_hashes

NOW = 1_900_000_000.0
SECRET = "s" * 40


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def block(name: str, key: str, **fields: object) -> str:
    lines = [f'[[key]]\nname = "{name}"\nsha256 = "{sha(key)}"']
    lines += [f"{field} = {value}" for field, value in fields.items()]
    return "\n".join(lines) + "\n"


def entry(name: str = "k", **fields) -> KeyEntry:
    return KeyEntry(name=name, sha256=sha(name), **fields)


def refused(call, *args) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args)
    assert caught.value.status == 429
    assert caught.value.type == "rate_limit_error"
    assert caught.value.headers()["Retry-After"] == str(caught.value.retry_after_s)
    return caught.value


# ---------------------------------------------------------------------- the file


def test_a_whole_entry_is_read():
    keys = Keys.parse(
        f'[tenants]\nsecret = "{SECRET}"\n'
        + block(
            "ci",
            "ei-1",
            tenant='"acme"',
            priority='"batch"',
            requests_per_minute=60,
            tokens_per_minute=1000,
            max_in_flight=4,
            admin="true",
            expires="2027-01-31T12:00:00+02:00",
        )
        + block("bare", "ei-2", expires='"2027-01-31T12:00:00Z"'),
        "keys.toml",
    )
    whole, bare = keys.entries
    assert whole == KeyEntry(
        name="ci",
        sha256=sha("ei-1"),
        tenant="acme",
        priority="batch",
        requests_per_minute=60,
        tokens_per_minute=1000,
        max_in_flight=4,
        admin=True,
        expires=datetime(2027, 1, 31, 10, tzinfo=UTC),
    )
    assert (bare.priority, bare.admin, bare.tenant, bare.max_in_flight) == ("normal", False, None, 0)
    assert bare.expires == datetime(2027, 1, 31, 12, tzinfo=UTC)


GOOD = block("good", "ei-0")
HASH = sha("ei-1")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x = = 1", ["is not TOML"]),
        ("x = " + "9" * 5000, ["is not TOML"]),
        ("x = " + "[" * 5000, ["is not TOML"]),
        ("keys = 1", ["unknown key 'keys'"]),
        ("key = 1", ["two brackets"]),
        ("[key]\nname = 'a'", ["two brackets"]),
        ("key = [1]", ["[[key]] 1", "Expected `object`"]),
        ("[[key]]\nname = 'a'", ["[[key]] 1 ('a')", "sha256"]),
        (f"[[key]]\nsha256 = '{HASH}'", ["[[key]] 1", "name"]),
        (GOOD + block("a", "ei-1", rpm=3), ["[[key]] 2 ('a')", "rpm"]),
        (
            GOOD + block("a", "ei-1", requests_per_minute=-1),
            ["[[key]] 2 ('a')", "requests_per_minute", ">= 0"],
        ),
        (GOOD + block("a", "ei-1", tokens_per_minute=1.5), ["[[key]] 2 ('a')", "tokens_per_minute"]),
        (GOOD + block("a", "ei-1", max_in_flight="true"), ["[[key]] 2 ('a')", "max_in_flight"]),
        (GOOD + block("a", "ei-1", admin='"yes"'), ["[[key]] 2 ('a')", "admin"]),
        (
            GOOD + block("a", "ei-1", priority='"high"'),
            ["[[key]] 2 ('a')", "priority", "interactive, normal, batch"],
        ),
        (GOOD + block("a", "ei-1", expires="2027-01-31"), ["[[key]] 2 ('a')", "expires"]),
        (
            GOOD + block("a", "ei-1", expires="2027-01-31T00:00:00"),
            ["[[key]] 2 ('a')", "expires", "timezone"],
        ),
        (GOOD + block("a", "ei-1", tenant='""'), ["[[key]] 2 ('a')", "tenant"]),
        (GOOD + block("a", "ei-1", tenant='"t"'), ["[[key]] 2 ('a')", "tenant", "[tenants] secret"]),
        (GOOD + block(" a", "ei-1"), ["[[key]] 2", "name"]),
        (GOOD + block("a\\nb", "ei-1"), ["[[key]] 2", "name"]),
        (GOOD + block("x" * 65, "ei-1"), ["[[key]] 2", "name"]),
        (GOOD + block("good", "ei-1"), ["[[key]] 2 ('good')", "name", "[[key]] 1"]),
        (GOOD + block("a", "ei-0"), ["[[key]] 2 ('a')", "sha256", "[[key]] 1"]),
        (GOOD + f"[[key]]\nname='a'\nsha256='{HASH[:-1]}'", ["[[key]] 2 ('a')", "sha256"]),
        (GOOD + f"[[key]]\nname='a'\nsha256='{HASH[:-1]} '", ["[[key]] 2 ('a')", "sha256"]),
        ("tenants = 1", ["[tenants]"]),
        ("[tenants]", ["[tenants]", "secret"]),
        ("[tenants]\nsecret = 'short'", ["[tenants] secret", "32"]),
        (f"[tenants]\nsecret = '{SECRET}'\nsalt = 1", ["[tenants]", "nothing else"]),
    ],
)
def test_a_broken_file_says_which_entry_and_field(text, parts):
    with pytest.raises(ConfigError) as caught:
        Keys.parse(text, "keys.toml")
    message = str(caught.value)
    assert message.startswith("keys.toml: ") and "\n" not in message
    for part in parts:
        assert part in message


def test_equal_hashes_in_other_letters_are_the_same_key():
    text = block("a", "ei-1") + f"[[key]]\nname = 'b'\nsha256 = '{HASH.upper()}'"
    with pytest.raises(ConfigError, match="is that of"):
        Keys.parse(text, "f")


def test_a_key_in_place_of_its_hash_is_named_but_not_shown():
    key = new_key()
    with pytest.raises(ConfigError) as caught:
        Keys.parse(f"[[key]]\nname = 'a'\nsha256 = '{key}'", "f")
    assert "not the key itself" in str(caught.value) and key not in str(caught.value)


def test_new_keys_are_long_random_and_fit_a_header():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    for key in keys:
        assert key.startswith("ei-") and len(key) == 46 and key.isascii() and key.isprintable()


# ---------------------------------------------------------------------- who it is


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def unauthorized(keys: Keys, headers: dict[str, str], now: float = NOW) -> Unauthorized:
    with pytest.raises(Unauthorized) as caught:
        keys.authenticate(headers, now)
    assert caught.value.status == 401
    return caught.value


TWO = Keys.parse(block("one", "ei-1") + block("two", "ei-2"), "f")


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        (bearer("ei-1"), "one"),
        ({"authorization": "bearer   ei-2 "}, "two"),
        ({"x-api-key": " ei-2"}, "two"),
        ({"authorization": "Bearer none", "x-api-key": "ei-2"}, "two"),
        ({"authorization": "Basic eHg=", "x-api-key": "ei-2"}, "two"),
        ({"authorization": "Bearer ei-1", "x-api-key": "none"}, "one"),
        ({"authorization": "Bearer ei-1", "x-api-key": "ei-2"}, "one"),
    ],
)
def test_a_key_is_found_in_either_header(headers, name):
    assert TWO.authenticate(headers, NOW).name == name


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"x-api-key": " "},
        {"authorization": "Bearer"},
        {"authorization": "Basic x"},
    ],
)
def test_no_key_is_told_how_to_give_one(headers):
    error = unauthorized(TWO, headers)
    assert error.code == "missing_api_key" and "x-api-key" in error.message
    assert error.headers()["WWW-Authenticate"] == 'Bearer realm="evolving-infra"'


@pytest.mark.parametrize(
    "key", ["ei-3", "EI-1", "ei-1x", "ei-", HASH, "\udcff\udcfe", "\ud800", "ä", "x" * 100_000]
)
def test_an_unknown_key_is_refused_and_not_repeated(key):
    error = unauthorized(TWO, bearer(key))
    assert error.code == "invalid_api_key" and 'error="invalid_token"' in error.headers()["WWW-Authenticate"]
    assert "ei-" not in error.body().decode() and "one" not in error.message


def test_an_expired_key_is_told_so_to_who_holds_it():
    keys = Keys.parse(block("old", "ei-1", expires="2027-01-31T12:00:00Z") + block("new", "ei-2"), "f")
    end = datetime(2027, 1, 31, 12, tzinfo=UTC).timestamp()
    assert keys.authenticate(bearer("ei-1"), end - 0.001).name == "old"
    assert unauthorized(keys, bearer("ei-1"), end).code == "expired_api_key"
    assert unauthorized(keys, bearer("ei-3"), end).code == "invalid_api_key"
    assert keys.authenticate(bearer("ei-1") | {"x-api-key": "ei-2"}, end).name == "new"


def test_a_file_of_no_keys_lets_nobody_in():
    keys = Keys.parse("# none\n", "f")
    assert unauthorized(keys, bearer("ei-1")).code == "invalid_api_key"
    assert unauthorized(keys, {}).code == "missing_api_key"
    assert unauthorized(keys, bearer("anonymous")).code == "invalid_api_key"


@pytest.mark.parametrize("admin", [False, True])
def test_without_a_file_everybody_is_one_without_limits(admin):
    keys = Keys.none(admin=admin)
    who = keys.authenticate(bearer("none"), NOW)
    assert who is keys.authenticate({}, NOW) and who.admin is admin
    assert (who.requests_per_minute, who.tokens_per_minute, who.max_in_flight) == (0, 0, 0)
    assert keys.salt(who.tenant) == ""


def test_only_the_hash_of_a_key_meets_stored_hashes(monkeypatch):
    """Every look-up is by 32 bytes that depend on all of the key: no comparison sees the key itself."""
    looked_up = []

    class Watched(dict):
        def get(self, key, default=None):
            looked_up.append(key)
            return super().get(key, default)

    keys = Keys.parse(block("one", "ei-1"), "f")
    monkeypatch.setattr(keys, "_by_digest", Watched(keys._by_digest))
    keys.authenticate(bearer("ei-1"), NOW)
    unauthorized(keys, bearer("ei-0"))
    assert looked_up == [hashlib.sha256(b"ei-1").digest(), hashlib.sha256(b"ei-0").digest()]
    assert key_digest("ei-1") == hashlib.sha256(b"ei-1").digest()


def test_tenants_never_share_pages():
    text = block("a", "ei-1", tenant='"a"')
    one, other = (
        Keys.parse(f'[tenants]\nsecret = "{secret}"\n' + text, "f") for secret in ("1" * 32, "2" * 32)
    )
    salts = [one.salt("a"), one.salt("b"), other.salt("a"), one.salt(None)]
    assert len(set(salts)) == 4 and one.salt(None) == "" and one.salt("a") == salts[0]
    paths = [set(page_hashes(list(range(64)), 16, salt=salt).tolist()) for salt in salts]
    assert len(set.union(*paths)) == 4 * 4
    assert one.has_secret and not TWO.has_secret


# ---------------------------------------------------------------------- reloads


@pytest.fixture
def settle(monkeypatch):
    """Files count as old enough to be told by their timestamps."""
    monkeypatch.setattr(access, "_FRESH_NS", 0)


def replace(path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(text)
    os.replace(draft, path)


def test_keys_rotate_without_a_restart(tmp_path, settle):
    path = tmp_path / "keys.toml"
    replace(path, block("old", "ei-1"))
    file = KeyFile(str(path))
    first = file.keys
    assert not file.changed() and file.keys is first
    replace(path, block("old", "ei-1") + block("new", "ei-2"))
    assert file.changed() and not file.changed()
    assert {file.keys.authenticate(bearer(k), NOW).name for k in ("ei-1", "ei-2")} == {"old", "new"}
    replace(path, block("new", "ei-2"))
    assert file.changed()
    assert unauthorized(file.keys, bearer("ei-1")).code == "invalid_api_key"
    assert file.keys.authenticate(bearer("ei-2"), NOW).name == "new"


@pytest.mark.parametrize("bad", [b"x = =", b"", b" \n", b"\xff\xfe", b"[[key]]\nname = 'a'\n", None])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_broken_file_keeps_the_old_keys_and_says_why(tmp_path, monkeypatch, bad, fresh):
    if not fresh:
        monkeypatch.setattr(access, "_FRESH_NS", 0)
    path = tmp_path / "keys.toml"
    path.write_text(GOOD)
    file = KeyFile(str(path))
    keys = file.keys
    if bad is None:
        path.unlink()
    else:
        path.write_bytes(bad)
    assert file.changed() and file.keys is keys
    assert file.error is not None and str(path) in file.error
    assert not file.changed(), "the same error is no news"
    assert not file.changed() and file.error is not None
    path.write_text(GOOD)
    assert file.changed() and file.error is None
    assert [e.name for e in file.keys.entries] == ["good"]
    assert not file.changed()


@pytest.mark.parametrize("bad", [b"x = =", b"", b"\xff", None])
def test_a_router_does_not_begin_with_a_broken_file(tmp_path, bad):
    path = tmp_path / "keys.toml"
    if bad is not None:
        path.write_bytes(bad)
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        KeyFile(str(path))


def test_a_change_within_one_tick_of_the_file_system_is_seen(tmp_path, monkeypatch):
    """Same size, same inode, same times: a file that was just written is read again for that."""
    path = tmp_path / "keys.toml"
    path.write_text(block("a", "ei-1"))
    file = KeyFile(str(path))
    seen = file._signature()
    path.write_text(block("b", "ei-1"))
    monkeypatch.setattr(KeyFile, "_signature", lambda self: seen)
    assert file.changed() and file.keys.entries[0].name == "b"


def test_a_file_that_is_out_of_reach_for_a_while(tmp_path, settle, monkeypatch):
    path = tmp_path / "keys.toml"
    path.write_text(GOOD)
    file = KeyFile(str(path))

    def unreachable(self):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(KeyFile, "_signature", unreachable)
        assert file.changed() and "Input/output error" in (file.error or "")
        assert not file.changed()
    assert file.changed() and file.error is None
    assert not file.changed() and file.keys.authenticate(bearer("ei-0"), NOW).name == "good"


def test_an_unchanged_file_is_not_read(tmp_path, settle, monkeypatch):
    path = tmp_path / "keys.toml"
    path.write_text(GOOD)
    file = KeyFile(str(path))
    monkeypatch.setattr(KeyFile, "_load", lambda self: pytest.fail("read"))
    assert not file.changed()


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


# ---------------------------------------------------------------------- where to listen


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost", "::ffff:127.0.0.1"])
def test_without_keys_the_router_serves_its_own_machine(host):
    assert is_loopback(host)
    check_listen(host, False, False)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "node7", "::ffff:10.0.0.1", "localhost.evil"]
)
def test_without_keys_it_does_not_serve_others_unless_told_to(host):
    assert not is_loopback(host)
    with pytest.raises(ConfigError) as caught:
        check_listen(host, False, False)
    for part in ("evolving keys add", "EI_ROUTER_KEYS_FILE", "127.0.0.1", "EI_ROUTER_ALLOW_ANONYMOUS"):
        assert part in str(caught.value)
    check_listen(host, True, False)
    check_listen(host, False, True)


def test_authentication_is_cheap():
    keys = Keys.parse("".join(block(f"k{i}", f"ei-{i}") for i in range(2000)), "f")
    start = time.perf_counter()
    for _ in range(1000):
        keys.authenticate(bearer("ei-1999"), NOW)
    assert time.perf_counter() - start < 1.0
