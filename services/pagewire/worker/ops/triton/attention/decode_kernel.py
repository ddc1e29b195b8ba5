"""The kernel of decode attention.

One loop of a program covers all tiles of its share, across segments (one KV head of one row), so
that keys and values of the next segment load while one segment ends. A tile consists of runs of
positions, each within one block, so a thread's offset within a run is the same in every tile.

Lengths, plan and block tables are loaded while the preceding kernel, which computes the queries,
may still run. So the kernels that wrote them must have ended before the preceding kernel started.
With a single row all kernels of a layer may still run, so the writers must have ended before the
first layer.

The GEMMs are `k @ q.T` and `v.T @ weights.T`. A tensor core multiplies at least 16 rows by 8
columns, so a group of query heads is padded to 8 columns instead of 16 rows. This halves the
registers of queries and outputs. It also halves the padding that is multiplied, which saves time
when an H200 is at its power limit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.triton.attention.fp8_pairs import (
    HEADROOM,
    joined,
    log2_of_scales,
    numbers,
    query_pairs,
)
from pagewire.worker.ops.triton.attention.paged import (
    LOG2_E,
    LOWEST,
    capped,
    in_type_of,
    widened,
    window_begin,
)
from pagewire.worker.ops.triton.attention.shares import cut, is_long

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _kv_of_row(
    row,
    tables_ptr,
    slots_ptr,
    lengths_ptr,
    shared_ptr,
    table_stride,
    RANGES: tl.constexpr,
    WINDOW: tl.constexpr,
    RUN: tl.constexpr,
):
    """Return the length of a row, the first position to read, and its block table.

    The first position is the one after the row's shared prefix, or in its window.
    """
    length = tl.load(lengths_ptr + row)
    begin = 0
    if WINDOW:
        begin = window_begin(length, WINDOW, RUN)
    if RANGES:
        begin = tl.load(shared_ptr + row)
    return length, begin, tables_ptr + tl.load(slots_ptr + row) * table_stride


@triton.jit
def _blocks(
    table_ptr,
    position,
    length,
    BLOCK_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the block of each run of a tile; scratch block 0 past `length`."""
    blocks = ()
    for run in tl.static_range(TILE // RUN):
        at = position + run * RUN
        blocks += (tl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0),)  # type: ignore[assignment]
    return blocks


@triton.jit
def _line(
    block,
    position,
    head,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return the offset of the cached vector of a head at `position`, which is in `block`."""
    page = (block.to(tl.int64) * KV_HEADS + head) * (BLOCK_SIZE * HEAD_DIM)
    return page + position % BLOCK_SIZE * HEAD_DIM


@triton.jit
def _queries(q_ptrs, segment, present, SIZE: tl.constexpr):
    """Return the queries of a segment, `[BLOCK_N, head_dim]`.

    They are loaded from L2: before a wait, the L1 cache may hold older values.
    """
    return tl.load(q_ptrs + segment * SIZE, mask=present, other=0.0, cache_modifier=".cg")


@triton.jit
def _softmax_start(
    sinks_ptr, head, head_row, whole, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr
):
    """Return the largest score `[BLOCK_N]` and the partial sums `[RUN, BLOCK_N]` before any tile.

    A head's sink counts as a position with a value of zeros. It counts once in a row, in the part
    that has the first tile of a segment (`whole`), so the merge does not handle sinks.
    """
    highest = tl.full([BLOCK_N], LOWEST, tl.float32)
    norm = tl.zeros([RUN, BLOCK_N], tl.float32)
    if sinks_ptr is not None:
        held = (head_row < GROUP) & whole
        sink = tl.load(sinks_ptr + head * GROUP + head_row, mask=held, other=0.0).to(tl.float32)
        highest = tl.where(held, sink * _LOG2_E, LOWEST)
        norm = tl.where((tl.arange(0, RUN)[:, None] == 0) & held[None, :], 1.0, 0.0)
    return highest, norm


@triton.jit
def _store_segment(
    out_ptr,
    pieces_ptr,
    sums_ptr,
    range_pieces_ptr,
    range_sums_ptr,
    counts_ptr,
    segment,
    begins,
    ends,
    out,
    lse,
    head_row,
    at,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANGES: tl.constexpr,
):
    """Store the result of a segment, or of the part of it that lies in this share.

    `begins` and `ends` say whether the share has the first and the last tile of the segment.
    `out [BLOCK_N, head_dim]` is the result and `lse [BLOCK_N]` its log-sum-exp. `head_row
    [BLOCK_N]` is the index of each query head of the group, and `at [BLOCK_N, head_dim]` its
    offsets.
    """
    held = head_row < GROUP
    present = held[:, None]
    count = 0
    if RANGES:
        count = tl.load(counts_ptr + segment // KV_HEADS)
    if begins & ends & (count == 0):
        to = out_ptr + segment * (GROUP * HEAD_DIM) + at
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=present)
    elif begins & ends:  # whole, but the row has a shared prefix: one more piece after its ranges
        row, head = segment // KV_HEADS, segment % KV_HEADS
        piece = (row * (RANGES + 1) + count) * (KV_HEADS * GROUP) + head * GROUP
        tl.store(range_pieces_ptr + piece * HEAD_DIM + at, out, mask=present)
        tl.store(range_sums_ptr + piece + head_row, lse, mask=held)
    else:
        piece = (tl.program_id(0) * 2 + tl.where(begins, 1, 0)) * GROUP
        tl.store(pieces_ptr + piece * HEAD_DIM + at, out, mask=present)
        tl.store(sums_ptr + piece + head_row, lse, mask=held)


@triton.jit
def _attend_share(
    out_ptr,
    pieces_ptr,
    sums_ptr,
    range_pieces_ptr,
    range_sums_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    slots_ptr,
    lengths_ptr,
    shared_ptr,
    counts_ptr,
    rows_ptr,
    units_ptr,
    begins_ptr,
    k_scales_ptr,
    v_scales_ptr,
    sinks_ptr,
    scale_log2,
    min_share,
    beside,
    table_stride,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    LEAN: tl.constexpr,
    RUN: tl.constexpr,
    PLANNED: tl.constexpr,
    RANGES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    FP8: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one share, in tiles of TILE positions; see `decode_kernel`."""
    WIDTH: tl.constexpr = HEAD_DIM // 2 if PAIRED else HEAD_DIM  # elements of a cached vector
    program = tl.program_id(0)
    # The start of the share: a row, a head of the row, and a tile of the head. The first blocks are
    # looked up before the preceding kernel has ended.
    number = 0
    row = 0
    if PLANNED:
        number = tl.load(begins_ptr + program * 2)
        row = tl.load(rows_ptr + number)
    length, begin, table_ptr = _kv_of_row(
        row, tables_ptr, slots_ptr, lengths_ptr, shared_ptr, table_stride, RANGES, WINDOW, RUN
    )
    tiles = tl.maximum(tl.cdiv(length - begin, TILE), 0)
    if PLANNED:
        within = tl.load(begins_ptr + program * 2 + 1)
        unit = tl.load(units_ptr + program)
        stop = tl.load(units_ptr + program + 1)
    else:
        total = tiles * KV_HEADS
        share, longer = cut(total, tl.num_programs(0), min_share)
        # Programs without a share begin at the end of the line or after it.
        unit = program * share + tl.minimum(program, longer)
        stop = tl.minimum(unit + share + tl.where(program < longer, 1, 0), total)
        within = unit
    tiles = tl.maximum(tiles, 1)  # a program may have no share
    head = within // tiles
    tile = within % tiles
    position = begin + tile * TILE
    blocks = _blocks(table_ptr, position, length, BLOCK_SIZE, RUN, TILE)

    head_row = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, HEAD_DIM)
    present = (head_row < GROUP)[:, None]
    at = head_row[:, None] * HEAD_DIM + dim[None, :]  # [BLOCK_N, head_dim]
    line = tl.arange(0, RUN) * WIDTH
    element = tl.arange(0, WIDTH)
    k_ptrs = k_ptr + (line[:, None] + element[None, :])  # [RUN, WIDTH]
    v_ptrs = v_ptr + (element[:, None] + line[None, :])  # [WIDTH, RUN]
    if PDL:
        waits = beside == 0
        if not PLANNED:
            # Programs of a single row that have no share end at once, to leave room for the next
            # kernels. The first one always waits, so that this kernel ends after earlier ones.
            waits &= (unit < stop) | (program == 0)
        if waits:
            gdc_wait()
        gdc_launch_dependents()

    segment = row * KV_HEADS + head
    begins = tile == 0  # whether the share has the first tile of the segment
    q_ptrs = q_ptr + at
    q = _queries(q_ptrs, segment, present & (unit < stop), GROUP * HEAD_DIM)
    if PAIRED:
        q, odd_q, q_scale = query_pairs(q)
        heaviest = tl.full([BLOCK_N], LOWEST, tl.float32)
    highest, norm = _softmax_start(
        sinks_ptr, head, head_row, begins & (unit < stop), GROUP, BLOCK_N, RUN
    )
    # With PAIRED, `out` has the even dimensions, weighted by 2^-heaviest, and `odd_out` the others.
    out = tl.zeros([WIDTH, BLOCK_N], tl.float32)
    odd_out = out
    for _ in tl.range(unit, stop, num_stages=STAGES):
        left = (length - position) * WIDTH
        values = ()
        v_scales = ()
        scores = ()
        for run in tl.static_range(TILE // RUN):
            start = _line(blocks[run], position + run * RUN, head, WIDTH, KV_HEADS, BLOCK_SIZE)
            valid = line < left - run * RUN * WIDTH
            if WINDOW:
                valid &= line >= left - (WINDOW + run * RUN) * WIDTH
            # Keys and values are not read again in this layer: L2 should evict them first.
            k = tl.load(
                k_ptrs + start, mask=valid[:, None], other=0.0, eviction_policy="evict_first"
            )
            v = tl.load(
                v_ptrs + start, mask=valid[None, :], other=0.0, eviction_policy="evict_first"
            )
            if FP8:
                of_line = (start + line) // WIDTH  # [RUN]
                k_scale = tl.load(k_scales_ptr + of_line, mask=valid, other=0.0)
                v_scales += (tl.load(v_scales_ptr + of_line, mask=valid, other=0.0),)  # type: ignore[assignment]
            if PAIRED:
                even_k, odd_k = numbers(k, INTERPRETED)
                of_run = tl.dot(even_k, tl.trans(q))  # [RUN, BLOCK_N]
                of_run = tl.dot(odd_k, tl.trans(odd_q), of_run)
                if LEAN:  # the queries' scales are in `to_log2`
                    of_run *= k_scale[:, None]
                else:
                    of_run *= k_scale[:, None] * q_scale[None, :]
            else:
                if FP8:
                    k = in_type_of(k, q)
                of_run = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [RUN, BLOCK_N]
                if FP8:
                    of_run *= k_scale[:, None]
            if CAP_SCALE > 0:
                of_run = capped(of_run, CAP_SCALE)
            scores += (tl.where(valid[:, None], of_run, float("-inf")),)  # type: ignore[assignment]
            values += (v,)  # type: ignore[assignment]

        # The next tile, which may belong to another head or row. Its keys and values are loaded
        # while this tile is computed.
        unit += 1
        tile += 1
        position += TILE
        ended = tile == tiles
        if ended:
            tile = 0
            head += 1
            if PLANNED and (head == KV_HEADS) & (unit < stop):
                head = 0
                number += 1
                row = tl.load(rows_ptr + number)
                length, begin, table_ptr = _kv_of_row(
                    row, tables_ptr, slots_ptr, lengths_ptr, shared_ptr, table_stride,
                    RANGES, WINDOW, RUN,
                )  # fmt: skip
                tiles = tl.cdiv(length - begin, TILE)
            position = begin
        blocks = _blocks(table_ptr, position, length, BLOCK_SIZE, RUN, TILE)

        to_log2 = scale_log2
        of_column = scale_log2
        if LEAN:
            to_log2 = q_scale * scale_log2
            of_column = to_log2[None, :]
        best = scores[0]  # type: ignore[misc]
        for run in tl.static_range(1, TILE // RUN):
            best = tl.maximum(best, scores[run])
        new_highest = tl.maximum(highest, tl.max(best, 0) * to_log2)
        decay = tl.exp2(highest - new_highest)
        norm = norm * decay[None, :]  # [RUN, BLOCK_N], summed over RUN only at the end
        if PAIRED:
            scaled = ()
            for run in tl.static_range(TILE // RUN):
                if LEAN:
                    of_values = log2_of_scales(v_scales[run], INTERPRETED)
                    scaled += (scores[run] * of_column + of_values[:, None],)  # type: ignore[assignment]
                else:
                    scaled += (scores[run] * scale_log2 + tl.log2(v_scales[run])[:, None],)  # type: ignore[assignment]
            best = scaled[0]  # type: ignore[misc]
            for run in tl.static_range(1, TILE // RUN):
                best = tl.maximum(best, scaled[run])
            new_heaviest = tl.maximum(heaviest, tl.max(best, 0) - HEADROOM)
            decay = tl.exp2(heaviest - new_heaviest)
            heaviest = new_heaviest
            odd_out = odd_out * decay[None, :]
        out = out * decay[None, :]
        for run in tl.static_range(TILE // RUN):
            weights = tl.exp2(scores[run] * of_column - new_highest[None, :])
            norm += weights
            v = values[run]
            if PAIRED:
                even_v, odd_v = numbers(v, INTERPRETED)
                weights = tl.exp2(scaled[run] - heaviest[None, :]).to(tl.float16)
                out = tl.dot(even_v, weights, out)
                odd_out = tl.dot(odd_v, weights, odd_out)
            else:
                if FP8:
                    v, v_scale = widened(v, v_scales[run], q)
                    weights *= v_scale[:, None]
                out = tl.dot(v, weights.to(v.dtype), out, input_precision=PRECISION)
        highest = new_highest

        if ended | (unit == stop):
            sum_ = tl.sum(norm, 0)
            if PAIRED:
                factor = tl.exp2(heaviest - highest) / sum_
                attended = joined(out * factor[None, :], odd_out * factor[None, :])
            else:
                attended = tl.trans(out * (1 / sum_)[None, :])
            _store_segment(
                out_ptr, pieces_ptr, sums_ptr, range_pieces_ptr, range_sums_ptr, counts_ptr,
                segment, begins, ended, attended, highest + tl.log2(sum_), head_row, at,
                HEAD_DIM, KV_HEADS, GROUP, RANGES,
            )  # fmt: skip
            segment = row * KV_HEADS + head
            begins = True
            q = _queries(q_ptrs, segment, present & (unit < stop), GROUP * HEAD_DIM)
            if PAIRED:
                q, odd_q, q_scale = query_pairs(q)
                heaviest = tl.full([BLOCK_N], LOWEST, tl.float32)
            highest, norm = _softmax_start(
                sinks_ptr, head, head_row, unit < stop, GROUP, BLOCK_N, RUN
            )
            out = tl.zeros([WIDTH, BLOCK_N], tl.float32)
            odd_out = out
    if PDL and beside != 0:
        gdc_wait()  # for the kernel that runs at the same time


@triton.jit(do_not_specialize=["min_share", "beside"])
def decode_kernel(
    out_ptr,  # [rows, kv_heads * group, head_dim]
    pieces_ptr,  # [programs, 2, group, head_dim]
    sums_ptr,  # [programs, 2, group]
    range_pieces_ptr,  # [rows, RANGES + 1, kv_heads * group, head_dim]
    range_sums_ptr,  # [rows, RANGES + 1, kv_heads * group]
    q_ptr,  # [rows, kv_heads * group, head_dim]
    k_ptr,  # [num_blocks, kv_heads, block_size, head_dim], if PAIRED two numbers an element
    v_ptr,
    tables_ptr,  # [slots, table_stride]
    slots_ptr,  # [rows]
    lengths_ptr,  # [rows]
    shared_ptr,  # [rows], positions in shared prefixes
    counts_ptr,  # [rows], ranges of shared prefixes
    rows_ptr,  # these three belong to the plan, if PLANNED; see `DecodePlan`
    units_ptr,
    begins_ptr,
    shares_ptr,  # also of the plan; read if LONG_TILE
    k_scales_ptr,  # [num_blocks, kv_heads, block_size], if FP8
    v_scales_ptr,
    sinks_ptr,  # [kv_heads * group], or None
    scale_log2,
    min_share,  # units
    beside,  # 1 if the preceding kernel runs at the same time, else 0
    table_stride,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LONG_TILE: tl.constexpr,  # of long shares, see `is_long`; 0: TILE
    LONG_SHARE: tl.constexpr,
    STAGES: tl.constexpr,
    LONG_STAGES: tl.constexpr,
    LEAN: tl.constexpr,  # fewer instructions in the loop of long shares
    RUN: tl.constexpr,
    PLANNED: tl.constexpr,
    RANGES: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: all positions
    CAP_SCALE: tl.constexpr,  # 0: no soft cap
    FP8: tl.constexpr,  # keys and values are in FP8 and have scales
    PAIRED: tl.constexpr,  # FP8 with products in float16, see `fp8_pairs`
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from the query heads of each segment to the tiles of one share.

    A program computes one share. The grid is `[programs]`, a fixed number for each multiprocessor.
    Long shares have a loop of their own, with other tiles (`is_long`).
    """
    if PDL and not PLANNED:  # a single row: let later kernels start during earlier ones
        gdc_launch_dependents()
    if LONG_TILE == 0:
        _attend_share(
            out_ptr, pieces_ptr, sums_ptr, range_pieces_ptr, range_sums_ptr, q_ptr, k_ptr, v_ptr,
            tables_ptr, slots_ptr, lengths_ptr, shared_ptr, counts_ptr, rows_ptr, units_ptr,
            begins_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, scale_log2, min_share, beside,
            table_stride, HEAD_DIM, KV_HEADS, GROUP, BLOCK_SIZE, TILE, STAGES, False, RUN, PLANNED,
            RANGES, WINDOW, CAP_SCALE, FP8, PAIRED, BLOCK_N, INTERPRETED, PRECISION, PDL,
        )  # fmt: skip
    else:
        if PLANNED:
            long = tl.load(shares_ptr + 2) == LONG_TILE
        else:
            long = is_long(tl.load(lengths_ptr) * KV_HEADS, tl.num_programs(0), LONG_SHARE)
        if long:
            _attend_share(
                out_ptr, pieces_ptr, sums_ptr, range_pieces_ptr, range_sums_ptr, q_ptr, k_ptr,
                v_ptr, tables_ptr, slots_ptr, lengths_ptr, shared_ptr, counts_ptr, rows_ptr,
                units_ptr, begins_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, scale_log2,
                min_share, beside, table_stride, HEAD_DIM, KV_HEADS, GROUP, BLOCK_SIZE, LONG_TILE,
                LONG_STAGES, LEAN, RUN, PLANNED, RANGES, WINDOW, CAP_SCALE, FP8, PAIRED, BLOCK_N,
                INTERPRETED, PRECISION, PDL,
            )  # fmt: skip
        else:
            _attend_share(
                out_ptr, pieces_ptr, sums_ptr, range_pieces_ptr, range_sums_ptr, q_ptr, k_ptr,
                v_ptr, tables_ptr, slots_ptr, lengths_ptr, shared_ptr, counts_ptr, rows_ptr,
                units_ptr, begins_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr, scale_log2,
                min_share, beside, table_stride, HEAD_DIM, KV_HEADS, GROUP, BLOCK_SIZE, TILE,
                STAGES, False, RUN, PLANNED, RANGES, WINDOW, CAP_SCALE, FP8, PAIRED, BLOCK_N,
                INTERPRETED, PRECISION, PDL,
            )  # fmt: skip
