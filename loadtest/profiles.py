"""Timing profiles by name or file: a file holds `shared.timing.Profile` as JSON, whole, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.timing import PROFILES, Profile


def load_profile(name_or_path: str) -> Profile:
    """A built-in profile by its name, or one from a file that `evolving fit --out` wrote.

    Raises ValueError: what was wrong, in one line.
    """
    if name_or_path in PROFILES:
        return PROFILES[name_or_path]
    path = Path(name_or_path)
    if not (path.exists() or path.suffix == ".json" or len(path.parts) > 1):
        raise ValueError(
            f"no timing profile {name_or_path!r}; known: {', '.join(PROFILES)}, and no such file"
        )
    text = read_file(name_or_path)
    try:
        node = msgspec.json.decode(text, type=Profile)
        _check_profile(node)
        unknown = set(_fields(msgspec.json.decode(text))) - set(_fields(msgspec.to_builtins(node)))
    except ZeroDivisionError:
        raise ValueError(f"{path}: is no timing profile: page_size must be above 0, not 0") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no timing profile: {error}") from None
    if unknown:
        raise ValueError(f"{path}: is no timing profile: it has no {', '.join(sorted(unknown))}")
    return node


def _check_profile(node: Profile) -> None:
    """What the struct takes but no cluster can run. Raises ValueError."""
    positive = ("page_size", "t_acc", "kv_bytes_per_token", "link_bytes_per_s")
    for field in (*positive, "idle_gap_s", "switch_s"):
        value = getattr(node, field)
        if not 0 <= value < math.inf or (field in positive and not value):
            raise ValueError(f"{field} must be {'above' if field in positive else 'at least'} 0, not {value}")


def _fields(data: object, prefix: str = "") -> Iterator[str]:
    """Names of all fields, those of nested objects too: `prefill.c0`."""
    for key, value in data.items() if isinstance(data, dict) else ():
        yield f"{prefix}{key}"
        yield from _fields(value, f"{prefix}{key}.")


def read_file(path: str) -> bytes:
    """Raises ValueError with the path, in one line."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
