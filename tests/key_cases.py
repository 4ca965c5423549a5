"""Keys for the tests of who may use the router, and how much of it."""

from __future__ import annotations

import hashlib

import pytest

from services.router.access import KeyEntry
from shared.openai import ApiError

NOW = 1_900_000_000.0
SECRET = "s" * 40


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def block(name: str, key: str, **fields: object) -> str:
    lines = [f'[[key]]\nname = "{name}"\nsha256 = "{sha(key)}"']
    lines += [f"{field} = {value}" for field, value in fields.items()]
    return "\n".join(lines) + "\n"


def entry(name: str = "k", **fields) -> KeyEntry:
    return KeyEntry(name=name, sha256=sha(name), **fields)


def refused(call, *args) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args)
    assert caught.value.status == 429
    assert caught.value.type == "rate_limit_error"
    assert caught.value.headers()["Retry-After"] == str(caught.value.retry_after_s)
    return caught.value
