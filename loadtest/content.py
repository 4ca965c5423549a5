"""The tokens of a trace's prompts, and their JSON.

Rules that hold here
- A block's tokens derive from (the instance's name, the block's id, the position in the block), so equal ids
  give equal tokens, and another instance's tokens differ: a session played twice shares nothing with itself.
- Except that the first prompt which goes on from an earlier one of its branch carries that one's actual output
  right after it, as an agent's does, so that the KV of the output can be used again. As much of it as lies in
  positions that no prompt of the instance has had yet; elsewhere the tokens stay what they were.
- A position of a block gets its token when the first prompt with that position is made, and keeps it.
- Blocks of scope "shared" are never changed by outputs: they must be the same in every session.
- Made-up ids lie in [FIRST_ID, VOCABULARY).
- What an instance holds is dropped with its `Blocks`; nothing is kept between instances. No Python work is
  done per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from loadtest.traces import Branch, IdArray, Scope

FIRST_ID = 1024
VOCABULARY = 131072

TokenArray = npt.NDArray[np.int32]

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP_BLOCK, _STEP_POSITION = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)


def derived_tokens(instance: str, block_ids: IdArray, block_size: int) -> TokenArray:
    """int32[len(block_ids), block_size]: the tokens that blocks have before any output goes in."""
    seed = np.frombuffer(blake2b(instance.encode(), digest_size=8).digest(), dtype="<u8")[0]
    ids = block_ids.astype(np.uint64) * _STEP_BLOCK
    positions = np.arange(1, block_size + 1, dtype=np.uint64) * _STEP_POSITION
    # SplitMix64's finaliser; uint64 products wrap, as it wants.
    z = _mixed(ids ^ seed)[:, None] + positions[None, :]
    z = _mixed(z) >> np.uint64(33)
    return (FIRST_ID + z % np.uint64(VOCABULARY - FIRST_ID)).astype(np.int32)


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def json_ids(tokens: TokenArray) -> bytes:
    """Token ids as JSON numbers with commas between, no brackets."""
    return msgspec.json.encode(tokens.tolist())[1:-1]


class Block:
    """Tokens of one block; those of the first `fixed` positions have been in a prompt."""

    __slots__ = ("fixed", "text", "tokens")

    def __init__(self, tokens: TokenArray) -> None:
        self.tokens = tokens
        self.fixed = 0
        self.text = b""  # JSON of a block that is fixed as a whole


class Blocks:
    """The blocks of one instance of a session, shared by its branches."""

    def __init__(self, instance: str, block_size: int, scope: Scope) -> None:
        self.instance = instance
        self.block_size = block_size
        self.takes_output = scope == "local"
        self._blocks: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, ids: Sequence[int]) -> list[Block]:
        """The blocks of these ids, made when they are new."""
        new = [block_id for block_id in dict.fromkeys(ids) if block_id not in self._blocks]
        if new:
            rows = derived_tokens(self.instance, np.array(new, dtype=np.int64), self.block_size)
            self._blocks.update({block_id: Block(row) for block_id, row in zip(new, rows, strict=True)})
        return [self._blocks[block_id] for block_id in ids]


class Prompt(msgspec.Struct, frozen=True):
    """tokens: int32[prompt_tokens]. common: leading tokens equal to the branch's previous prompt, at least.
    text: the ids as JSON numbers with commas between."""

    tokens: TokenArray
    common: int
    text: bytes


class BranchPrompts:
    """The prompts of one branch, made in step order, each with the outputs of the earlier ones in it."""

    def __init__(self, blocks: Blocks, branch: Branch) -> None:
        self._blocks = blocks
        self._branch = branch
        self._next = 0
        self._path: list[Block] = []
        self._tokens: TokenArray = np.empty(0, dtype=np.int32)
        self._outputs: dict[int, TokenArray] = {}
        self._tails: dict[int, TokenArray] = {}  # tokens of the steps' prompts after their full blocks

    def output(self, step: int, token_ids: Sequence[int]) -> None:
        """The actual output of a step whose prompt was made. Without it derived tokens stand in its place."""
        self._outputs[step] = np.array(token_ids, dtype=np.int32)

    def next(self) -> Prompt:
        """The next step's prompt. Raises IndexError after the last one."""
        step = self._branch.steps[self._next]
        self._next += 1
        size = self._blocks.block_size
        fresh = self._blocks.get(step.fresh.tolist())
        path = self._path[: step.shared] + fresh
        tail_tokens = step.prompt_tokens - len(path) * size
        tail = self._blocks.get([step.tail])[0] if tail_tokens else None
        if step.continues >= 0 and self._blocks.takes_output:
            before = self._tails[step.continues]
            start = self._branch.steps[step.continues].prompt_tokens - before.size
            # Taken once: a second prompt that goes on from there differs from the first, so its blocks must.
            output = self._outputs.pop(step.continues, before[:0])
            self._put(np.concatenate((before, output)), start, path, step.shared, tail, tail_tokens)
        for block in fresh:
            if not block.text:
                block.fixed = size
                block.text = json_ids(block.tokens)
        texts = [block.text for block in path]
        parts = [self._tokens[: step.shared * size], *(block.tokens for block in fresh)]
        if tail is not None:
            tail.fixed = max(tail.fixed, tail_tokens)
            parts.append(tail.tokens[:tail_tokens])
            texts.append(json_ids(parts[-1]))
        self._path = path
        self._tokens = np.concatenate(parts)
        self._tails[self._next - 1] = self._tokens[len(path) * size :].copy()
        # Only what a later prompt may go on from is kept.
        used = {later.continues for later in self._branch.steps[self._next :]}
        self._outputs = {made: ids for made, ids in self._outputs.items() if made in used}
        self._tails = {made: ids for made, ids in self._tails.items() if made in used}
        return Prompt(tokens=self._tokens, common=step.shared * size, text=b",".join(texts))

    def _put(
        self,
        tokens: TokenArray,
        start: int,
        path: list[Block],
        first_block: int,
        tail: Block | None,
        tail_tokens: int,
    ) -> None:
        """Write tokens that stand at position `start` into the positions that are not fixed yet."""
        size = self._blocks.block_size
        end = start + tokens.size
        for number in range(max(first_block, start // size), min(len(path), -(-end // size))):
            _write(path[number], size, number * size, start, tokens)
        if tail is not None and end > len(path) * size:
            _write(tail, tail_tokens, len(path) * size, start, tokens)


def _write(block: Block, limit: int, block_start: int, start: int, tokens: TokenArray) -> None:
    first = max(block.fixed, start - block_start)
    last = min(limit, start + tokens.size - block_start)
    if first < last:
        block.tokens[first:last] = tokens[first + block_start - start : last + block_start - start]
