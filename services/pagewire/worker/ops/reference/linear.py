"""Linear layers, alone and fused, in plain torch; see `contract.linear`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.worker.ops.reference.activation import silu_mul
from pagewire.worker.ops.reference.norm import rms_norm


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
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
    return linear(rms_norm(x, norm_weight, eps), weight, bias, out)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return residual.add_(F.linear(x, weight))


def norm_gate_up_silu_mul(
    x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor
) -> Tensor:
    return silu_mul(norm_linear(x, norm_weight, eps, weight))
