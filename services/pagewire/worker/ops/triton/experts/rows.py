"""The kernels that sort the pairs of a batch by expert.

Pairs have numbers among those of their expert. Numbers of many pairs come from a counter of each
expert, so they differ from run to run. The results of a row do not depend on its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ExpertRows, PairNumbers, Routes
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.experts.config import gemm_config

# A program of the sort has PART pairs or TILES tiles. All programs read the counts.
PART = 32
TILES = 16
SORT_WARPS = 2
# Up to this many pairs, each program counts and numbers them itself.
ALONE = 128
COPY_WARPS = 4


@triton.jit(do_not_specialize=["pairs"])
def _number_kernel(
    experts_ptr,  # [pairs]
    counts_ptr,  # [EXPERTS], zeros before
    numbers_ptr,  # [pairs]
    pairs,
    PART: tl.constexpr,
):
    """Number the pairs of each expert, in any order. The grid is `[pairs / PART]`."""
    item = tl.program_id(0) * PART + tl.arange(0, PART)
    expert = tl.load(experts_ptr + item, mask=item < pairs, other=0)
    number = tl.atomic_add(counts_ptr + expert, 1, mask=item < pairs, sem="relaxed")
    tl.store(numbers_ptr + item, number, mask=item < pairs)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _sort_kernel(
    experts_ptr,  # [pairs]
    numbers_ptr,  # [pairs], or None
    counts_ptr,  # [EXPERTS], or None: there are at most ALONE pairs
    pairs_ptr,  # [pairs]
    rows_ptr,  # [pairs]
    starts_ptr,  # [EXPERTS + 1]
    tiles_ptr,  # [2, tiles]
    pairs,
    tiles,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PART: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the rows of PART pairs, or the experts and first rows of TILES tiles.

    The grid is `[pairs / PART + tiles / TILES]`. Each program computes where the rows of all
    experts begin, so programs do not wait for each other.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    bins = tl.arange(0, BINS)
    if counts_ptr is None:
        other = tl.arange(0, ALONE)
        others = tl.load(experts_ptr + other, mask=other < pairs, other=-1)
        counts = tl.histogram(others, BINS, mask=other < pairs)
    else:
        counts = tl.load(counts_ptr + bins, mask=bins < EXPERTS, other=0)
    starts = tl.cumsum(counts, 0) - counts
    parts = tl.cdiv(pairs, PART)
    if tl.program_id(0) < parts:
        item = tl.program_id(0) * PART + tl.arange(0, PART)
        inside = item < pairs
        expert = tl.load(experts_ptr + item, mask=inside, other=0)
        if counts_ptr is None:
            earlier = (others[None, :] == expert[:, None]) & (other[None, :] < item[:, None])
            number = tl.sum(earlier.to(tl.int32), 1)
        else:
            number = tl.load(numbers_ptr + item, mask=inside, other=0)
        mine = bins[None, :] == expert[:, None]  # [PART, BINS]
        row = number + tl.sum(tl.where(mine, starts[None, :], 0), 1)
        tl.store(pairs_ptr + row, item, mask=inside)
        tl.store(rows_ptr + item, row, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(starts_ptr + bins, starts, mask=bins < EXPERTS)
            tl.store(starts_ptr + EXPERTS, pairs)
    else:
        tile = (tl.program_id(0) - parts) * TILES + tl.arange(0, TILES)
        needed = (counts + TILE - 1) // TILE  # tiles of each expert
        ends = tl.cumsum(needed, 0)
        used = tl.sum(needed, 0)
        # The tiles of all experts before the owner end before this one.
        owner = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)  # [TILES]
        owned = bins[None, :] == owner[:, None]  # [TILES, BINS]
        first = tl.sum(tl.where(owned, (starts - (ends - needed) * TILE)[None, :], 0), 1)
        first = tl.where(tile < used, first + tile * TILE, pairs)
        tl.store(tiles_ptr + tile, tl.where(tile < used, owner, -1 - used), mask=tile < tiles)
        tl.store(tiles_ptr + tiles + tile, first, mask=tile < tiles)


def sort_by_expert(experts: Tensor, num_experts: int, *, tile: int | None = None) -> ExpertRows:
    """Implement `ExpertOps.sort_by_expert`; the rows are cut to tiles of `tile` rows."""
    pairs = experts.numel()
    if pairs <= ALONE:
        return _sort(experts, num_experts, None, tile)
    counts, numbers = experts.new_zeros(num_experts), torch.empty_like(experts)
    # The counts are cleared by no kernel of ours, so this is not a dependent launch.
    _number_kernel[(cdiv(pairs, PART),)](experts, counts, numbers, pairs, PART=PART, num_warps=1)
    return _sort(experts, num_experts, PairNumbers(numbers, counts), tile)


def sort_routes(routes: Routes, num_experts: int, *, tile: int | None = None) -> ExpertRows:
    """Sort the pairs of `routes` as `sort_by_expert`, by their numbers if they have some."""
    if routes.numbered is None:
        return sort_by_expert(routes.experts, num_experts, tile=tile)
    return _sort(routes.experts, num_experts, routes.numbered, tile)


def _sort(
    experts: Tensor, num_experts: int, given: PairNumbers | None, tile: int | None
) -> ExpertRows:
    """Sort by the numbers that are given; at most ALONE pairs need none."""
    pairs, top_k = experts.numel(), experts.shape[1]
    tile = tile or gemm_config(pairs, num_experts).tile
    rows = ExpertRows(
        top_k=top_k,
        pairs=experts.new_empty(pairs),
        rows=experts.new_empty(pairs),
        starts=experts.new_empty(num_experts + 1),
        tile=tile,
        tiles=experts.new_empty((2, max_tiles(pairs, num_experts, tile))),
    )
    if pairs == 0:
        rows.starts.zero_()
        return rows
    tiles, pdl = rows.tiles.shape[1], dependent_launch(experts.device)
    _sort_kernel[(cdiv(pairs, PART) + cdiv(tiles, TILES),)](
        experts,
        None if given is None else given.numbers,
        None if given is None else given.counts,
        rows.pairs,
        rows.rows,
        rows.starts,
        rows.tiles,
        pairs,
        tiles,
        EXPERTS=num_experts,
        BINS=next_power_of_2(max(2, num_experts)),
        PART=PART,
        TILES=TILES,
        TILE=tile,
        ALONE=ALONE,
        PDL=pdl,
        num_warps=SORT_WARPS,
        launch_pdl=pdl,
    )
    return rows


@triton.jit
def _copy_kernel(
    x_ptr,  # [tokens, WIDTH]
    rows_ptr,  # [tokens, TOP_K]
    out_ptr,  # [tokens * TOP_K, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy a token to each of its rows. The grid is `[tokens]`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    values = tl.load(x_ptr + token * WIDTH + column, mask=mask, other=0.0)
    for i in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + i).to(tl.int64)
        tl.store(out_ptr + row * WIDTH + column, values, mask=mask)


def copy_rows(x: Tensor, rows: ExpertRows) -> Tensor:
    """Return tokens by row, `[pairs, hidden]`; `x` is `[tokens, hidden]` and contiguous."""
    tokens, width = x.shape
    out = x.new_empty((len(rows.pairs), width))
    pdl = dependent_launch(x.device)
    _copy_kernel[(tokens,)](
        x,
        rows.rows,
        out,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        TOP_K=rows.top_k,
        PDL=pdl,
        num_warps=COPY_WARPS,
        launch_pdl=pdl,
    )
    return out


def max_tiles(pairs: int, num_experts: int, tile: int) -> int:
    """Return how many tiles of `tile` rows any routes of `pairs` pairs could need.

    Each expert with rows has at most one tile that is not full.
    """
    used = min(pairs, num_experts)
    return used + (pairs - used) // tile
