"""Prefill attention with one order of addition: the tiles, segments and folds of decode attention.

A token has the same bits as in a decode row, so its keys and values in the next layer do not depend
on whether it was a part of the prompt or was generated. Tiles of queries and the grid are those of
`attention.prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.attention.paged import (
    LOG2_E,
    check_layout,
    lines,
    lookup,
    scale_lines,
)
from pagewire.worker.ops.triton.attention.prefill import padded_chunks
from pagewire.worker.ops.triton.invariant.segments import (
    SEGMENT,
    TILE,
    attend_tile,
    check_options,
    finished,
    fold,
    start,
)


@dataclass(frozen=True, slots=True)
class SegmentPrefillConfig:
    """Rows of queries of a program and launch options; they change no bits."""

    rows: int
    warps: int
    stages: int


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    max_query_length: int,
    *,
    scales: KVScales | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    config: SegmentPrefillConfig | None = None,
) -> Tensor:
    """Implement `AttentionOps.prefill_attention` without windows, soft caps and sinks."""
    check_layout(q, k_cache, v_cache, scales)
    check_options(window, soft_cap, sinks)
    tokens, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    chunks = slots.shape[0]
    group = query_heads // kv_heads
    out = torch.empty_like(q) if out is None else out
    config = config or prefill_config(q.dtype, head_dim, fp8=scales is not None)
    tile_rows = max(config.rows, next_power_of_2(group))
    pdl = dependent_launch(q.device)
    # One more than the tiles of chunks: the tokens after the last chunk count as one more chunk.
    tiles = tokens // (tile_rows // group) + chunks + 1
    _segment_prefill_kernel[(kv_heads, tiles)](
        out,
        q,
        k_cache,
        v_cache,
        block_tables,
        slots,
        query_starts,
        lengths,
        k_cache if scales is None else scales.keys,
        v_cache if scales is None else scales.values,
        scale * LOG2_E,
        tokens,
        chunks,
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS=tile_rows,
        SEGMENT=SEGMENT,
        TILE=TILE,
        PADDED_CHUNKS=padded_chunks(chunks + 1),
        FP8=scales is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        INTERPRETED=q.device.type == "cpu",
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out


def prefill_config(dtype: torch.dtype, head_dim: int, *, fp8: bool = False) -> SegmentPrefillConfig:
    """Choose tiles; not measured on a GPU yet.

    A program holds the sums of a segment and of all earlier segments, twice the registers of
    `attention.prefill`, so it has half the rows.
    """
    if dtype == torch.float32:
        return SegmentPrefillConfig(rows=16, warps=4, stages=1)
    if head_dim > 128:
        return SegmentPrefillConfig(rows=32, warps=8, stages=2)  # 64 rows spill registers
    if fp8:
        return SegmentPrefillConfig(rows=32, warps=4, stages=2)
    return SegmentPrefillConfig(rows=64, warps=4, stages=3)


@triton.jit
def _attend_tiles(
    highest, norm, out, all_highest, all_norm, all_out,
    q, k_ptr, v_ptr, table_ptr, head, positions, scale_log2, length, begin, end,
    k_scales_ptr, v_scales_ptr,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend to KV tiles `begin` to `end`, and fold each segment that ends there.

    Return the sums of the segment that has not ended, and the sums of all earlier segments.
    """
    TILES: tl.constexpr = SEGMENT // TILE
    at = begin * TILE + tl.arange(0, TILE)
    block = lookup(table_ptr, at, length, BLOCK_SIZE)
    for tile in range(begin, end):
        line = lines(block, at, head, HEAD_DIM, KV_HEADS, BLOCK_SIZE)
        k = tl.load(k_ptr + line)
        if MASKED:
            v = tl.load(v_ptr + line, mask=(at < length)[:, None], other=0.0)
        else:
            v = tl.load(v_ptr + line)
        k_scales = at  # these two are not read without FP8
        v_scales = at
        if FP8:
            of_line = scale_lines(block, at, head, KV_HEADS, BLOCK_SIZE)
            k_scales = tl.load(k_scales_ptr + of_line)
            v_scales = tl.load(v_scales_ptr + of_line, mask=at < length, other=0.0)
        seen = at[None, :] <= positions[:, None]
        highest, norm, out = attend_tile(
            highest,
            norm,
            out,
            q,
            k,
            v,
            k_scales,
            v_scales,
            seen,
            scale_log2,
            MASKED,
            FP8,
            PRECISION,
            INTERPRETED,
        )
        if tile % TILES == TILES - 1:
            all_highest, all_norm, all_out = fold(
                all_highest, all_norm, all_out, highest, norm, out
            )
            highest, norm, out = start(q.shape[0], HEAD_DIM)
        at += TILE
        block = lookup(table_ptr, at, length, BLOCK_SIZE)
    return highest, norm, out, all_highest, all_norm, all_out


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _segment_prefill_kernel(
    out_ptr,  # [tokens, kv_heads * group, head_dim]
    q_ptr,  # [tokens, kv_heads * group, head_dim]
    k_ptr,  # [num_blocks, kv_heads, block_size, head_dim]
    v_ptr,
    tables_ptr,  # [slots, table_stride]
    slots_ptr,  # [chunks]
    starts_ptr,  # [chunks + 1]
    lengths_ptr,  # [chunks]
    k_scales_ptr,  # [num_blocks, kv_heads, block_size], if FP8
    v_scales_ptr,
    scale_log2,
    tokens,
    chunks,
    table_stride,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from one tile of query rows to the KV positions that they see.

    A program computes one tile for one KV head. The grid is `[kv_heads, tiles]`. The first tile of
    chunk i is `starts[i] // TOKENS + i`, which leaves enough tiles for the chunks before it.
    """
    if PDL:  # every program waits, so that the next kernel's wait covers earlier kernels, too
        gdc_wait()
        gdc_launch_dependents()
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0)
    # The last tiles of a chunk see the most positions, so they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    index = tl.arange(0, PADDED_CHUNKS)
    # The tokens after the last chunk are chunk number `chunks`.
    starts = tl.load(starts_ptr + index, mask=index <= chunks, other=2**30)
    chunk = tl.sum((starts // TOKENS + index <= tile).to(tl.int32), 0) - 1
    begin = tl.load(starts_ptr + chunk, mask=chunk >= 0, other=0)
    end = tl.load(starts_ptr + chunk + 1, mask=chunk < chunks, other=tokens)
    token_begin = begin + (tile - begin // TOKENS - chunk) * TOKENS
    length = tl.load(lengths_ptr + chunk, mask=(chunk >= 0) & (chunk < chunks), other=0)
    if (chunk < 0) | (token_begin >= end):  # chunk -1: the tokens before the first chunk
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    token = token_begin + row // GROUP
    present = ((token < end) & (row < TOKENS * GROUP))[:, None]
    query_head = head * GROUP + row % GROUP
    of_row = ((token * (KV_HEADS * GROUP) + query_head) * HEAD_DIM)[:, None] + dim[None, :]
    if length == 0:
        zeros = tl.zeros([ROWS, HEAD_DIM], out_ptr.dtype.element_ty)
        tl.store(out_ptr + of_row, zeros, mask=present)
        return

    table_ptr = tables_ptr + tl.load(slots_ptr + chunk) * table_stride
    prefix = length - (end - begin)
    positions = prefix + token - begin  # [ROWS]
    first_position = prefix + token_begin - begin
    last_position = tl.minimum(first_position + TOKENS, length) - 1
    q = tl.load(q_ptr + of_row, mask=present, other=0.0)

    tiles = last_position // TILE + 1
    diagonal = (first_position + 1) // TILE  # KV tiles that every row sees in full
    highest, norm, out = start(ROWS, HEAD_DIM)
    all_highest, all_norm, all_out = start(ROWS, HEAD_DIM)
    highest, norm, out, all_highest, all_norm, all_out = _attend_tiles(
        highest, norm, out, all_highest, all_norm, all_out,
        q, k_ptr, v_ptr, table_ptr, head, positions, scale_log2, length, 0, diagonal,
        k_scales_ptr, v_scales_ptr,
        HEAD_DIM, KV_HEADS, BLOCK_SIZE, SEGMENT, TILE, False, FP8, PRECISION, INTERPRETED,
    )  # fmt: skip
    highest, norm, out, all_highest, all_norm, all_out = _attend_tiles(
        highest, norm, out, all_highest, all_norm, all_out,
        q, k_ptr, v_ptr, table_ptr, head, positions, scale_log2, length, diagonal, tiles,
        k_scales_ptr, v_scales_ptr,
        HEAD_DIM, KV_HEADS, BLOCK_SIZE, SEGMENT, TILE, True, FP8, PRECISION, INTERPRETED,
    )  # fmt: skip
    # The last segment, or a segment without positions, which changes nothing.
    all_highest, all_norm, all_out = fold(all_highest, all_norm, all_out, highest, norm, out)
    result = finished(all_norm, all_out).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + of_row, result, mask=present)
