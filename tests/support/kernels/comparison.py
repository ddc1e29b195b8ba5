"""How a kernel is held against its twin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Norm-wise: what rounding inputs, products and one output to the type leaves.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}

CUDA = torch.cuda.is_available()
# The interpreter is too slow for some sizes, and so is a GPU that `make sanitize` watches.
FULL_SIZE = CUDA and "PAGEWIRE_SMALL_KERNELS" not in os.environ
# The interpreter multiplies bit patterns of bfloat16 in a dot and truncates to it elsewhere.
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float32, torch.float16]


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill every tensor allocated inside with NaN, so that what is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_near(out: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare by the norm of the error relative to the norm of the expected; NaN never passes."""
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    error, size = (out.double() - expected.double()).norm(), expected.double().norm()
    assert error <= tolerance * size, f"error {error:.2e} of {size:.2e}, above {tolerance:.0e}"
