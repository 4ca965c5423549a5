"""The workloads by name, and their sessions without end: an experiment replaces each finished agent by a new one.

Rules that hold here
- Session n depends on the workload, the knobs and n only: it may be asked for in any order, any number of times,
  and is made when it is asked for.
- A session is read from its Weka record by the reader of trace files, so it is what a file would have given.
- Sessions of different workloads, seeds or numbers have different ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Literal, get_args

import msgspec

from loadtest.formats import read_weka
from loadtest.traces import Session
from loadtest.workloads import claude_code, codex, osworld, putnam
from loadtest.workloads.profile import Knobs, Profile
from loadtest.workloads.session import session_record

Workload = Literal["claude-code", "codex", "osworld", "putnam"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)

PROFILES: dict[Workload, Profile] = {
    "claude-code": claude_code.PROFILE,
    "codex": codex.PROFILE,
    "osworld": osworld.PROFILE,
    "putnam": putnam.PROFILE,
}


class Agents(Knobs, frozen=True, kw_only=True):
    """An endless row of agents of one workload, numbered from 0."""

    workload: Workload = "claude-code"

    def record(self, number: int) -> bytes:
        """Session `number` as a line of a trace file, without its end."""
        return msgspec.json.encode(session_record(PROFILES[self.workload], self, number))

    def session(self, number: int) -> Session:
        """Session `number`, 0 or more. Raises ValueError below that."""
        if number < 0:
            raise ValueError(f"a session's number is at least 0, not {number}")
        session = read_weka(self.record(number), "spawn")
        assert session is not None  # every session has a request
        return session

    def endless(self, first: int = 0) -> Iterator[Session]:
        """Sessions from `first` on, each made when it is asked for."""
        return map(self.session, count(first))
