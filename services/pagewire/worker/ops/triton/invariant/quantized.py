"""Operations that quantize a token and multiply it, in products with one order of addition."""

from __future__ import annotations

from torch import Tensor

from pagewire.worker.ops.contract.quantized import ScaledWeight
from pagewire.worker.ops.triton.quantized.scaled import scaled_linear, scaled_linear_add
from pagewire.worker.ops.triton.rowwise.quantize import norm_quantize, quantize, silu_mul_quantize


def norm_quantize_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: ScaledWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    return scaled_linear(norm_quantize(x, norm_weight, eps, weight.input_format), weight, bias, out)


def quantize_linear_add(x: Tensor, weight: ScaledWeight, residual: Tensor) -> Tensor:
    return scaled_linear_add(quantize(x, weight.input_format), weight, residual)


def norm_quantize_swiglu_add(
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    gate_up: ScaledWeight,
    down: ScaledWeight,
) -> Tensor:
    both = norm_quantize_linear(residual, norm_weight, eps, gate_up)
    return scaled_linear_add(silu_mul_quantize(both, down.input_format), down, residual)
