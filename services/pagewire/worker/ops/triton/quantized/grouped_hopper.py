"""The GEMM of weights in four bits with plain inputs on Hopper, written in Gluon.

A program has a loader, which is one warp, and a consumer, which is a warp group of four warps. The
loader copies runs of weights and inputs to shared memory by TMA. The consumer widens weights in
registers, from where the tensor cores take them. It widens one half of a run while they multiply
the other one.

The order of all sums is that of `grouped`, so the results have the same bits.
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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight
from pagewire.worker.ops.device import dependent_launch, is_hopper
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.quantized.hopper import next_stage

ROWS = gl.constexpr(64)  # weight rows of a program
HALF = gl.constexpr(RUN // 2)  # columns of a half run, and its bytes
LOADER_REGISTERS = gl.constexpr(40)
MAX_TOKENS = 128  # of a program


def is_supported(x: Tensor, weight: GroupedWeight) -> bool:
    """Tell whether `multiply` can compute this product."""
    return (
        is_hopper(x.device)
        and weight.bits == 4
        and not weight.float4
        and weight.columns % RUN == 0
        and weight.group % RUN == 0
        and x.dtype == weight.scales.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def multiply(
    x: Tensor, weight: GroupedWeight, out: Tensor, bias: Tensor | None = None, *, add: bool = False
) -> None:
    """Compute `x @ weight.T + bias` into `out`, or with `add` onto it; `weight.order` is
    ignored."""
    tokens, features = x.shape[0], weight.shape[0]
    width = min(MAX_TOKENS, max(16, next_power_of_2(tokens)))
    of_bytes = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    of_inputs = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pdl = dependent_launch(x.device)
    launch = {"launch_pdl": True} if pdl else {}
    grouped_hopper_kernel[(cdiv(features, ROWS.value) * cdiv(tokens, width),)](
        TensorDescriptor.from_tensor(x, [width, HALF.value], of_inputs),
        TensorDescriptor.from_tensor(weight.values, [ROWS.value, HALF.value], of_bytes),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        out,
        tokens,
        features,
        weight.columns,
        weight.scales.shape[1],
        GROUP=weight.group,
        BLOCK_T=width,
        STAGES=6 if width <= 32 else 3,
        ZEROS=weight.zeros is not None,
        ADD=add,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=4,
        # Of a thread, on average: 3 programs run at once on a multiprocessor, or 2.
        maxnreg=80 if width <= 64 else 128,
        **launch,
    )


@gluon.jit(do_not_specialize=["tokens"])
def grouped_hopper_kernel(
    x_tiles,  # descriptor of [tokens, K]
    values,  # descriptor of [features, K / 2]
    scales_ptr,  # [features, groups]
    zeros_ptr,  # [features, groups]
    bias_ptr,  # [features]
    out_ptr,  # [tokens, features]
    tokens,
    features,
    K,
    groups,
    GROUP: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    ZEROS: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply 64 weight rows by BLOCK_T tokens. The grid is `[features / 64 * tokens / BLOCK_T]`;
    programs with the same weight rows are neighbours."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    x_smem = gl.allocate_shared_memory(x_tiles.dtype, [STAGES * 2, BLOCK_T, HALF], x_tiles.layout)
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, ROWS, HALF], values.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    parts = gl.cdiv(tokens, BLOCK_T)
    row = gl.program_id(0) // parts * ROWS
    token = gl.program_id(0) % parts * BLOCK_T
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (
                row, token, scales_ptr, zeros_ptr, bias_ptr, out_ptr, tokens, features, K, groups,
                x_smem, w_smem, full, empty, GROUP, BLOCK_T, STAGES, ZEROS, ADD, BIAS,
            )),
            (_load, (
                row, token, x_tiles, values, K, x_smem, w_smem, full, empty, BLOCK_T, STAGES,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load(
    row,
    token,
    x_tiles,
    values,
    K,
    x_smem,
    w_smem,
    full,
    empty,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load the runs of weights and inputs."""
    stage = 0
    phase = 1
    for start in range(0, K, 2 * HALF):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), ROWS * HALF + BLOCK_T * 2 * HALF * 2)
        tma.async_copy_global_to_shared(
            values, [row, start // 2], full.index(stage), w_smem.index(stage)
        )
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                x_tiles,
                [token, start + half * HALF],
                full.index(stage),
                x_smem.index(stage * 2 + half),
            )
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _scales(scales_ptr, zeros_ptr, line, column, groups, GROUP: gl.constexpr, ZEROS: gl.constexpr):
    """Load the scales of a run, and what `_widened` subtracts."""
    at = line + gl.minimum(column // GROUP, groups - 1)
    scale = gl.load(scales_ptr + at)
    first: gl.constexpr = 128.0 if scale.dtype == gl.bfloat16 else 1024.0
    if ZEROS:
        middle = gl.load(zeros_ptr + at).to(gl.float32) + first
    else:
        middle = gl.full([ROWS], first + 8.0, gl.float32, layout=scale.type.layout)
    return scale, middle.to(scale.dtype)


@gluon.jit
def _widened(both, scale, middle, HIGH: gl.constexpr):
    """Return the low or high nibbles of `both` as weights, rounded once.

    A nibble in the lowest bits of 128 in bfloat16, or of 1,024 in float16, is their sum. `middle`
    is that number and the zero point, so that the difference is exact. Two weights take six
    instructions.
    """
    bfloat16: gl.constexpr = scale.dtype == gl.bfloat16
    number: gl.constexpr = "0x43004300" if bfloat16 else "0x64006400"
    kind: gl.constexpr = "bf16x2" if bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; "
        + ("shr.b32 b, $2, 4; " if HIGH else "mov.b32 b, $2; ")
        + "prmt.b32 a, b, 0, 0x4140; prmt.b32 b, b, 0, 0x4342; "
        + "lop3.b32 a, a, 0x000F000F, " + number + ", 0xEA; "
        + "lop3.b32 b, b, 0x000F000F, " + number + ", 0xEA; "
        + "sub." + kind + " a, a, $5; sub." + kind + " b, b, $6; "
        + "mul." + kind + " $0, a, $3; mul." + kind + " $1, b, $4; }",
        "=r,=r,r,r,r,r,r",
        [both, scale, middle],
        dtype=scale.dtype,
        is_pure=True,
        pack=4,
    )  # fmt: skip


@gluon.jit
def _consume(
    row,
    token,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    features,
    K,
    groups,
    x_smem,
    w_smem,
    full,
    empty,
    GROUP: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    ZEROS: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Multiply all runs, and store the tile."""
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    feature = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_weights))
    line = gl.minimum(feature, features - 1) * groups
    sums = warpgroup_mma_init(gl.zeros([ROWS, BLOCK_T], gl.float32, layout=of_sums))
    next_scale, next_middle = _scales(scales_ptr, zeros_ptr, line, 0, groups, GROUP, ZEROS)
    stage = 0
    phase = 0
    held = 0
    for start in range(0, K, 2 * HALF):
        scale = next_scale[:, None]
        middle = next_middle[:, None]
        next_scale, next_middle = _scales(
            scales_ptr, zeros_ptr, line, start + 2 * HALF, groups, GROUP, ZEROS
        )
        mbarrier.wait(full.index(stage), phase)
        both = w_smem.index(stage).load(of_weights)
        low = _widened(both, scale, middle, False)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index(held), pred=start > 0)
        x = x_smem.index(stage * 2).permute((1, 0))
        sums = warpgroup_mma(low, x, sums, is_async=True)
        high = _widened(both, scale, middle, True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        x = x_smem.index(stage * 2 + 1).permute((1, 0))
        sums = warpgroup_mma(high, x, sums, is_async=True)
        held = stage
        stage, phase = next_stage(stage, phase, STAGES)
    sums = warpgroup_mma_wait(0, deps=(sums,))

    feature = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_sums))
    place = token + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, of_sums))
    if BIAS:
        bias = gl.load(bias_ptr + feature, mask=feature < features, other=0.0)
        sums += bias.to(gl.float32)[:, None]
    result = sums.to(out_ptr.dtype.element_ty)
    out = out_ptr + (place.to(gl.int64) * features)[None, :] + feature[:, None]
    mask = (feature < features)[:, None] & (place < tokens)[None, :]
    if ADD:
        residual = gl.load(out, mask=mask, other=0.0)
        summed = result.to(gl.float32) + residual.to(gl.float32)
        result = summed.to(out_ptr.dtype.element_ty)
    gl.store(out, result, mask=mask)
