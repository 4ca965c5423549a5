"""Workers that lose each other in the middle of a fetch: every request gets its right answer, nothing stays pinned."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import aiohttp
import msgspec
import pytest

from shared.messages import FetchPlan, PrefillCall
from shared.pages import page_digests
from tests.conftest import eventually
from tests.kv_workers import L2_PAGES, PAGE, PAGE_BYTES, Worker, helpers, prompt, workers
from worker.engines.simulated.text import answer, prompt_seed
from worker.kv.arena import Arena
from worker.transport.base import TransportMissing
from worker.transport.mooncake import MooncakeTransport
from worker.transport.peers import PIN_PATH, VERSION, PinCall


def expected(tokens: object) -> str:
    """What the engine says after a prompt, whoever computes it."""
    return answer(prompt_seed(tokens, None), 20, ignore_eos=True, stop=[]).text  # type: ignore[arg-type]


@pytest.fixture(params=["tcp", "mooncake"])
async def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "mooncake":
        mooncake = MooncakeTransport()
        try:
            await mooncake.start(Arena(1, 4096), "127.0.0.1")
        except TransportMissing as missing:
            pytest.skip(str(missing))
        await mooncake.close()
    name: str = request.param
    return name


async def test_a_peer_killed_in_mid_fetch_and_restarted_on_the_same_port(
    redis_url: str, cluster_name: str, tmp_path: Path, transport: str
) -> None:
    rng = random.Random(transport)
    async with workers(redis_url, cluster_name, tmp_path, transport) as (a, b):
        recomputed = 0.0
        for round_ in range(5):
            tokens = prompt(round_, 480)
            await a.prefill(f"p{round_}", tokens)
            fetching = asyncio.create_task(b.prefill(f"f{round_}", tokens, a))
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            await a.process.kill()
            await fetching
            assert await b.generate(tokens, f"f{round_}") == expected(tokens)
            await eventually(b.clean, 20.0)
            now = (await b.metrics())["recomputed_tokens_total{reason=peer_failed}"]
            recomputed, before = now, recomputed
            assert now >= before
            await a.start()
            # Another life on the same port: it has other pages, and they come.
            await eventually(lambda: _fetches(b, a), 30.0, 0.3)
        assert recomputed > 0, "no kill met a fetch"


async def _fetches(node: Worker, source: Worker) -> bool:
    """Whether the node gets the pages of a new prompt from there."""
    tokens = prompt(random.randrange(2**31), 100)
    await source.prefill("new", tokens)
    if (await node.prefill("new", tokens, source)).fetched_tokens < tokens.size // PAGE * PAGE:
        return False
    assert await node.generate(tokens, "new") == expected(tokens)
    return True


async def test_a_peer_that_accepts_and_stays_silent(
    redis_url: str, cluster_name: str, tmp_path: Path, transport: str
) -> None:
    flags = {2: ["--fetch-timeout-s", "1.5"]}
    async with workers(redis_url, cluster_name, tmp_path, transport, 3, flags) as (silent, healthy, b):
        first, second = prompt(1, 200), prompt(2, 200)
        await silent.prefill("s", first)
        await healthy.prefill("h", second)
        silent.freeze()
        one = asyncio.create_task(b.prefill("one", first, silent))
        two = await b.prefill("two", second, healthy)
        assert two.fetched_tokens == 3200, "a healthy peer's pages come while another one is silent"
        assert (await one).fetched_tokens == 0
        assert await b.generate(first, "one") == expected(first)
        silent.thaw()

        # In mid-fetch: it answers where the pages lie, and is silent from then on.
        third = prompt(3, 480)
        await silent.prefill("t", third)
        for wait_s in (0.005, 0.02, 0.04):
            one = asyncio.create_task(b.prefill("three", third, silent))
            await asyncio.sleep(wait_s)
            silent.freeze()
            await one
            assert await b.generate(third, "three") == expected(third)
            silent.thaw()
            await eventually(b.clean, 20.0)
        # It is used again once it is well.
        await eventually(lambda: _fetches(b, silent), 30.0, 0.3)


async def test_a_page_evicted_between_lookup_and_read(
    redis_url: str, cluster_name: str, tmp_path: Path, transport: str
) -> None:
    small = ["--l1-tokens", str(120 * PAGE), "--l2-tokens", str(150 * PAGE), "--lend-share", "1"]
    async with workers(redis_url, cluster_name, tmp_path, transport, 2, {0: small}) as (a, b):
        tokens = prompt(1, 100)
        await a.prefill("a", tokens)
        # The plan was made while a had the pages; others take their place before b asks.
        for other in range(2, 5):
            await a.prefill(f"o{other}", prompt(other, 100))
        done = await b.prefill("b", tokens, a)
        assert done.fetched_tokens == 0
        assert (await b.metrics())["recomputed_tokens_total{reason=peer_missing}"] == 1600
        assert await b.generate(tokens, "b") == expected(tokens)
        # While they are being read they stay, however much comes.
        again = prompt(9, 100)
        await a.prefill("again", again)
        load = asyncio.gather(*(a.prefill(f"l{k}", prompt(20 + k, 100)) for k in range(6)))
        await b.prefill("c", again, a)
        await load
        assert await b.generate(again, "c") == expected(again)


async def test_a_flipped_bit(redis_url: str, cluster_name: str, tmp_path: Path, transport: str) -> None:
    async with workers(redis_url, cluster_name, tmp_path, transport, 3) as (a, b, c):
        tokens = prompt(1, 200)
        await a.prefill("a", tokens)
        # Host memory of a is filled from its first slot on, in path order.
        a.flip(range(57, 58))
        done = await b.prefill("b", tokens, a)
        assert done.fetched_tokens == 57 * PAGE
        m = await b.metrics()
        assert m["fetch_corrupt_pages_total"] == 1
        assert m["recomputed_tokens_total{reason=corrupt}"] == (200 - 57) * PAGE
        assert await b.generate(tokens, "b") == expected(tokens)
        assert "page_corrupt" in b.process.log.read_text()
        await eventually(lambda: _counts(a, "kv_corrupt_pages_total", 1))
        # What b holds now is right: c gets it all from there, and decodes with it.
        assert await c.generate(tokens, "b", b) == expected(tokens)
        assert (await c.metrics())["recomputed_tokens_total{reason=corrupt}"] == 0

        # A bit that flips in own host memory is found when the page is restored.
        for other in range(2, 6):
            await b.prefill(f"o{other}", prompt(other, 200))
        assert (await b.metrics())["kv_pages{count=zero,tier=l1}"] > 500
        b.flip(range(10, 11))
        done = await b.prefill("again", tokens)
        assert done.cached_tokens < 3200 and await _counts(b, "kv_corrupt_pages_total", 1)
        assert await b.generate(tokens, "again") == expected(tokens)


async def _counts(worker: Worker, name: str, number: float) -> bool:
    return (await worker.metrics())[name] == number


async def test_host_memory_full_of_pinned_pages(
    redis_url: str, cluster_name: str, tmp_path: Path, transport: str
) -> None:
    flags = {0: ["--lend-share", "0.1"], 1: ["--lend-share", "1"]}
    async with workers(redis_url, cluster_name, tmp_path, transport, 2, flags) as (a, b):
        tokens = prompt(1, 250)
        await a.prefill("a", tokens)
        # a lends 204 pages at a time, and somebody has them all.
        keys = b"".join(page_digests(tokens, PAGE))
        async with b.http.post(
            a.url + PIN_PATH, data=msgspec.msgpack.encode(PinCall(VERSION, PAGE_BYTES, keys, 6.0))
        ) as loan:
            assert loan.status == 200 and (await a.metrics())["lent_pages"] == 204
        done = await b.prefill("b", tokens, a)
        assert done.fetched_tokens == 0 and (await a.metrics())["loans_refused_total"] > 1
        assert await b.generate(tokens, "b") == expected(tokens)

        # All of b's host memory is pinned by somebody who reads it: nothing can come, nothing can be written there.
        for seed in range(2, 10):
            await b.prefill(f"fill{seed}", prompt(seed, 500))
        loans = []
        for seed in range(1, 10):
            keys = b"".join(page_digests(prompt(seed, 500 if seed > 1 else 250), PAGE))
            async with b.http.post(
                b.url + PIN_PATH, data=msgspec.msgpack.encode(PinCall(VERSION, PAGE_BYTES, keys, 6.0))
            ) as answer_:
                loans.append(answer_.status)
        pinned = (await b.metrics())["kv_pinned_pages{tier=l2}"]
        assert pinned > 0.9 * L2_PAGES, (pinned, loans)
        more = prompt(50, 150)
        await a.prefill("more", more)
        assert await b.generate(more, "more", a) == expected(more)
        assert (await b.metrics())["recomputed_tokens_total{reason=no_room}"] > 0
        # The loans' time runs out, and then all is as before.
        await eventually(b.clean, 20.0)
        last = prompt(51, 150)
        await a.prefill("last", last)
        assert (await b.prefill("last", last, a)).fetched_tokens == 150 * PAGE


@pytest.mark.long
async def test_a_thousand_rounds_leave_nothing(
    redis_url: str, cluster_name: str, tmp_path: Path, transport: str
) -> None:
    """Fetches that end well, that are cancelled, and that ask a peer that is not there."""
    rng = random.Random(5)
    async with workers(redis_url, cluster_name, tmp_path, transport) as (a, b):
        gone = "http://127.0.0.1:9"

        async def one(number: int) -> None:
            tokens = prompt(10_000 + number, 30)
            kind = number % 4
            await a.prefill(f"a{number}", tokens)
            url = gone if kind == 3 else a.url
            call = PrefillCall(f"b{number}", "b", tokens.astype("<i4").tobytes(), fetch=FetchPlan(url, 0, 30))
            if kind == 2:
                timeout = aiohttp.ClientTimeout(total=rng.uniform(0.001, 0.02))
                try:
                    async with b.http.post(
                        b.url + "/ei/v1/prefill", data=msgspec.msgpack.encode(call), timeout=timeout
                    ) as reply:
                        await reply.read()
                except TimeoutError:
                    pass
            else:
                async with b.http.post(b.url + "/ei/v1/prefill", data=msgspec.msgpack.encode(call)) as reply:
                    assert b'"done"' in await reply.read()

        async def rounds(numbers: range) -> None:
            for at in range(numbers.start, numbers.stop, 4):
                await asyncio.gather(*(one(number) for number in range(at, at + 4)))
            await eventually(a.clean, 20.0)
            await eventually(b.clean, 20.0)

        await rounds(range(0, 200))
        before = [_cost(pid) for pid in (a.pid, b.pid)]
        children = [len(helpers(pid)) for pid in (a.pid, b.pid)]
        await rounds(range(200, 1200))
        after = [_cost(pid) for pid in (a.pid, b.pid)]
        for (fds, memory), (fds_after, memory_after) in zip(before, after, strict=True):
            assert fds_after <= fds + 5, (before, after)
            assert memory_after <= memory + 20e6, (before, after)
        assert [len(helpers(pid)) for pid in (a.pid, b.pid)] == children
        assert (await b.metrics())["fetched_pages_total"] > 1200 * 30 * 0.4


def _cost(pid: int) -> tuple[int, float]:
    """Open files and private bytes of a process and its helpers; the arena is shared memory and not among them."""
    fds, private = 0, 0.0
    for each in (pid, *helpers(pid)):
        fds += len(os.listdir(f"/proc/{each}/fd"))
        status = Path(f"/proc/{each}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        private += int(line.split()[1]) * 1024
    return fds, private
