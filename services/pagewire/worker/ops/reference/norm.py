"""Root-mean-square and layer normalization in plain torch; see `contract.norm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float() * inverse_rms(x, eps)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), wide, eps).to(x.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return `1 / sqrt(mean(x^2) + eps)` of each row `[..., hidden]`; `[..., 1]` float32."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
