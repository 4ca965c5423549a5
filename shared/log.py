"""The one logger of every process: one event a line, as text for people or JSON for machines.

`get_logger("router").info("node_lost", node="n1", age_s=6.1)` writes
`2026-11-30T04:00:00.123Z info  router node_lost node=n1 age_s=6.1`. Lines go to standard error; a value with
blanks is quoted; an exception passed as `error=` is written as its class and message.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping

import msgspec

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def _plain(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


class _Formatter(logging.Formatter):
    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, object] = getattr(record, "fields", {})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        level = record.levelname.lower()
        if self._json:
            line: dict[str, object] = {"t": stamp, "level": level, "part": record.name}
            line["event"] = record.getMessage()
            line.update({key: _plain(value) for key, value in fields.items()})
            text = msgspec.json.encode(line).decode()
        else:
            words = [f"{stamp} {level:7s} {record.name} {record.getMessage()}"]
            for key, value in fields.items():
                shown = str(_plain(value))
                words.append(f"{key}={json.dumps(shown) if ' ' in shown or not shown else shown}")
            text = " ".join(words)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class Logger:
    """Structured logger; fields are keyword arguments. `exc_info=True` appends the traceback."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def _log(self, level: int, event: str, exc_info: bool, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exc_info)

    def debug(self, event: str, *, exc_info: bool = False, **fields: object) -> None:
        self._log(logging.DEBUG, event, exc_info, fields)

    def info(self, event: str, *, exc_info: bool = False, **fields: object) -> None:
        self._log(logging.INFO, event, exc_info, fields)

    def warning(self, event: str, *, exc_info: bool = False, **fields: object) -> None:
        self._log(logging.WARNING, event, exc_info, fields)

    def error(self, event: str, *, exc_info: bool = False, **fields: object) -> None:
        self._log(logging.ERROR, event, exc_info, fields)


def get_logger(name: str) -> Logger:
    return Logger(name)


def setup(level: str = "info", fmt: str = "text") -> None:
    """Send all logging of this process to standard error in the one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(fmt == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS.get(level, logging.INFO))
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
