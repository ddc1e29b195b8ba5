"""Linear layers with quantized weights in plain torch; see `contract.quantized`.

Each call widens the whole weight: this is slow, but works on any device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.worker.ops.contract.quantized import (
    FLOAT4,
    LARGEST,
    RUN,
    GroupedWeight,
    InputFormat,
    QuantizedInput,
    QuantizedWeight,
    ScaledWeight,
)
from pagewire.worker.ops.reference.activation import silu_mul
from pagewire.worker.ops.reference.norm import rms_norm


def quantize(x: Tensor, inputs: InputFormat) -> QuantizedInput:
    tokens, width = x.shape
    group, largest = inputs.group or width, LARGEST[inputs.dtype]
    missing = -width % group
    wide = F.pad(x.float(), (0, missing)).view(tokens, -1, group)  # [tokens, groups, group]
    if inputs.scale is None:
        highest = wide.abs().amax(-1)
        # Divided by a tensor: divided by a number, torch on a GPU multiplies by its reciprocal.
        scales = highest / torch.full_like(highest, largest)
        scales = torch.where(scales == 0, 1.0, scales)  # [tokens, groups]
    else:
        scales = inputs.scale.expand(tokens, wide.shape[1])
    scaled = (wide / scales.unsqueeze(-1)).clamp(-largest, largest)
    if inputs.dtype == torch.int8:
        scaled = scaled.round()
    values = scaled.view(tokens, -1)[:, :width].to(inputs.dtype)
    return QuantizedInput(values, scales, x.dtype)


def norm_quantize(
    x: Tensor, norm_weight: Tensor | None, eps: float, inputs: InputFormat
) -> QuantizedInput:
    return quantize(rms_norm(x, norm_weight, eps), inputs)


def silu_mul_quantize(gate_up: Tensor, inputs: InputFormat) -> QuantizedInput:
    return quantize(silu_mul(gate_up), inputs)


def scaled_linear(
    x: QuantizedInput, weight: ScaledWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    width = weight.shape[1]
    scales = x.scales.repeat_interleave(weight.block[1], 1)[:, :width]
    product = (x.values.float() * scales) @ dequantized(weight).t()
    return _finish(product, bias, x.dtype, out)


def scaled_linear_add(x: QuantizedInput, weight: ScaledWeight, residual: Tensor) -> Tensor:
    return residual.add_(scaled_linear(x, weight))


def arranged(weight: GroupedWeight) -> GroupedWeight:
    return weight


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


def grouped_linear(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    given = x if weight.order is None else x[:, weight.order]
    wide = dequantized(weight).to(x.dtype).float()  # [out_features, in_features]
    return _finish(given.float() @ wide.t(), bias, x.dtype, out)


def grouped_linear_add(x: Tensor, weight: GroupedWeight, residual: Tensor) -> Tensor:
    return residual.add_(grouped_linear(x, weight))


def dequantized(weight: QuantizedWeight) -> Tensor:
    """Return a weight `[out_features, in_features]` in float32.

    Columns of a grouped weight keep their order in `values`.
    """
    rows, columns = weight.shape
    if isinstance(weight, ScaledWeight):
        height, width = weight.block
        scales = weight.scales.repeat_interleave(height, 0)[:rows]
        return weight.values.float() * scales.repeat_interleave(width, 1)[:, :columns]
    if weight.float4:
        numbers = torch.tensor(FLOAT4, device=weight.values.device)[_unpacked(weight).long()]
        powers = (weight.scales.float() - 127).exp2()
        return numbers * powers.repeat_interleave(weight.group, 1)[:, :columns]
    scales = weight.scales.float().repeat_interleave(weight.group, 1)[:, :columns]
    if weight.zeros is None:
        return (_unpacked(weight) - float(1 << (weight.bits - 1))) * scales
    zeros = weight.zeros.float().repeat_interleave(weight.group, 1)[:, :columns]
    return (_unpacked(weight) - zeros) * scales


def _unpacked(weight: GroupedWeight) -> Tensor:
    """The values `[out_features, in_features]` as float32."""
    if weight.bits == 8:
        return weight.values.float()
    values = weight.values
    if weight.pairs is not None:
        # Arranged: [blocks, runs, rows, threads, words, next column, 8 columns].
        blocks = values.view(-1, weight.columns // RUN, 64, 4, 4, 2, 2)
        values = blocks.permute(0, 2, 1, 4, 6, 3, 5).reshape(values.shape)[: weight.shape[0]]
    runs = values.view(len(values), -1, RUN // 2)
    halves = torch.cat((runs & 15, runs >> 4), dim=-1)  # [out_features, runs, RUN]
    return halves.flatten(1)[:, : weight.columns].float()


def _finish(product: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Add the bias to a float32 product, and round it once."""
    if bias is not None:
        product = product + bias.float()
    return product.to(dtype) if out is None else out.copy_(product)
