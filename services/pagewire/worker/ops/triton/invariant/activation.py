"""The gated activation, with the same bits as the GEMM of few tokens, which applies it itself."""

from __future__ import annotations

from torch import Tensor

from pagewire.worker.ops.triton.rowwise import activation


def silu_mul(
    gate_up: Tensor,
    unscaled: Tensor | None = None,
    eps: float = 0.0,
    *,
    inverse: Tensor | None = None,
) -> Tensor:
    """Implement `ActivationOps.silu_mul`; `inverse` is as in the usual function."""
    return activation.silu_mul(gate_up, unscaled, eps, inverse=inverse, ordered=True)
