"""Products with quantized weights, by the kernel that is fastest for a number of tokens.

The results of different kernels may differ in their last bits. With `--batch-invariant`, the
functions of `scaled` and `grouped` are used instead, whose bits do not depend on the number of
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.worker.ops.contract.quantized import GroupedWeight, QuantizedInput, ScaledWeight
from pagewire.worker.ops.cublas.gemm import gemm, gemm_add
from pagewire.worker.ops.triton.quantized import grouped, grouped_hopper, scaled, vector
from pagewire.worker.ops.triton.quantized.matrices import widen

# From here on it is faster to widen a weight once and to let cuBLAS multiply: timed on an H200,
# with Hopper's kernel and with the plain one.
WIDEN_TOKENS_HOPPER = 512
WIDEN_TOKENS = 64


def scaled_linear(
    x: QuantizedInput, weight: ScaledWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Implement `QuantizedOps.scaled_linear`; `out` is contiguous."""
    if x.values.shape[0] != 1:
        return scaled.scaled_linear(x, weight, bias, out)
    if out is None:
        out = x.values.new_empty((1, weight.shape[0]), dtype=x.dtype)
    vector.multiply_scaled(x, weight, out, bias, add=False)
    return out


def scaled_linear_add(x: QuantizedInput, weight: ScaledWeight, residual: Tensor) -> Tensor:
    """Implement `QuantizedOps.scaled_linear_add`; `residual` is contiguous."""
    if x.values.shape[0] != 1:
        return scaled.scaled_linear_add(x, weight, residual)
    vector.multiply_scaled(x, weight, residual, None, add=True)
    return residual


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Implement `QuantizedOps.grouped_linear`; the rows of `x` may have any stride."""
    tokens = x.shape[0]
    if _widens(x, weight):
        x, wide = _ordered(x, weight), widen(weight, x.dtype)
        return gemm(x, wide, out) if bias is None else torch.addmm(bias, x, wide.t(), out=out)
    if tokens != 1 or weight.bits != 4 or weight.float4:
        return grouped.grouped_linear(x, weight, bias, out)
    if out is None:
        out = x.new_empty((1, weight.shape[0]))
    vector.multiply_grouped(_ordered(x, weight), weight, out, bias, add=False)
    return out


def grouped_linear_add(x: Tensor, weight: GroupedWeight, residual: Tensor) -> Tensor:
    """Implement `QuantizedOps.grouped_linear_add`; `residual` is contiguous."""
    tokens = x.shape[0]
    if _widens(x, weight):
        return gemm_add(_ordered(x, weight), widen(weight, x.dtype), residual)
    if tokens != 1 or weight.bits != 4 or weight.float4:
        return grouped.grouped_linear_add(x, weight, residual)
    vector.multiply_grouped(_ordered(x, weight), weight, residual, None, add=True)
    return residual


def _widens(x: Tensor, weight: GroupedWeight) -> bool:
    """Tell whether cuBLAS multiplies."""
    if grouped_hopper.is_supported(x, weight):
        return x.shape[0] >= WIDEN_TOKENS_HOPPER
    return x.shape[0] >= WIDEN_TOKENS


def _ordered(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Return the inputs in the order of the weight's columns."""
    return x if weight.order is None else x.index_select(1, weight.order)
