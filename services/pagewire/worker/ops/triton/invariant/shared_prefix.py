"""Shared-prefix attention in segments: a segment is read once for all rows that share it.

A work item is one whole segment and the rows that share it. It stores the same maximum, sum and
output that each row would compute alone, and the merge of decode attention folds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.contract.shared_prefix import (
    ITEM_FIELDS,
    PrefixLimits,
    SharedPrefixItems,
)
from pagewire.worker.ops.device import dependent_launch, multiprocessors
from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.attention.paged import LOG2_E, lines, lookup, scale_lines
from pagewire.worker.ops.triton.invariant.decode_merge import Partials
from pagewire.worker.ops.triton.invariant.segments import SEGMENT, TILE, attend_tile, start

# Most segments of a row that are read as shared ones: 8,192 positions. Each row reads later
# positions itself. Scratch memory holds this many segments of each row.
MAX_SEGMENTS = 32
PROGRAMS_PER_MULTIPROCESSOR = 2


def shared_prefix_limits(dtype: torch.dtype, head_dim: int, group: int) -> PrefixLimits:
    """Implement `AttentionOps.shared_prefix_limits`: items of one segment."""
    return PrefixLimits(
        members=max(1, _query_rows(dtype) // group),
        unit=SEGMENT,
        max_positions=SEGMENT,
        max_ranges=MAX_SEGMENTS,
    )


def _query_rows(dtype: torch.dtype) -> int:
    return 16 if dtype == torch.float32 else 64


def attend_shared_segments(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    shared: SharedPrefixItems,
    scale: float,
    *,
    scales: KVScales | None = None,
) -> Partials:
    """Return all shared segments, `[rows * MAX_SEGMENTS]`; arguments as in `decode_attention`."""
    rows, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = query_heads // kv_heads
    pdl = dependent_launch(q.device)
    partials = Partials.empty(rows * MAX_SEGMENTS, query_heads, head_dim, q.device)
    _shared_segment_kernel[(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(q.device),)](
        partials.out,
        partials.stats,
        q,
        k_cache,
        v_cache,
        block_tables,
        shared.num_items,
        shared.items,
        shared.entries,
        k_cache if scales is None else scales.keys,
        v_cache if scales is None else scales.values,
        scale * LOG2_E,
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS=max(_query_rows(q.dtype), next_power_of_2(group)),
        SEGMENT=SEGMENT,
        TILE=TILE,
        RANGES=MAX_SEGMENTS,
        FIELDS=ITEM_FIELDS,
        FP8=scales is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        INTERPRETED=q.device.type == "cpu",
        PDL=pdl,
        num_warps=4 if head_dim <= 128 else 8,
        num_stages=1 if q.dtype == torch.float32 or (scales is not None and head_dim > 128) else 2,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return partials


@triton.jit
def _shared_segment_kernel(
    partials_ptr,  # [rows, RANGES, kv_heads * group, head_dim]
    stats_ptr,  # [rows, RANGES, 2, kv_heads * group]
    q_ptr,  # [rows, kv_heads * group, head_dim]
    k_ptr,  # [num_blocks, kv_heads, block_size, head_dim]
    v_ptr,
    tables_ptr,  # [slots, table_stride]
    num_items_ptr,
    items_ptr,  # [items, FIELDS]
    entries_ptr,
    k_scales_ptr,  # [num_blocks, kv_heads, block_size], if FP8
    v_scales_ptr,
    scale_log2,
    table_stride,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    RANGES: tl.constexpr,
    FIELDS: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from the rows of an item to its segment, which all rows see in full.

    The number of programs is fixed, so the grid depends on the device only. A program computes each
    n-th pair of item and KV head: the query heads of that KV head for all rows.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    MEMBERS: tl.constexpr = ROWS // GROUP
    query = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    total = tl.load(num_items_ptr) * KV_HEADS
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        item_ptr = items_ptr + work // KV_HEADS * FIELDS
        head = work % KV_HEADS
        table_ptr = tables_ptr + tl.load(item_ptr) * table_stride
        begin = tl.load(item_ptr + 1)
        first = tl.load(item_ptr + 3)
        members = tl.load(item_ptr + 4)
        ordinal = tl.load(item_ptr + 5)

        member = query // GROUP
        present = (member < members) & (query < MEMBERS * GROUP)
        row = tl.load(entries_ptr + first + member, mask=present, other=0)
        query_head = head * GROUP + query % GROUP
        of_row = (row * HEADS + query_head)[:, None] * HEAD_DIM + dim[None, :]
        q = tl.load(q_ptr + of_row, mask=present[:, None], other=0.0)

        highest, norm, out = start(ROWS, HEAD_DIM)
        for tile in range(SEGMENT // TILE):
            at = begin + tile * TILE + tl.arange(0, TILE)
            block = lookup(table_ptr, at, begin + SEGMENT, BLOCK_SIZE)
            line = lines(block, at, head, HEAD_DIM, KV_HEADS, BLOCK_SIZE)
            k = tl.load(k_ptr + line)
            v = tl.load(v_ptr + line)
            k_scales = at  # these two are not read without FP8
            v_scales = at
            if FP8:
                of_line = scale_lines(block, at, head, KV_HEADS, BLOCK_SIZE)
                k_scales = tl.load(k_scales_ptr + of_line)
                v_scales = tl.load(v_scales_ptr + of_line)
            highest, norm, out = attend_tile(
                highest, norm, out, q, k, v, k_scales, v_scales, present[:, None], scale_log2,
                False, FP8, PRECISION, INTERPRETED,
            )  # fmt: skip

        piece = (row.to(tl.int64) * RANGES + ordinal) * HEADS
        to = (piece + query_head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(partials_ptr + to, out, mask=present[:, None])
        tl.store(stats_ptr + piece * 2 + query_head, highest, mask=present)
        tl.store(stats_ptr + piece * 2 + HEADS + query_head, norm, mask=present)
