"""Readers of recorded traces: Weka, Trie and Mooncake, told apart by their first record.

Rules that hold here
- A file is JSON lines, one JSON array of records, or one record; plain, gzip or xz, told apart by its bytes. A
  folder is its trace files in order of their names.
- Anything that cannot be played raises TraceError with the file, the line (or the record's number in an array)
  and what was wrong. Nothing is skipped in silence but empty lines and sessions without requests.
- Weka: a record is a session. Sub-agents may run at once and nest. Inner times count from the sub-agent's
  spawn or from the session's start; the files do not say which, the caller does.
- Trie: a record is a session of one branch; each prompt is the one before, its answer and a tool's output.
- Mooncake: a record is a session of one request; its blocks are shared by the whole trace. The recorded
  arrival times are not used: the load test is a closed loop.
"""

from __future__ import annotations

import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import msgspec
import numpy as np

from loadtest.traces import (
    Branch,
    InnerT,
    Recorded,
    Scope,
    Session,
    Spawned,
    StepRef,
    Trace,
    TraceError,
    build_branch,
)

TRIE_BLOCK_TOKENS = 64
MOONCAKE_BLOCK_TOKENS = 512

_SUFFIXES = (".jsonl", ".json", ".gz", ".xz")
_KNOWN = (
    "Weka (requests, block_size), Trie (num_turns, input_prompt_length),"
    " Mooncake (timestamp, input_length, hash_ids)"
)


# --------------------------------------------------------------------------------- what the formats hold


class _WekaEntry(msgspec.Struct, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    """A request, or a sub-agent (type "subagent") with requests of its own."""

    t: float
    type: str = "n"
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    hash_ids: list[int] | None = None
    api_time: float | None = None
    agent_id: str | None = None
    requests: list[_WekaEntry] | None = None


class _WekaRecord(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_WekaEntry]
    hash_id_scope: str = "local"


class _TrieRecord(msgspec.Struct):
    num_turns: int
    input_prompt_length: int
    assistant_response_length: list[int]
    tool_call_output_length: list[int]
    tool_call_latency: list[float]
    final_assistant_response_length: int


class _MooncakeRecord(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class _BadRecord(Exception):
    """What is wrong with a record; where it stands is added by the reader."""


R = TypeVar("R", bound=msgspec.Struct)


# --------------------------------------------------------------------------------- files


def read_trace(path: str | Path, *, inner_t: InnerT = "spawn") -> Trace:
    """All sessions of a trace file or folder. Raises TraceError.

    inner_t: what the times inside a Weka sub-agent count from.
    """
    path = Path(path)
    convert: Callable[[bytes, str], Session | None] | None = None
    name = ""
    sessions: list[Session] = []
    for file in _files(path):
        for where, raw in _records(file):
            try:
                if convert is None:
                    name, convert = _detect(raw, inner_t)
                session = convert(raw, where)
            except _BadRecord as error:
                raise TraceError(f"{file}: {where}: {error}") from None
            except msgspec.ValidationError as error:
                raise TraceError(f"{file}: {where}: not a {name} record: {error}") from None
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceError(f"{file}: {where}: not JSON: {error}") from None
            if session is not None:
                sessions.append(session)
    if not sessions:
        raise TraceError(f"{path}: holds no requests")
    return Trace(path=str(path), format=name, sessions=sessions)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise TraceError(f"{path}: there is no such file")
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES))
    if not files:
        raise TraceError(f"{path}: the folder holds no trace file ({', '.join(_SUFFIXES)})")
    return files


def _open(path: Path) -> BinaryIO:
    with open(path, "rb") as file:
        magic = file.read(6)
    if magic.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    if magic.startswith(b"\xfd7zXZ\x00"):
        return cast(BinaryIO, lzma.open(path, "rb"))
    return open(path, "rb")


def _records(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each record's place and JSON text."""
    where = "line 1"
    try:
        with _open(path) as file:
            first = b""
            number = 0
            while not first:
                line = file.readline()
                if not line:
                    return
                first, number = line.strip(), number + 1
            where = f"line {number}"
            if first.startswith(b"[") or (first.startswith(b"{") and not _is_json(first)):
                rest = file.read()
                if first.startswith(b"[") or rest.lstrip()[:1] not in (b"{", b""):
                    yield from _document(path, first + b"\n" + rest)
                    return
                file = io.BytesIO(rest)
            yield where, first
            for at, raw in enumerate(file, number + 1):
                where = f"line {at}"
                if raw := raw.strip():
                    yield where, raw
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: after {where}: the archive is truncated or damaged: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _document(path: Path, text: bytes) -> Iterator[tuple[str, bytes]]:
    """The records of a file that is one JSON value over several lines: an array, or a single record."""
    try:
        if not text.startswith(b"["):
            yield "record 1", bytes(msgspec.json.decode(text, type=msgspec.Raw))
            return
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}: line 1: not JSON: {error}") from None
    for number, item in enumerate(items, 1):
        yield f"record {number}", bytes(item)


def _detect(raw: bytes, inner_t: InnerT) -> tuple[str, Callable[[bytes, str], Session | None]]:
    try:
        keys = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).keys()
    except msgspec.ValidationError:
        raise _BadRecord(f"not a trace: a record is a JSON object. Known formats: {_KNOWN}") from None
    if {"requests", "block_size"} <= keys:
        return "Weka", lambda text, where: read_weka(text, inner_t)
    if {"num_turns", "input_prompt_length"} <= keys:
        return "Trie", _trie
    if {"timestamp", "input_length", "hash_ids"} <= keys:
        return "Mooncake", _mooncake
    shown = ", ".join(list(keys)[:8]) or "none"
    raise _BadRecord(f"not a trace: the first record's keys are {shown}. Known formats: {_KNOWN}")


# --------------------------------------------------------------------------------- Weka

_weka_decoder = msgspec.json.Decoder(_WekaRecord)


def read_weka(raw: bytes, inner_t: InnerT) -> Session | None:
    """The session of one Weka record, None when it has no request. Raises _BadRecord and msgspec's errors."""
    record = _weka_decoder.decode(raw)
    if record.block_size < 1:
        raise _BadRecord(f"block_size is {record.block_size}, it must be at least 1")
    reader = _WekaSession(record, inner_t)
    reader.branch("main", -1, record.requests, 0.0)
    if not reader.branches:
        return None
    scope: Scope = "local" if record.hash_id_scope == "local" else "shared"
    return Session(id=record.id, block_size=record.block_size, scope=scope, branches=reader.branches)


class _WekaSession:
    def __init__(self, record: _WekaRecord, inner_t: InnerT) -> None:
        self.branches: list[Branch] = []
        self._block_size = record.block_size
        self._inner_t = inner_t
        self._keys: set[str] = set()

    def branch(
        self,
        key: str,
        parent: int,
        entries: list[_WekaEntry],
        base_s: float,
        after: tuple[StepRef, ...] = (),
        after_s: float | None = None,
    ) -> tuple[StepRef, float] | None:
        """Adds a branch and its sub-agents'; its last step and when that ended. None, and nothing added, when
        it has no request of its own."""
        entries = sorted(entries, key=lambda entry: entry.t)
        if after_s is None:
            after_s = base_s + entries[0].t if entries else base_s
        own = [entry for entry in entries if entry.type != "subagent"]
        spawns = [entry for entry in entries if entry.type == "subagent"]
        records = [self._request(entry, base_s) for entry in own]
        if not records:
            if any(spawn.requests for spawn in spawns):
                raise _BadRecord(f"branch {key} has sub-agents but no request of its own")
            return None
        index = len(self.branches)
        self.branches.append(Branch(key=self._unique(key), parent=parent, steps=[]))
        subagents = []
        for number, entry in enumerate(spawns, 1):
            spawn_s = base_s + entry.t
            inner_base_s = spawn_s if self._inner_t == "spawn" else 0.0
            inner = entry.requests or []
            if inner and self._inner_t == "session" and min(i.t for i in inner) < entry.t - 1.0:
                raise _BadRecord(
                    f"sub-agent {entry.agent_id} has a request at {min(i.t for i in inner):g} s, before its"
                    f" spawn at {entry.t:g} s: inner times seem to count from the spawn, not the session"
                )
            before = sum(record.start_s <= spawn_s for record in records) - 1
            spawned = self.branch(
                entry.agent_id or f"{key}-sub{number}",
                index,
                inner,
                inner_base_s,
                (StepRef(index, before),) if before >= 0 else after,
                records[before].end_s if before >= 0 else after_s,
            )
            if spawned is not None:
                subagents.append(Spawned(before, *spawned))
        self.branches[index] = build_branch(
            self.branches[index].key,
            index,
            parent,
            records,
            block_size=self._block_size,
            spawned_after=after,
            spawned_after_s=after_s,
            subagents=subagents,
        )
        return StepRef(index, len(records) - 1), max(record.end_s for record in records)

    def _unique(self, key: str) -> str:
        """A branch's key is part of a header: plain characters only, and no two alike in a session."""
        key = re.sub(r"[^A-Za-z0-9._-]", "_", key)[:64] or "branch"
        unique, number = key, 1
        while unique in self._keys:
            number += 1
            unique = f"{key}.{number}"
        self._keys.add(unique)
        return unique

    def _request(self, entry: _WekaEntry, base_s: float) -> Recorded:
        if entry.prompt_tokens is None or entry.output_tokens is None or entry.hash_ids is None:
            raise _BadRecord(f"the request at {entry.t:g} s lacks in, out or hash_ids")
        what = f"the request at {entry.t:g} s"
        start_s = base_s + entry.t
        return _recorded(
            what,
            start_s,
            start_s + max(0.0, entry.api_time or 0.0),
            entry.prompt_tokens,
            entry.output_tokens,
            entry.hash_ids,
            self._block_size,
        )


def _recorded(
    what: str,
    start_s: float,
    end_s: float,
    prompt_tokens: int,
    output_tokens: int,
    ids: list[int],
    block_size: int,
) -> Recorded:
    if prompt_tokens < 1 or output_tokens < 0:
        raise _BadRecord(f"{what} has {prompt_tokens} input and {output_tokens} output tokens")
    full, started = prompt_tokens // block_size, -(-prompt_tokens // block_size)
    if len(ids) not in (full, started):
        needed = f"{full}" if full == started else f"{full} or {started}"
        raise _BadRecord(
            f"{what} has {len(ids)} hash_ids for {prompt_tokens} tokens; blocks of {block_size} need {needed}"
        )
    try:
        block_ids = np.array(ids, dtype=np.int64)
    except OverflowError:
        raise _BadRecord(f"{what} has a hash id of more than 64 bits") from None
    return Recorded(start_s, end_s, prompt_tokens, output_tokens, block_ids)


# --------------------------------------------------------------------------------- Trie, Mooncake

_trie_decoder = msgspec.json.Decoder(_TrieRecord)
_mooncake_decoder = msgspec.json.Decoder(_MooncakeRecord)


def _trie(raw: bytes, where: str) -> Session:
    record = _trie_decoder.decode(raw)
    lists = (record.assistant_response_length, record.tool_call_output_length, record.tool_call_latency)
    if any(len(values) != record.num_turns for values in lists):
        raise _BadRecord(
            f"num_turns is {record.num_turns}, but the turns' lists have "
            + ", ".join(str(len(values)) for values in lists)
        )
    if record.input_prompt_length < 1 or any(value < 0 for values in lists for value in values):
        raise _BadRecord("a length or latency is negative, or the first prompt is empty")
    if record.final_assistant_response_length < 0:
        raise _BadRecord("final_assistant_response_length is negative")
    prompt_tokens, now_s = record.input_prompt_length, 0.0
    records = []
    outputs = [*record.assistant_response_length, record.final_assistant_response_length]
    for turn, output_tokens in enumerate(outputs):
        blocks = np.arange(prompt_tokens // TRIE_BLOCK_TOKENS, dtype=np.int64)
        records.append(Recorded(now_s, now_s, prompt_tokens, output_tokens, blocks))
        if turn < record.num_turns:
            # An answer of no token is asked for as one token, so that the next prompt has room for it.
            prompt_tokens += max(1, output_tokens) + record.tool_call_output_length[turn]
            now_s += record.tool_call_latency[turn]
    branch = build_branch("main", 0, -1, records, block_size=TRIE_BLOCK_TOKENS, least_blocks=0)
    name = where.replace(" ", "-")
    return Session(id=name, block_size=TRIE_BLOCK_TOKENS, scope="local", branches=[branch])


def _mooncake(raw: bytes, where: str) -> Session:
    record = _mooncake_decoder.decode(raw)
    recorded = _recorded(
        "the request",
        0.0,
        0.0,
        record.input_length,
        record.output_length,
        record.hash_ids,
        MOONCAKE_BLOCK_TOKENS,
    )
    branch = build_branch("main", 0, -1, [recorded], block_size=MOONCAKE_BLOCK_TOKENS)
    name = where.replace(" ", "-")
    return Session(id=name, block_size=MOONCAKE_BLOCK_TOKENS, scope="shared", branches=[branch])
