"""The two products of a layer with experts, by the kind of its weights."""

from __future__ import annotations

from torch import Tensor

from pagewire.worker.ops.contract.experts import ClampedSwiglu, ExpertRows
from pagewire.worker.ops.contract.quantized import (
    GroupedWeight,
    LinearWeight,
    QuantizedInput,
)
from pagewire.worker.ops.triton.experts.config import GemmConfig
from pagewire.worker.ops.triton.experts.gemm import plain_product
from pagewire.worker.ops.triton.experts.packed_gemm import packed_product
from pagewire.worker.ops.triton.experts.scaled_gemm import scaled_product


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
    return _product(x, weight, rows, bias, clamp, config, gated=True)


def experts_down(
    x: Tensor | QuantizedInput,
    weight: LinearWeight,
    rows: ExpertRows,
    bias: Tensor | None = None,
    *,
    config: GemmConfig | None = None,
) -> Tensor:
    """Implement `ExpertOps.experts_down`."""
    return _product(x, weight, rows, bias, None, config, gated=False)


def _product(
    x: Tensor | QuantizedInput,
    weight: LinearWeight,
    rows: ExpertRows,
    bias: Tensor | None,
    clamp: ClampedSwiglu | None,
    config: GemmConfig | None,
    *,
    gated: bool,
) -> Tensor:
    """Return the product for each row. All tensors but a plain `x` are contiguous."""
    experts = len(rows.starts) - 1
    features = weight.shape[1] if isinstance(weight, Tensor) else weight.shape[0] // experts
    out = rows.pairs.new_empty((len(rows.pairs), features // (1 + gated)), dtype=x.dtype)
    if not len(rows.pairs):
        return out
    if isinstance(weight, Tensor):
        assert isinstance(x, Tensor)
        return plain_product(x, weight, out, rows, bias, clamp, config, gated=gated)
    if isinstance(weight, GroupedWeight):
        assert isinstance(x, Tensor)
        return packed_product(x, weight, out, rows, bias, clamp, config, gated=gated)
    assert isinstance(x, QuantizedInput)
    return scaled_product(x, weight, out, rows, bias, clamp, config, gated=gated)
