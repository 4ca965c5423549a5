"""Agents work through a cluster in which something is killed or frozen all the time, and notice nothing but a wait.

Every request ends well after what the official clients repeat by themselves, or, when a stream breaks in its middle,
after the agent has asked once more; every answer is the one of a worker that nothing happened to; and in the end nothing
is left: no request, no pin, no lost count, no memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.embedded import EmbeddedRedis
from tests.chaos_agents import ATTEMPT_S
from tests.chaos_cluster import chaos_cluster, through_chaos, wrong_answers
from tests.conftest import eventually

GROWTH, GROWTH_MB = 1.15, 20.0


async def all_is_well(name: str, folder: Path, seconds: float, every_s: float) -> str:
    """Returns a table of what happened."""
    with EmbeddedRedis() as redis:
        async with chaos_cluster(redis.url, name, folder) as cluster:
            outcome = await through_chaos(cluster, seconds, every_s)
            table = outcome.table()
            print(table)
            for happened in outcome.happened:
                print(f"{happened.at - outcome.begun:6.1f} s {happened.what}: {happened.why}")
            assert not outcome.failures, "\n".join(outcome.failures)
            slow = max(agent.longest_attempt_s for agent in outcome.agents)
            assert slow < ATTEMPT_S, f"an attempt took {slow:.1f} s"
            assert all(agent.answers for agent in outcome.agents)

            # Nothing is left, and everything came back.
            await cluster.wait_ready()
            left: list[str] = []

            async def empty() -> bool:
                left[:] = await cluster.left_over()
                return not left

            try:
                await eventually(empty, 30.0, 0.5)
            except AssertionError:
                raise AssertionError(f"left over: {left}") from None
            assert not cluster.complaints(), "\n".join(cluster.complaints())
            code, output = await cluster.verify()
            assert code == 0, output

            wrong = await wrong_answers(cluster.reference.url, outcome.answers)
            assert not wrong, f"{len(wrong)} of {len(outcome.answers)} answers, such as\n" + "\n".join(
                wrong[:3]
            )
            for process, first, last in outcome.grown():
                assert last <= GROWTH * first + GROWTH_MB, f"{process} grew from {first:.0f} to {last:.0f} MB"
            return table


@pytest.mark.chaos
async def test_agents_work_through_a_minute_of_chaos(cluster_name: str, tmp_path: Path) -> None:
    await all_is_well(cluster_name, tmp_path, 60.0, 3.0)


@pytest.mark.chaos
async def test_agents_work_through_ten_minutes_of_chaos(
    cluster_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = await all_is_well(cluster_name, tmp_path, 600.0, 15.0)
    with capsys.disabled():
        print(f"\n{table}")
