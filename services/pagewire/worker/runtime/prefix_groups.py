"""Cuts prefix groups into the work items of shared-prefix attention."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from pagewire.packing import Int32Array
from pagewire.worker.ops.contract.shared_prefix import (
    ITEM_FIELDS,
    MAX_RANGES,
    PrefixLimits,
    SharedPrefixItems,
)
from pagewire.worker.protocol.steps.draft_rows import places_of
from pagewire.worker.protocol.steps.step import StepPrefixGroup

# In positions. The merge of shorter ranges would cost more than the parallel work saves.
MIN_RANGE = 256
# An item has at least two rows, so 512 rows fit with up to four items each.
MAX_ITEMS = 1024


@dataclass(frozen=True, slots=True)
class ItemSizes:
    """Sizes that decide how groups are cut into items."""

    limits: PrefixLimits  # of the operations
    kv_heads: int
    processors: int  # multiprocessors of the GPU
    block_size: int


def buffer_length(rows: int, max_ranges: int = MAX_RANGES) -> int:
    """Number of int32 values of the packed items of a batch of `rows`."""
    return 4 + ITEM_FIELDS * MAX_ITEMS + max_ranges * rows + 2 * rows


def item_views(buffer: torch.Tensor, rows: int, max_ranges: int = MAX_RANGES) -> SharedPrefixItems:
    """Views of `buffer [buffer_length(rows, max_ranges)]` int32 on the device."""
    lengths = (4, ITEM_FIELDS * MAX_ITEMS, max_ranges * rows, rows, rows)
    count, items, entries, covered, counts = buffer.split(lengths)
    return SharedPrefixItems(
        count[:1], items.view(MAX_ITEMS, ITEM_FIELDS), entries, covered, counts
    )


def pack_items(
    groups: tuple[StepPrefixGroup, ...], decode_slots: Int32Array, rows: int, sizes: ItemSizes
) -> Int32Array:
    """The packed items of a step that decodes `decode_slots` in a batch of `rows`.

    All members of the groups must decode. If a slot is a member, all its rows are. Groups that do
    not fit are left out: then each row reads its prefix by itself. The result is
    `[buffer_length(rows, max_ranges)]` int32, as `item_views` reads it.
    """
    limits = sizes.limits
    unit = limits.unit
    buffer = np.zeros(buffer_length(rows, limits.max_ranges), np.int32)
    plan = _ItemPlan(rows, limits)
    # A slot's rows are neighbours: one, and those of its drafts.
    counts = np.bincount(decode_slots).astype(np.int32)
    firsts = np.zeros_like(counts)
    firsts[decode_slots[::-1]] = np.arange(len(decode_slots), dtype=np.int32)[::-1]
    shared = []
    for group in groups:
        held = counts[group.slots]
        members = np.repeat(firsts[group.slots], held) + places_of(held)
        shared.append((members, group.blocks * sizes.block_size // unit * unit))
    # Positions times tiles of rows. An upper bound: inner groups count those of outer ones again.
    work = sum(-(-len(members) // limits.members) * end for members, end in shared)
    length = work * sizes.kv_heads // (2 * sizes.processors)
    length = max(MIN_RANGE, -(-length // unit) * unit)
    for members, end in shared:
        plan.add(members, end, length, decode_slots)
    plan.write(buffer)
    return buffer


class _ItemPlan:
    """The items so far, and the positions that they cover in each row."""

    def __init__(self, rows: int, limits: PrefixLimits) -> None:
        self._limits = limits
        self._items: list[tuple[int, ...]] = []
        self._entries: list[Int32Array] = []
        self._num_entries = 0
        self._covered = np.zeros(rows, np.int32)
        self._counts = np.zeros(rows, np.int32)

    def add(self, rows: Int32Array, end: int, length: int, decode_slots: Int32Array) -> None:
        """Adds items that cover `rows` up to position `end`, or as far as their ranges allow.

        An item has about `length` positions, or `max_positions` of the limits.
        """
        limits = self._limits
        begin, count = int(self._covered[rows[0]]), int(self._counts[rows[0]])
        # Groups nest, so all members of a group are covered up to the same position.
        assert (self._covered[rows] == begin).all(), "prefix groups overlap without nesting"
        left = limits.max_ranges - count
        if end <= begin or not left:
            return
        # Half of the ranges left remain for the groups inside this one.
        splits = min(-(-(end - begin) // length), left // 2 + 1)
        if limits.max_positions is not None:
            end = min(end, begin + left * limits.max_positions)
            splits = -(-(end - begin) // limits.max_positions)
        members = limits.members
        tiles = -(-len(rows) // members)
        if len(self._items) + tiles * splits > MAX_ITEMS:
            return
        step = -(-(end - begin) // (splits * limits.unit)) * limits.unit
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
        """Writes the items to `buffer`, longest first."""
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
        at += self._limits.max_ranges * rows
        buffer[at : at + rows] = self._covered
        buffer[at + rows :] = self._counts
