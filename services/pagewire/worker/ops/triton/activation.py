"""The gated activation kernel."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.triton.device import dependent_launch


@dataclass(frozen=True, slots=True)
class ActivationConfig:
    """A program computes `block` columns of one token with `warps` warps."""

    block: int
    warps: int


CONFIG = ActivationConfig(block=1024, warps=4)


@triton.jit
def silu_of(x):
    """Return `x * sigmoid(x)` of float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    intermediate,
    gate_up_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of one token's columns; programs of a token are neighbours."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    blocks = tl.cdiv(intermediate, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = column < intermediate
    gate_ptr = gate_up_ptr + token * gate_up_stride + column
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + intermediate, mask=mask, other=0.0).to(tl.float32)
    out = (silu_of(gate) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * intermediate + column, out, mask=mask)


def silu_mul(gate_up: Tensor, *, config: ActivationConfig = CONFIG) -> Tensor:
    """Twin of `reference.activation.silu_mul`; rows of `gate_up` may lie apart."""
    tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, intermediate))
    if tokens == 0:
        return out
    pdl = dependent_launch(gate_up.device)
    _silu_mul_kernel[(tokens * triton.cdiv(intermediate, config.block),)](
        gate_up,
        out,
        intermediate,
        gate_up.stride(0),
        BLOCK=config.block,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out
