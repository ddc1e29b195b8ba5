"""Decode attention over latent vectors: one query token for each row.

The batch is cut into equal shares, and the pieces of segments that are cut are merged, as in
`attention.decode`. Here a *segment* is one tile of query heads of one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract.blocks import RUN
from pagewire.worker.ops.device import multiprocessors
from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.attention.merge import MergeConfig, merge_pieces
from pagewire.worker.ops.triton.attention.paged import LOG2_E, LOWEST, lookup
from pagewire.worker.ops.triton.attention.shared_prefix import Pieces
from pagewire.worker.ops.triton.attention.shares import DecodePlan, cut, plan_shares
from pagewire.worker.ops.triton.latent.heads import check_layout, heads_of_tile

_ROWS = 16  # least rows of a matrix instruction


@dataclass(frozen=True, slots=True)
class LatentDecodeConfig:
    """Tiles and launch options of decode attention over latent vectors."""

    heads: int  # most query heads of a tile
    tile: int  # positions of a step of the loop
    warps: int
    stages: int
    programs: int  # on each multiprocessor
    share: int  # smallest share in positions

    @property
    def min_share(self) -> int:
        """`share` in tiles."""
        return max(1, self.share // self.tile)


def decode_config(dtype: torch.dtype, heads: int) -> LatentDecodeConfig:
    """Choose tiles and launch options. Not measured yet.

    A tile of heads keeps its sums, 512 float32 values a head, in registers. 64 heads fill half of
    the registers of a multiprocessor. With few heads, two programs fit.
    """
    if dtype == torch.float32:
        return LatentDecodeConfig(heads=16, tile=16, warps=4, stages=1, programs=1, share=64)
    if heads <= _ROWS:
        return LatentDecodeConfig(heads=16, tile=32, warps=4, stages=2, programs=2, share=64)
    return LatentDecodeConfig(heads=64, tile=32, warps=8, stages=2, programs=1, share=64)


def plan_latent_decode(
    lengths: Tensor, heads: int, rank: int, dtype: torch.dtype
) -> DecodePlan | None:
    """Implement `LatentOps.plan_latent_decode`; a single row needs no plan."""
    return _plan(lengths, heads, decode_config(dtype, heads))


def _plan(lengths: Tensor, heads: int, config: LatentDecodeConfig) -> DecodePlan | None:
    if len(lengths) == 1:
        return None
    programs = multiprocessors(lengths.device) * config.programs
    tiles = heads // heads_of_tile(heads, config.heads)
    return plan_shares(lengths, None, tiles, config.tile, programs, config.min_share)


def latent_decode_attention(
    absorbed: Tensor,
    rotated: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    plan: DecodePlan | None = None,
    out: Tensor | None = None,
    config: LatentDecodeConfig | None = None,
) -> Tensor:
    """Implement `LatentOps.latent_decode_attention`.

    `config` sets tiles and launch options; None chooses them by dtype and heads. A `plan` must be
    made with the same ones.
    """
    check_layout(absorbed, rotated, cache)
    rows, heads, rank = absorbed.shape
    config = config or decode_config(absorbed.dtype, heads)
    group = heads_of_tile(heads, config.heads)
    programs = multiprocessors(absorbed.device) * config.programs
    plan = plan or _plan(lengths, heads, config)
    planned = plan is not None
    plan = plan or DecodePlan(lengths, lengths, lengths, lengths, lengths)  # not read
    out = torch.empty_like(absorbed) if out is None else out
    pieces = absorbed.new_empty((programs, 2, group, rank), dtype=torch.float32)
    sums = absorbed.new_empty((programs, 2, group), dtype=torch.float32)
    _latent_decode_kernel[(programs,)](
        out,
        pieces,
        sums,
        absorbed,
        rotated,
        cache,
        block_tables,
        slots,
        lengths,
        plan.rows,
        plan.units,
        plan.begins,
        scale * LOG2_E,
        config.min_share,
        rotated.stride(0),
        rotated.stride(1),
        block_tables.stride(0),
        RANK=rank,
        ROTATED=rotated.shape[2],
        TILES=heads // group,
        GROUP=group,
        BLOCK_SIZE=cache.shape[2],
        TILE=config.tile,
        PLANNED=planned,
        BLOCK_H=max(_ROWS, next_power_of_2(group)),
        PRECISION="ieee" if absorbed.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
    )
    merge_pieces(
        out,
        pieces,
        sums,
        Pieces(out, out),
        lengths,
        lengths,
        lengths,
        plan,
        config.min_share,
        _merge_config(rows, heads, group, programs),
        HEAD_DIM=rank,
        KV_HEADS=heads // group,
        GROUP=group,
        TILE=config.tile,
        PLANNED=planned,
        RANGES=0,
        WINDOW=0,
        RUN=RUN,
        PDL=False,
    )
    return out


def _merge_config(rows: int, heads: int, group: int, programs: int) -> MergeConfig:
    """Choose how the pieces of `programs` are merged: more at a time if each segment has many."""
    pieces = programs // (rows * (heads // group)) + 2  # of one segment, approximately
    if pieces > 8:
        return MergeConfig(step=8, heads=1)
    return MergeConfig(step=4, heads=2 if heads % 2 == 0 else 1)


@triton.jit(do_not_specialize=["min_share"])
def _latent_decode_kernel(
    out_ptr,  # [rows, TILES * GROUP, RANK]
    pieces_ptr,  # [programs, 2, GROUP, RANK]
    sums_ptr,  # [programs, 2, GROUP]
    absorbed_ptr,  # [rows, TILES * GROUP, RANK]
    rotated_ptr,  # [rows, TILES * GROUP, ROTATED]
    cache_ptr,  # [num_blocks, 1, block_size, RANK + ROTATED]
    tables_ptr,  # [slots, table_stride]
    slots_ptr,  # [rows]
    lengths_ptr,  # [rows]
    rows_ptr,  # these three belong to the plan, if PLANNED; see `DecodePlan`
    units_ptr,
    begins_ptr,
    scale_log2,
    min_share,  # units
    row_stride,  # of rotated
    head_stride,
    table_stride,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PLANNED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from the query heads of each segment to the positions of one share.

    A program computes one share: segment after segment, each up to its own end or the share's. The
    grid is `[programs]`, a fixed number for each multiprocessor.
    """
    program = tl.program_id(0)
    number = 0
    row = 0
    if PLANNED:
        number = tl.load(begins_ptr + program * 2)
        row = tl.load(rows_ptr + number)
    length = tl.load(lengths_ptr + row)
    tiles = tl.maximum(tl.cdiv(length, TILE), 0)
    if PLANNED:
        within = tl.load(begins_ptr + program * 2 + 1)
        unit = tl.load(units_ptr + program)
        stop = tl.load(units_ptr + program + 1)
    else:
        total = tiles * TILES
        share, longer = cut(total, tl.num_programs(0), min_share)
        # Programs without a share begin at the end of the line or after it.
        unit = program * share + tl.minimum(program, longer)
        stop = tl.minimum(unit + share + tl.where(program < longer, 1, 0), total)
        within = unit
    tiles = tl.maximum(tiles, 1)  # a program may have no share
    head_tile = within // tiles
    tile = within % tiles

    head = tl.arange(0, BLOCK_H)
    held = head < GROUP
    present = held[:, None]
    dim = tl.arange(0, RANK)
    rotated_dim = tl.arange(0, ROTATED)
    at = head[:, None] * RANK + dim[None, :]  # [BLOCK_H, RANK]
    while unit < stop:
        first = head_tile * GROUP
        segment = row * (TILES * GROUP) + first
        q = tl.load(absorbed_ptr + segment * RANK + at, mask=present, other=0.0)
        of_row = rotated_ptr + row * row_stride + (first + head[:, None]) * head_stride
        q_rotated = tl.load(of_row + rotated_dim[None, :], mask=present, other=0.0)
        table_ptr = tables_ptr + tl.load(slots_ptr + row) * table_stride

        highest = tl.full([BLOCK_H], LOWEST, tl.float32)
        norm = tl.zeros([BLOCK_H], tl.float32)
        out = tl.zeros([BLOCK_H, RANK], tl.float32)
        end = tl.minimum(tiles, tile + stop - unit)
        position = tile * TILE + tl.arange(0, TILE)
        block = lookup(table_ptr, position, length, BLOCK_SIZE)
        for _ in range(tile, end):
            valid = position < length
            line = (block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * (RANK + ROTATED)
            vector_ptrs = cache_ptr + line[:, None] + dim[None, :]
            vector = tl.load(vector_ptrs, mask=valid[:, None], other=0.0)  # [TILE, RANK]
            key_ptrs = cache_ptr + line[:, None] + (RANK + rotated_dim)[None, :]
            key = tl.load(key_ptrs, mask=valid[:, None], other=0.0)  # [TILE, ROTATED]
            scores = tl.dot(q, tl.trans(vector), input_precision=PRECISION)  # [BLOCK_H, TILE]
            scores = tl.dot(q_rotated, tl.trans(key), scores, input_precision=PRECISION)
            scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            decay = tl.exp2(highest - new_highest)
            weights = tl.exp2(scores - new_highest[:, None])
            norm = norm * decay + tl.sum(weights, 1)
            highest = new_highest
            out = tl.dot(
                weights.to(vector.dtype), vector, out * decay[:, None], input_precision=PRECISION
            )
            position += TILE
            block = lookup(table_ptr, position, length, BLOCK_SIZE)

        out = out / norm[:, None]
        if (tile == 0) & (end == tiles):
            to = out_ptr + segment * RANK + at
            tl.store(to, out.to(out_ptr.dtype.element_ty), mask=present)
        else:
            piece = (program * 2 + tl.where(tile == 0, 1, 0)) * GROUP
            tl.store(pieces_ptr + piece * RANK + at, out, mask=present)
            tl.store(sums_ptr + piece + head, highest + tl.log2(norm), mask=held)
        unit += end - tile
        tile = 0
        head_tile += 1
        if PLANNED and (head_tile == TILES) & (unit < stop):
            head_tile = 0
            number += 1
            row = tl.load(rows_ptr + number)
            length = tl.load(lengths_ptr + row)
            tiles = tl.cdiv(length, TILE)
