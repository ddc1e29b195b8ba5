"""The kernel at the end of a decode step whose rows may be drafts.

A program stores the new tokens of one sequence, then searches the sequence's history for its last
tokens. So drafts are made where the tokens are, one step ahead of the rows that compute them, and
without another launch. The search reads tile after tile: first recent outputs, at negative places
of a history, then known tokens. Few tiles contain three matching tokens in a row; each other tile
costs four loads. While an output is in step with its prediction, there is no search.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pagewire.worker.ops.contract import drafts as contract
from pagewire.worker.ops.contract.drafts import TokenHistory
from pagewire.worker.ops.contract.sampling import Adjustments
from pagewire.worker.ops.integers import next_power_of_2
from pagewire.worker.ops.triton.drafts.counting import count_token

# Tokens of the history that are compared at once.
TILE = 1024
WARPS = 16
# In tokens. Kernels are compiled for known tokens that begin at an aligned address.
ALIGNMENT = 4

_LONGEST = tl.constexpr(contract.LONGEST_MATCH)
_ENDED = tl.constexpr(contract.ENDED)
_SUFFIX = tl.constexpr(contract.SUFFIX)
_PREDICTION = tl.constexpr(contract.PREDICTION)
_RECENT = tl.constexpr(contract.RECENT)
_OUT_OF_STEP = tl.constexpr(contract.OUT_OF_STEP)
_SURE = tl.constexpr(contract.SURE_MATCH)
_NEAR = tl.constexpr(contract.NEAR_EDIT)
_PLACES = tl.constexpr(contract.MAX_PREDICTED)
# No token is equal to this: -1 follows each recent output, and masked loads return -2.
_MISSING = tl.constexpr(-3)


def end_drafted(
    tokens: Tensor,
    hidden: Tensor,
    slots: Tensor,
    places: Tensor,
    history: TokenHistory,
    last_tokens: Tensor,
    adjustments: Adjustments | None = None,
) -> Tensor:
    rows, most = len(tokens), history.drafts.shape[1]
    assert history.predictions.is_contiguous()
    assert history.first % ALIGNMENT == 0
    out = tokens.new_empty((contract.NUM_RESULTS, rows))
    _end_kernel[(rows,)](
        tokens,
        hidden,
        slots,
        places,
        history.tokens,
        history.positions,
        history.drafts,
        history.num_drafts,
        history.drafters,
        history.predictions,
        history.num_recent,
        last_tokens,
        out,
        tokens if adjustments is None else adjustments.kinds,
        tokens if adjustments is None else adjustments.token_counts,
        rows,
        len(history.positions) - 1,
        history.rows.stride(0),
        history.tokens.shape[1],
        0 if adjustments is None else adjustments.token_counts.stride(0),
        MOST=most,
        LANES=next_power_of_2(most + 1),
        HIDDEN=hidden.shape[1],
        BLOCK=next_power_of_2(hidden.shape[1]),
        TILE=TILE,
        MIN_MATCH=history.min_match,
        ADJUSTED=adjustments is not None,
        num_warps=WARPS,
    )
    return out


# Slots and places are loaded as few values, so the alignment of slices does not matter.
@triton.jit(
    do_not_specialize=["rows", "padding_slot"],
    do_not_specialize_on_alignment=["slots_ptr", "places_ptr"],
)
def _end_kernel(
    tokens_ptr,  # [rows]
    hidden_ptr,  # [rows, HIDDEN]
    slots_ptr,  # [rows]
    places_ptr,  # [rows]
    history_ptr,  # [slots, width], at position 0 of rows of `history_stride`
    positions_ptr,  # [slots]
    drafts_ptr,  # [slots, MOST]
    num_drafts_ptr,  # [slots]
    drafters_ptr,  # [slots]
    predictions_ptr,  # [slots, 4]
    num_recent_ptr,  # [slots]
    last_tokens_ptr,  # [slots]
    out_ptr,  # [5, rows]
    kinds_ptr,  # [slots]
    counts_ptr,  # [slots, counts_stride]
    rows,
    padding_slot,
    history_stride,
    width,
    counts_stride,
    MOST: tl.constexpr,
    LANES: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MIN_MATCH: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """Store the tokens of a sequence, and draft its next tokens.

    The program of a sequence's first row does both. Programs of other rows only write their token.
    The grid is `[rows]`.
    """
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    place = tl.load(places_ptr + row)
    token = tl.load(tokens_ptr + row)
    if place != 0:
        tl.store(out_ptr + row, token)
    elif slot == padding_slot:
        tl.store(out_ptr + row, _ENDED)
        tl.store(out_ptr + rows + row, 1)
        tl.store(out_ptr + 2 * rows + row, 0)
        tl.store(out_ptr + 3 * rows + row, 0)
        tl.store(out_ptr + 4 * rows + row, 0)
    else:
        last = tl.load(positions_ptr + slot)
        num_drafts = tl.load(num_drafts_ptr + slot)
        predicted = tl.load(predictions_ptr + slot * 4)
        reached = tl.load(predictions_ptr + slot * 4 + 1)
        edit = tl.load(predictions_ptr + slot * 4 + 2)
        run = tl.load(predictions_ptr + slot * 4 + 3)
        lane = tl.arange(0, LANES)
        held = (row + lane < rows) & (lane <= MOST)
        own = held & (tl.load(slots_ptr + row + lane, mask=held, other=-1) == slot)
        own = own & (tl.load(places_ptr + row + lane, mask=held, other=-1) == lane)
        drawn = tl.load(tokens_ptr + row + lane, mask=own, other=0)
        before = own & (lane > 0)
        previous = tl.load(tokens_ptr + row + lane - 1, mask=before, other=0)
        draft = tl.load(drafts_ptr + slot * MOST + lane - 1, mask=before, other=-1)
        right = own & ((lane == 0) | (draft == previous))
        count = tl.min(tl.where(right, LANES, lane))
        columns = tl.arange(0, BLOCK)
        kept = count
        for i in range(count):
            offsets = (row + i).to(tl.int64) * HIDDEN + columns
            values = tl.load(hidden_ptr + offsets, columns < HIDDEN, other=0.0).to(tl.float32)
            # For NaN and infinity x - x is NaN, which is not equal to 0.
            bad = tl.sum((values - values != 0.0).to(tl.int32), axis=0)
            kept = tl.where((bad != 0) & (i < kept), i, kept)
        failed = kept == 0
        count = tl.maximum(kept, 1)
        drawn = tl.where(failed, 0, drawn)
        newest = tl.sum(tl.where(lane == count - 1, drawn, 0))
        first = tl.load(drafts_ptr + slot * MOST)
        hit = (num_drafts > 0) & (first == token) & (kept > 0)
        tl.store(out_ptr + row, tl.where(failed, -1, token))
        tl.store(out_ptr + rows + row, count)
        tl.store(out_ptr + 2 * rows + row, tl.sum(before.to(tl.int32)))
        tl.store(out_ptr + 3 * rows + row, hit.to(tl.int32))
        tl.store(out_ptr + 4 * rows + row, tl.load(drafters_ptr + slot))
        history = history_ptr + slot.to(tl.int64) * history_stride
        tl.store(history + last + 1 + lane, drawn, mask=lane < count)
        tl.store(positions_ptr + slot, last + count)
        tl.store(last_tokens_ptr + slot, newest)
        if ADJUSTED and kept > 0:
            count_token(token, slot, kinds_ptr, counts_ptr, counts_stride)
        # After the barrier, the search reads these tokens and overwrites drafts and states.
        tl.debug_barrier()
        length = last + count + 1
        drafter = predicted * 0 + _SUFFIX
        if predicted > 0:
            drafter = _draft_from_prediction(
                history, width, length, drawn, count, predicted, reached, edit, run,
                predictions_ptr + slot * 4, drafts_ptr + slot * MOST, num_drafts_ptr + slot,
                MOST, LANES, TILE,
            )  # fmt: skip
        if drafter == _SUFFIX:
            drafter = _draft_from_tokens(
                history, length, tl.load(num_recent_ptr + slot), drafts_ptr + slot * MOST,
                num_drafts_ptr + slot, MOST, LANES, TILE, MIN_MATCH,
            )  # fmt: skip
        tl.store(drafters_ptr + slot, drafter)


@triton.jit
def _draft_from_prediction(
    history,
    width,  # of a history
    length,  # known tokens
    drawn,  # [LANES], of which `count` are the newest tokens
    count,
    predicted,
    reached,
    edit,
    run,
    state,  # of the prediction
    drafts,
    num_drafts,
    MOST: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Draft the next tokens of the prediction; return _PREDICTION, or _SUFFIX if there are none."""
    predicted = tl.where(length > width - predicted, 0, predicted)
    prediction = history + width - predicted
    lane = tl.arange(0, LANES)
    held = (lane < count) & (reached != _OUT_OF_STEP) & (reached + lane < predicted)
    equal = held & (tl.load(prediction + reached + lane, mask=held, other=-1) == drawn)
    right = tl.min(tl.where((lane < count) & (equal == 0), lane, count))
    run = run + right
    # If the output was out of step already, `right` and `run` are 0.
    edit = tl.where((right < count) & (run >= _SURE), reached + right, edit)
    reached = tl.where(right < count, _OUT_OF_STEP, reached + right)
    run = tl.where(right < count, 0, run)
    if (right < count) & (predicted > 0):
        reached = _place_in_step(history, length, prediction, predicted, edit, TILE)
    tl.store(state, predicted)
    tl.store(state + 1, reached)
    tl.store(state + 2, edit)
    tl.store(state + 3, run)
    found = (predicted > 0) & (reached != _OUT_OF_STEP) & (reached < predicted)
    left = tl.where(found, tl.minimum(predicted - reached, MOST), 0)
    draft = tl.load(prediction + reached + lane, mask=lane < left, other=0)
    tl.store(drafts + lane, draft, mask=lane < left)
    tl.store(num_drafts, left)
    return tl.where(found, _PREDICTION, _SUFFIX)


@triton.jit
def _place_in_step(history, length, prediction, predicted, edit, TILE: tl.constexpr):
    """Return the place in the prediction after the best match of the last known tokens."""
    newest, second, third = _last_three(history, length)
    # Ranks matches by matched tokens, then whether they are after the edit, then by place.
    best = tl.zeros([TILE], tl.int32)
    for start in range(0, predicted, TILE):
        end = start + tl.arange(0, TILE)
        held = end < predicted
        matched = _matched(prediction, 0, end, held, history, length, newest, second, third)
        place = end + 1
        behind = place > edit
        taken = (matched >= _SURE) | ((matched > 0) & behind & (place <= edit + _NEAR))
        rank = tl.where(behind, 2 * _PLACES - 1 - place, place)
        best = tl.maximum(best, tl.where(taken, matched * (2 * _PLACES) + rank, 0))
    key = tl.max(best)
    rank = key % (2 * _PLACES)
    place = tl.where(rank >= _PLACES, 2 * _PLACES - 1 - rank, rank)
    return tl.where(key > 0, place, _OUT_OF_STEP)


@triton.jit
def _last_three(history, length):
    """Return the last three known tokens, the newest first; _MISSING where there are fewer."""
    newest = tl.load(history + length - 1)
    second = tl.load(history + length - 2, mask=length > 1, other=_MISSING)
    third = tl.load(history + length - 3, mask=length > 2, other=_MISSING)
    return newest, second, third


@triton.jit
def _matched(tokens, begin, end, held, history, length, newest, second, third):
    """Return how many tokens up to each place of `end [TILE]` are equal to the last known ones.

    `tokens` begin at the place `begin`.
    """
    equal = held & (tl.load(tokens + end, mask=held, other=-2) == newest)
    matched = equal.to(tl.int32)
    held = held & (end > begin)
    equal = equal & (tl.load(tokens + end - 1, mask=held, other=-2) == second)
    matched += equal.to(tl.int32)
    held = held & (end > begin + 1)
    equal = equal & (tl.load(tokens + end - 2, mask=held, other=-2) == third)
    matched += equal.to(tl.int32)
    if tl.max(equal.to(tl.int32)) > 0:
        for back in range(3, _LONGEST):
            token = tl.load(history + length - 1 - back, mask=back < length, other=_MISSING)
            equal = equal & (end >= begin + back)
            equal = equal & (tl.load(tokens + end - back, mask=equal, other=-2) == token)
            matched += equal.to(tl.int32)
    return matched


@triton.jit
def _draft_from_tokens(
    history,
    length,  # known tokens
    recent,  # tokens of recent outputs before them
    drafts,
    num_drafts,
    MOST: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    MIN_MATCH: tl.constexpr,
):
    """Draft what followed the latest of the longest earlier occurrences of the last tokens.

    Returns _RECENT if a recent output has that occurrence, else _SUFFIX.
    """
    newest, second, third = _last_three(history, length)
    # Ranks occurrences by matched tokens, then by the next place, counted from the first recent
    # token.
    best = tl.zeros([TILE], tl.int32)
    for start in range(-tl.cdiv(recent, TILE) * TILE, length - 1, TILE):
        end = start + tl.arange(0, TILE)  # the last token of an earlier occurrence
        held = (end >= -recent) & (end < length - 1)
        matched = _matched(history, -recent, end, held, history, length, newest, second, third)
        goes_on = tl.load(history + end + 1, mask=matched > 0, other=_MISSING) >= 0
        best = tl.maximum(best, tl.where(goes_on, matched * (2 * _PLACES) + end + 1 + recent, 0))
    key = tl.max(best)
    begin = key % (2 * _PLACES) - recent
    lane = tl.arange(0, LANES)
    followed = begin + lane % tl.maximum(length - begin, 1)
    wanted = (key >= MIN_MATCH * (2 * _PLACES)) & (lane < MOST)
    draft = tl.load(history + followed, mask=wanted, other=_MISSING)
    count = tl.min(tl.where(draft < 0, lane, MOST))
    tl.store(drafts + lane, draft, mask=lane < count)
    tl.store(num_drafts, count)
    return tl.where((count > 0) & (begin < 0), _RECENT, _SUFFIX)
