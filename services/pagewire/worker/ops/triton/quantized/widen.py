"""Weights in four or eight bits become numbers, in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(
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
    """Return the weights of some columns, rounded to `dtype`."""
    if GROUP % WIDTH == 0:
        at = tl.min(column, 1, keep_dims=True) // GROUP  # [1, 1]: one group
    else:
        at = column // GROUP
    # Columns that fill the last run have no group.
    at = tl.minimum(at, groups - 1)
    if FLOAT4:
        exponent = tl.load(scales + at).to(tl.int32)
        return (_float4(values) * (exponent << 23).to(tl.float32, bitcast=True)).to(dtype)
    scale = tl.load(scales + at).to(tl.float32)
    if ZEROS:
        zero = tl.load(zeros + at).to(tl.float32)
        return ((values.to(tl.float32) - zero) * scale).to(dtype)
    return ((values.to(tl.float32) - MIDDLE) * scale).to(dtype)


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
