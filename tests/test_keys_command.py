"""`evolving keys`: what it writes is what the router reads."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time

import pytest

from services import cli
from services.router import keys_command
from services.router.access import Keys


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in [n for n in os.environ if n.startswith("EI_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.toml"


@pytest.fixture
def keys(file, capsys):
    def run(*words: object, code: int = 0) -> str:
        """Runs `evolving keys`; its standard output, or its error where it fails."""
        capsys.readouterr()
        line = [str(word) for word in words]
        assert cli.main(["keys", line[0], "--file", str(file), *line[1:]]) == code
        out = capsys.readouterr()
        if code:
            assert out.out == "" and out.err.count("\n") == 1
            return out.err
        return out.out

    return run


def parsed(file) -> Keys:
    return Keys.parse(file.read_text(), "f")


def who(file, key: str):
    return parsed(file).authenticate({"x-api-key": key}, time.time())


def test_add_prints_the_key_once_and_keeps_its_hash(keys, file):
    key = keys("add", "--name", "ci").strip()
    assert key.startswith("ei-") and "\n" not in key
    assert who(file, key).name == "ci"
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["keys.toml"]


def test_a_whole_entry(keys, file):
    words = "--tenant acme --priority batch --rpm 60 --tpm 1000 --max-in-flight 4 --admin"
    key = keys(
        "add", "--name", 'a "b" \\ ü 🔑', *words.split(), "--expires", "2099-01-31T12:00:00+02:00"
    ).strip()
    entry = who(file, key)
    assert (entry.name, entry.tenant, entry.priority, entry.admin) == ('a "b" \\ ü 🔑', "acme", "batch", True)
    assert (entry.requests_per_minute, entry.tokens_per_minute, entry.max_in_flight) == (60, 1000, 4)
    assert entry.expires.isoformat() == "2099-01-31T12:00:00+02:00"


def test_the_secret_of_tenants_is_made_once(keys, file):
    keys("add", "--name", "a")
    assert not parsed(file).has_secret
    keys("add", "--name", "b", "--tenant", "acme")
    salt = parsed(file).salt("acme")
    keys("add", "--name", "c", "--tenant", "other")
    assert parsed(file).salt("acme") == salt


def test_what_is_there_stays_as_it_is(keys, file):
    keys("add", "--name", "a")
    kept = "# of ours\r\n" + file.read_text() + "# the end, without a line's end"
    file.write_text(kept, newline="")
    file.chmod(0o640)
    keys("add", "--name", "b")
    assert file.read_bytes().decode().startswith(kept + "\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [e.name for e in parsed(file).entries] == ["a", "b"]


def test_a_link_stays_a_link(keys, file, tmp_path):
    keys("add", "--name", "a")
    (tmp_path / "real").mkdir()
    real = tmp_path / "real" / "k.toml"
    file.rename(real)
    file.symlink_to(real)
    keys("add", "--name", "b")
    assert file.is_symlink() and len(parsed(real).entries) == 2


def test_revoke_cuts_one_block_out(keys, file):
    file.write_text("# top\n")
    secrets = {}
    for name in ("a", "b", "c"):
        with file.open("a") as out:
            out.write(f"\n# before {name}")
        secrets[name] = keys("add", "--name", name, "--tenant", name).strip()
    salt = parsed(file).salt("a")
    keys("revoke", "--name", "b")
    assert [e.name for e in parsed(file).entries] == ["a", "c"]
    assert [line for line in file.read_text().splitlines() if line.startswith("#")] == [
        "# top",
        "# before a",
        "# before b",
        "# before c",
    ]
    assert parsed(file).salt("a") == salt
    assert who(file, secrets["a"]).name == "a" and who(file, secrets["c"]).name == "c"
    keys("revoke", "--name", "a")
    keys("revoke", "--name", "c")
    assert parsed(file).entries == () and file.read_text().strip()


def test_a_file_whose_last_key_is_revoked_is_one_of_no_keys(keys, file):
    keys("add", "--name", "a")
    file.write_text(file.read_text().partition("\n")[2])
    keys("revoke", "--name", "a")
    assert parsed(file).entries == () and file.read_text().strip()
    keys("add", "--name", "b")
    assert [e.name for e in parsed(file).entries] == ["b"]


def test_list(keys, file):
    keys("add", "--name", "ci", "--tenant", "acme", "--rpm", 60, "--expires", "2020-01-01T00:00:00Z")
    keys("add", "--name", "me", "--admin", "--priority", "interactive")
    assert keys("list").splitlines() == [
        "name  tenant  priority     rpm  tpm  in flight  admin  expires",
        "ci    acme    normal       60   -    -          -      2020-01-01T00:00:00Z (expired)",
        "me    -       interactive  -    -    -          yes    -",
    ]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["add"], "--name"),
        (["add", "--name", ""], "name"),
        (["add", "--name", "a\nb"], "name"),
        (["add", "--name", "taken"], "already"),
        (["add", "--name", "x", "--rpm", "-1"], "rpm"),
        (["add", "--name", "x", "--tpm", "many"], "--tpm"),
        (["add", "--name", "x", "--priority", "high"], "--priority"),
        (["add", "--name", "x", "--expires", "tomorrow"], "expires"),
        (["add", "--name", "x", "--expires", "2027-01-01T00:00:00"], "expires"),
        (["add", "--name", "x", "--tenant", " t"], "tenant"),
        (["add", "--name", "x", "--colour", "red"], "--colour"),
        (["revoke"], "--name"),
        (["revoke", "--name", "x"], "no key named 'x' (there are: 'taken')"),
    ],
)
def test_bad_use_changes_nothing(keys, file, words, part):
    keys("add", "--name", "taken")
    before = file.read_bytes()
    assert part in keys(*words, code=2)
    assert file.read_bytes() == before and os.listdir(file.parent) == ["keys.toml"]


def test_words(capsys):
    assert cli.main(["keys"]) == 2
    assert "usage: evolving keys add" in capsys.readouterr().err
    assert cli.main(["keys", "delete"]) == 2
    assert cli.main(["keys", "--help"]) == 0
    assert "revoke" in capsys.readouterr().out
    assert cli.main(["keys", "list"]) == 2
    assert "--file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x = =", "[[key]]\nname = 'a'\n"])
@pytest.mark.parametrize("words", [["add", "--name", "b"], ["list"], ["revoke", "--name", "a"]])
def test_a_broken_file_is_not_touched(keys, file, text, words):
    file.write_text(text)
    assert str(file) in keys(*words, code=2)
    assert file.read_text() == text


@pytest.mark.parametrize("words", [["list"], ["revoke", "--name", "a"]])
def test_a_file_that_is_not_there(keys, file, words):
    assert "cannot be read" in keys(*words, code=2)
    assert not file.exists()


def test_keys_that_are_written_another_way_are_left_to_who_wrote_them(keys, file):
    text = f"key = [{{ name = 'a', sha256 = '{'0' * 64}' }}]\n"
    file.write_text(text)
    assert "by hand" in keys("revoke", "--name", "a", code=2)
    assert "by hand" in keys("add", "--name", "b", code=2)
    assert file.read_text() == text and "a " in keys("list")


def test_a_write_that_fails_leaves_the_old_file(keys, file, monkeypatch):
    keys("add", "--name", "a")
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys_command.os, "fsync", full)
    assert "No space left" in keys("add", "--name", "b", code=2)
    assert file.read_bytes() == before and os.listdir(file.parent) == ["keys.toml"]


def test_commands_at_the_same_time_lose_no_key(file):
    run = [sys.executable, "-m", "services.cli", "keys", "add", "--file", str(file), "--name"]
    children = [
        subprocess.Popen([*run, f"k{i}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in range(6)
    ]
    found = [child.communicate(timeout=60)[0].decode().strip() for child in children]
    assert [child.returncode for child in children] == [0] * 6
    assert sorted(who(file, key).name for key in found) == [f"k{i}" for i in range(6)]
