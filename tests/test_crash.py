"""No count is lost: every kind of process is killed (SIGKILL) at random moments while agents work.

After each kill the agents go on, and once all is quiet `evolving directory verify` must find no difference, the
counts in Redis must be those of a directory that read the same streams without a crash, no message may be missing
in these, and the nodes must know the counts. A Redis that dies alone comes back with its append-only file; a Sentinel
primary is replaced by a replica that lacks what came last.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.crash_cluster import CrashCluster, crash_cluster, trial
from tests.redis_servers import RedisServer, binaries
from tests.sentinel_group import SentinelGroup

SEED = int(os.environ.get("EI_TEST_SEED", "20261130"))


async def kill_directory(cluster: CrashCluster) -> None:
    """The leader where there is one; the other takes over while this one starts again."""
    victim = await cluster.leader() or cluster.directories[0]
    await victim.kill()
    await victim.start()


async def kill_router(cluster: CrashCluster, rng: random.Random) -> None:
    victim = rng.choice(cluster.routers)
    await victim.kill()
    await victim.start()


async def kill_worker(cluster: CrashCluster, rng: random.Random) -> None:
    victim = rng.choice(cluster.workers)
    await victim.kill()
    await victim.start()


async def kill_redis(server: RedisServer, rng: random.Random) -> None:
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(rng.uniform(0.0, 0.5))
    await asyncio.to_thread(server.start)


def cut_off_replicas(group: SentinelGroup) -> None:
    with group.primary().client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "REPLICA")


async def kill_primary(group: SentinelGroup, rng: random.Random) -> None:
    """While its replica lags, so that what came last is lost."""
    (replica,) = await asyncio.to_thread(group.replicas)
    replica.pause()
    # Else the system's buffers hold what it has not read yet.
    await asyncio.to_thread(cut_off_replicas, group)
    await asyncio.sleep(rng.uniform(0.05, 0.4))
    dead = await asyncio.to_thread(group.kill_primary)
    replica.resume()
    await asyncio.to_thread(group.wait_ready, 60.0)
    assert not dead.running
    await asyncio.to_thread(group.restart_dead)
    await asyncio.to_thread(group.wait_ready, 60.0)


def a_binary(seed: int) -> str:
    """The installed Redis, and the one that `evolving up` starts, in turns."""
    found = binaries()
    return found[seed // 1000 % len(found)]


async def with_one_redis(name: str, folder: Path, trials: int, seed: int = 0) -> None:
    with RedisServer(a_binary(seed)) as server:
        async with crash_cluster(server.url, name, folder) as cluster:
            kinds = {
                "directory": lambda rng: kill_directory(cluster),
                "router": lambda rng: kill_router(cluster, rng),
                "worker": lambda rng: kill_worker(cluster, rng),
                "redis": lambda rng: kill_redis(server, rng),
            }
            for number in range(trials):
                kind = list(kinds)[number % len(kinds)]
                last = number == trials - 1
                served = await trial(cluster, SEED + seed + number, kinds[kind], command=last)
                print(f"trial {number}: {kind} killed, {served} requests served, no difference", flush=True)


async def with_sentinels(name: str, folder: Path, trials: int, seed: int = 0) -> None:
    with SentinelGroup(a_binary(seed)) as group:
        async with crash_cluster(group.url, name, folder) as cluster:
            for number in range(trials):
                last = number == trials - 1
                served = await trial(
                    cluster, SEED + seed + 10_000 + number, lambda rng: kill_primary(group, rng), command=last
                )
                print(f"trial {number}: primary killed, {served} requests served, no difference", flush=True)


async def test_sixteen_crashes_lose_no_count(cluster_name: str, tmp_path: Path) -> None:
    await with_one_redis(cluster_name, tmp_path, 16)


@pytest.mark.long
async def test_four_failovers_lose_no_count(cluster_name: str, tmp_path: Path) -> None:
    await with_sentinels(cluster_name, tmp_path, 4)


@pytest.mark.long
@pytest.mark.parametrize("part", range(8))
async def test_160_crashes_lose_no_count(cluster_name: str, tmp_path: Path, part: int) -> None:
    await with_one_redis(cluster_name, tmp_path, 20, 1000 * (part + 1))


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
async def test_40_failovers_lose_no_count(cluster_name: str, tmp_path: Path, part: int) -> None:
    await with_sentinels(cluster_name, tmp_path, 10, 1000 * (part + 1))
