"""The index of who holds which KV pages: its speed and memory, beside NVIDIA Dynamo's RadixTree in the same run.

    python bench/kvindex.py [--rounds 7] [--pages 10000000] [--dynamo-path DIR] [--json FILE] [--check]

Both indexes hold the same kind of content: a system prompt that every node has, then branches of which each node
has a prefix of its own length. Rounds of both take turns, so that what else the machine does meets both. Dynamo's
wheel is installed under DIR (default `.bench/dynamo`) when it is not there; it is used here and nowhere else.
`--check` exits with 1 when a bound is missed or Dynamo could not be had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bounds import Bound

from shared.kvindex import KvIndex
from shared.messages import PageArray, Tier

DYNAMO = "ai-dynamo-runtime==1.6.1"
DYNAMO_AT = Path(__file__).resolve().parent.parent / ".bench" / "dynamo"

NODES, DYNAMO_WORKERS = 64, 16
PATH_PAGES, PROMPT_PAGES, BRANCHES = 2048, 512, 16
BATCH_PAGES = 32
RATE_BATCHES = 10_000
MATCHES = 40  # calls a round

MOST_RATIO = 2.0
LEAST_STORED, LEAST_REMOVED = 1e6, 0.5e6  # pages a second
MOST_BYTES, MOST_LEFT = 96.0, 0.20


def some_pages(rng: np.random.Generator, count: int) -> PageArray:
    return rng.integers(-(2**63), 2**63 - 1, count, dtype=np.int64)


def prefixes(rng: np.random.Generator, nodes: int) -> tuple[list[PageArray], list[list[int]]]:
    """Branches of PATH_PAGES after one prompt, and the pages that each node has of each."""
    prompt = some_pages(rng, PROMPT_PAGES)
    paths = [np.concatenate([prompt, some_pages(rng, PATH_PAGES - PROMPT_PAGES)]) for _ in range(BRANCHES)]
    # On a quarter of the nodes a branch is whole, elsewhere it ends somewhere after the prompt.
    held = [
        [PATH_PAGES if rng.random() < 0.25 else int(rng.integers(PROMPT_PAGES, PATH_PAGES)) for _ in paths]
        for _ in range(nodes)
    ]
    return paths, held


def our_index(paths: list[PageArray], held: list[list[int]]) -> KvIndex:
    index = KvIndex()
    for node, lengths in enumerate(held):
        for path, length in zip(paths, lengths, strict=True):
            index.store(f"node-{node}", Tier.L1, path[:length])
    return index


def worst_index(rng: np.random.Generator, nodes: int) -> tuple[KvIndex, PageArray]:
    """Every page of the path lies on a set of nodes of its own, and every node has a page in some tier."""
    index, path = KvIndex(), some_pages(rng, PATH_PAGES)
    for node in range(nodes):
        first = rng.random(PATH_PAGES) < 0.5
        index.store(f"node-{node}", Tier.L1, path[first])
        index.store(f"node-{node}", Tier.L2, path[~first])
    return index, path


def dynamo_tree(RadixTree: Any, paths: list[PageArray], held: list[list[int]]) -> tuple[Any, list[list[int]]]:
    tree = RadixTree()
    unsigned = [path.view(np.uint64).tolist() for path in paths]
    event = 0
    for worker, lengths in enumerate(held):
        for path, length in zip(unsigned, lengths, strict=True):
            for at in range(0, length, BATCH_PAGES):
                event += 1
                tree.apply_event(worker, stored_event(event, path, at, min(at + BATCH_PAGES, length)))
    return tree, unsigned


def stored_event(event: int, path: list[int], first: int, last: int) -> bytes:
    # A block's hash names it among all, its tokens' hash among its siblings: with chained hashes one does for both.
    blocks = [{"block_hash": page, "tokens_hash": page} for page in path[first:last]]
    stored = {"parent_hash": path[first - 1] if first else None, "blocks": blocks}
    return json.dumps({"event_id": event, "data": {"stored": stored}}).encode()


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


# ----------------------------------------------------------------------------- the parts


def matching(RadixTree: Any, rounds: int) -> dict[str, float]:
    """Median microseconds of a match, by case; rounds of the cases take turns."""
    rng = np.random.default_rng(7)
    paths, held = prefixes(rng, NODES)
    ours = our_index(paths, held)
    few_paths, few_held = prefixes(rng, DYNAMO_WORKERS)
    few = our_index(few_paths, few_held)
    worst, worst_path = worst_index(rng, NODES)
    for path, column in zip(paths, zip(*held, strict=True), strict=True):
        assert ours.match(path) == {f"node-{node}": pages for node, pages in enumerate(column)}
    assert set(worst.match(worst_path).values()) == {PATH_PAGES}
    turn = [0]

    def next_of(paths: list[Any]) -> Any:
        turn[0] += 1
        return paths[turn[0] % len(paths)]

    cases: dict[str, Callable[[], object]] = {
        f"ours, {NODES} nodes": lambda: ours.match(next_of(paths)),
        f"ours, {DYNAMO_WORKERS} nodes": lambda: few.match(next_of(few_paths)),
        f"ours, {NODES} nodes, a set of nodes a page": lambda: worst.match(worst_path),
        f"ours, {NODES} nodes, L1, a set a page": lambda: worst.match_tier(worst_path, Tier.L1),
    }
    if RadixTree is not None:
        tree, blocks = dynamo_tree(RadixTree, few_paths, few_held)
        many, many_blocks = dynamo_tree(RadixTree, paths, held)
        for block, column in zip(blocks, zip(*few_held, strict=True), strict=True):
            scores = {worker: pages for (worker, _), pages in tree.find_matches(block).scores.items()}
            assert scores == dict(enumerate(column))
        cases[f"Dynamo, {DYNAMO_WORKERS} workers"] = lambda: tree.find_matches(next_of(blocks))
        cases[f"Dynamo, {NODES} workers"] = lambda: many.find_matches(next_of(many_blocks))
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, call in cases.items():
            times = [timed(call) for _ in range(MATCHES)]
            if number:  # the first round warms up
                found[name] += times
    return {name: 1e6 * median(times) for name, times in found.items()}


def rates(RadixTree: Any, rounds: int) -> dict[str, float]:
    """Median pages a second in batches of BATCH_PAGES: each node's own branches, and prompts that all share."""
    rng = np.random.default_rng(11)
    prompts = some_pages(rng, (RATE_BATCHES // 100 + 1) * BATCH_PAGES).reshape(-1, BATCH_PAGES)
    batches = [
        (
            f"node-{number % NODES}",
            prompts[number // 5 % len(prompts)] if number % 5 == 0 else some_pages(rng, BATCH_PAGES),
        )
        for number in range(RATE_BATCHES)
    ]
    gone = [batches[at] for at in rng.permutation(len(batches))]
    events: list[tuple[int, bytes]] = []
    if RadixTree is not None:
        for number, (node, pages_of) in enumerate(batches):
            path = pages_of.view(np.uint64).tolist()
            events.append((int(node[5:]) % DYNAMO_WORKERS, stored_event(number, path, 0, len(path))))
    found: dict[str, list[float]] = {}
    pages = RATE_BATCHES * BATCH_PAGES
    for number in range(rounds + 1):
        index = KvIndex()
        took = {
            "ours, stored": timed(lambda: [index.store(node, Tier.L1, batch) for node, batch in batches]),  # noqa: B023
            "ours, stored again": timed(lambda: [index.store(n, Tier.L1, batch) for n, batch in batches]),  # noqa: B023
            "ours, removed": timed(lambda: [index.remove(node, Tier.L1, batch) for node, batch in gone]),  # noqa: B023
        }
        assert len(index) == 0
        if RadixTree is not None:
            tree = RadixTree()
            took["Dynamo, stored"] = timed(lambda: [tree.apply_event(*event) for event in events])  # noqa: B023
        if number:
            for name, seconds in took.items():
                found.setdefault(name, []).append(pages / seconds)
    return {name: median(each) for name, each in found.items()}


def memory_bytes() -> tuple[int, int]:
    """Resident and swapped bytes of this process, and the most that were resident."""
    status = Path("/proc/self/status").read_text().splitlines()
    words = {line.split(":")[0]: line.split()[1] for line in status if line.startswith("Vm")}
    return 1024 * (int(words["VmRSS"]) + int(words["VmSwap"])), 1024 * int(words["VmHWM"])


def memory(pages: int) -> dict[str, float]:
    """What this process has before, with and after so many pages. To be run in a fresh process."""
    batch = 1024

    def batches() -> Any:
        # Made again for the removal, so that no list of them is in the measure.
        rng = np.random.default_rng(13)
        for at in range(0, pages, batch):
            yield f"node-{at // batch % NODES}", some_pages(rng, min(batch, pages - at))

    warm = KvIndex()
    for node, part in batches():
        warm.store(node, Tier.L1, part)
        warm.remove(node, Tier.L1, part)
        if len(warm.nodes()) == NODES:
            break
    del warm
    start, _ = memory_bytes()
    index = KvIndex()
    for node, part in batches():
        index.store(node, Tier.L1, part)
    full, most = memory_bytes()
    assert len(index) == pages
    for node, part in batches():
        index.remove(node, Tier.L1, part)
    after, _ = memory_bytes()
    assert len(index) == 0
    return {"start": start, "full": full, "most": most, "after": after}


def dynamo(at: Path) -> Any:
    """Dynamo's RadixTree from its own wheel under `at`, which is installed when absent; None if it cannot be."""
    if not (at / "dynamo").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(at), DYNAMO]
        if subprocess.run(pip).returncode:
            return None
    sys.path.insert(0, str(at))
    try:
        from dynamo._core import RadixTree  # type: ignore[import-not-found]
    except ImportError as error:
        print(f"Dynamo's RadixTree cannot be imported: {error}", file=sys.stderr)
        return None
    return RadixTree


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of the page index, beside Dynamo's.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pages", type=int, default=10_000_000, help="for the memory")
    parser.add_argument("--dynamo-path", type=Path, default=DYNAMO_AT)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_only:
        print(json.dumps(memory(args.pages)))
        return 0
    RadixTree = dynamo(args.dynamo_path)
    match_us = matching(RadixTree, args.rounds)
    pages_s = rates(RadixTree, args.rounds)
    child = [sys.executable, __file__, "--memory-only", "--pages", str(args.pages)]
    rss = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)

    print(f"{'match of ' + str(PATH_PAGES) + ' pages':48} {'us':>10}")
    for name, value in match_us.items():
        print(f"{name:48} {value:10.1f}")
    print(f"\n{'in batches of ' + str(BATCH_PAGES):48} {'M pages/s':>10}")
    for name, value in pages_s.items():
        print(f"{name:48} {value / 1e6:10.2f}")
    print(f"\n{'memory of ' + format(args.pages, ',') + ' pages':48} {'MB':>10} {'bytes/page':>11}")
    for name, value in rss.items():
        print(f"{name:48} {value / 1e6:10.1f} {(value - rss['start']) / args.pages:11.1f}")

    bounds = [
        Bound("pages stored a second", pages_s["ours, stored"], LEAST_STORED, False),
        Bound("pages removed a second", pages_s["ours, removed"], LEAST_REMOVED, False),
        Bound("bytes a page", (rss["full"] - rss["start"]) / args.pages, MOST_BYTES, True),
        Bound("memory left, of the start", rss["after"] / rss["start"] - 1, MOST_LEFT, True),
    ]
    if RadixTree is not None:
        ratio = match_us[f"ours, {NODES} nodes"] / match_us[f"Dynamo, {DYNAMO_WORKERS} workers"]
        bounds.insert(
            0, Bound(f"time of a match over Dynamo's on {DYNAMO_WORKERS} workers", ratio, MOST_RATIO, True)
        )
    print(f"\n{'bound':48} {'found':>14} {'limit':>14}")
    for bound in bounds:
        limit = f"{'<=' if bound.at_most else '>='} {bound.limit:,.6g}"
        print(f"{bound.name:48} {bound.value:14,.6g} {limit:>14}  {'met' if bound.met else 'MISSED'}")
    if RadixTree is None:
        print("Dynamo could not be installed: the comparison was skipped.", file=sys.stderr)
    if args.json:
        found = {
            "match_us": match_us,
            "pages_s": pages_s,
            "rss_bytes": rss,
            "bounds": [{**bound._asdict(), "met": bound.met} for bound in bounds],
            "dynamo": DYNAMO if RadixTree is not None else None,
        }
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(args.check and (RadixTree is None or not all(bound.met for bound in bounds)))


if __name__ == "__main__":
    sys.exit(main())
