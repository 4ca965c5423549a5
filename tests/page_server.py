"""Serves the live page with made-up clusters: `python -m tests.page_server [NODES] [PORT]` to look at it."""

from __future__ import annotations

import asyncio
import math
import random
import sys

import msgspec
from aiohttp import web

from services.telemetry.cluster import ClusterView, Point
from services.telemetry.service import PAGE, PAGE_HEADERS, History
from shared.messages import NodeState, Outcome, QueuedPrefill, RequestDone, RoleAck, RolePlan, RoleStage
from tests.planner_cases import BOTH, D, P, node_info

SPEEDUP = 20.0


def made_up(nodes: int, *, t: float = 50_000.0, names: str = "n{}", seed: int = 1) -> ClusterView:
    """A cluster that has served for two hours, with three splits behind it and one node draining."""
    rng = random.Random(seed)
    view = ClusterView(cluster="main", speedup=SPEEDUP, point_every_s=20.0)
    ids = [names.format(i + 1) for i in range(nodes)]
    view.nodes(
        {node: node_info(node, l1_tokens=2_062_464, l2_tokens=8_249_856, page_size=64) for node in ids}
    )
    prefill = max(1, nodes * 4 // 9)
    for epoch, (at, p) in enumerate(((7000, 0), (5400, max(1, prefill - 1)), (2500, prefill)), start=1):
        phases = {node: BOTH if not p else P if i < p else D for i, node in enumerate(ids)}
        view.planned(RolePlan(epoch, phases, "a better split" if p else "warm-up", t - at))
    view.ack(RoleAck(ids[prefill - 1], 3, P, RoleStage.SWITCHED, t - 2493.0, 5.5, 0.7))
    for i, node in enumerate(ids):
        phase = P if i < prefill else D
        served = P if i == prefill else phase  # one drains, on its way to decode
        queue = [QueuedPrefill(f"q{k}", 4600, 0) for k in range(rng.randint(0, 7))] if phase is P else []
        decodes = [f"r{k}" for k in range(rng.randint(3, 40))] if phase is D else []
        pages = rng.randint(60_000, 128_000)
        state = NodeState(
            node, t - 1.0 if i != nodes - 1 else t - 900.0, served, 3, i == prefill, t, ["x"], queue, decodes,
            len(decodes) * 120_000, 10_000, pages // 5, pages, rng.randint(pages // 3, pages),
        )  # fmt: skip
        view.state(state)
    for i in range(600):
        end, ttft = t - 119 + i / 5.1, rng.lognormvariate(0.8, 0.7)
        view.request(
            RequestDone(
                f"r{i}", "b", Outcome.OK, end - ttft - 4, end - 4.5, end - 4, end - 4, end,
                125_000, rng.randint(115_000, 124_000), 0, 0, 440, 314, ids[0], ids[-1],
            )
        )  # fmt: skip
    for _ in range(3):
        view.request(
            RequestDone("x", "b", Outcome.CLIENT_GONE, t - 50, 0, 0, 0, t - 40, 9, 0, 0, 0, 0, 0, "", "")
        )
    view._first_t = t - 7000
    for k in range(350):
        at = t - 7000 + 20 * k
        warm, wave = at < t - 5400, math.sin(k / 18)
        view.points.append(
            Point(
                at,
                (3.1 if warm else 4.6 if at < t - 2500 else 5.4) + 0.4 * wave + rng.uniform(-0.15, 0.15),
                None if 120 < k < 124 else 1.9 + 0.4 * wave,
                None if 120 < k < 124 else (14 if warm else 9) + 3 * wave + rng.uniform(-1, 1),
                min(0.99, 0.2 + k / 40) if k < 32 else 0.962 + 0.01 * wave,
                0 if warm else prefill - 1 if at < t - 2500 and prefill > 1 else prefill,
                0 if warm else nodes - (prefill - 1 if at < t - 2500 and prefill > 1 else prefill),
                max(0, int(6 + 5 * wave + rng.uniform(-2, 2))),
                int(60 + 14 * wave + rng.uniform(-4, 4)),
                6.2 + 0.9 * wave,
                14 + 3 * wave + rng.uniform(-1, 1),
            )
        )
    return view


def app(view: ClusterView, *, t: float = 50_000.0, stop: asyncio.Event | None = None) -> web.Application:
    """The page and its events; the picture moves on 20 s a second."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=PAGE.read_bytes(), content_type="text/html", headers=PAGE_HEADERS)

    async def events(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        history = msgspec.json.encode(History(Point._fields, list(view.points)))
        await answer.write(b"event: history\ndata: " + history + b"\n\n")
        tick = 0
        while stop is None or not stop.is_set():
            summary = msgspec.json.encode(view.summary(t + 0.01 * tick))
            await answer.write(b"event: summary\ndata: " + summary + b"\n\n")
            await asyncio.sleep(0.5)
            tick += 1
        return answer

    made = web.Application()
    made.router.add_get("/", page)
    made.router.add_get("/events", events)
    return made


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    web.run_app(app(made_up(count)), host="127.0.0.1", port=int(sys.argv[2]) if len(sys.argv) > 2 else 8099)
