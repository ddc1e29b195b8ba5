"""The grouped GEMM of down projections for many tokens on Hopper, written in Gluon.

A program has a loader, which is one warp, and two consumers, which are warp groups of four warps.
The loader copies tiles of inputs and weights to shared memory by TMA. A consumer multiplies 64 rows
of an expert by 256 rows of its weight; a consumer without rows multiplies nothing.

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

TILE = gl.constexpr(128)  # rows of an expert in a tile
HALF = gl.constexpr(64)  # rows of a consumer
SIDE = gl.constexpr(128)  # weight rows of an accumulator, of which a consumer has two
BLOCK_K = gl.constexpr(64)
STAGES = gl.constexpr(4)
# Tiles of rows whose programs follow one another, so that they read the same inputs from the L2
# cache.
GROUP = gl.constexpr(4)
CONSUMER_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(40)
# With fewer rows of an expert the plain kernel is as fast: it reads weights just as well.
MIN_MEAN_ROWS = 192


def is_supported(x: Tensor, weight: Tensor, rows: ExpertRows) -> bool:
    """Tell whether `multiply` can compute this product and is faster than the plain kernel."""
    return (
        is_hopper(x.device)
        and rows.tile == TILE.value
        and len(rows.pairs) >= MIN_MEAN_ROWS * len(weight)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % BLOCK_K.value == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.shape[1] % 16 == 0
    )


def multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    rows: ExpertRows,
    bias: Tensor | None,
) -> None:
    """Write the GEMM of `rows` to `out`; all tensors are contiguous."""
    pairs, features = out.shape
    k, device = x.shape[1], x.device
    tiles = rows.tiles.shape[1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    blocks = cdiv(features, 2 * SIDE.value)
    pdl = dependent_launch(device)
    launch = {"launch_pdl": True} if pdl else {}
    experts_hopper_kernel[(min(multiprocessors(device), tiles * blocks),)](
        TensorDescriptor.from_tensor(x, [TILE.value, BLOCK_K.value], layout),
        TensorDescriptor.from_tensor(weight.flatten(0, 1), [SIDE.value, BLOCK_K.value], layout),
        weight if bias is None else bias,
        out,
        rows.tiles,
        pairs,
        tiles,
        features,
        k,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=4,
        **launch,
    )


@gluon.jit(do_not_specialize=["pairs", "tiles"])
def experts_hopper_kernel(
    x_tiles,  # descriptor of [pairs, K]
    weight_tiles,  # descriptor of [experts * features, K]
    bias_ptr,  # [experts, features]
    out_ptr,  # [pairs, features]
    tiles_ptr,  # [2, tiles]
    pairs,
    tiles,
    features,
    K,
    BIAS: gl.constexpr,
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
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, BLOCK_K], tiled)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * 2, SIDE, BLOCK_K], tiled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (
                0, bias_ptr, out_ptr, tiles_ptr, pairs, tiles, features, K, x_smem, w_smem, full,
                empty, BIAS,
            )),
            (_consume, (
                1, bias_ptr, out_ptr, tiles_ptr, pairs, tiles, features, K, x_smem, w_smem, full,
                empty, BIAS,
            )),
            (_load, (
                x_tiles, weight_tiles, tiles_ptr, pairs, tiles, features, K, x_smem, w_smem, full,
                empty,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
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
def _rows(tiles_ptr, tile, pairs, tiles):
    """Return the expert of a tile, its first row, and the row after its last one.

    The expert is negative for a tile that is not used, or does not exist. A tile ends where the
    next one begins.
    """
    expert = gl.load(tiles_ptr + tile, mask=tile < tiles, other=-1)
    first = gl.load(tiles_ptr + tiles + tile, mask=tile < tiles, other=0)
    end = gl.load(tiles_ptr + tiles + tile + 1, mask=tile + 1 < tiles, other=pairs)
    return expert, first, gl.minimum(end, pairs)


@gluon.jit
def _load(x_tiles, weight_tiles, tiles_ptr, pairs, tiles, features, K, x_smem, w_smem, full, empty):
    """Load the tiles of inputs and weights."""
    blocks = gl.cdiv(features, 2 * SIDE)
    stage = 0
    phase = 1
    tile, block = _place(gl.program_id(0), tiles, blocks)
    expert, first, _ = _rows(tiles_ptr, tile, pairs, tiles)
    for item in range(gl.program_id(0), tiles * blocks, gl.num_programs(0)):
        tile, next_block = _place(item + gl.num_programs(0), tiles, blocks)
        next_expert, next_first, _ = _rows(tiles_ptr, tile, pairs, tiles)
        if expert >= 0:
            feature = expert * features + block * 2 * SIDE
            for start in range(0, K, BLOCK_K):
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(full.index(stage), (TILE + 2 * SIDE) * BLOCK_K * 2)
                tma.async_copy_global_to_shared(
                    x_tiles, [first, start], full.index(stage), x_smem.index(stage)
                )
                for side in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        weight_tiles,
                        [feature + side * SIDE, start],
                        full.index(stage),
                        w_smem.index(stage * 2 + side),
                    )
                stage, phase = next_stage(stage, phase, STAGES)
        expert, first, block = next_expert, next_first, next_block


@gluon.jit
def _consume(
    consumer: gl.constexpr,
    bias_ptr,
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
    BIAS: gl.constexpr,
):
    """Multiply a consumer's rows of each tile, and store them."""
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    blocks = gl.cdiv(features, 2 * SIDE)
    stage = 0
    phase = 0
    tile, block = _place(gl.program_id(0), tiles, blocks)
    expert, first, end = _rows(tiles_ptr, tile, pairs, tiles)
    for item in range(gl.program_id(0), tiles * blocks, gl.num_programs(0)):
        tile, next_block = _place(item + gl.num_programs(0), tiles, blocks)
        next_expert, next_first, next_end = _rows(tiles_ptr, tile, pairs, tiles)
        if expert >= 0:
            first += consumer * HALF
            if first < end:
                left = gl.zeros([HALF, SIDE], gl.float32, layout=of_sums)
                right = gl.zeros([HALF, SIDE], gl.float32, layout=of_sums)
                held = 0
                for start in range(0, K, BLOCK_K):
                    mbarrier.wait(full.index(stage), phase)
                    x = x_smem.index(stage).slice(consumer * HALF, HALF)
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
                feature = block * 2 * SIDE
                if BIAS:
                    of_expert = bias_ptr + expert * features
                    left = _biased(left, of_expert, feature, features)
                    right = _biased(right, of_expert, feature + SIDE, features)
                _store(left, first, end, feature, features, out_ptr)
                _store(right, first, end, feature + SIDE, features, out_ptr)
            else:
                for _ in range(0, K, BLOCK_K):
                    mbarrier.wait(full.index(stage), phase)
                    mbarrier.arrive(empty.index(stage))
                    stage, phase = next_stage(stage, phase, STAGES)
        expert, first, end, block = next_expert, next_first, next_end, next_block


@gluon.jit
def _biased(sums, bias_ptr, feature, features):
    """Add the biases of 128 features that begin with `feature`."""
    of_sums: gl.constexpr = sums.type.layout
    place = feature + gl.arange(0, SIDE, layout=gl.SliceLayout(0, of_sums))
    bias = gl.load(bias_ptr + place, mask=place < features, other=0.0)
    return sums + bias.to(gl.float32)[None, :]


@gluon.jit
def _store(values, first, end, feature, features, out_ptr):
    """Store 64 rows of 128 features."""
    # A thread holds eight features of a row, which is a store of 16 bytes.
    of_store: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [HALF, SIDE],
    )
    result = gl.convert_layout(values.to(out_ptr.dtype.element_ty), of_store)
    row = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, of_store))
    place = feature + gl.arange(0, SIDE, layout=gl.SliceLayout(0, of_store))
    out = out_ptr + (row.to(gl.int64) * features)[:, None] + place[None, :]
    gl.store(out, result, mask=(row < end)[:, None] & (place < features)[None, :])
