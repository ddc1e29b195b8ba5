"""The gated activation of a feed-forward layer in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate_up: `[tokens, 2 * intermediate]`, the gates, then the values they scale.

    Returns:
        `[tokens, intermediate]` in the dtype of `gate_up`.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
