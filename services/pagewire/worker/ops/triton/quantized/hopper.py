"""The GEMM of FP8 weights and inputs for many tokens on Hopper, written in Gluon.

A program has a loader, which is one warp, and two consumers, which are warp groups of four warps.
The loader copies tiles of inputs and weights to shared memory by TMA. A consumer owns 64 or 128
tokens and 128 features of the output tile. It multiplies 64 tokens at a time, and adds the sums of
128 products in float32, because Hopper's tensor cores keep fewer bits. While one consumer adds, the
other one multiplies; nothing synchronizes them.

Programs are persistent, one on each multiprocessor. The loader works ahead into the next tile while
the consumers store.
"""

from __future__ import annotations

from dataclasses import dataclass

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

from pagewire.worker.ops.contract.quantized import QuantizedInput, ScaledWeight
from pagewire.worker.ops.device import dependent_launch, is_hopper, multiprocessors
from pagewire.worker.ops.integers import cdiv

BLOCK_K = gl.constexpr(128)  # products that the tensor cores add up
HALF = gl.constexpr(64)  # tokens of a matrix instruction
SIDE = gl.constexpr(128)  # weight rows of a consumer
# Tiles of tokens whose programs run at once, so that they read the same weights from the L2 cache.
GROUP = gl.constexpr(8)
CONSUMER_REGISTERS = gl.constexpr(232)
LOADER_REGISTERS = gl.constexpr(40)
# With fewer tokens the tiles of the plain kernel keep more multiprocessors busy. They also do up to
# MAX_PLAIN_TOKENS tokens, if the smallest tiles fill at most half of the multiprocessors.
MIN_TOKENS = 128
MAX_PLAIN_TOKENS = 256


def is_supported(x: QuantizedInput, weight: ScaledWeight) -> bool:
    """Tell whether `multiply` can compute this product and is faster than the plain kernel."""
    tokens, k = x.values.shape
    tiles = cdiv(tokens, SIDE.value) * cdiv(weight.shape[0], SIDE.value)
    return (
        tokens >= MIN_TOKENS
        and (tokens > MAX_PLAIN_TOKENS or 2 * tiles > multiprocessors(x.values.device))
        and is_hopper(x.values.device)
        and weight.values.dtype == torch.float8_e4m3fn
        and weight.block == (1, k)
        and k % BLOCK_K.value == 0
        and weight.shape[0] % 16 == 0
        and weight.scales.stride(0) == 1
        and x.dtype in (torch.bfloat16, torch.float16)
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The tile of a program: each of two consumers has `halves` times 64 tokens, by 128 features.

    With `beside` the consumers share the tokens, else the features. `stages` tiles of inputs are in
    shared memory.
    """

    halves: int
    beside: bool
    stages: int

    @property
    def rows(self) -> int:
        """Tokens of a tile."""
        return self.halves * HALF.value * (1 if self.beside else 2)

    @property
    def columns(self) -> int:
        """Features of a tile."""
        return SIDE.value * (2 if self.beside else 1)


SHAPES = (Shape(2, False, 4), Shape(2, True, 4), Shape(1, False, 6))


def choose_shape(tokens: int, features: int, programs: int) -> Shape:
    """Choose the shape with the least work: rounds of all programs, times the size of a tile."""

    def cost(shape: Shape) -> float:
        rounds = cdiv(cdiv(tokens, shape.rows) * cdiv(features, shape.columns), programs)
        return rounds * (shape.halves + 0.15)

    return min(SHAPES, key=cost)


def multiply(
    x: QuantizedInput,
    weight: ScaledWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    add: bool = False,
    gated: bool = False,
    shape: Shape | None = None,
) -> None:
    """Store `x @ weight.T + bias` in `out`, with `gated` its `silu_mul`; with `add`, add the
    product to `out`."""
    (tokens, k), rows = x.values.shape, weight.shape[0]
    device = x.values.device
    shape = shape or choose_shape(tokens, rows, multiprocessors(device))
    tiles = cdiv(tokens, shape.rows) * cdiv(rows, shape.columns)
    box = shape.columns
    if gated:
        box = SIDE.value // 2
        tiles = cdiv(tokens, shape.rows) * cdiv(rows // 2, shape.columns // 2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    pdl = dependent_launch(device)
    launch = {"launch_pdl": True} if pdl else {}
    scaled_hopper_kernel[(min(multiprocessors(device), tiles),)](
        TensorDescriptor.from_tensor(x.values, [shape.rows, BLOCK_K.value], layout),
        TensorDescriptor.from_tensor(weight.values, [box, BLOCK_K.value], layout),
        x.scales,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        tokens,
        out.shape[1],
        k,
        x.scales.stride(0),
        HALVES=shape.halves,
        BESIDE=shape.beside,
        STAGES=shape.stages,
        ADD=add,
        BIAS=bias is not None,
        GATED=gated,
        PDL=pdl,
        num_warps=4,
        **launch,
    )


@gluon.jit(do_not_specialize=["tokens", "x_scales_stride"])
def scaled_hopper_kernel(
    x_tiles,  # descriptor of [tokens, K]
    weight_tiles,  # descriptor of [features, K]
    x_scales_ptr,  # [tokens, 1]
    weight_scales_ptr,  # [features, 1]
    bias_ptr,  # [features]
    out_ptr,  # [tokens, features]
    tokens,
    features,
    K,
    x_scales_stride,
    HALVES: gl.constexpr,
    BESIDE: gl.constexpr,
    STAGES: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Multiply tiles; a consumer has HALVES times 64 tokens, by 128 features.

    With BESIDE the consumers share the tokens of a tile, else its features. Each program computes
    the tile of its number, and then every further one at a distance of the grid's size. The grid is
    `[multiprocessors]`, or fewer.
    """
    dtype: gl.constexpr = x_tiles.dtype
    tiled: gl.constexpr = x_tiles.layout
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ROWS: gl.constexpr = HALVES * HALF * (1 if BESIDE else 2)
    COLUMNS: gl.constexpr = SIDE * (2 if BESIDE else 1)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, ROWS, BLOCK_K], tiled)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, BLOCK_K], tiled)
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
                0, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, tokens, features, K,
                x_scales_stride, x_smem, w_smem, full, empty, HALVES, BESIDE, STAGES, ADD, BIAS,
                GATED,
            )),
            (_consume, (
                1, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr, tokens, features, K,
                x_scales_stride, x_smem, w_smem, full, empty, HALVES, BESIDE, STAGES, ADD, BIAS,
                GATED,
            )),
            (_load, (
                x_tiles, weight_tiles, tokens, features, K, x_smem, w_smem, full, empty, HALVES,
                BESIDE, STAGES, GATED,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the stage after `stage`, and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _place(tile, token_tiles, feature_tiles):
    """Return the place of a tile: groups of GROUP tiles of tokens, then features, then tokens."""
    a_group = GROUP * feature_tiles
    first = tile // a_group * GROUP
    height = gl.minimum(token_tiles - first, GROUP)
    within = tile % a_group
    return first + within % height, within // height


@gluon.jit
def _load(
    x_tiles,
    weight_tiles,
    tokens,
    features,
    K,
    x_smem,
    w_smem,
    full,
    empty,
    HALVES: gl.constexpr,
    BESIDE: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Load the tiles of inputs and weights; with GATED, for each consumer half a tile of gates and
    the values that belong to them."""
    ROWS: gl.constexpr = HALVES * HALF * (1 if BESIDE else 2)
    COLUMNS: gl.constexpr = SIDE * (2 if BESIDE else 1)
    OUTPUTS: gl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    PART: gl.constexpr = SIDE // 2
    token_tiles = gl.cdiv(tokens, ROWS)
    feature_tiles = gl.cdiv(features, OUTPUTS)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), token_tiles * feature_tiles, gl.num_programs(0)):
        row, column = _place(tile, token_tiles, feature_tiles)
        for start in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (ROWS + COLUMNS) * BLOCK_K)
            tma.async_copy_global_to_shared(
                x_tiles, [row * ROWS, start], full.index(stage), x_smem.index(stage)
            )
            if GATED:
                for part in gl.static_range(COLUMNS // PART):
                    first = column * OUTPUTS + part // 2 * PART + part % 2 * features
                    tma.async_copy_global_to_shared(
                        weight_tiles,
                        [first, start],
                        full.index(stage),
                        w_smem.index(stage).slice(part * PART, PART),
                    )
            else:
                tma.async_copy_global_to_shared(
                    weight_tiles, [column * COLUMNS, start], full.index(stage), w_smem.index(stage)
                )
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _consume(
    consumer: gl.constexpr,
    x_scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    features,
    K,
    x_scales_stride,
    x_smem,
    w_smem,
    full,
    empty,
    HALVES: gl.constexpr,
    BESIDE: gl.constexpr,
    STAGES: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
):
    """Multiply a consumer's part of each tile, and store it."""
    ROWS: gl.constexpr = HALVES * HALF * (1 if BESIDE else 2)
    COLUMNS: gl.constexpr = SIDE * (2 if BESIDE else 1)
    OUTPUTS: gl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 32])
    first_row: gl.constexpr = 0 if BESIDE else consumer * HALVES * HALF
    first_column: gl.constexpr = consumer * SIDE if BESIDE else 0
    token_tiles = gl.cdiv(tokens, ROWS)
    feature_tiles = gl.cdiv(features, OUTPUTS)
    none = gl.zeros([HALF, SIDE], gl.float32, layout=of_sums)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), token_tiles * feature_tiles, gl.num_programs(0)):
        upper = gl.zeros([HALF, SIDE], gl.float32, layout=of_sums)
        lower = gl.zeros([HALF, SIDE], gl.float32, layout=of_sums)
        for _ in range(0, K, BLOCK_K):
            mbarrier.wait(full.index(stage), phase)
            x = x_smem.index(stage)
            w = w_smem.index(stage).slice(first_column, SIDE).permute((1, 0))
            part = warpgroup_mma(
                x.slice(first_row, HALF), w, none,
                use_acc=False, is_async=True, max_num_imprecise_acc=BLOCK_K,
            )  # fmt: skip
            part = warpgroup_mma_wait(0, deps=(part,))
            if HALVES == 1:
                mbarrier.arrive(empty.index(stage))
            upper += part
            if HALVES == 2:
                part = warpgroup_mma(
                    x.slice(first_row + HALF, HALF), w, none,
                    use_acc=False, is_async=True, max_num_imprecise_acc=BLOCK_K,
                )  # fmt: skip
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(stage))
                lower += part
            stage, phase = next_stage(stage, phase, STAGES)
        row, column = _place(tile, token_tiles, feature_tiles)
        first_token = row * ROWS + first_row
        first_feature = column * OUTPUTS + first_column // (2 if GATED else 1)
        _store(
            upper, first_token, first_feature, x_scales_ptr, weight_scales_ptr, bias_ptr, out_ptr,
            tokens, features, x_scales_stride, ADD, BIAS, GATED,
        )  # fmt: skip
        if HALVES == 2:
            _store(
                lower, first_token + HALF, first_feature, x_scales_ptr, weight_scales_ptr, bias_ptr,
                out_ptr, tokens, features, x_scales_stride, ADD, BIAS, GATED,
            )  # fmt: skip


@gluon.jit
def _store(
    sums,
    first_token,
    first_feature,
    x_scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    features,
    x_scales_stride,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
):
    """Scale the sums of 64 tokens by 128 weight rows and store them.

    With GATED, the first 64 rows are gates, and the others the values that belong to them.
    """
    OUTPUTS: gl.constexpr = SIDE // 2 if GATED else SIDE
    # A thread holds eight features of a token, which is a store of 16 bytes.
    of_store: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]]
        if GATED
        else [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [HALF, OUTPUTS],
    )
    of_sums: gl.constexpr = sums.type.layout
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    token = first_token + gl.arange(0, HALF, layout=gl.SliceLayout(1, of_sums))
    x_scale = gl.load(x_scales_ptr + token * x_scales_stride, mask=token < tokens, other=0.0)
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(0, of_sums))
    feature = first_feature + row % OUTPUTS
    held = feature < features
    if GATED:
        row = feature + row // OUTPUTS * features
    else:
        row = feature
    sums *= x_scale[:, None] * gl.load(weight_scales_ptr + row, mask=held, other=0.0)[None, :]
    if BIAS:
        sums += gl.load(bias_ptr + row, mask=held, other=0.0).to(gl.float32)[None, :]
    if GATED:
        halves = gl.reshape(sums.to(dtype).to(gl.float32), [HALF, 2, OUTPUTS])
        gate, up = gl.split(gl.permute(halves, (0, 2, 1)))
        sums = gate / (1.0 + gl.exp(-gate)) * up
    result = gl.convert_layout(sums.to(dtype), of_store)
    token = first_token + gl.arange(0, HALF, layout=gl.SliceLayout(1, of_store))
    feature = first_feature + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, of_store))
    out = out_ptr + (token.to(gl.int64) * features)[:, None] + feature[None, :]
    mask = (token < tokens)[:, None] & (feature < features)[None, :]
    if ADD:
        residual = gl.load(out, mask=mask, other=0.0)
        summed = result.to(gl.float32) + residual.to(gl.float32)
        result = summed.to(dtype)
    gl.store(out, result, mask=mask)
