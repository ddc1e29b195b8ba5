"""The end of a product with a quantized weight."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_tile(
    out_ptr,  # [tokens, features]
    bias_ptr,  # [features]
    product,  # [ROWS, BLOCK_T] float32
    output,  # [ROWS, 1]
    token,  # [1, BLOCK_T]
    tokens,
    features,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Store a tile of outputs by tokens: BIAS adds the bias, ADD adds the values stored before.

    ADD rounds the product before the sum.
    """
    mask = (output < features) & (token < tokens)
    out = out_ptr + token.to(tl.int64) * features + output
    if BIAS:
        product += tl.load(bias_ptr + output, mask=output < features, other=0.0).to(tl.float32)
    rounded = product.to(out_ptr.dtype.element_ty)
    if ADD:
        residual = tl.load(out, mask=mask, other=0.0).to(tl.float32)
        rounded = (rounded.to(tl.float32) + residual).to(out_ptr.dtype.element_ty)
    tl.store(out, rounded, mask=mask)
