"""What all grouped GEMMs do with the result of a tile: bias, activation, and the store."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish_tile(
    out_ptr,  # [pairs, features]
    bias_ptr,  # [experts, features], with GATED [experts, 2 * features], or None
    acc,  # [ROWS, TILE] float32, with GATED those of the gates
    up,  # [ROWS, TILE] float32, read with GATED only
    expert,
    row,  # [TILE]
    inside,  # [TILE], whether the row is one of the expert's
    output,  # [ROWS]
    features,
    alpha,
    limit,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
):
    """Add biases, apply `silu(gate) * up` or `ClampedSwiglu`, and store a tile by row."""
    held = tl.minimum(output, features - 1)[:, None]
    if bias_ptr is not None:
        of_expert = bias_ptr + expert * ((1 + GATED) * features)
        acc += tl.load(of_expert + held).to(tl.float32)
        if GATED:
            up += tl.load(of_expert + features + held).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(acc, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        acc = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    elif GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    out = out_ptr + row.to(tl.int64)[:, None] * features + output[None, :]  # [TILE, ROWS]
    mask = inside[:, None] & (output < features)[None, :]
    tl.store(out, tl.trans(acc.to(out_ptr.dtype.element_ty)), mask=mask)
