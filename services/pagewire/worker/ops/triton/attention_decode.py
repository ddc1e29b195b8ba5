"""Decode attention over the paged KV cache: one query token a row.

Every program has an equal share of a batch's work (`attention_shares.py`). It walks the *segments*
(one row, one KV head) that its share touches. A segment that lies within one share is written
straight to the output; one that is cut leaves a piece in each share (`attention_merge.py`). Rows
that share a prefix have units for the rest only, and the pieces of their shared ranges join the
merge. Rows of length 0, which pad a captured batch, have no units: a tile apiece would make the
program that meets them begin one segment after another while all others have long ended.

Lengths are read while the kernel in front, the one that makes the queries, may still run: what
wrote them must have ended before that.

Products are `k @ q.T` and `v.T @ weights.T`: a tensor core takes 16 rows by 8 columns at least, and
a group of query heads fills less of 16 than of 8. That halves what is multiplied for nothing, which
matters where an H200 is at its power limit, and the registers of queries and outputs.

Where the kernel in front is attention too, of the batch's prefill chunks or of the rows' shared
prefixes, decode attention needs nothing of it and runs beside it: one computes while the other
reads. That kernel waits for the queries before it lets anybody start, so they are there. Whoever
waits for decode attention must find both done: it waits for its neighbour when its own work is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.reference.shared_ranges import MAX_RANGES, SharedRanges
from pagewire.worker.ops.triton.attention_merge import merge_config, merge_pieces
from pagewire.worker.ops.triton.attention_shared import Pieces, attend_shared_ranges
from pagewire.worker.ops.triton.attention_shares import cut, padded_rows, row_units
from pagewire.worker.ops.triton.device import dependent_launch, multiprocessors
from pagewire.worker.ops.triton.integers import next_power_of_2
from pagewire.worker.ops.triton.paged import LOG2_E, LOWEST, check_layout, lines, lookup

REGISTERS = 65536  # of a multiprocessor, since Volta


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
    merge = merge_config(rows, kv_heads, group, processors)
    programs = processors * config.programs
    if rows == 1:
        programs = merge.programs(programs, kv_heads)
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
    merge_pieces(
        out, pieces, sums, ranges, lengths, shared_lengths, counts, least_share, merge, **common
    )
    return out


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
        row_units(lengths_ptr, shared_ptr, rows, TILE, KV_HEADS, PADDED_ROWS, RANGES), 0
    )
    total = tl.max(ends, 0)
    share, longer = cut(total, tl.num_programs(0), least_share)
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
