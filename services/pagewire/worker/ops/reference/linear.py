"""Linear layers, alone and with their neighbours, in plain torch.

The fused forms compute what their parts compute one after another. The Triton backend folds the
neighbours into the matrix product where the batch is small, which changes only the rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.worker.ops.reference.activation import silu_mul
from pagewire.worker.ops.reference.norm import rms_norm


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return `x @ weight.T + bias`.

    Args:
        x: `[tokens, in_features]`.
        weight: `[out_features, in_features]`.
        bias: `[out_features]` or None.
        out: `[tokens, out_features]` to write to, or None for a new tensor.

    Returns:
        `[tokens, out_features]` in the dtype of `x`.
    """
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return `linear(rms_norm(x, norm_weight, eps), weight, bias, out)`.

    Args:
        x: `[tokens, hidden]`.
        norm_weight: `[hidden]`, or None where `weight` holds it already.
        eps: added to the mean square.
        weight: `[out_features, hidden]`.
        bias: `[out_features]` or None.
        out: `[tokens, out_features]` to write to, or None for a new tensor.

    Returns:
        `[tokens, out_features]` in the dtype of `x`.
    """
    return linear(rms_norm(x, norm_weight, eps), weight, bias, out)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Add `x @ weight.T` to the residual stream in place.

    Args:
        x: `[tokens, in_features]`.
        weight: `[out_features, in_features]`.
        residual: `[tokens, out_features]`, becomes `residual + x @ weight.T`.

    Returns:
        `residual`.
    """
    return residual.add_(F.linear(x, weight))


def norm_gate_up_silu_mul(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor
) -> Tensor:
    """Return `silu_mul(norm_linear(x, norm_weight, eps, weight))`.

    Args:
        x: `[tokens, hidden]`.
        norm_weight: `[hidden]`, or None where `weight` holds it already.
        eps: added to the mean square.
        weight: `[2 * intermediate, hidden]`, the gate projection's rows, then the up projection's.

    Returns:
        `[tokens, intermediate]` in the dtype of `x`.
    """
    return silu_mul(norm_linear(x, norm_weight, eps, weight))
