"""One token's FP8 experts on Hopper, written in Gluon.

A loader, which is one warp, fills shared memory with the rows of the chosen experts. Tensor cores
multiply them, so that FP8 numbers are not converted. Sums of 128 products are added in float32.

The loader of the down projection starts while gate and up projections run: programs of both fit a
multiprocessor. The sums have another order than those of `vector`.
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

from pagewire.worker.ops.contract.experts import Routes
from pagewire.worker.ops.contract.quantized import ScaledWeight
from pagewire.worker.ops.device import dependent_launch, is_hopper, multiprocessors
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.streamed.scaled import (
    COLUMNS,
    EIGHT,
    FP8_LARGEST,
    HEIGHT,
    LOADER_REGISTERS,
    product,
)

SLOTS = gl.constexpr(8)  # experts of a token; the columns of a matrix instruction
DOWN_ROWS = gl.constexpr(16)  # of each expert: those of four experts are a tile
# A program of gate and up projections multiplies ROWS weight rows at a time, copied in PARTs. It
# has STAGES times TILES tiles in shared memory. PROGRAMS of them run on a multiprocessor.
ROWS = gl.constexpr(48)
PART = gl.constexpr(16)
TILES = gl.constexpr(2)
STAGES = gl.constexpr(4)
PROGRAMS = 2


def is_supported(
    x: Tensor, top_k: int, num_experts: int, gate_up: ScaledWeight, down: ScaledWeight
) -> bool:
    """Tell whether these kernels compute a layer without biases or a clamp for `x`."""
    both = (gate_up, down)
    return (
        len(x) == 1
        and top_k == SLOTS.value
        and is_hopper(x.device)
        and x.dtype == torch.bfloat16
        and all(w.values.dtype == torch.float8_e4m3fn for w in both)
        and all(w.block == (1, w.shape[1]) and w.input_scale is None for w in both)
        and gate_up.shape[1] % (TILES.value * COLUMNS.value) == 0
        and gate_up.shape[1] <= 4096
        and down.shape[1] % COLUMNS.value == 0
        and down.shape[1] <= 1024
        and gate_up.shape[0] // num_experts % ROWS.value == 0
        and gate_up.shape[0] // num_experts % (2 * EIGHT.value) == 0
        and down.shape[0] // num_experts % DOWN_ROWS.value == 0
    )


def stream_gate_up(x: Tensor, weight: ScaledWeight, num_experts: int, experts: Tensor) -> Tensor:
    """Return `silu(gate) * up` of each pair of one token, `[top_k, intermediate]`."""
    k, features = weight.shape[1], weight.shape[0] // num_experts // 2
    out = x.new_empty((experts.shape[1], features))
    groups = features // EIGHT.value
    # Eight rows of gates, then the eight of their values; an expert begins every 2 * groups.
    eights = weight.values.as_strided(
        ((2 * num_experts - 1) * groups, 2, EIGHT.value, k), (EIGHT.value * k, features * k, k, 1)
    )
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
    block = [PART.value // 16, 2, EIGHT.value, COLUMNS.value]
    tiles = TensorDescriptor.from_tensor(eights, block, layout)
    runs = 2 * features // ROWS.value * experts.shape[1]
    most = cdiv(runs, PROGRAMS * multiprocessors(x.device))
    pdl = dependent_launch(x.device)
    launch = {"launch_pdl": True} if pdl else {}
    experts_stream_gate_up[(cdiv(runs, most),)](
        tiles,
        x,
        weight.scales,
        experts,
        out,
        runs,
        features,
        K=k,
        HELD=next_power_of_2(k) // COLUMNS.value,
        PDL=pdl,
        num_warps=4,
        maxnreg=96,
        **launch,
    )
    return out


def stream_down_add(
    x: Tensor, weight: ScaledWeight, num_experts: int, routes: Routes, residual: Tensor
) -> Tensor:
    """Add the weighted experts of a token to `residual`; `x` is by pair."""
    k, features = weight.shape[1], weight.shape[0] // num_experts
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    tiles = TensorDescriptor.from_tensor(weight.values, [DOWN_ROWS.value, COLUMNS.value], layout)
    pdl = dependent_launch(x.device)
    launch = {"launch_pdl": True} if pdl else {}
    experts_stream_down[(features // DOWN_ROWS.value,)](
        tiles,
        x,
        weight.scales,
        routes.experts,
        routes.weights,
        residual,
        SLOTS.value,
        features,
        K=k,
        DEEP=next_power_of_2(k) // COLUMNS.value,
        PDL=pdl,
        num_warps=4,
        maxnreg=128,
        **launch,
    )
    return residual


@gluon.jit
def experts_stream_gate_up(
    weight_tiles,  # descriptor of [experts * 2 * features / 8, 2, 8, K]
    x_ptr,  # [K]
    scales_ptr,  # [experts, 2 * features]
    experts_ptr,  # [pairs]
    out_ptr,  # [pairs, features]
    runs,
    features,
    K: gl.constexpr,
    HELD: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply every n-th run of ROWS weight rows by the token. The grid is n programs.

    The next kernel reads the experts before its wait, so it may start only after this one waited.
    """
    dtype: gl.constexpr = weight_tiles.dtype
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    PARTS: gl.constexpr = STAGES * TILES * (ROWS // PART) + (HEIGHT - ROWS) // PART
    w_shape: gl.constexpr = [PARTS] + weight_tiles.block_shape  # noqa: RUF005
    w_smem = gl.allocate_shared_memory(dtype, w_shape, weight_tiles.layout)
    x_smem = gl.allocate_shared_memory(dtype, [HELD, EIGHT, COLUMNS], tiled)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_gate_up, (
                x_ptr, scales_ptr, experts_ptr, out_ptr, runs, features, w_smem, x_smem, full,
                empty, K, HELD, PDL,
            )),
            (_load_gate_up, (
                weight_tiles, experts_ptr, runs, features, w_smem, full, empty, K, PDL,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load_gate_up(
    weight_tiles, experts_ptr, runs, features, w_smem, full, empty,
    K: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copy all tiles."""
    PARTS: gl.constexpr = ROWS // PART
    STEPS: gl.constexpr = K // (TILES * COLUMNS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    of_pair = 2 * features // ROWS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first wait for each stage passes
    for run in range(gl.program_id(0), runs, gl.num_programs(0)):
        expert = gl.load(experts_ptr + run // of_pair)
        row = run % of_pair * ROWS
        first = expert * (2 * features // EIGHT)
        for step in range(STEPS):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), TILES * ROWS * COLUMNS)
            for tile in gl.static_range(TILES):
                for part in gl.static_range(PARTS):
                    to = w_smem.index((stage * TILES + tile) * PARTS + part)
                    column = (step * TILES + tile) * COLUMNS
                    at = [first + (row + part * PART) // 16, 0, 0, column]
                    tma.async_copy_global_to_shared(weight_tiles, at, full.index(stage), to)
            last = stage == STAGES - 1
            stage = gl.where(last, 0, stage + 1)
            phase = gl.where(last, phase ^ 1, phase)


@gluon.jit
def _multiply_gate_up(
    x_ptr, scales_ptr, experts_ptr, out_ptr, runs, features, w_smem, x_smem, full, empty,
    K: gl.constexpr, HELD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply, and store activations."""
    STEPS: gl.constexpr = K // (TILES * COLUMNS)
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EIGHT, 32])
    if PDL:
        gdc_wait()
    x_scale = _quantize_token(x_ptr, x_smem, K, HELD)
    none = gl.zeros([HEIGHT, EIGHT], gl.float32, layout=of_sums)
    of_pair = 2 * features // ROWS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for run in range(gl.program_id(0), runs, gl.num_programs(0)):
        pair = run // of_pair
        expert = gl.load(experts_ptr + pair).to(gl.int64)
        row = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, of_sums))
        source = run % of_pair * ROWS + row
        source = source // 16 * EIGHT + source % 8 + source // 8 % 2 * features
        scales = scales_ptr + expert * (2 * features) + source
        scale = gl.load(scales, mask=row < ROWS, other=0.0)[:, None]
        acc = none
        for step in range(STEPS):
            mbarrier.wait(full.index(stage), phase)
            tile = stage * TILES
            x_tile = step * TILES
            a = product(w_smem, x_smem, tile, x_tile, none, ROWS, PART)
            b = product(w_smem, x_smem, tile + 1, x_tile + 1, none, ROWS, PART)
            a, b = warpgroup_mma_wait(0, deps=(a, b))
            mbarrier.arrive(empty.index(stage))
            acc += a
            acc += b
            last = stage == STAGES - 1
            stage = gl.where(last, 0, stage + 1)
            phase = gl.where(last, phase ^ 1, phase)
        both = gl.reshape(acc * (x_scale * scale), (HEIGHT // 16, 2, EIGHT, EIGHT))
        gate, up = gl.split(gl.permute(both, (0, 2, 3, 1)))
        gated = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, (HEIGHT // 2, EIGHT))
        of_gates: gl.constexpr = gated.type.layout
        line = gl.arange(0, HEIGHT // 2, layout=gl.SliceLayout(1, of_gates))
        token = gl.arange(0, EIGHT, layout=gl.SliceLayout(0, of_gates))
        output = run % of_pair * (ROWS // 2) + line
        at = out_ptr + pair * features + output[:, None] + token[None, :]
        mask = (line < ROWS // 2)[:, None] & (token == 0)[None, :]
        gl.store(at, gated.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _scale_of(magnitude):
    """Return `scale_of`; Gluon's functions cannot call it in the interpreter."""
    return gl.where(magnitude == 0, 1.0, gl.div_rn(magnitude, magnitude * 0 + FP8_LARGEST))


@gluon.jit
def _quantize_token(x_ptr, x_smem, K: gl.constexpr, HELD: gl.constexpr):
    """Store the token's FP8 numbers as the first row of each tile of the input; return the scale.

    The other rows stay as they are: they only change results that are dropped.
    """
    BLOCK: gl.constexpr = HELD * COLUMNS
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    column = gl.arange(0, BLOCK, layout=layout)
    x = gl.load(x_ptr + column, mask=column < K, other=0.0).to(gl.float32)
    scale = _scale_of(gl.max(gl.abs(x), 0))
    x = (x * gl.div_rn(scale * 0 + 1.0, scale)).to(x_smem.dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    WIDTH: gl.constexpr = EIGHT * COLUMNS
    first_rows = x_smem._reinterpret(x_smem.dtype, [HELD, WIDTH], flat).slice(0, COLUMNS, 1)
    first_rows.store(gl.reshape(x, (HELD, COLUMNS)))
    fence_async_shared()
    return scale


@gluon.jit
def experts_stream_down(
    weight_tiles,  # descriptor of [experts * features, K]
    x_ptr,  # [SLOTS, K]
    scales_ptr,  # [experts, features]
    experts_ptr,  # [SLOTS]
    weights_ptr,  # [SLOTS] float32
    residual_ptr,  # [features]
    slots,
    features,
    K: gl.constexpr,
    DEEP: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply DOWN_ROWS rows of each expert, and add their weighted sum to the residual.

    The grid is `[features / DOWN_ROWS]`. The rows of four experts are one tile, which is multiplied
    by the inputs of all experts: an expert's own input is a column of the product.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = weight_tiles.dtype
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    DEPTH: gl.constexpr = K // COLUMNS
    w_smem = gl.allocate_shared_memory(dtype, [DEPTH * SLOTS, DOWN_ROWS, COLUMNS], tiled)
    x_smem = gl.allocate_shared_memory(dtype, [DEEP, SLOTS, COLUMNS], tiled)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_down, (
                x_ptr, scales_ptr, experts_ptr, weights_ptr, residual_ptr, features, w_smem,
                x_smem, full, K, DEEP, PDL,
            )),
            (_load_down, (weight_tiles, experts_ptr, slots, features, w_smem, full, K)),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load_down(weight_tiles, experts_ptr, slots, features, w_smem, full, K: gl.constexpr):
    """Copy the program's rows of all experts. The experts are known before the kernel starts."""
    DEPTH: gl.constexpr = K // COLUMNS
    mbarrier.expect(full.index(0), DEPTH * SLOTS * DOWN_ROWS * COLUMNS)
    for slot in range(slots):  # a bound at run time keeps the loop short
        expert = gl.load(experts_ptr + slot)
        row = expert * features + gl.program_id(0) * DOWN_ROWS
        for tile in range(DEPTH):
            at = [row, tile * COLUMNS]
            to = w_smem.index(tile * SLOTS + slot)
            tma.async_copy_global_to_shared(weight_tiles, at, full.index(0), to)


@gluon.jit
def _multiply_down(
    x_ptr, scales_ptr, experts_ptr, weights_ptr, residual_ptr, features, w_smem, x_smem, full,
    K: gl.constexpr, DEEP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply, weigh and add."""
    DEPTH: gl.constexpr = K // COLUMNS
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLOTS, 32])
    of_rows: gl.constexpr = gl.SliceLayout(1, of_sums)
    column = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, of_sums))[None, :]
    line = gl.arange(0, HEIGHT, layout=of_rows)
    first = line // DOWN_ROWS  # the slot of a row of the first tile
    second = first + SLOTS // 2
    output = gl.program_id(0) * DOWN_ROWS + line % DOWN_ROWS
    share0 = gl.load(weights_ptr + first)
    share1 = gl.load(weights_ptr + second)
    scale0 = gl.load(scales_ptr + gl.load(experts_ptr + first) * features + output)
    scale1 = gl.load(scales_ptr + gl.load(experts_ptr + second) * features + output)
    if PDL:
        gdc_wait()
    x_scale = _quantize_slots(x_ptr, x_smem, K, DEEP)
    x_scale = gl.convert_layout(x_scale, gl.SliceLayout(0, of_sums))[None, :]
    none = gl.zeros([HEIGHT, SLOTS], gl.float32, layout=of_sums)
    sums0 = none
    sums1 = none
    mbarrier.wait(full.index(0), 0)
    for tile in gl.static_range(DEPTH):
        a = _slots_product(w_smem, x_smem, tile, 0, none)
        b = _slots_product(w_smem, x_smem, tile, SLOTS // 2, none)
        a, b = warpgroup_mma_wait(0, deps=(a, b))
        sums0 += a
        sums1 += b
    parts0 = gl.sum(gl.where(column == first[:, None], sums0 * x_scale, 0.0), 1) * scale0
    parts1 = gl.sum(gl.where(column == second[:, None], sums1 * x_scale, 0.0), 1) * scale1
    dtype: gl.constexpr = residual_ptr.dtype.element_ty
    weighed = parts0.to(dtype).to(gl.float32) * share0 + parts1.to(dtype).to(gl.float32) * share1
    total = gl.sum(gl.reshape(weighed, (SLOTS // 2, DOWN_ROWS)), 0)
    at = gl.arange(0, DOWN_ROWS, layout=total.type.layout) + gl.program_id(0) * DOWN_ROWS
    residual = gl.load(residual_ptr + at).to(gl.float32)
    gl.store(residual_ptr + at, (total.to(dtype).to(gl.float32) + residual).to(dtype))


@gluon.jit
def _slots_product(w_smem, x_smem, tile, slot: gl.constexpr, none):
    """Start the product of four experts' rows and the inputs of all experts."""
    w = w_smem.index(tile * SLOTS + slot)
    w = w._reinterpret(w_smem.dtype, [HEIGHT, COLUMNS], x_smem.layout)
    x = x_smem.index(tile).permute((1, 0))
    return warpgroup_mma(
        w, x, none, use_acc=False, is_async=True, max_num_imprecise_acc=COLUMNS
    )  # fmt: skip


@gluon.jit
def _quantize_slots(x_ptr, x_smem, K: gl.constexpr, DEEP: gl.constexpr):
    """Store the FP8 numbers of all experts' inputs in tiles; return their scales, `[SLOTS]`.

    A warp quantizes the inputs of two experts.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 1, 16], [1, 4, 1], [2, 1, 0])
    of_tiles: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    of_slots: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    of_columns: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    tile = gl.arange(0, DEEP, layout=of_tiles)
    slot = gl.arange(0, SLOTS, layout=of_slots)
    place = gl.arange(0, COLUMNS, layout=of_columns)
    tile = gl.expand_dims(gl.expand_dims(tile, 1), 2)
    slot = gl.expand_dims(gl.expand_dims(slot, 0), 2)
    place = gl.expand_dims(gl.expand_dims(place, 0), 1)
    column = tile * COLUMNS + place
    x = gl.load(x_ptr + slot * K + column, mask=(column < K) & (slot < SLOTS), other=0.0)
    x = x.to(gl.float32)
    scale = _scale_of(gl.max(gl.max(gl.abs(x), 2), 0))  # [SLOTS]
    inverse = gl.div_rn(scale * 0 + 1.0, scale)
    inverse = gl.convert_layout(inverse, of_slots)
    x *= gl.expand_dims(gl.expand_dims(inverse, 0), 2)
    whole: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3)
    tiles = x_smem.index(0)._reinterpret(x_smem.dtype, [DEEP, SLOTS, COLUMNS], whole)
    tiles.store(x.to(x_smem.dtype))
    fence_async_shared()
    return scale
