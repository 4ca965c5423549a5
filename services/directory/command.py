"""`evolving directory verify` and `evolving directory show BRANCH`: what the directory keeps in Redis, checked and
shown. Both only read."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Annotated

import aiohttp
import msgspec

from services.directory.paths import SegmentRecord
from services.directory.saved import BranchRecord
from services.directory.verify import Paths, Report, verify
from shared.bus import Bus
from shared.config import ClusterSettings, ConfigError, Doc, load
from shared.kvsnapshot import SnapshotError, fetch_snapshot
from shared.messages import KvSnapshot, NodeInfo, Phase
from shared.redis_client import redis_url, safe_url
from shared.service import http_client
from shared.store import DirectoryStore

SHOWN = 20  # differences printed
LISTED = 50  # branches printed
_PHASES = {1: "prefill", 2: "decode", 3: "prefill and decode"}


class VerifySettings(ClusterSettings, kw_only=True):
    json: Annotated[bool, Doc("print the whole report as JSON")] = False
    ask_nodes: Annotated[bool, Doc("ask the nodes what they hold")] = True


class ShowSettings(ClusterSettings, kw_only=True):
    branch: Annotated[str, Doc("the branch's id; none lists the active branches")] = ""
    json: Annotated[bool, Doc("print JSON")] = False


class _Missing(Exception):
    """What was asked for cannot be shown."""


class NodeShown(msgspec.Struct):
    pages: int  # that the branch counts there
    evicted: int  # pages of its path before the last counted one that the node evicted
    phases: str
    least: int  # R of the counted pages
    most: int


class BranchShown(msgspec.Struct):
    branch: str
    version: int
    path_pages: int
    segments: int  # in which they are stored
    last_t: float
    placed: dict[Phase, str]
    moving_to: dict[Phase, str]
    nodes: dict[str, NodeShown]


async def _verify(settings: VerifySettings) -> int:
    bus = await Bus.connect(redis_url(settings), settings.cluster)
    try:
        # Nodes first: what they tell of may be ahead of the directory, never behind it.
        snapshots = await _snapshots(await bus.nodes()) if settings.ask_nodes else {}
        stored = await DirectoryStore(bus).load_at_once()
        if not stored.number:
            raise ConfigError(
                f"no directory has written anything in cluster {settings.cluster!r} at {safe_url(settings.redis)}"
            )
        report = verify(stored, snapshots)
        leads = await bus.leader("directory")
    finally:
        await bus.close()
    if settings.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _print(report, leads)
    return 1 if report.differences else 0


async def _snapshots(nodes: dict[str, NodeInfo]) -> dict[str, KvSnapshot]:
    async def one(http: aiohttp.ClientSession, info: NodeInfo) -> KvSnapshot | None:
        try:
            async with asyncio.timeout(10.0):
                return await fetch_snapshot(http, info)
        except (SnapshotError, TimeoutError):
            return None

    async with http_client() as http:
        found = await asyncio.gather(*(one(http, info) for info in nodes.values()))
    return {node: snapshot for node, snapshot in zip(nodes, found, strict=True) if snapshot is not None}


def _print(report: Report, leads: str | None) -> None:
    print(f"{leads} leads" if leads else "no directory leads now: counts are as the last one left them")
    print(
        f"batch {report.batch}: {_many(report.branches, 'branch', 'branches')}, "
        f"{_many(report.moves, 'move')} under way; paths of {_many(report.path_pages, 'page')} in all, "
        f"stored as {report.stored_pages}"
    )
    if report.nodes:
        print(
            f"{'node':16} {'phase':8} {'branches':>8} {'counted':>9} {'sum of R':>9} {'held':>9} {'absent':>7}"
        )
    for name, node in report.nodes.items():
        held, absent = ("-" if n is None else str(n) for n in (node.held, node.absent))
        print(
            f"{name:16} {node.phase or '?':8} {node.branches:8} {node.counted:9} {node.references:9} "
            f"{held:>9} {absent:>7}"
        )
    apart = [name for name, node in report.nodes.items() if node.held is None]
    if apart:
        print(f"not compared with what the node holds (busy, or no answer): {', '.join(apart)}")
    for difference in report.differences[:SHOWN]:
        print(f"{difference.where}: {difference.what}")
    if len(report.differences) > SHOWN:
        print(f"... and {len(report.differences) - SHOWN} more (--json prints all)")
    found = len(report.differences)
    print("no difference" if not found else _many(found, "difference"))


def _many(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


async def _list(bus: Bus, settings: ShowSettings) -> int:
    records: dict[str, BranchRecord] = {}
    for name, blob in (await DirectoryStore(bus).load_branches()).items():
        with contextlib.suppress(msgspec.MsgspecError):
            records[name] = msgspec.msgpack.decode(blob, type=BranchRecord)
    newest = sorted(records, key=lambda name: -records[name].last_t)
    if settings.json:
        print(msgspec.json.format(msgspec.json.encode(newest)).decode())
        return 0
    print(f"{_many(len(newest), 'active branch', 'active branches')} in cluster {settings.cluster!r}")
    for name in newest[:LISTED]:
        record = records[name]
        nodes = ", ".join(sorted(record.counted))
        print(
            f"  {name}: version {record.version}, {_many(record.path_pages, 'page')} on {nodes or 'no node'}"
        )
    if len(newest) > LISTED:
        print(f"  ... and {len(newest) - LISTED} that were quiet for longer (--json prints all)")
    return 0


async def _show(settings: ShowSettings) -> int:
    bus = await Bus.connect(redis_url(settings), settings.cluster)
    try:
        if not settings.branch:
            return await _list(bus, settings)
        store = DirectoryStore(bus)
        blob = await store.load_branch(settings.branch)
        if blob is None:
            raise _Missing(
                f"no branch {settings.branch!r} is active in cluster {settings.cluster!r} "
                "(evolving directory show lists those that are)"
            )
        record = msgspec.msgpack.decode(blob, type=BranchRecord)
        segments: dict[int, bytes] = {}
        pages: dict[int, bytes] = {}
        number = record.segment
        while number and number not in segments:
            segment, pages[number] = await store.load_segment(number)
            if segment is None:
                break
            segments[number] = segment
            number = msgspec.msgpack.decode(segment, type=SegmentRecord).parent
        path = Paths(segments, pages).path(record.segment, record.path_pages)
        if path is None:
            raise _Missing(
                f"branch {settings.branch!r}: its path is damaged (evolving directory verify tells more)"
            )
        nodes: dict[str, NodeShown] = {}
        for node, c in sorted(record.counted.items()):
            holes = set(c.holes)
            counted = path[[depth for depth in range(c.pages) if depth not in holes]]
            counts = await store.load_counts(node, counted)
            least, most = (int(counts.min()), int(counts.max())) if counts.size else (0, 0)
            nodes[node] = NodeShown(len(counted), len(holes), _PHASES.get(c.phases, "no phase"), least, most)
    except (_Missing, msgspec.MsgspecError) as error:
        text = (
            f"branch {settings.branch!r}: {error}" if isinstance(error, msgspec.MsgspecError) else str(error)
        )
        print(f"evolving: {text}", file=sys.stderr)
        return 1
    finally:
        await bus.close()
    shown = BranchShown(
        branch=settings.branch,
        version=record.version,
        path_pages=record.path_pages,
        segments=len(segments),
        last_t=record.last_t,
        placed={phase: node for phase, (_, node) in record.placed.items()},
        moving_to=record.pending,
        nodes=nodes,
    )
    if settings.json:
        print(msgspec.json.format(msgspec.json.encode(shown)).decode())
        return 0
    print(
        f"branch {shown.branch}: version {shown.version}, {_many(shown.path_pages, 'page')}, "
        f"stored in {_many(shown.segments, 'segment')}"
    )
    for phase, node in shown.placed.items():
        print(f"  last placed for {phase} on {node}")
    for phase, node in shown.moving_to.items():
        print(f"  its {phase} copy moves to {node}, which lacks pages of it")
    for node, found in nodes.items():
        evicted = f", {found.evicted} evicted" if found.evicted else ""
        print(
            f"  {node}: counts {found.pages} pages for {found.phases}{evicted}; "
            f"each is counted by {found.least} to {found.most} branches"
        )
    return 0


def verify_main(argv: list[str]) -> int:
    summary = (
        "Rebuild all counts from the branch records and compare them with Redis; exit code 1 if any differ."
    )
    return asyncio.run(
        _verify(load(VerifySettings, "verify", argv, summary=summary, command="directory verify"))
    )


def show_main(argv: list[str]) -> int:
    summary = "Show a branch's version, path length, nodes and counts, or list the active branches."
    return asyncio.run(
        _show(
            load(
                ShowSettings, "show", argv, positional=("branch",), summary=summary, command="directory show"
            )
        )
    )
