"""Attention over the paged KV cache, in plain torch.

These functions size their work by reading lengths on the host (`.tolist()`). On a CPU that costs
nothing; on a GPU it waits for the device, which is why the Triton twins never do it.

Cached values must be finite wherever a block table points, also past the end of a sequence: a
masked score is added to minus infinity, and NaN survives that. A cache allocated as zeros and
written by `qk_norm_rope_kv_write` keeps this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pagewire.worker.ops.contract.shared_ranges import SharedRanges


def plan_decode(
    lengths: Tensor,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    shared: SharedRanges | None = None,
) -> None:
    """Nothing: the Triton twin cuts the work of `decode_attention`, once for all layers.

    Args:
        lengths: `[rows]` int32, as in `decode_attention`.
        query_heads, kv_heads, head_dim, dtype: of the queries and of the cache.
        shared: as in `decode_attention`.
    """


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    shared: SharedRanges | None = None,
    plan: Any = None,
    beside_prefill: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from one new token of each sequence to all of its cached tokens.

    Args:
        q: `[rows, query_heads, head_dim]`.
        k_cache, v_cache: `[num_blocks, kv_heads, block_size, head_dim]`.
        block_tables: `[slots, max_blocks]` int32.
        slots: `[rows]` int32, the block table row of each query row.
        lengths: `[rows]` int32, cached tokens of each row, the current one included. A row of
            length 0 gives zeros, a negative length leaves the row of `out` as it is.
        scale: multiplies the scores, usually `head_dim ** -0.5`.
        shared: KV ranges that rows have in common. The Triton twin reads each once; the result is
            the same without them, and they are not looked at here.
        plan: what `plan_decode` returned for these lengths and ranges, or None; not looked at here.
        beside_prefill: the call before this one was `prefill_attention` with the same queries; the
            Triton twins then run side by side.
        out: like `q`, takes the result; a new tensor when None.

    Returns:
        `[rows, query_heads, head_dim]` in the dtype of `q`: `out` if it was given.
    """
    rows, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    out = torch.empty_like(q) if out is None else out
    longest = max(lengths.tolist(), default=0)
    if longest <= 0:
        return out.masked_fill_((lengths == 0)[:, None, None], 0)

    tables = block_tables[slots, : -(-longest // block_size)]  # [rows, blocks]
    k, v = _gather(k_cache, tables), _gather(v_cache, tables)
    # An empty row keeps position 0, so that its softmax is defined; it is zeroed below.
    visible = torch.arange(k.shape[2], device=q.device) < lengths.clamp(min=1)[:, None]

    # The query heads of one KV head stand where a query sequence would: none masks another.
    grouped = q.view(rows, kv_heads, query_heads // kv_heads, head_dim)
    attended = _attend_masked(grouped, k, v, visible[:, None, None, :], scale).reshape(q.shape)
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
    out: Tensor | None = None,
) -> Tensor:
    """Attend causally from N chunks of new tokens, each to its cached prefix and to itself.

    Query j of chunk i stands at position `lengths[i] - (query_starts[i+1] - query_starts[i]) + j`
    of its sequence and sees all positions up to its own.

    Args:
        q: `[tokens, query_heads, head_dim]`: tokens of no chunk, the chunks one after another,
            tokens of no chunk.
        k_cache, v_cache: `[num_blocks, kv_heads, block_size, head_dim]`; the keys and values of
            the chunks are already written.
        block_tables: `[slots, max_blocks]` int32.
        slots: `[chunks]` int32.
        query_starts: `[chunks + 1]` int32, where each chunk begins in `q`, and the end of the last.
        lengths: `[chunks]` int32, tokens cached after the chunk: prefix and chunk together. A
            chunk of length 0 gives zeros: its tokens are padding.
        scale: multiplies the scores, usually `head_dim ** -0.5`.
        max_query_length: no chunk is longer, padding aside; sizes the tiles of the Triton twin.
        out: like `q`, takes the result; a new tensor when None.

    Returns:
        `[tokens, query_heads, head_dim]` in the dtype of `q`: `out` if it was given. Rows before
        the first chunk are left as they are, rows after the last are zero.
    """
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
            k, v = _gather(k_cache, table)[0], _gather(v_cache, table)[0]
            out[begin:end] = _attend_chunk(q[begin:end], k[:, :length], v[:, :length], scale)
    return out


def _gather(cache: Tensor, tables: Tensor) -> Tensor:
    """Copy the blocks of `tables [rows, blocks]` into `[rows, kv_heads, positions, head_dim]`.

    A page is one block of one head and contiguous, so a single selection of whole pages, in the
    order of the result, moves each byte once.
    """
    _, kv_heads, _, head_dim = cache.shape
    heads = torch.arange(kv_heads, dtype=torch.int32, device=cache.device)
    pages = tables[:, None, :] * kv_heads + heads[:, None]  # [rows, kv_heads, blocks]
    gathered = cache.flatten(0, 1).flatten(1, 2).index_select(0, pages.flatten())
    return gathered.view(tables.shape[0], kv_heads, -1, head_dim)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend from the last `queries` positions of a sequence to `[kv_heads, length, head_dim]`.

    KV heads are the batch, and the query heads that share one are its heads, so keys and values
    broadcast without a copy.
    """
    queries, query_heads, head_dim = q.shape
    kv_heads, length, _ = k.shape
    group = query_heads // kv_heads
    grouped = q.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
    if queries == length:
        out = F.scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scale)
    else:
        mask = torch.ones(queries, length, dtype=torch.bool, device=q.device)
        out = _attend_masked(grouped, k, v, mask.tril(length - queries), scale)
    return out.permute(2, 0, 1, 3).reshape(queries, query_heads, head_dim)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend where `mask` is true; on a GPU without fused kernels.

    The memory-efficient kernel of torch 2.11 is wrong by a tenth for some masked shapes (65
    queries of 131 keys is one), and an oracle must not be.
    """
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
