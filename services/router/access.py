"""Who may use the router, and how much: keys, limits, the salt of a tenant's pages.

Rules that hold here
- No clock: `now` is an argument. Keys expire by seconds since the epoch; limits take any wall seconds that go on
  steadily (`time.monotonic`), never cluster seconds. The one I/O is `KeyFile`, which reads its file.
- Only the SHA-256 of a key is known here. A key is 32 random bytes, so its hash can neither be searched nor found
  in a table: a slow hash, which makes guessing a human's password dear, would only make every request dear.
- A key is looked up by its hash in a dict. How long that takes may depend on the hash, of which a caller cannot
  choose the bits without giving up the key that would produce them; the key itself is compared with nothing.
- No error or log text holds a key or a hash.
- A file of keys takes effect as a whole or not at all. With a file of no keys nobody is let in; without a file
  everybody is one anonymous entry.
- A refusal takes nothing: no slot, no request, no token. Everything that an admission took is given back once, by
  `Ticket.done`, whatever happened to its key meanwhile.
- What a key used belongs to its name: another limit, another hash (a rotation in place) or another tenant under
  the same name neither forgives nor repeats it.

Limits of a key
- Requests and tokens: a bucket of one minute's worth, refilled evenly. So any span of T seconds sees at most
  limit * (1 + T / 60). All prompt tokens count, also those whose KV is cached.
- A prompt is charged when its length is known, the output when it ended. Output may bring the bucket below zero, and
  so may a prompt longer than the bucket, which waits for a full one; then nothing goes until that is refilled.
- In flight: from `admit` to `done`, time in the waiting line included.

Limits of the router
- All requests in flight together, with room kept for what is more urgent: `SHARE`.
- What finds no room waits in a line of bounded length, in which the same shares hold: interactive first, within a
  priority in the order of arrival. Nothing overtakes its own priority or a higher one, so batch may wait as long as
  more urgent work keeps coming; the caller gives up with `done`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
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
# Percent of the router's places that requests of a priority may fill.
SHARE: dict[Priority, int] = {"interactive": 100, "normal": 95, "batch": 80}

KEY_PREFIX = "ei-"
KEY_BYTES = 32
MAX_NAME_LENGTH = 64
MIN_SECRET_LENGTH = 32

# Nobody knows when a place will be free; requests take seconds.
_RETRY_FOR_A_PLACE_S = 1.0
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


# ---------------------------------------------------------------------- limits

_MICROS = 1_000_000
_UNIT = (
    60 * _MICROS
)  # of a bucket's level: one token. A microsecond refills `per_minute` units, so nothing is rounded.


class Bucket:
    """A budget of `per_minute`, refilled evenly, at most one minute's worth; 0 is no limit."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute * _UNIT
        self._t = round(now * _MICROS)

    def level(self, now: float) -> float:
        """What may be taken now; below zero after an overdraft."""
        self._refill(now)
        return self._level / _UNIT

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until `amount`, or a full bucket if that is less, may be taken; 0 for now."""
        self._refill(now)
        lacking = min(amount, self.per_minute) * _UNIT - self._level
        return -(-lacking // self.per_minute) / _MICROS if lacking > 0 else 0.0

    def take(self, amount: int, now: float) -> None:
        """Take it, whether it is there or not."""
        self._refill(now)
        if self.per_minute:
            self._level -= amount * _UNIT

    def resize(self, per_minute: int, now: float) -> None:
        """Another limit from now on; what was used and is not yet refilled stays used."""
        self._refill(now)
        self._t = round(now * _MICROS)
        used = self.per_minute * _UNIT - self._level
        self.per_minute = per_minute
        self._level = per_minute * _UNIT - used if per_minute else 0

    def _refill(self, now: float) -> None:
        if not self.per_minute:
            return
        t = round(now * _MICROS)
        # A clock that was set back refills nothing, and goes on from there.
        gained = max(0, t - self._t) * self.per_minute
        self._level, self._t = min(self.per_minute * _UNIT, self._level + gained), t


class _Account:
    """What one key uses."""

    def __init__(self, entry: KeyEntry, now: float) -> None:
        self.entry = entry
        self.in_flight = 0
        self.requests = Bucket(entry.requests_per_minute, now)
        self.tokens = Bucket(entry.tokens_per_minute, now)

    def now_is(self, entry: KeyEntry, now: float) -> None:
        if entry is not self.entry:
            self.entry = entry
            self.requests.resize(entry.requests_per_minute, now)
            self.tokens.resize(entry.tokens_per_minute, now)

    def check(self, now: float) -> None:
        most = self.entry.max_in_flight
        if most and self.in_flight >= most:
            raise _refused(
                "too_many_in_flight",
                f"This API key may have {most} requests in flight.",
                _RETRY_FOR_A_PLACE_S,
            )
        wait_s = self.requests.wait_s(1, now)
        if wait_s:
            raise _refused(
                "rate_limit_requests",
                f"This API key may send {self.requests.per_minute} requests a minute.",
                wait_s,
            )
        self.check_tokens(1, now)

    def check_tokens(self, tokens: int, now: float) -> None:
        wait_s = self.tokens.wait_s(tokens, now)
        if wait_s:
            raise _refused(
                "rate_limit_tokens",
                f"This API key may use {self.tokens.per_minute} tokens a minute.",
                wait_s,
            )


def _refused(code: str, message: str, wait_s: float) -> ApiError:
    # Whole seconds, rounded up: a Retry-After has no others, and one that is too short earns a second refusal.
    retry_after_s = max(1, math.ceil(wait_s))
    return ApiError(
        429,
        f"{message} Try again in {retry_after_s} s.",
        type="rate_limit_error",
        code=code,
        retry_after_s=retry_after_s,
    )


class Ticket:
    """One admitted request. `waiting`: it has a place in the line, not yet one in flight."""

    def __init__(self, admission: Admission, account: _Account, priority: Priority, waiting: bool) -> None:
        self._admission, self._account = admission, account
        self.priority: Priority = priority
        self.waiting = waiting
        self.ended = False

    @property
    def position(self) -> int:
        """How many waiting requests go before this one; 0 when it does not wait."""
        return self._admission._ahead(self) if self.waiting else 0

    def charge_prompt(self, tokens: int, now: float) -> None:
        """Raises ApiError 429 `rate_limit_tokens`, and then takes nothing; the request counts until `done`."""
        self._account.check_tokens(tokens, now)
        self._account.tokens.take(tokens, now)

    def done(self, output_tokens: int, now: float) -> list[Ticket]:
        """The request is over, however it ended; a second call does nothing.

        Returns the waiting requests that are in flight from now on: the caller wakes them.
        """
        if self.ended:
            return []
        self.ended = True
        self._account.in_flight -= 1
        self._account.tokens.take(max(0, output_tokens), now)
        return self._admission._leave(self)


class Admission:
    """Who may begin, who waits, who is refused."""

    def __init__(self, max_in_flight: int, max_waiting: int = 0) -> None:
        """`max_waiting` 0: nobody waits, what finds no room is refused."""
        if max_in_flight < 1 or max_waiting < 0:
            raise ValueError("max_in_flight must be at least 1, max_waiting at least 0")
        self._max_in_flight, self._max_waiting = max_in_flight, max_waiting
        self._accounts: dict[str, _Account] = {}
        # One line a priority, in the order of arrival.
        self._lines: dict[Priority, dict[Ticket, None]] = {priority: {} for priority in PRIORITIES}
        self.in_flight = 0

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    def used_by(self, name: str) -> int:
        """Requests of a key, in flight and waiting."""
        account = self._accounts.get(name)
        return account.in_flight if account else 0

    def admit(self, entry: KeyEntry, now: float) -> Ticket:
        """Raises ApiError 429 with the code `too_many_in_flight`, `rate_limit_requests` or `rate_limit_tokens` for a
        limit of the key, `overloaded` for one of the router.
        """
        account = self._accounts.get(entry.name)
        if account is None:
            account = self._accounts[entry.name] = _Account(entry, now)
        account.now_is(entry, now)
        account.check(now)
        priority = entry.priority
        # Who waits is first in line without room, so its own priority and lower ones have none either.
        waits = not self._has_room(priority)
        if waits and self.waiting >= _places(self._max_waiting, priority):
            raise _refused(
                "overloaded",
                f"The router has as many {priority} requests as it takes.",
                _RETRY_FOR_A_PLACE_S,
            )
        ticket = Ticket(self, account, priority, waits)
        account.in_flight += 1
        account.requests.take(1, now)
        if waits:
            self._lines[priority][ticket] = None
        else:
            self.in_flight += 1
        return ticket

    def reloaded(self, keys: Keys) -> None:
        """Forget what keys that are gone used, unless requests of theirs are still on their way."""
        names = {entry.name for entry in keys.entries}
        for name in [n for n, a in self._accounts.items() if n not in names and not a.in_flight]:
            del self._accounts[name]

    def _has_room(self, priority: Priority) -> bool:
        return self.in_flight < _places(self._max_in_flight, priority)

    def _ahead(self, ticket: Ticket) -> int:
        urgent = PRIORITIES[: PRIORITIES.index(ticket.priority)]
        return sum(len(self._lines[p]) for p in urgent) + list(self._lines[ticket.priority]).index(ticket)

    def _leave(self, ticket: Ticket) -> list[Ticket]:
        if ticket.waiting:
            del self._lines[ticket.priority][ticket]
            ticket.waiting = False
            return []
        self.in_flight -= 1
        started = []
        # Urgent lines first: where one finds no room, those after it find none either, for their share is smaller.
        for priority, line in self._lines.items():
            while line and self._has_room(priority):
                first = next(iter(line))
                del line[first]
                first.waiting = False
                self.in_flight += 1
                started.append(first)
        return started


def _places(limit: int, priority: Priority) -> int:
    """Places of `limit` that a priority may fill: at least one, where there is any."""
    return max(min(limit, 1), limit * SHARE[priority] // 100)


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
