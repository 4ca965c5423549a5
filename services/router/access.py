"""Who may use the router: keys, the salt of a tenant's pages, where to listen. How much: `limits.py`.

Rules that hold here
- No clock: `now` is an argument, in seconds since the epoch. The one I/O is `KeyFile`, which reads its file.
- Only the SHA-256 of a key is known here. A key is 32 random bytes, so its hash can neither be searched nor found
  in a table: a slow hash, which makes guessing a human's password dear, would only make every request dear.
- A key is looked up by its hash in a dict. How long that takes may depend on the hash, of which a caller cannot
  choose the bits without giving up the key that would produce them; the key itself is compared with nothing.
- No error or log text holds a key or a hash.
- A file of keys takes effect as a whole or not at all. With a file of no keys nobody is let in; without a file
  everybody is one anonymous entry.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import time
import tomllib
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal, get_args

import msgspec

from shared.config import ConfigError
from shared.openai import ApiError

Priority = Literal["interactive", "normal", "batch"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # most urgent first

KEY_PREFIX = "ei-"
KEY_BYTES = 32
MAX_NAME_LENGTH = 64
MIN_SECRET_LENGTH = 32

# A file written this short a time before it was read may change again within its timestamp's resolution.
_FRESH_NS = 2_000_000_000

_HASH = re.compile(r"[0-9a-fA-F]{64}")
_AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_digest(key: str) -> bytes:
    """The 32 bytes by which a key is known. Any string has them: headers may hold half surrogates."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _check_name(value: str, field: str) -> None:
    if not value or len(value) > MAX_NAME_LENGTH or not value.isprintable() or value != value.strip():
        raise ValueError(f"{field}: must be 1 to {MAX_NAME_LENGTH} printable characters, no blanks around")


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[key]]` of the file. A limit of 0 is none."""

    name: str
    sha256: str  # hex
    tenant: str | None = None
    priority: Priority = "normal"
    requests_per_minute: _AtLeast0 = 0
    tokens_per_minute: _AtLeast0 = 0
    max_in_flight: _AtLeast0 = 0
    admin: bool = False
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None

    def __post_init__(self) -> None:
        _check_name(self.name, "name")
        if self.tenant is not None:
            _check_name(self.tenant, "tenant")
            if "|" in self.tenant:  # which parts it from its branches' names
                raise ValueError("tenant: must be without |")
        if not _HASH.fullmatch(self.sha256):
            hint = ", and not the key itself" if self.sha256.startswith(KEY_PREFIX) else ""
            raise ValueError(f"sha256: must be the key's SHA-256 as 64 hex digits{hint}")

    def expired(self, now: float) -> bool:
        """`now`: seconds since the epoch."""
        return self.expires is not None and now >= self.expires.timestamp()


class Unauthorized(ApiError):
    """401, with the `WWW-Authenticate` that RFC 6750 asks for: an error code only where a key was given."""

    def __init__(self, message: str, code: str, *, given: bool = True) -> None:
        super().__init__(401, message, type="authentication_error", code=code)
        self._given = given

    def headers(self) -> dict[str, str]:
        challenge = 'Bearer realm="evolving-infra"' + (', error="invalid_token"' if self._given else "")
        return super().headers() | {"WWW-Authenticate": challenge}


# ---------------------------------------------------------------------- keys


class Keys:
    """The keys that are valid together. Immutable; a reload makes another."""

    def __init__(self, entries: tuple[KeyEntry, ...], secret: str = "", *, anonymous: KeyEntry | None = None):
        self.entries = entries
        self._secret = secret
        self._anonymous = anonymous
        self._by_digest = {bytes.fromhex(entry.sha256): entry for entry in entries}

    @classmethod
    def none(cls, *, admin: bool = False) -> Keys:
        """Without a file: everybody is one entry without limits; an administrator where `admin` says so."""
        return cls(
            (), anonymous=KeyEntry(name="anonymous", sha256="0" * 64, priority="interactive", admin=admin)
        )

    @classmethod
    def parse(cls, text: str, where: str) -> Keys:
        """The keys in a file's text. Raises ConfigError, one line that names the entry and the field."""
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: is not TOML: {error}") from None
        for name in table:
            if name not in ("key", "tenants"):
                raise ConfigError(f"{where}: unknown key {name!r} (known: [[key]], [tenants])")
        rows = table.get("key", [])
        if not isinstance(rows, list):
            raise ConfigError(f"{where}: keys are [[key]], with two brackets")
        secret = _tenants_secret(table.get("tenants"), where)
        entries: list[KeyEntry] = []
        at: dict[str | bytes, str] = {}  # names and hashes -> the entry that has it
        for number, row in enumerate(rows, 1):
            label = f"[[key]] {number}"
            if (
                isinstance(row, dict)
                and isinstance(row.get("name"), str)
                and len(row["name"]) <= MAX_NAME_LENGTH
            ):
                label += f" ({row['name']!r})"
            try:
                entry = msgspec.convert(row, KeyEntry)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{where}: {label}: {_field_error(error)}") from None
            for field, value in (("name", entry.name), ("sha256", bytes.fromhex(entry.sha256))):
                if value in at:
                    raise ConfigError(f"{where}: {label}: {field}: is that of {at[value]} too")
                at[value] = label
            if entry.tenant is not None and not secret:
                raise ConfigError(
                    f"{where}: {label}: tenant: needs a secret for all tenants, [tenants] secret ="
                    f' "{MIN_SECRET_LENGTH} random characters or more"'
                )
            entries.append(entry)
        return cls(tuple(entries), secret)

    def authenticate(self, headers: Mapping[str, str], now: float) -> KeyEntry:
        """Whose request this is. `headers` have lower-case names; `now`: seconds since the epoch.

        The key is in `Authorization: Bearer KEY` or `x-api-key: KEY`. Where both are given, the first that is valid
        counts: SDKs send a placeholder in the one that they were not told. Raises Unauthorized with the code
        `missing_api_key`, `invalid_api_key` or `expired_api_key`.
        """
        if self._anonymous is not None:
            return self._anonymous
        scheme, _, bearer = headers.get("authorization", "").strip().partition(" ")
        given = [bearer.strip()] if scheme.lower() == "bearer" else []
        given.append(headers.get("x-api-key", "").strip())
        expired = False
        for key in filter(None, given):
            entry = self._by_digest.get(key_digest(key))
            if entry is None:
                continue
            if not entry.expired(now):
                return entry
            expired = True
        if expired:
            raise Unauthorized("This API key has expired.", "expired_api_key")
        if any(given):
            raise Unauthorized("This API key is not known here.", "invalid_api_key")
        raise Unauthorized(
            "An API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
            "missing_api_key",
            given=False,
        )

    @property
    def has_secret(self) -> bool:
        return bool(self._secret)

    def salt(self, tenant: str | None) -> str:
        """The salt that seeds a tenant's page hashes (`shared/pages.py`); empty, as without keys, for no tenant.

        An HMAC of the tenant's name, not its plain hash: page names are seen by every node, in Redis and in logs,
        and whoever could compute a tenant's names could confirm a guessed prompt of it, or search for pages of his
        own whose 64-bit names are the same. All routers of a cluster need the same secret; another one gives all
        pages of tenants new names, so their cache begins cold.
        """
        if tenant is None:
            return ""
        return hmac.new(self._secret.encode(), tenant.encode(), hashlib.sha256).hexdigest()


def _tenants_secret(table: object, where: str) -> str:
    if table is None:
        return ""
    if not isinstance(table, dict) or set(table) != {"secret"}:
        raise ConfigError(f"{where}: [tenants] must hold a secret, and nothing else")
    secret = table["secret"]
    if not isinstance(secret, str) or len(secret) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"{where}: [tenants] secret: must be text of at least {MIN_SECRET_LENGTH} characters"
        )
    return secret


def _field_error(error: msgspec.ValidationError) -> str:
    """`field: what is wrong`, from msgspec's `what is wrong - at `$.field``."""
    text, _, path = str(error).partition(" - at `$.")
    field = path.rstrip("`")
    if field == "priority":
        text = f"must be one of {', '.join(PRIORITIES)}"
    return f"{field}: {text}" if field else text


class KeyFile:
    """The keys of a file, followed while it changes. Routers read it; `evolving keys` writes it.

    Write such a file beside the old one and rename it, as `evolving keys` does: of a file that is written in place a
    part may be read, and take effect if it is valid.
    """

    def __init__(self, path: str) -> None:
        """Raises ConfigError when the file cannot be used."""
        self.path = path
        self.error: str | None = None  # why the file as it is now is not in use
        self._seen: tuple[int, ...] | None = None
        self._data: bytes | None = None
        self.keys = Keys(())
        self._load()

    def changed(self) -> bool:
        """Look at the file; cheap when it is as before. Whether there is news: other `keys`, or another `error`.

        A file that cannot be used leaves the keys as they are. Raises nothing.
        """
        keys, error = self.keys, self.error
        try:
            if self._signature() == self._seen:
                return False
            self._load()
            self.error = None
        except ConfigError as broken:
            self.error = str(broken)
        except OSError as gone:
            self._seen = None
            self.error = f"{self.path}: cannot be read: {gone.strerror}"
        return self.keys is not keys or self.error != error

    def _signature(self) -> tuple[int, ...]:
        found = os.stat(self.path)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _load(self) -> None:
        try:
            seen = self._signature()
            with open(self.path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from None
        self._seen = None if time.time_ns() - max(seen[-2:]) < _FRESH_NS else seen
        if data == self._data and self.error is None:
            return
        self._data = data
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{self.path}: is not UTF-8") from None
        if not text.strip():
            # A file that is just being written, not one from which all keys were taken.
            raise ConfigError(f"{self.path}: is empty; a comment makes it a file of no keys")
        self.keys = Keys.parse(text, self.path)


# ---------------------------------------------------------------------- where to listen


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`; no for a name that is not `localhost`."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def check_listen(host: str, has_keys: bool, allow_anonymous: bool) -> None:
    """Raises ConfigError where others could reach a router that asks nobody for a key."""
    if has_keys or allow_anonymous or is_loopback(host):
        return
    raise ConfigError(
        f"the router would serve everybody who reaches {host or 'any address'}: give it keys (evolving keys add"
        " --file keys.toml --name NAME, then EI_ROUTER_KEYS_FILE=keys.toml), or listen on 127.0.0.1, or set"
        " EI_ROUTER_ALLOW_ANONYMOUS=true where the network lets only friends in"
    )
