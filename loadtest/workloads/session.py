"""One agent's session, from its workload's profile: the same loop for every workload.

Rules that hold here
- A session depends on profile, knobs and number only, bit for bit (with the same version of numpy).
- A prompt goes on from the branch's previous one, with its answer and what a tool or the user added, until the
  context reaches its limit. Then it is compacted: the next prompt keeps the system prompt and the tools only. A
  workload without context management ends there.
- Sub-agents start in groups after a step; the parent waits for them, or, for some groups, goes on beside them.
  A sub-agent shares nothing with its parent; those of one type share system prompt and tools. Its context stops
  growing at the limit.
- Block ids are of the session ("local"): sessions share nothing.
"""

from __future__ import annotations

import numpy as np

from loadtest.workloads.draws import Lognormal
from loadtest.workloads.profile import Knobs, Profile, Subagents
from loadtest.workloads.records import Record, Request, Subagent

BLOCK_TOKENS = 64


def session_record(profile: Profile, knobs: Knobs, number: int) -> Record:
    """Session `number`, 0 or more, of a workload."""
    return _Session(profile, knobs, number).record()


class _Context:
    """The prompt of a branch as it grows."""

    def __init__(self, session: _Session, path: list[int], tokens: int) -> None:
        self._session = session
        self.tokens = tokens
        self.path = path + session.new_blocks(tokens // BLOCK_TOKENS - len(path))

    def grow(self, tokens: int) -> None:
        """Go on from the prompt as it is: its partial last block becomes a new, full one."""
        self.tokens += tokens
        self.path = self.path + self._session.new_blocks(self.tokens // BLOCK_TOKENS - len(self.path))


class _Session:
    def __init__(self, profile: Profile, knobs: Knobs, number: int) -> None:
        self._profile = profile
        self._knobs = knobs
        self._number = number
        self._mean_steps = profile.steps if knobs.steps is None else knobs.steps
        self._random = np.random.Generator(np.random.PCG64([knobs.seed, number, *profile.salt]))
        self._blocks = 0
        self._agents = 0
        self._type_paths: dict[str, list[int]] = {}

    def new_blocks(self, count: int) -> list[int]:
        first = self._blocks + 1
        self._blocks += max(0, count)
        return list(range(first, self._blocks + 1))

    def _scaled(self, tokens: float) -> int:
        return max(BLOCK_TOKENS, round(tokens * self._knobs.context_scale))

    def _steps(self, mean: float) -> int:
        return max(1, round(Lognormal.of_mean(mean, self._profile.steps_sigma).draw(self._random)))

    def _capped_s(self, pause_s: float) -> float:
        return pause_s if self._knobs.max_pause_s is None else min(pause_s, self._knobs.max_pause_s)

    def _request(self, t: float, context: _Context, think_s: float, last: bool) -> Request:
        profile = self._profile
        output = max(1, round(profile.output.draw(self._random)))
        return Request(
            t=round(t, 3),
            type="s",
            model=profile.model,
            prompt_tokens=context.tokens,
            output_tokens=output,
            hash_ids=context.path,
            stop="end_turn" if last else "tool_use",
            api_time=round(profile.first_token_s + profile.token_s * output, 3),
            think_time=round(think_s, 3),
        )

    def record(self) -> Record:
        profile = self._profile
        system, tools = self._scaled(profile.system_tokens), self._scaled(profile.tool_tokens)
        return Record(
            id=f"{profile.name}_{self._knobs.seed}_{self._number:04d}",
            models=[profile.model],
            block_size=BLOCK_TOKENS,
            hash_id_scope="local",
            tool_tokens=tools,
            system_tokens=system,
            requests=sorted(self._entries(system + tools), key=lambda entry: entry.t),
        )

    def _entries(self, kept_tokens: int) -> list[Request | Subagent]:
        profile = self._profile
        kept = self.new_blocks(kept_tokens // BLOCK_TOKENS)
        context = self._first_context(kept, kept_tokens, profile.first_tokens)
        limit = self._scaled(float(self._random.uniform(*profile.limit_tokens)))
        entries: list[Request | Subagent] = []
        steps = self._steps(self._mean_steps)
        t = pause_s = 0.0
        for number in range(steps):
            request = self._request(t, context, pause_s, number == steps - 1)
            entries.append(request)
            if number == steps - 1:
                break
            ready_s = request.end_s
            pause_s = self._capped_s(profile.pause.draw(self._random))
            if profile.subagents is not None and self._random.random() < profile.subagents.spawns:
                group = self._group(profile.subagents, ready_s)
                entries += group
                if self._random.random() >= profile.subagents.background:
                    ready_s = max(sub.t + sub.requests[-1].end_s for sub in group)
            t = ready_s + pause_s
            added = request.output_tokens + round(profile.added.draw(self._random))
            if context.tokens + added <= limit:
                context.grow(added)
            elif profile.compacted_tokens is not None:
                context = self._first_context(kept, kept_tokens, profile.compacted_tokens)
            else:
                request.stop = "end_turn"
                break
        return entries

    def _first_context(self, kept: list[int], kept_tokens: int, mean: float) -> _Context:
        # Drawn within a factor of two, so that a compacted context is well below the limit.
        tokens = self._scaled(mean * float(self._random.uniform(0.5, 1.5)))
        return _Context(self, kept, kept_tokens + tokens)

    def _group(self, subagents: Subagents, ready_s: float) -> list[Subagent]:
        kind = subagents.types[int(self._random.integers(len(subagents.types)))]
        group = []
        for _ in range(int(self._random.integers(1, subagents.largest_group + 1))):
            ready_s += float(self._random.uniform(0.1, 1.0))
            group.append(self._subagent(subagents, kind, ready_s))
        return group

    def _subagent(self, subagents: Subagents, kind: str, spawn_s: float) -> Subagent:
        prefix = self._scaled(subagents.prefix_tokens) // BLOCK_TOKENS
        if kind not in self._type_paths:
            self._type_paths[kind] = self.new_blocks(prefix)
        first = round(prefix * BLOCK_TOKENS / subagents.shared)
        context = _Context(self, self._type_paths[kind], first)
        requests: list[Request] = []
        steps = self._steps(max(2.0, self._mean_steps * subagents.steps))
        limit = self._scaled(self._profile.limit_tokens[0])
        t = pause_s = 0.0
        for number in range(steps):
            request = self._request(t, context, pause_s, number == steps - 1)
            requests.append(request)
            pause_s = self._capped_s(subagents.pause.draw(self._random))
            t = request.end_s + pause_s
            added = request.output_tokens + round(subagents.added.draw(self._random))
            context.grow(min(added, max(0, limit - context.tokens)))
        self._agents += 1
        return Subagent(
            t=round(spawn_s, 3),
            type="subagent",
            agent_id=f"agent_{self._agents:03d}",
            subagent_type=kind,
            duration_ms=round(1000 * requests[-1].end_s),
            status="completed",
            requests=requests,
        )
