"""Attention over the paged KV cache in plain torch; see `contract.attention`.

The functions read lengths on the host (`.tolist()`) to size their work. That is free on a CPU. On
a GPU it waits for the device, so the Triton implementation never does it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pagewire.worker.ops.contract.blocks import KVScales
from pagewire.worker.ops.contract.shared_prefix import PrefixLimits, SharedPrefixItems

_ANY_ROWS = 1 << 30


def shared_prefix_limits(dtype: torch.dtype, head_dim: int, group: int) -> PrefixLimits:
    """Return limits that hold for any items: `decode_attention` reads each row by itself."""
    return PrefixLimits(members=_ANY_ROWS)


def plan_decode(
    lengths: Tensor,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    shared: SharedPrefixItems | None = None,
    window: int | None = None,
    fp8: bool = False,
) -> None:
    """Return None: `decode_attention` needs no plan here."""


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    scales: KVScales | None = None,
    shared: SharedPrefixItems | None = None,
    plan: Any = None,
    beside_prefill: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    rows, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    out = torch.empty_like(q) if out is None else out
    longest = max(lengths.tolist(), default=0)
    if longest <= 0:
        return out.masked_fill_((lengths == 0)[:, None, None], 0)

    tables = block_tables[slots, : -(-longest // block_size)]  # [rows, blocks]
    k, v = _gather_both(k_cache, v_cache, scales, tables)
    # An empty row keeps position 0, so that its softmax is defined; it is zeroed below.
    positions = torch.arange(k.shape[2], device=q.device)
    visible = positions < lengths.clamp(min=1)[:, None]
    if window is not None:
        visible &= positions >= lengths.clamp(min=1)[:, None] - window

    # The query heads of one KV head take the place of a query sequence, which has no causal mask.
    grouped = q.to(k.dtype).view(rows, kv_heads, query_heads // kv_heads, head_dim)
    mask = visible[:, None, None, :]
    sink = None if sinks is None else sinks.view(kv_heads, -1, 1)
    attended = _attend_masked(grouped, k, v, mask, scale, soft_cap, sink)
    attended = attended.reshape(q.shape).to(q.dtype)
    attended.masked_fill_((lengths == 0)[:, None, None], 0)
    return torch.where((lengths < 0)[:, None, None], out, attended, out=out)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    max_query_length: int,
    *,
    scales: KVScales | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.zeros_like(q) if out is None else out
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
        if begin < end:
            table = block_tables[slot : slot + 1, : -(-length // k_cache.shape[2])]
            k, v = (x[0, :, :length] for x in _gather_both(k_cache, v_cache, scales, table))
            queries = q[begin:end].to(k.dtype)
            out[begin:end] = _attend_chunk(queries, k, v, scale, window, soft_cap, sinks)
    return out


def _gather_both(
    k_cache: Tensor, v_cache: Tensor, scales: KVScales | None, tables: Tensor
) -> tuple[Tensor, Tensor]:
    """Copy keys and values as `_gather` does; those of FP8 caches in float32."""
    if scales is None:
        return _gather(k_cache, tables), _gather(v_cache, tables)
    pairs = ((k_cache, scales.keys), (v_cache, scales.values))
    k, v = (
        # As bytes: torch does not index FP8 tensors on every device.
        _gather(cache.view(torch.uint8), tables).view(cache.dtype).float()
        * _gather(of_cache[..., None], tables)
        for cache, of_cache in pairs
    )
    return k, v


def _gather(cache: Tensor, tables: Tensor) -> Tensor:
    """Copy the blocks of `tables [rows, blocks]` into `[rows, kv_heads, positions, head_dim]`.

    A page is one block of one head, and contiguous. One selection of whole pages, in the order of
    the result, moves each byte once.
    """
    _, kv_heads, _, head_dim = cache.shape
    heads = torch.arange(kv_heads, dtype=torch.int32, device=cache.device)
    pages = tables[:, None, :] * kv_heads + heads[:, None]  # [rows, kv_heads, blocks]
    gathered = cache.flatten(0, 1).flatten(1, 2).index_select(0, pages.flatten())
    return gathered.view(tables.shape[0], kv_heads, -1, head_dim)


def _attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend causally from the last `queries` positions of one sequence; shapes as below.

    For `scaled_dot_product_attention` the KV heads are the batch and the query heads of one KV
    head are the heads, so keys and values broadcast without a copy.

    Args:
        q: `[queries, query_heads, head_dim]`.
        k, v: `[kv_heads, length, head_dim]`.
        scale: multiplies the scores.
        window, soft_cap, sinks: as in `AttentionOps.prefill_attention`.
    """
    queries, query_heads, head_dim = q.shape
    kv_heads, length, _ = k.shape
    group = query_heads // kv_heads
    grouped = q.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
    if queries == length and window is None and soft_cap is None and sinks is None:
        out = F.scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scale)
    else:
        mask = torch.ones(queries, length, dtype=torch.bool, device=q.device)
        mask = mask.tril(length - queries)
        if window is not None:
            mask = mask.triu(length - queries - window + 1)
        sink = None if sinks is None else sinks.view(kv_heads, group, 1, 1)
        out = _attend_masked(grouped, k, v, mask, scale, soft_cap, sink)
    return out.permute(2, 0, 1, 3).reshape(queries, query_heads, head_dim)


def _attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    soft_cap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Attend where `mask` is true; on a GPU without torch's fused kernels.

    `sink` is None or the sinks in the shape of the scores, with one position.

    The memory-efficient kernel of torch 2.11 has errors of 10 % for some masked shapes, such as 65
    queries of 131 keys, and kernels are tested against this function.
    """
    if soft_cap is not None or sink is not None:  # torch's function has neither
        scores = q.float() @ k.float().transpose(-2, -1) * scale
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        scores = scores.masked_fill(~mask, -torch.inf)
        if sink is not None:
            scores = torch.cat((scores, sink.float().expand(*scores.shape[:-1], 1)), -1)
        weights = scores.softmax(-1)[..., : k.shape[-2]]
        return (weights @ v.float()).to(q.dtype)
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
