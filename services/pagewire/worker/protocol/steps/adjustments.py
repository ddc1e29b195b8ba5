"""Penalties and biases of sequences that start, as arrays for the device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.limits import INT32_MAX, MAX_BIASES
from pagewire.packing import Int32Array
from pagewire.worker.protocol.steps.step import Start, StepSampling

# The adjustments of a slot, as bits.
BIASED, PENALIZED = 1, 2
# The count of a token in a sequence, in 16 bits: its occurrences in the output, up to MAX_COUNTED.
# IN_PROMPT, the sign bit, is set if the prompt contains the token.
MAX_COUNTED = 2**15 - 1
IN_PROMPT = -(2**15)
# Fills the places after the last token with a bias; above every token id.
NO_TOKEN = INT32_MAX


@dataclass(frozen=True, slots=True)
class PenalizedStarts:
    """Slots that get a sequence with penalties, and the counts of its tokens."""

    slots: Int32Array  # [penalized]
    penalties: NDArray[np.float32]  # [penalized, 3]: repetition, frequency, presence
    seen_slots: Int32Array  # [seen]
    seen_ids: Int32Array  # [seen], distinct within a slot
    seen_counts: Int32Array  # [seen], see IN_PROMPT


@dataclass(frozen=True, slots=True)
class BiasedStarts:
    """Slots that get a sequence with biases."""

    slots: Int32Array  # [biased]
    ids: Int32Array  # [biased, 300], ascending, then NO_TOKEN
    biases: NDArray[np.float32]  # [biased, 300]


def adjustment_kinds(sampling: StepSampling) -> int:
    """BIASED, PENALIZED, both or neither."""
    return BIASED * (len(sampling.bias_ids) > 0) | PENALIZED * sampling.penalized


def adjustment_fault(sampling: StepSampling, vocab_size: int) -> str | None:
    """The reason why biases are invalid; None if they are valid."""
    ids, biases = sampling.bias_ids, sampling.biases
    if len(ids) > MAX_BIASES or len(ids) != len(biases):
        return f"{len(ids)} bias_ids and {len(biases)} biases; a sequence has up to {MAX_BIASES}"
    if len(ids) and (ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any()):
        return f"bias_ids must ascend and be below the vocabulary size {vocab_size}"
    if not np.isfinite(biases).all():
        return "biases must be finite numbers"
    return None


def penalized_starts(starts: list[Start]) -> PenalizedStarts | None:
    """The arrays of all starts with penalties; None if there are none."""
    penalized = [start for start in starts if start.sampling.penalized]
    if not penalized:
        return None
    seen = [_seen(start.token_ids, start.num_generated) for start in penalized]
    slots = np.array([start.slot for start in penalized], np.int32)
    sampling = [start.sampling for start in penalized]
    return PenalizedStarts(
        slots=slots,
        penalties=np.array(
            [(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in sampling],
            np.float32,
        ),
        seen_slots=np.repeat(slots, [len(ids) for ids, _ in seen]),
        seen_ids=np.concatenate([ids for ids, _ in seen]),
        seen_counts=np.concatenate([counts for _, counts in seen]),
    )


def biased_starts(starts: list[Start]) -> BiasedStarts | None:
    """The arrays of all starts with biases; None if there are none."""
    biased = [start for start in starts if len(start.sampling.bias_ids)]
    if not biased:
        return None
    ids = np.full((len(biased), MAX_BIASES), NO_TOKEN, np.int32)
    biases = np.zeros((len(biased), MAX_BIASES), np.float32)
    for row, start in enumerate(biased):
        ids[row, : len(start.sampling.bias_ids)] = start.sampling.bias_ids
        biases[row, : len(start.sampling.biases)] = start.sampling.biases
    return BiasedStarts(np.array([start.slot for start in biased], np.int32), ids, biases)


def _seen(tokens: Int32Array, num_generated: int) -> tuple[Int32Array, Int32Array]:
    """The distinct ids of `tokens [known]`, and the count of each."""
    prompt = len(tokens) - num_generated
    ids, places = np.unique(tokens, return_inverse=True)
    counts = np.bincount(places[prompt:], minlength=len(ids)).clip(max=MAX_COUNTED)
    counts[places[:prompt]] += IN_PROMPT  # numpy adds once for each distinct place
    return ids, counts.astype(np.int32)
