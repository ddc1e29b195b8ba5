"""Decode attention over the paged KV cache: one query token a row.

The work of a batch is a line of *units*. A unit is one tile of KV positions of one KV head of one
row; a row's heads follow one another, and so do the rows. A fixed number of programs cuts that
line into equal shares, whatever the lengths are, so one long sequence among short ones spreads
over the whole device, and the grid depends on nothing but the device. Lengths are read on the
device only: a captured CUDA graph stays right as they grow. They are read while the kernel in
front, the one that makes the queries, may still run: what wrote them must have ended before that.

Products are `k @ q.T` and `v.T @ weights.T`: a tensor core takes 16 rows by 8 columns at least, and
a group of query heads fills less of 16 than of 8. That halves what is multiplied for nothing, which
matters where an H200 is at its power limit, and the registers of queries and outputs.

Where the kernel in front is attention too, of the batch's prefill chunks or of the rows' shared
prefixes, decode attention needs nothing of it and runs beside it: one computes while the other
reads. That kernel waits for the queries before it lets anybody start, so they are there. Whoever
waits for decode attention must find both done: it waits for its neighbour when its own work is.

Rows of length 0, which pad a captured batch, have no units: a tile apiece would make the program
that meets them begin one segment after another while all others have long ended. A program walks
the *segments* (one row, one KV head) that its share touches. A segment that lies
within one share is written straight to the output. One that is cut leaves a *piece* in each share:
an output normalized over its own KV range, float32, with its log-sum-exp (base 2, of the scaled
scores). Pieces of one segment merge by

    lse = log2(sum_i 2^lse_i)        out = sum_i 2^(lse_i - lse) out_i

A share holds two pieces at most: one whose segment began in an earlier share (index 0), and one
whose segment goes on in the next (index 1). `(out, lse)` of a KV range is also what a prefix
shared by several rows leaves (`attention_shared.py`): such rows have units for the rest only, and
the pieces of their shared ranges join the merge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.reference.shared_ranges import MAX_RANGES, SharedRanges
from pagewire.worker.ops.triton.attention_shared import Pieces, attend_shared_ranges
from pagewire.worker.ops.triton.device import dependent_launch, multiprocessors
from pagewire.worker.ops.triton.integers import next_power_of_2
from pagewire.worker.ops.triton.paged import LOG2_E, LOWEST, check_layout, lines, lookup

REGISTERS = 65536  # of a multiprocessor, since Volta
MERGED_VALUES = 4096  # that a warp of the merge holds


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How decode attention is cut and scheduled.

    `tile` KV positions a step of the loop, `share` KV positions at least a program (shorter
    shares cost more to merge than they save), `programs` a multiprocessor.
    """

    tile: int
    warps: int
    stages: int
    programs: int
    share: int
    pdl: bool = True

    @property
    def registers(self) -> int:
        """As many as a thread may have so that a multiprocessor holds its programs; 8 apart."""
        each = REGISTERS // (32 * self.warps * self.programs)
        return min(255, each - each % 8)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    shared: SharedRanges | None = None,
    beside_prefill: bool = False,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Attend from one new token of each sequence to all of its cached tokens.

    Args:
        q: `[rows, query_heads, head_dim]`, contiguous.
        k_cache, v_cache: `[num_blocks, kv_heads, block_size, head_dim]`, contiguous.
        block_tables: `[slots, max_blocks]` int32.
        slots: `[rows]` int32, the block table row of each query row.
        lengths: `[rows]` int32, cached tokens of each row, the current one included. A row of
            length 0 gives zeros, a negative length leaves the row of `out` as it is.
        scale: multiplies the scores, usually `head_dim ** -0.5`; positive.
        shared: KV ranges that rows have in common; none when None.
        beside_prefill: what was launched just before is `prefill_attention` with the same queries.
        out: like `q`, takes the result; a new tensor when None.
        config: the schedule; chosen by dtype, head size and rows when None.

    Returns:
        `[rows, query_heads, head_dim]` in the dtype of `q`: `out` if it was given.

    Raises:
        ValueError: the tensors' layout is not the one described.
    """
    check_layout(q, k_cache, v_cache)
    rows, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = query_heads // kv_heads
    config = config or decode_config(q.dtype, head_dim, group, rows)
    processors = multiprocessors(q.device)
    merge_step, merged_heads = merge_config(rows, kv_heads, group, processors)
    programs = processors * config.programs
    if rows == 1:
        programs = whole_merges(programs, merge_step * kv_heads)
    padded_heads = next_power_of_2(merged_heads)
    least_share = max(1, config.share // config.tile)
    pdl = config.pdl and dependent_launch(q.device)
    common = {
        "HEAD_DIM": head_dim,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "TILE": config.tile,
        "PADDED_ROWS": padded_rows(rows),
        "RANGES": 0 if shared is None else MAX_RANGES,
        "PDL": pdl,
    } | ({"launch_pdl": True} if pdl else {})

    out = torch.empty_like(q) if out is None else out
    if shared is None:  # not read
        ranges = Pieces(out, out)
        shared_lengths = counts = lengths
    else:
        ranges = attend_shared_ranges(q, k_cache, v_cache, block_tables, shared, scale)
        shared_lengths, counts = shared.lengths, shared.counts
    pieces = q.new_empty((programs, 2, group, head_dim), dtype=torch.float32)
    sums = q.new_empty((programs, 2, group), dtype=torch.float32)
    _decode_kernel[(programs,)](
        out,
        pieces,
        sums,
        ranges.out,
        ranges.lse,
        q,
        k_cache,
        v_cache,
        block_tables,
        slots,
        lengths,
        shared_lengths,
        counts,
        scale * LOG2_E,
        rows,
        least_share,
        int(beside_prefill or shared is not None),
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK_N=max(8, next_power_of_2(group)),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
        **common,
    )
    _merge_kernel[(rows, query_heads // merged_heads)](
        out,
        pieces,
        sums,
        ranges.out,
        ranges.lse,
        lengths,
        shared_lengths,
        counts,
        rows,
        least_share,
        programs,
        HEADS=merged_heads,
        PADDED_HEADS=padded_heads,
        STEP=merge_step,
        num_warps=max(1, merge_step * padded_heads * head_dim // MERGED_VALUES),
        **common,
    )
    return out


def padded_rows(rows: int) -> int:
    """Round a row count up to one of a few sizes, so that few variants are compiled.

    A single row has a size of its own, because then nothing need be summed over rows.
    """
    sizes = (1, 64, 256, next_power_of_2(rows))
    return next(size for size in sizes if rows <= size)


def decode_config(dtype: torch.dtype, head_dim: int, group: int, rows: int) -> DecodeConfig:
    """Choose a schedule, as `benchmarks/kernels/attention.py --sweep` found them on an H200.

    Shares are equal, so a multiprocessor must hold just as many programs as it is given. Rows of
    spread lengths waste half a tile each: small tiles; and with many rows a program walks many
    segments, at whose ends a single warp waits for no other. A single row has few units, so what
    counts is how many tiles are under way at once.
    """
    if dtype == torch.float32:
        return DecodeConfig(tile=32, warps=4, stages=2, programs=2, share=64)
    if head_dim > 128:
        return DecodeConfig(tile=32, warps=4, stages=3, programs=2, share=64)
    if rows <= 16:
        stages, programs = (2, 4) if rows == 1 else (3, 2)
        return DecodeConfig(tile=64, warps=4, stages=stages, programs=programs, share=64)
    if head_dim > 64 and group <= 16:  # a larger group's output does not fit one warp's registers
        tile = 16 if rows <= 64 else 32
        return DecodeConfig(tile=tile, warps=1, stages=2, programs=8, share=64)
    tile = 32 if head_dim > 64 else 64
    return DecodeConfig(tile=tile, warps=4, stages=3, programs=4, share=64)


def merge_config(rows: int, kv_heads: int, group: int, processors: int) -> tuple[int, int]:
    """Choose how many pieces a program merges at a time, and of how many heads of a group.

    Many segments have few pieces each, and where they are is found once for a whole group; those of
    a single row may have many. Three ways only, so that few variants are compiled.
    """
    if rows * kv_heads >= processors:
        return 8, group
    return (64, 1) if rows == 1 else (16, 2 if group % 2 == 0 else 1)


def whole_merges(programs: int, at_once: int) -> int:
    """Return a number of programs, no larger: pieces of one long row are merged in whole steps.

    Its heads have about as many pieces each, and a few more than a step takes would cost another.
    """
    return programs - programs % at_once if programs > at_once else programs


@triton.jit
def _row_units(
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
def _cut(total, programs, least_share):
    """Cut the line into shares: return the units of a share, and how many first ones have one more.

    As many programs get a share as there are shares of `least_share` units, or all of them.
    """
    used = tl.maximum(tl.minimum(programs, tl.cdiv(total, least_share)), 1)
    return total // used, total % used


@triton.jit
def _share_of(unit, share, longer):
    """Return the share that a unit lies in."""
    border = longer * (share + 1)
    return tl.where(
        unit < border,
        unit // (share + 1),
        longer + tl.maximum(unit - border, 0) // tl.maximum(share, 1),
    )


@triton.jit
def _row_range(
    row,
    tables_ptr,
    slots_ptr,
    lengths_ptr,
    shared_ptr,
    rows,
    table_stride,
    RANGES: tl.constexpr,
):
    """Return a row's length, where its own KV begins, and its block table; 0s past the last row."""
    held = row < rows
    length = tl.load(lengths_ptr + row, mask=held, other=0)
    begin = 0
    if RANGES:
        begin = tl.load(shared_ptr + row, mask=held, other=0)
    return length, begin, tables_ptr + tl.load(slots_ptr + row, mask=held, other=0) * table_stride


@triton.jit(do_not_specialize=["rows", "least_share", "beside"])
def _decode_kernel(
    out_ptr,  # [rows, kv_heads * group, head_dim]
    pieces_ptr,  # [programs, 2, group, head_dim]
    sums_ptr,  # [programs, 2, group]
    range_pieces_ptr,  # [rows, RANGES + 1, kv_heads * group, head_dim]
    range_sums_ptr,  # [rows, RANGES + 1, kv_heads * group]
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    slots_ptr,
    lengths_ptr,
    shared_ptr,
    counts_ptr,
    scale_log2,
    rows,
    least_share,  # units
    beside,  # whether the kernel in front runs on meanwhile
    table_stride,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    RANGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    ends = tl.cumsum(
        _row_units(lengths_ptr, shared_ptr, rows, TILE, KV_HEADS, PADDED_ROWS, RANGES), 0
    )
    total = tl.max(ends, 0)
    share, longer = _cut(total, tl.num_programs(0), least_share)
    # Programs past the last share begin at the end of the line or behind it.
    unit = program * share + tl.minimum(program, longer)
    stop = tl.minimum(unit + share + tl.where(program < longer, 1, 0), total)

    # Where the share begins: a row, a head of it, a tile of that.
    if PADDED_ROWS == 1:
        row = 0
        within = unit
    else:
        row = tl.sum((ends <= unit).to(tl.int32), 0)
        within = unit - tl.max(tl.where(ends <= unit, ends, 0), 0)
    # Tables, like lengths, are older than the kernel in front: the first blocks are on their way
    # before that has ended.
    length, begin, table_ptr = _row_range(
        row, tables_ptr, slots_ptr, lengths_ptr, shared_ptr, rows, table_stride, RANGES
    )
    tiles = tl.maximum(tl.cdiv(length - begin, TILE), 1)  # a program may have no share
    position = begin + within % tiles * TILE + tl.arange(0, TILE)
    block = lookup(table_ptr, position, length, BLOCK_SIZE)
    head_row = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM)
    present = (head_row < GROUP)[:, None]
    if PDL:
        if beside == 0:
            gdc_wait()
        gdc_launch_dependents()

    while unit < stop:
        head = within // tiles
        tile = within % tiles
        end_tile = tl.minimum(tiles, tile + stop - unit)
        at = head_row[:, None] * HEAD_DIM + dim[None, :]  # [BLOCK_N, head_dim]
        heads_at = (row * KV_HEADS + head) * (GROUP * HEAD_DIM)
        # From L2, like keys and values: what a multiprocessor holds may be older without a wait.
        q = tl.load(q_ptr + heads_at + at, mask=present, other=0.0, cache_modifier=".cg")

        highest = tl.full([BLOCK_N], LOWEST, tl.float32)
        norm = tl.zeros([BLOCK_N], tl.float32)
        out = tl.zeros([HEAD_DIM, BLOCK_N], tl.float32)
        for _ in range(tile, end_tile):
            valid = position < length
            at_kv = lines(block, position, head, HEAD_DIM, KV_HEADS, BLOCK_SIZE)
            k = tl.load(k_ptr + at_kv, mask=valid[:, None], other=0.0)  # [TILE, head_dim]
            v = tl.load(v_ptr + tl.trans(at_kv), mask=valid[None, :], other=0.0)  # [head_dim, TILE]
            position += TILE
            block = lookup(table_ptr, position, length, BLOCK_SIZE)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale_log2
            scores = tl.where(valid[:, None], scores, float("-inf"))  # [TILE, BLOCK_N]
            new_highest = tl.maximum(highest, tl.max(scores, 0))
            decay = tl.exp2(highest - new_highest)
            weights = tl.exp2(scores - new_highest[None, :])
            norm = norm * decay + tl.sum(weights, 0)
            out = out * decay[None, :]
            out = tl.dot(v, weights.to(v.dtype), out, input_precision=PRECISION)
            highest = new_highest
        out = tl.trans(out / norm[None, :])

        whole = (tile == 0) & (end_tile == tiles)
        count = 0
        if RANGES:
            count = tl.load(counts_ptr + row)
        if whole & (count == 0):
            tl.store(out_ptr + heads_at + at, out.to(out_ptr.dtype.element_ty), mask=present)
        elif whole:  # one more piece of the row's ranges
            piece = (row * (RANGES + 1) + count) * (KV_HEADS * GROUP) + head * GROUP
            lse = highest + tl.log2(norm)
            tl.store(range_pieces_ptr + piece * HEAD_DIM + at, out, mask=present)
            tl.store(range_sums_ptr + piece + head_row, lse, mask=head_row < GROUP)
        else:
            piece = (program * 2 + tl.where(tile == 0, 1, 0)) * GROUP
            lse = highest + tl.log2(norm)
            tl.store(pieces_ptr + piece * HEAD_DIM + at, out, mask=present)
            tl.store(sums_ptr + piece + head_row, lse, mask=head_row < GROUP)

        unit += end_tile - tile
        within += end_tile - tile
        if within == tiles * KV_HEADS:
            within = 0
            if PADDED_ROWS > 1:  # the next row that is not empty
                row = tl.sum((ends <= unit).to(tl.int32), 0)
                length, begin, table_ptr = _row_range(
                    row, tables_ptr, slots_ptr, lengths_ptr, shared_ptr, rows, table_stride, RANGES
                )
                tiles = tl.maximum(tl.cdiv(length - begin, TILE), 1)
        position = begin + within % tiles * TILE + tl.arange(0, TILE)
        block = lookup(table_ptr, position, length, BLOCK_SIZE)
    if PDL:
        gdc_wait()  # for a neighbour; a second time, it costs nothing


@triton.jit(do_not_specialize=["rows", "least_share", "programs"])
def _merge_kernel(
    out_ptr,  # [rows, kv_heads * group, head_dim]
    pieces_ptr,  # [programs, 2, group, head_dim]
    sums_ptr,  # [programs, 2, group]
    range_pieces_ptr,  # [rows, RANGES + 1, kv_heads * group, head_dim]
    range_sums_ptr,  # [rows, RANGES + 1, kv_heads * group]
    lengths_ptr,
    shared_ptr,
    counts_ptr,
    rows,
    least_share,  # units
    programs,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    RANGES: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the pieces of HEADS query heads of one KV head of one row, `STEP` at a time."""
    row = tl.program_id(0)
    query_head = tl.program_id(1) * HEADS  # the first of them
    length = tl.load(lengths_ptr + row)
    if length < 0:  # most rows of a small batch in a large graph
        if PDL:
            gdc_wait()
        return
    units = _row_units(lengths_ptr, shared_ptr, rows, TILE, KV_HEADS, PADDED_ROWS, RANGES)
    share, longer = _cut(tl.sum(units, 0), programs, least_share)
    count = 0
    begin = 0
    if RANGES:
        count = tl.load(counts_ptr + row)
        begin = tl.load(shared_ptr + row)
    tiles = tl.cdiv(length - begin, TILE)
    row_begin = tl.sum(tl.where(tl.arange(0, PADDED_ROWS) < row, units, 0), 0)
    segment = row_begin + (query_head // GROUP) * tiles
    first = _share_of(segment, share, longer)
    last = _share_of(segment + tiles - 1, share, longer)
    head = tl.arange(0, PADDED_HEADS)
    present = head < HEADS
    at = head[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]  # [heads, head_dim]
    to = out_ptr + (row * (KV_HEADS * GROUP) + query_head) * HEAD_DIM + at
    if PDL:  # as above, by every program: who waits for this kernel waits for those before it, too
        gdc_wait()
        gdc_launch_dependents()
    if length == 0:  # no share has met this row
        zeros = tl.zeros([PADDED_HEADS, HEAD_DIM], out_ptr.dtype.element_ty)
        tl.store(to, zeros, mask=present[:, None])
        return
    if (first == last) & (count == 0):
        return

    highest = tl.full([PADDED_HEADS], LOWEST, tl.float32)
    norm = tl.zeros([PADDED_HEADS], tl.float32)
    out = tl.zeros([PADDED_HEADS, HEAD_DIM], tl.float32)
    if first < last:
        for at_share in range(first, last + 1, STEP):
            program = at_share + tl.arange(0, STEP)
            # The segment begins in its first share, as that share's last piece.
            piece = (program * 2 + tl.where(program == first, 1, 0)) * GROUP + query_head % GROUP
            highest, norm, out = _add_pieces(
                highest, norm, out, pieces_ptr, sums_ptr, piece, program <= last, head, present,
                HEAD_DIM,
            )  # fmt: skip
    if RANGES:
        index = tl.arange(0, RANGES + 1)
        held = index < count + tl.where(first == last, 1, 0)
        piece = (row * (RANGES + 1) + index) * (KV_HEADS * GROUP) + query_head
        if count > 0:
            highest, norm, out = _add_pieces(
                highest, norm, out, range_pieces_ptr, range_sums_ptr, piece, held, head, present,
                HEAD_DIM,
            )  # fmt: skip
    out = (out / norm[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(to, out, mask=present[:, None])


@triton.jit
def _add_pieces(
    highest,  # [heads]
    norm,  # [heads]
    out,  # [heads, head_dim]
    pieces_ptr,
    sums_ptr,
    piece,
    held,
    head,
    present,
    HEAD_DIM: tl.constexpr,
):
    """Add pieces to a merge under way: those numbered `piece + head`, where `held` and `present`.

    `piece` and `held` are `[n]`, `head` and `present` `[heads]`.
    """
    piece = piece[:, None] + head[None, :]  # [n, heads]
    held = held[:, None] & present[None, :]
    lse = tl.load(sums_ptr + piece, mask=held, other=LOWEST)
    at = piece[:, :, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, None, :]
    part = tl.load(pieces_ptr + at, mask=held[:, :, None], other=0.0)  # [n, heads, head_dim]
    new_highest = tl.maximum(highest, tl.max(lse, 0))
    decay = tl.exp2(highest - new_highest)
    weight = tl.exp2(lse - new_highest[None, :])
    norm = norm * decay + tl.sum(weight, 0)
    out = out * decay[:, None] + tl.sum(weight[:, :, None] * part, 0)
    return new_highest, norm, out
