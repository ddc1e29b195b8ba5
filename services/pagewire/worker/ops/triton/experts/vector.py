"""A layer with experts for few tokens: elementwise products and sums, without tiles of rows.

With few tokens the time is that of reading the experts' weights, and of starting kernels. So the
norm is folded into the router's kernel, rows are not sorted, and the weighted sum is folded into
the product of the down projections. A program reads whole rows of an expert's weight at once.

Sums have their own order, the same for every number of tokens that these kernels compute.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ClampedSwiglu, Routes
from pagewire.worker.ops.contract.quantized import LARGEST, LinearWeight, ScaledWeight
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.experts.config import (
    SCORED_ROWS,
    RowsConfig,
    vector_configs,
)
from pagewire.worker.ops.triton.experts.routing import clear_counts
from pagewire.worker.ops.triton.experts.tile import activated, clamp_numbers
from pagewire.worker.ops.triton.rowwise.norm import inverse_rms
from pagewire.worker.ops.triton.rowwise.quantize import rounded_to_fp8, scale_of

FP8_LARGEST = tl.constexpr(LARGEST[torch.float8_e4m3fn])


@triton.jit
def _scores_kernel(
    x_ptr,  # [tokens, K]
    norm_ptr,  # [K]
    router_ptr,  # [experts, K]
    bias_ptr,  # [experts], or None
    normed_ptr,  # [tokens, K]
    logits_ptr,  # [tokens, experts] float32
    counts_ptr,  # [experts] that become zeros, or None
    experts,
    x_stride,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize a token and multiply ROWS rows of the router by it.

    The grid is `[experts / ROWS, tokens]`. A token's first program stores the normalized token.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    token = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
    inside = column < K
    here = (row < experts)[:, None] & inside
    router = tl.load(router_ptr + row[:, None] * K + column, mask=here, other=0.0)
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if counts_ptr is not None:
        clear_counts(counts_ptr, experts, BINS)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    normed = (x * inverse_rms(x, eps, K, 1)[:, None] * norm).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + token * K + column, normed, mask=inside & (tl.program_id(0) == 0))
    logits = tl.sum(router.to(tl.float32) * normed.to(tl.float32), 1)  # [ROWS]
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + row, mask=row < experts, other=0.0).to(tl.float32)
    tl.store(logits_ptr + token * experts + row, logits, mask=row < experts)


@triton.jit
def _quantized(inputs, INTERPRETED: tl.constexpr):
    """Quantize inputs to FP8 as `quantize` does, up to rounding; a scale is for the last dimension.

    Args:
        inputs: a tuple of blocks of columns, float32.

    Returns:
        the blocks, rounded to values of FP8, and the scales.
    """
    last: tl.constexpr = len(inputs[0].shape) - 1
    magnitude = tl.max(tl.abs(inputs[0]), last, keep_dims=True)
    for i in tl.static_range(1, len(inputs)):
        magnitude = tl.maximum(magnitude, tl.max(tl.abs(inputs[i]), last, keep_dims=True))
    scale = scale_of(magnitude, FP8_LARGEST)
    inverse = tl.div_rn(1.0, scale)
    rounded = ()
    for i in tl.static_range(len(inputs)):
        x = inputs[i] * inverse
        if INTERPRETED:
            x = rounded_to_fp8(tl.minimum(tl.maximum(x, -FP8_LARGEST), FP8_LARGEST))
        else:  # the conversion saturates
            x = x.to(tl.float8e4nv).to(tl.float32)
        rounded += (x,)  # type: ignore[assignment]
    return rounded, scale


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [tokens, K]
    weight_ptr,  # [experts, 2 * features, K]
    scales_ptr,  # [experts, 2 * features] of weights in FP8, or None
    bias_ptr,  # [experts, 2 * features], or None
    out_ptr,  # [pairs, features]
    experts_ptr,  # [pairs]
    features,
    alpha,
    limit,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CLAMPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS gate rows and ROWS up rows of a pair's expert by its token.

    The grid is `[features / ROWS, pairs]`. The next kernel reads the pairs' experts before its
    wait, so it may start only after this kernel has waited.
    """
    pair = tl.program_id(1)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
    x_line = x_ptr + (pair // TOP_K).to(tl.int64) * K + column
    # Rows past the end repeat the last one and are not stored.
    held = tl.minimum(output, features - 1)
    line = held[:, None] * K + column  # [ROWS, BLOCK_K]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    gate_rows = weight_ptr + expert * (2 * features * K) + line
    up_rows = gate_rows + features * K
    loaded = ()  # all loads are issued before the first weight is used
    for start in tl.static_range(0, K, BLOCK_K):
        inside = start + column < K
        g = tl.load(gate_rows + start, mask=inside, other=0.0, eviction_policy="evict_first")
        u = tl.load(up_rows + start, mask=inside, other=0.0, eviction_policy="evict_first")
        loaded += (g, u)  # type: ignore[assignment]
    inputs = ()
    for start in tl.static_range(0, K, BLOCK_K):
        x = tl.load(x_line + start, mask=start + column < K, other=0.0).to(tl.float32)
        inputs += (x,)  # type: ignore[assignment]
    if scales_ptr is not None:
        inputs, x_scale = _quantized(inputs, INTERPRETED)
    gates = tl.zeros((ROWS, BLOCK_K), tl.float32)
    ups = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        x = inputs[start // BLOCK_K]
        gates += loaded[start // BLOCK_K * 2].to(tl.float32) * x
        ups += loaded[start // BLOCK_K * 2 + 1].to(tl.float32) * x
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if scales_ptr is not None:
        scales = scales_ptr + expert * (2 * features) + held
        gate *= tl.reshape(x_scale, (1,)) * tl.load(scales)
        up *= tl.reshape(x_scale, (1,)) * tl.load(scales + features)
    if bias_ptr is not None:
        bias = bias_ptr + expert * (2 * features) + held
        gate += tl.load(bias).to(tl.float32)
        up += tl.load(bias + features).to(tl.float32)
    out = activated(gate, up, alpha, limit, CLAMPED).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair.to(tl.int64) * features + output, out, mask=output < features)


@triton.jit
def _down_kernel(
    x_ptr,  # [pairs, K]
    weight_ptr,  # [experts, features, K]
    scales_ptr,  # [experts, features] of weights in FP8, or None
    bias_ptr,  # [experts, features], or None
    residual_ptr,  # [tokens, features]
    experts_ptr,  # [pairs]
    weights_ptr,  # [pairs] float32
    features,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS rows of each of a token's experts, and add the weighted sum to the residual.

    The grid is `[features / ROWS, tokens]`. The previous kernel starts this one when `experts_ptr`
    and `weights_ptr` are complete, so the weights are loaded before the wait.
    """
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK_K)[None, None, :]  # [1, 1, BLOCK_K]
    pair = token * TOP_K + slot  # [SLOTS]
    used = slot < TOP_K
    expert = tl.load(experts_ptr + pair, mask=used, other=0).to(tl.int64)
    share = tl.load(weights_ptr + pair, mask=used, other=0.0)
    held = tl.minimum(output, features - 1)
    line = expert[None, :] * features + held[:, None]  # [ROWS, SLOTS]
    rows = weight_ptr + line[:, :, None] * K + column  # [ROWS, SLOTS, BLOCK_K]
    here = used[None, :, None]
    loaded = ()
    for start in tl.static_range(0, K, BLOCK_K):
        mask = here & (start + column < K)
        w = tl.load(rows + start, mask=mask, other=0.0, eviction_policy="evict_first")
        loaded += (w,)  # type: ignore[assignment]
    if scales_ptr is not None:
        scales = tl.load(scales_ptr + line, mask=used[None, :], other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + line, mask=used[None, :], other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x_line = x_ptr + pair[None, :, None] * K + column
    inputs = ()
    for start in tl.static_range(0, K, BLOCK_K):
        mask = here & (start + column < K)
        x = tl.load(x_line + start, mask=mask, other=0.0).to(tl.float32)
        inputs += (x,)  # type: ignore[assignment]
    if scales_ptr is not None:
        inputs, x_scale = _quantized(inputs, INTERPRETED)
    products = tl.zeros((ROWS, SLOTS, BLOCK_K), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        products += loaded[start // BLOCK_K].to(tl.float32) * inputs[start // BLOCK_K]
    parts = tl.sum(products, 2)  # [ROWS, SLOTS]
    if scales_ptr is not None:
        parts *= tl.reshape(x_scale, (1, SLOTS)) * scales
    if bias_ptr is not None:
        parts += bias
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    total = tl.sum(parts.to(dtype).to(tl.float32) * share[None, :], 1)  # [ROWS]
    mask = output < features
    residual = tl.load(residual_ptr + token * features + output, mask=mask, other=0.0)
    total = total.to(dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(residual_ptr + token * features + output, total.to(dtype), mask=mask)


def scores(
    x: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    bias: Tensor | None,
    counts: Tensor | None = None,
    *,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the normalized tokens, and the logits of the router in float32.

    There are at most MAX_SCORED_TOKENS tokens. `counts`, `[experts]`, become zeros.
    """
    (tokens, k), experts = x.shape, router.shape[0]
    normed = x.new_empty((tokens, k))
    logits = x.new_empty((tokens, experts), dtype=torch.float32)
    rows = rows or next(rows for most, rows in SCORED_ROWS.items() if tokens <= most)
    pdl = dependent_launch(x.device)
    _scores_kernel[(cdiv(experts, rows), tokens)](
        x,
        norm,
        router,
        bias,
        normed,
        logits,
        counts,
        experts,
        x.stride(0),
        eps,
        K=k,
        BLOCK_K=next_power_of_2(k),
        ROWS=rows,
        BINS=next_power_of_2(experts),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return normed, logits


def is_vector_weight(weight: LinearWeight) -> TypeGuard[Tensor | ScaledWeight]:
    """Tell whether the kernels of this module multiply by `weight`."""
    if isinstance(weight, ScaledWeight):
        channels = weight.block == (1, weight.shape[1]) and weight.input_scale is None
        return channels and weight.values.dtype == torch.float8_e4m3fn
    return isinstance(weight, Tensor)


def vector_gate_up(
    x: Tensor,
    weight: Tensor | ScaledWeight,
    num_experts: int,
    experts: Tensor,
    bias: Tensor | None,
    clamp: ClampedSwiglu | None,
    *,
    config: RowsConfig | None = None,
) -> Tensor:
    """Return `silu(gate) * up` of each pair, `[pairs, intermediate]`, in the order of pairs."""
    values, scales = _parts(weight, num_experts)
    (tokens, top_k), features = experts.shape, values.shape[1] // 2
    out = x.new_empty((tokens * top_k, features))
    config = config or vector_configs(top_k, x.shape[1], values.element_size())[0]
    pdl = dependent_launch(x.device)
    _gate_up_kernel[(cdiv(features, config.rows), tokens * top_k)](
        x,
        values,
        scales,
        bias,
        out,
        experts,
        features,
        *clamp_numbers(clamp),
        K=values.shape[2],
        TOP_K=top_k,
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        CLAMPED=clamp is not None,
        INTERPRETED=x.device.type == "cpu",
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out


def vector_down_add(
    x: Tensor,
    weight: Tensor | ScaledWeight,
    num_experts: int,
    routes: Routes,
    bias: Tensor | None,
    residual: Tensor,
    *,
    config: RowsConfig | None = None,
) -> Tensor:
    """Add the weighted experts of each token to `residual`; `x` is by pair."""
    values, scales = _parts(weight, num_experts)
    (tokens, top_k), (_, features, k) = routes.experts.shape, values.shape
    config = config or vector_configs(top_k, k, values.element_size())[1]
    pdl = dependent_launch(x.device)
    _down_kernel[(cdiv(features, config.rows), tokens)](
        x,
        values,
        scales,
        bias,
        residual,
        routes.experts,
        routes.weights,
        features,
        K=k,
        TOP_K=top_k,
        SLOTS=next_power_of_2(top_k),
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        INTERPRETED=x.device.type == "cpu",
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return residual


def _parts(weight: Tensor | ScaledWeight, num_experts: int) -> tuple[Tensor, Tensor | None]:
    """Return the values `[experts, rows, columns]` of a weight, and the scales of its rows."""
    if isinstance(weight, Tensor):
        return weight, None
    return weight.values.unflatten(0, (num_experts, -1)), weight.scales
