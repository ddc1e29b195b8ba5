"""How the work of decode attention is cut into equal shares, on the device.

The work of a batch is a line of *units*. A unit is one tile of KV positions of one KV head of one
row; a row's heads follow one another, and so do the rows. A fixed number of programs cuts that
line into equal shares, whatever the lengths are, so one long sequence among short ones spreads
over the whole device, and the grid depends on nothing but the device. Rows of length 0, which pad
a captured batch, have no units. Lengths are read on the device only: a captured CUDA graph stays
right as they grow.

Where lengths are so alike that shares of whole segments (one KV head of one row) are nearly equal,
no segment is cut, and nothing is left to merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract.shared_ranges import SharedRanges
from pagewire.worker.ops.integers import cdiv, next_power_of_2

_PROGRAMS = 16  # whose shares one program plans
# By how much an equal share may be exceeded so that segments stay whole. 512 rows of 8 heads are 4
# segments or 3 for each of 1,056 programs, 1/32 more, which makes a step 0.4 to 0.8 % shorter; at
# 1/8 some gain nothing, at 1/6 the longest shares take longer than a merge
# (docs/decisions/decode-attention-shares.md).
_LEEWAY = 1 / 8


def padded_rows(rows: int) -> int:
    """Round a row count up to one of a few sizes, so that few variants are compiled."""
    sizes = (64, 256, next_power_of_2(rows))
    return next(size for size in sizes if rows <= size)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a batch is cut; int32 on the device."""

    # For the merge, [2]: units of a share, and how many first ones have one more. Where segments
    # stay whole, one share of all units: nothing lies in two.
    shares: Tensor
    ends: Tensor  # [rows], where each row ends on the line
    rows: Tensor  # [rows], those that are not empty, then what is not read
    units: Tensor  # [programs + 1], where each share begins on the line, and where the last ends
    begins: Tensor  # [programs, 2]: in which of `rows` a share begins, and at which unit of it


def plan_shares(
    lengths: Tensor,
    shared: SharedRanges | None,
    kv_heads: int,
    tile: int,
    programs: int,
    least_share: int,
) -> DecodePlan:
    """Cut the rows into shares for `programs`, of `least_share` units of `tile` positions at least
    unless segments stay whole.

    `lengths` and `shared` are those of `decode_attention`.
    """
    rows = len(lengths)
    plan = DecodePlan(
        shares=lengths.new_empty(2),
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
        least_share,
        TILE=tile,
        KV_HEADS=kv_heads,
        PADDED_ROWS=padded_rows(rows),
        RANGES=shared is not None,
        PROGRAMS=_PROGRAMS,
        LEEWAY=_LEEWAY,
        num_warps=4,
    )
    return plan


@triton.jit(do_not_specialize=["rows", "programs", "least_share"])
def _plan_kernel(
    shares_ptr,
    ends_ptr,
    rows_ptr,
    units_ptr,
    begins_ptr,
    lengths_ptr,
    shared_ptr,
    rows,
    programs,
    least_share,
    TILE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    RANGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LEEWAY: tl.constexpr,
):
    """Each program plans PROGRAMS shares.

    Decode attention reads a plan before the kernel in front of it has ended. Where that is this
    one, it is safe because this one lets nobody start early.
    """
    row = tl.arange(0, PADDED_ROWS)
    length = tl.load(lengths_ptr + row, mask=row < rows, other=0)
    if RANGES:
        length -= tl.load(shared_ptr + row, mask=row < rows, other=0)
    tiles = tl.cdiv(tl.maximum(length, 0), TILE)
    units = tiles * KV_HEADS
    held = units > 0
    number = tl.cumsum(held.to(tl.int32), 0) - 1  # among the rows that are not empty
    ends = tl.cumsum(units, 0)
    total = tl.sum(units, 0)
    share, longer = cut(total, programs, least_share)
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    unit = tl.minimum(program * share + tl.minimum(program, longer), total)
    segments = tl.sum(held.to(tl.int32), 0) * KV_HEADS
    longest = tl.cdiv(segments, programs) * tl.max(tiles, 0)  # of shares of whole segments
    if longest <= total / programs * (1 + LEEWAY):
        # Longer ones lie evenly among the others: where they come first, a step takes 1 % more.
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
