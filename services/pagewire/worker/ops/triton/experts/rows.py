"""The kernel that sorts the pairs of a batch by expert."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ExpertRows
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.experts.config import GemmConfig, gemm_config

# Pairs that a program reads at a time: at least one for each of its threads.
MIN_BLOCK, MAX_BLOCK = 128, 2048
WARPS = 4


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _sort_kernel(
    experts_ptr,  # [pairs]
    pairs_ptr,  # [pairs]
    rows_ptr,  # [pairs]
    starts_ptr,  # [EXPERTS + 1]
    tiles_ptr,  # [2, tiles]
    pairs,
    tiles,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the rows and tiles of one expert. The grid is `[EXPERTS]`.

    Each program reads all pairs twice: to count those of each expert, and to place its own in
    order. So programs need not wait for each other.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    item = tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, BLOCK):
        mask = start + item < pairs
        found = tl.load(experts_ptr + start + item, mask=mask, other=0)
        counts += tl.histogram(found, BINS, mask=mask)
    bins = tl.arange(0, BINS)
    needed = (counts + TILE - 1) // TILE  # tiles of each expert
    first_row = tl.sum(tl.where(bins < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(bins < expert, needed, 0), 0)
    end_tile = first_tile + tl.sum(tl.where(bins == expert, needed, 0), 0)
    tl.store(starts_ptr + expert, first_row)
    if expert == EXPERTS - 1:
        tl.store(starts_ptr + EXPERTS, pairs)

    row = first_row
    for start in range(0, pairs, BLOCK):
        mask = start + item < pairs
        mine = tl.load(experts_ptr + start + item, mask=mask, other=-1) == expert
        held = row + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + held, start + item, mask=mine)
        tl.store(rows_ptr + start + item, held, mask=mine)
        row += tl.sum(mine.to(tl.int32), 0)

    # The last expert also marks the tiles that no expert needs.
    end = tiles if expert == EXPERTS - 1 else end_tile
    for start in range(first_tile, end, BLOCK_TILES):
        tile = start + tl.arange(0, BLOCK_TILES)
        owner = tl.where(tile < end_tile, expert, -1)
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
    pdl = dependent_launch(experts.device)
    _sort_kernel[(num_experts,)](
        experts,
        rows.pairs,
        rows.rows,
        rows.starts,
        rows.tiles,
        pairs,
        rows.tiles.shape[1],
        EXPERTS=num_experts,
        BINS=next_power_of_2(max(2, num_experts)),
        BLOCK=block,
        TILE=tile,
        BLOCK_TILES=32,
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
