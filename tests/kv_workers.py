"""Workers as real processes, for tests that kill and freeze them and look into their memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from shared.embedded import free_port
from shared.messages import FetchPlan, PrefillCall, PrefillEvent
from shared.timing import TINY
from tests.conftest import eventually
from tests.crash_cluster import Process
from tests.worker_nodes import prefill

PAGE = TINY.page_size
L1_PAGES, L2_PAGES = TINY.l1_tokens // PAGE, TINY.l2_tokens // PAGE
PAGE_BYTES = 2**16
Tokens = np.ndarray[Any, np.dtype[np.int32]]


def prompt(seed: int, pages: int, more: int = 5) -> Tokens:
    """Token ids of so many pages and a tail, different for each seed."""
    return np.random.default_rng(seed).integers(0, 100_000, pages * PAGE + more).astype(np.int32)


class Worker:
    """One worker process, started again on the same port after it was killed."""

    def __init__(
        self,
        name: str,
        redis_url: str,
        cluster: str,
        folder: Path,
        http: aiohttp.ClientSession,
        flags: list[str],
    ) -> None:
        self.name = name
        self.http = http
        self.process = Process(
            name, folder, free_port(), "worker.agent", "--redis", redis_url, "--cluster", cluster, "--node", name,
            "--profile", "tiny", "--model", "m", "--speedup", "10", "--page-bytes", str(PAGE_BYTES), *flags,
        )  # fmt: skip
        self.url = self.process.url

    async def start(self) -> None:
        await self.process.start()
        await eventually(lambda: self.process.ready(self.http), 30.0)

    @property
    def pid(self) -> int:
        return self.process._process.pid

    def freeze(self) -> None:
        """Stop all its processes: they accept connections and stay silent."""
        for pid in [*helpers(self.pid), self.pid]:
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in [*helpers(self.pid), self.pid]:
            os.kill(pid, signal.SIGCONT)

    async def stop(self) -> None:
        if not self.process.alive:
            return
        with contextlib.suppress(ProcessLookupError):
            self.thaw()
        await self.process.kill()

    async def prefill(self, rid: str, tokens: Tokens, source: Worker | None = None) -> PrefillEvent:
        """The last event of a prefill that fetches all pages from `source`."""
        fetch = FetchPlan(source.url, 0, tokens.size // PAGE) if source is not None else None
        events = await prefill(
            self.http, self.url, PrefillCall(rid, "b", tokens.astype("<i4").tobytes(), fetch=fetch)
        )
        assert events[-1].event == "done", events
        return events[-1]

    async def generate(self, tokens: Tokens, rid: str = "", source: Worker | None = None) -> str:
        """The text of 20 output tokens."""
        headers = {"X-EI-Request-Id": rid} if rid else {}
        if source is not None:
            headers["X-EI-KV-Source"] = source.url
        body = {"model": "m", "prompt": tokens.tolist(), "max_tokens": 20, "ignore_eos": True}
        async with self.http.post(self.url + "/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            text: str = (await answer.json())["choices"][0]["text"]
            return text

    async def metrics(self) -> dict[str, float]:
        """Samples by name; with labels as in `name{tier=l2}`."""
        async with self.http.get(self.url + "/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        found = {}
        for family in families:
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[sample.name.removeprefix("ei_worker_") + (f"{{{labels}}}" if labels else "")] = (
                    sample.value
                )
        return found

    async def clean(self) -> bool:
        """No request, no pin, no loan."""
        m = await self.metrics()
        return not any(
            m[name]
            for name in (
                "requests", "kv_pinned_pages{tier=l1}", "kv_pinned_pages{tier=l2}", "kv_reserved_pages", "lent_pages"
            )
        )  # fmt: skip

    def arena(self) -> int:
        """An open file that is the worker's arena."""
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "kv-arena" in os.readlink(entry):
                    return os.open(entry, os.O_RDWR)
        raise AssertionError("the worker has no arena")

    def flip(self, l2_slots: range) -> None:
        """Change one bit in each of these slots of host memory."""
        fd = self.arena()
        for slot in l2_slots:
            at = (L1_PAGES + slot) * PAGE_BYTES + 4321
            byte = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([byte[0] ^ 16]), at)
        os.close(fd)


def helpers(pid: int) -> list[int]:
    """The processes that a process started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


@contextlib.asynccontextmanager
async def workers(
    redis_url: str,
    cluster: str,
    folder: Path,
    transport: str,
    count: int = 2,
    flags: dict[int, list[str]] | None = None,
) -> AsyncIterator[list[Worker]]:
    """`count` workers over one transport; afterwards nothing may be pinned on those that are alive."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        made = [
            Worker(
                f"w{number}",
                redis_url,
                cluster,
                folder,
                http,
                ["--transport", transport, *(flags or {}).get(number, [])],
            )
            for number in range(count)
        ]
        try:
            for worker in made:
                await worker.start()
            yield made
            for worker in made:
                if worker.process.alive:
                    await eventually(worker.clean, 20.0)
        finally:
            for worker in made:
                await worker.stop()
