"""The grouped GEMM of packed weights with plain inputs: integers in groups, or MXFP4.

Weights are widened in registers. Tiles have a multiple of 64 of their rows, as in
`ops.triton.quantized`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ClampedSwiglu, ExpertRows
from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.experts.config import quantized_config
from pagewire.worker.ops.triton.experts.tile import finish_tile
from pagewire.worker.ops.triton.quantized.widen import widened_at


@triton.jit
def _add_run(
    acc,  # [ROWS, TILE]
    values,  # [ROWS, WIDTH] pointers of this run
    scales,  # [ROWS, 1] pointers of the rows
    zeros,
    x_low,  # [TILE, WIDTH]
    x_high,  # [TILE, WIDTH], of the run's second half; read with four bits only
    column,  # [1, WIDTH]
    K,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZEROS: tl.constexpr,
    FLOAT4: tl.constexpr,
):
    """Add the products of one run of columns."""
    dtype: tl.constexpr = x_low.dtype
    if BITS == 4:
        both = tl.load(values)
        w = widened_at(
            both & 15, scales, zeros, column, groups, dtype, GROUP, WIDTH, 8.0, ZEROS, FLOAT4
        )
        acc = tl.dot(w, x_low.T, acc, input_precision="ieee")
        w = widened_at(
            both >> 4, scales, zeros, column + WIDTH, groups, dtype, GROUP, WIDTH, 8.0, ZEROS,
            FLOAT4,
        )  # fmt: skip
        return tl.dot(w, x_high.T, acc, input_precision="ieee")
    whole = tl.load(values, mask=column < K, other=0)
    w = widened_at(whole, scales, zeros, column, groups, dtype, GROUP, WIDTH, 128.0, ZEROS, FLOAT4)
    return tl.dot(w, x_low.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["tiles"])
def _packed_kernel(
    x_ptr,  # [tokens, K] with GATED, else [pairs, K]
    values_ptr,  # [experts * features, WORDS], with GATED [experts * 2 * features, WORDS]
    scales_ptr,  # as many rows, [.., groups]
    zeros_ptr,  # as `scales_ptr`, read with ZEROS only
    bias_ptr,  # [experts, features], with GATED [experts, 2 * features], or None
    out_ptr,  # [pairs, features]
    pairs_ptr,  # [pairs]
    starts_ptr,  # [experts + 1]
    tiles_ptr,  # [2, tiles]
    tiles,
    features,
    groups,
    x_stride,
    alpha,
    limit,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    ZEROS: tl.constexpr,
    FLOAT4: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS weight rows of one expert by a tile of its rows, a run of columns at a time.

    The grid is `[tiles, features / ROWS]`. GATED: the input is by token, gate and up projections
    are computed side by side, and the output is `silu(gate) * up` or that of `ClampedSwiglu`.
    """
    WIDTH: tl.constexpr = RUN // 2 if BITS == 4 else RUN
    LINE: tl.constexpr = (K + RUN - 1) // RUN * WIDTH if BITS == 4 else K
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(tiles_ptr + tl.program_id(0))
    if expert < 0:
        return
    row = tl.load(tiles_ptr + tiles + tl.program_id(0)) + tl.arange(0, TILE)  # [TILE]
    inside = row < tl.load(starts_ptr + expert + 1)
    source = row
    if GATED:
        source = tl.load(pairs_ptr + row, mask=inside, other=0) // TOP_K
    output = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    # Weight rows past the end repeat the last one and are not stored.
    first = expert.to(tl.int64) * ((1 + GATED) * features)
    held = first + tl.minimum(output, features - 1)[:, None]  # [ROWS, 1]
    place = tl.arange(0, WIDTH)[None, :]
    values = values_ptr + held * LINE + place  # [ROWS, WIDTH]
    scales, zeros = scales_ptr + held * groups, zeros_ptr + held * groups  # [ROWS, 1]
    x_tile = x_ptr + source.to(tl.int64)[:, None] * x_stride + place  # [TILE, WIDTH]
    here = inside[:, None]

    acc = tl.zeros((ROWS, TILE), tl.float32)
    up = acc
    for start in tl.range(0, K, RUN, num_stages=STAGES):
        column = start + place
        x_low = tl.load(x_tile + start, mask=here & (column < K), other=0.0)
        x_high = x_low
        if BITS == 4:
            x_high = tl.load(x_tile + start + WIDTH, mask=here & (column + WIDTH < K), other=0.0)
        at = values + start // (RUN // WIDTH)
        acc = _add_run(
            acc, at, scales, zeros, x_low, x_high, column, K, groups,
            BITS, GROUP, WIDTH, ZEROS, FLOAT4,
        )  # fmt: skip
        if GATED:
            up = _add_run(
                up, at + features * LINE, scales + features * groups, zeros + features * groups,
                x_low, x_high, column, K, groups, BITS, GROUP, WIDTH, ZEROS, FLOAT4,
            )  # fmt: skip
    finish_tile(
        out_ptr, bias_ptr, acc, up, expert, row, inside, output, features, alpha, limit,
        GATED, CLAMPED,
    )  # fmt: skip


def packed_product(
    x: Tensor,
    weight: GroupedWeight,
    out: Tensor,
    rows: ExpertRows,
    bias: Tensor | None,
    clamp: ClampedSwiglu | None,
    *,
    gated: bool,
) -> Tensor:
    """Write the GEMM of `rows` to `out`. The input is by token if `gated`, else by row."""
    assert weight.order is None  # refused when config.json is read
    features = out.shape[1]
    config = quantized_config(rows.tile, x.element_size())
    tiles = rows.tiles.shape[1]
    pdl = dependent_launch(x.device)
    _packed_kernel[(tiles, cdiv(features, config.rows))](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        bias,
        out,
        rows.pairs,
        rows.starts,
        rows.tiles,
        tiles,
        features,
        weight.scales.shape[1],
        x.stride(0),
        0.0 if clamp is None else clamp.alpha,
        0.0 if clamp is None else clamp.limit,
        K=weight.columns,
        TOP_K=rows.top_k,
        BITS=weight.bits,
        GROUP=weight.group,
        RUN=RUN,
        ROWS=config.rows,
        TILE=config.tile,
        STAGES=config.stages,
        ZEROS=weight.zeros is not None,
        FLOAT4=weight.float4,
        GATED=gated,
        CLAMPED=clamp is not None,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out
