"""How the work of decode attention is cut into equal shares, on the device.

The work of a batch is a line of *units*. A unit is one tile of KV positions of one KV head of one
row; a row's heads follow one another, and so do the rows. A fixed number of programs cuts that
line into equal shares, whatever the lengths are, so one long sequence among short ones spreads
over the whole device, and the grid depends on nothing but the device. Lengths are read on the
device only: a captured CUDA graph stays right as they grow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagewire.worker.ops.triton.integers import next_power_of_2


def padded_rows(rows: int) -> int:
    """Round a row count up to one of a few sizes, so that few variants are compiled.

    A single row has a size of its own, because then nothing need be summed over rows.
    """
    sizes = (1, 64, 256, next_power_of_2(rows))
    return next(size for size in sizes if rows <= size)


@triton.jit
def row_units(
    lengths_ptr,
    shared_ptr,
    rows,
    TILE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    RANGES: tl.constexpr,
):
    """Return the units of every row, `[PADDED_ROWS]`."""
    index = tl.arange(0, PADDED_ROWS)
    lengths = tl.load(lengths_ptr + index, mask=index < rows, other=0)
    if RANGES:
        lengths -= tl.load(shared_ptr + index, mask=index < rows, other=0)
    return tl.cdiv(tl.maximum(lengths, 0), TILE) * KV_HEADS


@triton.jit
def cut(total, programs, least_share):
    """Cut the line into shares: return the units of a share, and how many first ones have one more.

    As many programs get a share as there are shares of `least_share` units, or all of them.
    """
    used = tl.maximum(tl.minimum(programs, tl.cdiv(total, least_share)), 1)
    return total // used, total % used


@triton.jit
def share_of(unit, share, longer):
    """Return the share that a unit lies in."""
    border = longer * (share + 1)
    return tl.where(
        unit < border,
        unit // (share + 1),
        longer + tl.maximum(unit - border, 0) // tl.maximum(share, 1),
    )
