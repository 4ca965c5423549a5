"""The official clients of OpenAI and Anthropic against the router: every API, agents, errors, going away, many at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import anthropic
import openai
import pydantic
import pytest

from shared.embedded import free_port
from tests.client_agents import AGENTS, ENDS, MODEL, SCHEMA, STEPS, of_anthropic, of_openai, tag
from tests.up import Up

SAY: list[Any] = [{"role": "user", "content": "Say something."}]
LONG = {"ignore_eos": True}  # with a limit of thousands of tokens an answer takes seconds
LIMIT = 6000
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


class City(pydantic.BaseModel):
    name: str
    people: int
    capital: bool


def ask_json(url: str, method: str = "GET", **headers: str) -> Any:
    """The answer's JSON. `headers` have _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, method=method, headers=named)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def script(*steps: dict[str, Any]) -> str:
    return f"Work. <<script>>{json.dumps(steps)}<</script>>"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    flags = ("--nodes", "4", "--split", "2P2D", "--speedup", "2", "--profile", "tiny", "--model", MODEL)
    with Up(tmp_path_factory.mktemp("up"), *flags, "--warmup-s", "4", "--window-s", "36000") as cluster:
        Up.until(lambda: json.loads(cluster.get(cluster.url + "/ei/v1/cluster"))["split"] == SPLIT, 60.0)
        yield cluster


SPLIT = {"prefill": 2, "decode": 2}


@contextlib.contextmanager
def router(up: Up, *flags: str, ready: bool = True) -> Iterator[str]:
    """Address of another router, by default of the same cluster."""
    port = free_port("127.0.0.1")
    log = up.folder / f"router-{port}.log"
    argv = [sys.executable, "-m", "services.router", "--redis", up.redis, "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return bool(up.get(url + ("/readyz" if ready else "/healthz")))
            except OSError:
                return False

        Up.until(answers)
        yield url
    finally:
        process.terminate()
        assert process.wait(20) == 0, log.read_text()


@pytest.fixture(scope="module")
def oai(up: Up) -> Iterator[openai.OpenAI]:
    with of_openai(up.url) as client:
        yield client


@pytest.fixture(scope="module")
def claude(up: Up) -> Iterator[anthropic.Anthropic]:
    with of_anthropic(up.url) as client:
        yield client


@pytest.fixture
async def aoai(up: Up) -> Any:
    async with openai.AsyncOpenAI(
        base_url=up.url + "/v1", api_key="none", max_retries=0, timeout=30.0
    ) as client:
        yield client


@pytest.fixture
async def aclaude(up: Up) -> Any:
    async with anthropic.AsyncAnthropic(
        base_url=up.url, api_key="none", max_retries=0, timeout=30.0
    ) as client:
        yield client


# ---------------------------------------------------------------------- text, at once and in a stream


async def events_of(stream: Any) -> list[Any]:
    """What a stream of a client yields, whether the client is asynchronous or not."""
    if hasattr(stream, "__aiter__"):
        return [event async for event in stream]
    return list(stream)


async def result(value: Any) -> Any:
    return await value if hasattr(value, "__await__") else value


@pytest.fixture(params=["sync", "async"])
def either(request: pytest.FixtureRequest, oai: Any, aoai: Any, claude: Any, aclaude: Any) -> tuple[Any, Any]:
    """Both makers' clients, of one kind."""
    return (oai, claude) if request.param == "sync" else (aoai, aclaude)


async def test_a_chat(either: Any) -> None:
    # So long that it cannot come in a few pieces, however busy the machine is.
    args = {"model": MODEL, "messages": SAY, "max_tokens": 1500, "extra_body": LONG}
    create = either[0].chat.completions.create
    whole = await result(create(**args))
    assert (whole.object, whole.model) == ("chat.completion", MODEL)
    asked = await result(create(**args, stream=True, stream_options={"include_usage": True}))
    *chunks, last = await events_of(asked)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len(
        {c.id for c in chunks}
    ) == 1
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(each.delta.content or "" for each in choices) == whole.choices[0].message.content
    assert len(whole.choices[0].message.content) > 20
    assert [each.delta.role for each in choices] == ["assistant"] + [None] * (len(choices) - 1)
    ends = [each.finish_reason for each in choices]
    assert ends == [None] * (len(ends) - 1) + [whole.choices[0].finish_reason] and len(chunks) > 3
    assert all(chunk.usage is None for chunk in chunks) and last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens > 0
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


async def test_a_chat_with_the_clients_own_stream(either: Any) -> None:
    args = {"model": MODEL, "messages": [{"role": "user", "content": script({"say": "Grüße " * 9})}]}
    whole = await result(either[0].chat.completions.create(**args))
    manager = either[0].chat.completions.stream(**args)
    if hasattr(manager, "__aenter__"):
        async with manager as stream:
            events = await events_of(stream)
            final = await stream.get_final_completion()
    else:
        with manager as stream:
            events = list(stream)
            final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert {"chunk", "content.delta", "content.done"} == {event.type for event in events}


async def test_a_completion_of_text_and_of_ids(either: Any) -> None:
    create = either[0].completions.create
    texts = []
    for prompt in ("once upon", list(b"once upon")):
        args = {"model": MODEL, "prompt": prompt, "max_tokens": 30}
        whole = await result(create(**args))
        asked = await result(create(**args, stream=True, stream_options={"include_usage": True}))
        *chunks, last = await events_of(asked)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
        assert last.usage.completion_tokens == whole.usage.completion_tokens == 30
        texts.append(whole.choices[0].text)
    assert texts[0] == texts[1] and len(texts[0]) == 30


async def test_a_response(either: Any) -> None:
    args = {
        "model": MODEL, "instructions": "Be brief.", "input": "Say something.", "max_output_tokens": 1500,
        "extra_body": LONG,
    }  # fmt: skip
    whole = await result(either[0].responses.create(**args))
    events = await events_of(await result(either[0].responses.create(**args, stream=True)))
    kinds = [event.type for event in events]
    short = [kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind]
    end = "response.completed" if whole.status == "completed" else "response.incomplete"
    assert short == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", end,
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text and len(text) > 20
    assert kinds.count("response.output_text.delta") > 2
    usage = events[-1].response.usage
    assert usage.output_tokens == whole.usage.output_tokens
    assert usage.input_tokens == whole.usage.input_tokens > 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


async def test_a_message(either: Any) -> None:
    args = {"model": MODEL, "system": "Be brief.", "messages": SAY, "max_tokens": 1500, "extra_body": LONG}
    whole = await result(either[1].messages.create(**args))
    assert (whole.type, whole.role, whole.model, whole.content[0].type) == (
        "message", "assistant", MODEL, "text",
    )  # fmt: skip
    events = await events_of(await result(either[1].messages.create(**args, stream=True)))
    kinds = [event.type for event in events if event.type != "ping"]
    short = [kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind]
    assert short == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == whole.content[0].text and len(text) > 20 and kinds.count("content_block_delta") > 2
    (end,) = [event for event in events if event.type == "message_delta"]
    assert end.delta.stop_reason == whole.stop_reason and end.usage.output_tokens == whole.usage.output_tokens
    begun = events[0].message.usage
    assert (
        begun.input_tokens + begun.cache_read_input_tokens
        == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
        > 0
    )


async def test_a_message_with_the_clients_own_stream(either: Any) -> None:
    args = {"model": MODEL, "messages": SAY, "max_tokens": 60}
    whole = await result(either[1].messages.create(**args))
    manager = either[1].messages.stream(**args)
    if hasattr(manager, "__aenter__"):
        async with manager as stream:
            text = "".join([part async for part in stream.text_stream])
            final = await stream.get_final_message()
    else:
        with manager as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason


# ---------------------------------------------------------------------- agents


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("api", "how"),
    [
        *((api, how) for api in AGENTS for how in ("untagged", "opencode", "named")),
        ("messages", "claude-code"),
        ("responses", "codex"),
    ],
)
def test_an_agent_keeps_its_branch_and_finds_its_context_cached(
    up: Up, api: str, how: str, stream: bool
) -> None:
    headers, name = tag(how)
    # The padding makes each conversation long, and another one from its beginning.
    agent = AGENTS[api](up.url, headers, f"{uuid.uuid4()} " * 30 + script(*STEPS))
    answers = []
    for step in STEPS:
        answers.append(agent.step(stream=stream))
        told = answers[-1]
        calls = step.get("tools") or [call for call in [step.get("tool")] if call]
        assert (told.text, told.thought) == (step.get("say", ""), step.get("reason", ""))
        assert [(called, arguments) for _, called, arguments in told.calls] == [
            (call["name"], call["arguments"]) for call in calls
        ]
        assert told.finish == ENDS[api][not calls]
        agent.results([(id, f"what {called} found: " + "x" * 40) for id, called, _ in told.calls])
    ids = [id for told in answers for id, _, _ in told.calls]
    assert len(set(ids)) == len(ids) == 5
    branches = {told.branch for told in answers}
    assert len(branches) == 1 and re.fullmatch(name, branches.pop()), answers
    for before, told in zip(answers, answers[1:], strict=False):
        # Whatever the node: all of the last prompt, up to its last pages, is found or fetched.
        assert told.prompt > before.prompt and told.cached >= before.prompt - 64, answers
    view = ask_json(f"{up.url}/v1/branches/{answers[0].branch}")
    assert view["requests"] == len(STEPS) and view["tagged"] is (how != "untagged")
    assert ask_json(f"{up.url}/v1/branches/{answers[0].branch}", "DELETE")["known"]


def test_claude_codes_session_in_the_metadata_names_its_branch(up: Up, claude: Any) -> None:
    session = str(uuid.uuid4())
    user = {"user_id": f"user_{'0' * 64}_account__session_{session}"}
    raw = claude.messages.with_raw_response.create(model=MODEL, messages=SAY, max_tokens=5, metadata=user)
    assert raw.headers["x-ei-branch"] == f"claude:{session}"


# ---------------------------------------------------------------------- what an answer can be


def test_answers_of_a_schema(oai: Any, claude: Any) -> None:
    chat = oai.chat.completions.parse(model=MODEL, messages=SAY, response_format=City)
    response = oai.responses.parse(model=MODEL, input="A city.", text_format=City)
    message = claude.messages.parse(model=MODEL, messages=SAY, max_tokens=500, output_format=City)
    for found in (chat.choices[0].message.parsed, response.output_parsed, message.parsed_output):
        assert isinstance(found, City)
    with oai.chat.completions.stream(model=MODEL, messages=SAY, response_format=City) as stream:
        again = stream.get_final_completion().choices[0].message.parsed
    assert again == chat.choices[0].message.parsed
    free = oai.chat.completions.create(model=MODEL, messages=SAY, response_format={"type": "json_object"})
    assert isinstance(json.loads(free.choices[0].message.content), dict)


def test_a_tool_of_a_schema_is_called_when_it_must_be(oai: Any, claude: Any) -> None:
    tool = openai.pydantic_function_tool(City)
    chat = oai.chat.completions.parse(model=MODEL, messages=SAY, tools=[tool], tool_choice="required")
    (call,) = chat.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, City)
    tools: Any = [{"name": "city", "input_schema": City.model_json_schema()}]
    message = claude.messages.create(
        model=MODEL, messages=SAY, max_tokens=500, tools=tools, tool_choice={"type": "tool", "name": "city"}
    )
    assert City.model_validate(message.content[0].input)
    response = oai.responses.create(
        model=MODEL, input="x", tool_choice="required",
        tools=[{"type": "function", "name": "city", "parameters": City.model_json_schema(), "strict": False}],
    )  # fmt: skip
    assert City.model_validate_json(response.output[0].arguments)


def test_several_choices_and_their_probabilities(oai: Any) -> None:
    args = {
        "model": MODEL, "messages": SAY, "max_tokens": 24, "n": 3, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = oai.chat.completions.create(**args)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert whole.usage.completion_tokens == 72
    streamed, tokens = ["", "", ""], ["", "", ""]
    for chunk in oai.chat.completions.create(**args, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            if choice.logprobs:
                tokens[choice.index] += "".join(entry.token for entry in choice.logprobs.content)
    assert streamed == tokens == texts
    for choice in whole.choices:
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 24
        assert all(entry.logprob < 0 for entry in choice.logprobs.content)
    text = oai.completions.create(model=MODEL, prompt="x", n=2, max_tokens=9, logprobs=1)
    assert ["".join(c.logprobs.tokens) for c in text.choices] == [c.text for c in text.choices]
    assert len(text.choices) == 2 and text.usage.completion_tokens == 18


def test_images_count_and_differ(oai: Any, claude: Any) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    told = {"type": "text", "text": "What is this?"}

    def chat(*parts: Any) -> tuple[int, str]:
        answer = oai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [told, *parts]}], max_tokens=20
        )
        return answer.usage.prompt_tokens, answer.choices[0].message.content

    def message(*parts: Any) -> tuple[int, str]:
        answer = claude.messages.create(
            model=MODEL, messages=[{"role": "user", "content": [told, *parts]}], max_tokens=20
        )
        return answer.usage.input_tokens + answer.usage.cache_read_input_tokens, answer.content[0].text

    def response(*parts: Any) -> tuple[int, str]:
        content = [{"type": "input_text", "text": told["text"]}, *parts]
        answer = oai.responses.create(
            model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=20
        )
        return answer.usage.input_tokens, answer.output_text

    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    asked: list[tuple[Callable[..., tuple[int, str]], Any]] = [
        (chat, {"type": "image_url", "image_url": {"url": url}}),
        (message, {"type": "image", "source": source}),
        (response, {"type": "input_image", "image_url": url, "detail": "auto"}),
    ]
    found = [ask(image) for ask, image in asked]
    bare = [ask() for ask, _ in asked]
    for (tokens, text), (fewer, other) in zip(found, bare, strict=True):
        assert tokens > fewer + 16 and text != other
    assert len(set(found)) == 1, found  # the same prompt, in whichever API


def test_a_budget_for_thought_is_taken_and_thoughts_go_back(claude: Any, oai: Any) -> None:
    messages: list[Any] = [
        {"role": "user", "content": script({"reason": "hmm", "say": "yes"}, {"say": "no"})}
    ]
    args: dict[str, Any] = {"model": MODEL, "max_tokens": 2000}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    first = claude.messages.create(**args, messages=messages, thinking=thinking)
    assert [block.type for block in first.content] == ["thinking", "text"] and first.content[0].signature
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Sure?"}]
    with claude.messages.stream(**args, messages=messages, thinking=thinking) as stream:
        assert "".join(stream.text_stream) == "no"
    response = oai.responses.create(
        model=MODEL, input=messages[0]["content"], reasoning={"effort": "high", "summary": "auto"}
    )
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage.output_tokens_details.reasoning_tokens >= len("hmm")
    chat = oai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": messages[0]["content"]}], reasoning_effort="high"
    )
    assert (chat.choices[0].message.reasoning_content, chat.choices[0].message.content) == ("hmm", "yes")


def test_counting_agrees_with_what_is_charged(claude: Any) -> None:
    args: dict[str, Any] = {
        "model": MODEL,
        "system": "Be brief.",
        "messages": SAY,
        "tools": [{"name": "ls", "input_schema": SCHEMA}],
    }
    counted = claude.messages.count_tokens(**args).input_tokens
    usage = claude.messages.create(**args, max_tokens=5).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens > 20


def test_models(oai: Any, claude: Any) -> None:
    assert [model.id for model in oai.models.list()] == [MODEL]
    assert [(model.id, model.type) for model in claude.models.list()] == [(MODEL, "model")]
    assert oai.models.retrieve(MODEL).id == claude.models.retrieve(MODEL).id == MODEL
    assert claude.models.retrieve(MODEL).created_at.year > 2000
    with pytest.raises(openai.NotFoundError):
        oai.models.retrieve("other")
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("other")


# ---------------------------------------------------------------------- errors


def ask_chat(client: Any, stream: bool = False, **more: Any) -> Any:
    return client.chat.completions.create(
        **({"model": MODEL, "messages": SAY, "max_tokens": 5, "stream": stream} | more)
    )


def ask_completion(client: Any, stream: bool = False, **more: Any) -> Any:
    return client.completions.create(
        **({"model": MODEL, "prompt": "x", "max_tokens": 5, "stream": stream} | more)
    )


def ask_response(client: Any, stream: bool = False, **more: Any) -> Any:
    if "max_tokens" in more:
        more["max_output_tokens"] = more.pop("max_tokens")
    if "messages" in more:
        more["input"] = more.pop("messages")
    return client.responses.create(
        **({"model": MODEL, "input": "x", "max_output_tokens": 16, "stream": stream} | more)
    )


def ask_message(client: Any, stream: bool = False, **more: Any) -> Any:
    return client.messages.create(
        **({"model": MODEL, "messages": SAY, "max_tokens": 5, "stream": stream} | more)
    )


class Api(NamedTuple):
    maker: Any  # the module of its client
    client: Callable[..., Any]
    ask: Callable[..., Any]


APIS = {
    "chat": Api(openai, of_openai, ask_chat),
    "completions": Api(openai, of_openai, ask_completion),
    "responses": Api(openai, of_openai, ask_response),
    "messages": Api(anthropic, of_anthropic, ask_message),
}


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> Api:
    return APIS[request.param]


def refused(api: Api, client: Any, error: str, status: int, **ask: Any) -> Any:
    """The client's own error of that name, in a stream and without."""
    kinds = []
    for stream in (False, True):
        with pytest.raises(getattr(api.maker, error)) as caught:
            api.ask(client, stream, **ask)
        assert caught.value.status_code == status and caught.value.body
        assert "Traceback" not in caught.value.message
        kinds.append(caught.value)
    return kinds[0]


def test_what_the_client_got_wrong_is_told_as_its_own_errors(up: Up, api: Api) -> None:
    with api.client(up.url) as client:
        error = refused(api, client, "NotFoundError", 404, model="other")
        assert "other" in str(error)
        refused(api, client, "BadRequestError", 400, max_tokens=-1)
        refused(api, client, "BadRequestError", 400, extra_body={"stop": 5, "stop_sequences": 5, "tools": 5})
        text = "x" * 9000
        long = (
            {"prompt": text}
            if api.ask is ask_completion
            else {"messages": [{"role": "user", "content": text}]}
        )
        error = refused(api, client, "BadRequestError", 400, **long)
        if api.maker is anthropic:
            assert (
                "prompt is too long" in str(error) and error.body["error"]["type"] == "invalid_request_error"
            )
        else:
            assert error.code == "context_length_exceeded" and error.type == "invalid_request_error"
        assert api.ask(client)  # and service goes on


def test_an_error_of_the_router_has_a_request_id(claude: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask_message(claude, model="other")
    assert caught.value.request_id == caught.value.body["request_id"]


@pytest.fixture(scope="module")
def keys(up: Up) -> dict[str, str]:
    """Names to keys of the file that `guarded` reads."""
    file = str(up.folder / "keys.toml")
    limits = {
        "alice": ("--tenant", "alice"),
        "bob": ("--tenant", "bob"),
        "once": ("--rpm", "1"),
        "one": ("--max-in-flight", "1"),
        "gone": ("--expires", "2020-01-01T00:00:00Z"),
        "root": ("--admin",),
    }
    found = {}
    for name, flags in limits.items():
        done = up.evolving("keys", "add", "--file", file, "--name", name, *flags)
        assert done.returncode == 0, done.stderr
        found[name] = done.stdout.strip()
    return found


@pytest.fixture(scope="module")
def guarded(up: Up, keys: dict[str, str]) -> Iterator[str]:
    """A router with keys, and a bound on bodies."""
    flags = ("--keys-file", str(up.folder / "keys.toml"), "--max-body-bytes", "50000")
    with router(up, "--speedup", "2", *flags) as url:
        yield url


def test_keys(api: Api, guarded: str, keys: dict[str, str]) -> None:
    for wrong in ("none", "ei-" + "x" * 43, keys["gone"]):
        with api.client(guarded, wrong) as client:
            error = refused(api, client, "AuthenticationError", 401)
            assert wrong not in str(error)
            with pytest.raises(api.maker.AuthenticationError):
                client.models.list()
    with api.client(guarded, keys["alice"]) as client:
        assert api.ask(client) and [model.id for model in client.models.list()] == [MODEL]
    bearer = anthropic.Anthropic(base_url=guarded, auth_token=keys["alice"], max_retries=0)
    assert ask_message(bearer) and bearer.messages.count_tokens(model=MODEL, messages=SAY)


def test_tenants_share_no_context_and_see_their_own_branches_only(guarded: str, keys: dict[str, str]) -> None:
    messages: list[Any] = [{"role": "user", "content": f"{uuid.uuid4()} " * 20}]
    cached, branches = [], []
    for name in ("alice", "alice", "bob"):
        with of_openai(guarded, keys[name], default_headers={"X-EI-Branch": "main"}) as client:
            raw = client.chat.completions.with_raw_response.create(
                model=MODEL, messages=messages, max_tokens=5
            )
            cached.append(raw.parse().usage.prompt_tokens_details.cached_tokens)
            listed = ask_json(guarded + "/v1/branches", x_api_key=keys[name])["branches"]
            branches.append({view["branch"] for view in listed})
    assert cached[1] > 600 and cached[0] == cached[2] == 0
    assert all("main" in seen and not any(branch.startswith("@") for branch in seen) for seen in branches)
    everything = ask_json(guarded + "/v1/branches", x_api_key=keys["root"])["branches"]
    assert {"@alice|main", "@bob|main"} <= {view["branch"] for view in everything}


def test_too_many_requests_are_told_when_to_come_back(api: Api, guarded: str, keys: dict[str, str]) -> None:
    with api.client(guarded, keys["once"]) as client:
        with contextlib.suppress(api.maker.RateLimitError):
            api.ask(client)  # a minute's worth, unless another API took it
        error = refused(api, client, "RateLimitError", 429)
        assert 1 <= int(error.response.headers["retry-after"]) <= 60


def test_a_client_that_retries_gets_its_answer_when_there_is_room(
    api: Api, guarded: str, keys: dict[str, str]
) -> None:
    """The key may have one request in flight; the second waits as long as it is told, then tries again."""
    stream = ask_completion(of_openai(guarded, keys["one"]), True, max_tokens=LIMIT, extra_body=LONG)
    next(iter(stream))
    with api.client(guarded, keys["one"]) as client:
        error = refused(api, client, "RateLimitError", 429)
        wait_s = int(error.response.headers["retry-after"])
    closing = threading.Timer(0.3, stream.close)
    closing.start()
    with api.client(guarded, keys["one"], 2) as client:
        begin = time.monotonic()
        raw = api.ask(client.with_raw_response)
        took_s = time.monotonic() - begin
    closing.join()
    assert raw.retries_taken == 1 and raw.parse() and wait_s <= took_s < wait_s + 2


def test_a_body_that_is_too_large(api: Api, guarded: str, keys: dict[str, str]) -> None:
    text = "x" * 60_000
    big = {"prompt": text} if api.ask is ask_completion else {"messages": [{"role": "user", "content": text}]}
    error = "RequestTooLargeError" if api.maker is anthropic else "APIStatusError"
    with api.client(guarded, keys["alice"]) as client:
        refused(api, client, error, 413, **big)
        assert api.ask(client)


def test_no_node_is_an_error_of_the_server(up: Up, tmp_path: Path) -> None:
    with router(up, "--cluster", "empty", "--place-timeout-s", "0.2", ready=False) as url:
        for api in APIS.values():
            with api.client(url) as client:
                error = "ServiceUnavailableError" if api.maker is anthropic else "InternalServerError"
                refused(api, client, error, 503)
                assert list(client.models.list()) == []


# ---------------------------------------------------------------------- going away


async def at_rest(up: Up) -> bool:
    """Whether neither the router nor a worker has a request; nothing is pinned or promised."""
    async with aiohttp.ClientSession() as http:

        async def metrics(url: str) -> dict[str, float]:
            async with http.get(url + "/metrics") as answer:
                lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
            return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

        async with http.get(up.url + "/ei/v1/cluster") as answer:
            nodes = (await answer.json())["nodes"]
        assert len(nodes) == 4
        found = await metrics(up.url)
        if found["ei_router_in_flight"] or found["ei_router_waiting"]:
            return False
        if any(node["queue"] or node["decodes"] for node in nodes):
            return False
        for node in nodes:
            told = await metrics(node["url"])
            busy = (
                "ei_worker_requests",
                "ei_worker_kv_reserved_pages",
                'ei_worker_kv_pinned_pages{tier="l1"}',
            )
            if any(told[name] for name in busy):
                return False
    return True


async def rests_within(up: Up, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not await at_rest(up):
        assert time.monotonic() < deadline, f"busy {seconds:g} s after the client went away"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("how", ["closed", "cancelled"])
@pytest.mark.parametrize("name", APIS)
async def test_a_client_that_leaves_its_stream_frees_the_nodes(
    up: Up, aoai: Any, aclaude: Any, name: str, how: Literal["closed", "cancelled"]
) -> None:
    await rests_within(up, 10.0)
    api = APIS[name]
    client = aclaude if api.maker is anthropic else aoai
    branch = f"leaves/{uuid.uuid4()}"
    got = asyncio.Event()

    async def read(stream: Any) -> None:
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 5:
                got.set()
                if how == "closed":
                    break

    stream = await api.ask(
        client, True, max_tokens=LIMIT, extra_body=LONG, extra_headers={"X-EI-Branch": branch}
    )
    reading = asyncio.create_task(read(stream))
    await asyncio.wait_for(got.wait(), 10.0)
    assert not await at_rest(up)
    if how == "closed":
        await reading
        await stream.close()
    else:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await stream.close()
    await rests_within(up, 5.0)
    # The branch lives on: its next request finds what was computed of the prompt.
    view = await asyncio.to_thread(ask_json, f"{up.url}/v1/branches/{branch}")
    assert view["requests"] == 1
    assert await api.ask(client, extra_headers={"X-EI-Branch": branch})


@pytest.mark.parametrize("name", APIS)
async def test_a_client_that_gives_up_on_a_whole_answer_frees_the_nodes(
    up: Up, aoai: Any, aclaude: Any, name: str
) -> None:
    await rests_within(up, 10.0)
    api = APIS[name]
    client = aclaude if api.maker is anthropic else aoai
    with pytest.raises(api.maker.APITimeoutError):
        await api.ask(client.with_options(timeout=0.5), max_tokens=LIMIT, extra_body=LONG)
    await rests_within(up, 5.0)
    asking = asyncio.create_task(api.ask(client, max_tokens=LIMIT, extra_body=LONG))
    await asyncio.sleep(0.3)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await rests_within(up, 5.0)


# ---------------------------------------------------------------------- many at once


async def test_many_clients_at_once_get_their_own_answers(up: Up, aoai: Any, aclaude: Any) -> None:
    """30 conversations of three steps that begin alike, over three APIs, streamed or not."""
    branches: list[str] = []

    async def talk(number: int) -> None:
        task = "Same beginning. " * 20 + script(*({"say": f"{number}/{step} " * 20} for step in range(3)))
        messages: list[Any] = [{"role": "user", "content": task}]
        seen = set()
        for step in range(3):
            stream = bool((number + step) % 2)
            match number % 3:
                case 0:
                    raw = await aoai.chat.completions.with_raw_response.create(
                        model=MODEL, messages=messages, stream=stream
                    )
                    found = raw.parse()
                    if stream:
                        text = "".join(
                            [part.choices[0].delta.content or "" async for part in found if part.choices]
                        )
                    else:
                        text = found.choices[0].message.content
                case 1:
                    raw = await aoai.responses.with_raw_response.create(
                        model=MODEL, input=messages, stream=stream
                    )
                    found = raw.parse()
                    if stream:
                        text = "".join(
                            [e.delta async for e in found if e.type == "response.output_text.delta"]
                        )
                    else:
                        text = found.output_text
                case _:
                    raw = await aclaude.messages.with_raw_response.create(
                        model=MODEL, messages=messages, max_tokens=500, stream=stream
                    )
                    found = await result(raw.parse())
                    if stream:
                        text = "".join([e.delta.text async for e in found if e.type == "content_block_delta"])
                    else:
                        text = found.content[0].text
            assert text == f"{number}/{step} " * 20
            seen.add(raw.headers["x-ei-branch"])
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Next {step}."}]
        assert len(seen) == 1, seen
        branches.extend(seen)

    async with asyncio.TaskGroup() as group:
        for number in range(30):
            group.create_task(talk(number))
    assert len(set(branches)) == 30
    await rests_within(up, 5.0)
