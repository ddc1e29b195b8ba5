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
from pagewire.worker.ops.triton.streamed import scaled as streamed
from pagewire.worker.ops.triton.streamed.scaled_choice import stream_of

# From this many tokens on, it is faster to widen a weight that is not arranged and to multiply with
# cuBLAS. Timed on an H200.
WIDEN_TOKENS = 64
# The same for arranged weights, which their own kernel widens once for each tile of tokens.
WIDEN_ARRANGED_TOKENS = 6144


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
    if out is None:
        out = x.values.new_empty((x.values.shape[0], weight.shape[0]), dtype=x.dtype)
    _multiply(x, weight, out, bias, add=False)
    return out


def scaled_linear_add(x: QuantizedInput, weight: ScaledWeight, residual: Tensor) -> Tensor:
    """Implement `QuantizedOps.scaled_linear_add`; `residual` is contiguous."""
    _multiply(x, weight, residual, None, add=True)
    return residual


def _multiply(
    x: QuantizedInput, weight: ScaledWeight, out: Tensor, bias: Tensor | None, add: bool
) -> None:
    """Store the product with quantized inputs in `out`; with `add`, add it."""
    tokens = x.values.shape[0]
    config = stream_of(tokens, weight, x.dtype)
    if config is not None and not config.own:
        streamed.multiply(x, weight, out, bias, add=add, config=config)
    elif tokens == 1:
        vector.multiply_scaled(x, weight, out, bias, add)
    elif add:
        scaled.scaled_linear_add(x, weight, out, shared=True)
    else:
        scaled.scaled_linear(x, weight, bias, out, shared=True)


def norm_quantize_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: ScaledWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Implement `QuantizedOps.norm_quantize_linear`; `out` is contiguous."""
    if out is None:
        out = x.new_empty((len(x), weight.shape[0]))
    if not _multiply_token(x, weight, out, bias, norm=True, norm_weight=norm_weight, eps=eps):
        quantized = norm_quantize(x, norm_weight, eps, weight.input_format)
        _multiply(quantized, weight, out, bias, add=False)
    return out


def quantize_linear_add(x: Tensor, weight: ScaledWeight, residual: Tensor) -> Tensor:
    """Implement `QuantizedOps.quantize_linear_add`; `residual` is contiguous."""
    if not _multiply_token(x, weight, residual, add=True):
        _multiply(quantize(x, weight.input_format), weight, residual, None, add=True)
    return residual


def norm_quantize_swiglu_add(
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    gate_up: ScaledWeight,
    down: ScaledWeight,
) -> Tensor:
    """Implement `QuantizedOps.norm_quantize_swiglu_add`; `residual` is contiguous."""
    tokens = len(residual)
    if tokens == 1:
        inner = residual.new_empty((1, down.shape[1]))
        if _multiply_token(
            residual, gate_up, inner, norm=True, norm_weight=norm_weight, eps=eps, gated=True
        ):
            return quantize_linear_add(inner, down, residual)
    quantized = norm_quantize(residual, norm_weight, eps, gate_up.input_format)
    config = stream_of(tokens, gate_up, residual.dtype, gated=True)
    if config is not None:
        inner = residual.new_empty((tokens, down.shape[1]))
        streamed.multiply(quantized, gate_up, inner, gated=True, config=config)
        return quantize_linear_add(inner, down, residual)
    choice = hopper.choose(quantized, gate_up, gated=True)
    if choice.shape is not None:
        inner = residual.new_empty((tokens, down.shape[1]))
        hopper.multiply(quantized, gate_up, inner, gated=True, choice=choice)
        return quantize_linear_add(inner, down, residual)
    both = scaled_linear(quantized, gate_up)
    return scaled_linear_add(silu_mul_quantize(both, down.input_format), down, residual)


def _multiply_token(
    x: Tensor,
    weight: ScaledWeight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    norm: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    add: bool = False,
) -> bool:
    """Quantize and multiply a single token in one kernel, if that is faster; tell whether it is
    done."""
    if not fused_vector.is_supported(x, weight):
        return False
    config = stream_of(1, weight, x.dtype, gated)
    if config is None:
        fused_vector.multiply(
            x, weight, out, bias, norm=norm, norm_weight=norm_weight, eps=eps, gated=gated, add=add
        )
    elif config.own:
        streamed.multiply_token(
            x, weight, out, bias, norm=norm, norm_weight=norm_weight, eps=eps, gated=gated,
            add=add, config=config,
        )  # fmt: skip
    return config is None or config.own


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
    return len(x) >= (WIDEN_TOKENS if weight.pairs is None else WIDEN_ARRANGED_TOKENS)


def _ordered(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Return the inputs in the order of the weight's columns."""
    return x if weight.order is None else x.index_select(1, weight.order)
