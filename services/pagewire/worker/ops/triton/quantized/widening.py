"""Products of many tokens with weights that are widened to a plain matrix, which cuBLAS multiplies.

The matrix is a temporary of the step, as activations are. So the products of all layers share its
memory, within a step's graph too. For arranged weights a worker measures at its start from how many
tokens on that is faster than widening in registers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from sys import maxsize

import torch
from torch import Tensor

from pagewire.worker.ops.contract.quantized import GroupedWeight
from pagewire.worker.ops.cublas.gemm import choose_algorithms, gemm, gemm_add
from pagewire.worker.ops.triton.quantized import fragment_gemm
from pagewire.worker.ops.triton.quantized.matrices import widen

# From here on it is faster to widen a weight that is not arranged: timed on an H200.
WIDEN_TOKENS = 64
# For fewer tokens to widen an arranged weight is not tried: it takes a fifth of the product's time.
MIN_TOKENS = 1024
# Arranged weights are widened if their own kernel takes at least this many times as long.
MARGIN = 1.01

Kind = tuple[int, int, int, torch.dtype]
Timer = Callable[[Callable[[], Tensor]], float]

_least: dict[Kind, int] = {}  # tokens from which on weights of a kind are widened


def widens(tokens: int, weight: GroupedWeight) -> bool:
    """Tell whether so many tokens are multiplied by the widened weight."""
    if weight.pairs is None:
        return tokens >= WIDEN_TOKENS
    return tokens >= _least.get(kind_of(weight), maxsize)


def multiply(x: Tensor, weight: GroupedWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Return `x @ weight.T + bias`, `out` if given; the `order` of the weight is ignored."""
    wide = widen(weight, x.dtype)
    return gemm(x, wide, out) if bias is None else torch.addmm(bias, x, wide.t(), out=out)


def multiply_add(x: Tensor, weight: GroupedWeight, residual: Tensor) -> Tensor:
    """Add `x @ weight.T` to `residual` in place; return it."""
    return gemm_add(x, widen(weight, x.dtype), residual)


def choose_widening(
    weight: GroupedWeight, tokens: Sequence[int], add: bool, microseconds: Timer
) -> int | None:
    """Measure from how many tokens on weights of this kind are widened, and keep that number.

    To widen takes the same time for any number of tokens: if it pays for some, it pays for more.

    Args:
        weight: one of the kind, arranged.
        tokens: the numbers of tokens of steps.
        add: whether the results are added to what the output holds.
        microseconds: times a function, which has run once before.

    Returns:
        The number; None if they are never widened.
    """
    assert weight.pairs is not None
    dtype, (features, k) = weight.scales.dtype, weight.shape
    counts = sorted(count for count in tokens if count >= MIN_TOKENS)
    _least.pop(kind_of(weight), None)

    def pays(count: int) -> bool:
        choose_algorithms([widen(weight, dtype)], [count], add)
        x = weight.scales.new_empty((count, k)).normal_(0.0, 0.02)
        out = weight.scales.new_zeros((count, features))

        def usual() -> Tensor:
            fragment_gemm.multiply(x, weight, out, add=add)
            return out

        def wide() -> Tensor:
            return multiply_add(x, weight, out) if add else multiply(x, weight, None, out)

        usual(), wide()  # loads the kernels
        return microseconds(wide) * MARGIN <= microseconds(usual)

    left = counts[bisect_left(counts, True, key=pays) :]
    if not left:
        return None
    choose_algorithms([widen(weight, dtype)], left, add)
    _least[kind_of(weight)] = left[0]
    return left[0]


def kind_of(weight: GroupedWeight) -> Kind:
    """Return what the times of an arranged weight depend on."""
    return *weight.shape, weight.group, weight.scales.dtype
