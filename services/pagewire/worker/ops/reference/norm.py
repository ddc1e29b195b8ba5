"""Root-mean-square normalization in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale each row of `x` to unit root mean square, then by `weight` unless that is None.

    Computed in float32 and rounded once (Zhang and Sennrich, 2019, "Root Mean Square Layer
    Normalization").

    Args:
        x: `[tokens, hidden]`.
        weight: `[hidden]` or None.
        eps: added to the mean square.

    Returns:
        `[tokens, hidden]` in the dtype of `x`.
    """
    wide = x.float() * inverse_rms(x, eps)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return `1 / sqrt(mean(x^2) + eps)` of each row `[..., hidden]`; `[..., 1]` float32."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` to the residual stream in place and return the stream's `rms_norm`.

    The norm is of the sum as it was rounded to the dtype of `residual`, so it equals the norm of
    what the next layer reads.

    Args:
        x: `[tokens, hidden]`.
        residual: `[tokens, hidden]`, becomes `x + residual`.
        weight: `[hidden]`.
        eps: added to the mean square.

    Returns:
        `[tokens, hidden]` in the dtype of `x`.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps).to(x.dtype)
