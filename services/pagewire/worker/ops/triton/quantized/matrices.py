"""Weights in four or eight bits as plain matrices, for products that cuBLAS computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract.quantized import RUN, GroupedWeight
from pagewire.worker.ops.integers import cdiv
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
    ARRANGED: tl.constexpr,
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
    at = row * line + first + place
    if ARRANGED:  # see `fragments`; the stored columns are contiguous
        byte = place // 2 % 4 * 16 + place // 16 * 4 + place % 2 * 2 + place // 8 % 2
        at = (row // 64 * (K // RUN) + tl.program_id(1)) * (64 * WIDTH) + row % 64 * WIDTH + byte
    values = tl.load(values_ptr + at, mask=first + place < line, other=0)
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


def widen(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight `[out_features, in_features]` as it is in a checkpoint, rounded to `dtype`.

    Columns keep the weight's order; the caller applies `weight.order` to the inputs.
    """
    features, k = weight.shape
    out = torch.empty(features, k, dtype=dtype, device=weight.values.device)
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
        ARRANGED=weight.pairs is not None,
        num_warps=4,
    )
    return out
