"""Comparison of a kernel with its reference."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Bounds of the relative error in norm after rounding inputs, GEMMs and one output to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}

CUDA = torch.cuda.is_available()
# Hopper's tensor cores keep 13 bits behind the point of a sum of products in FP8.
FP8_SUM = 2**-12 if CUDA else 1e-6
# Some sizes are too slow in the interpreter, and on a GPU under `make sanitize`.
FULL_SIZE = CUDA and "PAGEWIRE_SMALL_KERNELS" not in os.environ
# Triton's interpreter computes bfloat16 wrongly: a dot multiplies bit patterns, and conversions
# truncate.
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float32, torch.float16]


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Fill every tensor that is allocated inside with NaN, so that missing writes are found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_near(out: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare the norm of the error with the norm of the expected tensor; NaN never passes."""
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    error, size = (out.double() - expected.double()).norm(), expected.double().norm()
    assert error <= tolerance * size, f"error {error:.2e} of {size:.2e}, above {tolerance:.0e}"
