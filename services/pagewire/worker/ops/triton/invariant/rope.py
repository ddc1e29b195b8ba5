"""From the residual stream to queries and cached KV, with the same tiles for any tokens."""

from __future__ import annotations

from torch import Tensor

from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.triton import rope
from pagewire.worker.ops.triton.invariant.linear import norm_linear

# The norm of a head sums over the threads of a program, so its tile is the same for all tokens.
CONFIG = rope.RopeKernelConfig(tokens=2, heads=8, warps=4, fused=False)


def norm_qkv_rope_kv_write(
    x: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scales: KVScales | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implement `RopeOps.norm_qkv_rope_kv_write`; `x` is contiguous."""
    return qk_norm_rope_kv_write(
        norm_linear(x, None, eps, weight, bias),
        q_norm,
        k_norm,
        eps,
        cos_sin,
        positions,
        slots,
        block_tables,
        k_cache,
        v_cache,
        scales=scales,
        out=out,
    )


def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scales: KVScales | None = None,
    unscaled: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implement `RopeOps.qk_norm_rope_kv_write`; `qkv`, `unscaled` and `out` are contiguous."""
    return rope.qk_norm_rope_kv_write(
        qkv,
        q_norm,
        k_norm,
        eps,
        cos_sin,
        positions,
        slots,
        block_tables,
        k_cache,
        v_cache,
        scales=scales,
        unscaled=unscaled,
        out=out,
        config=CONFIG,
    )
