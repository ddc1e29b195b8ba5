"""The kernel that sums the experts' results for each token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.experts import ExpertRows
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2

MAX_BLOCK = 1024


@triton.jit
def _sum_kernel(
    parts_ptr,  # [pairs, features]
    weights_ptr,  # [tokens, TOP_K]
    rows_ptr,  # [pairs]
    residual_ptr,  # [tokens, features]
    shared_ptr,  # [tokens, features]
    gate_ptr,  # [tokens]
    features,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the experts of one token to BLOCK columns of its residual stream.

    The grid is `[tokens, features / BLOCK]`. SHARED: the output of another layer is added, with
    GATE times a sigmoid.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < features
    held = residual_ptr + token * features + column
    residual = tl.load(held, mask=mask, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + i).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + i)
        part = tl.load(parts_ptr + row * features + column, mask=mask, other=0.0)
        total += part.to(tl.float32) * weight
    if SHARED:
        part = tl.load(shared_ptr + token * features + column, mask=mask, other=0.0).to(tl.float32)
        if GATE:
            gate = tl.load(gate_ptr + token).to(tl.float32)
            part *= 1.0 / (1.0 + tl.exp(-gate))
        total += part
    total = total.to(residual.dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(held, total.to(residual.dtype), mask=mask)


def add_experts(
    parts: Tensor,
    weights: Tensor,
    rows: ExpertRows,
    residual: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Implement `ExpertOps.add_experts`; all tensors are contiguous."""
    tokens, features = residual.shape
    if tokens == 0:
        return residual
    block = min(MAX_BLOCK, next_power_of_2(features))
    pdl = dependent_launch(residual.device)
    _sum_kernel[(tokens, cdiv(features, block))](
        parts,
        weights,
        rows.rows,
        residual,
        residual if shared is None else shared,
        residual if shared_gate is None else shared_gate,
        features,
        TOP_K=rows.top_k,
        BLOCK=block,
        SHARED=shared is not None,
        GATE=shared_gate is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return residual
