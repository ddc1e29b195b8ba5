"""The kernels of root-mean-square and layer normalization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2

# Inputs of a layer with up to this many values have their norm folded into the next kernel.
MAX_SCALED_LATE = 1 << 19
_MAX_PAIRINGS = tl.constexpr(17)  # of 131,072 values


@triton.jit
def inverse_rms(x, eps, HIDDEN: tl.constexpr, AXIS: tl.constexpr):
    """Return `1 / sqrt(mean(x^2) + eps)` of float32 along AXIS: HIDDEN values, then zeros."""
    return inverse_rms_of(tl.sum(x * x, AXIS), eps, HIDDEN)


@triton.jit
def inverse_rms_of(squares, eps, HIDDEN: tl.constexpr):
    """Return the inverse root mean square of HIDDEN values; `squares` is the sum of theirs."""
    return tl.rsqrt(squares / HIDDEN + eps)


@triton.jit
def sum_of_pairs(x):
    """Return the sums of the rows of `x [rows, columns]`; `columns` is a power of two.

    Neighbours are added, then neighbours of the results, and so on. The order is the same in any
    layout.
    """
    for _ in tl.static_range(_MAX_PAIRINGS):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def ordered_inverse_rms(x, eps, HIDDEN: tl.constexpr):
    """Return `inverse_rms` of the rows of `x [rows, columns]`, with one order of addition.

    The calling kernel must not fuse multiplications with additions.
    """
    return tl.rsqrt(sum_of_pairs(x * x) / HIDDEN + eps)


@triton.jit(do_not_specialize=["tokens"])
def _rms_norm_kernel(
    x_ptr,  # [tokens, HIDDEN]
    weight_ptr,  # [HIDDEN]
    out_ptr,  # [tokens, HIDDEN]
    tokens,
    x_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize rows of `x`.

    A program computes ROWS whole rows. The grid is `[tokens / ROWS]`.
    """
    if PDL:
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mask = (row < tokens) & (column < HIDDEN)
    if WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()

    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    out = x * inverse_rms(x, eps, HIDDEN, 1)[:, None]
    if WEIGHT:
        out *= weight
    tl.store(out_ptr + row * HIDDEN + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _layer_norm_kernel(
    x_ptr,  # [tokens, HIDDEN]
    weight_ptr,  # [HIDDEN]
    bias_ptr,  # [HIDDEN]
    out_ptr,  # [tokens, HIDDEN]
    tokens,
    x_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize rows of `x`.

    A program computes ROWS whole rows. The grid is `[tokens / ROWS]`.
    """
    if PDL:
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)  # [ROWS, 1]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = column < HIDDEN
    mask = (row < tokens) & inside
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()

    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / HIDDEN
    x = tl.where(inside, x - mean[:, None], 0.0)
    out = x * inverse_rms(x, eps, HIDDEN, 1)[:, None] * weight
    if BIAS:
        out += bias
    tl.store(out_ptr + row * HIDDEN + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class NormConfig:
    """The tile of a program: `rows` rows, computed by `warps` warps."""

    rows: int
    warps: int


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, config: NormConfig | None = None
) -> Tensor:
    """Implement `NormOps.rms_norm`; the rows of `x` may have any stride, its columns may not."""
    tokens, hidden = x.shape
    out = x.new_empty((tokens, hidden))
    if tokens == 0:
        return out
    config = config or norm_config(tokens, hidden)
    pdl = dependent_launch(x.device)
    _rms_norm_kernel[(cdiv(tokens, config.rows),)](
        x,
        x if weight is None else weight,
        out,
        tokens,
        x.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=next_power_of_2(hidden),
        ROWS=config.rows,
        WEIGHT=weight is not None,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    config: NormConfig | None = None,
) -> Tensor:
    """Implement `NormOps.layer_norm`; the rows of `x` may have any stride, its columns may not."""
    tokens, hidden = x.shape
    out = x.new_empty((tokens, hidden))
    if tokens == 0:
        return out
    config = config or norm_config(tokens, hidden)
    pdl = dependent_launch(x.device)
    _layer_norm_kernel[(cdiv(tokens, config.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        tokens,
        x.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=next_power_of_2(hidden),
        ROWS=config.rows,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )
    return out


def scales_late(x: Tensor) -> bool:
    """Tell whether a GEMM should read `x [tokens, hidden]` before its norm, which is applied later.

    The kernel after the GEMM then divides by the root mean square of `x`, and the norm needs no
    kernel of its own. But that kernel must read `x` too, often a token in several programs, so this
    pays for few tokens only. On an H200, steps take 0.8 to 2.3 % less time with 8 to 512 rows of
    Qwen3-0.6B, and 0.2 to 0.8 % with 8 to 128 rows of Llama-3.1-8B. float16 is excluded because
    values could overflow before they are divided. See docs/decisions/norms-folded.md.
    """
    return x.numel() <= MAX_SCALED_LATE and x.dtype != torch.float16


def norm_config(tokens: int, hidden: int) -> NormConfig:
    """Choose one row per program for few tokens, and 4 to 8 KiB per program for many."""
    block = next_power_of_2(hidden)
    if tokens <= 256:
        return NormConfig(rows=1, warps=max(1, min(8, block // 512)))
    return NormConfig(rows=2 if block <= 2048 else 1, warps=max(4, min(16, block // 1024)))
