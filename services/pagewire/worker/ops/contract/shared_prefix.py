"""KV ranges that several decode rows share: attention can read each once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# A range begins and ends at multiples of this many positions: whole tiles of every kernel.
RANGE_UNIT = 64
# Shared ranges that one row may be in.
MAX_RANGES = 7
# What an item says: see `SharedRanges.items`.
ITEM_FIELDS = 6


@dataclass(frozen=True, slots=True)
class SharedRanges:
    """Attention over the first KV positions of some rows, cut into items; all int32.

    An item is a KV range and the rows that share it. The ranges of one row follow one another
    from position 0 and leave its last position to the row alone. A row without ranges is the
    ordinary case; sharing never changes what is computed.
    """

    num_items: Tensor  # [1]
    # [items, 6]: the slot whose blocks are read, the range's begin and end, where in `entries`
    # its rows begin, how many they are, and which of each row's ranges this is.
    items: Tensor
    entries: Tensor  # [entries], rows of the batch
    lengths: Tensor  # [rows], positions of each row that its ranges cover
    counts: Tensor  # [rows], ranges of each row
