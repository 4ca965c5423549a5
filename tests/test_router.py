"""The router against workers that fail on demand: the way of a request, retries, errors, clean books."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import msgspec
import numpy as np
import pytest

from services.router.service import RouterService
from services.router.settings import RouterSettings
from shared import messages as m
from shared.bus import Bus
from shared.messages import Outcome, Phase
from shared.pages import page_hashes
from tests.conftest import eventually, running
from tests.fake_worker import workers

P, D = Phase.PREFILL, Phase.DECODE


@contextlib.asynccontextmanager
async def cluster(redis_url, name, *specs, **settings):
    bus = await Bus.connect(redis_url, name)
    async with workers(bus, *specs) as fakes:
        service = RouterService(
            RouterSettings(redis=redis_url, cluster=name, place_timeout_s=2.0, **settings)
        )
        async with running(service), aiohttp.ClientSession(base_url=service.url) as http:
            await eventually(lambda: len(service.cluster.nodes) == len(specs))
            yield service, fakes, http, bus
    await bus.close()


def body(**fields):
    return {"model": "m", "prompt": list(range(1000, 1100)), "max_tokens": 5, **fields}


async def done_records(bus, n):
    reader = bus.reader({"requests": "0"})
    found = []
    async with asyncio.timeout(10):
        while len(found) < n:
            found += [event.message for event in await reader.read(0.2)]
    return found


def empty_books(service):
    return all(not node.load for node in service.cluster.nodes.values())


async def test_a_request_goes_to_prefill_then_to_decode_and_back_as_it_came(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("p", P), ("d", D)) as (service, (p, d), http, bus):
        sent = json.dumps(body(stream=True, mystery={"x": [1, 2.5]})).encode()
        headers = {"X-EI-Branch": "b1", "X-EI-KV-Source": "http://evil", "X-Mine": "7"}
        async with http.post("/v1/completions", data=sent, headers=headers) as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream"
            assert answer.headers["X-EI-Prefill-Node"] == "p" and answer.headers["X-EI-Decode-Node"] == "d"
            text = await answer.read()
        assert text.count(b"data: ") == 7 and text.endswith(b"data: [DONE]\n\n")
        call = p.prefills[0]
        assert np.frombuffer(call.tokens, "<i4").tolist() == list(range(1000, 1100)) and call.branch == "b1"
        got_headers, got_body = d.decodes[0]
        assert got_body == sent
        assert got_headers["X-EI-KV-Source"] == p.info.url and got_headers["X-EI-Cached-Tokens"] == "32"
        assert got_headers["X-EI-Request-Id"] == call.rid and got_headers["X-Mine"] == "7"
        (record,) = await done_records(bus, 1)
        assert record.outcome is Outcome.OK and (record.prefill_node, record.decode_node) == ("p", "d")
        assert (record.prompt_tokens, record.cached_tokens) == (100, 32)
        assert (record.output_tokens, record.decode_iterations) == (5, 4)
        assert (
            record.t_arrive
            <= record.t_prefill_start
            <= record.t_prefill_end
            <= record.t_first_token
            <= record.t_end
        )
        path = page_hashes(np.arange(1000, 1100, dtype=np.int32), 16)
        await service.branch_out.flush()
        events = [event.message for event in await bus.last("branch", 10)]
        assert [type(e).__name__ for e in events] == ["BranchRequest", "BranchPlaced", "BranchPlaced"]
        assert events[0].pages == m.pack_pages(path)
        assert [(e.node, e.phase) for e in events[1:]] == [("p", P), ("d", D)]
        assert empty_books(service)


async def test_moved_failed_and_broken_prefills_go_to_another_node(redis_url, cluster_name):
    specs = [("p1", P), ("p2", P), ("d", D)]
    async with cluster(redis_url, cluster_name, *specs) as (service, (p1, p2, _), http, _bus):
        for how in ("moved", "failed", "close"):
            p1.prefill_script, p2.prefill_script = [how], []
            service.cluster.nodes["p2"].prefill.send(service_prefill())
            before = len(p2.prefills)
            async with http.post("/v1/completions", json=body()) as answer:
                assert answer.status == 200, await answer.text()
            service.cluster.nodes["p2"].prefill.finished("busy")
            assert len(p2.prefills) == before + 1
            service.cluster.answered("p1")
        assert empty_books(service)


def service_prefill():
    from services.router.placement import Prefill

    return Prefill("busy", 8000, 0)


async def test_a_decode_node_that_moves_is_replaced(redis_url, cluster_name):
    specs = [("p", P), ("d1", D), ("d2", D)]
    async with cluster(redis_url, cluster_name, *specs) as (service, (_, d1, d2), http, _bus):
        d1.decode_script = ["moved"]
        async with http.post("/v1/completions", json=body()) as answer:
            assert answer.status == 200 and answer.headers["X-EI-Decode-Node"] == "d2"
        assert len(d1.decodes) == 1 and len(d2.decodes) == 1
        assert empty_books(service)


async def test_a_node_that_dies_while_streaming_ends_the_stream_with_an_error_event(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("p", P), ("d", D)) as (service, (_, d), http, bus):
        d.decode_script = ["die"]
        async with http.post("/v1/completions", json=body(stream=True)) as answer:
            text = await answer.read()
        last = [line for line in text.split(b"\n\n") if line][-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "node_failed"
        (record,) = await done_records(bus, 1)
        assert record.outcome is Outcome.FAILED and "node d failed" in record.error
        assert empty_books(service)


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_client_that_hangs_up_frees_both_nodes(redis_url, cluster_name, where):
    async with cluster(redis_url, cluster_name, ("p", P), ("d", D)) as (service, (p, d), http, bus):
        (p if where == "prefill" else d).__dict__[f"{where}_script"].append("hang")
        task = asyncio.create_task(http.post("/v1/completions", json=body(stream=True)))
        await eventually(lambda: service.cluster.nodes["d"].decode.sent if where == "prefill" else d.decodes)
        if where == "prefill":
            task.cancel()
        else:
            answer = await task
            answer.close()
        await eventually(lambda: (p if where == "prefill" else d).cancelled == 1)
        await eventually(lambda: empty_books(service) and service.gate.admission.in_flight == 0)
        (record,) = await done_records(bus, 1)
        assert record.outcome is Outcome.CLIENT_GONE


@pytest.mark.parametrize(
    ("path", "sent", "status", "code"),
    [
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", b"", 400, None),
        ("/v1/completions", b"[]", 400, None),
        ("/v1/completions", b'{"prompt": "x"}', 400, "missing_model"),
        ("/v1/completions", b'{"model": "nope", "prompt": "x"}', 404, "model_not_found"),
        ("/v1/completions", b'{"model": "m"}', 400, None),
        ("/v1/completions", b'{"model": "m", "prompt": "x", "max_tokens": -3}', 400, "invalid_value"),
        ("/v1/completions", b'{"model": "m", "prompt": "x", "n": 0}', 400, "invalid_value"),
        ("/v1/completions", b'{"model": "m", "prompt": [1, "a"]}', 400, None),
        ("/v1/completions", b'{"model": "m", "prompt": [1, -1]}', 400, None),
        (
            "/v1/completions",
            b'{"model": "m", "prompt": "x", "max_tokens": 8192}',
            400,
            "context_length_exceeded",
        ),
        ("/v1/chat/completions", b'{"model": "m", "messages": []}', 400, None),
        (
            "/v1/chat/completions",
            b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            400,
            None,
        ),
        ("/nothing", b"{}", 404, "unknown_url"),
        ("/v1/models", b"{}", 405, "method_not_allowed"),
    ],
)
async def test_bad_requests_get_openai_errors(redis_url, cluster_name, path, sent, status, code):
    async with cluster(redis_url, cluster_name, ("n", Phase.BOTH)) as (service, (n,), http, _bus):
        async with http.post(path, data=sent) as answer:
            assert answer.status == status, await answer.text()
            error = (await answer.json())["error"]
        assert error["message"] and error["type"] and error["code"] == code
        assert not n.prefills and not n.decodes
        async with http.post("/v1/completions", json=body()) as answer:
            assert answer.status == 200
        assert empty_books(service)


async def test_a_body_that_is_not_in_its_encoding_is_a_400(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", Phase.BOTH)) as (_, _fakes, http, _bus):
        headers = {"Content-Encoding": "gzip"}
        async with http.post("/v1/completions", data=b"no gzip at all" * 9, headers=headers) as answer:
            assert answer.status == 400 and (await answer.json())["error"]["code"] == "unreadable_body"


async def test_a_prompt_longer_than_the_context_is_refused(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", Phase.BOTH)) as (_, _fakes, http, _bus):
        async with http.post("/v1/completions", json=body(prompt=[1] * 8192)) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert error["code"] == "context_length_exceeded" and "8192" in error["message"]


async def test_an_engines_own_error_is_passed_on(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", Phase.BOTH)) as (_, (n,), http, bus):
        n.decode_script = ["error"]
        async with http.post("/v1/completions", json=body()) as answer:
            assert answer.status == 400 and (await answer.json())["error"]["message"] == "bad tool"
        (record,) = await done_records(bus, 1)
        assert record.outcome is Outcome.REJECTED


async def test_no_node_of_a_phase_is_a_503_after_the_wait_and_one_that_comes_serves(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("d", D)) as (service, (d,), http, bus):
        async with http.post("/v1/completions", json=body()) as answer:
            assert answer.status == 503 and answer.headers["Retry-After"]
            assert (await answer.json())["error"]["code"] == "no_prefill_node"
        task = asyncio.create_task(http.post("/v1/completions", json=body()))
        async with workers(bus, ("p", P)):
            assert (await task).status == 200
        assert empty_books(service)


async def test_no_worker_at_all_is_not_ready_and_503(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name) as (_, _fakes, http, _bus):
        async with http.get("/readyz") as answer:
            assert answer.status == 503 and "no worker" in await answer.text()
        async with http.post("/v1/completions", json=body()) as answer:
            assert answer.status == 503 and (await answer.json())["error"]["code"] == "no_worker"


async def test_too_many_requests_in_flight_get_429(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", Phase.BOTH), max_requests=1, max_waiting=0) as (
        _,
        (n,),
        http,
        _bus,
    ):
        n.prefill_script = ["hang"]
        task = asyncio.create_task(http.post("/v1/completions", json=body()))
        await eventually(lambda: n.prefills)
        async with http.post("/v1/completions", json=body()) as answer:
            assert answer.status == 429 and (await answer.json())["error"]["code"] == "overloaded"
        n.resume.set()
        assert (await task).status == 200


async def test_branches_are_listed_ended_and_final(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", Phase.BOTH)) as (_, _fakes, http, bus):
        for headers in (
            {"X-EI-Branch": "s/main"},
            {"X-EI-Branch": "s/sub", "X-EI-Parent-Branch": "s/main"},
            {"X-EI-Branch": "gone", "X-EI-Branch-Final": "true"},
        ):
            async with http.post("/v1/completions", json=body(), headers=headers) as answer:
                assert answer.status == 200
        async with http.get("/v1/branches") as answer:
            listed = (await answer.json())["branches"]
        assert {view["branch"]: view["parent"] for view in listed} == {"s/main": None, "s/sub": "s/main"}
        async with http.delete("/v1/branches/s/sub") as answer:
            assert (await answer.json()) == {"branch": "s/sub", "ended": True, "known": True}
        async with http.get("/v1/branches/s/sub") as answer:
            assert answer.status == 404
        async with http.get("/v1/branches/s/main") as answer:
            assert (await answer.json())["prefill_node"] == "n"
        async with http.post("/v1/completions", json=body(), headers={"X-EI-Branch": "x" * 300}) as answer:
            assert answer.status == 400 and (await answer.json())["error"]["code"] == "bad_branch"

        async def ended():
            events = [event.message for event in await bus.last("branch", 50)]
            return [e.branch for e in events if isinstance(e, m.BranchEnded)]

        await eventually(lambda: _equal(ended(), ["gone", "s/sub"]))


async def _equal(awaitable, value):
    return await awaitable == value


async def test_a_plan_moves_new_requests_at_once(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("a", Phase.BOTH), ("b", Phase.BOTH)) as (
        service,
        (a, b),
        http,
        bus,
    ):
        out = bus.publisher("roles", "planner")
        sender = asyncio.create_task(out.run())
        for epoch, phases in ((1, {"a": P, "b": D}), (2, {"a": D, "b": P})):
            out.publish(m.RolePlan(epoch, phases, "test"))
            await eventually(lambda epoch=epoch: service.cluster.plan and service.cluster.plan.epoch == epoch)
            async with http.post("/v1/completions", json=body()) as answer:
                prefill = next(n for n, phase in phases.items() if phase is P)
                assert answer.headers["X-EI-Prefill-Node"] == prefill
                assert answer.headers["X-EI-Decode-Node"] != prefill
        sender.cancel()
        assert len(a.prefills) == len(b.prefills) == 1


async def test_switches_are_counted_and_the_end_of_the_warm_up_is_none(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("a", Phase.BOTH)) as (service, (a,), http, _bus):
        for t, phase in enumerate((P, P, D, P, Phase.BOTH, D)):
            a.state(service.clock.now(), phase=phase, epoch=t)

        async def seen():
            async with http.get("/ei/v1/cluster") as answer:
                shown = await answer.json()
            return shown["nodes"][0]["phase"] == "decode" and shown["switches"] == 2

        await eventually(seen)


async def test_the_reported_queue_steers_and_pages_of_a_peer_are_fetched(redis_url, cluster_name):
    specs = [("p1", P), ("p2", P), ("d", D)]
    async with cluster(redis_url, cluster_name, *specs) as (service, (p1, p2, _), http, bus):
        tokens = np.arange(1000, 1100, dtype=np.int32)
        kv = bus.publisher("kv:p1", p1.info.incarnation)
        sender = asyncio.create_task(kv.run())
        kv.publish(m.PagesStored(m.Tier.L2, m.pack_pages(page_hashes(tokens, 16))))
        now = service.clock.now()
        p1.state(now, busy_until=now + 1000.0)
        p2.state(now)
        await eventually(lambda: len(service.cluster.index) == 6)
        await eventually(lambda: service.cluster.nodes["p1"].state and service.cluster.nodes["p2"].state)
        async with http.post("/v1/completions", json=body()) as answer:
            assert answer.headers["X-EI-Prefill-Node"] == "p2"
        assert p2.prefills[0].fetch == m.FetchPlan(p1.info.url, 0, 6)
        sender.cancel()


async def test_text_prompts_are_tokenized_by_a_worker(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", Phase.BOTH)) as (_, (n,), http, _bus):
        async with http.post("/v1/completions", json=body(prompt="hello")) as answer:
            assert answer.status == 200
        assert np.frombuffer(n.prefills[0].tokens, "<i4").tolist() == list(b"hello")
        async with http.get("/v1/models") as answer:
            (entry,) = (await answer.json())["data"]
        assert entry["id"] == "m" and entry["page_size"] == 16 and entry["max_model_len"] == 8192
        async with http.get("/ei/v1/cluster") as answer:
            shown = msgspec.json.decode(await answer.read())
        assert shown["split"] == {"prefill": 1, "decode": 1} and shown["nodes"][0]["node"] == "n"
