"""Root-mean-square normalization with one order of addition, alone or at the begin of a GEMM.

The squares of a token are added on the tensor cores: the sum is an element of the diagonal of
`x @ x.T`, which adds the columns from the first to the last for every size of tile. A sum over the
threads of a program would depend on how many threads there are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv

TOKENS = 16  # of a program
COLUMNS = 128  # of a tile
WARPS = 4
STAGES = 3


@triton.jit
def inverse_rms(
    x_ptr,  # [tokens, BLOCK_K], the addresses of the first tile
    column,  # [1, BLOCK_K]
    present,  # [tokens, 1]
    K,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return `1 / sqrt(mean(x^2) + eps)` of each token, `[BLOCK_T]` float32."""
    products = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_ptr + start, mask=present & (start + column < K), other=0.0)
        products = tl.dot(x, tl.trans(x), products, input_precision="ieee")
    index = tl.arange(0, BLOCK_T)
    # One element and zeros: the sum is exact in any order.
    squares = tl.sum(tl.where(index[:, None] == index[None, :], products, 0.0), 1)
    return tl.rsqrt(tl.div_rn(squares, K.to(tl.float32)) + eps)


@triton.jit
def normalized(x, inverse, weight, WEIGHT: tl.constexpr):
    """Return `x [tokens, columns]` times `inverse [tokens]` and `weight [1, columns]` if WEIGHT.

    It is computed in float32 and rounded once to the dtype of `x`.
    """
    out = x.to(tl.float32) * inverse[:, None]
    if WEIGHT:
        out *= weight.to(tl.float32)
    return out.to(x.dtype)


@triton.jit(do_not_specialize=["tokens"])
def _rms_norm_kernel(
    x_ptr,  # [tokens, K]
    weight_ptr,  # [K]
    out_ptr,  # [tokens, K]
    tokens,
    K,
    x_stride,
    eps,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize rows of `x`.

    A program computes BLOCK_T rows. The grid is `[tokens / BLOCK_T]`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None].to(tl.int64)
    column = tl.arange(0, BLOCK_K)[None, :]
    present = token < tokens
    x_tile = x_ptr + token * x_stride + column
    inverse = inverse_rms(x_tile, column, present, K, eps, BLOCK_T, BLOCK_K, STAGES)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = start + column < K
        x = tl.load(x_tile + start, mask=present & inside, other=0.0)
        weight = 0.0
        if WEIGHT:
            weight = tl.load(weight_ptr + start + column, mask=inside, other=0.0)
        out = normalized(x, inverse, weight, WEIGHT)
        tl.store(out_ptr + token * K + start + column, out, mask=present & inside)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Implement `NormOps.rms_norm`; the rows of `x` may have any stride, its columns may not."""
    tokens, hidden = x.shape
    out = x.new_empty((tokens, hidden))
    if tokens == 0:
        return out
    pdl = dependent_launch(x.device)
    _rms_norm_kernel[(cdiv(tokens, TOKENS),)](
        x,
        x if weight is None else weight,
        out,
        tokens,
        hidden,
        x.stride(0),
        eps,
        BLOCK_T=TOKENS,
        BLOCK_K=COLUMNS,
        STAGES=STAGES,
        WEIGHT=weight is not None,
        PDL=pdl,
        num_warps=WARPS,
        launch_pdl=pdl,
        enable_fp_fusion=False,
    )
    return out
