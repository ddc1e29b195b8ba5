"""Triton's interpreter with the order of additions on a GPU: fixed in products, random in sums.

numpy adds the terms of a product in an order that depends on the shapes. A tensor core with one
accumulator adds them from the first to the last. The order of a sum over the threads of a program
depends on the layout of the threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime import interpreter


def _dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> interpreter.TensorHandle:
    left, right = a.data.astype(np.float32), b.data.astype(np.float32)
    total = d.data.astype(np.float32, copy=True)
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k, :]
    return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


@contextmanager
def one_accumulator() -> Iterator[None]:
    """Inside, products have one order of addition."""
    with patch.object(interpreter.InterpreterBuilder, "create_dot", _dot):
        yield


@contextmanager
def any_threads(seed: int = 0) -> Iterator[None]:
    """Inside, products have one order of addition, and each sum has a random one."""
    generator = np.random.default_rng(seed)

    def add_up(self: Any, given: Any) -> Any:
        values = given.handle.data
        if self.axis is None:
            values, axis = values.reshape(-1), 0
        else:
            axis = self.axis
        order = generator.permutation(values.shape[axis])
        total = np.zeros(np.delete(values.shape, axis), values.dtype)
        for index in order:
            total = total + values.take(index, axis)
        if self.keep_dims:
            total = np.expand_dims(total, axis)
        return self.to_tensor(total, given.dtype)

    with one_accumulator(), patch.object(interpreter.ReduceOps, "sum", add_up):
        yield
