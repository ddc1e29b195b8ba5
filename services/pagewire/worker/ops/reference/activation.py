"""The gated activation in plain torch; see `contract.activation`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pagewire.worker.ops.reference.norm import inverse_rms


def silu_mul(gate_up: Tensor, unscaled: Tensor | None = None, eps: float = 0.0) -> Tensor:
    wide = gate_up.float()
    if unscaled is not None:
        wide = wide * inverse_rms(unscaled, eps)
    gate, up = wide.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
