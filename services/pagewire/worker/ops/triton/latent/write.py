"""The kernel that rotates queries and writes latent vectors and rotated keys to the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.integers import cdiv, next_power_of_2

_HEADS = 8  # query heads of a program


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
    """Implement `LatentOps.latent_rope_kv_write`."""
    tokens, heads, query_dim = q.shape
    _, _, block_size, width = cache.shape
    rank = len(norm)
    plain_dim = query_dim - (width - rank)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _latent_write_kernel[(tokens, 1 + cdiv(heads, _HEADS))](
        out,
        cache,
        q,
        latent,
        norm,
        eps,
        cos_sin,
        positions,
        slots,
        block_tables,
        q.stride(0),
        latent.stride(0),
        block_tables.stride(0),
        NUM_HEADS=heads,
        PLAIN_DIM=plain_dim,
        BLOCK_P=next_power_of_2(plain_dim),
        RANK=rank,
        BLOCK_R=next_power_of_2(rank),
        HALF=(width - rank) // 2,
        BLOCK_SIZE=block_size,
        HEADS=_HEADS,
        COPY=out is not q,
        num_warps=4 if rank > 256 else 1,
    )
    return out


@triton.jit
def _latent_write_kernel(
    out_ptr,  # [tokens, NUM_HEADS, PLAIN_DIM + 2 * HALF]
    cache_ptr,  # [num_blocks, 1, block_size, RANK + 2 * HALF]
    q_ptr,  # [tokens, NUM_HEADS, PLAIN_DIM + 2 * HALF]
    latent_ptr,  # [tokens, RANK + 2 * HALF]
    norm_ptr,  # [RANK]
    eps,
    cos_sin_ptr,  # [max_positions, 2 * HALF]
    positions_ptr,  # [tokens]
    slots_ptr,  # [tokens]
    tables_ptr,  # [slots, table_stride]
    q_stride,
    latent_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    PLAIN_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    COPY: tl.constexpr,  # queries are written to another tensor
):
    """Write the cache, or rotate HEADS query heads, of one token.

    The grid is `[tokens, 1 + groups of heads]`; the first program of a token writes the cache.
    """
    DIM: tl.constexpr = PLAIN_DIM + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) - 1
    position = tl.load(positions_ptr + token)
    half = tl.arange(0, HALF)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + half)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + half)
    if group < 0:
        slot = tl.load(slots_ptr + token)
        block = tl.load(tables_ptr + slot * table_stride + position // BLOCK_SIZE)
        line = (block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE) * (RANK + 2 * HALF)
        to = cache_ptr + line
        column = tl.arange(0, BLOCK_R)
        inside = column < RANK
        source = latent_ptr + token * latent_stride
        x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * weight
        tl.store(to + column, x.to(cache_ptr.dtype.element_ty), mask=inside)
        first = tl.load(source + RANK + half).to(tl.float32)
        second = tl.load(source + RANK + HALF + half).to(tl.float32)
        rotated = first * cos - second * sin
        tl.store(to + RANK + half, rotated.to(cache_ptr.dtype.element_ty))
        rotated = second * cos + first * sin
        tl.store(to + RANK + HALF + half, rotated.to(cache_ptr.dtype.element_ty))
        return
    head = group * HEADS + tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    present = head < NUM_HEADS
    source = q_ptr + token * q_stride + head * DIM
    to = out_ptr + token * (NUM_HEADS * DIM) + head * DIM
    if COPY:
        plain = tl.arange(0, BLOCK_P)[None, :]
        held = present & (plain < PLAIN_DIM)
        tl.store(to + plain, tl.load(source + plain, mask=held), mask=held)
    first = tl.load(source + PLAIN_DIM + half[None, :], mask=present, other=0.0).to(tl.float32)
    second = tl.load(source + PLAIN_DIM + HALF + half[None, :], mask=present, other=0.0)
    second = second.to(tl.float32)
    rotated = first * cos[None, :] - second * sin[None, :]
    tl.store(to + PLAIN_DIM + half[None, :], rotated.to(out_ptr.dtype.element_ty), mask=present)
    rotated = second * cos[None, :] + first * sin[None, :]
    to += PLAIN_DIM + HALF
    tl.store(to + half[None, :], rotated.to(out_ptr.dtype.element_ty), mask=present)
