"""The two projections of a layer with experts, by the kind of its weights."""

from __future__ import annotations

from torch import Tensor

from pagewire.worker.ops.contract.experts import ClampedSwiglu, ExpertRows
from pagewire.worker.ops.contract.quantized import (
    GroupedWeight,
    LinearWeight,
    QuantizedInput,
)
from pagewire.worker.ops.triton.experts.config import GemmConfig
from pagewire.worker.ops.triton.experts.gemm import multiply_plain
from pagewire.worker.ops.triton.experts.packed_gemm import multiply_packed
from pagewire.worker.ops.triton.experts.scaled_gemm import multiply_scaled


def experts_gate_up_silu_mul(
    x: Tensor | QuantizedInput,
    weight: LinearWeight,
    rows: ExpertRows,
    bias: Tensor | None = None,
    clamp: ClampedSwiglu | None = None,
    *,
    config: GemmConfig | None = None,
) -> Tensor:
    """Implement `ExpertOps.experts_gate_up_silu_mul`."""
    return _project(x, weight, rows, bias, clamp, config, gated=True)


def experts_down(
    x: Tensor | QuantizedInput,
    weight: LinearWeight,
    rows: ExpertRows,
    bias: Tensor | None = None,
    *,
    config: GemmConfig | None = None,
) -> Tensor:
    """Implement `ExpertOps.experts_down`."""
    return _project(x, weight, rows, bias, None, config, gated=False)


def _project(
    x: Tensor | QuantizedInput,
    weight: LinearWeight,
    rows: ExpertRows,
    bias: Tensor | None,
    clamp: ClampedSwiglu | None,
    config: GemmConfig | None,
    *,
    gated: bool,
) -> Tensor:
    """Return the projection of each row. All tensors but a plain `x` are contiguous."""
    experts = len(rows.starts) - 1
    features = weight.shape[1] if isinstance(weight, Tensor) else weight.shape[0] // experts
    out = rows.pairs.new_empty((len(rows.pairs), features // (1 + gated)), dtype=x.dtype)
    if not len(rows.pairs):
        return out
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        return multiply_plain(x, weight, out, rows, bias, clamp, config, gated=gated)
    if isinstance(weight, GroupedWeight):
        assert isinstance(x, Tensor)
        return multiply_packed(x, weight, out, rows, bias, clamp, config, gated=gated)
    assert isinstance(x, QuantizedInput)
    return multiply_scaled(x, weight, out, rows, bias, clamp, config, gated=gated)
