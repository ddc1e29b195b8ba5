"""Prefill attention over latent vectors: chunks of new tokens after a cached prefix.

The rows of a tile are a tile of query heads for consecutive tokens of one chunk. The grid follows
from the numbers of tokens and chunks as in `attention.prefill`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.attention.paged import LOG2_E, LOWEST, lookup
from pagewire.worker.ops.triton.attention.prefill import padded_chunks
from pagewire.worker.ops.triton.latent.heads import check_layout, heads_of_tile


@dataclass(frozen=True, slots=True)
class LatentPrefillConfig:
    """Tiles and launch options of prefill attention over latent vectors."""

    rows: int  # of queries
    tile: int  # positions of a step of the loop
    warps: int
    stages: int


def prefill_config(dtype: torch.dtype) -> LatentPrefillConfig:
    """Choose tiles. Not measured yet: 64 rows fill half of the registers of a multiprocessor."""
    if dtype == torch.float32:
        return LatentPrefillConfig(rows=16, tile=16, warps=4, stages=1)
    return LatentPrefillConfig(rows=64, tile=32, warps=8, stages=2)


def latent_prefill_attention(
    absorbed: Tensor,
    rotated: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    max_query_length: int,
    *,
    out: Tensor | None = None,
    config: LatentPrefillConfig | None = None,
) -> Tensor:
    """Implement `LatentOps.latent_prefill_attention`.

    `config` sets the tiles; None chooses them by dtype.
    """
    check_layout(absorbed, rotated, cache)
    tokens, heads, rank = absorbed.shape
    chunks = slots.shape[0]
    config = config or prefill_config(absorbed.dtype)
    group = heads_of_tile(heads, config.rows)
    tile_tokens = config.rows // group
    out = torch.empty_like(absorbed) if out is None else out
    # One more than the tiles of chunks: the tokens after the last chunk count as one more chunk.
    tiles = tokens // tile_tokens + chunks + 1
    _latent_prefill_kernel[(heads // group, tiles)](
        out,
        absorbed,
        rotated,
        cache,
        block_tables,
        slots,
        query_starts,
        lengths,
        scale * LOG2_E,
        tokens,
        chunks,
        rotated.stride(0),
        rotated.stride(1),
        block_tables.stride(0),
        RANK=rank,
        ROTATED=rotated.shape[2],
        TILES=heads // group,
        GROUP=group,
        BLOCK_SIZE=cache.shape[2],
        ROWS=max(config.rows, next_power_of_2(group)),
        TOKENS=tile_tokens,
        TILE=config.tile,
        PADDED_CHUNKS=padded_chunks(chunks + 1),
        PRECISION="ieee" if absorbed.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _latent_prefill_kernel(
    out_ptr,  # [tokens, TILES * GROUP, RANK]
    absorbed_ptr,  # [tokens, TILES * GROUP, RANK]
    rotated_ptr,  # [tokens, TILES * GROUP, ROTATED]
    cache_ptr,  # [num_blocks, 1, block_size, RANK + ROTATED]
    tables_ptr,  # [slots, table_stride]
    slots_ptr,  # [chunks]
    starts_ptr,  # [chunks + 1]
    lengths_ptr,  # [chunks]
    scale_log2,
    tokens,
    chunks,
    row_stride,  # of rotated
    head_stride,
    table_stride,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from one tile of query rows to the positions that they see.

    A program computes TOKENS tokens of one tile of heads. The grid is `[TILES, tiles]`.
    """
    # The last tiles of a chunk see the most positions. They start first.
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
    dim = tl.arange(0, RANK)
    token = token_begin + row // GROUP
    present = ((token < end) & (row < TOKENS * GROUP))[:, None]
    head = tl.program_id(0) * GROUP + row % GROUP
    at = ((token.to(tl.int64) * (TILES * GROUP) + head) * RANK)[:, None] + dim[None, :]
    if length == 0:
        tl.store(out_ptr + at, tl.zeros([ROWS, RANK], out_ptr.dtype.element_ty), mask=present)
        return

    table_ptr = tables_ptr + tl.load(slots_ptr + chunk) * table_stride
    prefix = length - (end - begin)
    positions = prefix + token - begin  # [ROWS]
    first_position = prefix + token_begin - begin
    last_position = tl.minimum(first_position + TOKENS, length) - 1
    q = tl.load(absorbed_ptr + at, mask=present, other=0.0)
    of_token = (token.to(tl.int64) * row_stride + head * head_stride)[:, None]
    rotated_dim = tl.arange(0, ROTATED)
    q_rotated = tl.load(rotated_ptr + of_token + rotated_dim[None, :], mask=present, other=0.0)

    highest = tl.full([ROWS], LOWEST, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, RANK], tl.float32)
    at_position = tl.arange(0, TILE)
    block = lookup(table_ptr, at_position, length, BLOCK_SIZE)
    # One loop with masks for all tiles: a second loop without masks would spill registers.
    for _ in range(last_position // TILE + 1):
        cached = (at_position < length)[:, None]
        offset = at_position % BLOCK_SIZE
        line = (block.to(tl.int64) * BLOCK_SIZE + offset) * (RANK + ROTATED)
        vector_ptrs = cache_ptr + line[:, None] + dim[None, :]
        vector = tl.load(vector_ptrs, mask=cached, other=0.0)  # [TILE, RANK]
        key_ptrs = cache_ptr + line[:, None] + (RANK + rotated_dim)[None, :]
        key = tl.load(key_ptrs, mask=cached, other=0.0)  # [TILE, ROTATED]
        scores = tl.dot(q, tl.trans(vector), input_precision=PRECISION)  # [ROWS, TILE]
        scores = tl.dot(q_rotated, tl.trans(key), scores, input_precision=PRECISION)
        visible = at_position[None, :] <= positions[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
        norm = norm * decay + tl.sum(weights, 1)
        highest = new_highest
        out = out * decay[:, None]
        out = tl.dot(weights.to(vector.dtype), vector, out, input_precision=PRECISION)
        at_position += TILE
        block = lookup(table_ptr, at_position, length, BLOCK_SIZE)
    out = out / norm[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=present)
