"""Redis connections: the only module that knows how Redis is reached.

| URL | reaches |
|---|---|
| `redis://[user[:password]@]host[:6379][/db]` | one server |
| `rediss://...` | one server over TLS |
| `unix://[user[:password]@]/path[?db=0]` | one server over a socket file |
| `redis+sentinel://[user[:password]@]host[:26379][,host...]/primary-name[/db]` | the primary that Sentinel names |
| `rediss+sentinel://...` | the same, TLS to sentinels and servers |

Options follow a `?`: `sentinel_username` and `sentinel_password`; with TLS `ssl_ca_certs`, `ssl_certfile` and
`ssl_keyfile` (paths), `ssl_cert_reqs` (required, optional or none) and `ssl_check_hostname` (true or false).

Rules that hold here
- No text that leaves this module holds a password: what is shown of a URL went through `safe_url`.
- Nothing waits for ever and nothing is tried twice: a command fails within its time limit, the caller backs off.
- A connection is bound to the server that it was opened to. One that fails, or that learns that its server takes
  no writes, is closed, never opened again by the command under way; the next command asks the sentinels anew.
- Failures of connections and commands are `RedisError` or `OSError`; `BusError` is for a URL that cannot be used.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

import msgspec
from redis.asyncio import Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    RedisSSLContext,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.maint_notifications import MaintNotificationsConfig

from shared.config import ClusterSettings, ConfigError
from shared.streams import COMMAND_TIMEOUT_S, BusError

CONNECT_TIMEOUT_S = 3.0
SENTINEL_TIMEOUT_S = 0.5  # for one sentinel's whole answer
SENTINEL_LATE_S = 0.1  # for each further answer once there is one

_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_YES_NO = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a URL says."""

    hosts: tuple[tuple[str, int], ...] = ()  # of the server, or of the sentinels
    path: str = ""  # of the socket file, for unix://
    primary: str = ""  # the name that the sentinels know; empty without Sentinel
    db: int = 0
    username: str = ""
    password: str = ""
    sentinel_username: str = ""
    sentinel_password: str = ""
    tls: bool = False
    ssl: dict[str, Any] = {}


# ------------------------------------------------------------------------- URLs


def safe_url(url: str) -> str:
    """The URL with its passwords as ***, for logs and errors; also of text that is no URL."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    # What is not percent-encoded as it should be may be part of a password: hide up to the last @.
    userinfo, at, address = rest.rpartition("@")
    if at:
        name, colon, _ = userinfo.partition(":")
        userinfo = f"{name}:***" if colon else "***"
    address, question, query = address.partition("?")
    shown = [
        f"{option.partition('=')[0]}=***" if "password" in option.partition("=")[0].lower() else option
        for option in query.split("&")
    ]
    return scheme + separator + userinfo + at + address + question + "&".join(shown)


def redis_url(settings: ClusterSettings) -> str:
    """The URL of the settings with their user name and password, where the URL has none. Raises ConfigError."""
    username, password = settings.redis_username, settings.redis_password
    if not password and settings.redis_password_file:
        try:
            password = Path(settings.redis_password_file).read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise ConfigError(
                f"redis_password_file: {settings.redis_password_file} cannot be read: {reason}"
            ) from None
        if not password:
            raise ConfigError(f"redis_password_file: {settings.redis_password_file} is empty")
    scheme, separator, rest = settings.redis.partition("://")
    if not separator or not (username or password):
        return settings.redis
    authority, slash, tail = rest.partition("/")
    userinfo, _, hosts = authority.rpartition("@")
    own_name, colon, own_password = userinfo.partition(":")
    name = own_name or quote(username, safe="")
    secret = own_password if colon else quote(password, safe="")
    return f"{scheme}://{name}{':' + secret if secret else ''}@{hosts}{slash}{tail}"


def parse_url(url: str) -> Target:
    """Raises BusError, one line without passwords."""

    def refuse(why: str) -> BusError:
        return BusError(f"{safe_url(url)!r} is not a Redis URL: {why}")

    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise refuse(f"it must begin with {'://, '.join(_SCHEMES)}://")
    sentinel, tls = scheme.endswith("+sentinel"), scheme.startswith("rediss")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    if "@" in path + query:
        raise refuse("in a user name or password, / ? # @ : and % must be percent-encoded")
    userinfo, _, hosts_text = authority.rpartition("@")
    username, _, password = userinfo.partition(":")
    options = _options(query, sentinel, tls, scheme, refuse)
    found = {
        "username": unquote(username),
        "password": unquote(password),
        "tls": tls,
        "ssl": {name: value for name, value in options.items() if name in _TLS_OPTIONS},
        **{name: value for name, value in options.items() if name in _SENTINEL_OPTIONS},
    }
    if scheme == "unix":
        if hosts_text or not path:
            raise refuse("the path of the socket is missing: unix:///run/redis.sock")
        return Target(path="/" + unquote(path), db=_db(options.get("db", ""), refuse), **found)
    hosts = tuple(
        _host(text, 26379 if sentinel else 6379, refuse)
        for text in (hosts_text.split(",") if sentinel else [hosts_text or "localhost"])
    )
    if not sentinel:
        return Target(hosts=hosts, db=_db(path, refuse), **found)
    primary, _, db = path.partition("/")
    if not primary:
        raise refuse(f"the primary's name is missing: {scheme}://host:26379/NAME/0")
    return Target(hosts=hosts, primary=unquote(primary), db=_db(db, refuse), **found)


def _options(query: str, sentinel: bool, tls: bool, scheme: str, refuse: Any) -> dict[str, Any]:
    known = (*(_SENTINEL_OPTIONS if sentinel else ()), *(_TLS_OPTIONS if tls else ()))
    known += ("db",) if scheme == "unix" else ()
    found: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            if name in _TLS_OPTIONS:
                raise refuse(f"{name} needs rediss")
            raise refuse(f"unknown option {name!r} (known to {scheme}: {', '.join(known) or 'none'})")
        if name in found:
            raise refuse(f"{name} is given twice")
        found[name] = value
    if found.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise refuse("ssl_cert_reqs must be required, optional or none")
    if "ssl_check_hostname" in found:
        if found["ssl_check_hostname"].lower() not in _YES_NO:
            raise refuse("ssl_check_hostname must be true or false")
        found["ssl_check_hostname"] = _YES_NO[found["ssl_check_hostname"].lower()]
    if "ssl_keyfile" in found and "ssl_certfile" not in found:
        raise refuse("ssl_keyfile needs ssl_certfile")
    return found


def _db(text: str, refuse: Any) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise refuse("the database must be a number")
    return int(text or 0)


def _host(text: str, port: int, refuse: Any) -> tuple[str, int]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise refuse("an IPv6 address needs both brackets: [::1]:6379")
        digits = rest[1:]
    else:
        host, _, digits = text.partition(":")
        if ":" in digits:
            raise refuse("an IPv6 address needs brackets: [::1]:6379")
    if not host:
        raise refuse("a host is missing")
    if "," in host:
        raise refuse("only redis+sentinel and rediss+sentinel take several hosts")
    if digits:
        if not (digits.isascii() and digits.isdigit()) or not 0 < int(digits) < 65536:
            raise refuse("a port must be a number from 1 to 65535")
        port = int(digits)
    return unquote(host), port


# ------------------------------------------------------------------------- connections


class _Bound(AbstractConnection):
    """Closed, and not opened again, once it fails or its server takes no writes."""

    async def disconnect(self, *args: Any, **options: Any) -> None:
        # It is closed all the same when a hanging server does not say goodbye, which TLS waits for.
        with contextlib.suppress(TimeoutError, RedisTimeoutError):
            await super().disconnect(*args, **options)

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        # Else redis-py reconnects here: to the server that failed, past the sentinels, and without the WATCH.
        if not self.is_connected:
            raise ConnectionError("the connection to Redis was lost")
        task = asyncio.current_task()
        told = task.cancelling() if task is not None else 0
        try:
            await super().send_packed_command(command, check_health=check_health)
            if task is not None and task.cancelling() > told:
                # `asyncio.wait_for` of Python 3.11, which redis-py sends with, loses a cancellation now and then.
                await self.disconnect(nowait=True)
                raise asyncio.CancelledError
        except RuntimeError as error:
            # uvloop's word for a connection that went under a write.
            await self.disconnect(nowait=True)
            raise ConnectionError(f"the connection to Redis was lost: {error}") from None

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ReadOnlyError:
            await self.disconnect(nowait=True)
            raise ConnectionError("the server has become a replica") from None
        except ResponseError as error:
            if not str(error).startswith("NOREPLICAS"):
                raise
            # A primary that was cut off from its replicas, and perhaps replaced.
            await self.disconnect(nowait=True)
            raise ConnectionError(
                "the server takes no writes: fewer replicas are in step than min-replicas-to-write"
            ) from None


class _Plain(_Bound, Connection):
    pass


class _Tls(_Bound, SSLConnection):
    pass


class _Unix(_Bound, UnixDomainSocketConnection):
    pass


class _Managed(_Bound, SentinelManagedConnection):
    pass


class _ManagedTls(_Bound, SentinelManagedConnection, SSLConnection):
    pass


class _Sentinels(Sentinel):
    """Asks all sentinels at once, so that one that hangs costs nearly nothing and one that is behind is outvoted."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Address of the primary. Raises MasterNotFoundError when there is none now, with the reason."""
        states: list[dict[str, Any]] = []
        failures: list[str] = []
        unknown = 0
        asked = {asyncio.ensure_future(self._state(sentinel, service_name)) for sentinel in self.sentinels}
        waiting = asked
        try:
            while waiting:
                limit_s = SENTINEL_LATE_S if states else None
                done, waiting = await asyncio.wait(
                    waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for answer in (task.result() for task in done):
                    if isinstance(answer, dict):
                        states.append(answer)
                    elif answer is None:
                        unknown += 1
                    else:
                        failures.append(answer)
        finally:
            for task in waiting:
                task.cancel()
            if waiting:
                await asyncio.wait(waiting)
        # A failover raises the epoch; of those that know the last one, one that reaches the primary is right.
        states.sort(key=lambda state: (state["config-epoch"], not _is_down(state)))
        if states and not _is_down(states[-1]):
            return states[-1]["ip"], int(states[-1]["port"])
        if states:
            raise MasterNotFoundError(
                f"the sentinels hold the primary of {service_name!r}, {states[-1]['ip']}:{states[-1]['port']},"
                " for down and have chosen no other yet"
            )
        others = f" ({'; '.join(sorted(failures))})" if failures else ""
        if unknown:
            raise MasterNotFoundError(f"no sentinel knows a primary named {service_name!r}{others}")
        raise MasterNotFoundError(f"no sentinel can be asked{others}")

    async def _state(self, sentinel: Any, name: str) -> dict[str, Any] | str | None:
        """What a sentinel says of the primary: None when it knows no such name, text when it failed."""
        address = "{host}:{port}".format_map(sentinel.connection_pool.connection_kwargs)
        try:
            async with asyncio.timeout(SENTINEL_TIMEOUT_S):
                state: dict[str, Any] = await sentinel.execute_command("SENTINEL MASTER", name)
                return state
        except (RedisError, OSError, TimeoutError) as error:
            if isinstance(error, ResponseError) and "No such master" in str(error):
                return None
            text = _first_line(error) if str(error) else f"no answer in {SENTINEL_TIMEOUT_S:g} s"
            return text if address in text else f"{address}: {text}"


def _is_down(state: dict[str, Any]) -> bool:
    return bool(state["is_sdown"] or state["is_odown"])


class _Pool(SentinelConnectionPool):
    """Connections to the primary; those to the one before are closed as soon as a new one is known."""

    async def get_master_address(self) -> tuple[str, int]:
        address: tuple[str, int] = await self.sentinel_manager.discover_master(self.service_name)
        if address != self.master_address:
            self.master_address = address
            for idle in self._available_connections:
                # The old server may hang: TLS would wait for its goodbye.
                await idle.disconnect(nowait=True)
        connection: Any
        for connection in self._in_use_connections:
            # A reader whose server was replaced but still answers would stay with it.
            if connection.is_connected and (connection.host, connection.port) != address:
                connection.mark_for_reconnect()
        return address

    async def aclose(self) -> None:
        await super().aclose()
        with contextlib.suppress(TimeoutError, RedisTimeoutError):
            await self.sentinel_manager.aclose()  # its clients are nobody else's


def open_redis(url: str) -> Any:
    """A client (`redis.asyncio.Redis`) that answers in bytes; it connects with the first command.

    Raises BusError when the URL or a file that it names cannot be used.
    """
    target = parse_url(url)
    common: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": COMMAND_TIMEOUT_S,
        # Not even an error to react to: redis-py would pass a lost connection off as a changed WATCH.
        "retry": Retry(NoBackoff(), 0, supported_errors=()),
        # Nothing beyond what an ACL must allow, and unread data in a pooled connection is noticed.
        "driver_info": None,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
    if target.tls:
        _check_files(target, url)
    options = common | target.ssl | {"db": target.db}
    options |= {"username": target.username or None, "password": target.password or None}
    if target.path:
        return Redis.from_pool(ConnectionPool(connection_class=_Unix, path=target.path, **options))
    if not target.primary:
        (host, port) = target.hosts[0]
        kind = _Tls if target.tls else _Plain
        return Redis.from_pool(ConnectionPool(connection_class=kind, host=host, port=port, **options))
    sentinels: Any = _Sentinels(  # type: ignore[no-untyped-call]
        target.hosts,
        sentinel_kwargs=common
        | target.ssl
        | {
            "ssl": target.tls,
            "username": target.sentinel_username or None,
            "password": target.sentinel_password or None,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "socket_timeout": SENTINEL_TIMEOUT_S,
        },
    )
    managed = _ManagedTls if target.tls else _Managed
    pool: Any = _Pool(target.primary, sentinels, connection_class=managed, **options)  # type: ignore[no-untyped-call]
    return Redis.from_pool(pool)


def _check_files(target: Target, url: str) -> None:
    """Have a missing or wrong file fail now, by its name, rather than as a connection that does not open."""
    for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if option not in target.ssl:
            continue
        try:
            with open(target.ssl[option], "rb"):
                pass
        except OSError as error:
            raise BusError(f"{safe_url(url)}: {option}: {target.ssl[option]}: {error.strerror}") from None
    try:
        RedisSSLContext(**{name.removeprefix("ssl_"): value for name, value in target.ssl.items()}).get()
    except (OSError, ValueError) as error:
        raise BusError(
            f"{safe_url(url)}: a certificate or key cannot be used: {_first_line(error)}"
        ) from None


# ------------------------------------------------------------------------- errors


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


# part of the text -> what to do
_ADVICE = (
    ("without any password configured", "the server has no password for this user: give none"),
    (
        "mismatch, certificate is not valid",
        "name the host as its certificate does, or give ssl_check_hostname=false",
    ),
    ("CERTIFICATE_VERIFY_FAILED", "give the CA that signed its certificate: ssl_ca_certs=FILE"),
    ("CERTIFICATE_REQUIRED", "the server wants a client certificate: ssl_certfile=FILE&ssl_keyfile=FILE"),
    ("UNKNOWN_CA", "the server does not trust the client certificate: see ssl_certfile"),
    ("WRONG_VERSION_NUMBER", "no TLS there: give its TLS port, or redis:// for rediss://"),
    ("RECORD_LAYER_FAILURE", "no TLS there: give its TLS port, or redis:// for rediss://"),
    (
        "unknown command 'SENTINEL'",
        "a server answers there, not a sentinel: give redis:// for redis+sentinel://",
    ),
    ("no sentinel knows", "give the name that `sentinel monitor` has in the sentinels' files"),
)
# the same, for failures that may have another cause too: without TLS and with it
_PERHAPS = (
    (
        ("reset by peer", "if that is a TLS port, give rediss:// for redis://"),
        ("closed by server", "if that is a TLS port, give rediss:// for redis://"),
        ("rotocol", "if that is a TLS port, give rediss:// for redis://"),
    ),
    (
        ("Timeout", "if that is no TLS port, give redis:// for rediss://"),
        ("no answer in", "if that is no TLS port, give redis:// for rediss://"),
        # The reset may overtake the alert that says so.
        ("reset by peer", "perhaps it wants another client certificate: ssl_certfile=FILE&ssl_keyfile=FILE"),
    ),
)
_NEEDS_PASSWORD = ("Authentication required", "already authenticated")


def explain(error: BaseException, url: str) -> str:
    """Why a connection or its first command failed and what to do: one line, no password."""
    text = _first_line(error)
    if any(part in text for part in _NEEDS_PASSWORD):
        where = "a sentinel" if isinstance(error, MasterNotFoundError) else "it"
        source = (
            "sentinel_password in the URL"
            if where == "a sentinel"
            else "EI_REDIS_PASSWORD or redis_password_file"
        )
        return f"{where} asks for a password: give {source}"
    for part, advice in _ADVICE:
        if part in text:
            return f"{text}; {advice}"
    if isinstance(error, NoPermissionError):
        return f"{text}; give the ACL user the rights in ops/redis/users.acl"
    if isinstance(error, AuthenticationError):
        return f"{text}; check the user's name and password, in the URL or EI_REDIS_USERNAME and EI_REDIS_PASSWORD"
    for part, advice in _PERHAPS[parse_url(url).tls]:
        if part in text:
            return f"{text}; {advice}"
    return text
