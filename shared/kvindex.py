"""Which node holds which KV pages, and in which tier (paper, section 4.3 and Appendix A.3).

Rules that hold here
- A page is its int64 hash (`shared/pages.py`). It is in the index exactly while some node holds it in some
  tier, and it leaves a node only when its last tier there lets it go: a removal in one tier says nothing
  about the other.
- Every operation is idempotent, and one about an unknown page or node changes nothing.
- A path is leading pages first. Hashes are chained, so a page proves its whole prefix in content, but a node
  may hold it after it evicted an earlier page: a match counts leading pages only.
- No I/O and no clock. Not safe for use from several threads.

Each page has one int32 in a `PageTable`: the number of its holder set, 0 for no holder. A holder set is one
integer: bit 2s of it is L1 and bit 2s + 1 is L2 of the node in slot s. Many pages have few distinct sets, so a
change or a question costs a few array operations however many pages it is about, and Python work only for each
distinct set among them. A set's number is given to another one when its last page leaves it, and a dropped
node's slot to the next new node. Stored pages wait until they are asked for, or many: stores commute, and one of
many small batches at once costs a tenth. What asks for one node's pages scans the table: it happens when a node is
lost, cleared or snapshotted, and costs no memory in between.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from shared.messages import PageArray, Tier
from shared.pagetable import Column, PageTable, Slots

MAX_NODES = 128

_WORDS = 2 * MAX_NODES // 64  # of 64 bits, in a set
_SET_BYTES = 8 * _WORDS
_FEWEST_SETS = 1024  # fewer are not worth returning memory of
_LOG_BITS = (2 * MAX_NODES).bit_length() - 1
_WAITING_PAGES = 8192  # stored pages that wait, at most
_MATCH_PAGES = 2048  # of a path looked up at a time
_SCAN_ROWS = 1 << 18  # of the table read at a time
_MOST_RUNS = 32  # of one set in a path, that are looked at one by one
_FIRST_BITS = np.array(0x5555_5555_5555_5555, dtype=np.uint64)  # of each slot's two
_ALL_FIRST = int.from_bytes(b"\x55" * _SET_BYTES, "little")
_SHIFTS = [np.array(offset, dtype=np.uint64) for offset in range(2)]
Shift = npt.NDArray[np.uint64]  # of no dimension

_NONE: PageArray = np.empty(0, dtype=np.int64)
_FIRST = np.zeros(1, dtype=np.intp)


class _Sets:
    """Holder sets by number. Number 0 is the empty set; the others live while a page has them."""

    def __init__(self) -> None:
        self.masks = [0]
        self.pages = [0]  # of each set
        self._numbers = {0: 0}
        self._free: list[int] = []
        self.words = np.zeros((_WORDS, _FEWEST_SETS), dtype=np.uint64)  # the masks again, a set a column

    def number(self, mask: int) -> int:
        """The set's number. A new one has no pages: `move` some to it, or it is never freed."""
        number = self._numbers.get(mask)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.masks[number] = mask
            else:
                number = len(self.masks)
                self.masks.append(mask)
                self.pages.append(0)
                if number == self.words.shape[1]:
                    self.words = np.concatenate([self.words, np.zeros_like(self.words)], axis=1)
            self._numbers[mask] = number
            self.words[:, number] = _words(mask)
        return number

    def move(self, pages: int, old: int, new: int) -> None:
        """So many pages went from the set `old` to `new`."""
        if new:
            self.pages[new] += pages
        if old:
            self.pages[old] -= pages
            if not self.pages[old]:
                del self._numbers[self.masks[old]]
                self.masks[old] = 0
                self.words[:, old] = 0
                self._free.append(old)

    def move_all(self, moves: list[tuple[int, int, int]]) -> None:
        """Several of (pages, old, new). A set is freed after all, for one that loses its pages may get others."""
        for pages, _, new in moves:
            self.pages[new] += pages
        for pages, old, _ in moves:
            self.move(pages, old, 0)

    def having(self, bits: int) -> npt.NDArray[np.bool_]:
        """bool[sets]: which sets have any of these bits."""
        wanted = self.words[:, : len(self.masks)] & _words(bits)[:, None]
        has: npt.NDArray[np.bool_] = np.logical_or.reduce(wanted, axis=0)
        return has

    def sparse(self) -> bool:
        """Whether renumbering would give memory back."""
        return len(self.masks) > _FEWEST_SETS and len(self._numbers) * 4 < len(self.masks)

    def renumber(self) -> Column:
        """Number the sets anew without gaps; int32[sets]: the new number of each old one."""
        new = np.zeros(len(self.masks), dtype=np.int32)
        old = list(self._numbers.values())
        new[old] = np.arange(len(old), dtype=np.int32)
        self.masks = [self.masks[number] for number in old]
        self.pages = [self.pages[number] for number in old]
        self._numbers = {mask: number for number, mask in enumerate(self.masks)}
        self._free = []
        room = _FEWEST_SETS
        while room <= len(old):
            room *= 2
        words = np.zeros((_WORDS, room), dtype=np.uint64)
        words[:, : len(old)] = self.words[:, old]
        self.words = words
        return new


class KvIndex:
    """Pages by node and tier. Tiers other than L1 and L2 are a ValueError, as is a 129th node.

    `table`: where pages have their rows, a new and empty one of one column.
    """

    def __init__(self, table: PageTable | None = None) -> None:
        self._table = PageTable() if table is None else table
        self._sets = _Sets()
        self._pages = 0
        self._slots: dict[str, int] = {}
        self._names = [""] * MAX_NODES  # by slot
        self._held: dict[str, list[int]] = {}  # pages of each node, by tier
        self._waiting: dict[
            str, list[list[PageArray]]
        ] = {}  # node -> by tier, stored and not in the table yet
        self._waiting_pages = 0

    def __len__(self) -> int:
        """Distinct pages held anywhere."""
        self._settle()
        return self._pages

    @property
    def nbytes(self) -> int:
        """Bytes of the page table."""
        self._settle()
        return self._table.nbytes

    def nodes(self) -> list[str]:
        """Nodes that stored something and were not dropped since, even if they hold nothing now."""
        return list(self._slots)

    def count(self, node: str, tier: Tier) -> int:
        """Pages of the node in that tier."""
        self._settle(node)
        held = self._held.get(node)
        return held[_offset(tier)] if held else 0

    # ------------------------------------------------------------------------- changes

    def store(self, node: str, tier: Tier, pages: PageArray) -> None:
        """The node now holds these pages (int64[n], any order) in that tier.

        The array is kept for a while: do not change it. Raises ValueError for a new node when MAX_NODES are known.
        """
        offset = _offset(tier)
        waiting = self._waiting.get(node)
        if waiting is None:
            self._slot(node)
            waiting = self._waiting[node] = [[] for _ in Tier]
        waiting[offset].append(pages)
        self._waiting_pages += len(pages)
        if self._waiting_pages >= _WAITING_PAGES:
            self._settle()

    def remove(self, node: str, tier: Tier, pages: PageArray) -> PageArray:
        """These pages (int64[n], any order) left that tier of the node.

        Returns those that it held before and now holds in no tier, each once.
        """
        offset = _offset(tier)
        if node not in self._slots:
            return _NONE
        self._settle(node)
        count, gone = self._take(2 * self._slots[node] + offset, self._table.find(pages), pages)
        self._held[node][offset] -= count
        self._shrink()
        return gone

    def clear(self, node: str, tier: Tier | None = None) -> PageArray:
        """All pages left that tier of the node, or both tiers when None. The node stays known.

        Returns the pages that it held before and now holds in no tier, in no order that means something.
        """
        if tier is not None:
            _offset(tier)
        self._settle(node)
        held = self._held.get(node)
        if held is None:
            return _NONE
        bits = 0
        for each in Tier if tier is None else (tier,):
            offset = _offset(each)
            if held[offset]:
                bits |= 1 << (2 * self._slots[node] + offset)
                held[offset] = 0
        if not bits:
            return _NONE
        both = 0b11 << (2 * self._slots[node])
        sets = self._sets
        new = np.arange(len(sets.masks), dtype=np.int32)
        leaves = np.zeros(len(sets.masks), dtype=np.bool_)
        for old in sets.having(bits).nonzero()[0].tolist():
            left = sets.masks[old] & ~bits
            leaves[old] = not left & both
            if not left:
                self._pages -= sets.pages[old]
            new[old] = sets.number(left)
            sets.move(sets.pages[old], old, int(new[old]))
        gone = self._scan(leaves)
        self._renumber(new)
        self._shrink()
        return gone

    def drop_node(self, node: str) -> None:
        """Forget the node with all its pages."""
        self.clear(node)
        self._held.pop(node, None)
        self._slots.pop(node, None)

    # ------------------------------------------------------------------------- questions

    def match(self, path: PageArray) -> dict[str, int]:
        """Leading pages of the path (int64[n]) that each node holds in any tier; only nodes with some."""
        return self._leading(path, *_SHIFTS)

    def match_tier(self, path: PageArray, tier: Tier) -> dict[str, int]:
        """Leading pages of the path (int64[n]) that each node holds in that tier; only nodes with some."""
        shift = _SHIFTS[_offset(tier)]
        return self._leading(path, shift, shift)

    def holds(self, node: str, pages: PageArray) -> npt.NDArray[np.bool_]:
        """bool[n]: whether the node holds each page in any tier."""
        self._settle(node)
        if node not in self._slots:
            return np.zeros(len(pages), dtype=np.bool_)
        word, place = divmod(2 * self._slots[node], 64)
        numbers = self._table.columns[0][self._table.find(pages)]
        held: npt.NDArray[np.bool_] = self._sets.words[word][numbers] & np.uint64(0b11 << place) != 0
        return held

    def pages(self, node: str, tier: Tier) -> PageArray:
        """int64[n]: the node's pages in that tier, in no order that means something."""
        offset = _offset(tier)
        if not self.count(node, tier):
            return _NONE
        return self._scan(self._sets.having(1 << (2 * self._slots[node] + offset)))

    # ------------------------------------------------------------------------- inside

    def _settle(self, node: str | None = None) -> None:
        """Put what waits into the table: of one node, or all."""
        if not self._waiting:
            return
        if node is None:
            waiting, self._waiting = self._waiting, {}
        else:
            tiers = self._waiting.pop(node, None)
            if tiers is None:
                return
            waiting = {node: tiers}
        parts: list[PageArray] = []
        bits: list[int] = []  # of each part
        for name, tiers in waiting.items():
            for offset, arrays in enumerate(tiers):
                parts += arrays
                bits += [2 * self._slots[name] + offset] * len(arrays)
        pages = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._waiting_pages -= pages.size
        slots, fresh = self._table.insert_told(pages)
        every = np.repeat(np.array(bits, dtype=np.int64), [part.size for part in parts])
        if fresh or _ascend(slots):
            self._add(slots, every)
            return
        # Where two parts have a page, one after the other.
        while slots.size:
            _, first = np.unique(slots, return_index=True)
            if first.size == slots.size:
                self._add(slots, every)
                return
            self._add(slots[first], every[first])
            left = np.ones(slots.size, dtype=np.bool_)
            left[first] = False
            slots, every = slots[left], every[left]

    def _add(self, slots: Slots, bits: npt.NDArray[np.int64]) -> None:
        """Distinct pages, at these slots, get each its bit, where it lacks it."""
        if not slots.size:
            return
        column, sets = self._table.columns[0], self._sets
        each_kind = column[slots].astype(np.int64) << _LOG_BITS | bits
        if np.count_nonzero(each_kind == each_kind[:1]) == each_kind.size:
            kinds, kind, counts = each_kind[:1], None, np.array([each_kind.size])
        else:
            kinds, kind, counts = np.unique(each_kind, return_inverse=True, return_counts=True)
        become: list[int] = []
        moves: list[tuple[int, int, int]] = []
        for each, count in zip(kinds.tolist(), counts.tolist(), strict=True):
            old, bit = each >> _LOG_BITS, each & 2 * MAX_NODES - 1
            mask = sets.masks[old]
            if mask >> bit & 1:
                become.append(old)
                continue
            become.append(sets.number(mask | 1 << bit))
            moves.append((count, old, become[-1]))
            self._held[self._names[bit >> 1]][bit & 1] += count
            if not old:
                self._pages += count
        sets.move_all(moves)
        column[slots] = np.array(become, dtype=np.int32)[kind] if kind is not None else become

    def _take(self, bit: int, slots: Slots, pages: PageArray) -> tuple[int, PageArray]:
        """Pages, at these slots, lose the bit. How many had it, and those that now have neither of its node's two."""
        column, masks = self._table.columns[0], self._sets.masks
        wanted, other = 1 << bit, 1 << (bit ^ 1)
        numbers = column[slots]
        first = int(numbers[0]) if numbers.size else 0
        if np.count_nonzero(numbers == first) == numbers.size:
            if not masks[first] & wanted:
                return 0, _NONE
            slots, numbers, pages = self._distinct(column, slots, numbers, pages)
            gone = not masks[first] & other
            column[slots] = self._step(first, wanted, pages.size)
            return pages.size, pages if gone else _NONE
        has = {number: bool(masks[number] & wanted) for number in set(numbers.tolist())}
        if not all(has.values()):
            some = [has[number] for number in numbers.tolist()]
            slots, numbers, pages = slots[some], numbers[some], pages[some]
        slots, numbers, pages = self._distinct(column, slots, numbers, pages)
        listed = numbers.tolist()
        told = {number: not masks[number] & other for number in has}
        become = {number: self._step(number, wanted, count) for number, count in Counter(listed).items()}
        column[slots] = [become[number] for number in listed]
        return pages.size, pages[[told[number] for number in listed]]

    def _distinct(
        self, column: Column, slots: Slots, numbers: Column, pages: PageArray
    ) -> tuple[Slots, Column, PageArray]:
        """The last of each page, by what the column keeps of a write for every one. It is written again after."""
        order = np.arange(slots.size, dtype=np.int32)
        column[slots] = order
        last = column[slots] == order
        if np.count_nonzero(last) == slots.size:
            return slots, numbers, pages
        return slots[last], numbers[last], pages[last]

    def _step(self, old: int, bit: int, pages: int) -> int:
        """So many pages of a set lose that bit: the number of the set they now have."""
        sets = self._sets
        after = sets.masks[old] ^ bit
        new = sets.number(after)
        sets.move(pages, old, new)
        if not after:
            self._pages -= pages
        return new

    def settle(self) -> None:
        """Take in the events that came: else the next question does, and is slower by that."""
        self._settle()

    def _leading(self, path: PageArray, low: Shift, high: Shift) -> dict[str, int]:
        """Leading pages of each node by the bits at offsets `low` and `high` of its slot; either will do."""
        self._settle()
        if not self._slots:
            return {}
        found = self._leading_of_few(path, int(low), int(high))
        if found is not None:
            return found
        used = 1 + 2 * max(self._slots.values()) // 64
        sets = self._sets.words[:used]
        alive = _words((1 << 2 * MAX_NODES) - 1)[:used]
        totals: npt.NDArray[np.float64] | None = None  # leading pages of each slot, at its first bit
        for at in range(0, path.size, _MATCH_PAGES):
            numbers = self._table.columns[0][self._table.find(path[at : at + _MATCH_PAGES])]
            # Neighbours mostly lie on the same nodes: a column for each run of them, then one for each that ends
            # a node's prefix, of which there are no more than nodes.
            starts = np.concatenate([_FIRST, (numbers[1:] != numbers[:-1]).nonzero()[0] + 1])
            words = sets.take(numbers[starts], axis=1)
            words = words >> low | words >> high if low is not high else words >> low
            words &= _FIRST_BITS
            words[:, 0] &= alive
            np.bitwise_and.accumulate(words, axis=1, out=words)
            ended = words[:, 1:] != words[:, :-1]
            ending = np.logical_or.reduce(ended, axis=0).nonzero()[0] + 1
            if ending.size < starts.size - 1:
                columns = np.concatenate([_FIRST, ending])
                words, starts = words.take(columns, axis=1), starts[columns]
            lengths = np.empty(starts.size, dtype=np.float32)
            np.subtract(starts[1:], starts[:-1], out=lengths[:-1], casting="unsafe")
            lengths[-1] = numbers.size - starts[-1]
            bits = np.unpackbits(words.T.copy().view(np.uint8), axis=1, bitorder="little")
            held = lengths @ bits.astype(np.float32)
            totals = held.astype(np.float64) if totals is None else totals + held
            alive = words[:, -1]
            if not np.count_nonzero(alive):
                break
        if totals is None:
            return {}
        pages = totals[::2].astype(np.int64).tolist()
        return {node: pages[slot] for node, slot in self._slots.items() if pages[slot]}

    def _leading_of_few(self, path: PageArray, low: int, high: int) -> dict[str, int] | None:
        """The same, set by set; None when the path has too many runs of one set for that."""
        masks, names = self._sets.masks, self._names
        found: dict[str, int] = {}
        alive = -1  # nodes that hold all pages so far: the first bits of their slots
        left = _MOST_RUNS
        for at in range(0, path.size, _MATCH_PAGES):
            numbers = self._table.columns[0][self._table.find(path[at : at + _MATCH_PAGES])]
            ends = (numbers[1:] != numbers[:-1]).nonzero()[0]
            left -= ends.size + 1
            if left < 0:
                return None
            begins = [0, *(ends + 1).tolist()]
            for begin, number in zip(begins, numbers[begins].tolist(), strict=True):
                mask = masks[number]
                held = (mask >> low | mask >> high) & _ALL_FIRST & alive
                gone = alive ^ held if alive >= 0 else 0  # at the very first, the others hold nothing
                while gone:
                    last = gone.bit_length() - 1
                    found[names[last >> 1]] = at + begin
                    gone ^= 1 << last
                alive = held
                if not alive:
                    return found
        while alive > 0:
            last = alive.bit_length() - 1
            found[names[last >> 1]] = path.size
            alive ^= 1 << last
        return found

    def _scan(self, wanted: npt.NDArray[np.bool_]) -> PageArray:
        """The pages whose set is wanted (bool[sets])."""
        if not wanted.any():
            return _NONE
        column = self._table.columns[0]
        return np.concatenate(
            [
                self._table.pages(wanted[column[at : at + _SCAN_ROWS]].nonzero()[0] + at)
                for at in range(0, column.size, _SCAN_ROWS)
            ]
        )

    def _renumber(self, new: Column) -> None:
        column = self._table.columns[0]
        for at in range(0, column.size, _SCAN_ROWS):
            column[at : at + _SCAN_ROWS] = new[column[at : at + _SCAN_ROWS]]

    def _slot(self, node: str) -> int:
        slot = self._slots.get(node)
        if slot is None:
            if len(self._slots) >= MAX_NODES:
                raise ValueError(f"node {node}: the index already has {MAX_NODES} nodes, its most")
            taken = set(self._slots.values())
            # The lowest free one keeps the integers short.
            slot = next(s for s in range(MAX_NODES) if s not in taken)
            self._slots[node] = slot
            self._names[slot] = node
            self._held[node] = [0 for _ in Tier]
        return slot

    def _shrink(self) -> None:
        self._table.shrink(self._pages)
        if self._sets.sparse():
            self._renumber(self._sets.renumber())


def _ascend(slots: Slots) -> bool:
    """Whether each slot is above the one before, as those of new pages and of paths mostly are: then they are distinct."""
    return int(np.count_nonzero(slots[1:] > slots[:-1])) == slots.size - 1


def _offset(tier: Tier) -> int:
    # An enum's call and hash are Python work, which a small batch would notice.
    if tier is Tier.L1:
        return 0
    return 1 if tier is Tier.L2 else Tier(tier) - 1


def _words(mask: int) -> npt.NDArray[np.uint64]:
    """uint64[_WORDS]: the bits of a mask."""
    return np.frombuffer(mask.to_bytes(_SET_BYTES, "little"), dtype="<u8")
