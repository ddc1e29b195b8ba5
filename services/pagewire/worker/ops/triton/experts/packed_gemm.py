"""The grouped GEMM of packed weights with plain inputs: integers in groups, or MXFP4.

Weights are widened in registers. Tiles have a multiple of 64 weight rows, as in
`ops.triton.quantized`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ClampedSwiglu, ExpertRows
from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.experts.config import GemmConfig, quantized_config
from pagewire.worker.ops.triton.experts.tile import clamp_numbers, finish_tile, place_of
from pagewire.worker.ops.triton.quantized.widen import widened, widened_at


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


@triton.jit
def _float4_scales(scales, column, groups, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Load the scales of a run: of the columns in low halves of bytes, and of those in high ones,
    `[ROWS, WIDTH / GROUP]` each."""
    at = column // GROUP + tl.arange(0, WIDTH // GROUP)[None, :]
    low = tl.load(scales + tl.minimum(at, groups - 1))
    return low, tl.load(scales + tl.minimum(at + WIDTH // GROUP, groups - 1))


@triton.jit
def _float4(both, scale, HIGH: tl.constexpr, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the low or high halves of `both [ROWS, GROUPS, GROUP]` as weights of E2M1.

    With ASSEMBLY, the bits of a number become the lowest bits of the exponent, the highest bit of
    the mantissa and the sign of a bfloat16. This is 2**126 times too small; the product that
    corrects it is exact.
    """
    if ASSEMBLY:
        power = (scale.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)[:, :, None]
        magnitude: tl.constexpr = "2" if HIGH else "6"
        sign: tl.constexpr = "8" if HIGH else "12"
        spread: tl.constexpr = "prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342; "
        first: tl.constexpr = (
            "shl.b32 t, a, " + magnitude + "; shl.b32 a, a, " + sign + "; "
            "and.b32 t, t, 0x01C001C0; lop3.b32 a, a, 0x80008000, t, 0xEA; "
        )
        second: tl.constexpr = (
            "shl.b32 t, b, " + magnitude + "; shl.b32 b, b, " + sign + "; "
            "and.b32 t, t, 0x01C001C0; lop3.b32 b, b, 0x80008000, t, 0xEA; "
        )
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, t, f; mov.b32 f, 0x7E807E80; " + spread + first + second
            + "mul.bf16x2 a, a, f; mul.bf16x2 b, b, f; "
            + "mul.bf16x2 $0, a, $3; mul.bf16x2 $1, b, $4; }",
            "=r,=r,r,r,r",
            [both, power],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )  # fmt: skip
    half = both >> 4 if HIGH else both & 15
    return widened(half, scale[:, :, None], scale, dtype, 0.0, False, True)


@triton.jit
def _add_float4(
    acc,  # [ROWS, TILE]
    values,  # [ROWS, WIDTH] pointers of this run
    low_scale,  # from `_float4_scales`
    high_scale,
    x_low,  # [TILE, WIDTH]
    x_high,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Add the products of one run of MXFP4."""
    ROWS: tl.constexpr = values.shape[0]
    dtype: tl.constexpr = x_low.dtype
    both = tl.reshape(tl.load(values), (ROWS, WIDTH // GROUP, GROUP))
    w = tl.reshape(_float4(both, low_scale, False, dtype, ASSEMBLY), (ROWS, WIDTH))
    acc = tl.dot(w, x_low.T, acc, input_precision="ieee")
    w = tl.reshape(_float4(both, high_scale, True, dtype, ASSEMBLY), (ROWS, WIDTH))
    return tl.dot(w, x_high.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["tiles"])
def _packed_kernel(
    x_ptr,  # [tokens, K] with GATED, else [pairs, K]
    values_ptr,  # [experts * features, WORDS], with GATED [experts * 2 * features, WORDS]
    scales_ptr,  # [rows of `values_ptr`, groups]
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
    GROUPED: tl.constexpr,
    ZEROS: tl.constexpr,
    FLOAT4: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS weight rows of one expert by a tile of its rows, a run of columns at a time.

    The grid is `[tiles * features / ROWS]` in the order of `place_of`. GATED: the input is by
    token, gate and up projections are computed side by side, and the output is `silu(gate) * up` or
    that of `ClampedSwiglu`.
    """
    WIDTH: tl.constexpr = RUN // 2 if BITS == 4 else RUN
    LINE: tl.constexpr = (K + RUN - 1) // RUN * WIDTH if BITS == 4 else K
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
    place = tl.arange(0, WIDTH)[None, :]
    values = values_ptr + held * LINE + place  # [ROWS, WIDTH]
    scales, zeros = scales_ptr + held * groups, zeros_ptr + held * groups  # [ROWS, 1]
    x_tile = x_ptr + source.to(tl.int64)[:, None] * x_stride + place  # [TILE, WIDTH]
    here = inside[:, None]

    acc = tl.zeros((ROWS, TILE), tl.float32)
    up = acc
    up_scales = scales + features * groups
    if FLOAT4:
        low, high = _float4_scales(scales, 0, groups, GROUP, WIDTH)
        if GATED:
            up_low, up_high = _float4_scales(up_scales, 0, groups, GROUP, WIDTH)
    for start in tl.range(0, K, RUN, num_stages=STAGES):
        column = start + place
        x_low = tl.load(x_tile + start, mask=here & (column < K), other=0.0)
        x_high = x_low
        if BITS == 4:
            x_high = tl.load(x_tile + start + WIDTH, mask=here & (column + WIDTH < K), other=0.0)
        at = values + start // (RUN // WIDTH)
        if FLOAT4:
            # Loads of single bytes are not asynchronous, so the next run's loads are issued here.
            next_low, next_high = _float4_scales(scales, start + RUN, groups, GROUP, WIDTH)
            acc = _add_float4(acc, at, low, high, x_low, x_high, GROUP, WIDTH, ASSEMBLY)
            low, high = next_low, next_high
            if GATED:
                next_low, next_high = _float4_scales(up_scales, start + RUN, groups, GROUP, WIDTH)
                up = _add_float4(
                    up, at + features * LINE, up_low, up_high, x_low, x_high, GROUP, WIDTH, ASSEMBLY
                )
                up_low, up_high = next_low, next_high
        else:
            acc = _add_run(
                acc, at, scales, zeros, x_low, x_high, column, K, groups,
                BITS, GROUP, WIDTH, ZEROS, FLOAT4,
            )  # fmt: skip
            if GATED:
                up = _add_run(
                    up, at + features * LINE, up_scales, zeros + features * groups,
                    x_low, x_high, column, K, groups, BITS, GROUP, WIDTH, ZEROS, FLOAT4,
                )  # fmt: skip
    finish_tile(
        out_ptr, bias_ptr, acc, up, expert, row, inside, output, features, alpha, limit,
        GATED, CLAMPED,
    )  # fmt: skip


def multiply_packed(
    x: Tensor,
    weight: GroupedWeight,
    out: Tensor,
    rows: ExpertRows,
    bias: Tensor | None,
    clamp: ClampedSwiglu | None,
    config: GemmConfig | None,
    *,
    gated: bool,
) -> Tensor:
    """Write the GEMM of `rows` to `out`. The input is by token if `gated`, else by row."""
    assert weight.order is None  # refused when config.json is read
    features = out.shape[1]
    config = config or quantized_config(rows.tile, x.element_size(), weight.float4)
    tiles = rows.tiles.shape[1]
    pdl = dependent_launch(x.device)
    _packed_kernel[(tiles * cdiv(features, config.rows),)](
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
        *clamp_numbers(clamp),
        K=weight.columns,
        TOP_K=rows.top_k,
        BITS=weight.bits,
        GROUP=weight.group,
        RUN=RUN,
        ROWS=config.rows,
        TILE=config.tile,
        STAGES=config.stages,
        GROUPED=config.group,
        ZEROS=weight.zeros is not None,
        FLOAT4=weight.float4,
        ASSEMBLY=x.dtype == torch.bfloat16 and x.device.type != "cpu",
        GATED=gated,
        CLAMPED=clamp is not None,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out
