"""What chats and completions of a worker can do beyond text, with the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.worker_nodes import node

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
    for name in ("ls", "cat")
]
SAY: list[Any] = [{"role": "user", "content": "Say something."}]


def scripted(*steps: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": f"Work. <<script>>{json.dumps(steps)}<</script>>"}]


@pytest.fixture
async def client(redis_url: str, cluster_name: str) -> AsyncIterator[Any]:
    async with (
        node(redis_url, cluster_name) as worker,
        openai.AsyncOpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_a_streamed_call_is_the_whole_one(client: Any) -> None:
    step = {
        "reason": "hmm",
        "say": "Grüße",
        "tools": [{"name": "ls", "arguments": {"p": "ö" * 40}}, {"name": "cat"}],
    }
    args = {"model": "m", "messages": scripted(step), "tools": TOOLS}
    choice = (await client.chat.completions.create(**args)).choices[0]
    message = choice.message
    assert (message.reasoning_content, message.content, choice.finish_reason) == (
        "hmm",
        "Grüße",
        "tool_calls",
    )
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("ls", {"p": "ö" * 40}),
        ("cat", {}),
    ]
    assert len({call.id for call in message.tool_calls}) == 2
    async with client.chat.completions.stream(**args) as stream:
        final = await stream.get_final_completion()
    told = final.choices[0].message
    assert told.content == message.content and final.choices[0].finish_reason == "tool_calls"
    assert [(call.id, call.function.name, call.function.arguments) for call in told.tool_calls] == [
        (call.id, call.function.name, call.function.arguments) for call in message.tool_calls
    ]
    chunks = [chunk async for chunk in await client.chat.completions.create(**args, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hmm"
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    opened = [call for delta in deltas for call in delta.tool_calls or [] if call.id]
    assert [(call.index, call.type, call.function.arguments) for call in opened] == [
        (0, "function", ""),
        (1, "function", ""),
    ]


async def test_a_call_without_text_has_no_content(client: Any) -> None:
    messages = scripted({"tool": {"name": "ls", "arguments": {}}}, {"say": ""})
    first = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert first.choices[0].message.content is None and len(first.choices[0].message.tool_calls) == 1
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": "a"}]
    empty = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert (empty.choices[0].message.content, empty.usage.completion_tokens) == ("", 1)
    stream = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert [chunk.delta.content for chunk in chunks] == [""] and chunks[0].finish_reason == "stop"


async def test_an_agents_steps_find_prompt_and_calls_cached(client: Any) -> None:
    messages = scripted(*({"say": "so", "tool": {"name": "ls", "arguments": {"n": n}}} for n in range(3)))
    have = 0
    for _ in range(4):
        answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert answer.usage.prompt_tokens_details.cached_tokens == have // 16 * 16
        have = answer.usage.total_tokens - 1
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        for call in answer.choices[0].message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "some result"})
    assert messages[-1]["role"] == "assistant"  # the script is over


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("required", "ls"),
        ({"type": "function", "function": {"name": "cat"}}, "cat"),
        ("none", None),
        ("auto", None),
    ],
)
async def test_tool_choice(client: Any, choice: object, name: str | None) -> None:
    answer = await client.chat.completions.create(model="m", messages=SAY, tools=TOOLS, tool_choice=choice)
    calls = answer.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == ([name] if name else [])
    assert all(isinstance(json.loads(call.function.arguments)["path"], str) for call in calls)
    messages = scripted({"say": "hi", "tool": {"name": "ls"}})
    answer = await client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, tool_choice=choice
    )
    assert answer.choices[0].message.content == "hi"
    assert bool(answer.choices[0].message.tool_calls) == (choice != "none")


async def test_several_choices(client: Any) -> None:
    args = {"model": "m", "messages": SAY, "max_tokens": 40, "extra_body": {"return_token_ids": True}}
    one = await client.chat.completions.create(**args)
    three = await client.chat.completions.create(**args, n=3)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0] == one.choices[0].message.content
    assert three.usage.completion_tokens == sum(len(choice.token_ids) for choice in three.choices)
    stream = await client.chat.completions.create(**args, n=3, stream=True)
    told, ends, ids = ["", "", ""], [None, None, None], [[], [], []]
    async for chunk in stream:
        (choice,) = chunk.choices
        told[choice.index] += choice.delta.content or ""
        ids[choice.index] += choice.token_ids
        assert ends[choice.index] is None
        ends[choice.index] = choice.finish_reason
    assert told == texts and ends == [choice.finish_reason for choice in three.choices]
    assert ids == [choice.token_ids for choice in three.choices]
    text = await client.completions.create(model="m", prompt="x", n=2, max_tokens=9)
    assert [choice.index for choice in text.choices] == [0, 1] and text.usage.completion_tokens == 18


async def test_log_probabilities_of_a_chat(client: Any) -> None:
    args = {"model": "m", "messages": scripted({"say": "Grüße"}), "logprobs": True, "top_logprobs": 3}
    whole = (await client.chat.completions.create(**args)).choices[0].logprobs.content
    assert bytes(entry.bytes[0] for entry in whole).decode() == "Grüße"
    for entry in whole:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
        values = [each.logprob for each in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and values[0] == entry.logprob < 0
        assert len({each.token for each in entry.top_logprobs}) == 3
    chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**args, stream=True)]
    assert [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content] == whole
    bare = await client.chat.completions.create(model="m", messages=SAY, logprobs=True, max_tokens=3)
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content] == [[], [], []]
    none = await client.chat.completions.create(model="m", messages=SAY, logprobs=False, max_tokens=3)
    assert none.choices[0].logprobs is None


async def test_log_probabilities_of_a_completion(client: Any) -> None:
    args = {"model": "m", "prompt": "x", "max_tokens": 9, "logprobs": 2}
    whole = (await client.completions.create(**args)).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text and whole.logprobs.text_offset == list(range(9))
    assert [
        top[token] for token, top in zip(whole.logprobs.tokens, whole.logprobs.top_logprobs, strict=True)
    ] == (whole.logprobs.token_logprobs)
    assert {len(top) for top in whole.logprobs.top_logprobs} == {2}
    chunks = [chunk.choices[0] async for chunk in await client.completions.create(**args, stream=True)]
    for field in ("tokens", "token_logprobs", "text_offset"):
        assert [one for chunk in chunks for one in getattr(chunk.logprobs, field)] == getattr(
            whole.logprobs, field
        )
    bare = await client.completions.create(model="m", prompt="x", max_tokens=2, logprobs=0)
    assert len(bare.choices[0].logprobs.tokens) == 2 and bare.choices[0].logprobs.top_logprobs is None


async def test_answers_that_must_be_json(client: Any) -> None:
    free = await client.chat.completions.create(
        model="m", messages=SAY, response_format={"type": "json_object"}
    )
    assert isinstance(json.loads(free.choices[0].message.content), dict)
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 5},
            "ok": {"type": "boolean"},
            "who": {"enum": ["a", "b"]},
        },
        "required": ["n", "ok", "who"],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    whole = await client.chat.completions.create(model="m", messages=SAY, response_format=wanted)
    found = json.loads(whole.choices[0].message.content)
    assert list(found) == ["n", "ok", "who"] and found["n"] >= 5 and found["who"] in ("a", "b")
    stream = await client.chat.completions.create(
        model="m", messages=SAY, response_format=wanted, stream=True
    )
    told = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert told == whole.choices[0].message.content
    text = await client.chat.completions.create(
        model="m", messages=SAY, response_format={"type": "text"}, max_tokens=9
    )
    assert text.choices[0].message.content[0].islower()


async def test_a_completion_says_what_its_script_says(client: Any) -> None:
    script = "<<script>>" + json.dumps([{"say": "hi", "tool": {"name": "ls"}}]) + "<</script>>"
    for prompt in (script, list(script.encode())):
        answer = await client.completions.create(model="m", prompt=prompt)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hi", "stop")
