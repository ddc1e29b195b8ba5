"""Query/key normalization, rotary embedding and KV write in plain torch; see `contract.rope`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.worker.ops.reference.linear import norm_linear
from pagewire.worker.ops.reference.norm import inverse_rms


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
    out: Tensor | None = None,
) -> Tensor:
    qkv = norm_linear(x, None, eps, weight, bias)
    return qk_norm_rope_kv_write(
        qkv, q_norm, k_norm, eps, cos_sin, positions, slots, block_tables, k_cache, v_cache, out=out
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
    unscaled: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    _, kv_heads, block_size, head_dim = k_cache.shape
    wide = qkv if unscaled is None else qkv.float() * inverse_rms(unscaled, eps)
    heads = wide.view(len(qkv), -1, head_dim)  # [tokens, query_heads + 2 kv_heads, head_dim]
    query_heads = heads.shape[1] - 2 * kv_heads
    q, k, v = heads.split([query_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, head_dim / 2]

    blocks = block_tables[slots, positions // block_size]  # [tokens]
    rows = positions % block_size
    k_cache[blocks, :, rows] = _norm_rotate(k, k_norm, eps, cos, sin).to(k_cache.dtype)
    v_cache[blocks, :, rows] = v.to(v_cache.dtype)
    queries = _norm_rotate(q, q_norm, eps, cos, sin).to(qkv.dtype)
    return queries if out is None else out.copy_(queries)


def _norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Normalize and rotate `[tokens, heads, head_dim]` in float32."""
    x = x.float()
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
