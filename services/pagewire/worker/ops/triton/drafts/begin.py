"""The kernel at the beginning of a decode step whose rows may be drafts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract.drafts import LocatedRows, TokenHistory
from pagewire.worker.ops.contract.step import NUM_INPUTS
from pagewire.worker.ops.integers import next_power_of_2


def begin_drafted(
    inputs: Tensor, embedding: Tensor, history: TokenHistory, block_tables: Tensor
) -> tuple[Tensor, LocatedRows]:
    rows, hidden = inputs.shape[1], embedding.shape[1]
    assert inputs.shape[0] == NUM_INPUTS
    assert inputs.is_contiguous()
    residual = torch.empty(rows, hidden, dtype=embedding.dtype, device=embedding.device)
    # Each is a tensor of its own, as kernels are compiled for aligned pointers.
    located = LocatedRows(*(torch.empty_like(inputs[0]) for _ in range(4)))
    _begin_kernel[(rows,)](
        inputs,
        embedding,
        history.tokens,
        history.positions,
        history.limits,
        history.guesses,
        history.guessed,
        block_tables,
        residual,
        located.slots,
        located.positions,
        located.lengths,
        located.indices,
        rows,
        len(block_tables) - 1,
        history.tokens.stride(0),
        block_tables.stride(0),
        MOST=history.guesses.shape[1],
        HIDDEN=hidden,
        BLOCK=next_power_of_2(hidden),
    )
    return residual, located


@triton.jit(do_not_specialize=["rows", "padding_slot"])
def _begin_kernel(
    inputs_ptr,  # [6, rows]
    embedding_ptr,  # [vocabulary, HIDDEN]
    history_ptr,  # [slots, history_stride]
    positions_ptr,  # [slots]
    limits_ptr,  # [slots]
    guesses_ptr,  # [slots, MOST]
    guessed_ptr,  # [slots]
    tables_ptr,  # [slots, table_stride]
    residual_ptr,  # [rows, HIDDEN]
    slots_ptr,  # [rows], like the next three
    row_positions_ptr,
    lengths_ptr,
    indices_ptr,
    rows,
    padding_slot,
    history_stride,
    table_stride,
    MOST: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one block table entry, the place and the embedding of a row.

    A program computes one row. The grid is `[rows]`.
    """
    row = tl.program_id(0)
    slot = tl.load(inputs_ptr + row)
    place = tl.load(inputs_ptr + rows + row)
    offset = tl.load(inputs_ptr + 2 * rows + row)
    write_slot = tl.load(inputs_ptr + 3 * rows + row).to(tl.int64)
    write_column = tl.load(inputs_ptr + 4 * rows + row)
    write_block = tl.load(inputs_ptr + 5 * rows + row)
    tl.store(tables_ptr + write_slot * table_stride + write_column, write_block)
    last = tl.load(positions_ptr + slot)
    limit = tl.load(limits_ptr + slot)
    guessed = tl.load(guessed_ptr + slot)
    guess = tl.load(guesses_ptr + slot * MOST + place - 1, mask=place > 0, other=0)
    token = tl.load(history_ptr + slot.to(tl.int64) * history_stride + last)
    token = tl.where(place == 0, token, guess)
    position = last + place
    computed = (position < limit) & (place <= guessed)
    token = tl.where(computed, token, 0).to(tl.int64)
    tl.store(slots_ptr + row, tl.where(computed, slot, padding_slot))
    tl.store(row_positions_ptr + row, tl.where(computed, position, 0))
    tl.store(lengths_ptr + row, tl.where(computed, position + 1, 0))
    tl.store(indices_ptr + row, tl.where(computed, position + offset, 0))
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    values = tl.load(embedding_ptr + token * HIDDEN + columns, mask)
    tl.store(residual_ptr + row.to(tl.int64) * HIDDEN + columns, values, mask)
