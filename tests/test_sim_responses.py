"""OpenAI's responses API of a worker, with the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from worker.agent.service import WorkerService

PATH = "/v1/responses"
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "ls",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
]
STEP = {
    "reason": "hmm",
    "say": "Grüße",
    "tools": [{"name": "ls", "arguments": {"path": "ö"}}, {"name": "pwd", "arguments": {}}],
}


def scripted(*steps: dict[str, Any]) -> str:
    return f"Work. <<script>>{json.dumps(steps)}<</script>>"


@pytest.fixture
async def client(worker: WorkerService) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_response_and_its_usage(client: Any) -> None:
    args = {"model": "m", "instructions": "Be brief.", "input": "Say something."}
    first = await client.responses.create(**args)
    assert (first.object, first.status, first.model, first.store) == ("response", "completed", "m", False)
    assert first.instructions == "Be brief." and first.tools == [] and first.incomplete_details is None
    assert [item.type for item in first.output] == ["message"] and len(first.output_text) >= 32
    usage = first.usage
    assert usage.input_tokens == len("Be brief.Say something.") + 6
    assert usage.output_tokens == len(first.output_text)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    cut = await client.responses.create(**args, max_output_tokens=20)
    assert cut.output_text == first.output_text[:20] and cut.status == cut.output[0].status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens" and cut.max_output_tokens == 20
    assert cut.usage.input_tokens_details.cached_tokens == usage.input_tokens // 16 * 16


async def test_a_streamed_response_says_what_the_whole_one_says(client: Any) -> None:
    args = {"model": "m", "input": scripted(STEP), "tools": TOOLS}
    whole = await client.responses.create(**args)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "hmm" and whole.output_text == "Grüße"
    assert [(item.name, json.loads(item.arguments)) for item in whole.output[2:]] == [
        ("ls", {"path": "ö"}),
        ("pwd", {}),
    ]
    assert whole.usage.output_tokens_details.reasoning_tokens == len("hmm") + 2
    assert whole.tools[0].name == "ls"
    async with client.responses.stream(**args) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()

    def shown(response: Any) -> list[dict[str, Any]]:
        dropped = {"id", "parsed", "parsed_arguments"}
        return json.loads(
            json.dumps([item.model_dump(exclude_none=True) for item in response.output]),
            object_hook=lambda found: {key: value for key, value in found.items() if key not in dropped},
        )

    assert shown(final) == shown(whole)
    assert kinds[-1] == "response.completed" and final.usage.output_tokens == whole.usage.output_tokens


async def test_the_events_of_a_stream_are_in_their_order(http: aiohttp.ClientSession) -> None:
    body = {"model": "m", "input": scripted(STEP), "stream": True}
    async with http.post(PATH, json=body, headers={"X-EI-Request-Id": "r9"}) as answer:
        blocks = (await answer.text()).strip().split("\n\n")
    comment = json.loads(blocks.pop().removeprefix(": "))
    names, data = [], []
    for block in blocks:
        name, line = block.split("\n")
        names.append(name.removeprefix("event: "))
        data.append(json.loads(line.removeprefix("data: ")))
    assert names == [each["type"] for each in data]
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    short = [name for at, name in enumerate(names) if not at or name != names[at - 1]]
    assert [name.removeprefix("response.") for name in short] == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", *call, *call, "completed",
    ]  # fmt: skip
    assert data[0]["response"]["status"] == "in_progress" and data[0]["response"]["output"] == []
    done = [each["item"] for each in data if each["type"] == "response.output_item.done"]
    added = [each["item"] for each in data if each["type"] == "response.output_item.added"]
    assert done == data[-1]["response"]["output"] and [each["id"] for each in done] == [
        each["id"] for each in added
    ]
    assert [each["output_index"] for each in data if "item" in each] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert comment["usage"]["completion_tokens"] == data[-1]["response"]["usage"]["output_tokens"]


async def test_an_agents_steps_find_prompt_and_calls_cached(client: Any) -> None:
    steps = [{"reason": "r" * 20, "tool": {"name": "ls", "arguments": {"path": str(n)}}} for n in range(3)]
    items: list[Any] = [{"role": "user", "content": scripted(*steps, {"say": "done"})}]
    have = 0
    for step in range(4):
        answer = await client.responses.create(model="m", input=items, tools=TOOLS)
        assert answer.usage.input_tokens_details.cached_tokens == have // 16 * 16
        have = answer.usage.input_tokens + answer.usage.output_tokens - 1
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        if step < 3:
            assert json.loads(answer.output[-1].arguments) == {"path": str(step)}
            items.append(
                {"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "a b c"}
            )
    assert answer.output_text == "done"


async def test_json_and_demanded_calls(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    answer = await client.responses.create(model="m", input="x", text=wanted)
    assert isinstance(json.loads(answer.output_text)["n"], int)
    choice = {"type": "function", "name": "ls"}
    answer = await client.responses.create(model="m", input="x", tools=TOOLS, tool_choice=choice)
    (item,) = answer.output
    assert (item.type, item.name) == ("function_call", "ls") and set(json.loads(item.arguments)) == {"path"}


@pytest.mark.parametrize(
    ("body", "status", "param", "match"),
    [
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id", "not stored"),
        ({"input": []}, 400, "input", "input"),
        ({"input": 5}, 400, "input", "not valid"),
        ({"input": [5]}, 400, "input", "not valid"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "input[0].role", "robot"),
        ({"input": [{"role": "user"}]}, 400, "input[0].content", "no content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0]", "item_reference"),
        ({"input": [{"type": "function_call"}]}, 400, "input[0].name", "no name"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            400,
            "input[0].content",
            "input_file",
        ),
        ({"instructions": 5}, 400, "instructions", "not valid"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens", "at least 1"),
        ({"tools": [5]}, 400, "tools[0]", "must be an object"),
        ({"tools": {}}, 400, "tools", "not a list"),
        ({"model": ""}, 400, "model", "model"),
    ],
)
async def test_bad_input_gets_a_clear_error(
    http: aiohttp.ClientSession, body: dict[str, Any], status: int, param: str, match: str
) -> None:
    async with http.post(PATH, json={"model": "m", "input": "x"} | body) as answer:
        assert answer.status == status, await answer.text()
        error = (await answer.json())["error"]
        assert error["param"] == param and match in error["message"]
    async with http.post(PATH, json={"model": "m", "input": "x", "mystery": 1, "store": True}) as answer:
        assert answer.status == 200
