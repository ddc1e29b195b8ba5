"""Products with quantized weights, by the kernel that is fastest for the number of tokens.

The results of different kernels may differ in their last bits. With `--batch-invariant`, the
functions of `scaled` and `grouped` are used instead, whose bits do not depend on the number of
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.worker.ops.contract.quantized import GroupedWeight, QuantizedInput, ScaledWeight
from pagewire.worker.ops.cublas.gemm import gemm, gemm_add
from pagewire.worker.ops.device import is_hopper
from pagewire.worker.ops.triton.quantized import (
    fragment_gemm,
    fragment_vector,
    fused_vector,
    grouped,
    hopper,
    scaled,
    vector,
)
from pagewire.worker.ops.triton.quantized.exchange import shared_sums
from pagewire.worker.ops.triton.quantized.fragments import arrange, is_supported
from pagewire.worker.ops.triton.quantized.matrices import widen
from pagewire.worker.ops.triton.rowwise.quantize import norm_quantize, quantize, silu_mul_quantize

# From this many tokens on, it is faster to widen a weight that is not arranged and to multiply with
# cuBLAS. Timed on an H200.
WIDEN_TOKENS = 64
# Numbers of tokens for which the product with gates and values also computes the activation. For
# more, that costs the product more time than it saves. Timed on an H100; the bits are the same.
GATED_TOKENS = range(384, 1025)


def arranged(weight: GroupedWeight) -> GroupedWeight:
    """Implement `QuantizedOps.arranged`: changes weights that Hopper's kernels read."""
    device = weight.values.device
    if not (is_hopper(device) and is_supported(weight)):
        return weight
    shared_sums(device)
    return arrange(weight)


def scaled_linear(
    x: QuantizedInput, weight: ScaledWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Implement `QuantizedOps.scaled_linear`; `out` is contiguous."""
    if x.values.shape[0] != 1:
        return scaled.scaled_linear(x, weight, bias, out, shared=True)
    if out is None:
        out = x.values.new_empty((1, weight.shape[0]), dtype=x.dtype)
    vector.multiply_scaled(x, weight, out, bias, add=False)
    return out


def scaled_linear_add(x: QuantizedInput, weight: ScaledWeight, residual: Tensor) -> Tensor:
    """Implement `QuantizedOps.scaled_linear_add`; `residual` is contiguous."""
    if x.values.shape[0] != 1:
        return scaled.scaled_linear_add(x, weight, residual, shared=True)
    vector.multiply_scaled(x, weight, residual, None, add=True)
    return residual


def norm_quantize_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: ScaledWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implement `QuantizedOps.norm_quantize_linear`; `out` is contiguous."""
    if not fused_vector.is_supported(x, weight):
        quantized = norm_quantize(x, norm_weight, eps, weight.input_format)
        return scaled_linear(quantized, weight, bias, out)
    if out is None:
        out = x.new_empty((1, weight.shape[0]))
    fused_vector.multiply(x, weight, out, bias, norm=True, norm_weight=norm_weight, eps=eps)
    return out


def quantize_linear_add(x: Tensor, weight: ScaledWeight, residual: Tensor) -> Tensor:
    """Implement `QuantizedOps.quantize_linear_add`; `residual` is contiguous."""
    if not fused_vector.is_supported(x, weight):
        return scaled_linear_add(quantize(x, weight.input_format), weight, residual)
    fused_vector.multiply(x, weight, residual, add=True)
    return residual


def norm_quantize_swiglu_add(
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    gate_up: ScaledWeight,
    down: ScaledWeight,
) -> Tensor:
    """Implement `QuantizedOps.norm_quantize_swiglu_add`; `residual` is contiguous."""
    if not fused_vector.is_supported(residual, gate_up):
        quantized = norm_quantize(residual, norm_weight, eps, gate_up.input_format)
        if len(residual) in GATED_TOKENS and hopper.is_supported(quantized, gate_up):
            inner = residual.new_empty((len(residual), down.shape[1]))
            choice = hopper.choose(quantized, gate_up, gated=True)
            hopper.multiply(quantized, gate_up, inner, gated=True, choice=choice)
            return quantize_linear_add(inner, down, residual)
        both = scaled_linear(quantized, gate_up)
        return scaled_linear_add(silu_mul_quantize(both, down.input_format), down, residual)
    inner = residual.new_empty((1, down.shape[1]))
    fused_vector.multiply(
        residual, gate_up, inner, norm=True, norm_weight=norm_weight, eps=eps, gated=True
    )
    return quantize_linear_add(inner, down, residual)


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Implement `QuantizedOps.grouped_linear`; the rows of `x` may have any stride."""
    if _widens(x, weight):
        x, wide = _ordered(x, weight), widen(weight, x.dtype)
        return gemm(x, wide, out) if bias is None else torch.addmm(bias, x, wide.t(), out=out)
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[0]))
    if not _multiplied(x, weight, out, bias, add=False):
        return grouped.grouped_linear(x, weight, bias, out)
    return out


def grouped_linear_add(x: Tensor, weight: GroupedWeight, residual: Tensor) -> Tensor:
    """Implement `QuantizedOps.grouped_linear_add`; `residual` is contiguous."""
    if _widens(x, weight):
        return gemm_add(_ordered(x, weight), widen(weight, x.dtype), residual)
    if not _multiplied(x, weight, residual, None, add=True):
        return grouped.grouped_linear_add(x, weight, residual)
    return residual


def _multiplied(
    x: Tensor, weight: GroupedWeight, out: Tensor, bias: Tensor | None, add: bool
) -> bool:
    """Compute the product if a kernel is faster than the plain one; tell whether it is computed."""
    tokens = x.shape[0]
    if weight.pairs is not None:
        multiply = fragment_vector.multiply if tokens == 1 else fragment_gemm.multiply
        multiply(_ordered(x, weight), weight, out, bias, add=add)
        return True
    if tokens != 1 or weight.bits != 4 or weight.float4:
        return False
    vector.multiply_grouped(_ordered(x, weight), weight, out, bias, add)
    return True


def _widens(x: Tensor, weight: GroupedWeight) -> bool:
    """Tell whether cuBLAS multiplies the widened weight."""
    return weight.pairs is None and x.shape[0] >= WIDEN_TOKENS


def _ordered(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Return the inputs in the order of the weight's columns."""
    return x if weight.order is None else x.index_select(1, weight.order)
