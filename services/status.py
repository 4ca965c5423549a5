"""`evolving status`: nodes, phases, queues, split and KV hit rate, as a table or JSON."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from shared.bus import Bus
from shared.config import ClusterSettings, ConfigError, Doc, load
from shared.messages import NodeInfo, NodeState, Phase, ServiceInfo
from shared.redis_client import redis_url, safe_url
from shared.split import split_text

TIMEOUT_S = 5.0


class StatusSettings(ClusterSettings, kw_only=True):
    json: Annotated[bool, Doc("print JSON")] = False


class NodeLine(msgspec.Struct):
    node: str
    phase: str
    draining: bool
    queue: int
    decodes: int
    decode_tokens: int
    l1_pages: int
    l2_pages: int
    l2_counted_pages: int
    url: str
    epoch: int


class Status(msgspec.Struct):
    cluster: str
    split: str
    prefill: int
    decode: int
    nodes: list[NodeLine]
    services: list[ServiceInfo]
    leaders: list[str] = []  # instances of directory and planner that hold their lease
    kv_hit_rate: float | None = None  # None without telemetry
    req_per_s: float | None = None
    requests: int | None = None
    failed: int | None = None
    switches: int | None = None
    ttft_s: dict[str, float | None] | None = None


class _Summary(msgspec.Struct):
    kv_hit_rate: float | None = None
    req_per_s: float | None = None
    requests: int | None = None
    failed: int | None = None
    switches: int | None = None
    ttft_s: dict[str, float | None] | None = None


def _line(info: NodeInfo, state: NodeState | None) -> NodeLine:
    if state is None:
        return NodeLine(info.node, info.phase, False, 0, 0, 0, 0, 0, 0, info.url, info.epoch)
    return NodeLine(
        info.node,
        state.phase,
        state.draining,
        len(state.queue),
        len(state.decodes),
        state.decode_tokens,
        state.l1_pages,
        state.l2_pages,
        state.l2_counted_pages,
        info.url,
        state.epoch,
    )


async def collect(bus: Bus) -> Status:
    """What the cluster looks like now; measured rates only while telemetry answers. Raises BusError."""
    lines = []
    for name, info in (await bus.nodes()).items():
        events = await bus.last(f"state:{name}", 1)
        state = events[0].message if events and isinstance(events[0].message, NodeState) else None
        lines.append(_line(info, state))
    prefill = sum(Phase(line.phase).prefills for line in lines)
    decode = sum(Phase(line.phase).decodes for line in lines)
    services = await bus.services()
    status = Status(
        cluster=bus.cluster,
        split=split_text({line.node: Phase(line.phase) for line in lines}),
        prefill=prefill,
        decode=decode,
        nodes=lines,
        services=services,
        leaders=[holder for name in ("directory", "planner") if (holder := await bus.leader(name))],
    )
    for service in services:
        if service.service == "telemetry":
            summary = await _summary(service.url)
            if summary is not None:
                for field in summary.__struct_fields__:
                    setattr(status, field, getattr(summary, field))
                break
    return status


async def _summary(url: str) -> _Summary | None:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http,
            http.get(url + "/v1/summary") as answer,
        ):
            return msgspec.json.decode(await answer.read(), type=_Summary)
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
        return None


def _show(status: Status) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(title=f"cluster {status.cluster}: {status.split}", title_justify="left")
    for heading in (
        "node",
        "phase",
        "queue",
        "decodes",
        "context tokens",
        "L1 pages",
        "L2 pages",
        "counted",
        "epoch",
    ):
        table.add_column(heading, justify="left" if heading in ("node", "phase") else "right")
    for line in status.nodes:
        table.add_row(
            line.node,
            line.phase + (" (draining)" if line.draining else ""),
            f"{line.queue}",
            f"{line.decodes}",
            f"{line.decode_tokens:,}",
            f"{line.l1_pages:,}",
            f"{line.l2_pages:,}",
            f"{line.l2_counted_pages:,}",
            f"{line.epoch}",
        )
    console.print(table)
    if status.requests is not None:
        hit = "-" if status.kv_hit_rate is None else f"{status.kv_hit_rate:.1%}"
        rate = "-" if status.req_per_s is None else f"{status.req_per_s:.2f}"
        console.print(
            f"{status.requests} requests, {status.failed} failed, {rate} req/s, KV hit rate {hit}, "
            f"{status.switches} switches"
        )
    running = ", ".join(
        f"{info.service} {info.url}{' (leads)' if info.instance in status.leaders else ''}"
        for info in status.services
    )
    console.print(f"services: {running or 'none'}")


async def _run(settings: StatusSettings) -> int:
    bus = await Bus.connect(redis_url(settings), settings.cluster)
    try:
        status = await collect(bus)
    finally:
        await bus.close()
    if settings.json:
        print(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
    else:
        _show(status)
    if not status.nodes and not status.services:
        raise ConfigError(f"nothing is running in cluster {settings.cluster!r} at {safe_url(settings.redis)}")
    return 0


def main(argv: list[str]) -> int:
    settings = load(
        StatusSettings, "status", argv, summary="Show nodes, phases, queues, split and KV hit rate."
    )
    return asyncio.run(_run(settings))
