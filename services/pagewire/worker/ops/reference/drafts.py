"""Decode steps whose rows may be drafts, in plain torch; see `contract.drafts`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.worker.ops.contract.drafts import (
    COUNTS,
    DRAFTED,
    DRAFTERS,
    ENDED,
    LONGEST_MATCH,
    NEAR_EDIT,
    NUM_RESULTS,
    OFFSETS,
    OUT_OF_STEP,
    PLACES,
    PREDICTION,
    RECENT,
    RIGHT,
    SLOTS,
    SUFFIX,
    SURE_MATCH,
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
    drafts = history.drafts[slots, (places - 1).clamp(min=0)]
    rows = history.locate(slots, places, inputs[OFFSETS])
    tokens = torch.where(places == 0, last, drafts) * (rows.lengths > 0)
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
    padding, most = len(history.positions) - 1, history.drafts.shape[1]
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
        drafts = history.drafts[slot].tolist()
        right = history.num_drafts[slot] > 0 and drafts[0] == drawn[row] and finite[row]
        out[DRAFTED, row], out[RIGHT, row] = computed, int(right)
        out[DRAFTERS, row] = history.drafters[slot]
        count = 1
        while (
            finite[row]
            and count <= computed
            and drafts[count - 1] == drawn[row + count - 1]
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
        if not _draft_from_prediction(history, slot, kept):
            _draft_from_tokens(history, slot)
    return out


def _draft_from_tokens(history: TokenHistory, slot: int) -> None:
    """Draft the next tokens of one sequence from its tokens and from recent outputs."""
    recent, length = int(history.num_recent[slot]), int(history.positions[slot]) + 1
    row = history.rows[slot, history.first - recent : history.first + length]
    most = history.drafts.shape[1]
    history.num_drafts[slot], history.drafters[slot] = 0, SUFFIX
    matched = _matched(row[:-1], row[recent:]) * (row[1:] >= 0)
    if len(row) < 2 or matched.max() < history.min_match:
        return
    begin = int((matched == matched.max()).nonzero().max()) + 1
    followed = row[begin + torch.arange(most, device=row.device) % (len(row) - begin)]
    ends = (followed < 0).nonzero()
    count = int(ends[0]) if len(ends) else most
    history.drafts[slot, :count] = followed[:count]
    history.num_drafts[slot] = count
    history.drafters[slot] = RECENT if begin < recent else SUFFIX


def _draft_from_prediction(history: TokenHistory, slot: int, kept: Tensor) -> bool:
    """Draft the next tokens of one sequence from its prediction; return False without drafts.

    `kept [n]` are the tokens that the step has added.
    """
    known = history.tokens[slot, : int(history.positions[slot]) + 1]
    most, width = history.drafts.shape[1], history.tokens.shape[1]
    predicted, reached, edit, run = history.predictions[slot].tolist()
    if len(known) > width - predicted:
        predicted = 0  # the sequence needs the place
    prediction = history.tokens[slot, width - predicted :]
    if predicted and reached != OUT_OF_STEP:
        ahead = prediction[reached : reached + len(kept)]
        wrong = (ahead != kept[: len(ahead)]).nonzero()
        right = int(wrong[0]) if len(wrong) else len(ahead)
        run, reached = run + right, reached + right
        if right < len(kept):
            # A wrong guess of the place does not move the place of the edit.
            edit = reached if run >= SURE_MATCH else edit
            reached, run = OUT_OF_STEP, 0
    if predicted and reached == OUT_OF_STEP:
        reached = _place_in_step(prediction, known, edit)
    history.predictions[slot] = torch.tensor([predicted, reached, edit, run])
    if not predicted or not 0 <= reached < predicted:
        return False
    drafts = prediction[reached : reached + most]
    history.drafts[slot, : len(drafts)] = drafts
    history.num_drafts[slot], history.drafters[slot] = len(drafts), PREDICTION
    return True


def _place_in_step(prediction: Tensor, known: Tensor, edit: int) -> int:
    """Return the place after the best match of the end of `known`; see `end_drafted`."""
    best = (0, False, 0)
    for end, matched in enumerate(_matched(prediction, known).tolist()):
        place = end + 1
        near = edit < place <= edit + NEAR_EDIT
        if matched >= SURE_MATCH or (matched and near):
            behind = place > edit
            best = max(best, (matched, behind, -place if behind else place))
    return abs(best[2]) if best[0] else OUT_OF_STEP


def _matched(tokens: Tensor, known: Tensor) -> Tensor:
    """Return, for each place of `tokens [n]`, how many up to it equal the last of `known`."""
    ends = torch.arange(len(tokens), device=tokens.device)
    matched = torch.zeros_like(ends)
    equal = torch.ones_like(ends, dtype=torch.bool)
    for back in range(min(LONGEST_MATCH, len(known), len(tokens))):
        equal &= (ends >= back) & (tokens[(ends - back).clamp(min=0)] == known[-1 - back])
        matched += equal
    return matched
