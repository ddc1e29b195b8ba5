"""Sequences that take a slot: their checks, and their arrays for the device."""

import numpy as np

from pagewire.limits import INT32_MAX, MAX_LOGPROBS, MAX_STOP_IDS
from pagewire.packing import Int32Array
from pagewire.sampling import NUMBERS
from pagewire.worker.protocol.steps.adjustments import (
    adjustment_fault,
    adjustment_kinds,
    biased_starts,
    penalized_starts,
)
from pagewire.worker.protocol.steps.device_plan import (
    BlockCopies,
    SlotStarts,
    TableWrites,
    slot_numbers,
)
from pagewire.worker.protocol.steps.forced_texts import forced_rows
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.step import Start, StepSampling


def start_fault(start: Start, limits: Limits) -> str | None:
    """The reason why a sequence is invalid; None if it is valid."""
    tokens, blocks = start.token_ids, start.blocks
    if not 1 <= len(tokens) <= limits.max_model_len:
        return f"{len(tokens)} known tokens; a sequence has 1 to {limits.max_model_len}"
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= limits.vocab_size)][0]
        return f"token id {wrong} is not in the vocabulary of {limits.vocab_size}"
    if start.num_computed >= len(tokens):
        return f"num_computed {start.num_computed} is not less than the {len(tokens)} known tokens"
    if start.num_generated > len(tokens):
        return f"num_generated {start.num_generated} exceeds the {len(tokens)} known tokens"
    if len(blocks) > limits.max_blocks:
        return f"{len(blocks)} blocks; the longest sequence has {limits.max_blocks}"
    freed = num_freed(start) if limits.window else 0
    if freed and freed > first_seen(start.num_computed, limits):
        return (
            f"its first {freed} blocks are missing, and token {start.num_computed} sees those from "
            f"number {first_seen(start.num_computed, limits)} on"
        )
    held = blocks[freed:]
    if len(held) and (held.min() < 1 or held.max() >= limits.num_blocks):
        return block_fault(int(held[(held < 1) | (held >= limits.num_blocks)][0]), limits)
    if start.num_computed > len(blocks) * limits.block_size:
        return f"num_computed {start.num_computed} tokens do not fit into {len(blocks)} blocks"
    if start.copied_block >= limits.num_blocks:
        return block_fault(start.copied_block, limits)
    if start.copied_block and start.num_computed % limits.block_size == 0:
        return f"copied_block is set, and num_computed {start.num_computed} is at a block's start"
    prediction = start.prediction
    if len(prediction) and (prediction.min() < 0 or prediction.max() >= limits.vocab_size):
        wrong = prediction[(prediction < 0) | (prediction >= limits.vocab_size)][0]
        return f"token id {wrong} of the prediction is not in the vocabulary of {limits.vocab_size}"
    if limits.forced is not None and start.forced is None:
        return (
            "this worker replays recorded texts (--forced-texts), and has none for this prompt; "
            "start it without them to serve"
        )
    if start.constraint is not None:
        fault = start.constraint.fault(limits.vocab_size)
        if fault is not None:
            return fault
    return _prompt_fault(start, limits) or _sampling_fault(start.sampling, limits)


def num_freed(start: Start) -> int:
    """The number of a sequence's first blocks that are 0, because it has given them up."""
    held = np.flatnonzero(start.blocks)
    return int(held[0]) if len(held) else len(start.blocks)


def first_seen(position: int, limits: Limits) -> int:
    """The first block of a sequence that its token at `position` sees."""
    return max(0, position - limits.window + 1) // limits.block_size if limits.window else 0


def block_fault(block: int, limits: Limits) -> str:
    """The message for a block that this worker does not have."""
    return f"block {block} is none of this worker's blocks 1 to {limits.num_blocks - 1}"


def is_filtered(sampling: StepSampling) -> bool:
    """Whether top_k, top_p, min_p, a penalty or a bias changes the distribution."""
    narrowed = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return narrowed or adjustment_kinds(sampling) > 0


def slot_starts(starts: list[Start]) -> SlotStarts:
    """The sampling parameters of all starts, at least one."""
    sampling = [start.sampling for start in starts]
    stops = np.full((len(starts), MAX_STOP_IDS), -1, np.int32)
    forced = [start.forced for start in starts if start.forced is not None]
    for row, s in enumerate(sampling):
        stops[row, : len(s.stop_token_ids)] = s.stop_token_ids
    return SlotStarts(
        slots=_slots(starts),
        numbers=slot_numbers(sampling),
        seed=np.array([s.seed for s in sampling], np.int64),
        min_tokens=np.array([s.min_tokens for s in sampling], np.int32),
        stop_token_ids=stops,
        adjustment_kinds=np.array([adjustment_kinds(s) for s in sampling], np.int32),
        penalized=penalized_starts(starts),
        biased=biased_starts(starts),
        sequences=tuple(starts),
        forced=forced_rows(forced, max(map(len, forced))) if forced else None,
    )


def table_writes(starts: list[Start]) -> TableWrites:
    """The block table entries of all starts, at least one."""
    counts = [len(start.blocks) for start in starts]
    return TableWrites(
        slots=np.repeat(_slots(starts), counts),
        columns=np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        blocks=np.concatenate([start.blocks for start in starts]),
    )


def block_copies(starts: list[Start], block_size: int) -> BlockCopies | None:
    """The copies of the starts with a `copied_block`; None if there are none."""
    copying = [start for start in starts if start.copied_block]
    if not copying:
        return None
    return BlockCopies(
        sources=np.array([start.copied_block for start in copying], np.int32),
        targets=np.array(
            [start.blocks[start.num_computed // block_size] for start in copying], np.int32
        ),
    )


def _slots(starts: list[Start]) -> Int32Array:
    return np.array([start.slot for start in starts], np.int32)


def _prompt_fault(start: Start, limits: Limits) -> str | None:
    if start.prompt_logprobs is None:
        return None
    limit = min(MAX_LOGPROBS, limits.vocab_size)
    if start.prompt_logprobs > limit:
        return f"prompt_logprobs {start.prompt_logprobs} exceeds {limit}"
    if not start.num_computed < start.first_prompt_logprob <= limits.max_model_len:
        return (
            f"first_prompt_logprob {start.first_prompt_logprob} is not above the "
            f"{start.num_computed} computed tokens"
        )
    return None


def _sampling_fault(sampling: StepSampling, limits: Limits) -> str | None:
    for number in NUMBERS:
        fault = number.fault(getattr(sampling, number.name))
        if fault is not None:
            return fault
    if sampling.min_tokens > INT32_MAX:
        return f"min_tokens {sampling.min_tokens} exceeds {INT32_MAX}"
    if len(sampling.stop_token_ids) > MAX_STOP_IDS:
        return f"{len(sampling.stop_token_ids)} stop_token_ids; at most {MAX_STOP_IDS} are allowed"
    if any(token >= limits.vocab_size for token in sampling.stop_token_ids):
        return f"a stop token id is not in the vocabulary of {limits.vocab_size}"
    if (sampling.logprobs or 0) > min(MAX_LOGPROBS, limits.vocab_size):
        return f"logprobs {sampling.logprobs} exceeds {min(MAX_LOGPROBS, limits.vocab_size)}"
    return adjustment_fault(sampling, limits.vocab_size)
