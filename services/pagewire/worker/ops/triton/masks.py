"""Kernels that wait for the masks of constrained rows and fetch them from the host.

They run beside the layers. Their programs are small, because each takes the place of others: decode
attention fills all multiprocessors. The kernels that sample apply the masks, see
`adjustments.load_chunk`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from pagewire.worker.ops.integers import next_power_of_2

# Words that a program copies at a time: each thread then has four reads of 16 bytes on the bus.
PIECE = 1024
FETCH_WARPS = 2


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["mask_rows_ptr", "stamps_ptr"]
)
def _await_kernel(
    ready_ptr,  # [slots], memory of the host
    mask_rows_ptr,  # [rows]
    stamps_ptr,  # [rows]
    rows,
    ROWS: tl.constexpr,
):
    """Wait until the slots of all rows are ready. The grid is `[1]`.

    Processes of the host write `ready`; other programs do not.
    """
    row = tl.arange(0, ROWS)
    slots = tl.load(mask_rows_ptr + row, mask=row < rows, other=-1)
    masked = slots >= 0
    stamps = tl.load(stamps_ptr + row, mask=masked, other=0)
    late = 1
    while late > 0:
        # Volatile: loaded again in each iteration.
        reached = tl.load(ready_ptr + slots, mask=masked, other=0, volatile=True)
        late = tl.sum((masked & (reached < stamps)).to(tl.int32), 0)


def await_masks(ready: Tensor, mask_rows: Tensor, stamps: Tensor) -> None:
    rows = len(mask_rows)
    _await_kernel[(1,)](
        ready, mask_rows, stamps, rows, ROWS=max(next_power_of_2(rows), 32), num_warps=1
    )


# Values of `mask_rows` are loaded one by one, so their alignment does not matter: compiled once.
@triton.jit(do_not_specialize_on_alignment=["mask_rows_ptr"])
def _fetch_kernel(
    host_ptr,  # [slots, words], memory of the host
    mask_rows_ptr,  # [rows]
    masks_ptr,  # [slots, words]
    words,
    PIECE: tl.constexpr,
):
    """Copy the mask of a row. The grid is `[rows]`."""
    slot = tl.load(mask_rows_ptr + tl.program_id(0)).to(tl.int64)
    if slot >= 0:
        for start in range(0, words, PIECE):
            columns = start + tl.arange(0, PIECE)
            known = columns < words
            # Volatile: a cache may hold masks of an earlier step.
            mask = tl.load(host_ptr + slot * words + columns, mask=known, volatile=True)
            tl.store(masks_ptr + slot * words + columns, mask, mask=known)


def fetch_masks(host: Tensor, mask_rows: Tensor, masks: Tensor) -> None:
    words = host.shape[1]
    assert masks.shape[1] == words
    assert words % 16 == 0  # so that 16 bytes are loaded at once
    piece = min(PIECE, next_power_of_2(words))
    _fetch_kernel[(len(mask_rows),)](
        host, mask_rows, masks, words, PIECE=piece, num_warps=FETCH_WARPS
    )


@triton.jit
def _now(INTERPRETED: tl.constexpr):
    """Return the nanoseconds of the device's clock; 0 in the interpreter, which has none."""
    if INTERPRETED:
        return tl.full((), 0, tl.int64)
    else:
        return globaltimer()


@triton.jit(do_not_specialize_on_alignment=["turns_ptr"])
def _time_kernel(
    times_ptr,  # [turns], memory of the host
    turns_ptr,  # [rows]
    INTERPRETED: tl.constexpr,
):
    """Store the time in `times`, at the index `turns[0]`."""
    tl.store(times_ptr + tl.load(turns_ptr), _now(INTERPRETED))


def note_time(times: Tensor, turns: Tensor) -> None:
    _time_kernel[(1,)](times, turns, INTERPRETED=turns.device.type == "cpu", num_warps=1)
