"""The kernel of the gated activation."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.norm import inverse_rms


@dataclass(frozen=True, slots=True)
class ActivationConfig:
    """The tile of a program: `block` columns of one token, computed by `warps` warps."""

    block: int
    warps: int


CONFIG = ActivationConfig(block=1024, warps=4)


@triton.jit
def silu_of(x):
    """Return `x * sigmoid(x)` of float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [tokens, 2 * intermediate]
    unscaled_ptr,  # [tokens, HIDDEN]
    out_ptr,  # [tokens, intermediate]
    intermediate,
    gate_up_stride,
    eps,
    HIDDEN: tl.constexpr,  # 0 if nothing is to be divided
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute `silu(gate) * up`, after a division by the root mean square of `unscaled` if HIDDEN.

    A program computes BLOCK columns of one token. The grid is `[tokens * blocks]`; programs of one
    token are neighbours.
    """
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
    if HIDDEN:
        dim = tl.arange(0, BLOCK_H)
        x = tl.load(unscaled_ptr + token * HIDDEN + dim, mask=dim < HIDDEN, other=0.0)
        scale = inverse_rms(x.to(tl.float32), eps, HIDDEN, 0)
        gate *= scale
        up *= scale
    out = (silu_of(gate) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * intermediate + column, out, mask=mask)


def silu_mul(
    gate_up: Tensor,
    unscaled: Tensor | None = None,
    eps: float = 0.0,
    *,
    config: ActivationConfig = CONFIG,
) -> Tensor:
    """Implement `ActivationOps.silu_mul`; the rows of `gate_up` may have any stride."""
    tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, intermediate))
    if tokens == 0:
        return out
    pdl = dependent_launch(gate_up.device)
    _silu_mul_kernel[(tokens * cdiv(intermediate, config.block),)](
        gate_up,
        gate_up if unscaled is None else unscaled,
        out,
        intermediate,
        gate_up.stride(0),
        eps,
        HIDDEN=0 if unscaled is None else unscaled.shape[1],
        BLOCK=config.block,
        BLOCK_H=1 if unscaled is None else next_power_of_2(unscaled.shape[1]),
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out
