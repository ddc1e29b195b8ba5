"""Linear layers, alone and fused with the operations around them.

A fused operation has the result of its parts in sequence; an implementation may round fewer times
between them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LinearOps(Protocol):
    """Linear layers. A name lists what is computed, in this order."""

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
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

    def norm_linear(
        self,
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
            norm_weight: `[hidden]`, or None if it is already multiplied into `weight`.
            eps: added to the mean square.
            weight: `[out_features, hidden]`.
            bias: `[out_features]` or None.
            out: `[tokens, out_features]` to write to, or None for a new tensor.

        Returns:
            `[tokens, out_features]` in the dtype of `x`.
        """

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """Add `x @ weight.T` to `residual` in place.

        The product may be rounded to the dtype before the sum is, as cuBLAS does.

        Args:
            x: `[tokens, in_features]`.
            weight: `[out_features, in_features]`.
            residual: `[tokens, out_features]`.

        Returns:
            `residual`.
        """

    def norm_gate_up_silu_mul(
        self, x: Tensor, norm_weight: Tensor | None, eps: float, weight: Tensor
    ) -> Tensor:
        """Return `silu_mul(norm_linear(x, norm_weight, eps, weight))`.

        Args:
            x: `[tokens, hidden]`.
            norm_weight: `[hidden]`, or None if it is already multiplied into `weight`.
            eps: added to the mean square.
            weight: `[2 * intermediate, hidden]`, the rows of the gate projection, then those of
                the up projection.

        Returns:
            `[tokens, intermediate]` in the dtype of `x`.
        """
