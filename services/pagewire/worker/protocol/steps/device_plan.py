"""The plan of one step for a backend: changes of the slots, then rows to compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewire.limits import MAX_STOP_IDS
from pagewire.packing import Int32Array
from pagewire.sampling import SLOT_NUMBERS, SamplingNumbers
from pagewire.worker.protocol.constraints.slot_masks import StepMasks
from pagewire.worker.protocol.steps.adjustments import BiasedStarts, PenalizedStarts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows
from pagewire.worker.protocol.steps.prompt_rows import PromptRows
from pagewire.worker.protocol.steps.step import Start, StepHostCopies, StepPrefixGroup

# See `DevicePlan.drafts`; the other special value is FROM_DEVICE.
NO_DRAFT = -1


@dataclass(frozen=True, slots=True)
class SlotStarts:
    """Sampling parameters of the slots that get a new sequence."""

    slots: Int32Array  # [starts]
    # SLOT_NUMBERS by name, each `[starts]` int32 or float32.
    numbers: dict[str, NDArray[Any]]
    seed: NDArray[np.int64]  # [starts]
    min_tokens: Int32Array  # [starts]
    stop_token_ids: Int32Array  # [starts, 16], padded with -1
    adjustment_kinds: Int32Array  # [starts], bits, see `adjustment_kinds`
    penalized: PenalizedStarts | None = None
    biased: BiasedStarts | None = None
    # The sequences themselves `[starts]`, for backends that do not compute on arrays.
    sequences: tuple[Start, ...] = ()
    forced: Int32Array | None = None  # [starts, longest], see forced_texts.py


def slot_numbers(
    sampling: Sequence[SamplingNumbers],
) -> dict[str, NDArray[Any]]:
    """`SlotStarts.numbers` of some sequences."""
    return {
        number.name: np.array(
            [getattr(each, number.name) for each in sampling],
            np.int32 if number.integer else np.float32,
        )
        for number in SLOT_NUMBERS
    }


@dataclass(frozen=True, slots=True)
class TableWrites:
    """Changed entries of the block tables: `tables[slots, columns] = blocks`."""

    slots: Int32Array  # [writes]
    columns: Int32Array  # [writes]
    blocks: Int32Array  # [writes]


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Blocks whose KV is copied. No block is both a source and a target."""

    sources: Int32Array  # [copies]
    targets: Int32Array  # [copies], distinct


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of known tokens to prefill, at least one."""

    slots: Int32Array  # [chunks]
    starts: Int32Array  # [chunks + 1], offsets into `tokens`
    tokens: Int32Array  # [prefilled], token ids
    positions: Int32Array  # [prefilled]
    lengths: Int32Array  # [chunks], KV tokens after the chunk
    samples: NDArray[np.bool_]  # [chunks], whether the chunk ends at the last known token
    following: Int32Array  # [chunks], the known token after the chunk; 0 if it samples


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One step whose slots, blocks and positions are all valid.

    `host_copies` are first, see `Backend.copy`. Then a backend applies `starts`, `writes` and
    `copies`, computes the decode rows and the chunks, and samples. Nothing else changes a slot.
    The input of a decode row is the token last sampled for its slot, or a draft; its position is
    one more than before.

    The sampling rows are the decode rows, then the chunks that end at their last known token.
    `filtered` is whether any of them uses top_k, top_p, min_p, penalties or biases. Backends must
    not write to the arrays.
    """

    starts: SlotStarts | None
    writes: TableWrites | None
    decode_slots: Int32Array  # [decodes]
    decode_positions: Int32Array  # [decodes]
    chunks: Chunks | None
    sample_slots: Int32Array  # [rows]
    sample_indices: Int32Array  # [rows], index of the sampled token in its request's output
    filtered: bool
    logprobs: LogprobRows | None = None  # None: no row needs any
    # Log probabilities of prompt tokens; None: no chunk needs any.
    prompt_rows: PromptRows | None = None
    # Groups of the decode slots. Without a change, the same object as in the step before.
    groups: tuple[StepPrefixGroup, ...] = ()
    copies: BlockCopies | None = None
    host_copies: StepHostCopies | None = None
    masks: StepMasks | None = None  # None: no row is constrained
    # [decodes], the input of each decode row that is a draft, NO_DRAFT for the others; None: no row
    # is a draft. The drafts of a slot follow its row: positions and indices ascend. A draft belongs
    # to the output if all drafts before it do and the row before it samples the same token.
    # FROM_DEVICE is a draft that the device makes. If such drafts are used while steps run ahead of
    # results, positions and indices assume that no draft of the steps in flight is right. The
    # device has the true ones.
    drafts: Int32Array | None = None
    # [sequences that sample], the Drafter (worker.proto) of each one's drafts; None: the plan has
    # no drafts, or the outcome names their drafters.
    drafters: Int32Array | None = None

    @property
    def num_decodes(self) -> int:
        """Number of decode rows."""
        return len(self.decode_slots)

    @property
    def num_drafts(self) -> int:
        """Number of decode rows that are drafts."""
        return 0 if self.drafts is None else int((self.drafts != NO_DRAFT).sum())

    @property
    def num_prefilled(self) -> int:
        """Number of tokens in all chunks."""
        return 0 if self.chunks is None else len(self.chunks.tokens)

    def sample_rows(self) -> Int32Array:
        """Indices `[rows]` of the sampling tokens among decode rows and chunk tokens."""
        rows = np.arange(self.num_decodes, dtype=np.int32)
        if self.chunks is None:
            return rows
        ends = self.chunks.starts[1:][self.chunks.samples]
        return np.concatenate((rows, ends + np.int32(self.num_decodes - 1)))

    def sample_lengths(self) -> Int32Array:
        """KV tokens `[rows]` that the sampling tokens attend to, themselves included."""
        lengths = self.decode_positions + np.int32(1)
        if self.chunks is None:
            return lengths
        return np.concatenate((lengths, self.chunks.lengths[self.chunks.samples]))


def dummy_plan(
    limits: Limits,
    decodes: int,
    chunks: int,
    chunk_length: int,
    num_top: int | None = None,
    chunk_start: int = 0,
) -> DevicePlan:
    """A step of the given size in which all rows belong to the padding slot.

    For warm-up and measurements: no sequence changes, because the KV goes to the scratch block. All
    rows sample with top-p.

    Args:
        limits: the limits of the worker.
        decodes: number of decode rows.
        chunks: number of prefill chunks.
        chunk_length: tokens of each chunk.
        num_top: likeliest tokens of each sampled token and of each chunk token; None for no log
            probabilities.
        chunk_start: position of the first token of each chunk.
    """
    pad = limits.padding_slot
    rows = decodes + chunks
    return DevicePlan(
        starts=SlotStarts(
            slots=np.array([pad], np.int32),
            numbers=slot_numbers([SamplingNumbers(top_p=0.9)]),
            seed=np.array([0], np.int64),
            min_tokens=np.array([0], np.int32),
            stop_token_ids=np.full((1, MAX_STOP_IDS), -1, np.int32),
            adjustment_kinds=np.array([0], np.int32),
        ),
        writes=None,
        decode_slots=np.full(decodes, pad, np.int32),
        decode_positions=np.zeros(decodes, np.int32),
        chunks=_dummy_chunks(pad, chunks, chunk_length, chunk_start) if chunks else None,
        sample_slots=np.full(rows, pad, np.int32),
        sample_indices=np.zeros(rows, np.int32),
        filtered=True,
        logprobs=None if num_top is None else LogprobRows(np.arange(rows, dtype=np.int32), num_top),
        prompt_rows=(
            _dummy_prompt_rows(pad, chunks, chunk_length, chunk_start, num_top)
            if chunks and num_top is not None
            else None
        ),
    )


def _dummy_chunks(slot: int, chunks: int, length: int, begin: int) -> Chunks:
    return Chunks(
        slots=np.full(chunks, slot, np.int32),
        starts=np.arange(chunks + 1, dtype=np.int32) * np.int32(length),
        tokens=np.zeros(chunks * length, np.int32),
        positions=np.tile(np.arange(begin, begin + length, dtype=np.int32), chunks),
        lengths=np.full(chunks, begin + length, np.int32),
        samples=np.ones(chunks, np.bool_),
        following=np.zeros(chunks, np.int32),
    )


def _dummy_prompt_rows(slot: int, chunks: int, length: int, begin: int, num_top: int) -> PromptRows:
    return PromptRows(
        slots=np.full(chunks, slot, np.int32),
        starts=np.arange(chunks + 1, dtype=np.int32) * np.int32(length),
        lengths=np.full(chunks, begin + length, np.int32),
        rows=np.arange(chunks * length, dtype=np.int32),
        targets=np.zeros(chunks * length, np.int32),
        num_top=num_top,
    )
