"""Root-mean-square normalization with one order of addition, and its factors alone.

Squares are added in pairs (`ordered_inverse_rms`). A sum over the threads of a program would depend
on the number of threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.rowwise.norm import (
    MAX_SCALED_LATE,
    norm_config,
    ordered_inverse_rms,
)


@triton.jit(do_not_specialize=["tokens"])
def _rms_norm_kernel(
    x_ptr,  # [tokens, HIDDEN]
    weight_ptr,  # [HIDDEN]
    out_ptr,  # [tokens, HIDDEN], or [tokens] float32 if FACTORS
    tokens,
    x_stride,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHT: tl.constexpr,
    FACTORS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize rows of `x`, or with FACTORS write only the factors of the rows.

    A program computes ROWS whole rows. The grid is `[tokens / ROWS]`.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    present = row < tokens
    mask = present[:, None] & (column < HIDDEN)
    row = row.to(tl.int64)
    if WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row[:, None] * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    inverse = ordered_inverse_rms(x, eps, HIDDEN)
    if FACTORS:
        tl.store(out_ptr + row, inverse, mask=present)
    else:
        out = x * inverse[:, None]
        if WEIGHT:
            out *= weight
        to = out_ptr + row[:, None] * HIDDEN + column
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Implement `NormOps.rms_norm`; the rows of `x` may have any stride, its columns may not."""
    return _launch(x, weight, eps, x.new_empty(x.shape))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return `1 / sqrt(mean(x^2) + eps)` of each row of `x [tokens, hidden]`, float32."""
    return _launch(x, None, eps, x.new_empty(len(x), dtype=torch.float32))


def is_late(x: Tensor, bias: Tensor | None = None) -> bool:
    """Tell whether the norm of `x`, which has no weight of its own, is applied after the next GEMM.

    This is the same for any number of tokens. A bias must be added to a normalized product, and in
    float16 products could overflow.
    """
    return x.dtype != torch.float16 and bias is None


def factors_of(x: Tensor, eps: float) -> tuple[Tensor | None, Tensor | None]:
    """Return what the kernel after a GEMM needs to apply the norm of `x`: `x`, or `inverse_rms`.

    That kernel has several programs for a token. With many tokens, not all of them should read `x`.
    """
    if x.numel() <= MAX_SCALED_LATE:
        return x, None
    return None, inverse_rms(x, eps)


def _launch(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> Tensor:
    tokens, hidden = x.shape
    if tokens == 0:
        return out
    config = norm_config(tokens, hidden)
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
        FACTORS=out.ndim == 1,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out
