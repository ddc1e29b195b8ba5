"""The kernels that sort the pairs of a batch by expert."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ExpertRows
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.experts.config import gemm_config

# Up to this many pairs, each program of one kernel reads all of them at once.
ALONE = 4096
# The fewest pairs of such a program, padding included: one for each of its threads.
MIN_BLOCK = 128
# More pairs are placed in parts of this size, and counted in chunks of at least MIN_PARTS parts.
PART = 128
MIN_PARTS, MAX_CHUNKS = 8, 64
WARPS, MOST_WARPS = 4, 16


@triton.jit(do_not_specialize=["pairs", "parts"])
def _count_kernel(
    experts_ptr,  # [pairs]
    counts_ptr,  # [chunks, BINS]
    earlier_ptr,  # [chunks * parts, BINS]
    pairs,
    parts,
    BINS: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the pairs of each expert in a chunk, and before each of its `parts` parts.

    The grid is `[chunks]`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    begin = tl.program_id(0) * parts
    for part in range(begin, begin + parts):
        tl.store(earlier_ptr + part * BINS + bins, counts)
        item = part * PART + tl.arange(0, PART)
        found = tl.load(experts_ptr + item, mask=item < pairs, other=0)
        counts += tl.histogram(found, BINS, mask=item < pairs)
    tl.store(counts_ptr + tl.program_id(0) * BINS + bins, counts)


@triton.jit(do_not_specialize=["pairs", "tiles", "chunks"])
def _sort_kernel(
    experts_ptr,  # [pairs]
    counts_ptr,  # [chunks, BINS], read with CHUNKS > 1
    firsts_ptr,  # [chunks, BINS], written with CHUNKS > 1
    pairs_ptr,  # [pairs]
    rows_ptr,  # [pairs]
    starts_ptr,  # [EXPERTS + 1]
    tiles_ptr,  # [2, tiles]
    pairs,
    tiles,
    chunks,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the tiles of one expert, and its rows or, with CHUNKS > 1, its first row of each chunk.

    The grid is `[EXPERTS]`. A program computes where its rows begin from inputs that all programs
    have, so programs do not wait for each other. CHUNKS is a power of two, no less than the number
    of chunks.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    if CHUNKS == 1:
        item = tl.arange(0, BLOCK)
        found = tl.load(experts_ptr + item, mask=item < pairs, other=-1)
        counts = tl.histogram(found, BINS, mask=item < pairs)
        first_row = tl.sum(tl.where(bins < expert, counts, 0), 0)
        mine = found == expert
        row = first_row + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + row, item, mask=mine)
        tl.store(rows_ptr + item, row, mask=mine)
    else:
        chunk = tl.arange(0, CHUNKS)
        at = counts_ptr + chunk[:, None] * BINS + bins[None, :]
        by_chunk = tl.load(at, mask=chunk[:, None] < chunks, other=0)  # [CHUNKS, BINS]
        counts = tl.sum(by_chunk, 0)
        first_row = tl.sum(tl.where(bins < expert, counts, 0), 0)
        mine = tl.load(counts_ptr + chunk * BINS + expert, mask=chunk < chunks, other=0)
        first = first_row + tl.cumsum(mine, 0) - mine
        tl.store(firsts_ptr + chunk * BINS + expert, first, mask=chunk < chunks)

    tl.store(starts_ptr + expert, first_row)
    if expert == EXPERTS - 1:
        tl.store(starts_ptr + EXPERTS, pairs)
    needed = (counts + TILE - 1) // TILE  # tiles of each expert
    first_tile = tl.sum(tl.where(bins < expert, needed, 0), 0)
    end_tile = first_tile + tl.sum(tl.where(bins == expert, needed, 0), 0)
    # The last expert also marks the unused tiles, with the number of used ones.
    end = tiles if expert == EXPERTS - 1 else end_tile
    for start in range(first_tile, end, BLOCK_TILES):
        tile = start + tl.arange(0, BLOCK_TILES)
        owner = tl.where(tile < end_tile, expert, -1 - end_tile)
        tl.store(tiles_ptr + tile, owner, mask=tile < end)
        tl.store(tiles_ptr + tiles + tile, first_row + (tile - first_tile) * TILE, mask=tile < end)


@triton.jit(do_not_specialize=["pairs", "parts"])
def _place_kernel(
    experts_ptr,  # [pairs]
    firsts_ptr,  # [chunks, BINS]
    earlier_ptr,  # [chunks * parts, BINS]
    pairs_ptr,  # [pairs]
    rows_ptr,  # [pairs]
    pairs,
    parts,
    BINS: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the rows of a part's pairs. A chunk has `parts` parts. The grid is `[pairs / PART]`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    place = tl.arange(0, PART)
    item = part * PART + place
    expert = tl.load(experts_ptr + item, mask=item < pairs, other=0)
    # The same values along the other axis of the comparison.
    other = part * PART + place[None, :]
    others = tl.load(experts_ptr + other, mask=other < pairs, other=0)
    same = (others == expert[:, None]) & (other < item[:, None])
    row = tl.load(firsts_ptr + part // parts * BINS + expert)
    row += tl.load(earlier_ptr + part * BINS + expert) + tl.sum(same.to(tl.int32), 1)
    tl.store(pairs_ptr + row, item, mask=item < pairs)
    tl.store(rows_ptr + item, row, mask=item < pairs)


def sort_by_expert(experts: Tensor, num_experts: int, *, tile: int | None = None) -> ExpertRows:
    """Implement `ExpertOps.sort_by_expert`; the rows are cut to tiles of `tile` rows."""
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
    bins = next_power_of_2(max(2, num_experts))
    parts = max(MIN_PARTS, cdiv(pairs, PART * MAX_CHUNKS))  # of a chunk
    chunks = 1 if pairs <= ALONE else cdiv(pairs, PART * parts)
    block = max(MIN_BLOCK, next_power_of_2(pairs)) if chunks == 1 else MIN_BLOCK
    pdl = dependent_launch(experts.device)
    counts, firsts = (experts.new_empty((chunks, bins)) for _ in range(2))
    earlier = experts.new_empty((chunks * parts, bins))
    launch = {"PDL": pdl, "num_warps": WARPS, "launch_pdl": pdl}
    if chunks > 1:
        _count_kernel[(chunks,)](
            experts, counts, earlier, pairs, parts, BINS=bins, PART=PART, **launch
        )
    _sort_kernel[(num_experts,)](
        experts,
        counts,
        firsts,
        rows.pairs,
        rows.rows,
        rows.starts,
        rows.tiles,
        pairs,
        rows.tiles.shape[1],
        chunks,
        EXPERTS=num_experts,
        BINS=bins,
        BLOCK=block,
        TILE=tile,
        BLOCK_TILES=32,
        CHUNKS=next_power_of_2(chunks),
        **(launch | {"num_warps": min(block // 32, MOST_WARPS)}),
    )
    if chunks > 1:
        _place_kernel[(cdiv(pairs, PART),)](
            experts,
            firsts,
            earlier,
            rows.pairs,
            rows.rows,
            pairs,
            parts,
            BINS=bins,
            PART=PART,
            **launch,
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
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return out


def max_tiles(pairs: int, num_experts: int, tile: int) -> int:
    """Return how many tiles of `tile` rows any routes of `pairs` pairs could need.

    Each expert with rows has at most one tile that is not full.
    """
    used = min(pairs, num_experts)
    return used + (pairs - used) // tile
