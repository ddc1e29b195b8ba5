"""The kernels of activations, gated or not, and of the soft cap of logits."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.contract.activation import Activation
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.rowwise.norm import inverse_rms, ordered_inverse_rms


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
def tanh_of(x):
    """Return `tanh(x)` of float32, with an absolute error of 2^-23."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _activation_of(x, ACTIVATION: tl.constexpr):
    """Return the activation of float32."""
    if ACTIVATION == "silu":
        return silu_of(x)
    if ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh_of(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _activate_kernel(
    x_ptr,  # [tokens, 2 * intermediate] if GATED, else [tokens, intermediate]
    out_ptr,  # [tokens, intermediate]
    intermediate,
    x_stride,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the activation of `x`; if GATED, of its first half, times its second half.

    A program computes BLOCK columns of one token. The grid is `[tokens * blocks]`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    blocks = tl.cdiv(intermediate, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = column < intermediate
    at = x_ptr + token * x_stride + column
    out = _activation_of(tl.load(at, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        out *= tl.load(at + intermediate, mask=mask, other=0.0).to(tl.float32)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * intermediate + column, out, mask=mask)


@triton.jit
def _soft_cap_kernel(x_ptr, count, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Cap BLOCK of `count` adjacent values in place."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    out = tanh_of(x / cap) * cap
    tl.store(x_ptr + at, out.to(x_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [tokens, 2 * intermediate]
    unscaled_ptr,  # [tokens, HIDDEN], or [tokens] float32 if GIVEN
    out_ptr,  # [tokens, intermediate]
    intermediate,
    gate_up_stride,
    eps,
    HIDDEN: tl.constexpr,  # 0 if nothing is divided
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GIVEN: tl.constexpr,
    ORDERED: tl.constexpr,
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
        if ORDERED:
            scale = ordered_inverse_rms(x.to(tl.float32)[None, :], eps, HIDDEN)
        else:
            scale = inverse_rms(x.to(tl.float32), eps, HIDDEN, 0)
        gate *= scale
        up *= scale
    if GIVEN:
        scale = tl.load(unscaled_ptr + token)
        gate *= scale
        up *= scale
    out = (silu_of(gate) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * intermediate + column, out, mask=mask)


def silu_mul(
    gate_up: Tensor,
    unscaled: Tensor | None = None,
    eps: float = 0.0,
    *,
    inverse: Tensor | None = None,
    ordered: bool = False,
    config: ActivationConfig = CONFIG,
) -> Tensor:
    """Implement `ActivationOps.silu_mul`; the rows of `gate_up` may have any stride.

    `inverse [tokens]` float32 are the inverse root mean squares of `unscaled`, which is then None.
    With `ordered`, sums have one order of addition, and nothing is fused.
    """
    tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, intermediate))
    if tokens == 0:
        return out
    pdl = dependent_launch(gate_up.device)
    launch = {"enable_fp_fusion": False} if ordered else {}
    scaled_by = unscaled if inverse is None else inverse
    _silu_mul_kernel[(tokens * cdiv(intermediate, config.block),)](
        gate_up,
        gate_up if scaled_by is None else scaled_by,
        out,
        intermediate,
        gate_up.stride(0),
        eps,
        HIDDEN=0 if unscaled is None else unscaled.shape[1],
        BLOCK=config.block,
        BLOCK_H=1 if unscaled is None else next_power_of_2(unscaled.shape[1]),
        GIVEN=inverse is not None,
        ORDERED=ordered,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
        **launch,
    )
    return out


def activate(
    x: Tensor, activation: Activation, *, gated: bool, config: ActivationConfig = CONFIG
) -> Tensor:
    """Implement `ActivationOps.activate`; the rows of `x` may have any stride."""
    tokens, intermediate = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = x.new_empty((tokens, intermediate))
    if tokens == 0:
        return out
    pdl = dependent_launch(x.device)
    _activate_kernel[(tokens * cdiv(intermediate, config.block),)](
        x,
        out,
        intermediate,
        x.stride(0),
        ACTIVATION=activation,
        GATED=gated,
        BLOCK=config.block,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out


def soft_cap(x: Tensor, cap: float, *, config: ActivationConfig = CONFIG) -> Tensor:
    """Implement `ActivationOps.soft_cap`."""
    if x.numel() == 0:
        return x
    pdl = dependent_launch(x.device)
    _soft_cap_kernel[(cdiv(x.numel(), config.block),)](
        x,
        x.numel(),
        cap,
        BLOCK=config.block,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return x
