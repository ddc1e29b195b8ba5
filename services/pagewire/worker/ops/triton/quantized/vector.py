"""Products of quantized weights with one token, as elementwise products and sums.

The time is that of reading the weight. A program multiplies whole rows, and loads its first weights
while the kernel that computes the input may still run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.quantized import (
    RUN,
    GroupedWeight,
    QuantizedInput,
    ScaledWeight,
)
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2


@triton.jit
def _store(out_ptr, bias_ptr, product, output, features, ADD: tl.constexpr, BIAS: tl.constexpr):
    """Store the products of some rows: BIAS adds the bias, ADD adds the values stored before."""
    inside = output < features
    if BIAS:
        product += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        product += tl.load(out_ptr + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + output, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scaled_vector_kernel(
    x_ptr,  # [K]
    x_scales_ptr,  # [groups]
    weight_ptr,  # [features, K]
    weight_scales_ptr,  # [features / BLOCK_ROWS, groups]
    bias_ptr,  # [features]
    out_ptr,  # [features]
    features,
    weight_scales_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    INTEGER: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS rows of a weight in eight bits. The grid is `[features / ROWS]`.

    Products of INTEGER weights are added up exactly.
    """
    number: tl.constexpr = tl.int32 if INTEGER else tl.float32
    if PDL:
        gdc_launch_dependents()
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = output[:, None]  # [ROWS, 1]
    inside = row < features
    column = tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
    weight = weight_ptr + row.to(tl.int64) * K + column  # [ROWS, BLOCK_K]
    scales = weight_scales_ptr + row // BLOCK_ROWS * weight_scales_stride
    w = tl.load(weight, mask=inside & (column < K), other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    product = tl.zeros((ROWS, BLOCK_K), number)
    for start in tl.static_range(0, K, BLOCK_K):
        here = start + column < K
        if start > 0:
            w = tl.load(weight + start, inside & here, 0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + column, mask=here, other=0.0).to(number)
        if GROUP < K:
            at = (start + column) // GROUP
            x *= tl.load(x_scales_ptr + at, mask=here, other=0.0)
            x *= tl.load(scales + at, mask=inside & here, other=0.0)
        product += w.to(number) * x
    out = tl.sum(product, axis=1).to(tl.float32)
    if GROUP >= K:
        out *= tl.load(x_scales_ptr)
        at = output // BLOCK_ROWS * weight_scales_stride
        out *= tl.load(weight_scales_ptr + at, mask=output < features, other=0.0)
    _store(out_ptr, bias_ptr, out, output, features, ADD=ADD, BIAS=BIAS)


@triton.jit
def _grouped_vector_kernel(
    x_ptr,  # [K]
    values_ptr,  # [features, runs * RUN / 2]
    scales_ptr,  # [features, groups]
    zeros_ptr,  # [features, groups]
    bias_ptr,  # [features]
    out_ptr,  # [features]
    features,
    K: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    RUNS: tl.constexpr,
    ZEROS: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS rows of a weight in four bits, RUNS runs at a time. The grid is
    `[features / ROWS]`.

    Bytes are seen as `[pieces, PIECE]`, where the columns of a piece have one scale. A nibble in
    the lowest bits of the float 2**23 is added to it.
    """
    HALF: tl.constexpr = RUN // 2
    PIECE: tl.constexpr = HALF if HALF < GROUP else GROUP
    PIECES: tl.constexpr = HALF // PIECE
    ALL: tl.constexpr = (K + RUN - 1) // RUN
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    if PDL:
        gdc_launch_dependents()
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(output, features - 1).to(tl.int64)[:, None]  # [ROWS, 1]
    piece = tl.arange(0, RUNS * PIECES)[None, :]  # [1, pieces]
    byte = (piece * PIECE)[:, :, None] + tl.arange(0, PIECE)[None, None, :]  # [1, pieces, PIECE]
    # The first column of a piece, and the columns of its low nibbles.
    first = piece // PIECES * RUN + piece % PIECES * PIECE
    column = first[:, :, None] + tl.arange(0, PIECE)[None, None, :]
    values = values_ptr + row[:, :, None] * (ALL * HALF) + byte
    w = tl.load(values, mask=byte < ALL * HALF, other=0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    product = tl.zeros((ROWS, RUNS * PIECES), tl.float32)
    for run in tl.static_range(0, ALL, RUNS):
        start = run * RUN
        if run > 0:
            here = run * HALF + byte < ALL * HALF
            w = tl.load(values + run * HALF, mask=here, other=0, eviction_policy="evict_first")
        for half in tl.static_range(2):
            at = start + column + half * HALF
            x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
            group = tl.minimum((start + first + half * HALF) // GROUP, GROUPS - 1)
            scale = tl.load(scales_ptr + row * GROUPS + group).to(tl.float32)
            middle = tl.full((ROWS, RUNS * PIECES), 8388616.0, tl.float32)
            if ZEROS:
                zero = tl.load(zeros_ptr + row * GROUPS + group).to(tl.float32)
                middle = 8388608.0 + zero
            bits = (w.to(tl.int32) >> (4 * half)) & 15 | 0x4B000000
            number = bits.to(tl.float32, bitcast=True) - middle[:, :, None]
            product += tl.sum(number * x, axis=2) * scale
    _store(out_ptr, bias_ptr, tl.sum(product, axis=1), output, features, ADD=ADD, BIAS=BIAS)


def multiply_scaled(
    x: QuantizedInput, weight: ScaledWeight, out: Tensor, bias: Tensor | None, add: bool
) -> None:
    """Store `x @ weight.T + bias` of one token in `out [1, features]`; with `add`, add it."""
    features, k = weight.shape
    rows, block_k, warps = (2, max(1024, next_power_of_2(k)), 4) if k <= 4096 else (2, 1024, 2)
    pdl = dependent_launch(x.values.device)
    _scaled_vector_kernel[(cdiv(features, rows),)](
        x.values,
        x.scales,
        weight.values,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        features,
        weight.scales.stride(0),
        K=k,
        ROWS=rows,
        BLOCK_K=block_k,
        BLOCK_ROWS=weight.block[0],
        GROUP=weight.block[1],
        INTEGER=weight.values.dtype == torch.int8,
        ADD=add,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


def multiply_grouped(
    x: Tensor, weight: GroupedWeight, out: Tensor, bias: Tensor | None, add: bool
) -> None:
    """Store `x @ weight.T + bias` of one token and four bits in `out`; with `add`, add it."""
    features, k = weight.shape
    pdl = dependent_launch(x.device)
    _grouped_vector_kernel[(cdiv(features, 2),)](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        out,
        features,
        K=k,
        RUN=RUN,
        GROUP=weight.group,
        ROWS=2,
        RUNS=16,
        ZEROS=weight.zeros is not None,
        ADD=add,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
