"""What a Redis URL says, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import ConfigError, Settings, load
from shared.redis_client import parse_url, redis_url, safe_url
from shared.streams import BusError


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://h", {"hosts": (("h", 6379),)}),
        ("redis://", {"hosts": (("localhost", 6379),)}),
        ("redis://h:7000/3", {"hosts": (("h", 7000),), "db": 3}),
        ("redis://[::1]:7000/", {"hosts": (("::1", 7000),), "db": 0}),
        ("redis://:p%40%2F%3A@h", {"username": "", "password": "p@/:"}),
        ("redis://u:p@h", {"username": "u", "password": "p", "tls": False}),
        ("redis://u@h", {"username": "u", "password": ""}),
        ("rediss://h?ssl_ca_certs=/ca.pem", {"tls": True, "ssl": {"ssl_ca_certs": "/ca.pem"}}),
        (
            "rediss://h?ssl_cert_reqs=none&ssl_check_hostname=false",
            {"ssl": {"ssl_cert_reqs": "none", "ssl_check_hostname": False}},
        ),
        ("unix:///run/redis.sock?db=2", {"path": "/run/redis.sock", "db": 2, "hosts": ()}),
        ("unix://u:p@/run/redis.sock", {"path": "/run/redis.sock", "username": "u", "password": "p"}),
        ("redis+sentinel://a/main", {"hosts": (("a", 26379),), "primary": "main", "db": 0}),
        (
            "redis+sentinel://u:p@a:1,[fe80::1],[::1]:3,d/main/4",
            {"hosts": (("a", 1), ("fe80::1", 26379), ("::1", 3), ("d", 26379)), "db": 4, "username": "u"},
        ),
        (
            "rediss+sentinel://a/main?sentinel_username=s&sentinel_password=q%26&ssl_cert_reqs=required",
            {"tls": True, "sentinel_username": "s", "sentinel_password": "q&"},
        ),
    ],
)
def test_what_a_url_says(url: str, said: dict[str, object]) -> None:
    target = parse_url(url)
    assert {name: getattr(target, name) for name in said} == said


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nonsense", "it must begin with redis://"),
        ("http://h", "it must begin with redis://"),
        ("sentinel://h/main", "it must begin with redis://"),
        ("redis://h:port", "a port must be a number"),
        ("redis://h:70000", "a port must be a number"),
        ("redis://::1", "an IPv6 address needs brackets"),
        ("redis://[::1", "an IPv6 address needs both brackets"),
        ("redis://h/main", "the database must be a number"),
        ("redis://h/0/1", "the database must be a number"),
        ("redis://a,b/0", "only redis+sentinel"),
        ("redis://h?socket_timeout=1", "unknown option 'socket_timeout' (known to redis: none)"),
        ("redis://h?db=1", "unknown option 'db'"),
        ("redis://h?ssl_ca_certs=/ca.pem", "ssl_ca_certs needs rediss"),
        ("rediss://h?sentinel_password=x", "unknown option 'sentinel_password'"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs must be"),
        ("rediss://h?ssl_check_hostname=", "ssl_check_hostname must be true or false"),
        ("rediss://h?ssl_keyfile=/k", "ssl_keyfile needs ssl_certfile"),
        ("rediss://h?ssl_ca_certs=/a&ssl_ca_certs=/b", "ssl_ca_certs is given twice"),
        ("unix://", "the path of the socket is missing"),
        ("redis+sentinel://a", "the primary's name is missing"),
        ("redis+sentinel:///main", "a host is missing"),
        ("redis+sentinel://a,,b/main", "a host is missing"),
        ("redis+sentinel://a/main/x", "the database must be a number"),
        ("redis://:se/cret@h", "must be percent-encoded"),
        ("redis://:se?cret@h", "must be percent-encoded"),
    ],
)
def test_a_url_that_says_nothing_is_one_line(url: str, why: str) -> None:
    with pytest.raises(BusError) as caught:
        parse_url(url)
    text = str(caught.value)
    assert why in text and safe_url(url) in text and "\n" not in text and "cret" not in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://u@h", "redis://***@h"),
        ("redis://u:p@h/0", "redis://u:***@h/0"),
        ("redis://:p@ss/w?rd@h/0", "redis://:***@h/0"),
        ("u:p@h", "u:***@h"),
        (
            "rediss+sentinel://:p@a,b/m?sentinel_password=x&ssl_ca_certs=/ca",
            "rediss+sentinel://:***@a,b/m?sentinel_password=***&ssl_ca_certs=/ca",
        ),
        ("redis://h?PASSWORD=x", "redis://h?PASSWORD=***"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert safe_url(url) == shown


def test_settings_fill_in_what_the_url_lacks(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("f/ile\n")

    def merged(url: str, **settings: str) -> str:
        return redis_url(Settings(redis=url, **settings))  # type: ignore[arg-type]

    assert merged("redis://h/0") == "redis://h/0"
    assert merged("redis://h/0", redis_password="p@") == "redis://:p%40@h/0"
    assert merged("redis://h/0", redis_username="u", redis_password="p") == "redis://u:p@h/0"
    assert merged("redis://u@h/0", redis_password="p") == "redis://u:p@h/0"
    assert merged("redis://u:own@h/0", redis_username="v", redis_password="p") == "redis://u:own@h/0"
    assert (
        merged("redis+sentinel://a,b/m", redis_password_file=str(file)) == "redis+sentinel://:f%2File@a,b/m"
    )
    assert merged("unix:///s", redis_password="p", redis_password_file=str(file)) == "unix://:p@/s"
    once = merged("redis://h/0", redis_username="u", redis_password="p")
    assert merged(once, redis_username="u", redis_password="p") == once
    file.write_text("\n")
    for broken in (str(file), str(tmp_path / "absent")):
        with pytest.raises(ConfigError, match="redis_password_file"):
            merged("redis://h/0", redis_password_file=broken)


def test_the_password_comes_by_environment_and_help_does_not_tell_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"EI_REDIS_USERNAME": "u", "EI_REDIS_PASSWORD": "s3cret"}
    assert redis_url(load(Settings, "status", [], environ=environ)) == "redis://u:s3cret@127.0.0.1:6379/0"
    with pytest.raises(SystemExit):
        load(Settings, "status", ["--help"], environ=environ)
    assert "s3cret" not in capsys.readouterr().out
