"""The kernels that change slots, and those at the beginning and at the end of a decode step."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract.sampling import Adjustments, SamplingState
from pagewire.worker.ops.contract.step import NUM_INPUTS, START_VALUES, TABLE_VALUES
from pagewire.worker.ops.integers import cdiv, next_power_of_2
from pagewire.worker.ops.triton.drafts.counting import count_token

# Writes to block tables that a program makes.
WRITES = 128


def start_slots(starts: Tensor, by_slot: SamplingState) -> None:
    held, stops = by_slot.adjustments, by_slot.stop_token_ids.shape[1]
    assert starts.shape[1] == START_VALUES
    assert starts.is_contiguous()
    _start_kernel[(len(starts),)](
        starts,
        by_slot.temperature,
        by_slot.top_k,
        by_slot.top_p,
        by_slot.min_p,
        by_slot.seed,
        by_slot.min_tokens,
        by_slot.stop_token_ids,
        by_slot.top_k if held is None else held.kinds,  # not written without adjustments
        STOPS=stops,
        ADJUSTED=held is not None,
        num_warps=1,
    )


def write_tables(writes: Tensor, block_tables: Tensor) -> None:
    assert writes.shape[1] == TABLE_VALUES
    assert writes.is_contiguous()
    _write_kernel[(cdiv(len(writes), WRITES),)](
        writes, block_tables, len(writes), block_tables.stride(0), WRITES=WRITES
    )


def begin_decode(
    inputs: Tensor, embedding: Tensor, last_tokens: Tensor, block_tables: Tensor
) -> tuple[Tensor, Tensor]:
    rows, hidden = inputs.shape[1], embedding.shape[1]
    assert inputs.shape[0] == NUM_INPUTS
    assert inputs.is_contiguous()
    residual = torch.empty(rows, hidden, dtype=embedding.dtype, device=embedding.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=embedding.device)
    _begin_kernel[(rows,)](
        inputs,
        embedding,
        last_tokens,
        block_tables,
        residual,
        lengths,
        rows,
        len(block_tables) - 1,
        block_tables.stride(0),
        HIDDEN=hidden,
        BLOCK=next_power_of_2(hidden),
    )
    return residual, lengths


def gather_sampling(by_slot: SamplingState, slots: Tensor, indices: Tensor) -> SamplingState:
    rows, stops = len(slots), by_slot.stop_token_ids.shape[1]
    held = by_slot.adjustments
    kinds = by_slot.top_k if held is None else held.kinds  # not read without adjustments
    out_kinds = kinds.new_empty(rows)
    out = SamplingState(
        temperature=by_slot.temperature.new_empty(rows),
        top_k=by_slot.top_k.new_empty(rows),
        top_p=by_slot.top_p.new_empty(rows),
        min_p=by_slot.min_p.new_empty(rows),
        seed=by_slot.seed.new_empty(rows),
        index=indices,
        min_tokens=by_slot.min_tokens.new_empty(rows),
        stop_token_ids=by_slot.stop_token_ids.new_empty((rows, stops)),
        adjustments=None if held is None else replace(held, kinds=out_kinds, slots=slots),
    )
    _gather_kernel[(rows,)](
        slots,
        by_slot.temperature,
        by_slot.top_k,
        by_slot.top_p,
        by_slot.min_p,
        by_slot.seed,
        by_slot.min_tokens,
        by_slot.stop_token_ids,
        kinds,
        out.temperature,
        out.top_k,
        out.top_p,
        out.min_p,
        out.seed,
        out.min_tokens,
        out.stop_token_ids,
        out_kinds,
        STOPS=stops,
        ADJUSTED=held is not None,
        num_warps=1,
    )
    return out


def end_decode(
    tokens: Tensor,
    hidden: Tensor,
    slots: Tensor,
    last_tokens: Tensor,
    adjustments: Adjustments | None = None,
) -> Tensor:
    out = torch.empty_like(tokens)
    _end_kernel[(len(tokens),)](
        tokens,
        hidden,
        slots,
        last_tokens,
        out,
        tokens if adjustments is None else adjustments.kinds,
        tokens if adjustments is None else adjustments.token_counts,
        0 if adjustments is None else adjustments.token_counts.stride(0),
        HIDDEN=hidden.shape[1],
        BLOCK=next_power_of_2(hidden.shape[1]),
        ADJUSTED=adjustments is not None,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["starts_ptr"])
def _start_kernel(
    starts_ptr,  # [starts, 9 + STOPS], see `START_SLOT`
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    min_tokens_ptr,
    stops_ptr,
    kinds_ptr,
    STOPS: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """Copy the sampling parameters of a start to those of its slot.

    A program copies one start. The grid is `[starts]`.
    """
    start_ptr = starts_ptr + tl.program_id(0) * (9 + STOPS)
    slot = tl.load(start_ptr)
    if slot >= 0:
        low = tl.load(start_ptr + 1).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(start_ptr + 2).to(tl.int64) << 32
        tl.store(seed_ptr + slot, high | low)
        tl.store(min_tokens_ptr + slot, tl.load(start_ptr + 3))
        if ADJUSTED:
            tl.store(kinds_ptr + slot, tl.load(start_ptr + 4))
        tl.store(temperature_ptr + slot, tl.load(start_ptr + 5).to(tl.float32, bitcast=True))
        tl.store(top_k_ptr + slot, tl.load(start_ptr + 6))
        tl.store(top_p_ptr + slot, tl.load(start_ptr + 7).to(tl.float32, bitcast=True))
        tl.store(min_p_ptr + slot, tl.load(start_ptr + 8).to(tl.float32, bitcast=True))
        columns = tl.arange(0, STOPS)
        tl.store(stops_ptr + slot * STOPS + columns, tl.load(start_ptr + 9 + columns))


@triton.jit(do_not_specialize=["writes"], do_not_specialize_on_alignment=["writes_ptr"])
def _write_kernel(
    writes_ptr,  # [writes, 3]
    tables_ptr,  # [slots, table_stride]
    writes,
    table_stride,
    WRITES: tl.constexpr,
):
    """Store WRITES entries of block tables. The grid is `[writes / WRITES]`."""
    write = tl.program_id(0) * WRITES + tl.arange(0, WRITES)
    inside = write < writes
    slot = tl.load(writes_ptr + 3 * write, inside, other=-1).to(tl.int64)
    column = tl.load(writes_ptr + 3 * write + 1, inside, other=0)
    block = tl.load(writes_ptr + 3 * write + 2, inside, other=0)
    tl.store(tables_ptr + slot * table_stride + column, block, slot >= 0)


@triton.jit(do_not_specialize=["rows"])
def _begin_kernel(
    inputs_ptr,  # [6, rows]
    embedding_ptr,  # [vocabulary, HIDDEN]
    last_tokens_ptr,  # [slots]
    tables_ptr,  # [slots, table_stride]
    residual_ptr,  # [rows, HIDDEN]
    lengths_ptr,  # [rows]
    rows,
    padding_slot,
    table_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one block table entry, the KV length and the embedding of a row.

    A program computes one row. The grid is `[rows]`.
    """
    row = tl.program_id(0)
    slot = tl.load(inputs_ptr + row)
    position = tl.load(inputs_ptr + rows + row)
    write_slot = tl.load(inputs_ptr + 3 * rows + row).to(tl.int64)
    write_column = tl.load(inputs_ptr + 4 * rows + row)
    write_block = tl.load(inputs_ptr + 5 * rows + row)
    tl.store(tables_ptr + write_slot * table_stride + write_column, write_block)
    tl.store(lengths_ptr + row, tl.where(slot == padding_slot, 0, position + 1))
    token = tl.load(last_tokens_ptr + slot).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    values = tl.load(embedding_ptr + token * HIDDEN + columns, mask)
    tl.store(residual_ptr + row.to(tl.int64) * HIDDEN + columns, values, mask)


# Values of `slots` are loaded one by one, so the alignment of `slots`, which may be a slice of
# another tensor, does not matter: compiled once.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _gather_kernel(
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    min_tokens_ptr,
    stops_ptr,
    kinds_ptr,
    out_temperature_ptr,
    out_top_k_ptr,
    out_top_p_ptr,
    out_min_p_ptr,
    out_seed_ptr,
    out_min_tokens_ptr,
    out_stops_ptr,
    out_kinds_ptr,
    STOPS: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """Copy the sampling parameters of a row from those of its slot.

    A program copies one row. The grid is `[rows]`.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    tl.store(out_temperature_ptr + row, tl.load(temperature_ptr + slot))
    tl.store(out_top_k_ptr + row, tl.load(top_k_ptr + slot))
    tl.store(out_top_p_ptr + row, tl.load(top_p_ptr + slot))
    tl.store(out_min_p_ptr + row, tl.load(min_p_ptr + slot))
    tl.store(out_seed_ptr + row, tl.load(seed_ptr + slot))
    tl.store(out_min_tokens_ptr + row, tl.load(min_tokens_ptr + slot))
    if ADJUSTED:
        tl.store(out_kinds_ptr + row, tl.load(kinds_ptr + slot))
    columns = tl.arange(0, STOPS)
    tl.store(out_stops_ptr + row * STOPS + columns, tl.load(stops_ptr + slot * STOPS + columns))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _end_kernel(
    tokens_ptr,  # [rows]
    hidden_ptr,  # [rows, HIDDEN]
    slots_ptr,  # [rows]
    last_tokens_ptr,  # [slots]
    out_ptr,  # [rows]
    kinds_ptr,  # [slots]
    counts_ptr,  # [slots, counts_stride]
    counts_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """Store the token of a row for the next step, and count it if its slot has penalties.

    A program computes one row. The grid is `[rows]`.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    offsets = row.to(tl.int64) * HIDDEN + columns
    values = tl.load(hidden_ptr + offsets, columns < HIDDEN, other=0.0).to(tl.float32)
    # For NaN and infinity x - x is NaN, which is not equal to 0.
    bad = tl.sum((values - values != 0.0).to(tl.int32), axis=0)
    token, slot = tl.load(tokens_ptr + row), tl.load(slots_ptr + row)
    tl.store(last_tokens_ptr + slot, tl.where(bad == 0, token, 0))
    if ADJUSTED and bad == 0:
        count_token(token, slot, kinds_ptr, counts_ptr, counts_stride)
    tl.store(out_ptr + row, tl.where(bad == 0, token, -1))
