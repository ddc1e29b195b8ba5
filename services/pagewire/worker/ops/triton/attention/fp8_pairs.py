"""Pairs of FP8 numbers as operands of products in float16.

A cached vector is read as 16-bit elements of two numbers each. The even dimensions are one operand,
the odd ones another. The tensor cores' loads and transposed loads need 16-bit elements, not bytes.
Two instructions convert a pair to float16, which represents every E4M3 number; bfloat16 would need
a slow instruction for each number.

float16 has a narrow range. Queries of a head are multiplied by a power of two, so that the largest
value is between 2^8 and 2^9. Weights contain the scales of values, and are relative to the largest
weight so far, `heaviest`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The largest weight is 2^14: float16 keeps weights down to 2^-38 of it.
HEADROOM = tl.constexpr(14.0)


@triton.jit
def numbers(pairs, INTERPRETED: tl.constexpr):
    """Return the first and the second numbers of int16 `pairs` of FP8, in float16."""
    if INTERPRETED:
        first = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b32 a; .reg .b16 low, high; prmt.b32 a, $2, 0, 0x3120; "
            "mov.b32 {low, high}, a; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return first, second


@triton.jit
def log2_of_scales(scales, INTERPRETED: tl.constexpr):
    """Return the logarithms of `scales`, which are zero or normal numbers.

    The hardware's approximation is one instruction; `tl.log2` is about twenty.
    """
    if INTERPRETED:
        logarithms = tl.log2(scales)
    else:
        logarithms = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;",
            "=r,r",
            [scales],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return logarithms


@triton.jit
def query_pairs(q):
    """Return the even and odd dimensions of `q [rows, head_dim]` in float16, and a scale per row.

    The scales `[rows]` are factors of the scores.
    """
    wide = q.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    # The power of two at or below, clamped so that its inverse is a normal number.
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x08000000), 0x7E000000)
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    scaled = (wide * (inverse * 256.0)[:, None]).to(tl.float16)
    even, odd = tl.split(tl.reshape(scaled, (q.shape[0], q.shape[1] // 2, 2)))
    return even, odd, bits.to(tl.float32, bitcast=True) * 0.00390625


@triton.jit
def joined(even, odd):
    """Join even and odd dimensions, each `[head_dim / 2, rows]`, to `[rows, head_dim]`."""
    both = tl.join(tl.trans(even), tl.trans(odd))
    return tl.reshape(both, (even.shape[1], 2 * even.shape[0]))
