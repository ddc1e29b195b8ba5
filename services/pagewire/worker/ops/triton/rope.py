"""The kernel of query/key normalization, rotary embedding and KV write."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.blocks import FP8_LARGEST, MIN_SCALE, KVScales
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.linear import choose_config, linear, norm_linear
from pagewire.worker.ops.triton.linear_config import SkinnyConfig, VectorConfig
from pagewire.worker.ops.triton.rowwise.norm import (
    inverse_rms,
    ordered_inverse_rms,
    scales_late,
    sum_of_pairs,
)
from pagewire.worker.ops.triton.rowwise.quantize import divided, rounded_to_fp8
from pagewire.worker.ops.triton.streamed.config import StreamConfig


@dataclass(frozen=True, slots=True)
class RopeKernelConfig:
    """The tile of a program: `heads` heads of `tokens` tokens, computed by `warps` warps."""

    tokens: int
    heads: int
    warps: int
    pdl: bool = True


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
    config = choose_config(x, weight)
    # The matrix-vector kernel applies the norm at no cost.
    late = bias is None and scales_late(x) and not isinstance(config, VectorConfig)
    qkv = linear(x, weight) if late else norm_linear(x, None, eps, weight, bias)
    return qk_norm_rope_kv_write(
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
        unscaled=x if late else None,
        out=out,
        waited_for=isinstance(config, SkinnyConfig | StreamConfig),
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
    waited_for: bool = False,
    inverse: Tensor | None = None,
    ordered: bool = False,
    config: RopeKernelConfig | None = None,
) -> Tensor:
    """Implement `RopeOps.qk_norm_rope_kv_write`; `qkv`, `unscaled` and `out` are contiguous.

    Args:
        waited_for: True promises that the preceding kernel, which computes `qkv`, lets this kernel
            start only when `unscaled` is complete. So this kernel may read `unscaled` before it
            waits. The skinny GEMM does so; it is not known whether cuBLAS's kernels do.
        inverse: `[tokens]` float32, the inverse root mean squares of tokens, if they are already
            computed; `unscaled` must then be None.
        ordered: whether all sums have one order of addition, and nothing is fused.
        config: the tiles; None chooses them by the number of tokens.
    """
    tokens = qkv.shape[0]
    _, kv_heads, block_size, head_dim = k_cache.shape
    query_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    config = config or _config(tokens)
    pdl = config.pdl and dependent_launch(qkv.device)
    launch = {"launch_pdl": True} if pdl else {}
    if ordered:
        launch["enable_fp_fusion"] = False
    scaled_by = unscaled if inverse is None else inverse

    q = qkv.new_empty((tokens, query_heads, head_dim)) if out is None else out
    # Groups of heads: first those of the queries, then of the keys, then of the values.
    groups = cdiv(query_heads, config.heads) + 2 * cdiv(kv_heads, config.heads)
    _qk_norm_rope_kv_write_kernel[(cdiv(tokens, config.tokens), groups)](
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
        qkv if scaled_by is None else scaled_by,
        k_cache if scales is None else scales.keys,
        v_cache if scales is None else scales.values,
        tokens,
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        HIDDEN=0 if unscaled is None else unscaled.shape[1],
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        TOKENS=config.tokens,
        HEADS=config.heads,
        BLOCK_H=1 if unscaled is None else next_power_of_2(unscaled.shape[1]),
        EARLY=unscaled is not None and waited_for,
        GIVEN=inverse is not None,
        ORDERED=ordered,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        FP8=scales is not None,
        LARGEST=FP8_LARGEST,
        LEAST=MIN_SCALE,
        INTERPRETED=qkv.device.type == "cpu",
        PDL=pdl,
        num_warps=config.warps,
        **launch,
    )
    return q


def _config(tokens: int) -> RopeKernelConfig:
    """Choose a tile: the fastest in whole steps of Qwen3-0.6B and Llama-3.1-8B on an H200."""
    if tokens <= 32:
        return RopeKernelConfig(tokens=1, heads=8, warps=2)
    if tokens <= 1024:
        return RopeKernelConfig(tokens=2, heads=8, warps=4)
    return RopeKernelConfig(tokens=2, heads=8, warps=2)


@triton.jit
def _scale_of(
    x_ptr, token, here, eps,
    HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Return the inverse root mean square of rows `token` of x `[tokens, HIDDEN]`, `[n, 1, 1]`."""
    column = tl.arange(0, BLOCK_H)[None, :]
    x = tl.load(
        x_ptr + token.to(tl.int64)[:, None] * HIDDEN + column,
        mask=here[:, None] & (column < HIDDEN),
        other=0.0,
        cache_modifier=".cg",  # from L2: before a wait, the L1 cache may hold older values
    ).to(tl.float32)
    if ORDERED:
        return ordered_inverse_rms(x, eps, HIDDEN)[:, None, None]
    else:
        return inverse_rms(x, eps, HIDDEN, 1)[:, None, None]


@triton.jit
def _norm_rotate(
    x_ptr,
    at,
    present,
    scale,
    weight_ptr,
    eps,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Load the two halves of heads, each `[tokens, heads, head_dim / 2]`; normalize and rotate."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, HALF)[None, None, :]
    first = tl.load(x_ptr + at, mask=present, other=0.0).to(tl.float32) * scale
    second = tl.load(x_ptr + at + HALF, mask=present, other=0.0).to(tl.float32) * scale
    if NORM:
        squares = first * first + second * second
        if ORDERED:
            heads: tl.constexpr = squares.shape[0] * squares.shape[1]
            total = sum_of_pairs(tl.reshape(squares, (heads, HALF)))
            total = tl.reshape(total, (squares.shape[0], squares.shape[1]))
        else:
            total = tl.sum(squares, 2)
        mean_square = total / HEAD_DIM
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
    """Return the offsets in the cache of heads of tokens, `[tokens, heads, 1]`."""
    block = tl.load(tables_ptr + slot * table_stride + position // BLOCK_SIZE, mask=here, other=0)
    page = block.to(tl.int64)[:, None] * KV_HEADS + head[None, :]
    return ((page * BLOCK_SIZE + (position % BLOCK_SIZE)[:, None]) * HEAD_DIM)[:, :, None]


@triton.jit
def _store(y_ptr, at, present, first, second, HALF: tl.constexpr):
    """Store the two halves of heads."""
    tl.store(y_ptr + at, first.to(y_ptr.dtype.element_ty), mask=present)
    tl.store(y_ptr + at + HALF, second.to(y_ptr.dtype.element_ty), mask=present)


@triton.jit
def _store_fp8(
    y_ptr,
    scales_ptr,
    to,
    dim,
    present,
    first,
    second,
    HEAD_DIM: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store the two halves of heads as FP8 numbers, and a scale for each head.

    `to [tokens, heads, 1]` are the offsets of heads. If a value of a head is not finite, its scale
    is NaN.
    """
    highest = tl.maximum(tl.max(tl.abs(first), 2), tl.max(tl.abs(second), 2))[:, :, None]
    scale = tl.maximum(tl.div_rn(highest, highest * 0 + LARGEST), LEAST)
    # The maximum ignores NaN. The sum is 0, or NaN if any value is not finite.
    scale += tl.sum(first * 0.0 + second * 0.0, 2)[:, :, None]
    tl.store(scales_ptr + to // HEAD_DIM, scale, mask=present)
    wide = tl.broadcast_to(scale, first.shape)
    first = divided(first, wide, INTERPRETED)
    second = divided(second, wide, INTERPRETED)
    if INTERPRETED:
        first = rounded_to_fp8(first)
        second = rounded_to_fp8(second)
    _store(y_ptr, to + dim, present, first, second, HEAD_DIM // 2)


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
    unscaled_ptr,  # [tokens, HIDDEN], or [tokens] float32 if GIVEN
    k_scales_ptr,  # [num_blocks, kv_heads, block_size], if FP8
    v_scales_ptr,
    tokens,
    table_stride,
    HEAD_DIM: tl.constexpr,
    HIDDEN: tl.constexpr,  # 0 if nothing is divided
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
    GIVEN: tl.constexpr,
    ORDERED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    FP8: tl.constexpr,  # the caches hold FP8
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize and rotate queries and keys, and write keys and values to the cache.

    A program computes HEADS heads of TOKENS tokens. The grid is `[tokens / TOKENS, groups]`: first
    groups of query heads, then of key heads, then of value heads.
    """
    # With a single token, attention and the output projection start while the projection to
    # queries, keys and values still runs. With more tokens they would take registers from it.
    if PDL and tokens == 1:
        gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_GROUPS: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    group = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    heads = tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)[None, None, :]
    # These inputs were complete before the kernel that computes `qkv` started: no need to wait.
    position = tl.load(positions_ptr + token, mask=here, other=0)
    slot = tl.load(slots_ptr + token, mask=here, other=0)
    angle = (position * HEAD_DIM)[:, None, None] + dim
    cos = tl.load(cos_sin_ptr + angle)  # [tokens, 1, head_dim / 2]
    sin = tl.load(cos_sin_ptr + angle + HALF)
    scale = 1.0
    if EARLY:
        scale = _scale_of(unscaled_ptr, token, here, eps, HIDDEN, BLOCK_H, ORDERED)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if HIDDEN and not EARLY:
        scale = _scale_of(unscaled_ptr, token, here, eps, HIDDEN, BLOCK_H, ORDERED)
    if GIVEN:
        scale = tl.load(unscaled_ptr + token, mask=here, other=0.0)[:, None, None]
    line = token.to(tl.int64)[:, None] * (QUERY_HEADS + 2 * KV_HEADS)  # [tokens, 1]

    if group < Q_GROUPS:
        head = group * HEADS + heads
        present = (here[:, None] & (head < QUERY_HEADS)[None, :])[:, :, None]
        at = ((line + head[None, :]) * HEAD_DIM)[:, :, None] + dim
        first, second = _norm_rotate(
            qkv_ptr, at, present, scale, q_norm_ptr, eps, cos, sin, HEAD_DIM, Q_NORM, ORDERED
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
            qkv_ptr, at, present, scale, k_norm_ptr, eps, cos, sin, HEAD_DIM, K_NORM, ORDERED
        )
        if FP8:
            _store_fp8(
                k_ptr, k_scales_ptr, to, dim, present, first, second,
                HEAD_DIM, LARGEST, LEAST, INTERPRETED,
            )  # fmt: skip
        else:
            _store(k_ptr, to + dim, present, first, second, HALF)
    else:
        head = (group - Q_GROUPS - KV_GROUPS) * HEADS + heads
        present = (here[:, None] & (head < KV_HEADS)[None, :])[:, :, None]
        at = ((line + QUERY_HEADS + KV_HEADS + head[None, :]) * HEAD_DIM)[:, :, None] + dim
        to = _cache_at(
            tables_ptr, table_stride, slot, here, position, head,
            HEAD_DIM, KV_HEADS, BLOCK_SIZE,
        )  # fmt: skip
        first = tl.load(qkv_ptr + at, mask=present, other=0.0).to(tl.float32) * scale
        second = tl.load(qkv_ptr + at + HALF, mask=present, other=0.0).to(tl.float32) * scale
        if FP8:
            _store_fp8(
                v_ptr, v_scales_ptr, to, dim, present, first, second,
                HEAD_DIM, LARGEST, LEAST, INTERPRETED,
            )  # fmt: skip
        else:
            _store(v_ptr, to + dim, present, first, second, HALF)
