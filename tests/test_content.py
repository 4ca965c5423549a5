"""Tokens of prompts: lengths, sharing and outputs, for hand-made and for arbitrary sessions."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from loadtest_server import common_prefix

from loadtest.content import (
    FIRST_ID,
    VOCABULARY,
    Blocks,
    BranchPrompts,
    Prompt,
    TokenArray,
    derived_tokens,
)
from loadtest.ideal import IdealBranch, IdealCache
from loadtest.traces import Branch, Recorded, Scope, build_branch, common_blocks
from shared.pages import page_hashes

SIZE = 64


def make_branch(*prompts: tuple[int, list[int]], index: int = 0, output: int = 10) -> Branch:
    records = [
        Recorded(float(i), float(i), tokens, output, np.array(ids, dtype=np.int64))
        for i, (tokens, ids) in enumerate(prompts)
    ]
    return build_branch(f"b{index}", index, -1, records, block_size=SIZE)


def output_ids(seed: int, count: int) -> TokenArray:
    return np.random.default_rng(seed).integers(32, 127, count).astype(np.int32)


def play(branch: Branch, blocks: Blocks, outputs: dict[int, TokenArray] | None = None) -> list[Prompt]:
    prompts = BranchPrompts(blocks, branch)
    made = []
    for number in range(len(branch.steps)):
        made.append(prompts.next())
        if outputs is not None and number in outputs:
            prompts.output(number, outputs[number].tolist())
    return made


def blocks(instance: str = "run-0", scope: Scope = "local") -> Blocks:
    return Blocks(instance, SIZE, scope)


def test_derived_tokens_depend_on_instance_id_and_position_only() -> None:
    ids = np.array([5, 6, -3], dtype=np.int64)
    tokens = derived_tokens("run-0", ids, SIZE)
    assert tokens.shape == (3, SIZE) and tokens.dtype == np.int32
    assert tokens.min() >= FIRST_ID and tokens.max() < VOCABULARY
    assert np.array_equal(derived_tokens("run-0", ids[1:], SIZE), tokens[1:])
    assert np.array_equal(derived_tokens("run-0", ids, 16), tokens[:, :16])
    for other in (derived_tokens("run-1", ids, SIZE), tokens[[1, 2, 0]], np.roll(tokens, 1, axis=1)):
        assert (other == tokens).mean() < 0.02
    many = derived_tokens("run-0", np.arange(2000, dtype=np.int64), SIZE)
    assert abs(many.mean() - (FIRST_ID + VOCABULARY) / 2) < 1000
    assert np.unique(many).size > 60_000


def test_a_prompt_that_goes_on_carries_the_output_of_the_one_before() -> None:
    branch = make_branch((100, [1]), (250, [1, 2, 3]), (256, [1, 2, 3, 4]))
    outputs = {0: output_ids(0, 30), 1: output_ids(1, 50)}
    first, second, third = play(branch, blocks(), outputs)
    assert [p.tokens.size for p in (first, second, third)] == [100, 250, 256]
    assert np.array_equal(second.tokens[:100], first.tokens)
    assert np.array_equal(second.tokens[100:130], outputs[0])
    assert second.tokens[130:].min() >= FIRST_ID
    assert np.array_equal(third.tokens[:250], second.tokens)
    assert np.array_equal(third.tokens[250:], outputs[1][:6])  # the trace has room for no more
    assert (first.common, second.common, third.common) == (0, 64, 192)
    for prompt in (first, second, third):
        assert json.loads(b"[" + prompt.text + b"]") == prompt.tokens.tolist()


def test_an_output_may_end_in_the_tail_and_the_next_one_begin_there() -> None:
    branch = make_branch((100, [1]), (140, [1, 2]), (300, [1, 2, 3, 4]))
    outputs = {0: output_ids(0, 500), 1: output_ids(1, 20)}
    first, second, third = play(branch, blocks(), outputs)
    assert np.array_equal(second.tokens, np.concatenate((first.tokens, outputs[0][:40])))
    assert np.array_equal(third.tokens[:160], np.concatenate((second.tokens, outputs[1])))


def test_without_outputs_derived_tokens_stand_in() -> None:
    branch = make_branch((100, [1]), (250, [1, 2, 3]))
    first, second = play(branch, blocks())
    assert np.array_equal(second.tokens[:100], first.tokens)
    assert second.tokens.min() >= FIRST_ID


def test_blocks_that_another_branch_had_first_stay_as_they_are() -> None:
    store = blocks()
    outputs = {0: output_ids(0, 30)}
    _, second = play(make_branch((100, [1]), (250, [1, 2, 3])), store, outputs)
    sibling = make_branch((100, [1]), (250, [1, 2, 3]), index=1)
    again, repeated = play(sibling, store, {0: output_ids(5, 30)})
    assert np.array_equal(repeated.tokens[:192], second.tokens[:192])
    assert np.array_equal(repeated.tokens[:100], again.tokens)


def test_compaction_and_a_side_request_take_no_output() -> None:
    branch = make_branch((200, [1, 2, 3]), (70, [9]), (300, [1, 2, 3, 4]), (130, [1, 20]))
    outputs = {i: output_ids(i, 40) for i in range(4)}
    first, side, third, compacted = play(branch, blocks(), outputs)
    assert side.tokens.min() >= FIRST_ID
    assert np.array_equal(third.tokens[:240], np.concatenate((first.tokens, outputs[0])))
    assert common_prefix(compacted.tokens, third.tokens) == 64


def test_shared_blocks_are_the_same_whatever_was_answered() -> None:
    branch = make_branch((100, [1]), (250, [1, 2, 3]))
    plain = play(branch, blocks("pass", "shared"))
    answered = play(branch, blocks("pass", "shared"), {0: output_ids(0, 30)})
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(plain, answered, strict=True))


@st.composite
def conversations(draw: st.DrawFn) -> list[Branch]:
    """Two branches of one session over one tree of chained blocks."""
    children: dict[tuple[int, ...], int] = {}

    def path(parts: list[int]) -> list[int]:
        ids, key = [], ()
        for part in parts:
            key = (*key, part)
            ids.append(children.setdefault(key, len(children) + 1))
        return ids

    branches = []
    for index in range(2):
        prompts: list[tuple[int, list[int]]] = []
        parts: list[int] = []
        for _ in range(draw(st.integers(1, 6))):
            parts = parts[: draw(st.integers(0, len(parts)))] if draw(st.booleans()) else list(parts)
            parts += draw(st.lists(st.integers(0, 1), max_size=4))
            tail = draw(st.integers(0 if parts else 1, SIZE - 1))
            prompts.append((len(parts) * SIZE + tail, path(parts)))
        branches.append(make_branch(*prompts, index=index))
    return branches


@settings(max_examples=150, deadline=None)
@given(conversations(), st.lists(st.integers(0, 200), min_size=12, max_size=12), st.sampled_from([16, 64]))
def test_any_session_keeps_lengths_and_sharing(
    branches: list[Branch], lengths: list[int], page_size: int
) -> None:
    store = blocks()
    prompts: list[TokenArray] = []
    paths = []
    cache, pages, known = IdealCache(), set(), set()
    for branch in branches:
        maker = BranchPrompts(store, branch)
        ideal = IdealBranch(cache, page_size)
        made: list[TokenArray] = []
        for number, (step, path) in enumerate(zip(branch.steps, branch.paths(), strict=True)):
            prompt = maker.next()
            tokens = prompt.tokens
            assert tokens.size == step.prompt_tokens
            assert json.loads(b"[" + prompt.text + b"]") == tokens.tolist()
            if number:
                assert common_prefix(tokens, made[-1]) >= prompt.common
            begun = step.continues >= 0 and branch.steps[step.continues].prompt_tokens // SIZE
            if step.continues >= 0 and path.size > begun and path[begun] not in known:
                assert np.array_equal(tokens[: made[step.continues].size], made[step.continues])
            for other, other_path in zip(prompts, paths, strict=True):
                shared = common_blocks(path, other_path)
                common = common_prefix(tokens, other)
                assert common >= shared * SIZE
                if shared < min(path.size, other_path.size):
                    # Two blocks with one beginning differ in what was answered, at the latest.
                    assert common < (shared + 1) * SIZE
            # The ideal cache against a plain one that hashes everything.
            hashes = page_hashes(tokens, page_size).tolist()
            held = next((i for i, page in enumerate(hashes) if page not in pages), len(hashes))
            expected = min(held, (tokens.size - 1) // page_size) * page_size
            assert ideal.send(prompt) == expected
            pages.update(hashes)
            output = output_ids(number, lengths.pop())
            maker.output(number, output.tolist())
            ideal.output(output)
            pages.update(page_hashes(np.concatenate((tokens, output)), page_size).tolist())
            made.append(tokens)
            prompts.append(tokens)
            paths.append(path)
            known.update(path.tolist())
