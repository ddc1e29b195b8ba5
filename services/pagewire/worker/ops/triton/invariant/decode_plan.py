"""The plan that assigns segments of decode rows to programs, computed on the device once a step.

A *unit* is one segment of one KV head of one row. All units of a batch form a line: segment after
segment, head after head, row after row. A *share* is a piece of the line that one program computes.
Shares are equal as in `attention.shares`, and are cut between units only, so a cut changes no bits.

If the units of a head lie in several shares, programs store them in scratch memory, where they are
merged. If the batch has more units than fit there, shares are cut between heads only. Shared
prefixes have no units, unless the other units do not fit: then each row reads its prefix itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract.shared_prefix import SharedPrefixItems
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.attention.shares import cut, padded_rows
from pagewire.worker.ops.triton.invariant.segments import SEGMENT

_PROGRAMS = 16  # shares that one program plans
# Heads stay whole if the longest share is then at most this fraction longer than an equal share.
_LEEWAY = 1 / 8
# Units that the scratch memory holds, for each program of decode attention. A unit is 2 KiB with
# four query heads of 128. A program with more units than this has enough work.
UNITS_PER_PROGRAM = 128


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """How a batch is cut; all tensors are int32 on the device."""

    shared: Tensor  # [1], 1 if the prefixes are read as shared ones, else 0
    ends: Tensor  # [rows], the end of each row on the line
    rows: Tensor  # [rows], the rows that are not empty; the rest is undefined
    units: Tensor  # [programs + 1], the start of each share on the line, then the end of the last
    begins: Tensor  # [programs, 2], for each start the index in `rows` and the unit of that row
    # [2], for the merge: the units of a share, and the number of leading shares that have one unit
    # more. If no head is cut: all units and 0, as if one share had all units.
    shares: Tensor


def plan_segments(
    lengths: Tensor, shared: SharedPrefixItems | None, kv_heads: int, programs: int, capacity: int
) -> SegmentPlan:
    """Cut a batch into shares.

    Args:
        lengths: `[rows]` int32, as in `decode_attention`.
        shared: as in `decode_attention`, with ranges of whole segments.
        kv_heads: heads of each row.
        programs: the number of shares; some may be empty.
        capacity: units that the scratch memory holds.
    """
    rows = len(lengths)
    plan = SegmentPlan(
        shared=lengths.new_empty(1),
        ends=lengths.new_empty(rows),
        rows=lengths.new_empty(rows),
        units=lengths.new_empty(programs + 1),
        begins=lengths.new_empty((programs, 2)),
        shares=lengths.new_empty(2),
    )
    _plan_kernel[(cdiv(programs + 1, _PROGRAMS),)](
        plan.shared,
        plan.ends,
        plan.rows,
        plan.units,
        plan.begins,
        plan.shares,
        lengths,
        lengths if shared is None else shared.lengths,
        rows,
        programs,
        capacity,
        SEGMENT=SEGMENT,
        KV_HEADS=kv_heads,
        PADDED_ROWS=padded_rows(rows),
        RANGES=shared is not None,
        PROGRAMS=_PROGRAMS,
        LEEWAY=_LEEWAY,
        num_warps=4,
    )
    return plan


@triton.jit(do_not_specialize=["rows", "programs", "capacity"])
def _plan_kernel(
    flag_ptr,  # these six are the plan
    ends_ptr,
    rows_ptr,
    units_ptr,
    begins_ptr,
    shares_ptr,
    lengths_ptr,  # [rows]
    shared_ptr,  # [rows]
    rows,
    programs,
    capacity,  # units
    SEGMENT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    RANGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LEEWAY: tl.constexpr,
):
    """Write the plan.

    A program plans PROGRAMS shares and reads all lengths. The grid is `[(programs + 1) /
    PROGRAMS]`. The kernel does not let the next kernel start early.
    """
    row = tl.arange(0, PADDED_ROWS)
    length = tl.maximum(tl.load(lengths_ptr + row, mask=row < rows, other=0), 0)
    sharing = 0
    if RANGES:
        # An empty row may have a shared prefix.
        own = tl.maximum(length - tl.load(shared_ptr + row, mask=row < rows, other=0), 0)
        fits = tl.sum(tl.cdiv(own, SEGMENT), 0) * KV_HEADS <= capacity
        length = tl.where(fits, own, length)
        sharing = fits.to(tl.int32)
    segments = tl.cdiv(length, SEGMENT)
    units = segments * KV_HEADS
    held = units > 0
    number = tl.cumsum(held.to(tl.int32), 0) - 1  # index among the rows that are not empty
    ends = tl.cumsum(units, 0)
    total = tl.sum(units, 0)
    share, longer = cut(total, programs, 1)
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    unit = tl.minimum(program * share + tl.minimum(program, longer), total)
    heads = tl.sum(held.to(tl.int32), 0) * KV_HEADS
    longest = tl.cdiv(heads, programs) * tl.max(segments, 0)  # share of whole heads
    if (longest <= total / programs * (1 + LEEWAY)) | (total > capacity):
        head = tl.minimum(program * heads // programs, heads)
        of = number[:, None] - (head // KV_HEADS)[None, :]  # [rows, programs]
        unit = tl.sum(tl.where(of < 0, units[:, None], 0), 0)
        unit += tl.sum(tl.where((of == 0) & held[:, None], segments[:, None], 0), 0) * (
            head % KV_HEADS
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
        tl.store(flag_ptr, sharing)
