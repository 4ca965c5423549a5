"""`evolving directory verify` and `evolving directory show BRANCH`: what the directory keeps in Redis, checked and
shown. Both only read."""

from __future__ import annotations

import asyncio
from typing import Annotated

import aiohttp
import msgspec

from services.directory.core import BranchRecord
from services.directory.paths import SegmentRecord
from services.directory.verify import Paths, Report, verify
from shared.bus import Bus
from shared.config import ClusterSettings, Doc, load
from shared.kvsnapshot import SnapshotError, fetch_snapshot
from shared.messages import KvSnapshot, NodeInfo, Phase
from shared.redis_client import redis_url
from shared.service import http_client

SHOWN = 20  # differences printed
_PHASES = {1: "prefill", 2: "decode", 3: "prefill and decode"}


class VerifySettings(ClusterSettings, kw_only=True):
    json: Annotated[bool, Doc("print the whole report as JSON")] = False
    ask_nodes: Annotated[bool, Doc("ask the nodes what they hold")] = True


class ShowSettings(ClusterSettings, kw_only=True):
    branch: Annotated[str, Doc("the branch's id")] = ""
    json: Annotated[bool, Doc("print JSON")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.branch:
            raise ValueError("give the branch to show")


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
        report = verify(await bus.load_directory_at_once(), snapshots)
    finally:
        await bus.close()
    if settings.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _print(report)
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


def _print(report: Report) -> None:
    print(
        f"batch {report.batch}: {report.branches} branches, {report.moves} moves under way, "
        f"{report.path_pages} pages of paths stored as {report.stored_pages}"
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
    for difference in report.differences[:SHOWN]:
        print(f"{difference.where}: {difference.what}")
    if len(report.differences) > SHOWN:
        print(f"... and {len(report.differences) - SHOWN} more (--json prints all)")
    found = len(report.differences)
    print("no difference" if not found else f"{found} difference{'s' if found > 1 else ''}")


async def _show(settings: ShowSettings) -> int:
    bus = await Bus.connect(redis_url(settings), settings.cluster)
    try:
        blob = await bus.load_branch(settings.branch)
        if blob is None:
            print(f"no branch {settings.branch!r} is active in cluster {settings.cluster!r}")
            return 1
        record = msgspec.msgpack.decode(blob, type=BranchRecord)
        segments: dict[int, bytes] = {}
        pages: dict[int, bytes] = {}
        number = record.segment
        while number and number not in segments:
            segment, pages[number] = await bus.load_segment(number)
            if segment is None:
                break
            segments[number] = segment
            number = msgspec.msgpack.decode(segment, type=SegmentRecord).parent
        path = Paths(segments, pages).path(record.segment, record.path_pages)
        if path is None:
            print(f"branch {settings.branch!r}: its path is damaged (evolving directory verify tells more)")
            return 1
        nodes: dict[str, NodeShown] = {}
        for node, c in sorted(record.counted.items()):
            holes = set(c.holes)
            counted = path[[depth for depth in range(c.pages) if depth not in holes]]
            counts = await bus.load_counts(node, counted)
            least, most = (int(counts.min()), int(counts.max())) if counts.size else (0, 0)
            nodes[node] = NodeShown(len(counted), len(holes), _PHASES[c.phases], least, most)
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
        f"branch {shown.branch}: version {shown.version}, {shown.path_pages} pages in {shown.segments} segments"
    )
    for phase, node in shown.placed.items():
        print(f"  last placed for {phase} on {node}")
    for phase, node in shown.moving_to.items():
        print(f"  its {phase} copy moves to {node}, which lacks pages of it")
    for node, found in nodes.items():
        evicted = f", {found.evicted} evicted" if found.evicted else ""
        print(
            f"  {node}: counts {found.pages} pages for {found.phases}{evicted}; R {found.least} to {found.most}"
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
    summary = "Show a branch's version, path length, nodes and counts."
    return asyncio.run(
        _show(
            load(
                ShowSettings, "show", argv, positional=("branch",), summary=summary, command="directory show"
            )
        )
    )
