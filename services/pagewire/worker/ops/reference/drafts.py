"""Decode steps whose rows may be drafts, in plain torch; see `contract.drafts`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.worker.ops.contract.drafts import (
    COUNTS,
    DRAFTED,
    ENDED,
    LONGEST_MATCH,
    NUM_RESULTS,
    OFFSETS,
    PLACES,
    RIGHT,
    SLOTS,
    TOKENS,
    LocatedRows,
    TokenHistory,
)
from pagewire.worker.ops.contract.sampling import Adjustments
from pagewire.worker.ops.contract.step import FAILED, WRITE_BLOCKS, WRITE_COLUMNS, WRITE_SLOTS
from pagewire.worker.ops.reference.sampling import count_tokens


def begin_drafted(
    inputs: Tensor, embedding: Tensor, history: TokenHistory, block_tables: Tensor
) -> tuple[Tensor, LocatedRows]:
    block_tables[inputs[WRITE_SLOTS], inputs[WRITE_COLUMNS]] = inputs[WRITE_BLOCKS]
    slots, places = inputs[SLOTS], inputs[PLACES]
    last = history.tokens[slots, history.positions[slots]]
    guesses = history.guesses[slots, (places - 1).clamp(min=0)]
    rows = history.locate(slots, places, inputs[OFFSETS])
    tokens = torch.where(places == 0, last, guesses) * (rows.lengths > 0)
    return embedding[tokens], rows


def end_drafted(
    tokens: Tensor,
    hidden: Tensor,
    slots: Tensor,
    places: Tensor,
    history: TokenHistory,
    last_tokens: Tensor,
    adjustments: Adjustments | None = None,
) -> Tensor:
    out = tokens.new_zeros((NUM_RESULTS, len(tokens)))
    out[TOKENS] = tokens
    finite = torch.isfinite(hidden).all(dim=-1).tolist()
    drawn, of, at = tokens.tolist(), slots.tolist(), places.tolist()
    padding, most = len(history.positions) - 1, history.guesses.shape[1]
    for row in [row for row, place in enumerate(at) if place == 0]:
        slot = of[row]
        out[COUNTS, row] = 1
        if slot == padding:
            out[TOKENS, row] = ENDED
            continue
        computed = 0
        while computed < most and row + computed + 1 < len(at):
            following = row + computed + 1
            if of[following] != slot or at[following] != computed + 1:
                break
            computed += 1
        guesses = history.guesses[slot].tolist()
        right = history.guessed[slot] > 0 and guesses[0] == drawn[row] and finite[row]
        out[DRAFTED, row], out[RIGHT, row] = computed, int(right)
        count = 1
        while (
            finite[row]
            and count <= computed
            and guesses[count - 1] == drawn[row + count - 1]
            and finite[row + count]
        ):
            count += 1
        out[COUNTS, row] = count
        kept = tokens[row : row + count] if finite[row] else tokens.new_zeros(1)
        position = int(history.positions[slot])
        history.tokens[slot, position + 1 : position + 1 + count] = kept
        history.positions[slot] = position + count
        last_tokens[slot] = kept[-1]
        if not finite[row]:
            out[TOKENS, row] = FAILED
        elif adjustments is not None:
            count_tokens(tokens[row : row + 1], slots[row : row + 1], adjustments)
        guess(history, slot)
    return out


def guess(history: TokenHistory, slot: int) -> None:
    """Guess the next tokens of one sequence from its tokens."""
    known = history.tokens[slot, : int(history.positions[slot]) + 1]
    most, length = history.guesses.shape[1], len(known)
    ends = torch.arange(length - 1, device=known.device)  # of earlier occurrences
    matched = torch.zeros_like(ends)
    equal = torch.ones_like(ends, dtype=torch.bool)
    for back in range(min(LONGEST_MATCH, length - 1)):
        equal &= (ends >= back) & (known[(ends - back).clamp(min=0)] == known[length - 1 - back])
        matched += equal
    history.guessed[slot] = 0
    if length < 2 or matched.max() == 0:
        return
    begin = int(ends[matched == matched.max()].max()) + 1
    followed = torch.arange(most, device=known.device) % (length - begin)
    history.guesses[slot] = known[begin + followed]
    history.guessed[slot] = most
