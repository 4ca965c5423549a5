"""Pages between nodes: what arrives, what is shared, and that nothing stays pinned whatever goes wrong."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from shared.messages import Tier
from tests.conftest import eventually
from tests.kv_node import KvNode, kv_nodes, path
from worker.kv.loans import Loan
from worker.kv.path import Path
from worker.transport import fetch, peers
from worker.transport.base import Endpoint, Offsets, TransferError
from worker.transport.fetch import Arrived
from worker.transport.peers import PIN_PATH, RELEASE_PATH, VERSION, PinAnswer, PinCall, ReleaseCall


async def fetched(node: KvNode, url: str, wanted: Path, *, tail: bool = False) -> Arrived:
    """A fetch whose request takes its pages over at once."""
    arrived = await node.fetcher.fetch(url, wanted, tail=tail)
    assert node.cache.in_host(wanted.pages[: arrived.pages]).all()
    node.cache.let_go(arrived.held)
    return arrived


async def test_pages_come_whole_and_are_readable_from_then_on() -> None:
    async with kv_nodes(3) as (a, b, c):
        a.compute(path(0, 500))
        arrived = await fetched(b, a.url, path(0, 500))
        assert (arrived.pages, arrived.reason) == (500, "")
        assert b.sound(path(0, 500).pages) and b.fetcher.counts.pages == 500
        assert b.fetcher.counts.bytes == 500 * 4096 and b.fetcher.counts.corrupt_pages == 0
        # What b has now, c can have from b.
        assert (await fetched(c, b.url, path(0, 500))).pages == 500
        assert c.sound(path(0, 500).pages)
        # A second fetch moves nothing.
        assert (await fetched(b, a.url, path(0, 500))).pages == 500
        assert b.fetcher.counts.fetches == 1


async def test_only_what_is_missing_moves() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 300))
        b.compute(path(0, 120))
        assert (await fetched(b, a.url, path(0, 300))).pages == 300
        assert b.fetcher.counts.pages == 180


async def test_what_the_peer_lacks_is_reported() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 100))
        arrived = await fetched(b, a.url, path(0, 130))
        assert (arrived.pages, arrived.reason) == (100, "peer_missing")
        arrived = await fetched(b, a.url, path(900, 5))
        assert (arrived.pages, arrived.reason) == (0, "peer_missing")
        assert not b.cache.in_host(path(900, 5).pages).any()


async def test_a_page_that_only_gpu_memory_holds_is_lent_too() -> None:
    async with kv_nodes(l1_pages=50, l2_pages=60) as (a, b):
        a.compute(path(0, 20))
        # All of a's host memory is taken by others; GPU memory still has the pages.
        pinned = a.cache.reserve(60)
        assert not a.cache.in_host(path(0, 20).pages).any() and a.cache.held(path(0, 20).pages) == 20
        assert (await fetched(b, a.url, path(0, 20))).pages == 20 and b.sound(path(0, 20).pages)
        a.cache.give_back(pinned)


async def test_requests_share_what_is_in_flight() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 400))
        fetches = [b.fetcher.fetch(a.url, path(0, 400 - 10 * k)) for k in range(8)]
        results = await asyncio.gather(*fetches)
        assert [r.pages for r in results] == [400 - 10 * k for k in range(8)]
        assert b.fetcher.counts.pages == 400 and b.fetcher.counts.fetches == 1
        assert a.service.lent_pages == 400
        for result in results:
            b.cache.let_go(result.held)


async def test_a_cancelled_request_leaves_the_fetch_to_those_that_share_it() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 400))
        first = asyncio.create_task(b.fetcher.fetch(a.url, path(0, 400)))
        second = asyncio.create_task(fetched(b, a.url, path(0, 300)))
        await eventually(lambda: b.fetcher.pages_in_flight == 400, every_s=0.0)
        first.cancel()
        assert (await second).pages == 300
        assert first.cancelled()


async def test_a_fetch_ends_with_its_last_request() -> None:
    async with kv_nodes(page_bytes=2**18, l1_pages=200, l2_pages=300) as (a, b):
        a.compute(path(0, 140))
        for _ in range(10):
            requests = [asyncio.create_task(b.fetcher.fetch(a.url, path(0, 140))) for _ in range(3)]
            await eventually(lambda: b.fetcher.pages_in_flight == 140, every_s=0.0)
            await asyncio.sleep(random.Random(1).random() * 0.02)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            await b.quiet()
            assert b.cache.l2_pinned == 0
        assert (await fetched(b, a.url, path(0, 140))).pages == 140 and b.sound(path(0, 140).pages)


async def test_a_request_that_comes_while_a_fetch_is_being_ended_gets_its_pages() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 400))
        for _ in range(5):
            first = asyncio.create_task(b.fetcher.fetch(a.url, path(0, 400)))
            await eventually(lambda: b.fetcher.pages_in_flight == 400, every_s=0.0)
            first.cancel()
            await asyncio.wait([first])
            assert (await fetched(b, a.url, path(0, 400))).pages == 400 and b.sound(path(0, 400).pages)
            await b.quiet()
            b.cache._drop_corrupt(path(0, 400).pages)


async def test_a_flipped_bit_costs_the_page_and_what_follows_and_the_peer_drops_it() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 300))
        slots, lent = a.cache.lend(path(0, 300))
        a.cache.end_loan(lent)
        a.memory.arena.pages[slots[123], 77] ^= 8
        arrived = await fetched(b, a.url, path(0, 300))
        assert (arrived.pages, arrived.reason) == (123, "corrupt")
        assert b.fetcher.counts.corrupt_pages == 1 and b.sound(path(0, 123).pages)
        await eventually(lambda: a.cache.corrupt_pages == 1)
        assert 123 not in a.cache.pages(Tier.L2)
        # GPU memory there has another copy, and that one is right.
        assert (await fetched(b, a.url, path(0, 300))).pages == 300 and b.sound(path(0, 300).pages)


async def test_pages_that_are_evicted_between_lookup_and_read_are_gone() -> None:
    """The router's plan is old: by the time of the fetch the peer has evicted them; during a read it cannot."""
    async with kv_nodes(l1_pages=50, l2_pages=200) as (a, b):
        a.compute(path(0, 50))
        a.compute(path(1000, 50))
        for first in (2000, 3000, 4000):
            a.compute(path(first, 50))
        arrived = await fetched(b, a.url, path(0, 50))
        assert (arrived.pages, arrived.reason) == (0, "peer_missing")

        read = b.transport.read

        async def late(
            peer: Endpoint, remote: Offsets, local: Offsets, length: int, timeout_s: float
        ) -> None:
            for first in range(5000, 12000, 1000):
                a.compute(path(first, 50))
            await read(peer, remote, local, length, timeout_s)

        b.transport.read = late  # type: ignore[method-assign]
        assert (await fetched(b, a.url, path(4000, 50))).pages == 50 and b.sound(path(4000, 50).pages)


async def test_no_room_means_that_less_comes() -> None:
    async with kv_nodes(l1_pages=50, l2_pages=60) as (a, b):
        a.compute(path(0, 30))
        taken = b.cache.reserve(48)
        arrived = await fetched(b, a.url, path(0, 30))
        assert (arrived.pages, arrived.reason) == (12, "no_room")
        b.cache.give_back(taken)
        full = b.cache.hold(b.cache.pages(Tier.L2))
        more = b.cache.reserve(60)
        assert (await fetched(b, a.url, path(0, 30))).reason == "no_room"
        b.cache.give_back(more)
        b.cache.let_go(full)


async def test_a_peer_lends_at_most_its_share_and_the_rest_afterwards() -> None:
    async with kv_nodes(l2_pages=600) as (a, b):
        a.compute(path(0, 400))
        most = 0
        lend = a.service.loans.lend

        def watched(wanted: Path, hold_s: float, now: float) -> Loan:
            nonlocal most
            loan = lend(wanted, hold_s, now)
            most = max(most, a.service.loans.pages)
            return loan

        a.service.loans.lend = watched  # type: ignore[method-assign]
        assert (await fetched(b, a.url, path(0, 400))).pages == 400
        assert most == 300 and b.sound(path(0, 400).pages)


async def test_a_peer_that_has_lent_all_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kv_nodes(l2_pages=600) as (a, b):
        a.compute(path(0, 400))
        loan = a.service.loans.lend(path(0, 300), 30.0, time.monotonic())
        waiting = asyncio.create_task(fetched(b, a.url, path(300, 50)))
        await eventually(lambda: a.service.loans.refused > 1)
        a.service.loans.end(loan.number)
        assert (await waiting).pages == 50
        await eventually(lambda: a.service.loans.pages == 0)

        monkeypatch.setattr(peers, "BUSY_S", 0.2)
        loan = a.service.loans.lend(path(0, 300), 30.0, time.monotonic())
        assert (await fetched(b, a.url, path(350, 50))).reason == "peer_failed"
        assert not b.peers.failures, "a busy peer is not a broken one"
        a.service.loans.end(loan.number)


async def test_long_paths_come_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "WINDOW_PAGES", 64)
    async with kv_nodes() as (a, b):
        a.compute(path(0, 500))
        tail = path(10**9, 1)
        a.cache.keep_tail(tail)
        arrived = await fetched(b, a.url, path(0, 500).plus(tail), tail=True)
        assert arrived.pages == 501 and b.cache.has_tail(tail) and len(b.cache.pages(Tier.L2)) == 500
        assert (await fetched(b, a.url, path(0, 530))).reason == "peer_missing"


async def test_a_transfer_that_fails_leaves_nothing_behind() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 300))

        async def broken(
            peer: Endpoint, remote: Offsets, local: Offsets, length: int, timeout_s: float
        ) -> None:
            raise TransferError("the cable is cut")

        b.transport.read = broken  # type: ignore[method-assign]
        arrived = await fetched(b, a.url, path(0, 300))
        assert (arrived.pages, arrived.reason) == (0, "peer_failed")
        assert b.peers.failures == 1 and b.cache.l2_used == 0
        # Left alone for a while: not even asked.
        lent = a.service.lent_pages
        assert (await fetched(b, a.url, path(0, 300))).reason == "peer_failed"
        assert a.service.lent_pages == lent


async def test_a_fetch_that_takes_too_long_is_given_up() -> None:
    async with kv_nodes(timeout_s=0.3) as (a, b):
        a.compute(path(0, 300))

        async def silent(
            peer: Endpoint, remote: Offsets, local: Offsets, length: int, timeout_s: float
        ) -> None:
            await asyncio.sleep(3600)

        b.transport.read = silent  # type: ignore[method-assign]
        arrived = await fetched(b, a.url, path(0, 300))
        assert (arrived.pages, arrived.reason) == (0, "peer_failed")


async def test_a_tail_comes_along_and_is_told_to_nobody() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 100))
        tail = path(10**9, 1)
        a.cache.keep_tail(tail)
        b.compute(path(0, 60))
        b.cache.take_changes()
        arrived = await fetched(b, a.url, path(0, 100).plus(tail), tail=True)
        assert arrived.pages == 101 and b.cache.has_tail(tail)
        assert 10**9 not in b.cache.pages(Tier.L2) and len(b.cache.pages(Tier.L2)) == 100
        (change,) = b.cache.take_changes()
        assert change.pages.tolist() == list(range(60, 100))


async def test_pins_of_a_reader_that_died_end_with_their_time() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 300))
        pinned = await b.peers.pin(a.url, path(0, 300), 0.2)
        assert pinned is not None and a.cache.l2_pinned == 300
        await eventually(lambda: (a.service.expire(), a.cache.l2_pinned == 0)[1])
        assert a.service.loans.expired == 1
        await b.peers.release(pinned)  # too late, and without harm


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (b"junk", 400),
        (msgspec.msgpack.encode(PinCall(VERSION, 4096, b"short", 1.0)), 400),
        (msgspec.msgpack.encode(PinCall(VERSION + 1, 4096, b"", 1.0)), 409),
        (msgspec.msgpack.encode(PinCall(VERSION, 8192, b"", 1.0)), 409),
        (msgspec.msgpack.encode(PinCall(VERSION, 4096, b"", 1.0)), 400),
        (msgspec.msgpack.encode(PinCall(VERSION, 4096, path(1, 1).keys.tobytes() * 2, 1.0)), 400),
        (msgspec.msgpack.encode(PinCall(VERSION, 4096, path(1, 1).keys.tobytes(), 0.0)), 400),
        (msgspec.msgpack.encode(PinCall(VERSION, 4096, path(1, 1).keys.tobytes(), float("nan"))), 400),
    ],
)
async def test_a_bad_question_gets_a_clear_answer(call: bytes, status: int) -> None:
    async with kv_nodes(1) as (a,), a.http.post(a.url + PIN_PATH, data=call) as answer:
        assert answer.status == status, await answer.text()
        assert "message" in (await answer.json())["error"]


async def test_a_release_of_another_life_changes_nothing() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 10))
        pinned = await b.peers.pin(a.url, path(0, 10), 5.0)
        assert pinned is not None
        for loan, life in ((pinned.loan, "another"), (pinned.loan + 1, a.name), (-3, a.name)):
            body = msgspec.msgpack.encode(ReleaseCall(loan, life))
            async with b.http.post(a.url + RELEASE_PATH, data=body) as answer:
                assert (await answer.json()) == {"released": False}
        assert a.cache.l2_pinned == 10
        await b.peers.release(pinned)
        assert a.cache.l2_pinned == 0


async def test_only_pages_that_were_on_loan_are_looked_at_again() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 20))
        slots, lent = a.cache.lend(path(0, 20))
        a.cache.end_loan(lent)
        a.memory.arena.pages[slots[[3, 15]], 9] ^= 1
        pinned = await b.peers.pin(a.url, path(0, 10), 5.0)
        assert pinned is not None
        bad = path(3, 1).keys.tobytes() * 1000 + path(15, 1).keys.tobytes()
        for loan, life in ((pinned.loan, "another"), (pinned.loan, a.name), (pinned.loan, a.name)):
            body = msgspec.msgpack.encode(ReleaseCall(loan, life, bad))
            async with b.http.post(a.url + RELEASE_PATH, data=body) as answer:
                assert answer.status == 200
        assert a.cache.take_corrupt() == [3]
        assert 15 in a.cache.pages(Tier.L2), "nobody had that page"


async def _server(*handlers: tuple[str, Any]) -> web.AppRunner:
    app = web.Application()
    for place, handler in handlers:
        app.router.add_post(place, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def test_answers_that_lead_astray_or_never_end_are_failures() -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 10))

        async def astray(_: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": "http://a..b/"})

        async def endless(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse()
            await answer.prepare(request)
            while True:
                await answer.write(bytes(2**16))

        for handler in (astray, endless):
            runner = await _server((PIN_PATH, handler), (RELEASE_PATH, handler))
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            assert (await fetched(b, url, path(0, 10))).reason == "peer_failed"
            pinned = await b.peers.pin(a.url, path(0, 10), 5.0)
            assert pinned is not None
            await b.peers.release(msgspec.structs.replace(pinned, url=url))
            await b.peers.release(pinned)
            await runner.cleanup()
        assert b.peers.failures == 2


def test_a_peer_may_fail_for_ever() -> None:
    client = peers.PeerClient(None, 4096)  # type: ignore[arg-type]
    for _ in range(3000):
        client.failed("http://gone", ValueError("gone"))
    assert client.failures == 3000


async def test_what_anothers_peer_did_not_give_comes_from_the_own_one() -> None:
    async with kv_nodes(3) as (dead, a, b):
        a.compute(path(0, 300))

        dead.service.loans.lend = None  # type: ignore[assignment, method-assign]
        first = asyncio.create_task(fetched(b, dead.url, path(0, 300)))
        await eventually(lambda: b.fetcher.pages_in_flight == 300, every_s=0.0)
        assert (await fetched(b, a.url, path(0, 300))).pages == 300
        await first


async def test_what_is_there_already_stays_during_a_fetch() -> None:
    async with kv_nodes(l1_pages=100, l2_pages=260) as (a, b):
        a.compute(path(0, 100))
        a.compute(path(100, 100))
        b.compute(path(0, 100))
        read = b.transport.read

        async def pressed(
            peer: Endpoint, remote: Offsets, local: Offsets, length: int, timeout_s: float
        ) -> None:
            await read(peer, remote, local, length, timeout_s)
            # Others want all the room that there is, before and after the pages are told of.
            b.cache.give_back(b.cache.reserve(260))

        b.transport.read = pressed  # type: ignore[method-assign]
        result = await b.fetcher.fetch(a.url, path(0, 200))
        b.cache.give_back(b.cache.reserve(260))
        assert result.pages == 200 and b.cache.in_host(path(0, 200).pages).all()
        b.cache.let_go(result.held)


async def test_nothing_is_written_into_slots_that_were_given_back() -> None:
    """A fetch that ends early, while pieces of it are being read and checked."""
    async with kv_nodes(page_bytes=2**16, l1_pages=600, l2_pages=1300) as (a, b):
        a.compute(path(0, 550))
        for delay_s in (0.0, 0.003, 0.006, 0.01, 0.02):
            request = asyncio.create_task(b.fetcher.fetch(a.url, path(0, 550)))
            await eventually(lambda: b.cache.l2_pinned > 0, every_s=0.0)
            await asyncio.sleep(delay_s)
            request.cancel()
            await asyncio.wait([request])
            await b.quiet()
            assert b.cache.l2_pinned == 0
            slots = b.cache.reserve(1300)
            b.memory.arena.pages[slots] = 0xEE
            b.memory.checksums[slots] = 7
            await asyncio.sleep(0.05)
            assert (b.memory.arena.pages[slots] == 0xEE).all() and (b.memory.checksums[slots] == 7).all()
            b.cache.give_back(slots)


@pytest.mark.parametrize("late", ["before", "after"])
async def test_pages_that_come_after_their_time_are_not_taken(late: str) -> None:
    async with kv_nodes() as (a, b):
        a.compute(path(0, 50))
        pin, read, limits = b.peers.pin, b.transport.read, []

        async def short(url: str, wanted: Path, hold_s: float) -> peers.Pinned | None:
            pinned = await pin(url, wanted, hold_s)
            assert pinned is not None and hold_s < pinned.until - time.monotonic() + 1.0
            return msgspec.structs.replace(
                pinned, until=time.monotonic() + (0.05 if late == "after" else -1.0)
            )

        async def slow(
            peer: Endpoint, remote: Offsets, local: Offsets, length: int, timeout_s: float
        ) -> None:
            limits.append(timeout_s)
            await read(peer, remote, local, length, 5.0)
            await asyncio.sleep(0.1)

        b.peers.pin = short  # type: ignore[method-assign]
        b.transport.read = slow  # type: ignore[method-assign]
        assert (await fetched(b, a.url, path(0, 50))).reason == "peer_failed"
        assert max(limits) <= 0.05 and b.cache.l2_used == 0


@pytest.mark.parametrize(
    "change",
    [
        {"version": VERSION + 1},
        {"offsets": b""},
        {"checksums": b"12345678"},
        {"cut": True},
        {"offsets": b"", "checksums": b"", "cut": True},
        {"offsets": np.full(10, 2**50, "<i8").tobytes()},
    ],
)
async def test_an_answer_that_cannot_be_meant_is_a_failure(change: dict[str, object]) -> None:
    async with kv_nodes() as (a, b):
        real = PinAnswer(VERSION, "x", 1, a.transport.endpoint, np.zeros(10, "<i8").tobytes(), bytes(80), 5.0)

        async def pin(_: web.Request) -> web.Response:
            return web.Response(body=msgspec.msgpack.encode(msgspec.structs.replace(real, **change)))

        runner = await _server((PIN_PATH, pin))
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        assert (await fetched(b, url, path(0, 10))).reason == "peer_failed" and b.peers.failures == 1
        await runner.cleanup()
