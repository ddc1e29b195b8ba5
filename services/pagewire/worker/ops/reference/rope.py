"""Query/key normalization, rotary embedding and KV write in plain torch; see `contract.rope`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.worker.ops.contract.blocks import FP8_LARGEST, MIN_SCALE, KVScales
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
    scales: KVScales | None = None,
    out: Tensor | None = None,
) -> Tensor:
    qkv = norm_linear(x, None, eps, weight, bias)
    place = (positions, slots, block_tables, k_cache, v_cache)
    return qk_norm_rope_kv_write(qkv, q_norm, k_norm, eps, cos_sin, *place, scales=scales, out=out)


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
    _, kv_heads, block_size, head_dim = k_cache.shape
    wide = qkv if unscaled is None else qkv.float() * inverse_rms(unscaled, eps)
    heads = wide.view(len(qkv), -1, head_dim)  # [tokens, query_heads + 2 kv_heads, head_dim]
    query_heads = heads.shape[1] - 2 * kv_heads
    q, k, v = heads.split([query_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, head_dim / 2]

    blocks = block_tables[slots, positions // block_size]  # [tokens]
    rows = positions % block_size
    keys = _norm_rotate(k, k_norm, eps, cos, sin)
    if scales is None:
        k_cache[blocks, :, rows] = keys.to(k_cache.dtype)
        v_cache[blocks, :, rows] = v.to(v_cache.dtype)
    else:
        _write_fp8(keys, k_cache, scales.keys, blocks, rows)
        _write_fp8(v.float(), v_cache, scales.values, blocks, rows)
    queries = _norm_rotate(q, q_norm, eps, cos, sin).to(qkv.dtype)
    return queries if out is None else out.copy_(queries)


def _write_fp8(x: Tensor, cache: Tensor, scales: Tensor, blocks: Tensor, rows: Tensor) -> None:
    """Write `[tokens, kv_heads, head_dim]` float32 to the rows of blocks, with their scales."""
    highest = x.abs().amax(-1)  # [tokens, kv_heads]
    # Divided by a tensor: divided by a number, torch on a GPU multiplies by its reciprocal.
    scale = (highest / torch.full_like(highest, FP8_LARGEST)).clamp(min=MIN_SCALE)
    scales[blocks, :, rows] = scale
    values = (x / scale[..., None]).to(cache.dtype)
    # As bytes: torch does not index FP8 tensors on every device.
    cache.view(torch.uint8)[blocks, :, rows] = values.view(torch.uint8)


def _norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Normalize and rotate `[tokens, heads, head_dim]` in float32."""
    x = x.float()
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
