"""Masks of constrained rows. Nothing is read of the logits: excluded tokens get -inf."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.integers import cdiv

CHUNK = 4096
WARPS = 4


# Values of `mask_rows` are loaded one by one, so their alignment does not matter: compiled once.
@triton.jit(do_not_specialize_on_alignment=["mask_rows_ptr"])
def _mask_kernel(
    logits_ptr,  # [rows, vocabulary]
    stride,
    mask_rows_ptr,  # [rows]
    masks_ptr,  # [masks, words]
    words,
    vocabulary,
    CHUNK: tl.constexpr,
):
    """Write -inf for the excluded tokens of one chunk of ids of one row.

    The grid is `[chunks, rows]`.
    """
    row = tl.program_id(1).to(tl.int64)
    masked = tl.load(mask_rows_ptr + row).to(tl.int64)
    if masked < 0:
        return
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    known = ids < vocabulary
    word = tl.load(masks_ptr + masked * words + ids // 32, mask=known, other=-1)
    excluded = ((word >> (ids % 32)) & 1) == 0
    logits = logits_ptr + row * stride + ids
    tl.store(logits, tl.full((CHUNK,), -float("inf"), tl.float32), mask=known & excluded)


def mask_logits(logits: Tensor, mask_rows: Tensor, masks: Tensor) -> None:
    rows, vocabulary = logits.shape
    _mask_kernel[(cdiv(vocabulary, CHUNK), rows)](
        logits,
        logits.stride(0),
        mask_rows,
        masks,
        masks.shape[1],
        vocabulary,
        CHUNK=CHUNK,
        num_warps=WARPS,
    )
