"""Addresses in the paged cache and the scale of scores, for all attention kernels.

A kernel looks up the blocks of a KV tile one step before it loads the tile. If a load needed an
address that is loaded in the same step, the pipeline would need two more stages.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract.blocks import RUN

# Softmax runs in base 2: scores are multiplied by scale * LOG2_E.
LOG2_E = 1.4426950408889634
# Used instead of minus infinity: the difference of two of these is 0, not NaN.
LOWEST = tl.constexpr(-1.0e30)


def check_layout(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check that the kernels can read tensors of this layout.

    Raises:
        ValueError: a tensor is not contiguous, the head size is not a power of two of at least 16,
            the query heads are not a multiple of the KV heads, or a block is not a multiple of RUN
            positions.
    """
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: pass it contiguous")
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
def lookup(table_ptr, position, length, BLOCK_SIZE: tl.constexpr):
    """Return the block of each of `position [TILE]`; scratch block 0 behind `length`."""
    return tl.load(table_ptr + position // BLOCK_SIZE, mask=position < length, other=0)


@triton.jit
def lines(
    block, position, head, HEAD_DIM: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Return the offsets of one head's cached vectors at `position [TILE]`, `[TILE, head_dim]`."""
    page = (block.to(tl.int64) * KV_HEADS + head) * (BLOCK_SIZE * HEAD_DIM)
    line = page + (position % BLOCK_SIZE) * HEAD_DIM
    return line[:, None] + tl.arange(0, HEAD_DIM)[None, :]
