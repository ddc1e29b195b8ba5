"""The kernels that sort the pairs of a batch by expert."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ExpertRows
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.experts.config import GemmConfig, gemm_config

# Pairs that a program reads at a time: at least one for each of its threads.
MIN_BLOCK, MAX_BLOCK = 128, 2048
MAX_CHUNKS = 64
WARPS = 4


@triton.jit(do_not_specialize=["pairs", "chunk"])
def _count_kernel(
    experts_ptr,  # [pairs]
    counts_ptr,  # [chunks, BINS]
    pairs,
    chunk,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the pairs of each expert in a chunk of `chunk` pairs. The grid is `[chunks]`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.zeros((BINS,), tl.int32)
    begin = tl.program_id(0) * chunk
    for start in range(begin, tl.minimum(begin + chunk, pairs), BLOCK):
        item = start + tl.arange(0, BLOCK)
        found = tl.load(experts_ptr + item, mask=item < pairs, other=0)
        counts += tl.histogram(found, BINS, mask=item < pairs)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["pairs", "tiles", "chunk"])
def _sort_kernel(
    experts_ptr,  # [pairs]
    counts_ptr,  # [chunks, BINS], read with CHUNKS > 1
    pairs_ptr,  # [pairs]
    rows_ptr,  # [pairs]
    starts_ptr,  # [EXPERTS + 1]
    tiles_ptr,  # [2, tiles]
    pairs,
    tiles,
    chunk,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the rows of one expert in a chunk of `chunk` pairs. The grid is `[EXPERTS, chunks]`.

    A program computes where its rows begin from inputs that all programs have, so programs do not
    wait for each other. With one chunk it counts all pairs itself. CHUNKS is a power of two, no
    less than the number of chunks. The programs of the first chunk also find the tiles of their
    experts.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    item = tl.arange(0, BLOCK)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, pairs)
    if CHUNKS == 1:
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(0, pairs, BLOCK):
            mask = start + item < pairs
            found = tl.load(experts_ptr + start + item, mask=mask, other=0)
            counts += tl.histogram(found, BINS, mask=mask)
        before = 0
    else:
        part = tl.arange(0, CHUNKS)[:, None]
        at = counts_ptr + part * BINS + bins[None, :]
        by_chunk = tl.load(at, mask=part < tl.num_programs(1), other=0)  # [CHUNKS, BINS]
        counts = tl.sum(by_chunk, 0)
        earlier = (part < tl.program_id(1)) & (bins[None, :] == expert)
        before = tl.sum(tl.sum(tl.where(earlier, by_chunk, 0), 0), 0)
    first_row = tl.sum(tl.where(bins < expert, counts, 0), 0)

    row = first_row + before
    for start in range(begin, end, BLOCK):
        mask = start + item < end
        mine = tl.load(experts_ptr + start + item, mask=mask, other=-1) == expert
        held = row + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + held, start + item, mask=mine)
        tl.store(rows_ptr + start + item, held, mask=mine)
        row += tl.sum(mine.to(tl.int32), 0)

    if tl.program_id(1) > 0:
        return
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


def sort_by_expert(
    experts: Tensor, num_experts: int, *, config: GemmConfig | None = None
) -> ExpertRows:
    """Implement `ExpertOps.sort_by_expert`; both GEMMs of the layer use the tiles of `config`."""
    pairs, top_k = experts.numel(), experts.shape[1]
    tile = (config or gemm_config(pairs, num_experts)).tile
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
    block = min(MAX_BLOCK, max(MIN_BLOCK, next_power_of_2(pairs)))
    bins = next_power_of_2(max(2, num_experts))
    # Many pairs are counted in chunks first.
    chunk = block * max(1, cdiv(pairs, block * MAX_CHUNKS))
    chunks = cdiv(pairs, chunk)
    pdl = dependent_launch(experts.device)
    counts = experts.new_empty((chunks, bins))
    if chunks > 1:
        _count_kernel[(chunks,)](
            experts,
            counts,
            pairs,
            chunk,
            BINS=bins,
            BLOCK=block,
            PDL=pdl,
            num_warps=WARPS,
            launch_pdl=pdl,
        )
    _sort_kernel[(num_experts, chunks)](
        experts,
        counts,
        rows.pairs,
        rows.rows,
        rows.starts,
        rows.tiles,
        pairs,
        rows.tiles.shape[1],
        chunk,
        EXPERTS=num_experts,
        BINS=bins,
        BLOCK=block,
        TILE=tile,
        BLOCK_TILES=32,
        CHUNKS=next_power_of_2(chunks),
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
    )
    return rows


def max_tiles(pairs: int, num_experts: int, tile: int) -> int:
    """Return how many tiles of `tile` rows any routes of `pairs` pairs could need.

    Each expert with rows has at most one tile that is not full.
    """
    used = min(pairs, num_experts)
    return used + (pairs - used) // tile
