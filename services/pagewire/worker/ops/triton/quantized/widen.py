"""Weights in four or eight bits become numbers, in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scales_of(
    scales,  # [ROWS, 1], the row's first scale
    zeros,  # [ROWS, 1], the row's first zero point
    column,  # of the first weight
    place,  # [1, WIDTH], columns after it
    groups,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """Load the scales and zero points of WIDTH columns, `[ROWS, 1]` if they are of one group."""
    at = column // GROUP if GROUP % WIDTH == 0 else (column + place) // GROUP
    at = tl.minimum(at, groups - 1)  # columns that fill the last run have no group
    scale = tl.load(scales + at)
    return scale, tl.load(zeros + at) if ZEROS else scale


@triton.jit
def widened(
    values,  # [ROWS, WIDTH] uint8
    scale,  # from `scales_of`
    zero,
    dtype: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    FLOAT4: tl.constexpr,
):
    """Return weights, rounded to `dtype`."""
    if FLOAT4:
        power = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        return (_float4(values) * power).to(dtype)
    middle = zero.to(tl.float32) if ZEROS else MIDDLE
    return ((values.to(tl.float32) - middle) * scale.to(tl.float32)).to(dtype)


@triton.jit
def widened_at(
    values,  # [ROWS, WIDTH] uint8
    scales,  # [ROWS, 1], the row's first scale
    zeros,  # [ROWS, 1], the row's first zero point
    column,  # [1, WIDTH]
    groups,
    dtype: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr,
    ZEROS: tl.constexpr,
    FLOAT4: tl.constexpr,
):
    """Return the weights of some columns, rounded to `dtype`.

    If groups are shorter than WIDTH, one scale is loaded for each group. With one scale for each
    weight, Triton 3.6 moved scales through shared memory, and sums were wrong on an H100.
    """
    if GROUP < WIDTH and WIDTH % GROUP == 0:
        ROWS: tl.constexpr = values.shape[0]
        PARTS: tl.constexpr = WIDTH // GROUP
        at = tl.min(column, 1, keep_dims=True) // GROUP + tl.arange(0, PARTS)[None, :]
        at = tl.minimum(at, groups - 1)
        scale = tl.load(scales + at)[:, :, None]
        zero = tl.load(zeros + at)[:, :, None] if ZEROS else scale
        of_groups = tl.reshape(values, (ROWS, PARTS, GROUP))
        of_groups = widened(of_groups, scale, zero, dtype, MIDDLE, ZEROS, FLOAT4)
        return tl.reshape(of_groups, (ROWS, WIDTH))
    first = tl.min(column, 1, keep_dims=True) if GROUP % WIDTH == 0 else column
    scale, zero = scales_of(scales, zeros, first, 0, groups, GROUP, WIDTH, ZEROS)
    return widened(values, scale, zero, dtype, MIDDLE, ZEROS, FLOAT4)


@triton.jit
def _float4(values):
    """Return numbers of the type E2M1, which has two bits of exponent and one of mantissa."""
    bits = values.to(tl.int32)
    magnitude = bits & 7
    # An exponent of 0 stands for 0 and 0.5; the exponent 1 stands for numbers from 1 on.
    normal = ((magnitude >> 1) + 126 << 23) | (magnitude & 1) << 22
    number = tl.where(
        magnitude < 2, magnitude.to(tl.float32) * 0.5, normal.to(tl.float32, bitcast=True)
    )
    return tl.where(bits < 8, number, -number)
