"""The grouped GEMM of weights and inputs in eight bits, FP8 or INT8.

Sums of FP8 are added up in float32 after BLOCK_K products, as in `ops.triton.quantized`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ClampedSwiglu, ExpertRows
from pagewire.worker.ops.contract.quantized import QuantizedInput, ScaledWeight
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.experts.config import GemmConfig, quantized_config
from pagewire.worker.ops.triton.experts.tile import clamp_numbers, finish_tile, place_of

BLOCK_K = 128


@triton.jit
def _add_block(
    acc,  # [ROWS, TILE]
    weight,  # [ROWS, BLOCK_K] pointers
    scale,  # [ROWS, 1] pointers, read with BLOCKED only
    x,  # [TILE, BLOCK_K]
    x_scale,  # [1, TILE], read with BLOCKED only
    inside,  # [1, BLOCK_K]
    EVEN: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    """Add the products of BLOCK_K columns."""
    w = tl.load(weight) if EVEN else tl.load(weight, mask=inside, other=0.0)
    if INTEGER:
        return tl.dot(w, x.T, acc, out_dtype=tl.int32)
    if BLOCKED:
        return acc + tl.dot(w, x.T) * (tl.load(scale) * x_scale)
    return acc + tl.dot(w, x.T)


# If one scale is for all tokens, the stride is 0 or 1, depending on the number of tokens.
@triton.jit(do_not_specialize=["tiles", "x_scales_stride"])
def _scaled_kernel(
    x_ptr,  # [tokens, K] with GATED, else [pairs, K]
    x_scales_ptr,  # [rows of `x_ptr`, groups]
    weight_ptr,  # [experts * features, K], with GATED [experts * 2 * features, K]
    weight_scales_ptr,  # [rows / BLOCK_ROWS, K / BLOCK_K] if BLOCKED, else [rows]
    bias_ptr,  # [experts, features], with GATED [experts, 2 * features], or None
    out_ptr,  # [pairs, features]
    pairs_ptr,  # [pairs]
    starts_ptr,  # [experts + 1]
    tiles_ptr,  # [2, tiles]
    tiles,
    features,
    x_scales_stride,
    weight_scales_stride,
    alpha,
    limit,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    GROUPED: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCKED: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS weight rows of one expert by a tile of its rows.

    The grid is `[tiles * features / ROWS]` in the order of `place_of`. GATED is as in the GEMM of
    packed weights.
    """
    EVEN: tl.constexpr = K % BLOCK_K == 0
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, block = place_of(tl.program_id(0), tiles, tl.cdiv(features, ROWS), GROUPED)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    row = tl.load(tiles_ptr + tiles + tile) + tl.arange(0, TILE)  # [TILE]
    inside = row < tl.load(starts_ptr + expert + 1)
    source = row
    if GATED:
        source = tl.load(pairs_ptr + row, mask=inside, other=0) // TOP_K
    output = block * ROWS + tl.arange(0, ROWS)  # [ROWS]
    # Weight rows past the end repeat the last one and are not stored.
    first = expert.to(tl.int64) * ((1 + GATED) * features)
    held = first + tl.minimum(output, features - 1)[:, None]  # [ROWS, 1]
    column = tl.arange(0, BLOCK_K)[None, :]
    weight = weight_ptr + held * K + column  # [ROWS, BLOCK_K]
    scales = weight_scales_ptr + held // BLOCK_ROWS * weight_scales_stride  # [ROWS, 1]
    # `features` is a multiple of BLOCK_ROWS, because no block crosses two projections.
    up_scales = scales + features // BLOCK_ROWS * weight_scales_stride
    x_tile = x_ptr + source.to(tl.int64)[:, None] * K + column  # [TILE, BLOCK_K]
    x_scales = x_scales_ptr + source.to(tl.int64)[None, :] * x_scales_stride  # [1, TILE]
    here, present = inside[:, None], inside[None, :]

    acc = tl.zeros((ROWS, TILE), tl.int32 if INTEGER else tl.float32)
    up = acc
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        part = start // BLOCK_K
        within = start + column < K
        if EVEN:
            x = tl.load(x_tile + start, mask=here, other=0.0)
        else:
            x = tl.load(x_tile + start, mask=here & within, other=0.0)
        x_scale = acc
        if BLOCKED:
            x_scale = tl.load(x_scales + part, mask=present, other=0.0)
        acc = _add_block(
            acc, weight + start, scales + part, x, x_scale, within, EVEN, INTEGER, BLOCKED
        )
        if GATED:
            up = _add_block(
                up, weight + features * K + start, up_scales + part, x, x_scale, within,
                EVEN, INTEGER, BLOCKED,
            )  # fmt: skip
    out = acc.to(tl.float32)
    values = up.to(tl.float32)
    if not BLOCKED:
        x_scale = tl.load(x_scales, mask=present, other=0.0)
        out *= x_scale * tl.load(scales)
        if GATED:
            values *= x_scale * tl.load(up_scales)
    finish_tile(
        out_ptr, bias_ptr, out, values, expert, row, inside, output, features, alpha, limit,
        GATED, CLAMPED,
    )  # fmt: skip


def multiply_scaled(
    x: QuantizedInput,
    weight: ScaledWeight,
    out: Tensor,
    rows: ExpertRows,
    bias: Tensor | None,
    clamp: ClampedSwiglu | None,
    config: GemmConfig | None,
    *,
    gated: bool,
) -> Tensor:
    """Write the GEMM of `rows` to `out`. The input is by token if `gated`, else by row."""
    features, k = out.shape[1], weight.shape[1]
    blocked = weight.block[1] < k
    assert not blocked or weight.block[1] == BLOCK_K
    assert features % weight.block[0] == 0
    config = config or quantized_config(rows.tile, x.values.element_size())
    tiles = rows.tiles.shape[1]
    pdl = dependent_launch(out.device)
    _scaled_kernel[(tiles * cdiv(features, config.rows),)](
        x.values,
        x.scales,
        weight.values,
        weight.scales,
        bias,
        out,
        rows.pairs,
        rows.starts,
        rows.tiles,
        tiles,
        features,
        x.scales.stride(0),
        weight.scales.stride(0),
        *clamp_numbers(clamp),
        K=k,
        TOP_K=rows.top_k,
        ROWS=config.rows,
        TILE=config.tile,
        BLOCK_K=BLOCK_K,
        BLOCK_ROWS=weight.block[0],
        STAGES=config.stages,
        GROUPED=config.group,
        INTEGER=weight.values.dtype == torch.int8,
        BLOCKED=blocked,
        GATED=gated,
        CLAMPED=clamp is not None,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out
