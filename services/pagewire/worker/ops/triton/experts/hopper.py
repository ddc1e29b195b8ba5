"""The grouped GEMM of both projections of plain weights on Hopper, written in Gluon.

A program has a loader, which is one warp, and consumers, which are warp groups of four warps. The
loader copies tiles of inputs and weights to shared memory by TMA, which cannot gather, so inputs
are by row for both projections. A consumer multiplies 64 rows of an expert by 256 rows of its
weight; a consumer without rows multiplies nothing.

Three consumers share the weights. The L2 cache delivers tiles at about 7 TB/s, and two consumers
would load a third more bytes for each product.

Programs are persistent, one on each multiprocessor. The loader works ahead into the next tile while
the consumers store. One accumulator walks the columns in order, as in `gemm`: the bits are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ExpertRows
from pagewire.worker.ops.device import dependent_launch, is_hopper, multiprocessors
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.quantized.hopper import next_stage

HEIGHT = gl.constexpr(64)  # rows of a consumer
SIDE = gl.constexpr(128)  # half of the weight rows. With GATED one half is gates, one their values.
BLOCK_K = gl.constexpr(64)
STAGES = gl.constexpr(3)
CONSUMERS = gl.constexpr(3)
TILE = HEIGHT.value * CONSUMERS.value  # rows of an expert in a tile
# Tiles of rows whose programs follow one another, so that they read the same inputs from the L2
# cache.
GROUP = gl.constexpr(2)
CONSUMER_REGISTERS = gl.constexpr(160)
LOADER_REGISTERS = gl.constexpr(32)
# With a mean of fewer rows of an expert the plain kernel is as fast: it reads weights just as well.
# Some more rows than one tile need two tiles, which are mostly empty.
MIN_MEAN_ROWS = 96
WASTEFUL_ROWS = range(200, 288)


def is_supported(dtype: torch.dtype, weight: Tensor, pairs: int) -> bool:
    """Tell whether `multiply` can compute a product and is faster than the plain kernel.

    Args:
        dtype: of the inputs.
        weight: of all experts, `[experts, rows, K]`.
        pairs: rows of all experts.
    """
    experts, rows, k = weight.shape
    mean = pairs // experts
    return (
        mean >= MIN_MEAN_ROWS
        and mean not in WASTEFUL_ROWS
        and is_hopper(weight.device)
        and dtype == weight.dtype
        and dtype in (torch.bfloat16, torch.float16)
        and k % BLOCK_K.value == 0
        and rows % 32 == 0
    )


def multiply(x: Tensor, weight: Tensor, out: Tensor, rows: ExpertRows, *, gated: bool) -> None:
    """Write the GEMM of `rows` to `out`, with `gated` `silu(gate) * up`.

    Inputs `[pairs, K]` are by row. All tensors are contiguous. Rows are cut to tiles of TILE.
    """
    pairs, features = out.shape
    k, device = x.shape[1], x.device
    tiles = rows.tiles.shape[1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    blocks = cdiv(features, SIDE.value if gated else 2 * SIDE.value)
    pdl = dependent_launch(device)
    launch = {"launch_pdl": True} if pdl else {}
    experts_hopper_kernel[(min(multiprocessors(device), tiles * blocks),)](
        TensorDescriptor.from_tensor(x, [HEIGHT.value, BLOCK_K.value], layout),
        TensorDescriptor.from_tensor(weight.flatten(0, 1), [SIDE.value, BLOCK_K.value], layout),
        out,
        rows.tiles,
        pairs,
        tiles,
        features,
        k,
        GATED=gated,
        PDL=pdl,
        num_warps=4,
        **launch,
    )


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def experts_hopper_kernel(
    x_tiles,  # descriptor of [pairs, K]
    weight_tiles,  # descriptor of [experts * features, K], with GATED 2 * features
    out_ptr,  # [pairs, features]
    tiles_ptr,  # [2, tiles]
    pairs,
    tiles,
    features,
    K,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply tiles of rows by 256 weight rows.

    Each program computes the item of its number, and then every further one at a distance of the
    grid's size. Items are ordered by groups of GROUP tiles of rows, then features, then tiles. The
    grid is `[multiprocessors]`, or fewer.
    """
    dtype: gl.constexpr = x_tiles.dtype
    tiled: gl.constexpr = x_tiles.layout
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, HEIGHT, BLOCK_K], tiled)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, SIDE, BLOCK_K], tiled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (
                0, out_ptr, tiles_ptr, pairs, tiles, features, K, x_smem, w_smem, full, empty,
                GATED,
            )),
            (_consume, (
                1, out_ptr, tiles_ptr, pairs, tiles, features, K, x_smem, w_smem, full, empty,
                GATED,
            )),
            (_consume, (
                2, out_ptr, tiles_ptr, pairs, tiles, features, K, x_smem, w_smem, full, empty,
                GATED,
            )),
            (_load, (
                x_tiles, weight_tiles, tiles_ptr, pairs, tiles, features, K, x_smem, w_smem, full,
                empty, GATED,
            )),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _place(item, tiles, blocks):
    """Return the tile of an item and its block of features."""
    a_group = GROUP * blocks
    first = item // a_group * GROUP
    height = gl.maximum(gl.minimum(tiles - first, GROUP), 1)
    within = item % a_group
    return first + within % height, within // height


@gluon.jit
def _find(tiles_ptr, item, pairs, tiles, blocks):
    """Return an item's expert, first row, the row after its last one, and its block of features.

    The expert is negative for a tile that is not used, or does not exist. A tile ends where the
    next one begins.
    """
    tile, block = _place(item, tiles, blocks)
    expert = gl.load(tiles_ptr + tile, mask=tile < tiles, other=-1)
    first = gl.load(tiles_ptr + tiles + tile, mask=tile < tiles, other=0)
    end = gl.load(tiles_ptr + tiles + tile + 1, mask=tile + 1 < tiles, other=pairs)
    return expert, first, gl.minimum(end, pairs), block


@gluon.jit
def _load(
    x_tiles,
    weight_tiles,
    tiles_ptr,
    pairs,
    tiles,
    features,
    K,
    x_smem,
    w_smem,
    full,
    empty,
    GATED: gl.constexpr,
):
    """Load the tiles of inputs and weights."""
    OUTPUTS: gl.constexpr = SIDE if GATED else 2 * SIDE
    blocks = gl.cdiv(features, OUTPUTS)
    stage = 0
    phase = 1
    expert, first, _, block = _find(tiles_ptr, gl.program_id(0), pairs, tiles, blocks)
    for item in range(gl.program_id(0), tiles * blocks, gl.num_programs(0)):
        following = item + gl.num_programs(0)
        next_expert, next_first, _, next_block = _find(tiles_ptr, following, pairs, tiles, blocks)
        if expert >= 0:
            left = expert * features * (2 if GATED else 1) + block * OUTPUTS
            right = left + (features if GATED else SIDE)
            for start in range(0, K, BLOCK_K):
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(full.index(stage), (CONSUMERS * HEIGHT + 2 * SIDE) * BLOCK_K * 2)
                for part in gl.static_range(CONSUMERS):
                    tma.async_copy_global_to_shared(
                        x_tiles,
                        [first + part * HEIGHT, start],
                        full.index(stage),
                        x_smem.index(stage * CONSUMERS + part),
                    )
                tma.async_copy_global_to_shared(
                    weight_tiles, [left, start], full.index(stage), w_smem.index(stage * 2)
                )
                tma.async_copy_global_to_shared(
                    weight_tiles, [right, start], full.index(stage), w_smem.index(stage * 2 + 1)
                )
                stage, phase = next_stage(stage, phase, STAGES)
        expert, first, block = next_expert, next_first, next_block


@gluon.jit
def _consume(
    consumer: gl.constexpr,
    out_ptr,
    tiles_ptr,
    pairs,
    tiles,
    features,
    K,
    x_smem,
    w_smem,
    full,
    empty,
    GATED: gl.constexpr,
):
    """Multiply a consumer's rows of each tile, and store them."""
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    OUTPUTS: gl.constexpr = SIDE if GATED else 2 * SIDE
    blocks = gl.cdiv(features, OUTPUTS)
    stage = 0
    phase = 0
    expert, first, end, block = _find(tiles_ptr, gl.program_id(0), pairs, tiles, blocks)
    for item in range(gl.program_id(0), tiles * blocks, gl.num_programs(0)):
        following = item + gl.num_programs(0)
        next_expert, next_first, next_end, next_block = _find(
            tiles_ptr, following, pairs, tiles, blocks
        )
        if expert >= 0:
            first += consumer * HEIGHT
            if first < end:
                left = gl.zeros([HEIGHT, SIDE], gl.float32, layout=of_sums)
                right = gl.zeros([HEIGHT, SIDE], gl.float32, layout=of_sums)
                held = 0
                for start in range(0, K, BLOCK_K):
                    mbarrier.wait(full.index(stage), phase)
                    x = x_smem.index(stage * CONSUMERS + consumer)
                    left = warpgroup_mma(
                        x, w_smem.index(stage * 2).permute((1, 0)), left, is_async=True
                    )
                    right = warpgroup_mma(
                        x, w_smem.index(stage * 2 + 1).permute((1, 0)), right, is_async=True
                    )
                    # All but these two products are done.
                    left, right = warpgroup_mma_wait(2, deps=(left, right))
                    mbarrier.arrive(empty.index(held), pred=start > 0)
                    held = stage
                    stage, phase = next_stage(stage, phase, STAGES)
                left, right = warpgroup_mma_wait(0, deps=(left, right))
                mbarrier.arrive(empty.index(held))
                feature = block * OUTPUTS
                if GATED:
                    left = left / (1.0 + gl.exp(-left)) * right
                    _store(left, first, end, feature, features, out_ptr)
                else:
                    _store(left, first, end, feature, features, out_ptr)
                    _store(right, first, end, feature + SIDE, features, out_ptr)
            else:
                for _ in range(0, K, BLOCK_K):
                    mbarrier.wait(full.index(stage), phase)
                    mbarrier.arrive(empty.index(stage))
                    stage, phase = next_stage(stage, phase, STAGES)
        expert, first, end, block = next_expert, next_first, next_end, next_block


@gluon.jit
def _store(values, first, end, feature, features, out_ptr):
    """Store 64 rows of 128 features."""
    # A thread holds eight features of a row, which is a store of 16 bytes.
    of_store: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [HEIGHT, SIDE],
    )
    result = gl.convert_layout(values.to(out_ptr.dtype.element_ty), of_store)
    row = first + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, of_store))
    place = feature + gl.arange(0, SIDE, layout=gl.SliceLayout(0, of_store))
    out = out_ptr + (row.to(gl.int64) * features)[:, None] + place[None, :]
    gl.store(out, result, mask=(row < end)[:, None] & (place < features)[None, :])
