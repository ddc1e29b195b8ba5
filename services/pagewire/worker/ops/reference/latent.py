"""Latent attention in plain torch; see `contract.latent`.

All query heads of a token attend to the same vectors, so this is attention with one KV head: keys
are whole rows of the cache, values their first `rank` columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pagewire.worker.ops.reference.norm import rms_norm


def latent_rope_kv_write(
    q: Tensor,
    latent: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    cache: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    _, _, block_size, width = cache.shape
    rank, rotated_dim = len(norm), width - len(norm)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rotated_dim / 2]
    blocks = block_tables[slots, positions // block_size]  # [tokens]
    normed = rms_norm(latent[:, :rank], norm, eps)
    key = _rotated(latent[:, None, rank:], cos, sin)[:, 0]
    cache[blocks, 0, positions % block_size] = torch.cat((normed, key), dim=1).to(cache.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    rotated = _rotated(q[..., -rotated_dim:], cos, sin)
    out[..., :-rotated_dim] = q[..., :-rotated_dim]
    out[..., -rotated_dim:] = rotated
    return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[tokens, heads, rotated_dim]` in float32."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()


def plan_latent_decode(lengths: Tensor, heads: int, rank: int, dtype: torch.dtype) -> None:
    """Return None: `latent_decode_attention` needs no plan here."""


def latent_decode_attention(
    absorbed: Tensor,
    rotated: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    plan: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(absorbed) if out is None else out
    longest = max(lengths.tolist(), default=0)
    if longest <= 0:
        return out.masked_fill_((lengths == 0)[:, None, None], 0)
    block_size = cache.shape[2]
    tables = block_tables[slots, : -(-longest // block_size)]  # [rows, blocks]
    cached = cache[:, 0].index_select(0, tables.flatten()).unflatten(0, tables.shape)
    keys = cached.flatten(1, 2)  # [rows, positions, rank + rotated_dim]
    # An empty row keeps position 0, so that its softmax is defined; it is zeroed below.
    positions = torch.arange(keys.shape[1], device=keys.device)
    visible = positions < lengths.clamp(min=1)[:, None]
    queries, rank = torch.cat((absorbed, rotated), -1), absorbed.shape[2]
    attended = _attend(queries, keys, visible[:, None], scale)[..., :rank]
    attended.masked_fill_((lengths == 0)[:, None, None], 0)
    return torch.where((lengths < 0)[:, None, None], out, attended, out=out)


def latent_prefill_attention(
    absorbed: Tensor,
    rotated: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    max_query_length: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.zeros_like(absorbed) if out is None else out
    starts = query_starts.tolist()
    out[starts[-1] :] = 0
    for chunk, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        begin, end = starts[chunk], starts[chunk + 1]
        if length == 0:
            out[begin:end] = 0
            continue
        if end - begin > max_query_length:
            raise ValueError(
                f"chunk {chunk} has {end - begin} queries, more than max_query_length "
                f"{max_query_length}: pass the longest chunk of the batch"
            )
        if begin == end:
            continue
        blocks = block_tables[slot, : -(-length // cache.shape[2])]
        keys = cache[blocks, 0].flatten(0, 1)[:length]  # [length, rank + rotated_dim]
        mask = torch.ones(end - begin, length, dtype=torch.bool, device=keys.device)
        mask = mask.tril(length - (end - begin))
        queries = torch.cat((absorbed[begin:end], rotated[begin:end]), -1).transpose(0, 1)
        shared = keys.expand(len(queries), -1, -1)
        attended = _attend(queries, shared, mask[None], scale)
        out[begin:end] = attended[..., : absorbed.shape[2]].transpose(0, 1)
    return out


def _attend(q: Tensor, keys: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend where `mask` is true: `[batch, queries, rank + rotated_dim]`.

    The values are the keys, because torch's kernel for CPUs needs keys and values of equal size.
    The last columns of the result have no meaning. On a GPU the result is computed without torch's
    fused kernels, see `reference.attention`.

    Args:
        q: `[batch, queries, rank + rotated_dim]`.
        keys: `[batch, positions, rank + rotated_dim]`.
        mask: `[batch or 1, queries or 1, positions]`.
        scale: multiplies the scores.
    """
    q, keys, mask = q[:, None], keys[:, None], mask[:, None]  # one head
    if not q.is_cuda:
        out = F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask, scale=scale)
    else:
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask, scale=scale)
    return out[:, 0]
