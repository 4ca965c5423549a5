"""The simulated engine's tokens, chat template and text."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.openai import ApiError, parse_call
from worker.engines.simulated import text
from worker.engines.simulated.text import MAX_TOKENS, MIN_TOKENS, answer, prompt_seed
from worker.engines.simulated.tokenizer import IMAGE_TOKENS, Special, check_ids, decode, encode
from worker.engines.simulated.wire import prompt_of

USER = {"role": "user", "content": "hi"}


def ids(messages: object, tools: object = None) -> list[int]:
    """Of a chat."""
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    found: list[int] = prompt_of(parse_call(body, "chat"), "chat").tokens.tolist()
    return found


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_round_trips(value: str) -> None:
    tokens = encode(value)
    assert tokens.dtype == np.int32 and tokens.size == len(value.encode())
    assert decode(tokens) == value


def test_special_and_foreign_ids_have_no_text() -> None:
    assert decode([Special.BOS, *b"ok", Special.END, 90_000]) == "ok"
    assert encode("a\ud800b").tolist() == list(b"a?b")
    check_ids(np.array([0, 131_071], dtype=np.int32))
    with pytest.raises(ApiError, match="outside 0 to 131071"):
        check_ids(np.array([131_072], dtype=np.int32))


def test_the_template_marks_roles_and_ends_where_the_assistant_speaks() -> None:
    assert ids([{"role": "system", "content": "s"}, USER]) == [
        Special.BOS, Special.SYSTEM, *b"s", Special.END, Special.USER, *b"hi", Special.END, Special.ASSISTANT,
    ]  # fmt: skip


def test_parts_are_joined_and_roles_have_synonyms() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    assert ids([parts]) == ids([USER])
    assert ids([{"role": "developer", "content": "s"}]) == ids([{"role": "system", "content": "s"}])


def test_tools_stand_in_the_system_part_in_one_form() -> None:
    tools = [
        {"type": "function", "function": {"name": "ls", "parameters": {"z": 1, "a": 2}, "description": "é"}}
    ]
    alone = ids([USER], tools)
    assert alone[1] == Special.SYSTEM and "Tools:" in decode(alone)
    with_system = ids([{"role": "system", "content": "be brief"}, USER], tools)
    assert with_system.count(Special.SYSTEM) == 1
    said = 'be brief\nTools:\n{"name":"ls","description":"é","parameters":{"z":1,"a":2}}'
    assert decode(with_system).startswith(said)
    assert ids([USER], []) == ids([USER], None) == ids([USER])
    hosted = {"type": "web_search", "size": 5, "cache_control": {"type": "ephemeral"}}
    assert '{"type":"web_search","size":5}' in decode(ids([USER], [hosted]))


def test_an_agents_next_step_extends_the_last_one() -> None:
    first = [{"role": "system", "content": "s"}, USER]
    prompt = ids(first)
    said = answer(prompt_seed(np.array(prompt, dtype=np.int32)), 50)
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"all": true}'}}
    second = [
        *first,
        {"role": "assistant", "content": said.text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a b"},
    ]
    longer = ids(second)
    assert longer[: len(prompt) + len(said.ids)] == prompt + said.ids.tolist()
    assert longer[len(prompt) + len(said.ids) :] == [
        Special.CALL, *b"ls", Special.ARGUMENTS, *b'{"all":true}', Special.END,
        Special.TOOL, *b"a b", Special.END, Special.ASSISTANT,
    ]  # fmt: skip
    assert ids([*second, USER])[: len(longer) - 1] == longer[:-1]


def test_an_image_is_a_fixed_number_of_ids_of_its_data() -> None:
    def image(url: str) -> list[int]:
        part = {"type": "image_url", "image_url": {"url": url}}
        return ids([{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])

    one, other = image("data:image/png;base64,AAAA"), image("data:image/png;base64,AAAB")
    assert one == image("data:image/png;base64,AAAA") != other
    at = one.index(Special.IMAGE)
    assert one[:at] == other[:at] and len(one) == len(other) == at + 1 + IMAGE_TOKENS + 2
    assert (
        all(1024 <= i < 131_072 for i in one[at + 1 : -2]) and len(set(one[at + 1 : -2])) > IMAGE_TOKENS / 2
    )


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one message"),
        ({"role": "user"}, "not valid"),
        ([{"content": "x"}], "missing required field `role`"),
        ([{"role": "robot", "content": "x"}], "'robot' is unknown"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "does not read"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "does not read"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"uri": "x"}}]}], "no image_url"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "no function"),
        ([{"role": "assistant", "tool_calls": [5]}], "not valid"),
        ([{"role": "user", "content": 5}], "not valid"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(messages: object, match: str) -> None:
    with pytest.raises(ApiError, match=match) as caught:
        ids(messages)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("tools", "match"),
    [
        ({"a": 1}, "tools are not a list"),
        ([5], r"tools\[0\] must be an object"),
        ([{"type": 5}], r"tools\[0\].type must be a string"),
        ([{"type": "function", "function": "ls"}], "must be an object"),
        ([{"type": "function", "function": {}}], "name must be a string"),
        ([{"name": "x", "input_schema": "object"}], "input_schema must be an object"),
    ],
)
def test_tools_of_another_shape_are_refused(tools: object, match: str) -> None:
    with pytest.raises(ApiError, match=match) as caught:
        ids([USER], tools)
    assert caught.value.status == 400


# ------------------------------------------------------------------------------------- text


@given(st.binary(min_size=16, max_size=16), st.integers(1, 600))
def test_an_answer_is_a_function_of_seed_and_position(seed: bytes, limit: int) -> None:
    short, longer = (answer(seed, n, ignore_eos=True) for n in (limit, limit + 100))
    assert len(short.ids) == limit and short.finish == "length"
    assert longer.ids[:limit].tolist() == short.ids.tolist()
    assert short.text == decode(short.ids) and all(c == " " or c.islower() for c in short.text)
    natural = answer(seed, 1_000)
    assert MIN_TOKENS <= len(natural.ids) <= MAX_TOKENS and natural.finish == "stop"
    assert answer(seed, len(natural.ids)).finish == "length"


def test_prompts_and_seeds_give_other_texts() -> None:
    one, two = np.arange(100, dtype=np.int32), np.arange(101, dtype=np.int32)
    said = {answer(prompt_seed(tokens, seed), 64).text for tokens in (one, two) for seed in (None, 1, 2)}
    assert len(said) == 6


def test_the_first_stop_string_ends_the_text_before_it() -> None:
    seed = prompt_seed(encode("x"))
    full = answer(seed, 200, ignore_eos=True)
    words = full.text.split()
    stopped = answer(seed, 200, ignore_eos=True, stop=["", "no such words", words[7], words[3]])
    assert stopped.finish == "stop"
    assert stopped.text == full.text[: full.text.find(words[3])]
    assert decode(stopped.ids) == stopped.text + words[3] and stopped.stopped_by == words[3]
    assert answer(seed, 5, stop=[full.text[10:20]]).finish == "length"


def test_blocks_are_cut_to_their_length() -> None:
    assert {len(text._block(bytes([n]) * 16, n)) for n in range(200)} == {text.BLOCK}
