"""Decode attention with one order of addition: whole segments, added in the order of positions.

Programs attend to equal shares of segments (`decode_plan`). If a head of a row lies in one share,
its program folds and writes it. If a head is cut or its row has a shared prefix, the programs store
the maximum, sum and output of each segment in scratch memory, and `decode_merge` folds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.contract.shared_prefix import SharedPrefixItems
from pagewire.worker.ops.device import dependent_launch, multiprocessors
from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.attention.paged import (
    LOG2_E,
    check_layout,
    lines,
    lookup,
    scale_lines,
)
from pagewire.worker.ops.triton.invariant.decode_merge import Partials, merge_segments
from pagewire.worker.ops.triton.invariant.decode_plan import (
    UNITS_PER_PROGRAM,
    SegmentPlan,
    plan_segments,
)
from pagewire.worker.ops.triton.invariant.segments import (
    SEGMENT,
    TILE,
    attend_tile,
    check_options,
    finished,
    fold,
    start,
)
from pagewire.worker.ops.triton.invariant.shared_prefix import MAX_SEGMENTS, attend_shared_segments

MIN_ROWS = 16  # of a tile of queries: a tensor core needs this many


@dataclass(frozen=True, slots=True)
class SegmentDecodeConfig:
    """Launch options of decode attention; they change no bits."""

    programs: int  # on each multiprocessor
    warps: int
    stages: int


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    scales: KVScales | None = None,
    shared: SharedPrefixItems | None = None,
    plan: SegmentPlan | None = None,
    beside_prefill: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    config: SegmentDecodeConfig | None = None,
) -> Tensor:
    """Implement `AttentionOps.decode_attention` without windows, soft caps and sinks.

    `beside_prefill` changes nothing.
    """
    check_layout(q, k_cache, v_cache, scales)
    check_options(window, soft_cap, sinks)
    rows, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = query_heads // kv_heads
    out = torch.empty_like(q) if out is None else out
    if rows == 0:
        return out
    config = config or decode_config(q.dtype, head_dim)
    programs, capacity = _programs(q.device, config)
    plan = plan or plan_segments(lengths, shared, kv_heads, programs, capacity)
    pdl = dependent_launch(q.device)
    common = {
        "HEAD_DIM": head_dim,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "SEGMENT": SEGMENT,
        "RANGES": 0 if shared is None else MAX_SEGMENTS,
        "PDL": pdl,
        "launch_pdl": pdl,
        "enable_fp_fusion": False,
    }
    partials = Partials.empty(capacity, group, head_dim, q.device)
    ranges = partials  # not read without shared prefixes
    shared_lengths = counts = lengths
    if shared is not None:
        ranges = attend_shared_segments(
            q, k_cache, v_cache, block_tables, shared, scale, scales=scales
        )
        shared_lengths, counts = shared.lengths, shared.counts
    _segment_decode_kernel[(programs,)](
        out,
        partials.out,
        partials.stats,
        q,
        k_cache,
        v_cache,
        block_tables,
        slots,
        lengths,
        shared_lengths,
        counts,
        plan.shared,
        plan.rows,
        plan.units,
        plan.begins,
        k_cache if scales is None else scales.keys,
        v_cache if scales is None else scales.values,
        scale * LOG2_E,
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        ROWS=max(MIN_ROWS, next_power_of_2(group)),
        TILE=TILE,
        FP8=scales is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        INTERPRETED=q.device.type == "cpu",
        num_warps=config.warps,
        num_stages=config.stages,
        **common,
    )
    merge_segments(out, partials, ranges, lengths, shared_lengths, counts, plan, **common)
    return out


def decode_config(dtype: torch.dtype, head_dim: int) -> SegmentDecodeConfig:
    """Choose launch options; not measured on a GPU yet."""
    if dtype == torch.float32:
        return SegmentDecodeConfig(programs=1, warps=4, stages=1)
    if head_dim > 128:
        return SegmentDecodeConfig(programs=1, warps=8, stages=2)
    return SegmentDecodeConfig(programs=2, warps=4, stages=3)


def plan_decode(
    lengths: Tensor,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    shared: SharedPrefixItems | None = None,
    window: int | None = None,
    fp8: bool = False,
) -> SegmentPlan:
    """Implement `AttentionOps.plan_decode`."""
    check_options(window)
    programs, capacity = _programs(lengths.device, decode_config(dtype, head_dim))
    return plan_segments(lengths, shared, kv_heads, programs, capacity)


def _programs(device: torch.device, config: SegmentDecodeConfig) -> tuple[int, int]:
    """Return the number of programs, and the number of units that the scratch memory holds."""
    programs = multiprocessors(device) * config.programs
    return programs, programs * UNITS_PER_PROGRAM


@triton.jit
def _kv_of_row(
    row, tables_ptr, slots_ptr, lengths_ptr, shared_ptr, table_stride, sharing,
    SEGMENT: tl.constexpr, RANGES: tl.constexpr,
):  # fmt: skip
    """Return the length of a row, the start of its own part, its segments and its block table."""
    length = tl.load(lengths_ptr + row)
    begin = 0
    if RANGES:
        begin = tl.load(shared_ptr + row) * sharing
    # A program without a share may read an empty row.
    segments = tl.maximum(tl.cdiv(length - begin, SEGMENT), 1)
    return length, begin, segments, tables_ptr + tl.load(slots_ptr + row) * table_stride


@triton.jit
def _has_prefix(counts_ptr, row, sharing, RANGES: tl.constexpr):
    """Tell whether a row has a prefix that is read as a shared one."""
    if RANGES:
        return tl.load(counts_ptr + row) * sharing > 0
    else:
        return row < 0


# Values of these tensors are loaded one by one, so alignment does not matter: compiled once.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr", "shared_ptr", "counts_ptr"])
def _segment_decode_kernel(
    out_ptr,  # [rows, kv_heads * group, head_dim]
    partials_ptr,  # [capacity, group, head_dim]
    stats_ptr,  # [capacity, 2, group]
    q_ptr,  # [rows, kv_heads * group, head_dim]
    k_ptr,  # [num_blocks, kv_heads, block_size, head_dim]
    v_ptr,
    tables_ptr,  # [slots, table_stride]
    slots_ptr,  # [rows]
    lengths_ptr,  # [rows]
    shared_ptr,  # [rows], positions in shared prefixes
    counts_ptr,  # [rows], segments of shared prefixes
    flag_ptr,  # these four belong to the plan
    rows_ptr,
    units_ptr,
    begins_ptr,
    k_scales_ptr,  # [num_blocks, kv_heads, block_size], if FP8
    v_scales_ptr,
    scale_log2,
    table_stride,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    RANGES: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from the query heads of each KV head of each row to the segments of one share.

    A program computes one share. The grid is `[programs]`, a fixed number for each multiprocessor.
    One loop runs over the tiles of all segments, so that keys and values of the next segment load
    while one segment ends. Tiles past the end of a row load nothing and change nothing.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    TILES: tl.constexpr = SEGMENT // TILE
    program = tl.program_id(0)
    sharing = tl.load(flag_ptr)
    number = tl.load(begins_ptr + program * 2)
    row = tl.load(rows_ptr + number)
    length, begin, segments, table_ptr = _kv_of_row(
        row, tables_ptr, slots_ptr, lengths_ptr, shared_ptr, table_stride, sharing,
        SEGMENT, RANGES,
    )  # fmt: skip
    within = tl.load(begins_ptr + program * 2 + 1)
    unit = tl.load(units_ptr + program)
    stop = tl.load(units_ptr + program + 1)
    head = within // segments
    segment = within % segments
    at = begin + segment * SEGMENT + tl.arange(0, TILE)
    block = lookup(table_ptr, at, length, BLOCK_SIZE)

    head_row = tl.arange(0, ROWS)
    held = head_row < GROUP
    of_group = head_row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    # `current` is the head that is computed; `row`, `head` and `segment` belong to the next tile.
    current = row * KV_HEADS + head
    q_mask = held[:, None] & (unit < stop)
    q = tl.load(q_ptr + current * (GROUP * HEAD_DIM) + of_group, mask=q_mask, other=0.0)
    whole = (segment == 0) & (unit + segments <= stop)
    if _has_prefix(counts_ptr, row, sharing, RANGES):
        whole = False
    highest, norm, out = start(ROWS, HEAD_DIM)
    all_highest, all_norm, all_out = start(ROWS, HEAD_DIM)
    steps = (stop - unit) * TILES
    for step in range(steps):
        line = lines(block, at, head, HEAD_DIM, KV_HEADS, BLOCK_SIZE)
        here = at < length
        k = tl.load(k_ptr + line, mask=here[:, None], other=0.0)
        v = tl.load(v_ptr + line, mask=here[:, None], other=0.0)
        k_scales = here  # these two are not read without FP8
        v_scales = here
        if FP8:
            of_line = scale_lines(block, at, head, KV_HEADS, BLOCK_SIZE)
            k_scales = tl.load(k_scales_ptr + of_line, mask=here, other=0.0)
            v_scales = tl.load(v_scales_ptr + of_line, mask=here, other=0.0)

        ended = step % TILES == TILES - 1
        last = ended & (segment == segments - 1)
        at += TILE
        if ended:
            segment += 1
        if last:
            segment = 0
            head += 1
            if (head == KV_HEADS) & (step + 1 < steps):
                head = 0
                number += 1
                row = tl.load(rows_ptr + number)
                length, begin, segments, table_ptr = _kv_of_row(
                    row, tables_ptr, slots_ptr, lengths_ptr, shared_ptr, table_stride, sharing,
                    SEGMENT, RANGES,
                )  # fmt: skip
            at = begin + tl.arange(0, TILE)
        block = lookup(table_ptr, at, length, BLOCK_SIZE)

        highest, norm, out = attend_tile(
            highest,
            norm,
            out,
            q,
            k,
            v,
            k_scales,
            v_scales,
            here[None, :],
            scale_log2,
            True,
            FP8,
            PRECISION,
            INTERPRETED,
        )
        if ended:
            if whole:
                all_highest, all_norm, all_out = fold(
                    all_highest, all_norm, all_out, highest, norm, out
                )
                if last:
                    result = finished(all_norm, all_out).to(out_ptr.dtype.element_ty)
                    to = out_ptr + current * (GROUP * HEAD_DIM) + of_group
                    tl.store(to, result, mask=held[:, None])
            else:
                at_unit = unit.to(tl.int64) * GROUP
                to = partials_ptr + at_unit * HEAD_DIM + of_group
                tl.store(to, out, mask=held[:, None])
                tl.store(stats_ptr + at_unit * 2 + head_row, highest, mask=held)
                tl.store(stats_ptr + at_unit * 2 + GROUP + head_row, norm, mask=held)
            highest, norm, out = start(ROWS, HEAD_DIM)
            unit += 1
            if last:
                current = row * KV_HEADS + head
                q_mask = held[:, None] & (unit < stop)
                q = tl.load(q_ptr + current * (GROUP * HEAD_DIM) + of_group, q_mask, other=0.0)
                whole = unit + segments <= stop
                if _has_prefix(counts_ptr, row, sharing, RANGES):
                    whole = False
                all_highest, all_norm, all_out = start(ROWS, HEAD_DIM)
