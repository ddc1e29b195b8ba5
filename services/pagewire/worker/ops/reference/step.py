"""The two ends of a decode step in plain torch: from the slots' state to the decoder, and back."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pagewire.worker.ops.reference.sampling import Adjustments, SamplingState, count_tokens

# Rows of the packed inputs of a decode step, each `[rows]` int32.
SLOTS, POSITIONS, INDICES, WRITE_SLOTS, WRITE_COLUMNS, WRITE_BLOCKS = range(6)
NUM_INPUTS = 6

FAILED = -1


def begin_decode(
    inputs: Tensor, embedding: Tensor, last_tokens: Tensor, block_tables: Tensor
) -> tuple[Tensor, Tensor]:
    """Append blocks to the block tables and embed each row's last token.

    Args:
        inputs: `[6, rows]` int32: slot, position and output index of each row, then slot, column
            and block of as many block table writes. A row without a write names the padding
            slot, column 0 and block 0.
        embedding: `[vocabulary, hidden]`.
        last_tokens: `[slots]` int32, the token last sampled for each slot.
        block_tables: `[slots, max_blocks]` int32, written in place; the last slot is padding.

    Returns:
        The residual stream `[rows, hidden]`, and the KV lengths `[rows]` int32 with the token
        that the step adds; 0 for rows of the padding slot, which then attend to nothing.
    """
    slots = inputs[SLOTS]
    block_tables[inputs[WRITE_SLOTS], inputs[WRITE_COLUMNS]] = inputs[WRITE_BLOCKS]
    lengths = torch.where(slots == len(block_tables) - 1, 0, inputs[POSITIONS] + 1)
    return embedding[last_tokens[slots]], lengths


def gather_sampling(by_slot: SamplingState, slots: Tensor, indices: Tensor) -> SamplingState:
    """The sampling parameters of rows: those of their slots, for token `indices [rows]`."""
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
    """Keep each row's token for the next step; `[rows]` int32, -1 where `hidden` is not finite.

    Args:
        tokens: `[rows]` int32, as sampled.
        hidden: `[rows, hidden]`, the residual stream that the logits came from.
        slots: `[rows]` int32.
        last_tokens: `[slots]` int32, written in place; a failed row leaves token 0, which steps
            already on their way may decode once more.
        adjustments: by slot; the tokens of rows with penalties are added to its counts, in place.
            None promises that no row has any.
    """
    finite = torch.isfinite(hidden).all(dim=-1)
    last_tokens[slots] = tokens * finite
    if adjustments is not None:
        count_tokens(tokens[finite], slots[finite], adjustments)
    return torch.where(finite, tokens, FAILED)
