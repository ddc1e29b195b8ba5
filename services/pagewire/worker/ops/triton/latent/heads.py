"""Products of each head with its own matrix, and how heads are cut into tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.worker.ops.contract.blocks import RUN

MAX_TILE_HEADS = 64


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Implement `LatentOps.multiply_heads` by a batched GEMM of cuBLAS."""
    out = x.new_empty((x.shape[0], x.shape[1], weight.shape[2]))
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def heads_of_tile(heads: int, most: int = MAX_TILE_HEADS) -> int:
    """Return the query heads of a tile: the largest divisor of `heads` up to `most`."""
    return next(size for size in range(min(heads, most), 0, -1) if heads % size == 0)


def check_layout(absorbed: Tensor, rotated: Tensor, cache: Tensor) -> None:
    """Check that the attention kernels can read tensors of this layout.

    Raises:
        ValueError: a tensor has strides that the kernels do not read, a size is not a power of two
            of at least 16, or a block is not a multiple of RUN positions.
    """
    for name, tensor in (("absorbed", absorbed), ("cache", cache)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: pass it contiguous")
    if rotated.stride(2) != 1:
        raise ValueError(f"rotated has strides {rotated.stride()}: its values must be contiguous")
    rank, rotated_dim = absorbed.shape[2], rotated.shape[2]
    if cache.shape[3] != rank + rotated_dim:
        raise ValueError(
            f"the cache has {cache.shape[3]} values a token, not {rank} + {rotated_dim}"
        )
    for name, size in (("rank", rank), ("rotated_dim", rotated_dim)):
        if size < 16 or size & (size - 1):
            raise ValueError(
                f"{name} is {size}, not a power of two of at least 16: use --ops torch"
            )
    block_size = cache.shape[2]
    if block_size % RUN:
        raise ValueError(
            f"block_size is {block_size}, not a multiple of {RUN}: "
            "choose a multiple, or --ops torch"
        )
