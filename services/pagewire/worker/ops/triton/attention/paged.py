"""Addresses in the paged cache and the scale of scores, for all attention kernels.

A kernel looks up the blocks of a KV tile one step before it loads the tile. If a load needed an
address that is loaded in the same step, the pipeline would need two more stages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract.blocks import RUN, KVScales

# Softmax runs in base 2: scores are multiplied by scale * LOG2_E.
LOG2_E = 1.4426950408889634
# Used instead of minus infinity: the difference of two such values is 0, not NaN.
LOWEST = tl.constexpr(-1.0e30)


def score_scales(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return the `scale_log2` and the `CAP_SCALE` of the kernels.

    The softmax multiplies scores by `scale_log2`. With a soft cap, these scores are between -1 and
    1 (`capped`). Without one, CAP_SCALE is 0.
    """
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return soft_cap * LOG2_E, scale / soft_cap


def check_layout(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales | None = None
) -> None:
    """Check that the kernels can read tensors of this layout.

    Raises:
        ValueError: a tensor is not contiguous, an FP8 cache has no `scales` or another cache has
            some, the head size is not a power of two of at least 16, the query heads are not a
            multiple of the KV heads, or a block is not a multiple of RUN positions.
    """
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: pass it contiguous")
        fp8 = name != "q" and tensor.dtype == torch.float8_e4m3fn
        if name != "q" and fp8 != (scales is not None):
            raise ValueError(
                f"{name} is in {tensor.dtype}, and scales are {'not ' if fp8 else ''}given: pass "
                "scales with a cache in float8_e4m3fn, and with no other"
            )
    _, query_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(
            f"head_dim is {head_dim}, not a power of two of at least 16: use --ops torch"
        )
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are not a multiple of {kv_heads} KV heads")
    if block_size % RUN:
        raise ValueError(
            f"block_size is {block_size}, not a multiple of {RUN}: "
            "choose a multiple, or --ops torch"
        )


@triton.jit
def window_begin(length, WINDOW: tl.constexpr, RUN: tl.constexpr):
    """Return the start of the last position's window, rounded down to the start of a run."""
    return tl.maximum(length - WINDOW, 0) // RUN * RUN


@triton.jit
def capped(scores, CAP_SCALE: tl.constexpr):
    """Return `tanh(CAP_SCALE * scores)`; the softmax multiplies it by the cap (`score_scales`)."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * CAP_SCALE * scores))


@triton.jit
def lookup(table_ptr, position, length, BLOCK_SIZE: tl.constexpr):
    """Return the block of each of `position [TILE]`; scratch block 0 past `length`."""
    return tl.load(table_ptr + position // BLOCK_SIZE, mask=position < length, other=0)


@triton.jit
def lines(
    block, position, head, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Return the offsets of one head's cached vectors at `position [TILE]`, `[TILE, head_dim]`."""
    page = (block.to(tl.int64) * KV_HEADS + head) * (BLOCK_SIZE * HEAD_DIM)
    line = page + (position % BLOCK_SIZE) * HEAD_DIM
    return line[:, None] + tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def scale_lines(block, position, head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the offsets of the scales of one head at `position [TILE]`, in an FP8 cache."""
    return (block.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def in_type_of(numbers, like):
    """Return FP8 numbers in the type of `like`, which represents all of them.

    bfloat16 is converted from float32: Hopper's instruction from float16 converts one number, at an
    eighth of the rate of instructions that convert two.
    """
    if like.dtype == tl.bfloat16:
        return numbers.to(tl.float16).to(tl.float32).to(tl.bfloat16)
    else:
        return numbers.to(like.dtype)


@triton.jit
def widened(v, scales, like):
    """Return FP8 values in the type of `like`, and the scales that belong to them.

    Weights are multiplied by the scales. In float16 a power of two is moved from values to scales,
    so that the products do not vanish. Both multiplications are exact.
    """
    if like.dtype == tl.float16:
        return v.to(tl.float16) * 0.00390625, scales * 256.0
    else:
        return in_type_of(v, like), scales
