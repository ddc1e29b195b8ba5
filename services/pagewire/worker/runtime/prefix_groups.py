"""From groups of slots that share a prefix to the items that attention works on."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from pagewire.packing import Int32Array
from pagewire.worker.ops.contract.shared_prefix import (
    ITEM_FIELDS,
    MAX_RANGES,
    RANGE_UNIT,
    SharedPrefixItems,
)
from pagewire.worker.protocol.steps.step import StepPrefixGroup

# Shorter ranges cost more to merge than they spread.
MIN_RANGE = 256
# An item belongs to two rows at least, so this many leave every row of 512 in its own groups.
MAX_ITEMS = 1024


@dataclass(frozen=True, slots=True)
class Sharing:
    """How items are cut: `members` rows an item at most, for `kv_heads`, on `processors`."""

    members: int
    kv_heads: int
    processors: int
    block_size: int


def buffer_length(rows: int) -> int:
    """Values of the packed ranges of a batch of `rows`."""
    return 4 + ITEM_FIELDS * MAX_ITEMS + MAX_RANGES * rows + 2 * rows


def shared_ranges(buffer: torch.Tensor, rows: int) -> SharedPrefixItems:
    """Views of `buffer [buffer_length(rows)]` int32 on the device."""
    lengths = (4, ITEM_FIELDS * MAX_ITEMS, MAX_RANGES * rows, rows, rows)
    count, items, entries, covered, counts = buffer.split(lengths)
    return SharedPrefixItems(
        count[:1], items.view(MAX_ITEMS, ITEM_FIELDS), entries, covered, counts
    )


def pack_ranges(
    groups: tuple[StepPrefixGroup, ...], decode_slots: Int32Array, rows: int, sharing: Sharing
) -> Int32Array:
    """The packed ranges of a step that decodes `decode_slots` in a batch of `rows`.

    The groups' members all decode. Groups that find no room are left out: what is not shared is
    read by each row alone.
    """
    buffer = np.zeros(buffer_length(rows), np.int32)
    ranges = _RangePlan(rows)
    row_of = np.zeros(int(decode_slots.max()) + 1, np.int32)
    row_of[decode_slots] = np.arange(len(decode_slots))
    shared = [
        (row_of[group.slots], group.blocks * sharing.block_size // RANGE_UNIT * RANGE_UNIT)
        for group in groups
    ]
    # Positions times tiles of rows, an upper bound: inner groups repeat those of outer ones.
    work = sum(-(-len(members) // sharing.members) * end for members, end in shared)
    length = work * sharing.kv_heads // (2 * sharing.processors)
    length = max(MIN_RANGE, -(-length // RANGE_UNIT) * RANGE_UNIT)
    for members, end in shared:
        ranges.add(members, end, length, sharing.members, decode_slots)
    ranges.write(buffer)
    return buffer


class _RangePlan:
    """Items and what they cover, group by group."""

    def __init__(self, rows: int) -> None:
        self._items: list[tuple[int, ...]] = []
        self._entries: list[Int32Array] = []
        self._num_entries = 0
        self._covered = np.zeros(rows, np.int32)
        self._counts = np.zeros(rows, np.int32)

    def add(
        self, rows: Int32Array, end: int, length: int, members: int, decode_slots: Int32Array
    ) -> None:
        """Shares positions up to `end` among `rows`, in ranges of about `length`."""
        begin, count = int(self._covered[rows[0]]), int(self._counts[rows[0]])
        # Groups nest: what covers one member of a group covers all.
        assert (self._covered[rows] == begin).all(), "prefix groups overlap without nesting"
        left = MAX_RANGES - count
        if end <= begin or not left:
            return
        # Groups inside this one need ranges too.
        splits = min(-(-(end - begin) // length), left // 2 + 1)
        tiles = -(-len(rows) // members)
        if len(self._items) + tiles * splits > MAX_ITEMS:
            return
        step = -(-(end - begin) // (splits * RANGE_UNIT)) * RANGE_UNIT
        cuts = [*range(begin, end, step), end]
        slot = int(decode_slots[rows[0]])
        for tile in range(0, len(rows), members):
            some = rows[tile : tile + members]
            for number, (start, stop) in enumerate(pairwise(cuts)):
                ordinal = count + number
                self._items.append((slot, start, stop, self._num_entries, len(some), ordinal))
            self._entries.append(some)
            self._num_entries += len(some)
        self._covered[rows] = end
        self._counts[rows] = count + len(cuts) - 1

    def write(self, buffer: Int32Array) -> None:
        """Writes the buffer that `shared_ranges` reads, long items first."""
        if not self._items:
            return
        rows = len(self._covered)
        items = np.array(self._items, np.int32)
        items = items[np.argsort(items[:, 1] - items[:, 2], kind="stable")]
        entries = np.concatenate(self._entries)
        buffer[0] = len(items)
        buffer[4 : 4 + items.size] = items.ravel()
        at = 4 + ITEM_FIELDS * MAX_ITEMS
        buffer[at : at + len(entries)] = entries
        at += MAX_RANGES * rows
        buffer[at : at + rows] = self._covered
        buffer[at + rows :] = self._counts
