"""Sampling with masks: a token that the mask of its row excludes counts as minus infinity."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels.test_sampling import (
    ROWS,
    VOCABULARIES,
    assert_same_draws,
    filtered_state,
    make_adjustments,
)
from pagewire.limits import MAX_STOP_IDS
from pagewire.worker.ops.contract.sampling import SamplingState, TokenMasks
from pagewire.worker.ops.reference import sampling as reference
from pagewire.worker.ops.triton import adjustments as adjusting
from pagewire.worker.ops.triton import sampling, sampling_filters
from pagewire.worker.ops.triton.invariant import sampling as invariant
from support.kernels.comparison import FULL_SIZE, poisoned_outputs

# Not a multiple of 32, one chunk, and a ragged last chunk.
SIZES = pytest.mark.parametrize(
    "vocabulary", [50, adjusting.CHUNK, adjusting.CHUNK + 77, *VOCABULARIES[3:]]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
FILTERED = pytest.mark.parametrize("filtered", [False, True])

# The mask of each row; rows of all kinds have one. Rows without one are between them.
MASK_ROWS = [2, 0, -1, 1, -1, -1, 2, 4, 0, 4]
EMPTY, SINGLE = 3, 4  # masks that allow no token, and one token


def make_logits(vocabulary: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    torch.manual_seed(vocabulary)
    return (3 * torch.randn(ROWS, vocabulary + 3, device=device)).to(dtype)[:, :vocabulary]


def make_masks(vocabulary: int, mask_rows: list[int], device: torch.device) -> TokenMasks:
    """Five masks. They have more words than needed; bits after the vocabulary are random."""
    generator = torch.Generator().manual_seed(vocabulary)
    words = torch.randint(-(2**31), 2**31, (5, -(-vocabulary // 32) + 2), generator=generator)
    words[1] &= words[0] & words[2]
    words[EMPTY:] = 0
    words[SINGLE, (vocabulary - 1) // 32] = 1 << (vocabulary - 1) % 32
    rows = torch.tensor([-1, *mask_rows], dtype=torch.int32, device=device)
    return TokenMasks(rows[1:], words.int().to(device))  # rows are at any address


def infinite_logits(logits: Tensor, masks: TokenMasks) -> Tensor:
    """The logits, minus infinity for excluded tokens; with the same strides, on which the order of
    sums depends."""
    layout = {"dtype": logits.dtype, "device": logits.device}
    infinite = torch.empty_strided(logits.shape, logits.stride(), **layout).copy_(logits)
    excluded = excluded_tokens(masks, logits.shape[1])
    return infinite.masked_fill_(excluded, -torch.inf)


def excluded_tokens(masks: TokenMasks, vocabulary: int) -> Tensor:
    """The tokens that each row must not draw, `[rows, vocabulary]`, bit by bit."""
    words = [*masks.words.tolist(), [-1] * masks.words.shape[1]]
    return torch.tensor(
        [
            [not words[row][token // 32] >> token % 32 & 1 for token in range(vocabulary)]
            for row in masks.rows.tolist()
        ],
        device=masks.rows.device,
    )


def make_state(logits: Tensor, filtered: bool) -> SamplingState:
    """Greedy and drawn rows, some with bans; if `filtered`, filters, penalties and biases."""
    vocabulary, device = logits.shape[1], logits.device
    state = filtered_state(device)
    state.temperature[[2, 7]] = 0.0
    state.min_tokens[[1, 3, 8]] = 100
    stops = torch.full((ROWS, MAX_STOP_IDS), -1, dtype=torch.int32, device=device)
    stops[:, :8] = logits.topk(8).indices
    state = replace(state, stop_token_ids=stops)
    if filtered:
        return replace(state, adjustments=make_adjustments(vocabulary, device))
    off = {"top_k": state.top_k * 0, "top_p": state.top_p * 0 + 1, "min_p": state.min_p * 0}
    return replace(state, **off)


@SIZES
@DTYPES
@FILTERED
@pytest.mark.parametrize("ops", [reference, sampling, invariant])
def test_draws_are_those_of_logits_of_minus_infinity(
    ops: ModuleType, filtered: bool, dtype: torch.dtype, vocabulary: int, device: torch.device
) -> None:
    """Bit by bit: also in rows without an allowed token, and beside rows without a mask."""
    logits = make_logits(vocabulary, dtype, device)
    state, given = make_state(logits, filtered), logits.clone()
    masks = make_masks(vocabulary, [*MASK_ROWS[:7], EMPTY, EMPTY, EMPTY], device)
    masked = replace(state, masks=masks)
    infinite = infinite_logits(logits, masks)
    with poisoned_outputs():
        drawn = ops.sample(logits, masked, filtered)
    assert torch.equal(drawn, ops.sample(infinite, state, filtered))
    assert torch.equal(logits, given), "log probabilities are of these"
    free = masks.rows < 0
    assert torch.equal(drawn[free], ops.sample(logits, state, filtered)[free])


@SIZES
@DTYPES
@FILTERED
def test_draws_are_those_of_the_reference(
    filtered: bool, dtype: torch.dtype, vocabulary: int, device: torch.device
) -> None:
    logits = make_logits(vocabulary, dtype, device)
    masks = make_masks(vocabulary, MASK_ROWS, device)
    state = replace(make_state(logits, filtered), masks=masks)
    excluded = excluded_tokens(masks, vocabulary)
    scores = reference.adjusted_logits(logits, state)
    assert (scores[excluded] == -torch.inf).all()
    for number in range(12 if FULL_SIZE else 2):
        at = replace(state, index=state.index + number)
        with poisoned_outputs():
            drawn = sampling.sample(logits, at, filtered)
        assert not excluded.gather(1, drawn.long()[:, None]).any()
        assert_same_draws(drawn, logits, at)
    assert (drawn[masks.rows == SINGLE] == vocabulary - 1).all()


@SIZES
@DTYPES
@pytest.mark.parametrize("adjusted", [False, True])
def test_filters_keep_what_masks_allow(
    adjusted: bool, dtype: torch.dtype, vocabulary: int, device: torch.device
) -> None:
    """The same bits as for logits of minus infinity, whose filters `test_sampling.py` checks."""
    logits = make_logits(vocabulary, dtype, device)
    state = make_state(logits, filtered=True)
    if not adjusted:
        state = replace(state, adjustments=None)
    masks = make_masks(vocabulary, MASK_ROWS, device)
    masked = replace(state, masks=masks)
    infinite = infinite_logits(logits, masks)
    with poisoned_outputs():
        found = adjusting.adjusted_logits(logits, masked)
        thresholds = sampling_filters.kept_thresholds(logits, masked, found)
        expected = sampling_filters.kept_thresholds(
            infinite, state, adjusting.adjusted_logits(infinite, state)
        )
    assert torch.equal(thresholds, expected)
