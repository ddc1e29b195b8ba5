"""The common code of the GEMMs of experts: order of tiles, activations, and stores of tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from pagewire.worker.ops.contract.experts import ClampedSwiglu


def clamp_numbers(clamp: ClampedSwiglu | None) -> tuple[float, float]:
    """Return `alpha` and `limit` of the kernels, which read them with CLAMPED only."""
    return (0.0, 0.0) if clamp is None else (clamp.alpha, clamp.limit)


@triton.jit
def place_of(program, tiles, blocks, GROUP: tl.constexpr):
    """Return the tile of a program and its block of features.

    Programs of GROUP tiles follow one another, so that they read inputs and weights from the L2
    cache. In a group, programs with the same weights are neighbours.
    """
    a_group = GROUP * blocks
    first = program // a_group * GROUP
    height = tl.minimum(tiles - first, GROUP)
    within = program % a_group
    return first + within % height, within // height


@triton.jit
def activated(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """Return `silu(gate) * up`, or with CLAMPED that of `ClampedSwiglu`."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


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
    if GATED:
        acc = activated(acc, up, alpha, limit, CLAMPED)
    out = out_ptr + row.to(tl.int64)[:, None] * features + output[None, :]  # [TILE, ROWS]
    mask = inside[:, None] & (output < features)[None, :]
    tl.store(out, tl.trans(acc.to(out_ptr.dtype.element_ty)), mask=mask)
