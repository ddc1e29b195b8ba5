"""Prefixes that several decode rows share: attention can read their KV once for all these rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Unless an implementation has other limits: a range begins and ends at multiples of this many
# positions, which are whole tiles of every kernel.
RANGE_UNIT = 64
# The shared prefix of one row is cut into at most this many ranges.
MAX_RANGES = 7
# int32 values that describe an item, see `SharedPrefixItems.items`.
ITEM_FIELDS = 6


@dataclass(frozen=True, slots=True)
class PrefixLimits:
    """The limits of the shared prefixes that an implementation reads."""

    members: int  # rows of an item at most
    unit: int = RANGE_UNIT  # a range begins and ends at multiples of this many positions
    max_ranges: int = MAX_RANGES  # of one row
    max_positions: int | None = None  # of a range; None for no limit


@dataclass(frozen=True, slots=True)
class SharedPrefixItems:
    """The shared prefixes of a batch, cut into work items; all tensors are int32.

    An item is a range of KV positions and the rows that share it. The ranges of one row follow
    one another from position 0. They never reach its last position, so each row keeps some KV of
    its own. Attention gives the same result with and without these items.
    """

    num_items: Tensor  # [1]
    # [items, 6]: the slot whose blocks are read, the begin and end of the range, where the item's
    # rows begin in `entries`, their number, and the index of the range among those of each row.
    items: Tensor
    entries: Tensor  # [entries], rows of the batch
    lengths: Tensor  # [rows], positions that the ranges of each row cover
    counts: Tensor  # [rows], ranges of each row
