"""A session in Weka's format, as it is written: `loadtest.formats` reads it.

Rules that hold here
- The fields' order is the files' order: it is part of a generated trace, bit for bit.
- Times inside a sub-agent count from its spawn.
"""

from __future__ import annotations

import msgspec


class Request(msgspec.Struct, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    t: float
    type: str
    model: str
    prompt_tokens: int
    output_tokens: int
    hash_ids: list[int]
    stop: str
    api_time: float
    think_time: float

    @property
    def end_s(self) -> float:
        return self.t + self.api_time


class Subagent(msgspec.Struct):
    t: float
    type: str
    agent_id: str
    subagent_type: str
    duration_ms: int
    status: str
    requests: list[Request]


class Record(msgspec.Struct):
    id: str
    models: list[str]
    block_size: int
    hash_id_scope: str
    tool_tokens: int
    system_tokens: int
    requests: list[Request | Subagent]
