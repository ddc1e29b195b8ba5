"""The gated activation of a feed-forward layer in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pagewire.worker.ops.reference.norm import inverse_rms


def silu_mul(gate_up: Tensor, unscaled: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """Return `silu(gate) * up`, computed in float32 and rounded once.

    Args:
        gate_up: `[tokens, 2 * intermediate]`, the gates, then the values they scale.
        unscaled: `[tokens, hidden]`, what `gate_up` was computed from where its RMS norm was meant:
            gates and values are divided by its root mean square first. None: they are right.
        eps: added to the mean square of `unscaled`.

    Returns:
        `[tokens, intermediate]` in the dtype of `gate_up`.
    """
    wide = gate_up.float()
    if unscaled is not None:
        wide = wide * inverse_rms(unscaled, eps)
    gate, up = wide.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
