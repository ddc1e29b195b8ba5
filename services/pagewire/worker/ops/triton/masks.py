"""Masks of constrained rows: fetched from the host, and applied.

Nothing is read of the logits: excluded tokens get -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.integers import cdiv

CHUNK = 4096
WARPS = 4

# Words that a program copies: each thread reads 16 bytes four times over the bus.
PIECE = 2048


# Values of `mask_rows` are loaded one by one, so their alignment does not matter: compiled once.
@triton.jit(do_not_specialize_on_alignment=["mask_rows_ptr"])
def _mask_kernel(
    logits_ptr,  # [rows, vocabulary]
    stride,
    mask_rows_ptr,  # [rows]
    masks_ptr,  # [masks, words]
    mask_stride,
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
    word = tl.load(masks_ptr + masked * mask_stride + ids // 32, mask=known, other=-1)
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
        masks.stride(0),
        vocabulary,
        CHUNK=CHUNK,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "generations_ptr", "indices_ptr"])
def _fetch_kernel(
    masks_ptr,  # [slots, words]
    host_ptr,  # [slots, words], pinned memory of the host, as the next two
    ready_ptr,  # [slots] int64
    given_up_ptr,  # [slots] int64
    slots_ptr,  # [rows]
    generations_ptr,  # [rows]
    indices_ptr,  # [rows]
    stride,
    PIECE: tl.constexpr,
):
    """Wait for the mask of one row and copy a piece of it. The grid is `[rows, pieces]`.

    What a program waits for is written by processes of the host, not by other programs.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    stamp = (tl.load(generations_ptr + row).to(tl.int64) << 32) + tl.load(indices_ptr + row)
    # Volatile: loaded anew each time.
    reached = tl.load(ready_ptr + slot, volatile=True)
    given_up = tl.load(given_up_ptr + slot, volatile=True)
    while (reached < stamp) & (given_up < stamp):
        reached = tl.load(ready_ptr + slot, volatile=True)
        given_up = tl.load(given_up_ptr + slot, volatile=True)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    known = columns < stride
    mask = tl.load(host_ptr + slot * stride + columns, mask=known)
    tl.store(masks_ptr + slot * stride + columns, mask, mask=known)


def fetch_masks(
    masks: Tensor,
    host: Tensor,
    ready: Tensor,
    given_up: Tensor,
    slots: Tensor,
    generations: Tensor,
    indices: Tensor,
) -> None:
    stride = host.stride(0)  # what is between rows is copied, too: so pieces are aligned
    assert masks.stride() == host.stride()
    _fetch_kernel[(len(slots), cdiv(stride, PIECE))](
        masks,
        host,
        ready,
        given_up,
        slots,
        generations,
        indices,
        stride,
        PIECE=PIECE,
        num_warps=WARPS,
    )
