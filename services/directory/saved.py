"""What the directory keeps in Redis, record by record: how it is written and read.

Rules that hold here
- Records are msgpack arrays: fields are added at the end, with a default.
- What cannot be read costs only itself: a branch, a node, the positions; the rest is read.
- No I/O.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from services.directory.paths import SegmentRecord
from shared.messages import Phase
from shared.store import Stored
from shared.streams import is_position


class NodeRecord(msgspec.Struct, array_like=True):
    """What is kept of a node. `position` and `seq`: its last kv event that was applied."""

    incarnation: str
    phase: Phase
    epoch: int = 0
    started_t: float = 0.0
    position: str = "0"
    seq: int = 0


class CountedRecord(msgspec.Struct, array_like=True):
    pages: int
    phases: int
    holes: list[int] = []


class BranchRecord(msgspec.Struct, array_like=True):
    """What is kept of a branch. Its path is the first `path_pages` pages on the way to the end of `segment`.
    `placed`: time and node of its last placement, by phase."""

    version: int
    segment: int
    path_pages: int
    last_t: float
    request_t: float
    placed: dict[Phase, tuple[float, str]]
    counted: dict[str, CountedRecord]
    pending: dict[Phase, str]


class Damage(NamedTuple):
    """What a restore could not use or found wrong."""

    branches: int  # records that cannot be read, or whose path is damaged
    segments: int
    counts: int  # saved counts that differ from what the branch records say
    others: int = 0  # nodes, positions and numbers

    def __bool__(self) -> bool:
        return any(self)


class Saved(msgspec.Struct):
    """A state as it was read. Damaged: what has no record here."""

    nodes: dict[str, NodeRecord] = {}
    branches: dict[str, BranchRecord] = {}
    segments: dict[int, SegmentRecord] = {}  # one that cannot be read is there, with no page
    streams: dict[str, str] = {}  # position on each
    producers: dict[str, int] = {}
    ended: dict[str, float] = {}
    damaged_nodes: set[str] = set()
    damaged_branches: set[str] = set()
    damaged_others: int = 0  # nodes, positions and numbers


_branch_records = msgspec.msgpack.Decoder(BranchRecord)
_segment_records = msgspec.msgpack.Decoder(SegmentRecord)
_node_records = msgspec.msgpack.Decoder(NodeRecord)
FIELDS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "streams": msgspec.msgpack.Decoder(dict[str, str]),
    "producers": msgspec.msgpack.Decoder(dict[str, int]),
    "ended": msgspec.msgpack.Decoder(dict[str, float]),
}
encode = msgspec.msgpack.Encoder().encode


def read(stored: Stored) -> Saved:
    """All records that can be read."""
    saved = Saved()
    for field, blob in stored.state.items():
        try:
            if field.startswith("node:"):
                record = _node_records.decode(blob)
                if not is_position(record.position):
                    raise ValueError(record.position)
                saved.nodes[field.removeprefix("node:")] = record
            elif field in FIELDS:
                setattr(saved, field, FIELDS[field].decode(blob))
        except (msgspec.MsgspecError, ValueError):
            saved.damaged_others += 1
            if field.startswith("node:"):
                saved.damaged_nodes.add(field.removeprefix("node:"))
    saved.streams = {name: at for name, at in saved.streams.items() if is_position(at)}
    for number, blob in stored.segments.items():
        try:
            saved.segments[number] = _segment_records.decode(blob)
        except msgspec.MsgspecError:
            saved.segments[number] = SegmentRecord(0, 0, 0)
    for name, blob in stored.branches.items():
        try:
            saved.branches[name] = _branch_records.decode(blob)
        except msgspec.MsgspecError:
            saved.damaged_branches.add(name)
    return saved
