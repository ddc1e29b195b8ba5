"""Query/key normalization, rotary embedding and the KV write in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.triton.device import dependent_launch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A program handles `heads` heads of `tokens` tokens."""

    tokens: int
    heads: int
    warps: int
    pdl: bool = True


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
    config: RopeConfig | None = None,
) -> Tensor:
    """Turn the fused QKV projection of T tokens into rotated queries and cached keys and values.

    Each query and key head is RMS-normalized where a norm weight is given, then rotated by the
    token's position (the two halves of a head are the real and imaginary parts, as in the
    Llama family); everything is computed in float32 and rounded once. Keys and values go to
    block `block_tables[slot, position // block_size]`, row `position % block_size`.

    Args:
        qkv: `[tokens, (query_heads + 2 * kv_heads) * head_dim]`, queries, then keys, then values;
            contiguous.
        q_norm, k_norm: `[head_dim]` weights of the per-head RMS norm, or None for no norm.
        eps: added to the mean square, as in `rms_norm`.
        cos_sin: `[max_positions, head_dim]` float32, cosines in the first half of a row and
            sines in the second.
        positions, slots: `[tokens]` int32. Tokens of the padding slot write to scratch block 0.
        block_tables: `[slots, max_blocks]` int32.
        k_cache, v_cache: `[num_blocks, kv_heads, block_size, head_dim]`, written in place.
        config: the tiles; chosen by the number of tokens when None.

    Returns:
        Queries `[tokens, query_heads, head_dim]` in the dtype of `qkv`.
    """
    tokens = qkv.shape[0]
    _, kv_heads, block_size, head_dim = k_cache.shape
    query_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    config = config or _config(tokens)
    pdl = config.pdl and dependent_launch(qkv.device)
    launch = {"launch_pdl": True} if pdl else {}

    q = qkv.new_empty((tokens, query_heads, head_dim))
    # Groups of heads: those of the queries, then of the keys, then of the values.
    groups = triton.cdiv(query_heads, config.heads) + 2 * triton.cdiv(kv_heads, config.heads)
    _qk_norm_rope_kv_write_kernel[(triton.cdiv(tokens, config.tokens), groups)](
        q,
        k_cache,
        v_cache,
        qkv,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        cos_sin,
        positions,
        slots,
        block_tables,
        tokens,
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        TOKENS=config.tokens,
        HEADS=config.heads,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        PDL=pdl,
        num_warps=config.warps,
        **launch,
    )
    return q


def _config(tokens: int) -> RopeConfig:
    """Choose a tile, as `benchmarks/kernels/attention.py --sweep` found them on an H200."""
    if tokens <= 256:
        return RopeConfig(tokens=1, heads=4, warps=4)
    if tokens <= 1024:
        return RopeConfig(tokens=1, heads=8, warps=4)
    return RopeConfig(tokens=2, heads=8, warps=2)


@triton.jit
def _norm_rotate(
    x_ptr,
    at,
    present,
    weight_ptr,
    eps,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Load heads by their halves `[tokens, heads, head_dim / 2]`, normalize and rotate them."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, HALF)[None, None, :]
    first = tl.load(x_ptr + at, mask=present, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=present, other=0.0).to(tl.float32)
    if NORM:
        mean_square = tl.sum(first * first + second * second, 2) / HEAD_DIM
        inverse = tl.rsqrt(mean_square + eps)[:, :, None]
        first = first * inverse * tl.load(weight_ptr + dim).to(tl.float32)
        second = second * inverse * tl.load(weight_ptr + HALF + dim).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _cache_at(
    tables_ptr,
    table_stride,
    slot,
    here,
    position,
    head,
    HEAD_DIM: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return where the heads of the tokens begin in the cache, `[tokens, heads, 1]`."""
    block = tl.load(tables_ptr + slot * table_stride + position // BLOCK_SIZE, mask=here, other=0)
    page = block.to(tl.int64)[:, None] * KV_HEADS + head[None, :]
    return ((page * BLOCK_SIZE + (position % BLOCK_SIZE)[:, None]) * HEAD_DIM)[:, :, None]


@triton.jit
def _store(y_ptr, at, present, first, second, HALF: tl.constexpr):
    """Store the two halves of heads."""
    tl.store(y_ptr + at, first.to(y_ptr.dtype.element_ty), mask=present)
    tl.store(y_ptr + at + HALF, second.to(y_ptr.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["tokens"])
def _qk_norm_rope_kv_write_kernel(
    q_ptr,  # [tokens, query_heads, head_dim]
    k_ptr,  # [num_blocks, kv_heads, block_size, head_dim]
    v_ptr,
    qkv_ptr,  # [tokens, query_heads + 2 * kv_heads, head_dim]
    q_norm_ptr,
    k_norm_ptr,
    eps,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    tables_ptr,
    tokens,
    table_stride,
    HEAD_DIM: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_GROUPS: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    group = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    heads = tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)[None, None, :]
    # The step's inputs are older than the kernel in front, which need not have ended for them.
    position = tl.load(positions_ptr + token, mask=here, other=0)
    slot = tl.load(slots_ptr + token, mask=here, other=0)
    angle = (position * HEAD_DIM)[:, None, None] + dim
    cos = tl.load(cos_sin_ptr + angle)  # [tokens, 1, head_dim / 2]
    sin = tl.load(cos_sin_ptr + angle + HALF)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    line = token.to(tl.int64)[:, None] * (QUERY_HEADS + 2 * KV_HEADS)  # [tokens, 1]

    if group < Q_GROUPS:
        head = group * HEADS + heads
        present = (here[:, None] & (head < QUERY_HEADS)[None, :])[:, :, None]
        at = ((line + head[None, :]) * HEAD_DIM)[:, :, None] + dim
        first, second = _norm_rotate(
            qkv_ptr, at, present, q_norm_ptr, eps, cos, sin, HEAD_DIM, Q_NORM
        )
        to = ((token.to(tl.int64)[:, None] * QUERY_HEADS + head[None, :]) * HEAD_DIM)[:, :, None]
        _store(q_ptr, to + dim, present, first, second, HALF)
    elif group < Q_GROUPS + KV_GROUPS:
        head = (group - Q_GROUPS) * HEADS + heads
        present = (here[:, None] & (head < KV_HEADS)[None, :])[:, :, None]
        at = ((line + QUERY_HEADS + head[None, :]) * HEAD_DIM)[:, :, None] + dim
        to = _cache_at(
            tables_ptr, table_stride, slot, here, position, head,
            HEAD_DIM, KV_HEADS, BLOCK_SIZE,
        )  # fmt: skip
        first, second = _norm_rotate(
            qkv_ptr, at, present, k_norm_ptr, eps, cos, sin, HEAD_DIM, K_NORM
        )
        _store(k_ptr, to + dim, present, first, second, HALF)
    else:
        head = (group - Q_GROUPS - KV_GROUPS) * HEADS + heads
        present = (here[:, None] & (head < KV_HEADS)[None, :])[:, :, None]
        at = ((line + QUERY_HEADS + KV_HEADS + head[None, :]) * HEAD_DIM)[:, :, None] + dim
        to = _cache_at(
            tables_ptr, table_stride, slot, here, position, head,
            HEAD_DIM, KV_HEADS, BLOCK_SIZE,
        )  # fmt: skip
        first = tl.load(qkv_ptr + at, mask=present).to(tl.float32)
        second = tl.load(qkv_ptr + at + HALF, mask=present).to(tl.float32)
        _store(v_ptr, to + dim, present, first, second, HALF)
