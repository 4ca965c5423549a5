"""A node that serves a known arena in a process of its own, to be killed or frozen:
`python -m tests.transport_peer TRANSPORT SLOTS PAGE_BYTES SEED [PORT]`.

It prints its endpoint as JSON, one line, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec
import numpy as np
import numpy.typing as npt

from worker.kv.arena import Arena
from worker.transport.choose import make_transport


def pattern(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """uint8[nbytes]: other bytes for every seed, and no two pages alike."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


async def main(name: str, slots: int, page_bytes: int, seed: int, port: int) -> None:
    arena = Arena(slots, page_bytes, huge_pages=False)
    arena.memory[:] = pattern(arena.nbytes, seed)
    transport = await make_transport(name, arena, "127.0.0.1", port=port)
    print(msgspec.json.encode(transport.endpoint).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


if __name__ == "__main__":
    slots, page_bytes, seed, *port = map(int, sys.argv[2:])
    asyncio.run(main(sys.argv[1], slots, page_bytes, seed, port[0] if port else 0))
