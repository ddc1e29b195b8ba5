"""Attention in tiles and segments at fixed positions, the same for all kernels of this package.

The KV positions of a sequence are cut into segments of SEGMENT positions, and a segment into tiles
of TILE, both from position 0. Each segment starts its own softmax, computed online over its tiles
(`attend_tile`). Segments are then added in the order of their positions (`fold`). So it does not
matter which program computes a segment, or whether its queries are of a decode step or a prompt.

The layout of threads does not change the accumulators of tensor cores, the maxima, or the sum of
the weights of a tile. These weights are multiples of 2^-17 and at most 1, so a sum of 64 weights is
exact in float32.

A tile in which a row sees no position leaves that row's bits unchanged, and so does such a segment:
its maximum is LOWEST, and its sum and output are 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.triton.attention.paged import LOWEST, in_type_of, widened

TILE = 64
SEGMENT = 256
TILES = SEGMENT // TILE

# Adding and subtracting 64 rounds a weight to a multiple of 2^-17: from 64 to 128, float32 has no
# finer numbers.
_ROUND = tl.constexpr(64.0)


def check_options(
    window: int | None, soft_cap: float | None = None, sinks: Tensor | None = None
) -> None:
    """Refuse options that these kernels lack; `startup.one_answer` refuses models with them."""
    if window is not None or soft_cap is not None:
        raise ValueError(
            f"attention with one order of addition has no windows and no soft caps; given are "
            f"{window} and {soft_cap}: use the triton operations"
        )
    if sinks is not None:
        raise ValueError(
            f"attention with one order of addition has no sinks; given are those of {len(sinks)} "
            "heads: use the triton operations"
        )


@triton.jit
def without_origin(numbers, INTERPRETED: tl.constexpr):
    """Return `numbers` so that the compiler cannot detect that they were loaded as FP8.

    Otherwise a thread that uses mma.sync holds four adjacent columns of an operand instead of two.
    Then instructions add other columns than wgmma does, and sums round differently.
    """
    if INTERPRETED or numbers.dtype == tl.float32:
        return numbers
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [numbers], dtype=numbers.dtype, is_pure=False, pack=2
        )


@triton.jit
def attend_tile(
    highest,  # [ROWS], largest score of the segment so far
    norm,  # [ROWS], sum of its weights so far
    out,  # [ROWS, head_dim], sum of its weighted values so far
    q,  # [ROWS, head_dim]
    k,  # [TILE, head_dim]
    v,  # [TILE, head_dim], finite also where nothing is seen
    k_scales,  # [TILE], if FP8
    v_scales,  # [TILE], finite also where nothing is seen
    seen,  # [ROWS, TILE] or [1, TILE]
    scale_log2,
    MASKED: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add a tile to its segment; return `highest, norm, out`. Without MASKED every row sees all."""
    if FP8:
        k = without_origin(in_type_of(k, q), INTERPRETED)
        v, v_scales = widened(v, v_scales, q)
        v = without_origin(v, INTERPRETED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [ROWS, TILE]
    if FP8:
        scores *= k_scales[None, :]
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
    decay = tl.exp2(highest - new_highest)
    weights = tl.exp2(scores * scale_log2 - new_highest[:, None])
    weights = (weights + _ROUND) - _ROUND
    norm = norm * decay + tl.sum(weights, 1)
    out = out * decay[:, None]
    if FP8:
        weights *= v_scales[None, :]
    out = tl.dot(weights.to(v.dtype), v, out, input_precision=PRECISION)
    return new_highest, norm, out


@triton.jit
def start(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return `highest, norm, out` of no positions."""
    highest = tl.full([ROWS], LOWEST, tl.float32)
    return highest, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, HEAD_DIM], tl.float32)


@triton.jit
def fold(all_highest, all_norm, all_out, highest, norm, out):
    """Add the next segment to all segments before it; return `highest, norm, out` of them all."""
    new_highest = tl.maximum(all_highest, highest)
    before = tl.exp2(all_highest - new_highest)
    added = tl.exp2(highest - new_highest)
    new_norm = all_norm * before + norm * added
    return new_highest, new_norm, all_out * before[:, None] + out * added[:, None]


@triton.jit
def finished(norm, out):
    """Return the result `[ROWS, head_dim]` of all segments of a row."""
    # Adding 0 turns -0 into 0, as a tile without visible positions would.
    return out * tl.div_rn(1.0, norm)[:, None] + 0.0
