"""Activations of feed-forward layers, gated or not, and the soft cap of logits."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh"]


class ActivationOps(Protocol):
    """Elementwise functions."""

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

    def activate(self, x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
        """Return `activation(gate) * up` if gated, else `activation(x)`, rounded once.

        GELU is from Hendrycks and Gimpel, 2016; `gelu_tanh` is their approximation
        `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))`. A gate with it is GeGLU (Shazeer,
        2020). Everything is computed in float32.

        Args:
            x: `[tokens, 2 * intermediate]` with the gates, then the values that they scale, if
                gated; else `[tokens, intermediate]`.
            activation: the function.
            gated: whether `x` has gates.

        Returns:
            `[tokens, intermediate]` in the dtype of `x`.
        """

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Replace `x` by `cap * tanh(x / cap)`, computed in float32 and rounded once.

        This keeps logits between `-cap` and `cap` (Gemma Team, 2024, "Gemma 2").

        Args:
            x: `[tokens, n]`, contiguous; changed in place.
            cap: above 0.

        Returns:
            `x`.
        """
