"""The two kernels at the beginning of a decode step whose rows may be drafts.

The first kernels of a layer read slots and positions before their preceding kernel has ended. So
slots and positions must be written before the preceding kernel starts: one kernel places the rows,
and a second one, which starts when they are written, embeds their tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract.drafts import LocatedRows, TokenHistory
from pagewire.worker.ops.contract.step import NUM_INPUTS
from pagewire.worker.ops.integers import cdiv, next_power_of_2

ROWS = 128  # rows that a program places


def begin_drafted(
    inputs: Tensor, embedding: Tensor, history: TokenHistory, block_tables: Tensor
) -> tuple[Tensor, LocatedRows]:
    rows, hidden = inputs.shape[1], embedding.shape[1]
    assert inputs.shape[0] == NUM_INPUTS
    assert inputs.is_contiguous()
    residual = torch.empty(rows, hidden, dtype=embedding.dtype, device=embedding.device)
    # Separate tensors, because kernels are compiled for aligned pointers.
    located = LocatedRows(*(torch.empty_like(inputs[0]) for _ in range(4)))
    tokens = torch.empty_like(inputs[0])
    _locate_kernel[(cdiv(rows, ROWS),)](
        inputs,
        history.tokens,
        history.positions,
        history.limits,
        history.drafts,
        history.num_drafts,
        block_tables,
        tokens,
        located.slots,
        located.positions,
        located.lengths,
        located.indices,
        rows,
        len(block_tables) - 1,
        history.rows.stride(0),
        block_tables.stride(0),
        MOST=history.drafts.shape[1],
        ROWS=ROWS,
    )
    _embed_kernel[(rows,)](
        tokens,
        embedding,
        residual,
        HIDDEN=hidden,
        BLOCK=next_power_of_2(hidden),
    )
    return residual, located


@triton.jit(do_not_specialize=["rows", "padding_slot"])
def _locate_kernel(
    inputs_ptr,  # [6, rows]
    history_ptr,  # [slots, width], at position 0 of rows of `history_stride`
    positions_ptr,  # [slots]
    limits_ptr,  # [slots]
    drafts_ptr,  # [slots, MOST]
    num_drafts_ptr,  # [slots]
    tables_ptr,  # [slots, table_stride]
    tokens_ptr,  # [rows], like the next four
    slots_ptr,
    row_positions_ptr,
    lengths_ptr,
    indices_ptr,
    rows,
    padding_slot,
    history_stride,
    table_stride,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write block table entries, and the places and tokens of rows.

    A program places ROWS rows. The grid is `[rows / ROWS]`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    slot = tl.load(inputs_ptr + row, mask=here, other=padding_slot)
    place = tl.load(inputs_ptr + rows + row, mask=here, other=0)
    offset = tl.load(inputs_ptr + 2 * rows + row, mask=here, other=0)
    write_slot = tl.load(inputs_ptr + 3 * rows + row, mask=here, other=0).to(tl.int64)
    write_column = tl.load(inputs_ptr + 4 * rows + row, mask=here, other=0)
    write_block = tl.load(inputs_ptr + 5 * rows + row, mask=here, other=0)
    tl.store(tables_ptr + write_slot * table_stride + write_column, write_block, mask=here)
    last = tl.load(positions_ptr + slot)
    position = last + place
    computed = position < tl.load(limits_ptr + slot)
    computed = computed & (place <= tl.load(num_drafts_ptr + slot))
    known = tl.load(history_ptr + slot.to(tl.int64) * history_stride + last)
    drafted = computed & (place > 0)
    draft = tl.load(drafts_ptr + slot * MOST + place - 1, mask=drafted, other=0)
    token = tl.where(place == 0, known, draft)
    tl.store(tokens_ptr + row, tl.where(computed, token, 0), mask=here)
    tl.store(slots_ptr + row, tl.where(computed, slot, padding_slot), mask=here)
    tl.store(row_positions_ptr + row, tl.where(computed, position, 0), mask=here)
    tl.store(lengths_ptr + row, tl.where(computed, position + 1, 0), mask=here)
    tl.store(indices_ptr + row, tl.where(computed, position + offset, 0), mask=here)


@triton.jit
def _embed_kernel(
    tokens_ptr,  # [rows]
    embedding_ptr,  # [vocabulary, HIDDEN]
    residual_ptr,  # [rows, HIDDEN]
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the embedding of a row's token. The grid is `[rows]`."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    values = tl.load(embedding_ptr + token * HIDDEN + columns, mask)
    tl.store(residual_ptr + row * HIDDEN + columns, values, mask)
