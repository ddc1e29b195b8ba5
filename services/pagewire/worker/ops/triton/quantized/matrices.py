"""Weights in four or eight bits as plain matrices, for products that cuBLAS computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight
from pagewire.worker.ops.device import dependent_launch
from pagewire.worker.ops.integers import cdiv
from pagewire.worker.ops.triton.quantized.fragments import BLOCK, magic
from pagewire.worker.ops.triton.quantized.widen import scales_of, widened

ROWS = 16  # weight rows of a program


@triton.jit
def _widen_kernel(
    values_ptr,  # [features, WORDS]
    scales_ptr,  # [features, groups]
    zeros_ptr,  # [features, groups]
    out_ptr,  # [features, K]
    features,
    K,
    groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    FLOAT4: tl.constexpr,
):
    """Widen a run of columns of ROWS rows. The grid is `[features / ROWS, runs]`."""
    WIDTH: tl.constexpr = RUN // 2 if BITS == 4 else RUN
    MIDDLE: tl.constexpr = 8.0 if BITS == 4 else 128.0
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)  # [ROWS, 1]
    here = row < features
    row = tl.minimum(row, features - 1)
    place = tl.arange(0, WIDTH)[None, :]
    start = tl.program_id(1) * RUN
    line = tl.cdiv(K, RUN) * WIDTH if BITS == 4 else K
    first = start // 2 if BITS == 4 else start
    scales, zeros = scales_ptr + row * groups, zeros_ptr + row * groups
    at = first + place
    values = tl.load(values_ptr + row * line + at, mask=at < line, other=0)
    out = out_ptr + row * K + start + place
    scale, zero = scales_of(scales, zeros, start, place, groups, GROUP, WIDTH, ZEROS)
    low = values & 15 if BITS == 4 else values
    low = widened(low, scale, zero, dtype, MIDDLE, ZEROS, FLOAT4)
    tl.store(out, low, here & (start + place < K))
    if BITS == 4:
        start += WIDTH
        scale, zero = scales_of(scales, zeros, start, place, groups, GROUP, WIDTH, ZEROS)
        high = widened(values >> 4, scale, zero, dtype, MIDDLE, ZEROS, FLOAT4)
        tl.store(out + WIDTH, high, here & (start + place < K))


@triton.jit
def _widen_arranged_kernel(
    words_ptr,  # [blocks, runs, BLOCK, threads, words]
    halves_ptr,  # [blocks, groups, BLOCK, 2], the pairs: a scale, and MAGIC plus the zero point
    out_ptr,  # [features, K]
    features,
    K,
    groups,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    MAGIC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Widen a run of columns of BLOCK rows; see `fragments`. The grid is `[blocks, runs]`.

    Differences and products are exact in float32, so weights are rounded once, as in
    `fragment_gemm`.
    """
    WORDS: tl.constexpr = RUN // 8
    block, run = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)[:, None]
    words = words_ptr + (block * (K // RUN) + run) * (BLOCK * WORDS)
    words = tl.load(words + place * WORDS + tl.arange(0, WORDS)[None, :])  # [BLOCK, WORDS]
    halves = halves_ptr + ((block * groups + run * RUN // GROUP) * BLOCK + place) * 2
    scale = tl.load(halves).to(tl.float32)  # [BLOCK, 1]
    zero = tl.load(halves + 1).to(tl.float32) - MAGIC
    near = _columns(words, scale, zero, out_ptr.dtype.element_ty, BLOCK)
    far = _columns(words >> 4, scale, zero, out_ptr.dtype.element_ty, BLOCK)
    # [BLOCK, far, columns of a half]
    both = tl.reshape(tl.permute(tl.join(near, far), (0, 2, 1)), (BLOCK, RUN))
    row = block * BLOCK + place
    out = out_ptr + row * K + run * RUN + tl.arange(0, RUN)[None, :]
    if PDL:
        gdc_wait()  # the memory of `out` may still be read, as another matrix or as activations
    tl.store(out, both, row < features)


@triton.jit
def _columns(words, scale, zero, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """Return half of a run `[BLOCK, RUN / 2]` as weights: every second of the nibbles."""
    first = tl.join(_number(words, scale, zero, dtype), _number(words >> 16, scale, zero, dtype))
    words = words >> 8
    behind = tl.join(_number(words, scale, zero, dtype), _number(words >> 16, scale, zero, dtype))
    # [BLOCK, threads, words, next column, 8 columns behind]
    parts = tl.reshape(tl.join(first, behind), (BLOCK, 4, 4, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 2, 4, 1, 3)), (BLOCK, 64))


@triton.jit
def _number(words, scale, zero, dtype: tl.constexpr):
    """Return the weights of the lowest nibbles, rounded to `dtype`."""
    return (((words & 15).to(tl.float32) - zero) * scale).to(dtype)


def widen(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight `[out_features, in_features]` as it is in a checkpoint, rounded to `dtype`.

    Columns keep the weight's order; the caller applies `weight.order` to the inputs.
    """
    features, k = weight.shape
    out = torch.empty(features, k, dtype=dtype, device=weight.values.device)
    if weight.pairs is not None:
        kind = weight.scales.dtype
        pdl = dependent_launch(out.device)
        _widen_arranged_kernel[(cdiv(features, BLOCK), k // RUN)](
            weight.values.view(torch.int32),
            weight.pairs.view(kind),
            out,
            features,
            k,
            weight.pairs.shape[1],
            GROUP=weight.group,
            RUN=RUN,
            BLOCK=BLOCK,
            MAGIC=magic(kind),
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
        return out
    _widen_kernel[(cdiv(features, ROWS), cdiv(k, RUN))](
        weight.values,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        features,
        k,
        weight.scales.shape[1],
        BITS=weight.bits,
        GROUP=weight.group,
        RUN=RUN,
        ROWS=ROWS,
        ZEROS=weight.zeros is not None,
        FLOAT4=weight.float4,
        num_warps=4,
    )
    return out
