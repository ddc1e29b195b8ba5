"""The kernel that quantizes inputs, alone or after a norm or an activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.quantized import LARGEST, InputFormat, QuantizedInput
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.rowwise.activation import silu_of
from pagewire.worker.ops.triton.rowwise.norm import inverse_rms_of

# Adding and subtracting this rounds a float32 below 2^22 to the nearest integer, half to even.
_ROUNDING = tl.constexpr(12582912.0)
_LEAST_NORMAL = tl.constexpr(2.0**-6)  # of E4M3; smaller values are multiples of 2^-9


@triton.jit
def scale_of(magnitude, LARGEST_VALUE: tl.constexpr):
    """Return the scale of values up to `magnitude`; 1 for zeros."""
    return tl.where(magnitude == 0, 1.0, tl.div_rn(magnitude, magnitude * 0 + LARGEST_VALUE))


@triton.jit
def divided(x, scale, INTERPRETED: tl.constexpr):
    """Return float32 `x / scale`, rounded to the nearest, for scales above 0 in the shape of `x`.

    The remainder corrects the product with the rounded inverse (Markstein, 1990, "Computation of
    elementary functions on the IBM RISC System/6000 processor"): a few operations, where the
    division takes a dozen and a branch. If `scale` is small, `x` and `scale` are multiplied by 2^64
    first, so that the inverse is finite. Triton's interpreter divides: its `fma` rounds twice.
    """
    if INTERPRETED:
        return tl.div_rn(x, scale)
    factor = tl.where(scale < 2.0**-60, 2.0**64, 1.0)
    divisor = scale * factor
    inverse = tl.div_rn(divisor * 0 + 1.0, divisor)
    x *= factor
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def rounded_to_fp8(x):
    """Return float32 values up to 448 rounded to E4M3, half to even, as float32.

    For Triton's interpreter only: its conversion to FP8 loses the carry into the exponent.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # 3 of 23 mantissa bits remain
    small = (x * 512.0 + _ROUNDING) - _ROUNDING
    return tl.where(tl.abs(x) < _LEAST_NORMAL, small / 512.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def widened(x, INTERPRETED: tl.constexpr):
    """Return `x` as float32.

    Pairs of bfloat16 take one instruction for each value. Without the pairs it is three for two,
    and float32 values that were rounded for `x` are converted one by one, by a slow instruction.
    """
    if x.dtype != tl.bfloat16 or INTERPRETED:
        return x.to(tl.float32)
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
        "=r,=r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit(do_not_specialize=["scales_row_stride", "scales_group_stride"])
def _quantize_kernel(
    x_ptr,  # [tokens, WIDTH], with GATED [tokens, 2 * WIDTH]
    norm_ptr,  # [WIDTH]
    static_ptr,  # [1]
    rows_ptr,  # [tokens, COPIES], read with COPIES > 0
    values_ptr,  # [tokens, WIDTH], or [tokens * COPIES, WIDTH]
    scales_ptr,  # as many rows, [.., groups]
    x_stride,
    scales_row_stride,
    scales_group_stride,
    eps,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    GROUP: tl.constexpr,  # 0 if a token has one scale
    COPIES: tl.constexpr,
    BY_ROW: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    STATIC: tl.constexpr,
    INTEGER: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize rows of `x`, after SiLU and a product if GATED, or after a norm if NORM.

    A program computes one token, in pieces of PIECE columns, since a width need not be a power of
    two. The grid is `[tokens]`. With COPIES the result of a token is stored to COPIES rows. BY_ROW:
    the next kernel starts only when the kernels before this one have ended.
    """
    PIECES: tl.constexpr = (WIDTH + PIECE - 1) // PIECE
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, PIECE)
    weights = tl.tuple(())
    if NORM_WEIGHT:
        for piece in tl.static_range(PIECES):
            column = piece * PIECE + inner
            weights += (tl.load(norm_ptr + column, mask=column < WIDTH, other=0.0),)
    if PDL and not BY_ROW:
        gdc_launch_dependents()
    if PDL:
        gdc_wait()
    if PDL and BY_ROW:
        gdc_launch_dependents()

    parts = tl.tuple(())  # of float32, rounded as if the result had been stored in between
    squares = tl.zeros((PIECE,), tl.float32)
    for piece in tl.static_range(PIECES):
        column = piece * PIECE + inner
        at = x_ptr + token * x_stride + column
        x = widened(tl.load(at, mask=column < WIDTH, other=0.0), INTERPRETED)
        if GATED:
            up = tl.load(at + WIDTH, mask=column < WIDTH, other=0.0)
            x = silu_of(x) * widened(up, INTERPRETED)
            x = widened(x.to(dtype), INTERPRETED)
        if NORM:
            squares += x * x
        parts += (x,)
    if NORM:
        inverse = inverse_rms_of(tl.sum(squares, 0), eps, WIDTH)
        normed = tl.tuple(())
        for piece in tl.static_range(PIECES):
            x = parts[piece] * inverse
            if NORM_WEIGHT:
                x *= widened(weights[piece], INTERPRETED)
            normed += (widened(x.to(dtype), INTERPRETED),)
        parts = normed

    if STATIC:
        scale = tl.load(static_ptr)
    elif not GROUP:
        highest = tl.abs(parts[0])
        for piece in tl.static_range(1, PIECES):
            highest = tl.maximum(highest, tl.abs(parts[piece]))
        scale = scale_of(tl.max(highest, 0), LARGEST_VALUE)
    for piece in tl.static_range(PIECES):
        x = parts[piece]
        if GROUP:
            grouped = tl.reshape(x, (PIECE // GROUP, GROUP))
            scale = scale_of(tl.max(tl.abs(grouped), 1), LARGEST_VALUE)  # [PIECE / GROUP]
            wide = tl.broadcast_to(scale[:, None], (PIECE // GROUP, GROUP))
            scaled = tl.reshape(divided(grouped, wide, INTERPRETED), (PIECE,))
        else:
            scaled = divided(x, tl.broadcast_to(scale, (PIECE,)), INTERPRETED)
        if STATIC:
            scaled = tl.minimum(tl.maximum(scaled, -LARGEST_VALUE), LARGEST_VALUE)
        if INTEGER:
            scaled = (scaled + _ROUNDING) - _ROUNDING
        elif INTERPRETED:
            scaled = rounded_to_fp8(scaled)
        values = scaled.to(values_ptr.dtype.element_ty)
        column = piece * PIECE + inner
        for copy in tl.static_range(COPIES if COPIES else 1):
            row = token
            if COPIES:
                row = tl.load(rows_ptr + token * COPIES + copy).to(tl.int64)
            tl.store(values_ptr + row * WIDTH + column, values, mask=column < WIDTH)
            if GROUP:
                group = piece * (PIECE // GROUP) + tl.arange(0, PIECE // GROUP)
                at = scales_ptr + row * scales_row_stride + group * scales_group_stride
                tl.store(at, scale, mask=group < (WIDTH + GROUP - 1) // GROUP)
            elif not STATIC and piece == 0:
                tl.store(scales_ptr + row, scale)


def quantize(x: Tensor, inputs: InputFormat) -> QuantizedInput:
    """Implement `QuantizedOps.quantize`; the rows of `x` may have any stride."""
    return _launch(x, x.shape[1], inputs)


def quantize_rows(x: Tensor, inputs: InputFormat, rows: Tensor | None, tail: int) -> QuantizedInput:
    """Return `quantize(x, inputs)` by row, as Hopper's kernel of experts reads it.

    Args:
        x: `[tokens, in_features]`.
        inputs: the type and the scales.
        rows: `[tokens, copies]` int32, the rows to store each token to, or None if `x` is by row.
        tail: scales of a group are adjacent, and at least this many unused ones follow before the
            scales of the next group.
    """
    return _launch(x, x.shape[1], inputs, rows=rows, tail=tail)


def norm_quantize(
    x: Tensor, norm_weight: Tensor | None, eps: float, inputs: InputFormat
) -> QuantizedInput:
    return _launch(x, x.shape[1], inputs, norm=True, norm_weight=norm_weight, eps=eps)


def silu_mul_quantize(gate_up: Tensor, inputs: InputFormat) -> QuantizedInput:
    """Implement `QuantizedOps.silu_mul_quantize`; the rows of `gate_up` may have any stride."""
    return _launch(gate_up, gate_up.shape[1] // 2, inputs, gated=True)


def _launch(
    x: Tensor,
    width: int,
    inputs: InputFormat,
    *,
    gated: bool = False,
    norm: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    rows: Tensor | None = None,
    tail: int | None = None,
) -> QuantizedInput:
    tokens, group = x.shape[0], inputs.group or 0
    count = tokens if rows is None else rows.numel()
    values = x.new_empty((count, width), dtype=inputs.dtype)
    groups = cdiv(width, group) if group else 1
    if inputs.scale is not None:
        scales = inputs.scale.expand(count, 1)
    elif tail is not None and group:
        scales = x.new_empty((groups, count + tail), dtype=torch.float32)[:, :count].T
    else:
        scales = x.new_empty((count, groups), dtype=torch.float32)
    if tokens == 0:
        return QuantizedInput(values, scales, x.dtype)
    warps = _warps(width)
    pdl = dependent_launch(x.device)
    _quantize_kernel[(tokens,)](
        x,
        x if norm_weight is None else norm_weight,
        x if inputs.scale is None else inputs.scale,
        x if rows is None else rows,
        values,
        scales,
        x.stride(0),
        *scales.stride(),
        eps,
        WIDTH=width,
        # A load of 16 bytes for each thread.
        PIECE=max(min(next_power_of_2(width), 256 * warps), group),
        GROUP=group,
        COPIES=0 if rows is None else rows.shape[1],
        BY_ROW=tail is not None,
        GATED=gated,
        NORM=norm,
        NORM_WEIGHT=norm_weight is not None,
        STATIC=inputs.scale is not None,
        INTEGER=inputs.dtype == torch.int8,
        LARGEST_VALUE=LARGEST[inputs.dtype],
        INTERPRETED=x.device.type == "cpu",
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return QuantizedInput(values, scales, x.dtype)


def _warps(width: int) -> int:
    """Choose the fastest number of warps of an H200, for the widths of Llama and of experts.

    The order of a norm's sums depends on it, so it must not depend on the number of tokens.
    """
    if width > 16384:
        return 16
    return 8 if width > 4096 else 4
