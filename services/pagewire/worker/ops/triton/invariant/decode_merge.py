"""The fold of segments that several programs computed, in the order of their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.triton.attention.paged import LOWEST
from pagewire.worker.ops.triton.attention.shares import share_of
from pagewire.worker.ops.triton.invariant.decode_plan import SegmentPlan
from pagewire.worker.ops.triton.invariant.segments import finished, fold, start

STEP = 8  # segments whose loads are issued together


@dataclass(frozen=True, slots=True)
class Partials:
    """Segments before they are folded, for the query heads of one or all KV heads; float32."""

    out: Tensor  # [segments, heads, head_dim], sums of weighted values
    stats: Tensor  # [segments, 2, heads], largest scores in base 2, then sums of weights

    @classmethod
    def empty(cls, segments: int, heads: int, head_dim: int, device: torch.device) -> Partials:
        """Return memory for `segments` segments."""
        return cls(
            torch.empty((segments, heads, head_dim), dtype=torch.float32, device=device),
            torch.empty((segments, 2, heads), dtype=torch.float32, device=device),
        )


def merge_segments(
    out: Tensor,
    partials: Partials,
    ranges: Partials,
    lengths: Tensor,
    shared_lengths: Tensor,
    counts: Tensor,
    plan: SegmentPlan,
    **common: int | bool,
) -> None:
    """Write to `out` the heads whose segments are in scratch memory, and zeros for empty rows.

    Args:
        out: `[rows, query_heads, head_dim]`; the other heads are already written.
        partials: one segment for each unit of the plan.
        ranges: `[rows * RANGES]` segments of shared prefixes; not read if `RANGES` is 0.
        lengths: `[rows]` int32, cached tokens.
        shared_lengths, counts: `[rows]` int32, tokens in shared prefixes and the number of their
            segments; not read if `RANGES` is 0.
        plan: how the batch was cut.
        common: constants and launch options, the same as those of decode attention.
    """
    rows, query_heads, _ = out.shape
    _merge_kernel[(rows, query_heads)](
        out,
        partials.out,
        partials.stats,
        ranges.out,
        ranges.stats,
        lengths,
        shared_lengths,
        counts,
        plan.shared,
        plan.shares,
        plan.ends,
        STEP=STEP,
        num_warps=1,
        **common,
    )


@triton.jit
def _fold_pieces(
    all_highest, all_norm, all_out, out_ptr, stats_ptr, stride, count, heads,
    HEAD_DIM: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Fold `count` segments of one head; `stride` is heads from one segment to the next.

    `stats` has `heads` heads. Pointers point to the head in the first segment.
    """
    dim = tl.arange(0, HEAD_DIM)[None, :]
    one = tl.arange(0, 1)
    for done in range(0, count, STEP):
        highest = ()
        norm = ()
        out = ()
        for piece in tl.static_range(STEP):
            # Past the end: segments without positions, which change nothing.
            held = done + piece < count
            at = (done + piece) * stride
            highest += (tl.load(stats_ptr + at * 2 + one, mask=held, other=LOWEST),)  # type: ignore[assignment]
            norm += (tl.load(stats_ptr + at * 2 + heads + one, mask=held, other=0.0),)  # type: ignore[assignment]
            out += (tl.load(out_ptr + at * HEAD_DIM + dim, mask=held, other=0.0),)  # type: ignore[assignment]
        for piece in tl.static_range(STEP):
            all_highest, all_norm, all_out = fold(
                all_highest, all_norm, all_out, highest[piece], norm[piece], out[piece]
            )
    return all_highest, all_norm, all_out


@triton.jit(do_not_specialize_on_alignment=["lengths_ptr", "shared_ptr", "counts_ptr"])
def _merge_kernel(
    out_ptr,  # [rows, kv_heads * group, head_dim]
    partials_ptr,  # [capacity, group, head_dim]
    stats_ptr,  # [capacity, 2, group]
    range_partials_ptr,  # [rows, RANGES, kv_heads * group, head_dim]
    range_stats_ptr,  # [rows, RANGES, 2, kv_heads * group]
    lengths_ptr,  # [rows]
    shared_ptr,  # [rows], positions in shared prefixes
    counts_ptr,  # [rows], segments of shared prefixes
    flag_ptr,  # these three belong to the plan
    shares_ptr,
    ends_ptr,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    RANGES: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Fold the segments of one query head of one row. The grid is `[rows, query heads]`."""
    if PDL:  # every program waits, so that the next kernel's wait covers earlier kernels, too
        gdc_wait()
        gdc_launch_dependents()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    row = tl.program_id(0)
    query_head = tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    if length < 0:  # true for most rows when a small batch runs in a large graph
        return
    to = out_ptr + (row * HEADS + query_head) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    if length == 0:
        tl.store(to, tl.zeros([1, HEAD_DIM], out_ptr.dtype.element_ty))
        return
    count = 0
    begin = 0
    if RANGES:
        sharing = tl.load(flag_ptr)
        count = tl.load(counts_ptr + row) * sharing
        begin = tl.load(shared_ptr + row) * sharing
    segments = tl.cdiv(length - begin, SEGMENT)
    share = tl.load(shares_ptr)
    longer = tl.load(shares_ptr + 1)
    first = tl.load(ends_ptr + row) - segments * (KV_HEADS - query_head // GROUP)
    whole = share_of(first, share, longer) == share_of(first + segments - 1, share, longer)
    if whole & (count == 0):
        return

    highest, norm, out = start(1, HEAD_DIM)
    if RANGES:
        piece = row.to(tl.int64) * RANGES * HEADS
        highest, norm, out = _fold_pieces(
            highest, norm, out,
            range_partials_ptr + (piece + query_head) * HEAD_DIM,
            range_stats_ptr + piece * 2 + query_head,
            HEADS, count, HEADS, HEAD_DIM, STEP,
        )  # fmt: skip
    piece = first.to(tl.int64) * GROUP
    highest, norm, out = _fold_pieces(
        highest, norm, out,
        partials_ptr + (piece + query_head % GROUP) * HEAD_DIM,
        stats_ptr + piece * 2 + query_head % GROUP,
        GROUP, segments, GROUP, HEAD_DIM, STEP,
    )  # fmt: skip
    tl.store(to, finished(norm, out).to(out_ptr.dtype.element_ty))
