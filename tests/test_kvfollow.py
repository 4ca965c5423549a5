"""Following a node's pages: gaps, incarnations, snapshots in the middle of events, tiers."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shared.kvfollow import Follow, KvFollower
from shared.kvindex import KvIndex
from shared.messages import KvSnapshot, PagesCleared, PagesRemoved, PagesStored, Tier, pack_pages
from shared.streams import Event


def stored(seq, pages, tier=Tier.L1, boot="a"):
    return Event("kv:n", f"{seq}-0", boot, seq, PagesStored(tier, pack_pages(pages)))


def removed(seq, pages, tier=Tier.L1, boot="a"):
    return Event("kv:n", f"{seq}-0", boot, seq, PagesRemoved(tier, pack_pages(pages)))


def snap(seq, l1, l2=(), boot="a"):
    return KvSnapshot("n", boot, seq, pack_pages(list(l1)), pack_pages(list(l2)))


def held(follower, tier=Tier.L1):
    return set(follower.index.pages("n", tier).tolist())


class Spy:
    def __init__(self):
        self.said = []
        self.follower = KvFollower(
            KvIndex(),
            stored=lambda n: self.said.append(("stored", n)),
            gone=lambda n, p: self.said.append(("gone", p.tolist())),
            reset=lambda n: self.said.append(("reset", n)),
        )


def test_first_incarnation_from_its_first_event_needs_no_snapshot():
    follower = KvFollower(KvIndex())
    assert follower.feed(stored(1, [1, 2])) is Follow.OK
    assert held(follower) == {1, 2}


def test_a_gap_makes_pages_unknown_until_a_snapshot_and_asks_once():
    follower = KvFollower(KvIndex())
    follower.feed(stored(1, [1]))
    assert follower.feed(stored(3, [3])) is Follow.WANT_SNAPSHOT
    assert held(follower) == set() and follower.unsynced() == ["n"]
    assert follower.feed(stored(4, [4])) is Follow.OK
    assert follower.snapshot("n", snap(3, [1, 2, 3]))
    assert held(follower) == {1, 2, 3, 4} and follower.unsynced() == []


def test_a_snapshot_older_than_the_gap_is_not_enough():
    follower = KvFollower(KvIndex())
    follower.feed(stored(5, [5]))
    assert not follower.snapshot("n", snap(2, [1]))
    assert held(follower) == set()
    assert follower.snapshot("n", snap(6, [1, 5, 6]))
    assert held(follower) == {1, 5, 6}


def test_a_new_incarnation_starts_empty_and_the_old_one_is_ignored():
    follower = KvFollower(KvIndex())
    follower.feed(stored(1, [1]))
    follower.feed(stored(1, [9], boot="b"))
    assert held(follower) == {9}
    follower.feed(stored(2, [2]))
    assert held(follower) == {9}
    assert not follower.snapshot("n", snap(7, [3], boot="a"))
    assert held(follower) == {9}


def test_removal_in_one_tier_is_not_gone():
    spy = Spy()
    spy.follower.feed(stored(1, [1, 2]))
    spy.follower.feed(stored(2, [1], Tier.L2))
    spy.follower.feed(removed(3, [1, 2, 7]))
    assert spy.said == [("reset", "n"), ("stored", "n"), ("stored", "n"), ("gone", [2])]
    spy.follower.feed(removed(4, [1], Tier.L2))
    assert spy.said[-1] == ("gone", [1])


def test_a_clear_of_all_and_of_one_tier():
    spy = Spy()
    spy.follower.feed(stored(1, [1, 2]))
    spy.follower.feed(stored(2, [1, 3], Tier.L2))
    spy.follower.feed(Event("kv:n", "3-0", "a", 3, PagesCleared(Tier.L1)))
    assert spy.said[-1] == ("gone", [2])
    spy.follower.feed(Event("kv:n", "4-0", "a", 4, PagesCleared()))
    what, pages = spy.said[-1]
    assert what == "gone" and sorted(pages) == [1, 3] and len(spy.follower.index) == 0


def test_a_message_with_a_broken_page_list_counts_as_missing():
    spy = Spy()
    spy.follower.feed(stored(1, [1, 2]))
    broken = Event("kv:n", "2-0", "a", 2, PagesStored(Tier.L1, b"123"))
    assert spy.follower.feed(broken) is Follow.WANT_SNAPSHOT
    assert not spy.follower.synced("n") and spy.said[-1] == ("reset", "n")
    assert spy.follower.feed(stored(3, [3])) is Follow.OK
    # One that is older than the broken message does not help.
    assert not spy.follower.snapshot("n", snap(1, [1, 2]))
    assert spy.follower.snapshot("n", snap(2, [1, 2, 8]))
    assert held(spy.follower) == {1, 2, 3, 8}


def test_a_page_is_told_once_and_only_when_it_left():
    spy = Spy()
    spy.follower.feed(stored(1, [1, 2, 1]))
    spy.follower.feed(stored(2, [2, 3], Tier.L2))
    spy.follower.feed(removed(3, [1, 1, 2]))
    assert spy.said[-1] == ("gone", [1])
    spy.follower.feed(stored(4, [2, 3], Tier.L2))
    told = len(spy.said)
    spy.follower.feed(removed(5, [1, 9]))
    assert len(spy.said) == told


def test_a_lost_node_leaves_nothing():
    spy = Spy()
    spy.follower.feed(stored(1, [1]))
    spy.follower.lost("n")
    assert len(spy.follower.index) == 0 and spy.said[-1] == ("reset", "n")


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_any_loss_with_snapshots_ends_in_the_true_pages(seed, length):
    """Drop, duplicate and restart at random; fetch snapshots when asked: the index ends equal to the node."""
    rng = random.Random(seed)
    follower = KvFollower(KvIndex())
    l1: set[int] = set()
    boot, seq, wanting = "boot0", 0, False
    for step in range(length):
        if rng.random() < 0.1:
            boot, seq, l1 = f"boot{step}", 0, set()
        seq += 1
        pages = [rng.randrange(20) for _ in range(rng.randrange(1, 5))]
        if rng.random() < 0.6:
            l1 |= set(pages)
            event = stored(seq, pages, boot=boot)
        else:
            l1 -= set(pages)
            event = removed(seq, pages, boot=boot)
        if rng.random() < 0.2:
            continue
        for _ in range(rng.choice([1, 1, 1, 2])):
            wanting |= follower.feed(event) is Follow.WANT_SNAPSHOT
        if wanting and rng.random() < 0.5:
            wanting = not follower.snapshot("n", snap(seq, l1, boot=boot))
    seq += 1
    if follower.feed(stored(seq, [99], boot=boot)) is Follow.WANT_SNAPSHOT or wanting:
        assert follower.snapshot("n", snap(seq, l1 | {99}, boot=boot))
    assert held(follower) == l1 | {99}
