"""Agents of three APIs on the official clients, for tests: they call tools and go on with the results."""

from __future__ import annotations

import json
import uuid
from typing import Any, NamedTuple

import anthropic
import openai

MODEL = "m"


def of_openai(url: str, key: str = "none", retries: int = 0, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=retries, timeout=30.0, **more)


def of_anthropic(url: str, key: str = "none", retries: int = 0, **more: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=retries, timeout=30.0, **more)


class Answer(NamedTuple):
    text: str
    thought: str
    calls: list[tuple[str, str, dict[str, Any]]]  # id, name, arguments
    cached: int  # tokens of the prompt
    prompt: int
    branch: str
    finish: str


class Agent:
    """A conversation in one API; `step` asks for the next answer, `results` brings those of its calls."""

    def __init__(self, url: str, headers: dict[str, str], task: str) -> None: ...

    def step(self, *, stream: bool) -> Answer:
        raise NotImplementedError

    def results(self, outcomes: list[tuple[str, str]]) -> None:
        """(id of the call, what came of it)"""
        raise NotImplementedError


NAMES = ("ls", "cat")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


class ChatAgent(Agent):
    def __init__(self, url: str, headers: dict[str, str], task: str) -> None:
        self.client = of_openai(url, default_headers=headers)
        self.messages: list[Any] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": task},
        ]
        self.args: dict[str, Any] = {
            "model": MODEL,
            "messages": self.messages,
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES
            ],
        }

    def step(self, *, stream: bool) -> Answer:
        create = self.client.chat.completions.with_raw_response.create
        if stream:
            raw = create(**self.args, stream=True, stream_options={"include_usage": True})
            message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
            calls: list[dict[str, Any]] = []
            finish = ""
            for chunk in raw.parse():
                usage = chunk.usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    message["content"] += choice.delta.content or ""
                    message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
                    for call in choice.delta.tool_calls or []:
                        if call.id:
                            assert call.index == len(calls)
                            function = {"name": call.function.name, "arguments": ""}
                            calls.append({"id": call.id, "type": call.type, "function": function})
                        calls[call.index]["function"]["arguments"] += call.function.arguments
            if calls:
                message["tool_calls"] = calls
        else:
            raw = create(**self.args)
            whole = raw.parse()
            usage, finish = whole.usage, whole.choices[0].finish_reason
            message = whole.choices[0].message.model_dump(exclude_none=True)
        self.messages.append(message)
        return Answer(
            message.get("content") or "",
            message.get("reasoning_content") or "",
            [
                (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls") or []
            ],
            usage.prompt_tokens_details.cached_tokens,
            usage.prompt_tokens,
            raw.headers["x-ei-branch"],
            finish,
        )

    def results(self, outcomes: list[tuple[str, str]]) -> None:
        self.messages += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in outcomes]


class ResponsesAgent(Agent):
    def __init__(self, url: str, headers: dict[str, str], task: str) -> None:
        self.client = of_openai(url, default_headers=headers)
        self.items: list[Any] = [{"role": "user", "content": task}]
        self.args: dict[str, Any] = {
            "model": MODEL,
            "instructions": "Be brief.",
            "input": self.items,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "tools": [
                {"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES
            ],
        }

    def step(self, *, stream: bool) -> Answer:
        raw = self.client.responses.with_raw_response.create(**self.args, stream=stream)
        if stream:
            *events, last = list(raw.parse())
            whole = last.response
            done = [event.item for event in events if event.type == "response.output_item.done"]
            assert [item.id for item in done] == [item.id for item in whole.output]
            told = [event.arguments for event in events if event.type.endswith("arguments.done")]
            assert told == [item.arguments for item in done if item.type == "function_call"]
        else:
            whole = raw.parse()
        self.items += [item.model_dump(exclude_none=True) for item in whole.output]
        thought = [item.content[0].text for item in whole.output if item.type == "reasoning"]
        return Answer(
            whole.output_text,
            "".join(thought),
            [
                (item.call_id, item.name, json.loads(item.arguments))
                for item in whole.output
                if item.type == "function_call"
            ],
            whole.usage.input_tokens_details.cached_tokens,
            whole.usage.input_tokens,
            raw.headers["x-ei-branch"],
            whole.status,
        )

    def results(self, outcomes: list[tuple[str, str]]) -> None:
        self.items += [
            {"type": "function_call_output", "call_id": id, "output": text} for id, text in outcomes
        ]


class MessagesAgent(Agent):
    def __init__(self, url: str, headers: dict[str, str], task: str) -> None:
        self.client = of_anthropic(url, default_headers=headers)
        self.messages: list[Any] = [{"role": "user", "content": task}]
        cut = {"cache_control": {"type": "ephemeral"}}
        self.args: dict[str, Any] = {
            "model": MODEL,
            "system": [{"type": "text", "text": "Be brief."} | cut],
            "messages": self.messages,
            "max_tokens": 500,
            "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
        }

    def step(self, *, stream: bool) -> Answer:
        raw = self.client.messages.with_raw_response.create(**self.args, stream=stream)
        if stream:
            blocks: list[dict[str, Any]] = []
            arguments = ""
            for event in raw.parse():
                match event.type:
                    case "message_start":
                        usage = event.message.usage
                    case "content_block_start":
                        assert event.index == len(blocks)
                        blocks.append(event.content_block.model_dump(exclude_none=True))
                    case "content_block_delta" if event.delta.type == "input_json_delta":
                        arguments += event.delta.partial_json
                    case "content_block_delta":
                        field = event.delta.type.removesuffix("_delta")
                        blocks[-1][field] = blocks[-1].get(field, "") + getattr(event.delta, field)
                    case "content_block_stop" if blocks[-1]["type"] == "tool_use":
                        blocks[-1]["input"], arguments = json.loads(arguments or "{}"), ""
                    case "message_delta":
                        finish = event.delta.stop_reason
        else:
            whole = raw.parse()
            usage, finish = whole.usage, whole.stop_reason
            blocks = [block.model_dump(exclude_none=True) for block in whole.content]
        self.messages.append({"role": "assistant", "content": blocks})
        return Answer(
            "".join(block["text"] for block in blocks if block["type"] == "text"),
            "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
            usage.cache_read_input_tokens,
            usage.input_tokens + usage.cache_read_input_tokens,
            raw.headers["x-ei-branch"],
            finish,
        )

    def results(self, outcomes: list[tuple[str, str]]) -> None:
        found = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in outcomes]
        self.messages.append({"role": "user", "content": found})


AGENTS: dict[str, type[Agent]] = {"chat": ChatAgent, "responses": ResponsesAgent, "messages": MessagesAgent}
ENDS = {
    "chat": ("tool_calls", "stop"),
    "responses": ("completed", "completed"),
    "messages": ("tool_use", "end_turn"),
}
STEPS: list[dict[str, Any]] = [
    {"reason": "Where am I?", "say": "I look.", "tool": {"name": "ls", "arguments": {"path": "/srv"}}},
    {"tools": [{"name": "cat", "arguments": {"path": f"/srv/ä{n}"}} for n in range(3)]},
    {"reason": "Which one?", "tool": {"name": "cat", "arguments": {"path": 'a "b"\n'}}},
    {"say": "That is all."},
]


def tag(how: str) -> tuple[dict[str, str], str]:
    """The headers of a harness for a conversation of its own, and how its branch is called."""
    name = str(uuid.uuid4())
    match how:
        case "claude-code":
            return {"x-claude-code-session-id": name, "User-Agent": "claude-cli/2.1.0 (external, cli)"}, (
                f"claude:{name}"
            )
        case "codex":
            turn = json.dumps({"thread_id": name, "session_id": name, "turn_id": "1"})
            return {"session-id": name, "thread-id": name, "x-codex-turn-metadata": turn}, f"codex:{name}"
        case "opencode":
            return {"x-session-affinity": f"ses_{name}", "User-Agent": "opencode/1.0"}, f"session:ses_{name}"
        case "named":
            return {"X-EI-Branch": f"mine/{name}"}, f"mine/{name}"
        case _:
            return {}, "auto-.*"
