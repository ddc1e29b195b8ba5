"""The gated activation of a feed-forward layer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ActivationOps(Protocol):
    """The activation between the two halves of a feed-forward layer."""

    def silu_mul(self, gate_up: Tensor, unscaled: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """Return `silu(gate) * up`, computed in float32 and rounded once.

        This is SwiGLU without its GEMMs (Shazeer, 2020, "GLU Variants Improve Transformer").

        Args:
            gate_up: `[tokens, 2 * intermediate]`, the gates, then the values that they scale.
            unscaled: `[tokens, hidden]` or None. If given, `gate_up` was computed from `unscaled`
                instead of its RMSNorm. Gates and values are then first divided by the root mean
                square of `unscaled`.
            eps: added to the mean square of `unscaled`.

        Returns:
            `[tokens, intermediate]` in the dtype of `gate_up`.
        """
