"""Changes of slots, and the first and the last operations of a decode step, in plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pagewire.worker.ops.contract.sampling import Adjustments, SamplingState
from pagewire.worker.ops.contract.step import (
    FAILED,
    POSITIONS,
    SLOTS,
    START_KINDS,
    START_MIN_P,
    START_MIN_TOKENS,
    START_SEED,
    START_SLOT,
    START_STOPS,
    START_TEMPERATURE,
    START_TOP_K,
    START_TOP_P,
    TABLE_BLOCK,
    TABLE_COLUMN,
    TABLE_SLOT,
    WRITE_BLOCKS,
    WRITE_COLUMNS,
    WRITE_SLOTS,
)
from pagewire.worker.ops.reference.sampling import count_tokens


def start_slots(starts: Tensor, by_slot: SamplingState) -> None:
    starts = starts[starts[:, START_SLOT] >= 0]
    slots = starts[:, START_SLOT]
    for column, tensor in (
        (START_MIN_TOKENS, by_slot.min_tokens),
        (START_TEMPERATURE, by_slot.temperature),
        (START_TOP_K, by_slot.top_k),
        (START_TOP_P, by_slot.top_p),
        (START_MIN_P, by_slot.min_p),
    ):
        tensor[slots] = starts[:, column].view(tensor.dtype)
    low, high = starts[:, START_SEED].long(), starts[:, START_SEED + 1].long()
    by_slot.seed[slots] = high << 32 | low & 0xFFFFFFFF
    by_slot.stop_token_ids[slots] = starts[:, START_STOPS:]
    if by_slot.adjustments is not None:
        by_slot.adjustments.kinds[slots] = starts[:, START_KINDS]


def write_tables(writes: Tensor, block_tables: Tensor) -> None:
    writes = writes[writes[:, TABLE_SLOT] >= 0]
    block_tables[writes[:, TABLE_SLOT], writes[:, TABLE_COLUMN]] = writes[:, TABLE_BLOCK]


def begin_decode(
    inputs: Tensor, embedding: Tensor, last_tokens: Tensor, block_tables: Tensor
) -> tuple[Tensor, Tensor]:
    slots = inputs[SLOTS]
    block_tables[inputs[WRITE_SLOTS], inputs[WRITE_COLUMNS]] = inputs[WRITE_BLOCKS]
    lengths = torch.where(slots == len(block_tables) - 1, 0, inputs[POSITIONS] + 1)
    return embedding[last_tokens[slots]], lengths


def gather_sampling(by_slot: SamplingState, slots: Tensor, indices: Tensor) -> SamplingState:
    adjustments = by_slot.adjustments
    if adjustments is not None:
        adjustments = replace(adjustments, kinds=adjustments.kinds[slots], slots=slots)
    return SamplingState(
        temperature=by_slot.temperature[slots],
        top_k=by_slot.top_k[slots],
        top_p=by_slot.top_p[slots],
        min_p=by_slot.min_p[slots],
        seed=by_slot.seed[slots],
        index=indices,
        min_tokens=by_slot.min_tokens[slots],
        stop_token_ids=by_slot.stop_token_ids[slots],
        adjustments=adjustments,
    )


def end_decode(
    tokens: Tensor,
    hidden: Tensor,
    slots: Tensor,
    last_tokens: Tensor,
    adjustments: Adjustments | None = None,
) -> Tensor:
    finite = torch.isfinite(hidden).all(dim=-1)
    last_tokens[slots] = tokens * finite
    if adjustments is not None:
        count_tokens(tokens[finite], slots[finite], adjustments)
    return torch.where(finite, tokens, FAILED)
