"""`evolving split 3P1D`: ask the planner for a split and wait until the nodes have it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import Annotated

from shared.bus import Bus
from shared.config import ClusterSettings, ConfigError, Doc, load
from shared.messages import RoleAck, RolePlan, RoleStage, SplitWanted
from shared.redis_client import redis_url, safe_url
from shared.split import Split, parse_split, split_of


class SplitSettings(ClusterSettings, kw_only=True):
    split: Annotated[str, Doc("wanted split, such as 3P1D")] = ""
    hold: Annotated[bool, Doc("keep it: the planner makes no change of its own until --release")] = False
    release: Annotated[bool, Doc("end a hold")] = False
    timeout: Annotated[float, Doc("wall seconds to wait for the nodes")] = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.split) == self.release:
            raise ValueError("give a split such as 3P1D, or --release")
        if self.split:
            parse_split(self.split)


async def _run(settings: SplitSettings) -> int:
    bus = await Bus.connect(redis_url(settings), settings.cluster)
    try:
        if not any(info.service == "planner" for info in await bus.services()):
            raise ConfigError(
                f"no planner is running in cluster {settings.cluster!r} at {safe_url(settings.redis)}"
            )
        nodes = await bus.nodes()
        wanted = SplitWanted(0, 0, release=True)
        target = Split(0, 0)
        if settings.split:
            target = parse_split(settings.split)
            if sum(target) != len(nodes):
                raise ConfigError(f"split {settings.split} has {sum(target)} nodes, the cluster {len(nodes)}")
            wanted = SplitWanted(*target, hold=settings.hold)
        last = [e.message for e in await bus.last("roles", 256) if isinstance(e.message, RolePlan)]
        reader = bus.reader({})
        await reader.follow("roles")
        publisher = bus.publisher("roles", f"cli-{uuid.uuid4().hex[:8]}", maxlen=10_000)
        sender = asyncio.create_task(publisher.run())
        try:
            publisher.publish(wanted)
            await publisher.flush()
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sender
        if wanted.release:
            print("the planner may change the split again")
            return 0
        if last and split_of(last[-1].phases) == target:
            print(f"the split is {target} already")
            return 0
        deadline = time.monotonic() + settings.timeout
        plan: RolePlan | None = None
        waiting: set[str] = set()
        while time.monotonic() < deadline:
            for event in await reader.read(0.5):
                message = event.message
                if isinstance(message, RolePlan) and split_of(message.phases) == target:
                    plan = message
                    waiting = {n for n, p in plan.phases.items() if n not in nodes or nodes[n].phase != p}
                    changes = ", ".join(f"{n} -> {plan.phases[n]}" for n in sorted(waiting))
                    print(f"epoch {plan.epoch}: {changes or 'no node changes'}")
                elif (
                    plan is not None
                    and isinstance(message, RoleAck)
                    and message.epoch >= plan.epoch
                    and message.stage is RoleStage.SWITCHED
                ):
                    waiting.discard(message.node)
                    print(f"{message.node} serves {message.phase} (drained in {message.drain_s:.1f} s)")
            if plan is not None and not waiting:
                print(f"the split is {target}")
                return 0
        late = (
            "the planner has not answered"
            if plan is None
            else f"still draining: {', '.join(sorted(waiting))}"
        )
        print(f"not done after {settings.timeout:g} s; {late}")
        return 1
    finally:
        await bus.close()


def main(argv: list[str]) -> int:
    settings = load(
        SplitSettings,
        "split",
        argv,
        positional=("split",),
        summary="Ask the planner for a split of the nodes.",
    )
    return asyncio.run(_run(settings))
