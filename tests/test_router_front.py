"""The client's side of the router over real HTTP: every API, keys, frozen nodes, deadlines, comments, several routers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time

import aiohttp
import numpy as np
import pytest

from services.router.service import RouterService
from services.router.settings import RouterSettings
from shared.bus import Bus
from shared.messages import BranchEnded, Outcome, Phase
from tests.conftest import eventually, running
from tests.fake_worker import workers
from tests.test_router import body, cluster, done_records, empty_books

P, D, BOTH = Phase.PREFILL, Phase.DECODE, Phase.BOTH
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello " * 40}], "max_tokens": 5}
ASKS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": body(),
    "/v1/responses": {"model": "m", "input": "hello " * 40, "max_output_tokens": 5},
    "/v1/messages": CHAT,
    "/generate": {"text": "hello " * 40, "sampling_params": {"max_new_tokens": 5}},
}


@pytest.mark.parametrize("path", ASKS)
async def test_every_api_takes_both_phases_and_reaches_the_engine_unchanged(redis_url, cluster_name, path):
    async with cluster(redis_url, cluster_name, ("p", P), ("d", D)) as (service, (p, d), http, bus):
        sent = json.dumps(ASKS[path] | {"unheard-of": [1, {"a": None}]}).encode()
        async with http.post(path + "?beta=true", data=sent, headers={"X-Request-Id": "mine-7"}) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["X-Request-Id"] == "mine-7"
        (call,) = p.prefills
        ((headers, got),) = d.decodes
        assert got == sent and headers["X-EI-Request-Id"] == call.rid
        await eventually(lambda: p.released == [call.rid])  # the decode node has what it needs of it
        (record,) = await done_records(bus, 1)
        assert record.outcome is Outcome.OK and record.output_tokens == 5
        assert record.predicted_ttft_s > 0 and record.kind == "turn"
        assert empty_books(service)


async def test_other_paths_of_the_api_go_to_a_decode_node_unchanged(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("p", P), ("d", D)) as (_, (p, d), http, _bus):
        for method, path, sent in (
            ("POST", "/v1/embeddings?x=1", b'{"model": "m", "input": "a"}'),
            ("POST", "/v1/messages/count_tokens", b'{"model": "m"}'),
            ("GET", "/v1/files/abc", b""),
        ):
            async with http.request(method, path, data=sent) as answer:
                assert answer.status == 202 and (await answer.json())["node"] == "d"
            assert d.others[-1] == (method, path, sent)
        async with http.get("/no/such/path") as answer:
            assert answer.status == 404 and (await answer.json())["error"]["code"] == "unknown_url"
        assert not p.others


@pytest.mark.parametrize("path", ASKS)
async def test_errors_have_the_shape_of_the_api(redis_url, cluster_name, path):
    async with cluster(redis_url, cluster_name, ("n", BOTH)) as (_, _fakes, http, _bus):
        async with http.post(path, data=b'{"model": 5}') as answer:
            assert answer.status == 400
            told = await answer.json()
        if path == "/v1/messages":
            assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
        else:
            assert told["error"]["param"] == "model"
        async with http.get(path) as answer:
            assert answer.status == 405 and answer.headers["Allow"] == "POST"


async def test_compressed_bodies_reach_the_engine_plain(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH)) as (_, (n,), http, _bus):
        sent = json.dumps(body()).encode()
        for encoding, data, status in (
            ("gzip", gzip.compress(sent), 200),
            ("zstd", sent, 415),
            ("gzip", gzip.compress(sent)[:-9], 400),
        ):
            headers = {"Content-Encoding": encoding}
            async with http.post("/v1/completions", data=data, headers=headers) as answer:
                assert answer.status == status, await answer.text()
        ((headers, got),) = n.decodes
        assert got == sent and "Content-Encoding" not in headers


async def test_a_large_body_is_refused(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH), max_body_bytes=1000) as (_, (n,), http, _bus):
        async with http.post("/v1/completions", data=json.dumps(body(x="y" * 2000))) as answer:
            assert answer.status == 413
        async with http.post(
            "/v1/completions", data=gzip.compress(json.dumps(body(x="y" * 2000)).encode()),
            headers={"Content-Encoding": "gzip"},
        ) as answer:  # fmt: skip
            assert answer.status == 413 and (await answer.json())["error"]["code"] == "body_too_large"
        assert not n.decodes


# ---------------------------------------------------------------------- why, and when


async def test_a_decision_explains_itself(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("p", P), ("q", P), ("d", D)) as (_, _fakes, http, _bus):
        headers = {"X-EI-Explain": "True", "X-EI-Branch": "b"}
        async with http.post("/v1/completions", json=body(), headers=headers) as answer:
            told = json.loads(answer.headers["X-EI-Explain"])
        assert told["branch"] == "b" and told["decode"] == "d" and told["source"] == "ei"
        assert {one["node"] for one in told["prefill"]} == {"p", "q"} and told["nodes"] == 2
        best = told["prefill"][0]
        assert best["node"] == answer.headers["X-EI-Prefill-Node"]
        parts = best["wait_s"] + best["service_s"] + best["exposed_fetch_s"] + best["copy_s"]
        assert best["predicted_s"] == pytest.approx(parts, abs=1e-3)
        async with http.post("/v1/completions", json=body()) as answer:
            assert "X-EI-Explain" not in answer.headers


async def test_a_streaming_client_that_waits_gets_comments(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH), keepalive_s=0.05) as (_, (n,), http, _bus):
        n.prefill_script = ["hang"]
        async with http.post("/v1/completions", json=body(stream=True)) as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream"
            for _ in range(3):
                assert await answer.content.readuntil(b"\n\n") == b": waiting\n\n"
            n.resume.set()
            text = await answer.read()
        events = [part for part in text.split(b"\n\n") if part and not part.startswith(b":")]
        assert len(events) == 7 and events[-1] == b"data: [DONE]"


async def test_an_error_after_comments_is_an_event(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH), keepalive_s=0.05) as (service, (n,), http, bus):
        n.prefill_script, n.decode_script = ["hang"], ["error"]
        async with http.post("/v1/completions", json=body(stream=True)) as answer:
            await answer.content.readuntil(b"\n\n")
            n.resume.set()
            text = await answer.read()
        last = [part for part in text.split(b"\n\n") if part and not part.startswith(b":")][-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "bad tool"
        (record,) = await done_records(bus, 1)
        assert record.outcome is Outcome.REJECTED and empty_books(service)


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_deadline_ends_a_request_with_504(redis_url, cluster_name, where):
    async with cluster(redis_url, cluster_name, ("p", P), ("d", D)) as (service, (p, d), http, bus):
        (p if where == "prefill" else d).__dict__[f"{where}_script"].append("hang")
        stream = where == "decode"
        headers = {"X-EI-Timeout": "0.3"}
        async with http.post("/v1/completions", json=body(stream=stream), headers=headers) as answer:
            text = await answer.text()
        if stream:  # it hangs after two chunks
            assert answer.status == 200 and "deadline_exceeded" in text.split("\n\n")[-2]
        else:
            assert answer.status == 504 and json.loads(text)["error"]["code"] == "deadline_exceeded"
            assert answer.headers["x-should-retry"] == "false"
        await eventually(lambda: (p if where == "prefill" else d).cancelled == 1)
        (record,) = await done_records(bus, 1)
        assert record.outcome is Outcome.FAILED and empty_books(service)
        async with http.post("/v1/completions", json=body(), headers={"X-EI-Timeout": "soon"}) as answer:
            assert answer.status == 400


# ---------------------------------------------------------------------- nodes that do not answer


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_frozen_node_loses_its_requests_to_another_one(redis_url, cluster_name, where):
    specs = [("p1", P), ("p2", P), ("d1", D), ("d2", D)]
    async with cluster(redis_url, cluster_name, *specs, probe_s=0.1) as (service, nodes, http, _bus):
        first, other = ("p1", "p2") if where == "prefill" else ("d1", "d2")
        frozen = next(n for n in nodes if n.node == first)
        frozen.__dict__[f"{where}_script"].append("silent")
        task = asyncio.create_task(http.post("/v1/completions", json=body()))
        await eventually(lambda: frozen.prefills if where == "prefill" else frozen.decodes)
        frozen.frozen = True
        begun = time.monotonic()
        answer = await task
        assert answer.status == 200 and time.monotonic() - begun < 10
        assert answer.headers[f"X-EI-{where.title()}-Node"] == other
        await eventually(lambda: frozen.cancelled == 1)
        assert first not in {node.info.node for node in service.cluster.live()}
        frozen.frozen = False
        await eventually(lambda: first in {node.info.node for node in service.cluster.live()}, 30)


async def test_a_stream_of_a_frozen_node_ends_with_an_error_event(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("p", P), ("d", D), probe_s=0.1) as (_, (_p, d), http, bus):
        d.decode_script = ["hang"]
        async with http.post("/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            await answer.content.readuntil(b"\n\n")
            d.frozen = True
            text = await answer.read()
        told = json.loads(text.split(b"\n\n")[-2].removeprefix(b"data: "))
        assert told["error"]["code"] == "node_failed"
        (record,) = await done_records(bus, 1)
        assert record.outcome is Outcome.FAILED


# ---------------------------------------------------------------------- branches


async def test_claude_codes_hooks_end_its_branches(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH)) as (service, _fakes, http, bus):
        session = {"x-claude-code-session-id": "S"}
        for headers in (session, session | {"x-claude-code-agent-id": "A"}):
            async with http.post("/v1/messages", json=CHAT, headers=headers) as answer:
                assert answer.status == 200
        async with http.get("/v1/branches") as answer:
            listed = {view["branch"]: view["parent"] for view in (await answer.json())["branches"]}
        assert listed == {"claude:S": None, "claude:S/A": "claude:S"}
        hook = {"hook_event_name": "SubagentStop", "session_id": "S", "agent_id": "A"}
        async with http.post("/v1/hooks/claude-code", json=hook) as answer:
            assert answer.status == 200 and (await answer.json())["ended"] == ["claude:S/A"]
        async with http.post(
            "/v1/hooks/claude-code", json=hook | {"hook_event_name": "SessionEnd"}
        ) as answer:
            assert "claude:S" in (await answer.json())["ended"]
        async with http.post("/v1/hooks/claude-code", data=b"{}") as answer:
            assert answer.status == 400
        await service.branch_out.flush()
        ended = [e.message.branch for e in await bus.last("branch", 20) if isinstance(e.message, BranchEnded)]
        assert set(ended) == {"claude:S", "claude:S/A"}


async def test_an_untagged_client_may_change_the_router(redis_url, cluster_name):
    async with contextlib.AsyncExitStack() as stack:
        bus = await Bus.connect(redis_url, cluster_name)
        stack.push_async_callback(bus.close)
        (n,) = await stack.enter_async_context(workers(bus, ("n", BOTH)))
        routers = [RouterService(RouterSettings(redis=redis_url, cluster=cluster_name)) for _ in range(2)]
        for router in routers:
            await stack.enter_async_context(running(router))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await eventually(lambda: all(router.cluster.nodes for router in routers))
        prompt = list(range(1000, 1100))
        for step in range(4):
            router, other = routers[step % 2], routers[(step + 1) % 2]
            async with http.post(router.url + "/v1/completions", json=body(prompt=prompt)) as answer:
                assert answer.status == 200
                branch = answer.headers["X-EI-Branch"]
            assert len({call.branch for call in n.prefills}) == 1
            # What the next step goes on from has reached the other router.
            size = len(prompt) // 16
            await eventually(lambda r=other, b=branch, size=size: _knows(r, b, size))
            prompt += range(2000 + 100 * step, 2040 + 100 * step)
        assert sum(len(router.branches.list()) for router in routers) == 2


def _knows(router, branch, pages):
    known = router.identities.of("")._known.get(branch)
    return known is not None and known.path.size == pages


async def test_other_routers_work_counts(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("p1", P), ("p2", P), ("d", D)) as (one, fakes, http, bus):
        two = RouterService(RouterSettings(redis=redis_url, cluster=cluster_name))
        async with running(two):
            await eventually(lambda: len(two.cluster.nodes) == 3)
            fakes[0].prefill_script = ["silent"]
            task = asyncio.create_task(http.post("/v1/completions", json=body()))
            await eventually(lambda: fakes[0].prefills)
            await eventually(lambda: two.cluster.nodes["p1"].foreign)
            async with http.post(two.url + "/v1/completions", json=body(prompt=[7] * 100)) as answer:
                assert answer.headers["X-EI-Prefill-Node"] == "p2"
            fakes[0].resume.set()
            await task


# ---------------------------------------------------------------------- tokens


async def test_the_next_step_sends_for_what_it_appended(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH)) as (service, (n,), http, _bus):
        text = "a" * 500
        for step in range(3):
            async with http.post("/v1/completions", json=body(prompt=text)) as answer:
                assert answer.status == 200
            assert np.frombuffer(n.prefills[-1].tokens, "<i4").tolist() == list(text.encode())
            assert service.prompts.cache.tokens == len(text)
            if step:
                assert n.sent_tokens[-1] == 100
            text += "b" * 100


async def test_a_router_with_another_clock_is_not_ready(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH)) as (service, (n,), http, _bus):
        n.state(service.clock.now() * 20)
        await eventually(lambda: service.cluster.nodes["n"].state)
        async with http.get("/readyz") as answer:
            assert answer.status == 503 and "speed-up" in await answer.text()


# ---------------------------------------------------------------------- workers that answer nonsense


async def test_a_prefill_answer_that_cannot_be_read_is_another_nodes_turn(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("p1", P), ("p2", P), ("d", D)) as (
        service,
        (p1, p2, _),
        http,
        _bus,
    ):
        p1.prefill_script = ["garbage"]
        async with http.post("/v1/completions", json=body()) as answer:
            assert answer.status == 200 and answer.headers["X-EI-Prefill-Node"] == "p2"
        assert len(p1.prefills) == 1 and empty_books(service)


@pytest.mark.parametrize(
    "says", [(503, b"{}"), (500, b"?"), (200, b"12345"), (200, b"\xff\xff\xff\xff"), (302, b"")]
)
async def test_a_tokenizer_that_cannot_is_another_nodes_turn(redis_url, cluster_name, says):
    async with cluster(redis_url, cluster_name, ("a", BOTH), ("b", BOTH)) as (service, fakes, http, _bus):
        fakes[0].tokenizer_says = says
        for _ in range(3):
            async with http.post("/v1/chat/completions", json=CHAT) as answer:
                assert answer.status == 200, await answer.text()
        fakes[1].tokenizer_says = says
        async with http.post("/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 503 and (await answer.json())["error"]["code"] == "no_worker"
        assert empty_books(service)


async def test_other_paths_leave_a_node_that_cannot(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("a", BOTH), ("b", BOTH)) as (_, (a, b), http, _bus):
        a.other_status = 503
        async with http.get("/v1/files") as answer:
            assert answer.status == 202 and (await answer.json())["node"] == "b"
        b.other_status = 503
        async with http.get("/v1/files") as answer:
            assert answer.status == 503 and (await answer.json())["node"] == "b"  # its own words


# ---------------------------------------------------------------------- what clients try


async def test_a_clients_headers_do_not_speak_for_the_router(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH)) as (_, (n,), http, _bus):
        ours = ("X-EI-KV-Source", "X-EI-Salt", "X_EI_Salt", "X-EI-Tenant", "X-EI-Inner", "Cookie", "Api-Key")
        async with http.post(
            "/v1/completions", json=body(), headers={name: "evil" for name in ours}
        ) as answer:
            assert answer.status == 200
        ((headers, _),) = n.decodes
        assert "evil" not in headers.values()


async def test_odd_paths_and_methods(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH)) as (service, (n,), _, _bus):
        host, port = service.url.removeprefix("http://").split(":")
        for line, status in (
            (b"GET /v1/../ei/v1/release HTTP/1.1", 404),
            (b"GET /v1/%2e%2e/abort_request HTTP/1.1", 404),
            (b"M-SEARCH /v1/models HTTP/1.1", 405),
            (b"GET http://anywhere/v1/models HTTP/1.1", 200),
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert int((await reader.readline()).split()[1]) == status, line
            writer.close()
        assert not n.others


async def test_who_waits_in_line_has_a_deadline_and_gets_comments(redis_url, cluster_name):
    async with cluster(redis_url, cluster_name, ("n", BOTH), max_requests=1, keepalive_s=0.05) as (
        service,
        (n,),
        http,
        _,
    ):
        n.prefill_script = ["hang"]
        first = asyncio.create_task(http.post("/v1/completions", json=body()))
        await eventually(lambda: n.prefills)
        async with http.post("/v1/completions", json=body(), headers={"X-EI-Timeout": "0.2"}) as answer:
            assert answer.status == 504
        async with http.post("/v1/completions", json=body(stream=True)) as answer:
            assert await answer.content.readuntil(b"\n\n") == b": waiting\n\n"
            n.resume.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert (await first).status == 200
        await eventually(lambda: not service.gate.admission.in_flight and not service.gate.admission.waiting)
