"""Fixtures that several tests share: a real Redis, waiting for a condition."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from shared.embedded import EmbeddedRedis
from shared.service import Service
from tests.redis_servers import binaries, binary_name, tls_missing

if TYPE_CHECKING:
    from worker.agent.service import WorkerService


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """URL of a real server for the whole run: EI_TEST_REDIS, else an embedded one."""
    given = os.environ.get("EI_TEST_REDIS")
    if given:
        yield given
        return
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
def redis_url(redis_server: str) -> str:
    return redis_server


@pytest.fixture
def cluster_name() -> str:
    """A cluster name of its own for each test, so that tests share one Redis without meeting."""
    return f"t{uuid.uuid4().hex[:12]}"


async def eventually(
    condition: Callable[[], object | Awaitable[object]], timeout_s: float = 15.0, every_s: float = 0.02
) -> object:
    """Wait until `condition()` is true and return it; fail with what it was after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"condition still {value!r} after {timeout_s} s")
        await asyncio.sleep(every_s)


@contextlib.asynccontextmanager
async def running(service: Service) -> AsyncIterator[Service]:
    """The service serving in this process, until the block ends; it must then stop cleanly."""
    task = asyncio.create_task(service.serve())
    try:
        await eventually(lambda: service._started or task.done())
        if task.done():
            task.result()
            raise AssertionError("the service ended at once")
        yield service
    finally:
        service.stop()
        code = await asyncio.wait_for(task, 30.0)
    assert code == 0


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for them; again and again, for a call of Redis can lose the cancellation."""
    waiting = set(tasks)
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=0.5)


@pytest.fixture(scope="module", params=binaries(), ids=binary_name)
def binary(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tls_binary(binary: str) -> str:
    missing = tls_missing(binary)
    if missing:
        pytest.skip(missing)
    return binary


@pytest.fixture
async def worker(redis_url: str, cluster_name: str) -> AsyncIterator[WorkerService]:
    """One simulated worker, by itself; nothing may be left on it."""
    from tests.worker_nodes import node  # which imports this module

    async with node(redis_url, cluster_name) as service:
        yield service


@pytest.fixture
async def http(worker: WorkerService) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of `worker`."""
    async with aiohttp.ClientSession(base_url=worker.url) as session:
        yield session
