"""The merge of partial results of decode attention.

A *segment* (one KV head of one row) that is cut has a *piece* in each of its shares: a float32
output that is normalized over the KV positions of the piece, and its log-sum-exp, in base 2 of the
scaled scores. A shared prefix has pieces of the same form (`shared_prefix`). The pieces of one
segment are merged by

    lse = log2(sum_i 2^lse_i)        out = sum_i 2^(lse_i - lse) out_i

This is the reduction of Flash-Decoding (Dao et al., 2023). A share has at most two pieces: one of a
segment that began in an earlier share (index 0), and one of a segment that continues in the next
share (index 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.attention.paged import LOWEST, window_begin
from pagewire.worker.ops.triton.attention.shared_prefix import Pieces
from pagewire.worker.ops.triton.attention.shares import DecodePlan, cut, is_long, share_of

WARP_VALUES = 4096  # values of pieces in the registers of a warp
MANY_HEADS = 8  # most query heads that a program merges, unless a group has more


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """A program merges `step` pieces at a time of each of `heads` query heads of a row.

    It merges one of `parts` equal parts of the head size.
    """

    step: int
    heads: int
    parts: int = 1

    def programs(self, programs: int, kv_heads: int) -> int:
        """Return how many of `programs` attend to a batch of one row.

        Each head then has about as many pieces as a whole number of steps merges. A few more pieces
        would cost another step.
        """
        at_once = self.step * kv_heads
        return programs - programs % at_once if programs > at_once else programs


def merge_config(rows: int, kv_heads: int, group: int, programs: int) -> MergeConfig:
    """Choose how the pieces of `programs` are merged.

    There are few choices, so that few variants are compiled. The more segments a batch has, the
    fewer pieces each segment has. If most segments are whole, a program merges several of them. The
    segments of a single row may have many pieces.
    """
    if rows == 1:
        return MergeConfig(128, 1, parts=4)
    segments = rows * kv_heads
    pieces = programs // segments + 2  # of one segment, approximately
    if pieces > 8:
        return MergeConfig(16, 2 if group % 2 == 0 else 1)
    if pieces > 4:
        return MergeConfig(8, group)
    several = 1
    while (
        several * programs < segments
        and 2 * several * group <= MANY_HEADS
        and kv_heads % (2 * several) == 0
    ):
        several *= 2
    return MergeConfig(4, several * group)


def merge_pieces(
    out: Tensor,
    pieces: Tensor,
    sums: Tensor,
    ranges: Pieces,
    lengths: Tensor,
    shared_lengths: Tensor,
    counts: Tensor,
    plan: DecodePlan,
    min_share: int,
    config: MergeConfig,
    **common: int | bool,
) -> None:
    """Merge the heads that are cut into pieces, and write them to `out`.

    Args:
        out: `[rows, query_heads, head_dim]`; the other heads are already written.
        pieces, sums: `[programs, 2, group, head_dim]` and `[programs, 2, group]` float32, outputs
            and log-sum-exps of each share.
        ranges: the pieces of shared prefixes; not read if `RANGES` is 0.
        lengths: `[rows]` int32, cached tokens.
        shared_lengths, counts: `[rows]` int32, tokens in shared prefixes and the number of their
            ranges; not read if `RANGES` is 0.
        plan: how decode attention cut the batch; not read unless `PLANNED`.
        min_share: the smallest share in units, as in decode attention.
        config: the tiles of the merge.
        common: constants and launch options, the same as those of decode attention.
    """
    rows, query_heads, head_dim = out.shape
    padded_heads = next_power_of_2(config.heads)
    dims = head_dim // config.parts
    _merge_kernel[(rows, query_heads // config.heads, config.parts)](
        out,
        pieces,
        sums,
        ranges.out,
        ranges.lse,
        lengths,
        shared_lengths,
        counts,
        plan.shares,
        plan.ends,
        min_share,
        len(pieces),
        HEADS=config.heads,
        PADDED_HEADS=padded_heads,
        STEP=config.step,
        DIMS=dims,
        num_warps=max(1, config.step * padded_heads * dims // WARP_VALUES),
        **({"LONG_TILE": 0, "LONG_SHARE": 0} | common),
    )


@triton.jit(do_not_specialize=["min_share", "programs"])
def _merge_kernel(
    out_ptr,  # [rows, kv_heads * group, head_dim]
    pieces_ptr,  # [programs, 2, group, head_dim]
    sums_ptr,  # [programs, 2, group]
    range_pieces_ptr,  # [rows, RANGES + 1, kv_heads * group, head_dim]
    range_sums_ptr,  # [rows, RANGES + 1, kv_heads * group]
    lengths_ptr,  # [rows]
    shared_ptr,  # [rows], positions in shared prefixes
    counts_ptr,  # [rows], ranges of shared prefixes
    shares_ptr,  # these two belong to the plan, if PLANNED; see `DecodePlan`
    ends_ptr,
    min_share,  # units
    programs,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    LONG_TILE: tl.constexpr,
    LONG_SHARE: tl.constexpr,
    PLANNED: tl.constexpr,
    RANGES: tl.constexpr,
    WINDOW: tl.constexpr,
    RUN: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    STEP: tl.constexpr,
    DIMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the pieces of query heads, STEP pieces at a time.

    A program merges DIMS dimensions of HEADS query heads of one row. The grid is `[rows, query
    heads / HEADS, head_dim / DIMS]`.
    """
    if PDL and not PLANNED:  # a single row: the output projection loads its weights meanwhile
        gdc_launch_dependents()
    row = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    if length < 0:  # true for most rows when a small batch runs in a large graph
        if PDL:
            gdc_wait()
        return
    count = 0
    begin = 0
    if WINDOW:
        begin = window_begin(length, WINDOW, RUN)
    if RANGES:
        count = tl.load(counts_ptr + row)
        begin = tl.load(shared_ptr + row)
    tile = TILE
    if LONG_TILE:
        if PLANNED:
            tile = tl.load(shares_ptr + 2)
        else:
            tile = tl.where(is_long(length * KV_HEADS, programs, LONG_SHARE), LONG_TILE, TILE)
    tiles = tl.cdiv(length - begin, tile)
    row_begin = 0
    if PLANNED:
        share = tl.load(shares_ptr)
        longer = tl.load(shares_ptr + 1)
        row_begin = tl.load(ends_ptr + row) - tiles * KV_HEADS
    else:
        share, longer = cut(tiles * KV_HEADS, programs, min_share)
    index = tl.arange(0, PADDED_HEADS)
    head = tl.program_id(1) * HEADS + index
    segment = row_begin + head // GROUP * tiles
    first = share_of(segment, share, longer)  # [heads], like all that follows
    last = share_of(segment + tiles - 1, share, longer)
    present = index < HEADS
    merged = present & ((first < last) | (count > 0))
    pieces = tl.max(tl.where(present, last - first, 0), 0) + 1
    to = out_ptr + (row * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM
    dim = tl.arange(0, DIMS)
    if DIMS < HEAD_DIM:
        dim += tl.program_id(2) * DIMS
    to += dim[None, :]
    if PDL:  # every program waits, so that the next kernel's wait covers earlier kernels, too
        gdc_wait()
        gdc_launch_dependents()
    if length == 0:  # the row has no units, so no share wrote it
        zeros = tl.zeros([PADDED_HEADS, DIMS], out_ptr.dtype.element_ty)
        tl.store(to, zeros, mask=present[:, None])
        return
    if (pieces == 1) & (count == 0):
        return

    highest = tl.full([PADDED_HEADS], LOWEST, tl.float32)
    norm = tl.zeros([PADDED_HEADS], tl.float32)
    out = tl.zeros([PADDED_HEADS, DIMS], tl.float32)
    if pieces > 1:
        for done in range(0, pieces, STEP):
            program = first[None, :] + (done + tl.arange(0, STEP))[:, None]  # [STEP, heads]
            # The first piece of the segment is the last piece of its share.
            begins = (program == first[None, :]).to(tl.int32)
            piece = (program * 2 + begins) * GROUP + (head % GROUP)[None, :]
            held = (program <= last[None, :]) & (present & (first < last))[None, :]
            highest, norm, out = _add_pieces(
                highest, norm, out, pieces_ptr, sums_ptr, piece, held, dim, HEAD_DIM
            )
    if RANGES:
        number = tl.arange(0, RANGES + 1)[:, None]
        held = (number < count + (first == last).to(tl.int32)[None, :]) & present[None, :]
        piece = (row * (RANGES + 1) + number) * (KV_HEADS * GROUP) + head[None, :]
        if count > 0:
            highest, norm, out = _add_pieces(
                highest, norm, out, range_pieces_ptr, range_sums_ptr, piece, held, dim, HEAD_DIM
            )
    out = (out / norm[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(to, out, mask=merged[:, None])


@triton.jit
def _add_pieces(
    highest,  # [heads]
    norm,  # [heads]
    out,  # [heads, dims]
    pieces_ptr,
    sums_ptr,
    piece,  # [n, heads]
    held,  # [n, heads]
    dim,  # [dims]
    HEAD_DIM: tl.constexpr,
):
    """Add the pieces of each head that are `held` to the sums `highest`, `norm` and `out`."""
    lse = tl.load(sums_ptr + piece, mask=held, other=LOWEST)
    at = piece[:, :, None] * HEAD_DIM + dim[None, None, :]
    part = tl.load(pieces_ptr + at, mask=held[:, :, None], other=0.0)  # [n, heads, dims]
    new_highest = tl.maximum(highest, tl.max(lse, 0))
    decay = tl.exp2(highest - new_highest)
    weight = tl.exp2(lse - new_highest[None, :])
    norm = norm * decay + tl.sum(weight, 0)
    out = out * decay[:, None] + tl.sum(weight[:, :, None] * part, 0)
    return new_highest, norm, out
