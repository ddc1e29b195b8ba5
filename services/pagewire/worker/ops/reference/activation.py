"""Activations and the soft cap in plain torch; see `contract.activation`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.worker.ops.contract.activation import Activation
from pagewire.worker.ops.reference.norm import inverse_rms


def silu_mul(gate_up: Tensor, unscaled: Tensor | None = None, eps: float = 0.0) -> Tensor:
    wide = gate_up.float()
    if unscaled is not None:
        wide = wide * inverse_rms(unscaled, eps)
    gate, up = wide.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def activate(x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    if not gated:
        return _activated(x.float(), activation).to(x.dtype)
    gate, up = x.float().chunk(2, dim=-1)
    return (_activated(gate, activation) * up).to(x.dtype)


def _activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return x.copy_(torch.tanh(x.float() / cap) * cap)
