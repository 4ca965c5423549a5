"""SGLang's own API of a worker, and its tokenize call for the bodies of every API."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.worker_nodes import node
from worker.engines.simulated.api import known_digest

RAW = {"Accept": "application/octet-stream"}


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any], **headers: str) -> Any:
    async with http.post(path, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_generate_whole_and_streamed(http: aiohttp.ClientSession) -> None:
    body = {
        "text": "hello",
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True, "temperature": 0},
    }
    whole = await post(http, "/generate", body | {"rid": "mine"})
    assert bytes(whole["output_ids"]).decode() == whole["text"] and len(whole["text"]) == 1500
    meta = whole["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 1500}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 1500, 0)
    by_ids = {"input_ids": list(b"hello"), "sampling_params": body["sampling_params"], "stream": True}
    async with http.post("/generate", json=by_ids) as answer:
        assert answer.content_type == "text/event-stream"
        events = (await answer.text()).strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len(parts) >= 2
    for before, after in zip(parts, parts[1:], strict=False):
        assert after["text"].startswith(before["text"]) and len(after["text"]) > len(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert before["meta_info"]["completion_tokens"] == len(before["output_ids"])
    assert (parts[-1]["text"], parts[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert parts[-1]["meta_info"]["finish_reason"] == meta["finish_reason"]


async def test_generate_stops_where_it_should(http: aiohttp.ClientSession) -> None:
    natural = await post(http, "/generate", {"text": "hello"})
    assert natural["meta_info"]["completion_tokens"] <= 128
    word = natural["text"].split()[3]
    stopped = await post(http, "/generate", {"text": "hello", "sampling_params": {"stop": word}})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert natural["text"].startswith(stopped["text"] + word)
    script = '<<script>>[{"say": "hi"}]<</script>>'
    assert (await post(http, "/generate", {"text": script}))["text"] == "hi"


async def test_a_native_call_can_be_aborted_by_its_own_id(redis_url: str, cluster_name: str) -> None:
    params = {"max_new_tokens": 6000, "ignore_eos": True}
    async with (
        node(redis_url, cluster_name, speedup=0.2) as slow,
        aiohttp.ClientSession(base_url=slow.url) as http,
    ):
        body = {"text": "x", "rid": "r7", "sampling_params": params, "stream": True}
        answer = await http.post("/generate", json=body)
        await answer.content.readline()
        assert (await post(http, "/abort_request", {"rid": "r7"}))["aborted"] == 1
        last = (await answer.text()).strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "aborted"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": 5}, None),
        ({"text": ["a", "b"]}, "text"),
        ({"text": [1, 2]}, "text"),
        ({"input_ids": "x"}, "text"),
        ({"input_ids": [1, "a"]}, "prompt"),
        ({"input_ids": [1, 200_000]}, "prompt"),
        ({"text": "x", "sampling_params": 5}, "sampling_params"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"text": "x", "sampling_params": {"max_new_tokens": "a"}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "sampling_params": {"stop": 5}}, "sampling_params.stop"),
        ({"text": "x", "rid": 5}, "rid"),
    ],
)
async def test_bad_input_gets_a_clear_error(
    http: aiohttp.ClientSession, body: dict[str, Any], param: str | None
) -> None:
    async with http.post("/generate", json=body) as answer:
        assert answer.status == 400, await answer.text()
        error = (await answer.json())["error"]
        assert error["message"] and (param is None or error["param"] == param)
    await post(http, "/generate", {"text": "x", "mystery": 1, "sampling_params": {"top_k": 1}})


# ------------------------------------------------------------------------------ tokenize

TOOL = {"name": "ls", "input_schema": {"type": "object"}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 70}], "tools": [TOOL]}),
    ("/v1/completions", {"prompt": 'mentions "messages" ' * 5}),
    ("/v1/completions", {"prompt": [1, 5000, 3]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 70}], "system": "s", "max_tokens": 3}),
    ("/v1/responses", {"input": "x" * 70, "instructions": "s"}),
    ("/generate", {"text": "x" * 70}),
]


def prompt_tokens(path: str, answer: dict[str, Any]) -> int:
    if path == "/generate":
        return int(answer["meta_info"]["prompt_tokens"])
    usage = answer["usage"]
    return int(usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"])


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_tokenize_gives_the_ids_that_the_call_uses(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    body = body | {"model": "m"}
    named = {"X-EI-Path": path}
    told = await post(http, "/v1/tokenize", body, **named)
    assert told["count"] == len(told["tokens"]) == prompt_tokens(path, await post(http, path, body))
    # What the engine keeps of the call is found by a prompt of these ids, and so is what it has said.
    ids = {"input_ids": told["tokens"], "sampling_params": {"max_new_tokens": 1}}
    assert (await post(http, "/generate", ids))["meta_info"]["cached_tokens"] == told["count"] // 16 * 16
    async with http.post("/v1/tokenize", json=body, headers=RAW | named) as answer:
        assert np.frombuffer(await answer.read(), dtype="<i4").tolist() == told["tokens"]
        assert answer.headers["X-EI-From"] == "0"
    if path == "/v1/messages":
        counted = await post(http, path + "/count_tokens", body)
        assert counted == {"input_tokens": told["count"]}
        assert (await post(http, "/v1/tokenize", body, **{"X-EI-Path": path + "/count_tokens"})) == told
    async with http.post("/v1/tokenize", json=body | {"tools": 5}, headers=named) as answer:
        assert answer.status == (
            200 if "complet" in path and "prompt" in body or path == "/generate" else 400
        )


async def test_tokenize_leaves_out_what_the_caller_has(http: aiohttp.ClientSession) -> None:
    body = {"model": "m", "prompt": "some words of a prompt"}
    ids = np.frombuffer(body["prompt"].encode(), dtype=np.uint8).astype(np.int32)

    async def ask(known: str, digest: str) -> tuple[int, list[int]]:
        headers = RAW | {"X-EI-Known-Tokens": known, "X-EI-Known-Digest": digest}
        async with http.post("/v1/tokenize", json=body, headers=headers) as answer:
            assert answer.status == 200
            return int(answer.headers["X-EI-From"]), np.frombuffer(await answer.read(), dtype="<i4").tolist()

    for known in (0, 1, 10, ids.size):
        assert await ask(str(known), known_digest(ids[:known])) == (known, ids[known:].tolist())
    every = (0, ids.tolist())
    assert await ask("10", known_digest(ids[:9])) == every
    assert await ask(str(ids.size + 1), known_digest(ids)) == every
    assert await ask("-3", known_digest(ids[:3])) == await ask("x", "") == await ask("10", "") == every


async def test_tokenize_refuses_a_path_that_is_no_api(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/tokenize", json={"model": "m"}, headers={"X-EI-Path": "/v1/models"}) as answer:
        assert answer.status == 400 and "no API" in (await answer.json())["error"]["message"]
