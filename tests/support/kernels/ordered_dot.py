"""Matrix instructions of Triton's interpreter with a known order of their sums.

The interpreter multiplies a tile by a BLAS library, which chooses an order by the tile's shape. A
tensor core adds the columns of a tile to its accumulator one after another.
"""

from collections.abc import Callable

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Dot = Callable[..., TensorHandle]


def in_order(
    self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: object
) -> TensorHandle:
    """`d + a @ b`, where the accumulator adds one column of `a` after another."""
    total = d.data.copy()
    left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k]
    return TensorHandle(total, d.dtype.scalar)


def by_tile(
    self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: object
) -> TensorHandle:
    """`d + a @ b`, where each tile has its own sum: the order depends on the tile's width."""
    none = TensorHandle(np.zeros_like(d.data), d.dtype)
    return TensorHandle(d.data + in_order(self, a, b, none).data, d.dtype.scalar)
