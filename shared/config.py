"""Settings of every part: msgspec Structs filled from a TOML file, the environment and flags, in rising order.

| source | a common setting | a setting of one part |
|---|---|---|
| `--config FILE.toml` (or `EI_CONFIG`) | top-level key `redis = "..."` | table `[router]`, key `port = 8000` |
| environment | `EI_REDIS` | `EI_ROUTER_PORT` |
| flag | `--redis` | `--port` |

Common settings are the fields of `Settings`; a part may override a common one under its own name. Commands that
ask a cluster and end have those of `ClusterSettings` only, and pass the others over. An unknown key, table or
`EI_*` variable and a value of the wrong type raise `ConfigError`, whose text is one line that says what was wrong
and where.
"""

from __future__ import annotations

import argparse
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NoReturn, TypeVar

import msgspec

SECTIONS = (
    "router",
    "directory",
    "planner",
    "telemetry",
    "worker",
    "up",
    "demo",
    "replay",
    "generate",
    "simulate",
    "reproduce",
    "fit",
    "status",
    "split",
    "verify",
    "show",
    "keys",
)
_OTHER_VARIABLES = {"EI_CONFIG", "EI_TRACES"}
_OTHER_PREFIXES = ("EI_TEST_", "EI_COMPOSE_")


class ConfigError(Exception):
    """A setting that cannot be used; the text is one line for the operator."""


class Doc(msgspec.Struct, frozen=True):
    """Help text of a setting: `port: Annotated[int, Doc("port to listen on")] = 0`."""

    text: str


class ClusterSettings(msgspec.Struct, kw_only=True):
    """How a cluster is reached: for commands that ask it something and end."""

    redis: Annotated[str, Doc("Redis URL")] = "redis://127.0.0.1:6379/0"
    redis_username: Annotated[str, Doc("ACL user, where the URL names none")] = ""
    redis_password: Annotated[
        str, Doc("password, where the URL has none; for the environment, for others see flags")
    ] = ""
    redis_password_file: Annotated[str, Doc("file that holds the password, where none is given")] = ""
    cluster: Annotated[str, Doc("name of the cluster; its keys start with ei:{NAME}:")] = "main"

    def __post_init__(self) -> None:
        if not self.cluster or any(c in self.cluster for c in "{}: \t\n"):
            raise ValueError(f"cluster must be a name without braces, colons or blanks, not {self.cluster!r}")


class Settings(ClusterSettings, kw_only=True):
    """What every part that runs on has."""

    host: Annotated[str, Doc("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Doc("port to listen on, 0 for a free one")] = 0
    advertise: Annotated[str, Doc("host name under which the others reach this process")] = ""
    speedup: Annotated[float, Doc("simulated seconds per wall second; 1 with a real engine")] = 1.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Doc("least level that is logged")] = (
        "info"
    )
    log_format: Annotated[Literal["text", "json"], Doc("one line of text, or one JSON object, an event")] = (
        "text"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.speedup < float("inf"):
            raise ValueError(f"speedup must be a number above 0, not {self.speedup}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be 0 to 65535, not {self.port}")


S = TypeVar("S", bound=msgspec.Struct)

COMMON = tuple(field.name for field in msgspec.structs.fields(Settings))


class _Field(typing.NamedTuple):
    name: str
    type: object
    doc: str
    default: object


def _fields(struct: type[msgspec.Struct]) -> dict[str, _Field]:
    hints = typing.get_type_hints(struct, include_extras=True)
    found: dict[str, _Field] = {}
    for field in msgspec.structs.fields(struct):
        kind, doc = hints[field.name], ""
        if typing.get_origin(kind) is Annotated:
            doc = " ".join(extra.text for extra in kind.__metadata__ if isinstance(extra, Doc))
            kind = kind.__origin__
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        found[field.name] = _Field(field.name, kind, doc, default)
    return found


def _type_name(kind: object) -> str:
    if typing.get_origin(kind) is Literal:
        return " | ".join(str(value) for value in typing.get_args(kind))
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " | ".join(_type_name(part) for part in typing.get_args(kind) if part is not type(None))
    return str(getattr(kind, "__name__", kind))


def _convert(field: _Field, value: object, where: str) -> object:
    if field.type is bool and isinstance(value, str):
        word = value.strip().lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off", ""):
            return False
        raise ConfigError(f"{where}: {value!r} is not a yes or no")
    try:
        return msgspec.convert(value, field.type, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        if isinstance(value, int) and not isinstance(value, bool) and field.type is float:
            return float(value)
        raise ConfigError(f"{where}: {value!r} is not a {_type_name(field.type)} ({error})") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def _read_file(path: str, section: str, fields: Mapping[str, _Field]) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    values: dict[str, object] = {}
    for key, value in table.items():
        if key in SECTIONS and isinstance(value, dict):
            continue
        if key not in COMMON:
            raise ConfigError(f"{path}: unknown key {key!r} (common settings: {', '.join(COMMON)})")
        if key in fields:
            values[key] = _convert(fields[key], value, f"{path}: {key}")
    for key, value in table.get(section, {}).items():
        if key not in fields:
            raise ConfigError(f"{path}: unknown key {key!r} in [{section}] (known: {', '.join(fields)})")
        values[key] = _convert(fields[key], value, f"{path}: [{section}] {key}")
    return values


def _read_environment(
    environ: Mapping[str, str], section: str, fields: Mapping[str, _Field]
) -> dict[str, object]:
    common: dict[str, object] = {}
    own: dict[str, object] = {}
    prefix = f"EI_{section.upper()}_"
    for variable, value in environ.items():
        if not variable.startswith("EI_") or variable in _OTHER_VARIABLES:
            continue
        if variable.startswith(prefix):
            name = variable.removeprefix(prefix).lower()
            if name not in fields:
                raise ConfigError(f"{variable}: unknown setting (known to {section}: {', '.join(fields)})")
            own[name] = _convert(fields[name], value, variable)
            continue
        name = variable.removeprefix("EI_").lower()
        if name in COMMON:
            if name in fields:
                common[name] = _convert(fields[name], value, variable)
        elif not variable.startswith(_OTHER_PREFIXES) and name.partition("_")[0] not in SECTIONS:
            raise ConfigError(
                f"{variable}: unknown setting (common: EI_{', EI_'.join(c.upper() for c in COMMON)};"
                f" of one part: {prefix}NAME)"
            )
    return common | own


def file_in(argv: Sequence[str]) -> str | None:
    """The file that `load` would read: of `--config` or EI_CONFIG."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=os.environ.get("EI_CONFIG"))
    path: str | None = parser.parse_known_args(list(argv))[0].config
    return path


def load(
    struct: type[S],
    section: str,
    argv: Sequence[str],
    *,
    positional: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    summary: str = "",
    command: str = "",
) -> S:
    """The settings of one part. `positional` names fields given without a flag, in order; `command` is what the
    operator typed, where that is not the section's name.

    Raises ConfigError. `--help` prints the flags and raises SystemExit(0).
    """
    environ = os.environ if environ is None else environ
    fields = _fields(struct)
    parser = _Parser(prog=f"evolving {command or section}", description=summary or None, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE.toml", default=environ.get("EI_CONFIG"))
    for field in fields.values():
        shown = "" if field.default in (msgspec.NODEFAULT, "", None) else f" (default: {field.default})"
        text = (field.doc + shown).replace("%", "%%")
        if field.name in positional:
            needed = field.default is msgspec.NODEFAULT
            parser.add_argument(
                field.name, nargs=None if needed else "?", default=None, help=text, metavar=field.name.upper()
            )
        elif field.type is bool:
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                action=argparse.BooleanOptionalAction,
                default=None,
                help=text,
            )
        else:
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                default=None,
                metavar=_type_name(field.type).upper().replace(" ", ""),
                help=text,
            )
    given = vars(parser.parse_args(list(argv)))
    path = given.pop("config")
    values: dict[str, object] = {}
    if path:
        values |= _read_file(path, section, fields)
    values |= _read_environment(environ, section, fields)
    for name, value in given.items():
        if value is not None:
            where = name.upper() if name in positional else "--" + name.replace("_", "-")
            values[name] = _convert(fields[name], value, where)
    missing = [n for n, f in fields.items() if f.default is msgspec.NODEFAULT and n not in values]
    if missing:
        raise ConfigError(f"{section} needs --{missing[0].replace('_', '-')} (see --help)")
    try:
        return struct(**values)
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from None
