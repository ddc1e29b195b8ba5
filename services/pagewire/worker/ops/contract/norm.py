"""Root-mean-square and layer normalization."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class NormOps(Protocol):
    """Normalization of the residual stream."""

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Return `x / sqrt(mean(x^2) + eps) * weight`, computed in float32 and rounded once.

        RMSNorm is from Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization".

        Args:
            x: `[tokens, hidden]`.
            weight: `[hidden]`, or None for no weight.
            eps: added to the mean square.

        Returns:
            `[tokens, hidden]` in the dtype of `x`.
        """

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, in float32, rounded once.

        LayerNorm is from Ba, Kiros and Hinton, 2016, "Layer Normalization".

        Args:
            x: `[tokens, hidden]`.
            weight: `[hidden]`.
            bias: `[hidden]` or None.
            eps: added to the variance.

        Returns:
            `[tokens, hidden]` in the dtype of `x`.
        """
