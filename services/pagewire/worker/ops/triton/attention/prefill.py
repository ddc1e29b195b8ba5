"""Prefill attention over the paged KV cache: chunks of new tokens after a cached prefix.

The rows of a tile are the query heads of one KV head for consecutive tokens of one chunk: row r is
token `r // group`, head `r % group`. So keys and values are read once for the whole group, and a
short chunk still fills its tile. The softmax is computed online, tile by tile, as in FlashAttention
(Dao et al., 2022; Dao, 2023).

The host needs no lengths to choose the grid. All chunks together have at most
`tokens // tile_tokens + chunks` tiles. The first tile of chunk i is `starts[i] // tile_tokens + i`,
which leaves enough tiles for the chunks before it. Programs without tokens end at once. The starts
and ends of chunks are read while the preceding kernel may still run, as in decode attention.
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
from pagewire.worker.ops.triton.attention import prefill_hopper as hopper
from pagewire.worker.ops.triton.attention.paged import (
    LOG2_E,
    LOWEST,
    capped,
    check_layout,
    in_type_of,
    lines,
    lookup,
    scale_lines,
    score_scales,
    widened,
)

_LOG2_E = tl.constexpr(LOG2_E)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tiles and launch options of prefill attention."""

    rows: int  # of queries
    tile: int  # KV positions of a step
    warps: int
    stages: int
    registers: int | None = None  # maximum of a thread; decides how many programs run at once
    pdl: bool = True


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
    config: PrefillConfig | None = None,
) -> Tensor:
    """Implement `AttentionOps.prefill_attention`.

    `config` sets the tiles. None chooses them by dtype, head size and `max_query_length`. Most
    shapes then use Hopper's own kernel (`prefill_hopper`), which supports no windows, soft caps or
    sinks.
    """
    check_layout(q, k_cache, v_cache, scales)
    tokens, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    chunks = slots.shape[0]
    group = query_heads // kv_heads
    out = torch.empty_like(q) if out is None else out
    plain = window is None and soft_cap is None and sinks is None
    if config is None and plain and hopper.is_supported(q, k_cache, chunks, max_query_length):
        where = (block_tables, slots, query_starts, lengths)
        hopper.prefill(out, q, k_cache, v_cache, *where, scale, scales)
        return out
    config = config or prefill_config(
        q.dtype, head_dim, group * max_query_length, fp8=scales is not None
    )
    tile_rows = max(config.rows, next_power_of_2(group))
    tile_tokens = tile_rows // group
    scale_log2, cap_scale = score_scales(scale, soft_cap)
    pdl = config.pdl and dependent_launch(q.device)
    launch = {"launch_pdl": True} if pdl else {}

    # One more than the tiles of chunks: the tokens after the last chunk count as one more chunk.
    tiles = tokens // tile_tokens + chunks + 1
    _prefill_kernel[(kv_heads, tiles)](
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
        sinks,
        scale_log2,
        tokens,
        chunks,
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        ROWS=tile_rows,
        TILE=config.tile,
        PADDED_CHUNKS=padded_chunks(chunks + 1),
        WINDOW=window or 0,
        CAP_SCALE=cap_scale,
        FP8=scales is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers,
        **launch,
    )
    return out


def padded_chunks(chunks: int) -> int:
    """Round a number of chunks up to one of a few sizes, so that few variants are compiled."""
    return max(256, next_power_of_2(chunks))


def prefill_config(
    dtype: torch.dtype, head_dim: int, rows: int, *, fp8: bool = False
) -> PrefillConfig:
    """Choose tiles, the fastest of `benchmarks/kernels/attention.py --sweep` on an H200.

    `rows` is tokens of the longest chunk times query heads of a group. Caches in FP8 need more
    registers, for the conversion of keys and values; their tiles were not measured yet.
    """
    if dtype == torch.float32:
        return PrefillConfig(rows=16, tile=16, warps=4, stages=1)
    if fp8 and head_dim > 128:
        return PrefillConfig(rows=128, tile=16, warps=8, stages=2)
    if fp8:
        return PrefillConfig(rows=64, tile=64, warps=4, stages=3)
    if head_dim > 128:
        return PrefillConfig(rows=128, tile=32, warps=8, stages=2)
    if rows <= 1024:  # few tokens: smaller tiles keep more multiprocessors busy
        return PrefillConfig(rows=64, tile=64, warps=4, stages=3)
    tile = 64 if head_dim <= 64 else 32  # two programs share the registers of a multiprocessor
    return PrefillConfig(rows=128, tile=tile, warps=8, stages=3, registers=128)


@triton.jit
def attend_tiles(
    out,  # [ROWS, head_dim], sum of the weighted values so far
    highest,  # [ROWS], largest score so far
    norm,  # [ROWS], sum of the weights so far
    q,  # [ROWS, head_dim]
    k_ptr,
    v_ptr,
    table_ptr,
    head,
    positions,
    scale_log2,
    length,
    begin,
    end,
    k_scales_ptr,
    v_scales_ptr,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: all positions
    CAP_SCALE: tl.constexpr,  # 0: no soft cap
    FP8: tl.constexpr,  # keys and values are in FP8 and have scales
    PRECISION: tl.constexpr,
):
    """Attend from the queries of a tile to KV tiles `begin` to `end`; return `out, highest, norm`.

    The softmax waits for the scores, and the second GEMM for the softmax. Meanwhile another program
    on the same multiprocessor uses the tensor cores: with `registers`, two or more programs fit.
    """
    at = begin * TILE + tl.arange(0, TILE)
    block = lookup(table_ptr, at, length, BLOCK_SIZE)
    for _ in range(begin, end):
        line = lines(block, at, head, HEAD_DIM, KV_HEADS, BLOCK_SIZE)
        k = tl.load(k_ptr + line)
        if MASKED:
            v = tl.load(v_ptr + line, mask=(at < length)[:, None], other=0.0)
        else:
            v = tl.load(v_ptr + line)
        if FP8:
            of_line = scale_lines(block, at, head, KV_HEADS, BLOCK_SIZE)
            k_scales = tl.load(k_scales_ptr + of_line)
            if MASKED:
                v_scales = tl.load(v_scales_ptr + of_line, mask=at < length, other=0.0)
            else:
                v_scales = tl.load(v_scales_ptr + of_line)
            k = in_type_of(k, q)
            v, v_scales = widened(v, v_scales, q)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [ROWS, TILE]
        if FP8:
            scores *= k_scales[None, :]
        if CAP_SCALE > 0:
            scores = capped(scores, CAP_SCALE)
        if MASKED:
            visible = at[None, :] <= positions[:, None]
            if WINDOW:
                visible &= at[None, :] > positions[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        norm = norm * decay + tl.sum(weights, 1)
        highest = new_highest
        out = out * decay[:, None]
        if FP8:
            weights *= v_scales[None, :]
        out = tl.dot(weights.to(v.dtype), v, out, input_precision=PRECISION)
        at += TILE
        block = lookup(table_ptr, at, length, BLOCK_SIZE)
    return out, highest, norm


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _prefill_kernel(
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
    sinks_ptr,  # [kv_heads * group], or None
    scale_log2,
    tokens,
    chunks,
    table_stride,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_SCALE: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from one tile of query rows to the KV positions that they see.

    A program computes one tile for one KV head. The grid is `[kv_heads, tiles]`.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0)
    # The last tiles of a chunk see the most positions. They start first, so that tiles with less
    # work fill the multiprocessors at the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    index = tl.arange(0, PADDED_CHUNKS)
    # The tokens after the last chunk are chunk number `chunks`.
    starts = tl.load(starts_ptr + index, mask=index <= chunks, other=2**30)
    chunk = tl.sum((starts // TOKENS + index <= tile).to(tl.int32), 0) - 1
    begin = tl.load(starts_ptr + chunk, mask=chunk >= 0, other=0)
    end = tl.load(starts_ptr + chunk + 1, mask=chunk < chunks, other=tokens)
    token_begin = begin + (tile - begin // TOKENS - chunk) * TOKENS
    length = tl.load(lengths_ptr + chunk, mask=(chunk >= 0) & (chunk < chunks), other=0)
    if PDL:  # every program waits, so that the next kernel's wait covers earlier kernels, too
        gdc_wait()
        gdc_launch_dependents()
    if (chunk < 0) | (token_begin >= end):  # chunk -1: the tokens before the first chunk
        return

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    token = token_begin + row // GROUP
    present = ((token < end) & (row < TOKENS * GROUP))[:, None]
    query_head = head * GROUP + row % GROUP
    at = ((token * (KV_HEADS * GROUP) + query_head) * HEAD_DIM)[:, None] + dim[None, :]
    if length == 0:
        tl.store(out_ptr + at, tl.zeros([ROWS, HEAD_DIM], out_ptr.dtype.element_ty), mask=present)
        return

    table_ptr = tables_ptr + tl.load(slots_ptr + chunk) * table_stride
    prefix = length - (end - begin)
    positions = prefix + token - begin  # [ROWS]
    first_position = prefix + token_begin - begin
    last_position = tl.minimum(first_position + TOKENS, length) - 1
    q = tl.load(q_ptr + at, mask=present, other=0.0)

    highest = tl.full([ROWS], LOWEST, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:  # counts as a position with a value of zeros
        highest = tl.load(sinks_ptr + query_head).to(tl.float32) * _LOG2_E
        norm = tl.full([ROWS], 1.0, tl.float32)
    out = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    tiles = last_position // TILE + 1
    diagonal = (first_position + 1) // TILE  # KV tiles that every row sees in full
    whole = 0
    if WINDOW:
        begin_tile = tl.maximum(first_position + 1 - WINDOW, 0) // TILE
        # Tiles before `whole` are masked: the last row sees at most their end.
        whole = tl.minimum(tl.cdiv(tl.maximum(last_position + 1 - WINDOW, 0), TILE), diagonal)
        out, highest, norm = attend_tiles(
            out, highest, norm,
            q, k_ptr, v_ptr, table_ptr, head, positions, scale_log2, length,
            begin_tile, whole, k_scales_ptr, v_scales_ptr,
            HEAD_DIM, KV_HEADS, BLOCK_SIZE, TILE, True, WINDOW, CAP_SCALE, FP8, PRECISION,
        )  # fmt: skip
    out, highest, norm = attend_tiles(
        out, highest, norm,
        q, k_ptr, v_ptr, table_ptr, head, positions, scale_log2, length,
        whole, diagonal, k_scales_ptr, v_scales_ptr,
        HEAD_DIM, KV_HEADS, BLOCK_SIZE, TILE, False, 0, CAP_SCALE, FP8, PRECISION,
    )  # fmt: skip
    out, highest, norm = attend_tiles(
        out, highest, norm,
        q, k_ptr, v_ptr, table_ptr, head, positions, scale_log2, length,
        diagonal, tiles, k_scales_ptr, v_scales_ptr,
        HEAD_DIM, KV_HEADS, BLOCK_SIZE, TILE, True, WINDOW, CAP_SCALE, FP8, PRECISION,
    )  # fmt: skip
    out = out / norm[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=present)
