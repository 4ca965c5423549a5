"""What the bus does, to see that a Redis can be worked with."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from shared import messages as m
from shared.bus import Bus
from shared.store import Commit, NodeCounts
from shared.streams import BusError


@contextlib.asynccontextmanager
async def sending(bus: Bus) -> AsyncIterator[m.StreamMessage]:
    publisher = bus.publisher("branch", "r1")
    task = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def batch(number: int, pages: int = 1) -> Commit:
    counts = NodeCounts(np.arange(1, pages + 1, dtype=np.int64), np.full(pages, number, dtype=np.int32))
    zero = NodeCounts(np.array([1], dtype=np.int64), np.array([0], dtype=np.int32))
    return Commit(
        number,
        counts={"n1": counts, "n2": zero, "n3": zero._replace(empty=True)},
        branches={"b": b"record", "gone": None},
        segments={1: b"s", 2: None},
        pages={1: (0, m.pack_pages([1, 2])), 3: (1, m.pack_pages([3]))},
        state={"branch": b"1-1", "gone": None},
    )


async def refusal(url: str) -> str:
    """What `Bus.connect` says, which must be one line, and quick."""
    begun = time.monotonic()
    with pytest.raises(BusError) as caught:
        await Bus.connect(url)
    text = str(caught.value)
    assert "\n" not in text and "s3cret" not in text and time.monotonic() - begun < 4.0
    return text


async def works(url: str) -> None:
    bus = await Bus.connect(url)
    await bus.save("x", b"y")
    assert await bus.load("x") == b"y"
    await bus.close()
