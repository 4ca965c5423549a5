"""Anthropic's API of a worker, with the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import pytest

from tests.conftest import eventually
from tests.worker_nodes import node
from worker.agent.service import WorkerService

SAY: list[Any] = [{"role": "user", "content": "Say something."}]
TOOLS: list[Any] = [
    {
        "name": "ls",
        "description": "Lists a folder.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}},
            "required": ["path", "depth"],
        },
    }
]


def scripted(*steps: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": f"Work. <<script>>{json.dumps(steps)}<</script>>"}]


@pytest.fixture
async def client(worker: WorkerService) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=worker.url, api_key="none", max_retries=0) as client:
        yield client


async def test_a_message_and_its_usage(client: Any) -> None:
    args = {"model": "m", "system": [{"type": "text", "text": "Be brief."}], "messages": SAY}
    counted = await client.messages.count_tokens(**args)
    first = await client.messages.create(**args, max_tokens=20)
    assert (first.type, first.role, first.model) == ("message", "assistant", "m")
    assert first.id.startswith("msg_") and first._request_id.startswith("req_")
    assert [block.type for block in first.content] == ["text"] and first.stop_reason == "max_tokens"
    usage = first.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (counted.input_tokens, 0)
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (20, 0)
    again = await client.messages.create(**args, max_tokens=300)
    assert again.content[0].text.startswith(first.content[0].text) and again.stop_reason == "end_turn"
    cached = counted.input_tokens // 16 * 16
    assert again.usage.cache_read_input_tokens == cached
    assert again.usage.input_tokens == counted.input_tokens - cached


async def test_a_streamed_message_says_what_the_whole_one_says(client: Any) -> None:
    step = {
        "reason": "hmm",
        "say": "Grüße",
        "tools": [{"name": "ls", "arguments": {"path": "ö"}}, {"name": "pwd"}],
    }
    args = {"model": "m", "messages": scripted(step), "max_tokens": 200, "tools": TOOLS}
    whole = await client.messages.create(**args)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (whole.content[0].thinking, whole.content[1].text) == ("hmm", "Grüße")
    assert [(block.name, block.input) for block in whole.content[2:]] == [("ls", {"path": "ö"}), ("pwd", {})]
    assert len({block.id for block in whole.content[2:]}) == 2 and whole.stop_reason == "tool_use"
    async with client.messages.stream(**args) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_message()
    for block in (whole.content[0], final.content[0]):
        assert block.signature
        block.signature = ""
    shown = [block.model_dump(exclude_none=True) for block in final.content]
    assert [{k: v for k, v in block.items() if k != "parsed_output"} for block in shown] == [
        block.model_dump(exclude_none=True) for block in whole.content
    ]
    assert final.stop_reason == "tool_use" and final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == whole.usage.input_tokens


async def test_the_events_of_a_stream_are_in_their_order(http: aiohttp.ClientSession) -> None:
    step = {"say": "x" * 50, "tool": {"name": "ls", "arguments": {"path": "y" * 50}}}
    body = {"model": "m", "messages": scripted(step), "max_tokens": 300, "stream": True}
    async with http.post("/v1/messages", json=body, headers={"X-EI-Request-Id": "r9"}) as answer:
        assert answer.content_type == "text/event-stream" and answer.headers["request-id"].startswith("req_")
        blocks = (await answer.text()).strip().split("\n\n")
    comment = json.loads(blocks.pop(-2).removeprefix(": "))
    names, data = [], []
    for block in blocks:
        name, line = block.split("\n")
        names.append(name.removeprefix("event: "))
        data.append(json.loads(line.removeprefix("data: ")))
    assert names == [each["type"] for each in data]
    short = [name for at, name in enumerate(names) if not at or name != names[at - 1]]
    assert short == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert [each["index"] for each in data if each["type"] == "content_block_start"] == [0, 1]
    assert data[0]["message"]["content"] == [] and data[0]["message"]["stop_reason"] is None
    deltas = [each["delta"] for each in data if each["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"text_delta", "input_json_delta"}
    assert data[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert comment["usage"]["completion_tokens"] == data[-2]["usage"]["output_tokens"]
    assert comment["usage"]["prompt_tokens"] == data[0]["message"]["usage"]["input_tokens"]


async def test_an_agents_steps_find_prompt_and_calls_cached(client: Any) -> None:
    steps = [{"reason": "r" * 20, "tool": {"name": "ls", "arguments": {"path": str(n)}}} for n in range(3)]
    messages = scripted(*steps, {"say": "done"})
    args = {"model": "m", "max_tokens": 100, "tools": TOOLS}
    have = 0
    for step in range(4):
        answer = await client.messages.create(**args, messages=messages)
        usage = answer.usage
        assert usage.cache_read_input_tokens == have // 16 * 16
        have = usage.cache_read_input_tokens + usage.input_tokens + usage.output_tokens - 1
        messages.append({"role": "assistant", "content": answer.content})
        if step < 3:
            assert answer.content[-1].input == {"path": str(step)}
            result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "a b c"}
            messages.append({"role": "user", "content": [result]})
    assert answer.content[0].text == "done" and answer.stop_reason == "end_turn"


async def test_a_stop_sequence_is_named(client: Any) -> None:
    args = {"model": "m", "messages": scripted({"say": "one two three"}), "max_tokens": 50}
    answer = await client.messages.create(**args, stop_sequences=["nothing", " three", "two"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (
        "one ",
        "stop_sequence",
        "two",
    )
    async with client.messages.stream(**args, stop_sequences=["two"]) as stream:
        final = await stream.get_final_message()
    assert (final.content[0].text, final.stop_reason, final.stop_sequence) == ("one ", "stop_sequence", "two")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "ls"}])
async def test_a_demanded_call_fits_its_schema(client: Any, choice: dict[str, str]) -> None:
    args = {"model": "m", "messages": SAY, "max_tokens": 100, "tools": TOOLS}
    answer = await client.messages.create(**args, tool_choice=choice)
    (block,) = answer.content
    assert (block.type, block.name) == ("tool_use", "ls") and answer.stop_reason == "tool_use"
    assert isinstance(block.input["path"], str) and isinstance(block.input["depth"], int)
    auto = await client.messages.create(**args, tool_choice={"type": "auto"})
    assert [block.type for block in auto.content] == ["text"]


MESSAGE = {"model": "m", "max_tokens": 5, "messages": SAY}


@pytest.mark.parametrize(
    ("body", "status", "kind", "match"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: Field required"),
        ({"max_tokens": "5"}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "at least 1"),
        ({"messages": []}, 400, "invalid_request_error", "at least one"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error", "robot"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 400, "invalid_request_error", "audio"),
        ({"messages": [{"role": "user", "content": [5]}]}, 400, "invalid_request_error", "not valid"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, 400, "invalid_request_error",
         "Field required"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}]}, 400,
         "invalid_request_error", "neither"),
        ({"system": 5}, 400, "invalid_request_error", "system is not valid"),
        ({"tools": [5]}, 400, "invalid_request_error", "must be an object"),
        ({"tool_choice": {"type": "tool", "name": "rm"}, "tools": TOOLS}, 400, "invalid_request_error", "rm"),
        ({"stop_sequences": "x"}, 400, "invalid_request_error", "stop_sequences"),
        ({"model": "other"}, 404, "not_found_error", "does not exist"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "invalid_request_error",
         "prompt is too long"),
    ],
)  # fmt: skip
async def test_bad_input_gets_anthropics_errors(
    client: Any, http: aiohttp.ClientSession, body: dict[str, Any], status: int, kind: str, match: str
) -> None:
    async with http.post("/v1/messages", json=MESSAGE | body) as answer:
        assert answer.status == status, await answer.text()
        told = await answer.json()
        assert set(told) == {"type", "error", "request_id"} and told["type"] == "error"
        assert told["request_id"] == answer.headers["request-id"]
        assert told["error"]["type"] == kind and match in told["error"]["message"]
    async with http.post("/v1/messages", json=MESSAGE | {"mystery": {"a": 1}}) as answer:
        assert answer.status == 200
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.messages.create(**(MESSAGE | {"model": "nope"}))
    assert caught.value.request_id == caught.value.body["request_id"]


async def test_counting_needs_no_limit_and_ends_as_messages_do(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/messages/count_tokens", json={"model": "m", "messages": SAY}) as answer:
        assert answer.status == 200 and set(await answer.json()) == {"input_tokens"}
    async with http.post("/v1/messages/count_tokens", data=b"{") as answer:
        assert answer.status == 400 and (await answer.json())["error"]["type"] == "invalid_request_error"
    async with http.get("/v1/messages") as answer:
        assert answer.status == 405 and (await answer.json())["type"] == "error"


async def test_an_aborted_stream_ends_with_an_error_event(redis_url: str, cluster_name: str) -> None:
    body = MESSAGE | {"max_tokens": 6000, "ignore_eos": True, "stream": True}
    async with (
        node(redis_url, cluster_name, speedup=0.2) as slow,
        aiohttp.ClientSession(base_url=slow.url) as http,
    ):
        answer = await http.post("/v1/messages", json=body, headers={"X-EI-Request-Id": "r1"})
        await answer.content.readline()
        async with http.post("/abort_request", json={"rid": "r1"}) as done:
            assert (await done.json())["aborted"] == 1
        last = (await answer.text()).strip().split("\n\n")[-1]
        name, data = last.split("\n")
        assert (
            name == "event: error" and json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
        )
        await eventually(lambda: not slow.scheduler.requests)
