"""The GEMM of weights in four or eight bits with plain inputs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.quantized import fragment_gemm
from pagewire.worker.ops.triton.quantized.store import store_tile
from pagewire.worker.ops.triton.quantized.tiles import Tiles, choose_tiles
from pagewire.worker.ops.triton.quantized.widen import scales_of, widened


@triton.jit(do_not_specialize=["tokens"])
def _grouped_kernel(
    x_ptr,  # [tokens, K]
    values_ptr,  # [features, WORDS]
    scales_ptr,  # [features, groups]
    zeros_ptr,  # [features, groups]
    bias_ptr,  # [features]
    out_ptr,  # [tokens, features]
    tokens,
    features,
    K,
    groups,
    x_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
    ZEROS: tl.constexpr,
    FLOAT4: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS weight rows by BLOCK_T tokens, a run of columns at a time.

    The scales of a run are loaded one step ahead. Weights are widened in registers; in four bits,
    the first half of a run comes before the second. Programs with the same weight rows are
    neighbours. The grid is `[features / ROWS * tokens / BLOCK_T]`.
    """
    WIDTH: tl.constexpr = RUN // 2 if BITS == 4 else RUN
    MIDDLE: tl.constexpr = 8.0 if BITS == 4 else 128.0
    parts = tl.cdiv(tokens, BLOCK_T)
    output = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    # Rows past the end repeat the last one and are not stored.
    row = tl.minimum(output, features - 1).to(tl.int64)
    token = tl.program_id(0) % parts * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    here = token < tokens
    place = tl.arange(0, WIDTH)[None, :]
    line = tl.cdiv(K, RUN) * WIDTH if BITS == 4 else K
    values = values_ptr + row * line + place  # [ROWS, WIDTH]
    scales, zeros = scales_ptr + row * groups, zeros_ptr + row * groups  # [ROWS, 1]
    x_tile = x_ptr + token.to(tl.int64) * x_stride + place  # [BLOCK_T, WIDTH]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    acc = tl.zeros((ROWS, BLOCK_T), tl.float32)
    next_scale, next_zero = scales_of(scales, zeros, 0, place, groups, GROUP, WIDTH, ZEROS)
    if BITS == 4 and GROUP < RUN:
        next_high = scales_of(scales, zeros, WIDTH, place, groups, GROUP, WIDTH, ZEROS)
    for start in tl.range(0, K, RUN, num_stages=STAGES):
        column = start + place
        scale, zero = next_scale, next_zero
        next_scale, next_zero = scales_of(
            scales, zeros, start + RUN, place, groups, GROUP, WIDTH, ZEROS
        )
        x = tl.load(x_tile + start, mask=here & (column < K), other=0.0)
        if BITS == 4:
            both = tl.load(values + start // 2)
            w = widened(both & 15, scale, zero, dtype, MIDDLE, ZEROS, FLOAT4)
            acc = tl.dot(w, x.T, acc, input_precision="ieee")
            if GROUP < RUN:  # the second half has other scales
                scale, zero = next_high
                next_high = scales_of(
                    scales, zeros, start + RUN + WIDTH, place, groups, GROUP, WIDTH, ZEROS
                )
            x = tl.load(x_tile + start + WIDTH, mask=here & (column + WIDTH < K), other=0.0)
            w = widened(both >> 4, scale, zero, dtype, MIDDLE, ZEROS, FLOAT4)
        else:
            whole = tl.load(values + start, mask=column < K, other=0)
            w = widened(whole, scale, zero, dtype, MIDDLE, ZEROS, FLOAT4)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    store_tile(
        out_ptr, bias_ptr, acc, output, tl.trans(token), tokens, features, ADD=ADD, BIAS=BIAS
    )


def grouped_linear(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """Implement `QuantizedOps.grouped_linear`; the rows of `x` may have any stride."""
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    return _launch(x, weight, out, bias, tiles)


def grouped_linear_add(
    x: Tensor, weight: GroupedWeight, residual: Tensor, *, tiles: Tiles | None = None
) -> Tensor:
    """Implement `QuantizedOps.grouped_linear_add`; `residual` is contiguous."""
    return _launch(x, weight, residual, None, tiles, add=True)


def _launch(
    x: Tensor,
    weight: GroupedWeight,
    out: Tensor,
    bias: Tensor | None,
    tiles: Tiles | None,
    add: bool = False,
) -> Tensor:
    tokens, features = x.shape[0], weight.shape[0]
    if tokens == 0:
        return out
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if weight.pairs is not None:
        fragment_gemm.multiply(x, weight, out, bias, add=add, whole=True)
        return out
    tiles = tiles or choose_tiles(tokens, features, x.element_size())
    pdl = dependent_launch(x.device)
    _grouped_kernel[(cdiv(features, tiles.rows) * cdiv(tokens, tiles.tokens),)](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        out,
        tokens,
        features,
        weight.columns,
        weight.scales.shape[1],
        x.stride(0),
        BITS=weight.bits,
        GROUP=weight.group,
        RUN=RUN,
        ROWS=tiles.rows,
        BLOCK_T=tiles.tokens,
        STAGES=tiles.stages,
        ZEROS=weight.zeros is not None,
        FLOAT4=weight.float4,
        ADD=add,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=tiles.warps,
        launch_pdl=pdl,
    )
    return out
