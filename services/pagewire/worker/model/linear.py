"""Linear layers of the decoder whose weight may be quantized.

The input of a scaled weight is quantized before the product, together with the norm before it. The
weight of that norm is never multiplied into a quantized matrix.
"""

from torch import Tensor

from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.quantized import (
    GroupedWeight,
    LinearWeight,
    QuantizedInput,
    QuantizedWeight,
    ScaledWeight,
)


def linear(
    ops: Ops,
    x: Tensor | QuantizedInput,
    weight: LinearWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, `[tokens, out_features]`: `out` if given.

    `x` may be quantized already only for a scaled weight, in the weight's `input_format`.
    """
    if isinstance(weight, ScaledWeight):
        if isinstance(x, Tensor):
            x = ops.quantize(x, weight.input_format)
        return ops.scaled_linear(x, weight, bias, out)
    assert isinstance(x, Tensor)
    if isinstance(weight, GroupedWeight):
        return ops.grouped_linear(x, weight, bias, out)
    return ops.linear(x, weight, bias, out)


def norm_linear(
    ops: Ops,
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: LinearWeight,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`rms_norm(x, norm, eps) @ weight.T + bias`, `[tokens, out_features]`: `out` if given."""
    if isinstance(weight, Tensor):
        return ops.norm_linear(x, norm, eps, weight, bias, out)
    if isinstance(weight, GroupedWeight):
        return ops.grouped_linear(ops.rms_norm(x, norm, eps), weight, bias, out)
    return ops.norm_quantize_linear(x, norm, eps, weight, bias, out)


def linear_add(
    ops: Ops, x: Tensor | QuantizedInput, weight: QuantizedWeight, residual: Tensor
) -> Tensor:
    """Adds `linear(ops, x, weight)` to `residual [tokens, out_features]` in place; returns it."""
    if isinstance(weight, ScaledWeight):
        if isinstance(x, Tensor):
            return ops.quantize_linear_add(x, weight, residual)
        return ops.scaled_linear_add(x, weight, residual)
    assert isinstance(x, Tensor)
    return ops.grouped_linear_add(x, weight, residual)
