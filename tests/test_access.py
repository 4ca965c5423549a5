"""Who may use the router: the file of keys, who a request is, reloads, where to listen."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import UTC, datetime

import pytest

from services.router import access
from services.router.access import (
    KeyEntry,
    KeyFile,
    Keys,
    Unauthorized,
    check_listen,
    is_loopback,
    key_digest,
    new_key,
)
from shared.config import ConfigError
from shared.pages import page_hashes
from tests.key_cases import NOW, SECRET, block, sha

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
