"""A GEMM has the order of the reference if all its bits are the same."""

import pytest
import torch
from torch import Tensor

from pagewire.worker.ops.cublas.cublaslt import Shape
from pagewire.worker.ops.cublas.gemm import ReferenceOrder, is_chosen

TOKENS = 200


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """A product whose rows are computed one by one, so that they do not depend on the others."""
    for row, target in zip(x, out, strict=True):
        target.copy_(weight @ row)
    return out


@pytest.mark.parametrize("wrong", [None, 0, 100, TOKENS - 1])
def test_other_bits_in_a_row_are_found(wrong: int | None) -> None:
    def compute(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        multiply(x, weight, out)
        if wrong is not None:
            out[wrong, 3] = out[wrong, 3].nextafter(torch.tensor(9.0))
        return out

    shape = Shape(TOKENS, 8, 16, torch.float32, add=False)
    order = ReferenceOrder(shape, torch.randn(8, 16), multiply)
    assert order.holds(compute) == (wrong is None)


def test_no_algorithm_is_chosen_before_any_was_measured() -> None:
    assert not is_chosen(torch.zeros(70, 16), torch.zeros(8, 16), None, add=False)
