"""The API of one worker as a client sees it, over HTTP, with the official client where it matters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from shared.messages import Phase
from shared.openai import parse_call
from tests.conftest import eventually
from tests.worker_nodes import check_empty, node
from worker.agent.service import WorkerService
from worker.engines.simulated.wire import prompt_of

MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Say something."}]


def render(messages: list[dict[str, str]]) -> list[int]:
    """The ids of a chat."""
    body = json.dumps({"model": "m", "messages": messages}).encode()
    tokens: list[int] = prompt_of(parse_call(body, "chat"), "chat").tokens.tolist()
    return tokens


@pytest.fixture
async def client(worker: WorkerService) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_streamed_chat_says_what_the_whole_one_says(client: Any) -> None:
    args = {
        "model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 1500,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = await client.chat.completions.create(**args)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    stream = await client.chat.completions.create(**args, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert choices[0].delta.role == "assistant" and len(choices) >= 2
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + [
        whole.choices[0].finish_reason
    ]
    assert not chunks[-1].choices and all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    prompt = len(render(MESSAGES))
    assert whole.usage.prompt_tokens == usage.prompt_tokens == prompt
    assert whole.usage.completion_tokens == usage.completion_tokens
    assert usage.total_tokens == prompt + usage.completion_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert usage.prompt_tokens_details.cached_tokens == prompt // 16 * 16


async def test_the_next_step_of_an_agent_finds_prompt_and_answer_cached(client: Any) -> None:
    first = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=60)
    said = first.choices[0].message.content
    longer = [*MESSAGES, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    second = await client.chat.completions.create(model="m", messages=longer, max_tokens=5)
    have = first.usage.prompt_tokens + first.usage.completion_tokens - 1  # the newest token has no KV
    assert second.usage.prompt_tokens_details.cached_tokens == have // 16 * 16


async def test_completions_of_text_and_ids(client: Any) -> None:
    text = await client.completions.create(model="m", prompt="hello", max_tokens=8)
    ids = await client.completions.create(model="m", prompt=list(b"hello"), max_tokens=8)
    nested = await client.completions.create(model="m", prompt=[list(b"hello")], max_tokens=8)
    assert text.choices[0].text == ids.choices[0].text == nested.choices[0].text
    assert len(text.choices[0].text) == 8 and text.choices[0].finish_reason == "length"
    assert text.object == "text_completion"
    other = await client.completions.create(model="m", prompt=[5000, 6000], max_tokens=8)
    assert other.choices[0].text != text.choices[0].text and other.usage.prompt_tokens == 2


async def test_length_is_natural_or_exact(client: Any) -> None:
    natural = await client.completions.create(model="m", prompt="hello")
    assert 32 <= natural.usage.completion_tokens <= 256 and natural.choices[0].finish_reason == "stop"
    exact = await client.completions.create(
        model="m", prompt="hello", max_tokens=300, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    assert exact.usage.completion_tokens == 300 and exact.choices[0].finish_reason == "length"
    assert exact.choices[0].text.startswith(natural.choices[0].text)
    assert bytes(exact.choices[0].token_ids).decode() == exact.choices[0].text
    stream = await client.completions.create(
        model="m", prompt="hello", max_tokens=300, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    parts = [chunk.choices[0] async for chunk in stream]
    assert [i for part in parts for i in part.token_ids] == list(exact.choices[0].text.encode())


@pytest.mark.parametrize("several", [False, True])
async def test_stop_strings_end_both_kinds_alike(client: Any, several: bool) -> None:
    args = {"model": "m", "messages": MESSAGES, "max_tokens": 250, "extra_body": {"ignore_eos": True}}
    full = (await client.chat.completions.create(**args)).choices[0].message.content
    word = full.split()[9]
    stop: str | list[str] = ["no such words", word, full[-5:]] if several else word
    whole = await client.chat.completions.create(**args, stop=stop)
    text = whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop" and full.startswith(text) and len(text) < 250
    assert not any(word in text for word in ([stop] if isinstance(stop, str) else stop))
    stream = await client.chat.completions.create(**args, stop=stop, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


async def test_a_seed_counts_with_a_temperature_only(client: Any) -> None:
    async def say(**fields: float) -> str:
        answer = await client.completions.create(model="m", prompt="x", max_tokens=40, **fields)
        text: str = answer.choices[0].text
        return text

    assert await say(temperature=0, seed=1) == await say(temperature=0, seed=2) == await say(temperature=1)
    assert await say(temperature=1, seed=1) == await say(temperature=0.5, seed=1) != await say(temperature=0)


async def test_models_and_tokenize(client: Any, http: aiohttp.ClientSession) -> None:
    (model,) = [entry async for entry in client.models.list()]
    assert (model.id, model.owned_by, model.max_model_len, model.page_size) == (
        "m",
        "evolving-infra",
        8192,
        16,
    )
    async with http.post("/v1/tokenize", json={"model": "m", "prompt": "añb"}) as answer:
        assert await answer.json() == {"tokens": [97, 195, 177, 98], "count": 4, "max_model_len": 8192}
    raw = {"Accept": "application/octet-stream"}
    async with http.post("/v1/tokenize", json={"model": "m", "messages": MESSAGES}, headers=raw) as answer:
        assert answer.content_type == "application/octet-stream"
        tokens = np.frombuffer(await answer.read(), dtype="<i4")
    assert tokens.tolist() == render(MESSAGES)


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (CHAT, "{", 400, None, None),
        (CHAT, "", 400, None, None),
        (CHAT, {"messages": MESSAGES}, 400, "model", "missing_model"),
        (CHAT, {"model": "other", "messages": MESSAGES}, 404, "model", "model_not_found"),
        (TEXT, {"model": "m", "prompt": "x", "max_tokens": -1}, 400, "max_tokens", "invalid_value"),
        (TEXT, {"model": "m", "prompt": "x", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        (TEXT, {"model": "m", "prompt": "x", "max_tokens": "9"}, 400, "max_tokens", None),
        (TEXT, {"model": "m", "prompt": ""}, 400, "prompt", None),
        (TEXT, {"model": "m", "prompt": [1, 200_000]}, 400, "prompt", None),
        (TEXT, {"model": "m", "prompt": [1, -2]}, 400, "prompt", None),
        (TEXT, {"model": "m", "prompt": [[1], [2]]}, 400, "prompt", None),
        (TEXT, {"model": "m", "prompt": {"a": 1}}, 400, "prompt", None),
        (TEXT, {"model": "m", "prompt": "x" * 8192}, 400, "prompt", "context_length_exceeded"),
        (TEXT, {"model": "m", "prompt": "x", "max_tokens": 8192}, 400, "max_tokens", "context_length_exceeded"),
        (TEXT, {"model": "m", "prompt": "x", "n": 0}, 400, "n", "invalid_value"),
        (TEXT, {"model": "m", "prompt": "x", "n": 200}, 400, "n", None),
        (TEXT, {"model": "m", "prompt": "x", "best_of": 2}, 400, "best_of", None),
        (TEXT, {"model": "m", "prompt": "x", "logprobs": 21}, 400, "logprobs", None),
        (TEXT, {"model": "m", "prompt": "x", "echo": True}, 400, "echo", None),
        (TEXT, {"model": "m", "prompt": "x", "temperature": 3}, 400, "temperature", None),
        (TEXT, {"model": "m", "prompt": "x", "stop": 5}, 400, "stop", None),
        (TEXT, {"model": "m", "prompt": "<<script>>[5]<</script>>"}, 400, None, "invalid_script"),
        (TEXT, {"model": "m", "prompt": "x", "ignore_eos": True}, 400, "max_tokens", None),
        (CHAT, {"model": "m", "messages": MESSAGES, "logprobs": 3}, 400, "logprobs", None),
        (CHAT, {"model": "m", "messages": MESSAGES, "top_logprobs": 3}, 400, "top_logprobs", None),
        (CHAT, {"model": "m", "messages": MESSAGES, "tools": [5]}, 400, "tools[0]", None),
        (CHAT, {"model": "m", "messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice", None),
        (CHAT, {"model": "m", "messages": MESSAGES, "tool_choice": "maybe"}, 400, "tool_choice", None),
        (CHAT, {"model": "m", "messages": MESSAGES, "response_format": {"type": "xml"}}, 400,
         "response_format", None),
        (CHAT, {"model": "m", "messages": []}, 400, "messages", None),
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400,
         "messages[0].content", "unsupported_content"),
        ("/v1/tokenize", {"model": "other", "prompt": "x"}, 404, "model", "model_not_found"),
        ("/abort_request", {"id": 5}, 400, "rid", None),
        ("/ei/v1/prefill", "no msgpack", 400, None, None),
        ("/ei/v1/pages/pin", "12345", 400, None, None),
        ("/ei/v1/pages/release", "12345", 400, None, None),
        ("/v1/nothing", {}, 404, None, "unknown_url"),
    ],
)  # fmt: skip
async def test_bad_input_gets_a_clear_error_and_the_worker_goes_on(
    http: aiohttp.ClientSession, path: str, body: object, status: int, param: str | None, code: str | None
) -> None:
    data = body if isinstance(body, str) else json.dumps(body)
    async with http.post(path, data=data) as answer:
        assert answer.status == status, await answer.text()
        error = (await answer.json())["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert (error["param"], error["code"]) == (param, code)
    async with http.post(TEXT, json={"model": "m", "prompt": "x", "max_tokens": 2, "mystery": 1}) as answer:
        assert answer.status == 200
    async with http.get("/v1/completions") as answer:
        assert answer.status == 405 and (await answer.json())["error"]["code"] == "method_not_allowed"


def long_call(stream: bool) -> dict[str, object]:
    """A minute of output at the speed of `slow`."""
    return {"model": "m", "prompt": "y" * 100, "max_tokens": 6000, "ignore_eos": True, "stream": stream}


@pytest.fixture
async def slow(redis_url: str, cluster_name: str) -> AsyncIterator[WorkerService]:
    async with node(redis_url, cluster_name, speedup=0.2) as service:
        yield service


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_everything_at_once(slow: WorkerService, stream: bool) -> None:
    async with aiohttp.ClientSession() as session:
        call = session.post(slow.url + TEXT, json=long_call(stream))
        if stream:
            answer = await call
            assert (await answer.content.readline()).startswith(b"data: ")
            assert slow.cache.l1_pinned + slow.cache.l1_room == -(-6100 // 16)
            answer.close()
        else:
            task = asyncio.ensure_future(call)
            await eventually(lambda: slow.scheduler.decoding)
            task.cancel()
        await eventually(lambda: not slow.scheduler.requests, timeout_s=5)
        await check_empty(slow)


async def test_abort_by_id_ends_a_stream_and_a_waiting_call(slow: WorkerService) -> None:
    async with aiohttp.ClientSession(base_url=slow.url) as session:
        answer = await session.post(TEXT, json=long_call(True), headers={"X-EI-Request-Id": "r1"})
        first = await answer.content.readline()
        whole = asyncio.ensure_future(
            session.post(TEXT, json=long_call(False), headers={"X-EI-Request-Id": "r2"})
        )
        await eventually(lambda: slow.scheduler.requests == 2)
        for rid in ("r1", "r2"):
            async with session.post("/abort_request", json={"rid": rid}) as done:
                assert await done.json() == {"rid": rid, "aborted": 1}
        await check_empty(slow)
        rest = first + await answer.read()
        assert b'"code":"aborted"' in rest and b"[DONE]" not in rest
        refused = await whole
        assert refused.status == 499
        async with session.post("/abort_request", json={"rid": "r1"}) as done:
            assert (await done.json())["aborted"] == 0


async def test_many_calls_at_once_share_iterations(redis_url: str, cluster_name: str) -> None:
    # As slow as its model, so that the calls are on the node at the same time also on a busy machine.
    async with (
        node(redis_url, cluster_name, speedup=0.5) as worker,
        openai.AsyncOpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as client,
    ):

        async def one(number: int) -> str:
            prompt = f"{number} " * 20
            answer = await client.completions.create(model="m", prompt=prompt, max_tokens=200)
            return answer.choices[0].text

        alone = [await one(number) for number in range(3)]
        before = worker.engine.iterations[Phase.DECODE]
        together = await asyncio.gather(*(one(number) for number in range(24)))
        assert together[:3] == alone
        produced = sum(len(text) for text in together)
        assert worker.engine.iterations[Phase.DECODE] - before < produced / 3
