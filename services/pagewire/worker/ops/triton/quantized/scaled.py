"""The GEMM of weights and inputs in eight bits, FP8 or INT8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.quantized import QuantizedInput, ScaledWeight
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.quantized import hopper
from pagewire.worker.ops.triton.quantized.store import store_tile
from pagewire.worker.ops.triton.quantized.tiles import Tiles, choose_tiles

# Products that the tensor cores add up before the sum is added in float32.
BLOCK_K = 128


# If one scale is for all tokens, the stride is 0 or 1, depending on the number of tokens.
@triton.jit(do_not_specialize=["tokens", "x_scales_stride"])
def _scaled_kernel(
    x_ptr,  # [tokens, K]
    x_scales_ptr,  # [tokens, groups]
    weight_ptr,  # [features, K]
    weight_scales_ptr,  # [features / BLOCK_ROWS, K / BLOCK_K] if BLOCKED, else [features]
    bias_ptr,  # [features]
    out_ptr,  # [tokens, features]
    tokens,
    features,
    K,
    x_scales_stride,
    weight_scales_stride,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCKED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS weight rows by BLOCK_T tokens.

    Programs with the same weight rows are neighbours. The grid is `[features / ROWS * tokens /
    BLOCK_T]`. EVEN promises that K is a multiple of BLOCK_K.
    """
    parts = tl.cdiv(tokens, BLOCK_T)
    output = tl.program_id(0) // parts * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    # Rows past the end repeat the last one and are not stored.
    row = tl.minimum(output, features - 1).to(tl.int64)
    token = tl.program_id(0) % parts * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    here = token < tokens
    column = tl.arange(0, BLOCK_K)[None, :]
    weight = weight_ptr + row * K + column  # [ROWS, BLOCK_K]
    x_tile = x_ptr + token.to(tl.int64) * K + column  # [BLOCK_T, BLOCK_K]
    weight_scales = weight_scales_ptr + row // BLOCK_ROWS * weight_scales_stride  # [ROWS, 1]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_scales = x_scales_ptr + tl.trans(token).to(tl.int64) * x_scales_stride  # [1, BLOCK_T]
    present = tl.trans(here)

    acc = tl.zeros((ROWS, BLOCK_T), tl.int32 if INTEGER else tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            w = tl.load(weight + start)
            x = tl.load(x_tile + start, mask=here, other=0.0)
        else:
            inside = start + column < K
            w = tl.load(weight + start, mask=inside, other=0.0)
            x = tl.load(x_tile + start, mask=here & inside, other=0.0)
        if INTEGER:
            acc = tl.dot(w, x.T, acc, out_dtype=tl.int32)
        elif BLOCKED:
            block = start // BLOCK_K
            scale = tl.load(weight_scales + block) * tl.load(
                x_scales + block, mask=present, other=0.0
            )
            acc += tl.dot(w, x.T) * scale
        else:
            acc += tl.dot(w, x.T)
    out = acc.to(tl.float32)
    if not BLOCKED:
        out *= tl.load(x_scales, mask=present, other=0.0) * tl.load(weight_scales)
    store_tile(
        out_ptr, bias_ptr, out, output, tl.trans(token), tokens, features, ADD=ADD, BIAS=BIAS
    )


def scaled_linear(
    x: QuantizedInput,
    weight: ScaledWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
    shared: bool = False,
) -> Tensor:
    """Implement `QuantizedOps.scaled_linear`; `out` is contiguous.

    With `shared`, programs may share tiles, so that the bits depend on the number of tokens.
    """
    if out is None:
        out = x.values.new_empty((x.values.shape[0], weight.shape[0]), dtype=x.dtype)
    return _launch(x, weight, out, bias, tiles, shared)


def scaled_linear_add(
    x: QuantizedInput,
    weight: ScaledWeight,
    residual: Tensor,
    *,
    tiles: Tiles | None = None,
    shared: bool = False,
) -> Tensor:
    """Implement `QuantizedOps.scaled_linear_add`; `residual` is contiguous; `shared` as above."""
    return _launch(x, weight, residual, None, tiles, shared, add=True)


def _launch(
    x: QuantizedInput,
    weight: ScaledWeight,
    out: Tensor,
    bias: Tensor | None,
    tiles: Tiles | None,
    shared: bool,
    add: bool = False,
) -> Tensor:
    (tokens, k), features = x.values.shape, weight.shape[0]
    if tokens == 0:
        return out
    blocked = weight.block[1] < k
    assert not blocked or weight.block[1] == BLOCK_K
    if tiles is None:
        choice = hopper.choose(x, weight, shared=shared)
        if choice.shape is not None:
            hopper.multiply(x, weight, out, bias, add=add, choice=choice)
            return out
    tiles = tiles or choose_tiles(tokens, features)
    pdl = dependent_launch(x.values.device)
    _scaled_kernel[(cdiv(features, tiles.rows) * cdiv(tokens, tiles.tokens),)](
        x.values,
        x.scales,
        weight.values,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        tokens,
        features,
        k,
        x.scales.stride(0),
        weight.scales.stride(0),
        ROWS=tiles.rows,
        BLOCK_T=tiles.tokens,
        BLOCK_K=BLOCK_K,
        BLOCK_ROWS=weight.block[0],
        STAGES=tiles.stages,
        EVEN=k % BLOCK_K == 0,
        INTEGER=weight.values.dtype == torch.int8,
        BLOCKED=blocked,
        ADD=add,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=tiles.warps,
        launch_pdl=pdl,
    )
    return out
