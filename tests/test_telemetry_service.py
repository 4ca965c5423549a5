"""The telemetry process against a real Redis: slices once and whole over restarts, summary, events, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest

from services.telemetry.service import TelemetryService
from services.telemetry.settings import TelemetrySettings
from shared.bus import Bus
from shared.clock import Clock
from shared.config import ConfigError, load
from shared.messages import (
    Iteration,
    Iterations,
    NodeState,
    Outcome,
    Phase,
    QueuedPrefill,
    RequestDone,
    RoleAck,
    RolePlan,
    RoleStage,
    Slice,
)
from tests.conftest import end, eventually, running
from tests.planner_cases import BOTH, D, P, node_info

SPEEDUP = 60.0  # a slice of 60 cluster seconds ends every wall second


class Cluster:
    """Workers and a router, as telemetry sees them; times are the cluster's own."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.clock = bus, Clock(SPEEDUP)
        self.out = {name: bus.publisher(name, "test") for name in ("requests", "iterations", "roles")}
        self.out |= {f"state:{node}": bus.publisher(f"state:{node}", "test") for node in ("n1", "n2")}

    async def join(self) -> None:
        await self.bus.register_node(node_info("n1", P), 600.0)
        await self.bus.register_node(node_info("n2", D), 600.0)

    def state(self, node: str, phase: Phase, t: float, decodes: int = 0, queue: int = 0) -> None:
        rids = [f"r{i}" for i in range(decodes)]
        waiting = [QueuedPrefill(f"q{i}", 100, 0) for i in range(queue)]
        state = NodeState(node, t, phase, 1, False, t, [], waiting, rids, 1000 * decodes, 5, 7, 30, 20)
        self.out[f"state:{node}"].publish(state)

    def done(self, t_end: float, outcome: Outcome = Outcome.OK) -> None:
        self.out["requests"].publish(
            RequestDone(
                "r", "b", outcome, t_end - 10, t_end - 9, t_end - 8, t_end - 7, t_end, 1000, 800, 100, 50, 100,
                50, "n1", "n2",
            )
        )  # fmt: skip

    def prefilled(self, t: float) -> None:
        record = Iteration(P, 1, 2, 4000, 1e6, 600, 0, 0.5, 800, 1)
        self.out["iterations"].publish(Iterations("n1", t, P, [record]))

    async def flush(self) -> None:
        for publisher in self.out.values():
            await publisher.flush()

    async def slices(self) -> list[Slice]:
        return [event.message for event in await self.bus.last("windows", 1000)]


@pytest.fixture
async def cluster(redis_url: str, cluster_name: str) -> AsyncIterator[Cluster]:
    bus = await Bus.connect(redis_url, cluster_name)
    made = Cluster(bus)
    tasks = [asyncio.create_task(publisher.run()) for publisher in made.out.values()]
    try:
        yield made
    finally:
        await end(tasks)
        await bus.close()


@pytest.fixture
def settings(redis_url: str, cluster_name: str) -> TelemetrySettings:
    return TelemetrySettings(redis=redis_url, cluster=cluster_name, speedup=SPEEDUP, grace_s=0.5)


async def get(service: TelemetryService, path: str) -> bytes:
    async with service.http.get(service.url + path) as answer:
        assert answer.status == 200
        return await answer.read()


async def summary(service: TelemetryService) -> dict[str, object]:
    return msgspec.json.decode(await get(service, "/v1/summary"))


async def on_the_grid(cluster: Cluster, *, after: float) -> float:
    """Wait until a slice has begun that starts at or after `after`; its start."""
    await eventually(lambda: cluster.clock.now() // 60 * 60 >= after)
    return cluster.clock.now() // 60 * 60


async def test_records_become_slices(cluster, settings):
    settings = msgspec.structs.replace(settings, grace_s=2.0)
    await cluster.join()
    async with running(TelemetryService(settings)) as telemetry:
        await eventually(lambda: {"state:n1", "state:n2"} <= telemetry._reader.positions.keys())
        await asyncio.sleep(0.05)
        t0 = await on_the_grid(cluster, after=cluster.clock.now())
        # All of one slice, told at once at its start.
        cluster.state("n2", D, t0, decodes=6)
        cluster.state("n2", D, t0 + 30, decodes=2)
        cluster.state("n2", D, t0 + 59, decodes=0)
        cluster.state("n1", P, t0 + 1, queue=3)
        for i in range(5):
            cluster.done(t0 + 10 + i)
        cluster.prefilled(t0 + 20)
        cluster.prefilled(t0 + 21)
        got = await eventually(lambda: _slice_at(cluster, t0))
    assert (got.t1, got.requests, got.t_uc, got.t_c, got.t_out, got.t_acc) == (t0 + 60, 5, 200, 800, 100, 2)
    assert got.pairs == 200 * 800 + 200 * 201 / 2
    assert got.in_decode == pytest.approx((6 * 30 + 2 * 29) / 60)
    nodes = {node.node: node for node in got.nodes}
    assert (nodes["n1"].t_bar, nodes["n1"].f, nodes["n1"].iterations) == (4000.0, 0.75, 2)
    assert (nodes["n2"].phase, nodes["n2"].iterations) == (D, 0)


async def _slice_at(cluster: Cluster, t0: float) -> Slice | None:
    return next((s for s in await cluster.slices() if s.t0 == t0), None)


async def test_a_restart_publishes_each_slice_once_and_whole(cluster, settings, cluster_name, redis_url):
    """Killed in the middle of a slice, started again after it: that slice has what came before, while and after."""
    await cluster.join()
    flags = ["--redis", redis_url, "--cluster", cluster_name, "--port", "0", "--speedup", str(SPEEDUP)]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.telemetry",
        *flags,
        "--grace-s=2",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await eventually(cluster.slices)
        t0 = await on_the_grid(cluster, after=(await cluster.slices())[-1].t1 + 60)
        cluster.state("n2", D, t0, decodes=4)
        cluster.done(t0 + 5)
        cluster.prefilled(t0 + 6)
        await cluster.flush()
        await asyncio.sleep(0.3)
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    before = await cluster.slices()
    cluster.done(t0 + 30)
    for i in range(2000):  # more than one read brings
        cluster.prefilled(t0 + 31 + i * 1e-3)
    cluster.state("n2", D, t0 + 50, decodes=0)
    await cluster.flush()
    await eventually(lambda: cluster.clock.now() > t0 + 100)
    async with running(TelemetryService(settings)):
        got = await eventually(lambda: _slice_at(cluster, t0))
        await eventually(lambda: _slice_at(cluster, t0 + 120))
    assert (got.requests, got.in_decode) == (2, pytest.approx(4 * 50 / 60))
    assert {node.node: node.iterations for node in got.nodes} == {"n1": 2001, "n2": 0}
    after = await cluster.slices()
    assert after[: len(before)] == before
    starts = [part.t0 for part in after]
    assert starts == [starts[0] + 60 * i for i in range(len(starts))]  # none twice, none left out


async def test_a_first_start_makes_no_slice_of_the_past(cluster, settings):
    t = cluster.clock.now()
    cluster.done(t - 100)
    await cluster.flush()
    async with running(TelemetryService(settings)) as telemetry:
        await eventually(cluster.slices)
        assert (await summary(telemetry))["requests"] == 1  # but the picture shows it
    assert min(part.t0 for part in await cluster.slices()) >= t


async def test_the_summary_shows_nodes_rates_and_splits(cluster, settings):
    await cluster.join()
    now = cluster.clock.now()
    cluster.out["roles"].publish(RolePlan(1, {"n1": BOTH, "n2": BOTH}, "warm-up", now - 900))
    cluster.out["roles"].publish(RolePlan(2, {"n1": P, "n2": D}, "warm-up ended", now - 800))
    await cluster.flush()
    async with running(TelemetryService(settings)) as telemetry:
        await eventually(lambda: len(telemetry._reader.positions) == 5)
        now = cluster.clock.now()
        cluster.state("n1", P, now, queue=3)
        cluster.state("n2", D, now, decodes=5)
        for i in range(10):
            cluster.done(now - i)
        cluster.done(now, Outcome.FAILED)
        cluster.out["roles"].publish(RolePlan(3, {"n1": D, "n2": P}, "swapped", now))
        cluster.out["roles"].publish(RoleAck("n1", 3, D, RoleStage.SWITCHED, now, 2.0, 0.7))
        got = await eventually(lambda: _seen(telemetry, requests=11, epoch=3))
    assert (got["split"], got["failed"], got["switches"], got["node_switches"]) == ("1P1D", 1, 1, 2)
    assert [split[1:] for split in got["splits"]] == [[1, 1]]
    assert got["switched"][0][1:] == ["n1", "decode", 2.0, 0.7]
    assert got["kv_hit_rate"] == 0.8 and got["ttft_s"]["p95"] == pytest.approx(3.0)
    one, two = got["nodes"]
    assert (one["node"], one["phase"], one["planned"], one["queue"]) == ("n1", "prefill", "decode", 3)
    assert (two["decodes"], two["l1_pages"], two["l2_pages"], two["l2_counted_pages"]) == (5, 7, 30, 20)


async def _seen(service: TelemetryService, **values: object) -> dict[str, object] | None:
    got = await summary(service)
    ready = all(got[key] == value for key, value in values.items())
    reported = len(got["nodes"]) == 2 and all(node["age_s"] is not None for node in got["nodes"])
    return got if ready and reported else None


async def test_metrics_have_standard_names(cluster, settings):
    await cluster.join()
    cluster.done(cluster.clock.now())  # before the start: in the picture, not in the counters
    await cluster.flush()
    async with running(TelemetryService(settings)) as telemetry:
        await eventually(lambda: len(telemetry._reader.positions) == 5)
        now = cluster.clock.now()
        cluster.state("n1", P, now, queue=3)
        cluster.state("n2", D, now, decodes=5)
        cluster.done(now)
        cluster.done(now, Outcome.CLIENT_GONE)
        await eventually(lambda: _seen(telemetry, requests=3))

        text = (await get(telemetry, "/metrics")).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    want = {
        'ei_requests_total{outcome="ok"}': 1,
        'ei_requests_total{outcome="client_gone"}': 1,
        'ei_requests_total{outcome="failed"}': 0,
        "ei_ttft_seconds_count": 1,
        "ei_ttft_seconds_sum": 3,
        "ei_tpot_seconds_count": 1,
        "ei_e2e_seconds_sum": 10,
        'ei_tokens_total{kind="prompt"}': 1000,
        'ei_tokens_total{kind="cached"}': 800,
        'ei_tokens_total{kind="fetched"}': 100,
        'ei_tokens_total{kind="output"}': 100,
        'ei_node_queue{node="n1"}': 3,
        'ei_node_decodes{node="n2"}': 5,
        'ei_node_phase{node="n1",phase="prefill"}': 1,
        'ei_node_phase{node="n1",phase="decode"}': 0,
        'ei_node_pages{node="n2",tier="l2_counted"}': 20,
        'ei_split_nodes{phase="decode"}': 1,
        "ei_switches_total": 0,
        "ei_kv_hit_rate": 0.8,
    }
    assert {name: float(lines[name]) for name in want} == pytest.approx(want)


async def test_events_deliver_a_summary_a_second_and_end_with_the_service(cluster, settings):
    await cluster.join()
    async with running(TelemetryService(settings)) as telemetry:
        assert telemetry._summary == b""  # nothing is put together while nobody listens
        async with aiohttp.ClientSession() as http, http.get(telemetry.url + "/events") as answer:
            assert answer.content_type == "text/event-stream"
            events: list[tuple[str, object]] = []

            async def read() -> None:
                name = ""
                async for line in answer.content:
                    if line.startswith(b"event: "):
                        name = line[7:].strip().decode()
                    elif line.startswith(b"data: "):
                        events.append((name, msgspec.json.decode(line[6:])))

            reading = asyncio.create_task(read())
            await eventually(lambda: [name for name, _ in events].count("summary") >= 3)
            await eventually(lambda: "points" in [name for name, _ in events])
            assert events[0][0] == "history"
            history = events[0][1]
            points = history["points"] + [p for name, data in events if name == "points" for p in data]
            assert all(len(point) == len(history["fields"]) for point in points)
            times = [point[history["fields"].index("t")] for point in points]
            assert times == sorted(set(times))
            summaries = [data for name, data in events if name == "summary"]
            assert [node["node"] for node in summaries[-1]["nodes"]] == ["n1", "n2"]
            assert summaries[-1]["t"] > summaries[0]["t"]
            telemetry.stop()
            await asyncio.wait_for(reading, 5.0)


async def test_more_listeners_than_allowed_are_refused_until_one_leaves(cluster, settings):
    settings = msgspec.structs.replace(settings, max_listeners=1)
    async with running(TelemetryService(settings)) as telemetry, aiohttp.ClientSession() as http:
        first = await http.get(telemetry.url + "/events")
        await eventually(lambda: telemetry._listeners == 1)
        async with http.get(telemetry.url + "/events") as second:
            assert second.status == 503
        first.close()
        await eventually(lambda: telemetry._listeners == 0)
        async with http.get(telemetry.url + "/events") as third:
            assert third.status == 200


async def test_the_page_is_served_and_may_load_nothing_from_outside(cluster, settings):
    async with (
        running(TelemetryService(settings)) as telemetry,
        telemetry.http.get(telemetry.url + "/") as answer,
    ):
        assert answer.status == 200 and answer.content_type == "text/html"
        policy = answer.headers["Content-Security-Policy"]
        html = await answer.text()
    assert "default-src 'none'" in policy and "http" not in policy
    outside = html.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert "http://" not in outside and "https://" not in outside and "//cdn" not in outside
    assert "<link" not in outside.replace('<link rel="icon" href="data:,">', "")
    assert "src=" not in outside and "@import" not in outside and "innerHTML" not in outside


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--slice-s", "0"], "slice_s must be above 0"),
        (["--grace-s", "-1"], "grace_s"),
        (["--max-listeners", "0"], "max_listeners"),
        (["--slices", "3"], "unrecognized"),
    ],
)
def test_bad_settings_are_one_clear_line(flags, words):
    with pytest.raises(ConfigError, match=words):
        load(TelemetrySettings, "telemetry", flags, environ={})
