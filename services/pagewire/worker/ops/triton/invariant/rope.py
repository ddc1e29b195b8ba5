"""From the residual stream to queries and cached KV, with one order of addition."""

from __future__ import annotations

from torch import Tensor

from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.triton import rope
from pagewire.worker.ops.triton.invariant.linear import linear, norm_linear, waits_first
from pagewire.worker.ops.triton.invariant.norm import factors_of, is_late


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
    late = is_late(x, bias)
    unscaled, inverse = factors_of(x, eps) if late else (None, None)
    return rope.qk_norm_rope_kv_write(
        linear(x, weight) if late else norm_linear(x, None, eps, weight, bias),
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
        inverse=inverse,
        waited_for=late and waits_first(x, weight),
        ordered=True,
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
        ordered=True,
        out=out,
    )
