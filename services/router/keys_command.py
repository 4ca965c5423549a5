"""`evolving keys add | list | revoke`: the file of keys that a router reads (`services/router/access.py`).

Rules that hold here
- A key is printed once, by `add`, alone on standard output; the file has its hash only.
- The file is written beside itself and renamed: a router reads the old one or the new one. It keeps its owner and
  mode; a new one is for its owner only. Two commands at a time follow one another.
- What is there stays as it is written, comments too: `add` appends, `revoke` cuts out one block. What would come
  out is parsed before it is written, and must be what was asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec

from services.router.access import KEY_BYTES, KeyEntry, Keys, Priority, key_digest, new_key
from shared.config import ConfigError, Doc, load

USAGE = """usage: evolving keys add | list | revoke --file FILE [--help] [settings]

  add     make a key, print it once, append its hash to the file
  list    show the keys of the file
  revoke  take a key out of the file

Routers notice the change within seconds."""

_HEADER = "# Keys of the router: evolving keys add | list | revoke. Each is known by its SHA-256.\n"


class FileSettings(msgspec.Struct, kw_only=True):
    file: Annotated[str, Doc("the file of keys")]


class NameSettings(FileSettings, kw_only=True):
    name: Annotated[str, Doc("name of the key")]


class AddSettings(NameSettings, kw_only=True):
    tenant: Annotated[str, Doc("whose key it is; tenants never share KV pages")] = ""
    priority: Annotated[Priority, Doc("whose turn it is when the router is full")] = "normal"
    rpm: Annotated[int, Doc("requests a minute, 0 for no limit")] = 0
    tpm: Annotated[int, Doc("tokens a minute, prompt and output, 0 for no limit")] = 0
    max_in_flight: Annotated[int, Doc("requests at a time, 0 for no limit")] = 0
    admin: Annotated[bool, Doc("may do what only administrators may")] = False
    expires: Annotated[str, Doc("when it ends, such as 2027-01-31T12:00:00Z; empty for never")] = ""


def add(settings: AddSettings) -> str:
    """Append a new key to the file, which is made if there is none; returns the key."""
    key = new_key()
    row: dict[str, object] = {
        "name": settings.name,
        "sha256": key_digest(key).hex(),
        "tenant": settings.tenant or None,
        "priority": settings.priority,
        "requests_per_minute": settings.rpm,
        "tokens_per_minute": settings.tpm,
        "max_in_flight": settings.max_in_flight,
        "admin": settings.admin,
        "expires": settings.expires or None,
    }
    try:
        entry = msgspec.convert(row, KeyEntry)
    except msgspec.ValidationError as error:
        text, _, field = str(error).rstrip("`").partition(" - at `$.")
        short = {"requests_per_minute": "rpm", "tokens_per_minute": "tpm"}.get(field, field)
        raise ConfigError(f"keys add: {short + ': ' if short else ''}{text}") from None
    with _locked(settings.file) as path:
        text = _read(path) if os.path.exists(path) else _HEADER
        keys = Keys.parse(text, path)
        if any(other.name == entry.name for other in keys.entries):
            raise ConfigError(
                f"{path}: there is a key named {entry.name!r} already; revoke it or take another name"
            )
        if entry.tenant is not None and not keys.has_secret:
            text += f"\n[tenants]\nsecret = {_toml(secrets.token_urlsafe(KEY_BYTES))}\n"
        text += "\n" + _block(entry)
        _replace(path, text, (*keys.entries, entry))
    return key


def revoke(file: str, name: str) -> None:
    """Cut a key's block out of the file."""
    with _locked(file) as path:
        text = _read(path)
        entries = Keys.parse(text, path).entries
        index = next((i for i, entry in enumerate(entries) if entry.name == name), None)
        if index is None:
            known = ", ".join(repr(entry.name) for entry in entries) or "none"
            raise ConfigError(f"{path}: there is no key named {name!r} (there are: {known})")
        _replace(path, _without_block(text, index), entries[:index] + entries[index + 1 :])


def table(file: str, now: float) -> str:
    """The keys of a file, a line each. `now`: seconds since the epoch."""
    head = ("name", "tenant", "priority", "rpm", "tpm", "in flight", "admin", "expires")
    rows: list[tuple[str, ...]] = [head]
    for entry in Keys.parse(_read(file), file).entries:
        limits = (entry.requests_per_minute, entry.tokens_per_minute, entry.max_in_flight)
        expires = _expires(entry) + (" (expired)" if entry.expired(now) else "")
        rows.append(
            (
                entry.name,
                entry.tenant or "-",
                entry.priority,
                *(str(limit or "-") for limit in limits),
                "yes" if entry.admin else "-",
                expires or "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


# ---------------------------------------------------------------------- the file


def _toml(value: object) -> str:
    # JSON's strings are TOML's, unless they hold what no name may: a character that is not printable.
    return json.dumps(value, ensure_ascii=False)


def _expires(entry: KeyEntry) -> str:
    return "" if entry.expires is None else entry.expires.isoformat().replace("+00:00", "Z")


def _block(entry: KeyEntry) -> str:
    """The entry as TOML: its name, its hash, and what differs from the defaults."""
    lines = ["[[key]]"]
    for field in msgspec.structs.fields(KeyEntry):
        value = getattr(entry, field.name)
        if field.required or value != field.default or field.name == "priority":
            lines.append(f"{field.name} = {_expires(entry) if field.name == 'expires' else _toml(value)}")
    return "\n".join(lines) + "\n"


def _without_block(text: str, index: int) -> str:
    """The text without its `index`th `[[key]]`; comments before the next table stay, they are that one's."""
    lines = text.splitlines(keepends=True)
    heads = [i for i, line in enumerate(lines) if line.partition("#")[0].strip() == "[[key]]"]
    if index >= len(heads):
        return text
    start = heads[index]
    end = next((i for i in range(start + 1, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#")):
        end -= 1
    if start and not lines[start - 1].strip():
        start -= 1
    # A file of blanks counts as one that is not written yet.
    return "".join(lines[:start] + lines[end:]).lstrip("\n") or _HEADER


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8") from None


@contextlib.contextmanager
def _locked(file: str) -> Iterator[str]:
    """The file behind links, while no other such command changes its folder. The lock goes with the process."""
    path = os.path.realpath(file)
    try:
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{file}: its folder cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(folder)


def _replace(path: str, text: str, wanted: tuple[KeyEntry, ...]) -> None:
    """Write the file anew, in one step, if it says what is wanted."""
    try:
        entries: tuple[KeyEntry, ...] | None = Keys.parse(text, path).entries
    except ConfigError:
        entries = None
    if entries != wanted:
        raise ConfigError(f"{path}: its keys are not written as [[key]] blocks; change it by hand")
    draft = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        old = os.stat(path) if os.path.exists(path) else None
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(fd, "w", encoding="utf-8", newline="") as file:
                if old is not None:
                    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                        os.fchown(fd, old.st_uid, old.st_gid)
                    os.fchmod(fd, stat.S_IMODE(old.st_mode))
                file.write(text)
                file.flush()
                os.fsync(fd)
            os.rename(draft, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


# ---------------------------------------------------------------------- the command


def main(argv: list[str]) -> int:
    word = argv[0] if argv else ""
    if word in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if word == "add":
        wanted = load(AddSettings, "keys", argv[1:], command="keys add", summary="Make a key of the router.")
        key = add(wanted)
        print(f"key {wanted.name!r} is in {wanted.file}; it is shown only now:", file=sys.stderr)
        print(key)
    elif word == "list":
        shown = load(FileSettings, "keys", argv[1:], command="keys list", summary="Show the keys of a file.")
        print(table(shown.file, time.time()))
    elif word == "revoke":
        gone = load(
            NameSettings, "keys", argv[1:], command="keys revoke", summary="Take a key out of a file."
        )
        revoke(gone.file, gone.name)
        print(f"key {gone.name!r} is revoked")
    else:
        print(USAGE, file=sys.stderr)
        return 2
    return 0
