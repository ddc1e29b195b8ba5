"""The products of `vector` with weights in MXFP4.

Bytes are seen as `[rows, pieces, PIECE]`: the low halves of the bytes of a piece are columns with
one scale, and so are the high halves. The bits of a number of E2M1 become the sign, the lowest bits
of the exponent and the highest bit of the mantissa of a float32, which is 2**126 times as small.
"""

from __future__ import annotations

from typing import TypeGuard

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ClampedSwiglu, Routes
from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight, LinearWeight
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.experts.config import RowsConfig
from pagewire.worker.ops.triton.experts.tile import activated, clamp_numbers

PIECE = tl.constexpr(32)  # columns of a scale
PER_RUN = tl.constexpr(RUN // 64)  # pieces of a run
GATE_UP = RowsConfig(rows=2, block_k=1024, warps=2)
DOWN = RowsConfig(rows=2, block_k=1024, warps=4)
# Factors of inputs and of sums, together 2**126: no product is too small or too large.
FIRST_FACTOR, LAST_FACTOR = tl.constexpr(2.0**64), tl.constexpr(2.0**62)


@triton.jit
def _products(
    both,  # [ROWS, PIECES, PIECE] uint8
    low_scale,  # [ROWS, PIECES] uint8
    high_scale,
    low,  # [1, PIECES, PIECE] inputs of the low halves, float32
    high,
):
    """Return the sums of the products of pieces, `[ROWS, PIECES]`."""
    bits = both.to(tl.int32)
    number = (bits << 28 & -0x80000000 | bits << 22 & 0x01C00000).to(tl.float32, bitcast=True)
    sums = tl.sum(number * (low * FIRST_FACTOR), 2) * LAST_FACTOR * _power(low_scale)
    number = (bits << 24 & -0x80000000 | bits << 18 & 0x01C00000).to(tl.float32, bitcast=True)
    return sums + tl.sum(number * (high * FIRST_FACTOR), 2) * LAST_FACTOR * _power(high_scale)


@triton.jit
def _power(scale):
    """Return the power of two that a scale stands for."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _packed_gate_up_kernel(
    x_ptr,  # [tokens, K]
    values_ptr,  # [experts, 2 * features, runs * RUN / 2]
    scales_ptr,  # [experts, 2 * features, groups]
    bias_ptr,  # [experts, 2 * features], or None
    out_ptr,  # [pairs, features]
    experts_ptr,  # [pairs]
    features,
    alpha,
    limit,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    CLAMPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS gate rows and ROWS up rows of a pair's expert by its token, PIECES pieces at a
    time. The grid and the order of kernels are those of `vector`."""
    ALL: tl.constexpr = (K + 2 * PER_RUN * PIECE - 1) // (2 * PER_RUN * PIECE) * PER_RUN
    GROUPS: tl.constexpr = (K + PIECE - 1) // PIECE
    pair = tl.program_id(1)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    held = tl.minimum(output, features - 1)
    piece = tl.arange(0, PIECES)[None, :]  # [1, PIECES]
    place = tl.arange(0, PIECE)[None, None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    row = (expert * (2 * features) + held)[:, None]  # [ROWS, 1]
    gates = tl.zeros((ROWS, PIECES), tl.float32)
    ups = tl.zeros((ROWS, PIECES), tl.float32)
    for start in tl.static_range(0, ALL, PIECES):
        at = start + piece
        # The group of the low halves; the group of the high halves is PER_RUN groups later.
        group = at // PER_RUN * (2 * PER_RUN) + at % PER_RUN
        here = at < ALL
        values = values_ptr + (row * (ALL * PIECE) + at * PIECE)[:, :, None] + place
        inside = here[:, :, None]
        g = tl.load(values, mask=inside, other=0, eviction_policy="evict_first")
        further = features.to(tl.int64) * (ALL * PIECE)
        u = tl.load(values + further, mask=inside, other=0, eviction_policy="evict_first")
        scales = scales_ptr + row * GROUPS + group
        more = group + PER_RUN < GROUPS
        g_low = tl.load(scales, mask=group < GROUPS, other=0)
        g_high = tl.load(scales + PER_RUN, mask=more, other=0)
        scales += features.to(tl.int64) * GROUPS
        u_low = tl.load(scales, mask=group < GROUPS, other=0)
        u_high = tl.load(scales + PER_RUN, mask=more, other=0)
        column = (group * PIECE)[:, :, None] + place
        x = x_ptr + (pair // TOP_K).to(tl.int64) * K + column
        low = tl.load(x, mask=column < K, other=0.0).to(tl.float32)
        x += PER_RUN * PIECE
        high = tl.load(x, mask=column + PER_RUN * PIECE < K, other=0.0).to(tl.float32)
        gates += _products(g, g_low, g_high, low, high)
        ups += _products(u, u_low, u_high, low, high)
    gate, up = tl.sum(gates, 1), tl.sum(ups, 1)
    if bias_ptr is not None:
        bias = bias_ptr + expert * (2 * features) + held
        gate += tl.load(bias).to(tl.float32)
        up += tl.load(bias + features).to(tl.float32)
    out = activated(gate, up, alpha, limit, CLAMPED).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair.to(tl.int64) * features + output, out, mask=output < features)


@triton.jit
def _packed_down_kernel(
    x_ptr,  # [pairs, K]
    values_ptr,  # [experts, features, runs * RUN / 2]
    scales_ptr,  # [experts, features, groups]
    bias_ptr,  # [experts, features], or None
    residual_ptr,  # [tokens, features]
    experts_ptr,  # [pairs]
    weights_ptr,  # [pairs] float32
    features,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS rows of each of a token's experts, and add the weighted sum to the residual.

    The pieces of a program are those of SLOTS experts, PIECES of each at a time.
    """
    ALL: tl.constexpr = (K + 2 * PER_RUN * PIECE - 1) // (2 * PER_RUN * PIECE) * PER_RUN
    GROUPS: tl.constexpr = (K + PIECE - 1) // PIECE
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    held = tl.minimum(output, features - 1)
    index = tl.arange(0, SLOTS * PIECES)[None, :]  # [1, SLOTS * PIECES]
    slot, piece = index // PIECES, index % PIECES
    place = tl.arange(0, PIECE)[None, None, :]
    used = slot < TOP_K
    pair = token * TOP_K + slot
    expert = tl.load(experts_ptr + pair, mask=used, other=0).to(tl.int64)
    row = expert * features + held[:, None]  # [ROWS, SLOTS * PIECES]
    loaded = ()
    for start in tl.static_range(0, ALL, PIECES):
        at = start + piece
        values = values_ptr + (row * (ALL * PIECE) + at * PIECE)[:, :, None] + place
        inside = (used & (at < ALL))[:, :, None]
        w = tl.load(values, mask=inside, other=0, eviction_policy="evict_first")
        loaded += (w,)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    products = tl.zeros((ROWS, SLOTS * PIECES), tl.float32)
    for start in tl.static_range(0, ALL, PIECES):
        at = start + piece
        group = at // PER_RUN * (2 * PER_RUN) + at % PER_RUN
        scales = scales_ptr + row * GROUPS + group
        more = group + PER_RUN < GROUPS
        low_scale = tl.load(scales, mask=used & (group < GROUPS), other=0)
        high_scale = tl.load(scales + PER_RUN, mask=used & more, other=0)
        column = (group * PIECE)[:, :, None] + place
        x = x_ptr + (pair * K)[:, :, None] + column
        here = used[:, :, None]
        low = tl.load(x, mask=here & (column < K), other=0.0).to(tl.float32)
        x += PER_RUN * PIECE
        behind = column + PER_RUN * PIECE
        high = tl.load(x, mask=here & (behind < K), other=0.0).to(tl.float32)
        products += _products(loaded[start // PIECES], low_scale, high_scale, low, high)
    parts = tl.sum(tl.reshape(products, (ROWS, SLOTS, PIECES)), 2)  # [ROWS, SLOTS]
    slots = tl.arange(0, SLOTS)
    pairs = token * TOP_K + slots
    share = tl.load(weights_ptr + pairs, mask=slots < TOP_K, other=0.0)
    if bias_ptr is not None:
        chosen = tl.load(experts_ptr + pairs, mask=slots < TOP_K, other=0).to(tl.int64)
        bias = bias_ptr + chosen[None, :] * features + held[:, None]
        parts += tl.load(bias).to(tl.float32)
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    total = tl.sum(parts.to(dtype).to(tl.float32) * share[None, :], 1)  # [ROWS]
    mask = output < features
    residual = tl.load(residual_ptr + token * features + output, mask=mask, other=0.0)
    total = total.to(dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(residual_ptr + token * features + output, total.to(dtype), mask=mask)


def is_float4(weight: LinearWeight) -> TypeGuard[GroupedWeight]:
    """Tell whether the kernels of this module multiply by `weight`."""
    return (
        isinstance(weight, GroupedWeight)
        and weight.float4
        and weight.group == PIECE.value
        and weight.columns % PIECE.value == 0
    )


def packed_gate_up(
    x: Tensor,
    weight: GroupedWeight,
    num_experts: int,
    experts: Tensor,
    bias: Tensor | None,
    clamp: ClampedSwiglu | None,
    *,
    config: RowsConfig = GATE_UP,
) -> Tensor:
    """Return the activations of each pair, `[pairs, intermediate]`, in the order of pairs."""
    (tokens, top_k), features = experts.shape, weight.shape[0] // num_experts // 2
    out = x.new_empty((tokens * top_k, features))
    pdl = dependent_launch(x.device)
    _packed_gate_up_kernel[(cdiv(features, config.rows), tokens * top_k)](
        x,
        weight.values,
        weight.scales,
        bias,
        out,
        experts,
        features,
        *clamp_numbers(clamp),
        K=weight.columns,
        TOP_K=top_k,
        ROWS=config.rows,
        PIECES=config.block_k // PIECE.value // 2,
        CLAMPED=clamp is not None,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out


def packed_down_add(
    x: Tensor,
    weight: GroupedWeight,
    num_experts: int,
    routes: Routes,
    bias: Tensor | None,
    residual: Tensor,
    *,
    config: RowsConfig = DOWN,
) -> Tensor:
    """Add the weighted experts of each token to `residual`; `x` is by pair."""
    (tokens, top_k), features = routes.experts.shape, weight.shape[0] // num_experts
    pdl = dependent_launch(x.device)
    _packed_down_kernel[(cdiv(features, config.rows), tokens)](
        x,
        weight.values,
        weight.scales,
        bias,
        residual,
        routes.experts,
        routes.weights,
        features,
        K=weight.columns,
        TOP_K=top_k,
        SLOTS=next_power_of_2(top_k),
        ROWS=config.rows,
        PIECES=config.block_k // PIECE.value // 2,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return residual
