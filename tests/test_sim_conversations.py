"""An agent's conversation with the simulated engine, in each API: what is sent back continues what was generated,
and the APIs agree on the ids. No server: requests and answers are bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.openai import ApiError, Kind, parse_call
from worker.engines.simulated.forms import Form, Job
from worker.engines.simulated.tokenizer import Special
from worker.engines.simulated.wire import FORMS, job_of, prompt_of

CONTEXT = 1_000_000
KINDS: list[Kind] = ["chat", "messages", "responses"]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


class Agent:
    """A harness that keeps a conversation in the terms of one API."""

    def __init__(self, kind: Kind, system: str, tools: list[str]) -> None:
        self.kind, self.system, self.tools = kind, system, tools
        self.items: list[dict[str, Any]] = []
        if kind == "chat" and system:
            self.items.append({"role": "system", "content": system})

    def user(self, text: str) -> None:
        part = "input_text" if self.kind == "responses" else "text"
        self.items.append({"role": "user", "content": [{"type": part, "text": text}]})

    def body(self, **fields: object) -> bytes:
        name = "input" if self.kind == "responses" else "messages"
        body: dict[str, object] = {
            "model": "m",
            name: self.items,
            "tools": [self._tool(each) for each in self.tools],
        }
        if self.kind == "messages":
            body |= {"max_tokens": 4096, "system": self.system}
        if self.kind == "responses":
            body["instructions"] = self.system
        return json.dumps(body | fields).encode()

    def _tool(self, name: str) -> dict[str, object]:
        function: dict[str, object] = {"name": name, "description": f"does {name}"}
        if self.kind == "messages":
            return function | {"input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
        if self.kind == "responses":
            return {"type": "function", "strict": True, "parameters": SCHEMA} | function
        return {"type": "function", "function": function | {"parameters": SCHEMA}}

    def heard(self, answer: dict[str, Any], results: str) -> int:
        """Keep an answer, parsed and written anew as clients do, and a result for each call; how many there were."""
        if self.kind == "chat":
            message = answer["choices"][0]["message"]
            self.items.append({key: value for key, value in message.items() if value is not None})
            calls = message.get("tool_calls", [])
            self.items += [{"role": "tool", "tool_call_id": c["id"], "content": results} for c in calls]
        elif self.kind == "responses":
            self.items += answer["output"]
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            self.items += [
                {"type": "function_call_output", "call_id": c["call_id"], "output": results} for c in calls
            ]
        else:
            self.items.append({"role": "assistant", "content": answer["content"]})
            calls = [block for block in answer["content"] if block["type"] == "tool_use"]
            content = [{"type": "tool_result", "tool_use_id": c["id"], "content": results} for c in calls]
            if content:
                self.items.append({"role": "user", "content": content})
        return len(calls)


def job(kind: Kind, body: bytes) -> Job:
    return job_of(parse_call(body, kind), kind, body, CONTEXT)


def form(kind: Kind, work: Job, body: bytes) -> Form:
    return FORMS[kind]("r", "m", work, 3, body, routed=True)


def events(data: bytes) -> list[dict[str, Any]]:
    lines = [line for line in data.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def whole(kind: Kind, work: Job, body: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(form(kind, work, body).whole(7))
    return answer


def streamed(kind: Kind, work: Job, body: bytes, cuts: list[int]) -> bytes:
    told = form(kind, work, body)
    size = work.output_tokens
    points = sorted({1 + cut % size for cut in cuts} | {size})
    return b"".join(told.chunk(point) for point in points) + told.end(7)


def assembled(kind: Kind, data: bytes) -> list[tuple[str, str]]:
    """The parts of a streamed answer: kind and text."""
    parts: list[tuple[str, str]] = []

    def more(name: str, text: str, *, new: bool) -> None:
        if new or not parts:
            parts.append((name, ""))
        parts[-1] = (name, parts[-1][1] + text)

    for event in events(data):
        match event.get("type"), event:
            case "content_block_start", {"content_block": block}:
                more(block["type"], block.get("name", ""), new=True)
            case "content_block_delta", {"delta": delta}:
                if delta["type"] != "signature_delta":
                    more(parts[-1][0], delta[[key for key in delta if key != "type"][0]], new=False)
            case "response.output_item.added", {"item": item}:
                more(item["type"], item.get("name", ""), new=True)
            case str(name), {"delta": str(text)} if name.endswith(".delta"):
                more(parts[-1][0], text, new=False)
            case None, {"choices": [choice]}:
                delta = choice["delta"]
                for field in ("reasoning_content", "content"):
                    if delta.get(field):
                        more(field, delta[field], new=not parts or parts[-1][0] != field)
                for call in delta.get("tool_calls", []):
                    function = call["function"]
                    more("call", function.get("name", "") + function["arguments"], new="id" in call)
    return parts


def parts_of(kind: Kind, answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The same of an answer that was not streamed."""
    if kind == "chat":
        message = answer["choices"][0]["message"]
        found = [(field, message[field]) for field in ("reasoning_content", "content") if message.get(field)]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        return found + [("call", call["name"] + call["arguments"]) for call in calls]
    if kind == "responses":
        texts = [
            item["name"] + item["arguments"]
            if item["type"] == "function_call"
            else item["content"][0]["text"]
            for item in answer["output"]
        ]
        return list(zip([item["type"] for item in answer["output"]], texts, strict=True))
    return [
        (
            block["type"],
            block["name"] + compact(block["input"])
            if block["type"] == "tool_use"
            else block["thinking" if block["type"] == "thinking" else "text"],
        )
        for block in answer["content"]
    ]


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# No lone surrogates, which no JSON of a client holds, and nothing that would be a script of its own.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1, max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
calls = st.fixed_dictionaries(
    {"name": st.sampled_from(["ls", "réad"]), "arguments": st.dictionaries(texts, values, max_size=3)}
)
steps = st.one_of(
    st.fixed_dictionaries({}, optional={"say": texts, "reason": texts}),
    st.fixed_dictionaries({"tool": calls}, optional={"say": texts, "reason": texts}),
    st.fixed_dictionaries(
        {"tools": st.lists(calls, min_size=1, max_size=3)}, optional={"say": texts, "reason": texts}
    ),
)


@pytest.mark.parametrize("kind", KINDS)
@given(
    script=st.lists(steps, min_size=1, max_size=4),
    system=st.sampled_from(["", "Be brief."]),
    said=texts,
    result=texts,
    cuts=st.lists(st.integers(0, 10_000), max_size=6),
)
@settings(deadline=None, max_examples=30)
def test_each_step_extends_the_last_one_and_its_answer(
    kind: Kind, script: list[dict[str, Any]], system: str, said: str, result: str, cuts: list[int]
) -> None:
    agent = Agent(kind, system, ["ls", "réad"])
    agent.user(f"{said}<<script>>{json.dumps(script)}<</script>>")
    before: list[int] = []
    for step in [*script, None]:  # after the script's end made-up text
        body = agent.body()
        work = job(kind, body)
        prompt = work.tokens.tolist()
        assert prompt[: len(before)] == before
        answer = whole(kind, work, body)
        assert parts_of(kind, answer) == assembled(kind, streamed(kind, work, body, cuts))
        expected = (
            [] if step is None else [*([step["tool"]] if "tool" in step else []), *step.get("tools", [])]
        )
        made = [(part.name, json.loads(part.data)) for part in work.answers[0].calls]
        assert made == [(call["name"], call["arguments"]) for call in expected]
        if step is not None:
            assert work.answers[0].text == step.get("say", "")
            assert work.answers[0].part_text("reason") == step.get("reason", "")
        assert prompt_of(parse_call(body, kind, counting=True), kind).tokens.tolist() == prompt
        before = prompt + work.answers[0].ids.tolist()
        if not agent.heard(answer, result):
            agent.user("Go on.")
    assert job(kind, agent.body()).tokens.tolist()[: len(before)] == before


@given(
    script=st.lists(steps, min_size=1, max_size=3), system=st.sampled_from(["", "Be brief."]), result=texts
)
@settings(deadline=None, max_examples=20)
def test_the_same_conversation_has_the_same_ids_in_each_api(
    script: list[dict[str, Any]], system: str, result: str
) -> None:
    agents = [Agent(kind, system, ["ls"]) for kind in KINDS]
    for _ in range(len(script) + 1):
        prompts = []
        for agent in agents:
            if not agent.items or agent.items[-1].get("role") == "system":
                agent.user(f"Work.<<script>>{json.dumps(script)}<</script>>")
            work = job(agent.kind, agent.body())
            prompts.append([*work.tokens.tolist(), -1, *work.answers[0].ids.tolist()])
            if not agent.heard(whole(agent.kind, work, agent.body()), result):
                agent.user("Go on.")
        assert prompts[0] == prompts[1] == prompts[2]


@given(
    texts=st.lists(texts, min_size=2, max_size=2),
    limit=st.integers(1, 80),
    cuts=st.lists(st.integers(0, 10_000), max_size=6),
)
@settings(deadline=None, max_examples=30)
@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_cuts_an_answer_anywhere(kind: Kind, texts: list[str], limit: int, cuts: list[int]) -> None:
    step = {"reason": texts[0], "say": texts[1], "tool": {"name": "réad", "arguments": {"ä": texts[0]}}}
    agent = Agent(kind, "", [])
    agent.user(f"<<script>>{json.dumps([step])}<</script>>")
    name = "max_output_tokens" if kind == "responses" else "max_tokens"
    full = job(kind, agent.body())
    body = agent.body(**{name: limit})
    work = job(kind, body)
    size = min(limit, full.answers[0].ids.size)
    assert work.answers[0].ids.tolist() == full.answers[0].ids[:size].tolist()
    assert (work.answers[0].finish == "length") == (size < full.answers[0].ids.size)
    answer = whole(kind, work, body)
    told = assembled(kind, streamed(kind, work, body, cuts))
    if kind != "messages":
        assert parts_of(kind, answer) == [part for part in told if kind == "responses" or part[1]]
    else:  # arguments that are cut are no JSON
        assert [block["type"] for block in answer["content"]] == [name for name, _ in told]
    for short, long in zip(work.answers[0].parts, full.answers[0].parts, strict=False):
        assert long.data.startswith(short.data)


def test_the_items_of_two_answers_are_two_turns() -> None:
    def prompt(*items: dict[str, Any]) -> list[int]:
        body = json.dumps({"model": "m", "input": [{"role": "user", "content": "x"}, *items]}).encode()
        found: list[int] = job("responses", body).tokens.tolist()
        return found

    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}
    one = prompt(thought, message, call, call)
    assert one.count(Special.ASSISTANT) == 2 and one.count(Special.CALL) == 2
    assert prompt(message, message).count(Special.ASSISTANT) == 3
    assert prompt(call, thought, call).count(Special.ASSISTANT) == 3
    summed = thought | {"content": None, "summary": [{"type": "summary_text", "text": "t"}]}
    hidden = thought | {"content": [], "encrypted_content": "dA=="}
    assert prompt(thought) == prompt(summed) == prompt(hidden)


def test_an_open_turn_of_the_assistant_goes_on() -> None:
    first = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]
    body = json.dumps({"model": "m", "max_tokens": 40, "messages": first}).encode()
    work = job("messages", body)
    assert work.tokens.tolist()[-2:] == [Special.ASSISTANT, ord("{")]
    first[-1]["content"] += work.answers[0].text
    longer = json.dumps(
        {"model": "m", "max_tokens": 4, "messages": [*first, {"role": "user", "content": "y"}]}
    )
    before = work.tokens.tolist() + work.answers[0].ids.tolist()
    assert job("messages", longer.encode()).tokens.tolist()[: len(before)] == before


def test_cache_marks_and_images_do_not_depend_on_the_api() -> None:
    marked = {"type": "text", "text": "see", "cache_control": {"type": "ephemeral"}}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    url = "data:image/png;base64,AAAA"
    bodies: dict[Kind, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": [marked, {"type": "image_url", "image_url": {"url": url}}]}]},
        "messages": {"messages": [{"role": "user", "content": [marked, {"type": "image", "source": source}]}]},
        "responses": {
            "input": [
                {"role": "user", "content": [
                    {"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url}
                ]}
            ]
        },
    }  # fmt: skip
    found = [
        job(kind, json.dumps(body | {"model": "m", "max_tokens": 5}).encode()).tokens.tolist()
        for kind, body in bodies.items()
    ]
    assert found[0] == found[1] == found[2] and Special.IMAGE in found[0]


@pytest.mark.parametrize(
    ("script", "match"),
    [
        ("[5]", "script is not valid"),
        ("[", "script is not valid"),
        ('{"say": "x"}', "script is not valid"),
        ('[{"sya": "x"}]', "script is not valid"),
        ('[{"tool": {"name": 5}}]', "script is not valid"),
    ],
)
def test_a_script_that_is_none_is_refused(script: str, match: str) -> None:
    agent = Agent("chat", "", [])
    agent.user(f"<<script>>{script}<</script>>")
    with pytest.raises(ApiError, match=match) as caught:
        job("chat", agent.body())
    assert caught.value.status == 400
    agent.items[-1]["content"] = "<<script>>[]"
    with pytest.raises(ApiError, match="has no end"):
        job("chat", agent.body())


def test_the_last_script_of_a_user_or_system_counts() -> None:
    def says(*messages: tuple[str, str]) -> str:
        listed = [{"role": role, "content": content} for role, content in messages]
        return job("chat", json.dumps({"model": "m", "messages": listed}).encode()).answers[0].text

    def script(*texts: str) -> str:
        return f"<<script>>{json.dumps([{'say': text} for text in texts])}<</script>>"

    system = ("system", "Do. " + script("one", "two"))
    assert says(system, ("user", "go")) == "one"
    assert says(system, ("user", "go"), ("assistant", "one"), ("tool", script("no")), ("user", "x")) == "two"
    assert says(system, ("user", "go"), ("assistant", script("no")), ("user", script("own", "next"))) == "own"
    over = says(system, ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"))
    assert len(over) >= 32 and over not in ("one", "two")


def test_a_limit_that_is_just_enough_cuts_nothing() -> None:
    agent = Agent("chat", "", [])
    agent.user('<<script>>[{"say": "abc"}]<</script>>')
    assert job("chat", agent.body(max_tokens=3)).answers[0].finish == "stop"
    assert job("chat", agent.body(max_tokens=2)).answers[0].finish == "length"


def test_a_parts_tokens_are_its_bytes() -> None:
    agent = Agent("chat", "", [])
    step = {"reason": "grün", "say": "ja", "tools": [{"name": "réad", "arguments": {"ä": 1}}, {"name": "x"}]}
    agent.user(f"<<script>>{json.dumps([step])}<</script>>")
    (said,) = job("chat", agent.body()).answers
    assert [part.kind for part in said.parts] == ["reason", "text", "call", "call"]
    for part in said.parts:
        assert bytes(said.ids[part.at : part.at + len(part.data)].tolist()) == part.data
        assert part.kind != "call" or said.ids[part.at - 1] == Special.ARGUMENTS
    assert said.parts[-1].end == said.ids.size


def test_nothing_follows_a_stop_string() -> None:
    agent = Agent("messages", "", [])
    agent.user('<<script>>[{"say": "one two", "tool": {"name": "ls"}}]<</script>>')
    (said,) = job("messages", agent.body(stop_sequences=["two"])).answers
    assert [part.kind for part in said.parts] == ["text"] and said.text == "one "
    assert bytes(said.ids.tolist()) == b"one two" and said.finish == "stop"


def test_what_stands_around_a_tools_result_keeps_its_place() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]}
    content = [{"type": "text", "text": "a"}, result, {"type": "text", "text": "b"}, result]
    body = json.dumps(
        {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
    ).encode()
    assert job("messages", body).tokens.tolist() == [
        Special.BOS, Special.USER, *b"a", Special.END, Special.TOOL, *b"r", Special.END,
        Special.USER, *b"b", Special.END, Special.TOOL, *b"r", Special.END, Special.ASSISTANT,
    ]  # fmt: skip


def test_a_native_stream_repeats_what_it_said() -> None:
    script = json.dumps([{"say": "Grüße an alle"}], ensure_ascii=False)
    body = json.dumps({"text": f"<<script>>{script}<</script>>"}).encode()
    told = events(streamed("generate", job("generate", body), body, [0, 2, 4, 8]))
    assert [each["text"] for each in told] == ["G", "Gr", "Grü", "Grüße a", "Grüße an alle"]
    assert [len(each["output_ids"]) for each in told] == [1, 3, 5, 9, 15]
    assert [each["meta_info"]["finish_reason"] is None for each in told] == [True] * 4 + [False]
