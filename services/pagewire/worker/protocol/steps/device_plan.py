"""What a backend does in one step: changes of the slots' state, then rows to compute."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.limits import MAX_STOP_IDS
from pagewire.packing import Int32Array
from pagewire.worker.protocol.steps.adjustments import BiasedStarts, PenalizedStarts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows
from pagewire.worker.protocol.steps.step import StepHostCopies, StepPrefixGroup


@dataclass(frozen=True, slots=True)
class SlotStarts:
    """Sampling parameters of the slots that take a new sequence."""

    slots: Int32Array  # [starts]
    temperature: NDArray[np.float32]  # [starts]
    top_k: Int32Array  # [starts]
    top_p: NDArray[np.float32]  # [starts]
    min_p: NDArray[np.float32]  # [starts]
    seed: NDArray[np.int64]  # [starts]
    min_tokens: Int32Array  # [starts]
    stop_token_ids: Int32Array  # [starts, 16], -1 is none
    adjustment_kinds: Int32Array  # [starts], see `adjustment_kinds`
    penalized: PenalizedStarts | None = None
    biased: BiasedStarts | None = None


@dataclass(frozen=True, slots=True)
class TableWrites:
    """Entries of the block tables that change: `tables[slots, columns] = blocks`."""

    slots: Int32Array  # [writes]
    columns: Int32Array  # [writes]
    blocks: Int32Array  # [writes]


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Blocks whose KV is copied: no block is read and written."""

    sources: Int32Array  # [copies]
    targets: Int32Array  # [copies], distinct


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of known tokens to prefill, at least one."""

    slots: Int32Array  # [chunks]
    starts: Int32Array  # [chunks + 1], offsets into tokens
    tokens: Int32Array  # [prefilled], token ids
    positions: Int32Array  # [prefilled]
    lengths: Int32Array  # [chunks], KV tokens after the chunk
    samples: NDArray[np.bool_]  # [chunks], whether it reaches the last known token


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """One step, checked: every slot, block and position in it is valid.

    `host_copies` come before all else, see `Backend.copy`. A backend then applies `starts`,
    `writes` and `copies`, computes the decode rows and the chunks, and samples. Nothing else
    changes a slot: a decode row's input is the token last sampled for its slot, its position
    follows on the one before.

    Rows that sample are the decode rows, then the chunks that reach their last known token.
    `sample_indices` is each such token's index in its request. `filtered` is whether any of these
    rows uses top_k, top_p, min_p, penalties or biases. Arrays must not be written to:
    `decode_slots` is the same object for as long as the rows stay the same.
    """

    starts: SlotStarts | None
    writes: TableWrites | None
    decode_slots: Int32Array  # [decodes]
    decode_positions: Int32Array  # [decodes]
    chunks: Chunks | None
    sample_slots: Int32Array  # [rows]
    sample_indices: Int32Array  # [rows]
    filtered: bool
    logprobs: LogprobRows | None = None  # None: no row wants any
    # Of the decode slots; the same object as in the step before where nothing has changed.
    groups: tuple[StepPrefixGroup, ...] = ()
    copies: BlockCopies | None = None
    host_copies: StepHostCopies | None = None

    @property
    def num_decodes(self) -> int:
        """Decode rows."""
        return len(self.decode_slots)

    @property
    def num_prefilled(self) -> int:
        """Tokens of all chunks."""
        return 0 if self.chunks is None else len(self.chunks.tokens)

    def sample_rows(self) -> Int32Array:
        """Where among the decode rows and the tokens of the chunks those are that sample."""
        rows = np.arange(self.num_decodes, dtype=np.int32)
        if self.chunks is None:
            return rows
        ends = self.chunks.starts[1:][self.chunks.samples]
        return np.concatenate((rows, ends + np.int32(self.num_decodes - 1)))

    def sample_lengths(self) -> Int32Array:
        """KV tokens `[rows]` that those attend to, themselves included."""
        lengths = self.decode_positions + np.int32(1)
        if self.chunks is None:
            return lengths
        return np.concatenate((lengths, self.chunks.lengths[self.chunks.samples]))


def rehearsal(
    limits: Limits,
    decodes: int,
    chunks: int,
    chunk_length: int,
    num_top: int | None = None,
    chunk_start: int = 0,
) -> DevicePlan:
    """A step of the given size whose rows all belong to the padding slot and draw with top-p.

    It touches no sequence: its KV goes to the scratch block. Chunks begin at position
    `chunk_start`. With `num_top` every row wants log
    probabilities.
    """
    pad = limits.padding_slot
    rows = decodes + chunks
    return DevicePlan(
        starts=SlotStarts(
            slots=np.array([pad], np.int32),
            temperature=np.array([1.0], np.float32),
            top_k=np.array([0], np.int32),
            top_p=np.array([0.9], np.float32),
            min_p=np.array([0.0], np.float32),
            seed=np.array([0], np.int64),
            min_tokens=np.array([0], np.int32),
            stop_token_ids=np.full((1, MAX_STOP_IDS), -1, np.int32),
            adjustment_kinds=np.array([0], np.int32),
        ),
        writes=None,
        decode_slots=np.full(decodes, pad, np.int32),
        decode_positions=np.zeros(decodes, np.int32),
        chunks=_rehearsed(pad, chunks, chunk_length, chunk_start) if chunks else None,
        sample_slots=np.full(rows, pad, np.int32),
        sample_indices=np.zeros(rows, np.int32),
        filtered=True,
        logprobs=None if num_top is None else LogprobRows(np.arange(rows, dtype=np.int32), num_top),
    )


def _rehearsed(slot: int, chunks: int, length: int, begin: int) -> Chunks:
    return Chunks(
        slots=np.full(chunks, slot, np.int32),
        starts=np.arange(chunks + 1, dtype=np.int32) * np.int32(length),
        tokens=np.zeros(chunks * length, np.int32),
        positions=np.tile(np.arange(begin, begin + length, dtype=np.int32), chunks),
        lengths=np.full(chunks, begin + length, np.int32),
        samples=np.ones(chunks, np.bool_),
    )
