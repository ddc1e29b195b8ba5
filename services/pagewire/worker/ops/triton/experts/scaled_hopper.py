"""The grouped GEMM of FP8 weights and inputs on Hopper, written in Gluon.

A program has a loader, which is one warp, and two consumers, which are warp groups of four warps.
The loader copies tiles of inputs and weights to shared memory by TMA, which cannot gather, so
inputs are by row for both projections. A consumer multiplies 64 rows of an expert at a time by 128
rows of its weight, and adds the sums of 128 products in float32, because Hopper's tensor cores keep
fewer bits. While one consumer adds, the other one multiplies; nothing synchronizes them.

Programs are persistent, one on each multiprocessor. The loader works ahead into the next tile while
the consumers store. Sums are in the order of `scaled_gemm`: the bits are equal.
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
from pagewire.worker.ops.contract.quantized import QuantizedInput, ScaledWeight
from pagewire.worker.ops.device import dependent_launch, is_hopper, multiprocessors
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.quantized.hopper import next_stage

TILE = gl.constexpr(128)  # rows of an expert in a tile
HALF = gl.constexpr(64)  # rows of a matrix instruction
SIDE = gl.constexpr(128)  # weight rows of a consumer
# Weight rows of a side, which have one scale. With GATED one side is gates, the other their values.
PART = gl.constexpr(64)
BLOCK_K = gl.constexpr(128)  # products that the tensor cores add up, and columns of a block
STAGES = gl.constexpr(4)  # tiles of inputs and weights in shared memory
# Tiles of rows whose programs follow one another, so that they read the same inputs from the L2
# cache.
GROUP = gl.constexpr(8)
CONSUMER_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(40)
# Rows of scales after the last row that a tile may read.
TAIL = 128
# With fewer rows of an expert the plain kernel is faster: its programs are small, and more of them
# start before the previous kernel has ended.
MIN_MEAN_ROWS = 32


def is_supported(dtype: torch.dtype, weight: ScaledWeight, pairs: int, num_experts: int) -> bool:
    """Tell whether `multiply` can compute a product and is faster than the plain kernel.

    Args:
        dtype: of the inputs before their quantization.
        weight: of all experts.
        pairs: rows of all experts.
        num_experts: the experts of the layer.
    """
    rows, k = weight.shape
    return (
        pairs >= MIN_MEAN_ROWS * num_experts
        and is_hopper(weight.values.device)
        and weight.values.dtype == torch.float8_e4m3fn
        and weight.block in ((1, k), (BLOCK_K.value, BLOCK_K.value))
        and k % BLOCK_K.value == 0
        and rows // num_experts % 32 == 0
        and dtype in (torch.bfloat16, torch.float16)
    )


def multiply(
    x: QuantizedInput, weight: ScaledWeight, out: Tensor, rows: ExpertRows, *, gated: bool
) -> None:
    """Write the GEMM of `rows` to `out`, with `gated` `silu(gate) * up`.

    Inputs are by row, from `rowwise.quantize.quantize_rows`, which launched the previous kernel.
    Rows are cut to tiles of TILE.
    """
    pairs, features = out.shape
    k, device = weight.shape[1], out.device
    tiles = rows.tiles.shape[1]
    blocked = weight.block[0] > 1
    assert rows.tile == TILE.value
    assert weight.scales.is_contiguous()
    assert not blocked or (x.scales.stride(0) == 1 and x.scales.stride(1) >= pairs + TAIL)
    outputs = SIDE.value if gated else 2 * SIDE.value
    pdl = dependent_launch(device)
    launch = {"launch_pdl": True} if pdl else {}
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    box = [PART.value if gated else 2 * SIDE.value, BLOCK_K.value]
    experts_scaled_hopper_kernel[(min(multiprocessors(device), tiles * cdiv(features, outputs)),)](
        TensorDescriptor.from_tensor(x.values, [TILE.value, BLOCK_K.value], layout),
        TensorDescriptor.from_tensor(weight.values, box, layout),
        x.scales,
        weight.scales,
        out,
        rows.tiles,
        pairs,
        tiles,
        k,
        x.scales.stride(1 if blocked else 0),
        FEATURES=features,
        BLOCKED=blocked,
        GATED=gated,
        PDL=pdl,
        num_warps=4,
        **launch,
    )


# If one scale is for all rows, the stride is 0 or 1, depending on the number of rows.
@gluon.jit(do_not_specialize=["pairs", "tiles", "x_scales_stride"])
def experts_scaled_hopper_kernel(
    x_tiles,  # descriptor of [pairs, K]
    weight_tiles,  # descriptor of [experts * features, K], with GATED 2 * features
    x_scales_ptr,  # [K / BLOCK_K, at least pairs + TAIL] if BLOCKED, else [pairs, 1]
    weight_scales_ptr,  # [weight rows / BLOCK_K, K / BLOCK_K] if BLOCKED, else [weight rows, 1]
    out_ptr,  # [pairs, features]
    tiles_ptr,  # [2, tiles]
    pairs,
    tiles,
    K,
    x_scales_stride,
    FEATURES: gl.constexpr,
    BLOCKED: gl.constexpr,
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
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, BLOCK_K], tiled)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, 2 * SIDE, BLOCK_K], tiled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                0, x_scales_ptr, weight_scales_ptr, out_ptr, tiles_ptr, pairs, tiles, K,
                x_scales_stride, x_smem, w_smem, full, empty, FEATURES, BLOCKED, GATED, PDL,
            )),
            (_consume, (
                1, x_scales_ptr, weight_scales_ptr, out_ptr, tiles_ptr, pairs, tiles, K,
                x_scales_stride, x_smem, w_smem, full, empty, FEATURES, BLOCKED, GATED, PDL,
            )),
            (_load, (
                x_tiles, weight_tiles, tiles_ptr, pairs, tiles, K, x_smem, w_smem, full, empty,
                FEATURES, GATED, PDL,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _used(tiles_ptr, tiles):
    """Return the number of used tiles, which the last tile holds if it is not used itself.

    Tiles are read from the L2 cache, because the loader does not wait for the previous kernel.
    """
    owner = gl.load(tiles_ptr + tiles - 1, cache_modifier=".cg")
    return gl.where(owner < 0, -1 - owner, tiles)


@gluon.jit
def _place(item, used, BLOCKS: gl.constexpr):
    """Return the tile of an item and its block of features."""
    a_group: gl.constexpr = GROUP * BLOCKS
    first = item // a_group * GROUP
    height = gl.maximum(gl.minimum(used - first, GROUP), 1)
    within = item % a_group
    return first + within % height, within // height


@gluon.jit
def _rows(tiles_ptr, tile, pairs, tiles, used):
    """Return the expert of a tile, its first row, and the row after its last one.

    A tile ends where the next one begins.
    """
    firsts = tiles_ptr + tiles + tile
    expert = gl.load(tiles_ptr + tile, mask=tile < used, other=0, cache_modifier=".cg")
    first = gl.load(firsts, mask=tile < used, other=0, cache_modifier=".cg")
    end = gl.load(firsts + 1, mask=tile + 1 < used, other=pairs, cache_modifier=".cg")
    return expert, first, end


@gluon.jit
def _load(
    x_tiles,
    weight_tiles,
    tiles_ptr,
    pairs,
    tiles,
    K,
    x_smem,
    w_smem,
    full,
    empty,
    FEATURES: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Load the tiles of inputs and weights.

    With PDL the first weights are loaded before the inputs are available. The tiles of rows are
    available by then: the previous kernel promises this (`BY_ROW` of the quantization).
    """
    OUTPUTS: gl.constexpr = SIDE if GATED else 2 * SIDE
    BLOCKS: gl.constexpr = (FEATURES + OUTPUTS - 1) // OUTPUTS
    used = _used(tiles_ptr, tiles)
    stage = 0
    phase = 1
    tile, block = _place(gl.program_id(0), used, BLOCKS)
    expert, first, _ = _rows(tiles_ptr, tile, pairs, tiles, used)
    loaded = 0
    if PDL:
        if gl.program_id(0) < used * BLOCKS:
            loaded = gl.minimum(STAGES * BLOCK_K, K)
        feature = expert * (FEATURES * (2 if GATED else 1)) + block * OUTPUTS
        for start in range(0, loaded, BLOCK_K):
            at = start // BLOCK_K
            mbarrier.expect(full.index(at), (TILE + 2 * SIDE) * BLOCK_K)
            _load_weights(weight_tiles, w_smem, at, full, feature, start, FEATURES, GATED)
        gdc_wait()
        for start in range(0, loaded, BLOCK_K):
            at = start // BLOCK_K
            tma.async_copy_global_to_shared(
                x_tiles, [first, start], full.index(at), x_smem.index(at)
            )
        last = loaded == STAGES * BLOCK_K
        stage = gl.where(last, 0, loaded // BLOCK_K)
        phase = gl.where(last, 0, 1)
    for item in range(gl.program_id(0), used * BLOCKS, gl.num_programs(0)):
        tile, next_block = _place(item + gl.num_programs(0), used, BLOCKS)
        next_expert, next_first, _ = _rows(tiles_ptr, tile, pairs, tiles, used)
        feature = expert * (FEATURES * (2 if GATED else 1)) + block * OUTPUTS
        begin = gl.where(item == gl.program_id(0), loaded, 0)
        for start in range(begin, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (TILE + 2 * SIDE) * BLOCK_K)
            _load_weights(weight_tiles, w_smem, stage, full, feature, start, FEATURES, GATED)
            tma.async_copy_global_to_shared(
                x_tiles, [first, start], full.index(stage), x_smem.index(stage)
            )
            stage, phase = next_stage(stage, phase, STAGES)
        expert, first, block = next_expert, next_first, next_block


@gluon.jit
def _load_weights(
    weight_tiles,
    w_smem,
    stage,
    full,
    feature,
    start,
    FEATURES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Load a tile of weights; with GATED, for each consumer half a tile of gates and the values
    that belong to them."""
    if GATED:
        for part in gl.static_range(4):
            tma.async_copy_global_to_shared(
                weight_tiles,
                [feature + part // 2 * PART + part % 2 * FEATURES, start],
                full.index(stage),
                w_smem.index(stage).slice(part * PART, PART),
            )
    else:
        tma.async_copy_global_to_shared(
            weight_tiles, [feature, start], full.index(stage), w_smem.index(stage)
        )


@gluon.jit
def _consume(
    consumer: gl.constexpr,
    x_scales_ptr,
    weight_scales_ptr,
    out_ptr,
    tiles_ptr,
    pairs,
    tiles,
    K,
    x_scales_stride,
    x_smem,
    w_smem,
    full,
    empty,
    FEATURES: gl.constexpr,
    BLOCKED: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply a consumer's part of each tile, and store it."""
    OUTPUTS: gl.constexpr = SIDE if GATED else 2 * SIDE
    used = _used(tiles_ptr, tiles)
    BLOCKS: gl.constexpr = (FEATURES + OUTPUTS - 1) // OUTPUTS
    stage = 0
    phase = 0
    tile, block = _place(gl.program_id(0), used, BLOCKS)
    expert, first, end = _rows(tiles_ptr, tile, pairs, tiles, used)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for item in range(gl.program_id(0), used * BLOCKS, gl.num_programs(0)):
        tile, next_block = _place(item + gl.num_programs(0), used, BLOCKS)
        next_expert, next_first, next_end = _rows(tiles_ptr, tile, pairs, tiles, used)
        feature = block * OUTPUTS + consumer * (OUTPUTS // 2)
        if first + HALF < end:
            stage, phase = _multiply(
                2, consumer, x_scales_ptr, weight_scales_ptr, out_ptr, expert, first, end,
                feature, K, x_scales_stride, x_smem, w_smem, full, empty, stage, phase, FEATURES,
                BLOCKED, GATED,
            )  # fmt: skip
        else:
            stage, phase = _multiply(
                1, consumer, x_scales_ptr, weight_scales_ptr, out_ptr, expert, first, end,
                feature, K, x_scales_stride, x_smem, w_smem, full, empty, stage, phase, FEATURES,
                BLOCKED, GATED,
            )  # fmt: skip
        expert, first, end, block = next_expert, next_first, next_end, next_block


@gluon.jit
def _sides(sums):
    """Split sums of 64 rows by 128 weight rows; threads hold the same columns of both sides."""
    sides = gl.reshape(sums, [HALF, 2, PART])
    return gl.split(gl.permute(sides, (0, 2, 1)))


@gluon.jit
def _computed(values):
    """Return `values`, computed before the code that follows.

    Otherwise the compiler adds up the sums of both halves at the end, and runs out of registers.
    """
    return gl.inline_asm_elementwise("", "=f,0", [values], gl.float32, is_pure=False, pack=1)


@gluon.jit
def _multiply(
    HALVES: gl.constexpr,
    consumer: gl.constexpr,
    x_scales_ptr,
    weight_scales_ptr,
    out_ptr,
    expert,
    first,
    end,
    feature,
    K,
    x_scales_stride,
    x_smem,
    w_smem,
    full,
    empty,
    stage,
    phase,
    FEATURES: gl.constexpr,
    BLOCKED: gl.constexpr,
    GATED: gl.constexpr,
):
    """Multiply HALVES times 64 rows and store them; return the next stage and its phase.

    With GATED the left sides are gates, and the right ones the values that belong to them.
    """
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 32])
    none = gl.zeros([HALF, SIDE], gl.float32, layout=of_sums)
    left, right = _sides(none)
    lower_left, lower_right = _sides(none)
    held = expert * (FEATURES * (2 if GATED else 1)) + feature  # weight row of the left side
    BESIDE: gl.constexpr = FEATURES if GATED else PART
    if BLOCKED:
        behind = gl.maximum(feature - FEATURES + 1, 0)  # the last block of features is not full
        weight_scale = (held - behind) // BLOCK_K * (K // BLOCK_K)
        between = FEATURES // BLOCK_K * (K // BLOCK_K)
        row_scale = first + gl.arange(0, HALF, gl.SliceLayout(1, left.type.layout))
    for _ in range(0, K, BLOCK_K):
        if BLOCKED:
            # The scales arrive while the tensor cores multiply.
            w_left = gl.load(weight_scales_ptr + weight_scale)
            w_right = gl.load(weight_scales_ptr + weight_scale + between) if GATED else w_left
            scale = gl.load(x_scales_ptr + row_scale)
        mbarrier.wait(full.index(stage), phase)
        x = x_smem.index(stage)
        w = w_smem.index(stage).slice(consumer * SIDE, SIDE).permute((1, 0))
        sums = warpgroup_mma(
            x.slice(0, HALF), w, none,
            use_acc=False, is_async=True, max_num_imprecise_acc=BLOCK_K,
        )  # fmt: skip
        sums = warpgroup_mma_wait(0, deps=(sums,))
        if HALVES == 1:
            mbarrier.arrive(empty.index(stage))
        sums_left, sums_right = _sides(sums)
        if BLOCKED:
            left += sums_left * (w_left * scale)[:, None]
            right += sums_right * (w_right * scale)[:, None]
        else:
            left += sums_left
            right += sums_right
        if HALVES == 2:
            left, right = _computed(left), _computed(right)
            if BLOCKED:
                scale = gl.load(x_scales_ptr + row_scale + HALF)
            sums = warpgroup_mma(
                x.slice(HALF, HALF), w, none,
                use_acc=False, is_async=True, max_num_imprecise_acc=BLOCK_K,
            )  # fmt: skip
            sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(empty.index(stage))
            sums_left, sums_right = _sides(sums)
            if BLOCKED:
                lower_left += sums_left * (w_left * scale)[:, None]
                lower_right += sums_right * (w_right * scale)[:, None]
            else:
                lower_left += sums_left
                lower_right += sums_right
        if BLOCKED:
            weight_scale += 1
            row_scale += x_scales_stride
        stage, phase = next_stage(stage, phase, STAGES)
    _finish(
        left, right, first, end, held, feature, x_scales_ptr, weight_scales_ptr, x_scales_stride,
        out_ptr, FEATURES, BESIDE, BLOCKED, GATED,
    )  # fmt: skip
    if HALVES == 2:
        _finish(
            lower_left, lower_right, first + HALF, end, held, feature, x_scales_ptr,
            weight_scales_ptr, x_scales_stride, out_ptr, FEATURES, BESIDE, BLOCKED, GATED,
        )  # fmt: skip
    return stage, phase


@gluon.jit
def _finish(
    left,
    right,
    first,
    end,
    held,
    feature,
    x_scales_ptr,
    weight_scales_ptr,
    x_scales_stride,
    out_ptr,
    FEATURES: gl.constexpr,
    BESIDE: gl.constexpr,
    BLOCKED: gl.constexpr,
    GATED: gl.constexpr,
):
    """Scale both sides of 64 rows and store them, with GATED after the activation."""
    if not BLOCKED:
        of_sums: gl.constexpr = left.type.layout
        row = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, of_sums))
        scale = gl.load(x_scales_ptr + row * x_scales_stride, mask=row < end, other=0.0)[:, None]
        place = gl.arange(0, PART, layout=gl.SliceLayout(0, of_sums))
        near = weight_scales_ptr + held + place
        left *= scale * gl.load(near, mask=feature + place < FEATURES, other=0.0)[None, :]
        inside = feature + (0 if GATED else PART) + place < FEATURES
        right *= scale * gl.load(near + BESIDE, mask=inside, other=0.0)[None, :]
    if GATED:
        _store(left / (1.0 + gl.exp(-left)) * right, first, end, feature, out_ptr, FEATURES)
    else:
        _store(left, first, end, feature, out_ptr, FEATURES)
        _store(right, first, end, feature + PART, out_ptr, FEATURES)


@gluon.jit
def _store(values, first, end, feature, out_ptr, FEATURES: gl.constexpr):
    """Store 64 rows of 64 features."""
    # A thread holds eight features of a row, which is a store of 16 bytes.
    of_store: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [HALF, PART],
    )
    result = gl.convert_layout(values.to(out_ptr.dtype.element_ty), of_store)
    row = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, of_store))
    place = feature + gl.arange(0, PART, layout=gl.SliceLayout(0, of_store))
    out = out_ptr + (row.to(gl.int64) * FEATURES)[:, None] + place[None, :]
    gl.store(out, result, mask=(row < end)[:, None] & (place < FEATURES)[None, :])
