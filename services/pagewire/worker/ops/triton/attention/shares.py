"""The plan that cuts decode attention into equal shares, computed on the device.

A *unit* is one tile of KV positions of one KV head of one row. All units of a batch form a line:
tile after tile, head after head, row after row. A *segment* is all units of one KV head of one row.
A *share* is a piece of the line that one program computes.

The number of programs is fixed, so the grid depends on the device only. One long sequence among
short ones is spread over the whole device. Rows of length 0, which pad a captured batch, have no
units. Lengths are read on the device only, so a captured CUDA graph stays valid while they grow.

If lengths are so similar that shares of whole segments are almost equal, no segment is cut, and
no piece is merged. See docs/decisions/decode-attention-shares.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract.blocks import RUN
from pagewire.worker.ops.contract.shared_prefix import SharedPrefixItems
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.attention.paged import window_begin

_PROGRAMS = 16  # shares that one program plans
# Segments stay whole if the longest share is then at most this fraction longer than an equal share.
# Measured on an H200: at 1/32 (512 rows of 8 heads on 1,056 programs) a step takes 0.4 to 0.8 %
# less time, at 1/8 some steps gain nothing, at 1/6 the longest share costs more than a merge.
_LEEWAY = 1 / 8


def padded_rows(rows: int) -> int:
    """Round a number of rows up to one of a few sizes, so that few variants are compiled."""
    sizes = (64, 256, next_power_of_2(rows))
    return next(size for size in sizes if rows <= size)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a batch is cut; all tensors are int32 on the device."""

    # For the merge, [2]: the units of a share, and the number of leading shares that have one unit
    # more. If segments stay whole: all units and 0, as if one share had all units. With a
    # `long_tile` [3]: the tile as well.
    shares: Tensor
    ends: Tensor  # [rows], the end of each row on the line
    rows: Tensor  # [rows], the rows that are not empty; the rest is undefined
    units: Tensor  # [programs + 1], the start of each share on the line, then the end of the last
    begins: Tensor  # [programs, 2], for each start the index in `rows` and the unit of that row


def plan_shares(
    lengths: Tensor,
    shared: SharedPrefixItems | None,
    kv_heads: int,
    tile: int,
    programs: int,
    min_share: int,
    *,
    window: int | None = None,
    long_tile: int = 0,
    long_share: int = 0,
) -> DecodePlan:
    """Cut a batch into shares.

    Args:
        lengths: `[rows]` int32, as in `decode_attention`.
        shared: as in `decode_attention`. The positions that it covers have no units.
        kv_heads: heads of each row.
        tile: KV positions of a unit.
        programs: the number of shares; some may be empty.
        min_share: the smallest share in units, unless segments stay whole.
        window: as in `decode_attention`. Positions before it have no units.
        long_tile: the tile if equal shares have at least `long_share` positions; 0: `tile`.
    """
    rows = len(lengths)
    plan = DecodePlan(
        shares=lengths.new_empty(3 if long_tile else 2),
        ends=lengths.new_empty(rows),
        rows=lengths.new_empty(rows),
        units=lengths.new_empty(programs + 1),
        begins=lengths.new_empty((programs, 2)),
    )
    _plan_kernel[(cdiv(programs + 1, _PROGRAMS),)](
        plan.shares,
        plan.ends,
        plan.rows,
        plan.units,
        plan.begins,
        lengths,
        lengths if shared is None else shared.lengths,
        rows,
        programs,
        min_share,
        TILE=tile,
        LONG_TILE=long_tile,
        LONG_SHARE=long_share,
        KV_HEADS=kv_heads,
        PADDED_ROWS=padded_rows(rows),
        RANGES=shared is not None,
        WINDOW=window or 0,
        RUN=RUN,
        PROGRAMS=_PROGRAMS,
        LEEWAY=_LEEWAY,
        num_warps=4,
    )
    return plan


@triton.jit(do_not_specialize=["rows", "programs", "min_share"])
def _plan_kernel(
    shares_ptr,  # these five are the plan
    ends_ptr,
    rows_ptr,
    units_ptr,
    begins_ptr,
    lengths_ptr,  # [rows]
    shared_ptr,  # [rows]
    rows,
    programs,
    min_share,
    TILE: tl.constexpr,
    LONG_TILE: tl.constexpr,  # of long shares, see `is_long`; 0: TILE
    LONG_SHARE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    RANGES: tl.constexpr,
    WINDOW: tl.constexpr,
    RUN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LEEWAY: tl.constexpr,
):
    """Write the plan.

    A program plans PROGRAMS shares and reads all lengths. The grid is `[(programs + 1) /
    PROGRAMS]`. Decode attention reads the plan before its preceding kernel has ended. The preceding
    kernel may be this one, because this kernel does not let the next kernel start early.
    """
    row = tl.arange(0, PADDED_ROWS)
    length = tl.load(lengths_ptr + row, mask=row < rows, other=0)
    if WINDOW:
        length -= window_begin(length, WINDOW, RUN)
    if RANGES:
        length -= tl.load(shared_ptr + row, mask=row < rows, other=0)
    length = tl.maximum(length, 0)
    tile = TILE
    if LONG_TILE:
        long = is_long(tl.sum(length, 0) * KV_HEADS, programs, LONG_SHARE)
        tile = tl.where(long, LONG_TILE, TILE)
    tiles = tl.cdiv(length, tile)
    units = tiles * KV_HEADS
    held = units > 0
    number = tl.cumsum(held.to(tl.int32), 0) - 1  # index among the rows that are not empty
    ends = tl.cumsum(units, 0)
    total = tl.sum(units, 0)
    share, longer = cut(total, programs, min_share)
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    unit = tl.minimum(program * share + tl.minimum(program, longer), total)
    segments = tl.sum(held.to(tl.int32), 0) * KV_HEADS
    longest = tl.cdiv(segments, programs) * tl.max(tiles, 0)  # share of whole segments
    if longest <= total / programs * (1 + LEEWAY):
        # Longer shares are spread evenly. With all of them first, a step takes 1 % more time.
        segment = tl.minimum(program * segments // programs, segments)
        of = number[:, None] - (segment // KV_HEADS)[None, :]  # [rows, programs]
        unit = tl.sum(tl.where(of < 0, units[:, None], 0), 0)
        unit += tl.sum(tl.where((of == 0) & held[:, None], tiles[:, None], 0), 0) * (
            segment % KV_HEADS
        )
        share = total
        longer = 0
    before = ends[:, None] <= unit[None, :]  # [rows, programs]
    begins = tl.sum((before & held[:, None]).to(tl.int32), 0)
    within = unit - tl.max(tl.where(before, ends[:, None], 0), 0)
    begins = tl.where(unit < total, begins, 0)  # a program may have no share
    tl.store(units_ptr + program, unit, mask=program <= programs)
    tl.store(begins_ptr + program * 2, begins, mask=program < programs)
    tl.store(begins_ptr + program * 2 + 1, within, mask=program < programs)
    if tl.program_id(0) == 0:
        tl.store(ends_ptr + row, ends, mask=row < rows)
        tl.store(rows_ptr + number, row, mask=held)
        if total == 0:
            tl.store(rows_ptr, 0)
        tl.store(shares_ptr, share)
        tl.store(shares_ptr + 1, longer)
        if LONG_TILE:
            tl.store(shares_ptr + 2, tile)


@triton.jit
def is_long(positions, programs, LONG_SHARE: tl.constexpr):
    """Return whether equal shares of `positions`, those of all heads, have LONG_SHARE or more."""
    return positions >= programs * LONG_SHARE


@triton.jit
def cut(total, programs, min_share):
    """Return the units of a share, and the number of leading shares that have one unit more.

    If there are fewer shares of `min_share` units than programs, the other programs get no share.
    """
    used = tl.maximum(tl.minimum(programs, tl.cdiv(total, min_share)), 1)
    return total // used, total % used


@triton.jit
def share_of(unit, share, longer):
    """Return the share that a unit belongs to; `share` and `longer` are results of `cut`."""
    border = longer * (share + 1)
    return tl.where(
        unit < border,
        unit // (share + 1),
        longer + tl.maximum(unit - border, 0) // tl.maximum(share, 1),
    )
