"""The host's mirror of the slots: checks every step and turns it into a plan for the backend.

A steady decode step is a handful of array operations; Python looks at a single sequence only
when it starts, prefills or fails.

Two kinds of fault are told apart. A malformed step breaks the protocol itself and raises
RequestError INVALID_ARGUMENT before anything has changed. A bad sequence fails alone with one
SlotError; as long as steps sent before that was known still name its slot, its rows are answered
with -1.
"""

import logging
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewire.errors import invalid
from pagewire.limits import INT32_MAX, MAX_LOGPROBS, MAX_STOP_IDS
from pagewire.packing import Int32Array
from pagewire.worker.protocol.steps.adjustments import (
    adjustment_fault,
    adjustment_kinds,
    biased_starts,
    penalized_starts,
)
from pagewire.worker.protocol.steps.device_plan import (
    BlockCopies,
    Chunks,
    DevicePlan,
    SlotStarts,
    TableWrites,
)
from pagewire.worker.protocol.steps.host_copies import check_host_copies
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows
from pagewire.worker.protocol.steps.step import Start, Step, StepPrefixGroup, StepSampling

log = logging.getLogger(__name__)

_EMPTY, _RUNNING, _FAILED = 0, 1, 2
_NONE = np.empty(0, np.int32)
_NO_ROWS = np.empty(0, np.bool_)
_NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class Failure:
    """A sequence that failed: see SlotError of worker.proto."""

    slot: int
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and how to answer the step.

    `rows` has the plan's sampling row for each row of the answer, -1 for a failed sequence; it is
    None where the two are the same. `failures` are those found while planning.
    """

    plan: DevicePlan
    rows: Int32Array | None
    failures: tuple[Failure, ...]


class Slots:
    """The slots of one stream; a new stream begins with new ones."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        n = limits.num_slots
        self._state = np.zeros(n, np.int8)
        self._known = np.zeros(n, np.int32)  # tokens given at the start
        self._computed = np.zeros(n, np.int32)  # tokens whose KV is written
        self._generated = np.zeros(n, np.int32)  # index of the next token to sample
        self._num_blocks = np.zeros(n, np.int32)
        self._room = np.zeros(n, np.int32)  # tokens that the blocks and max_model_len allow
        self._filtered = np.zeros(n, np.bool_)
        self._logprobs = np.full(n, _NO_LOGPROBS, np.int8)  # likeliest tokens wanted
        self._tables = np.zeros((n, limits.max_blocks), np.int32)
        self._tokens: list[Int32Array] = [_NONE] * n  # known tokens until all are computed
        self._decodes = _NONE
        self._groups: tuple[StepPrefixGroup, ...] = ()  # as sent
        # For which decode slots, and those of the groups that hold among them.
        self._sharing: tuple[Int32Array, tuple[StepPrefixGroup, ...]] = (_NONE, ())
        self._failures: list[Failure] = []

    def plan(self, step: Step) -> PlannedStep:
        """Applies a step; RequestError INVALID_ARGUMENT, and no change, if it is malformed."""
        self._check(step)
        self._failures = []
        if step.decode_slots is not None:
            self._decodes = step.decode_slots.copy()
        starts, given, copies = self._start(step.starts)
        writes = _joined(given, self._append(step.append_slots, step.append_blocks))
        # Before the chunks: a chunk that ends now has no token yet that could be decoded.
        slots, positions, decoded = self._decode()
        chunks, rows, answered = self._prefill(step.prefill_slots, step.prefill_counts)

        sample_slots = slots if chunks is None else np.concatenate((slots, rows))
        indices = self._generated[sample_slots]
        self._generated[sample_slots] = indices + 1
        plan = DevicePlan(
            starts=starts,
            writes=writes,
            decode_slots=slots,
            decode_positions=positions,
            chunks=chunks,
            sample_slots=sample_slots,
            sample_indices=indices,
            filtered=bool(self._filtered[sample_slots].any()),
            logprobs=self._wanted_logprobs(sample_slots),
            groups=self._group(step.groups, slots),
            copies=copies,
            host_copies=step.host_copies,
        )
        return PlannedStep(plan, _answer_rows(decoded, answered), tuple(self._failures))

    def fail(self, slot: int) -> bool:
        """Marks a sequence as failed; False if it was already. May run beside `plan`."""
        if self._state[slot] == _FAILED:
            return False
        self._state[slot] = _FAILED
        return True

    def failed(self, slots: Int32Array) -> NDArray[np.bool_]:
        """Which of `slots [n]` hold a failed sequence."""
        failed: NDArray[np.bool_] = self._state[slots] == _FAILED
        return failed

    def blocks(self, slot: int) -> Int32Array:
        """The blocks of a slot's sequence."""
        return self._tables[slot, : self._num_blocks[slot]].copy()

    def _check(self, step: Step) -> None:
        """Raises if the step is malformed."""
        decodes = self._decodes if step.decode_slots is None else step.decode_slots
        if step.decode_slots is not None:
            self._check_slots("decode_slots", decodes)
        if step.starts:
            self._check_slots("starts", np.array([start.slot for start in step.starts], np.int64))
        self._check_slots("append_slots", step.append_slots, repeats=True)
        for group in step.groups or ():
            self._check_slots("group_slots", group.slots)
        self._check_slots("prefill_slots", step.prefill_slots)
        if step.host_copies is not None:
            check_host_copies(step.host_copies, self.limits)
        tokens, counts = len(decodes), step.prefill_counts
        if len(counts):
            if counts.min() < 1:
                raise invalid("prefill_counts", f"a chunk has {counts.min()} tokens; 1 is least")
            tokens += int(counts.sum(dtype=np.int64))
        if tokens > self.limits.max_num_batched_tokens:
            raise invalid(
                "step",
                f"step {step.number} computes {tokens} tokens; this worker takes at most "
                f"{self.limits.max_num_batched_tokens} (max_num_batched_tokens)",
            )

    def _check_slots(
        self, field: str, slots: NDArray[np.integer], *, repeats: bool = False
    ) -> None:
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= self.limits.num_slots:
            wrong = slots[(slots < 0) | (slots >= self.limits.num_slots)][0]
            raise invalid(
                field,
                f"{field} names slot {wrong}; this worker has slots 0 to "
                f"{self.limits.num_slots - 1}",
            )
        if not repeats and np.bincount(slots).max() > 1:
            raise invalid(field, f"{field} names a slot twice")

    def _fail(self, slot: int, message: str) -> None:
        """A failure that running the sequence again cannot cure."""
        if self.fail(slot):
            self._failures.append(Failure(slot, message, retryable=False))

    def _start(
        self, starts: tuple[Start, ...]
    ) -> tuple[SlotStarts | None, TableWrites | None, BlockCopies | None]:
        """Slots take their sequences."""
        taken = [start for start in starts if self._take(start)]
        if not taken:
            return None, None, None
        counts = [len(start.blocks) for start in taken]
        slots = np.array([start.slot for start in taken], np.int32)
        columns = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        blocks = np.concatenate([start.blocks for start in taken])
        writes = TableWrites(np.repeat(slots, counts), columns, blocks)
        return _sampling(slots, taken), writes, _copies(taken, self.limits.block_size)

    def _take(self, start: Start) -> bool:
        slot = start.slot
        self._state[slot] = _RUNNING
        # Of a failed sequence too: which of its chunks would have sampled depends on these two.
        self._known[slot] = len(start.token_ids)
        self._computed[slot] = min(start.num_computed, len(start.token_ids))
        self._generated[slot] = min(start.num_generated, len(start.token_ids))
        fault = _fault(start, self.limits)
        if fault:
            self._set_blocks(slot, 0)
            self._fail(slot, fault)
            return False
        self._set_blocks(slot, len(start.blocks))
        self._tables[slot, : len(start.blocks)] = start.blocks
        self._tokens[slot] = start.token_ids
        sampling = start.sampling
        narrowed = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._filtered[slot] = narrowed or adjustment_kinds(sampling) > 0
        self._logprobs[slot] = _NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        return True

    def _wanted_logprobs(self, slots: Int32Array) -> LogprobRows | None:
        """Which of the sampling rows want log probabilities; None if none does."""
        wanted = self._logprobs[slots]
        rows = np.flatnonzero(wanted > _NO_LOGPROBS)
        return LogprobRows(rows.astype(np.int32), int(wanted[rows].max())) if len(rows) else None

    def _set_blocks(self, slots: int | Int32Array, counts: int | Int32Array) -> None:
        self._num_blocks[slots] = counts
        room = np.minimum(np.multiply(counts, self.limits.block_size), self.limits.max_model_len)
        self._room[slots] = room

    def _append(self, slots: Int32Array, blocks: Int32Array) -> TableWrites | None:
        """Blocks join sequences, in order."""
        if not len(slots):
            return None
        self._fail_empty(slots)
        for i in np.flatnonzero((blocks < 1) | (blocks >= self.limits.num_blocks)):
            self._fail(int(slots[i]), _bad_block(int(blocks[i]), self.limits))
        columns = self._num_blocks[slots] + _occurrence(slots)
        for slot in slots[columns >= self.limits.max_blocks]:
            self._fail(
                int(slot),
                f"slot {slot} got more than {self.limits.max_blocks} blocks, enough for "
                f"max_model_len {self.limits.max_model_len}",
            )
        live = self._state[slots] == _RUNNING
        slots, columns, blocks = slots[live], columns[live], blocks[live]
        self._tables[slots, columns] = blocks
        # Of several blocks for one slot the last, with the highest column, is written last.
        self._set_blocks(slots, columns + 1)
        return TableWrites(slots, columns, blocks)

    def _group(
        self, sent: tuple[StepPrefixGroup, ...] | None, decodes: Int32Array
    ) -> tuple[StepPrefixGroup, ...]:
        """The prefix groups among the slots that decode.

        A group whose members' blocks are not the same is left out: it would change their results.
        """
        if sent is not None:
            self._groups = sent
        elif not self._groups or np.array_equal(decodes, self._sharing[0]):
            return self._sharing[1]
        decoding = np.zeros(self.limits.num_slots, np.bool_)
        decoding[decodes] = True
        held = []
        for group in self._groups:
            slots = group.slots[decoding[group.slots]]
            if len(slots) < 2:
                continue
            tables = self._tables[slots, : group.blocks]
            if group.blocks > self._num_blocks[slots].min() or (tables != tables[0]).any():
                log.error("prefix group %s does not share %d blocks", slots, group.blocks)
                continue
            held.append(StepPrefixGroup(group.blocks, slots))
        self._sharing = decodes, tuple(held)
        return self._sharing[1]

    def _decode(self) -> tuple[Int32Array, Int32Array, NDArray[np.bool_]]:
        """Slots and positions of the decode rows, and which of those asked for they are."""
        slots = self._decodes
        position, state = self._computed[slots], self._state[slots]
        live = (state == _RUNNING) & (position >= self._known[slots])
        live &= position < self._room[slots]
        if not live.all():
            for i in np.flatnonzero(~live & (state != _FAILED)):
                self._fail(int(slots[i]), self._why_not_decoded(int(slots[i])))
            slots, position = slots[live], position[live]
        self._computed[slots] = position + 1
        return slots, position, live

    def _why_not_decoded(self, slot: int) -> str:
        if self._state[slot] == _EMPTY:
            return f"slot {slot} holds no sequence"
        computed, known = self._computed[slot], self._known[slot]
        if computed < known:
            return (
                f"slot {slot} decodes although only {computed} of its {known} tokens are prefilled"
            )
        if computed >= self.limits.max_model_len:
            return f"slot {slot} is full: max_model_len is {self.limits.max_model_len} tokens"
        return f"slot {slot} has {self._num_blocks[slot]} blocks, too few for position {computed}"

    def _prefill(
        self, slots: Int32Array, counts: Int32Array
    ) -> tuple[Chunks | None, Int32Array, NDArray[np.bool_]]:
        """The chunks; the slots `[sampling chunks]` of those that sample.

        Also which of the chunks that reach their sequence's last known token are computed: each
        of these has a row in the answer.
        """
        if not len(slots):
            return None, _NONE, _NO_ROWS
        self._fail_empty(slots)
        begins, known, room = self._computed[slots], self._known[slots], self._room[slots]
        ends = begins + counts
        self._computed[slots] = ends
        for i in np.flatnonzero((ends > known) | (ends > room)):
            lack = f"{known[i]} known tokens" if ends[i] > known[i] else f"room for {room[i]}"
            self._fail(int(slots[i]), f"slot {slots[i]} has {lack}; a chunk ends at {ends[i]}")
        live, samples = self._state[slots] == _RUNNING, ends >= known
        answered = live[samples]
        if not live.any():
            return None, _NONE, answered
        slots, samples = slots[live], samples[live]
        chunks = self._chunks(slots, begins[live], ends[live], samples)
        return chunks, slots[samples], answered

    def _chunks(
        self, slots: Int32Array, begins: Int32Array, ends: Int32Array, samples: NDArray[np.bool_]
    ) -> Chunks:
        tokens, positions = [], []
        for slot, begin, end in zip(slots.tolist(), begins.tolist(), ends.tolist(), strict=True):
            tokens.append(self._tokens[slot][begin:end])
            positions.append(np.arange(begin, end, dtype=np.int32))
            if end == self._known[slot]:
                self._tokens[slot] = _NONE
        starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(ends - begins, out=starts[1:])
        return Chunks(
            slots=slots,
            starts=starts,
            tokens=np.concatenate(tokens),
            positions=np.concatenate(positions),
            lengths=ends,
            samples=samples,
        )

    def _fail_empty(self, slots: Int32Array) -> None:
        for slot in slots[self._state[slots] == _EMPTY]:
            self._fail(int(slot), f"slot {slot} holds no sequence")


def _answer_rows(decoded: NDArray[np.bool_], chunked: NDArray[np.bool_]) -> Int32Array | None:
    """The plan's row of each row of the answer, -1 where that is not computed."""
    if decoded.all() and chunked.all():
        return None
    live = np.concatenate((decoded, chunked))
    return np.where(live, np.cumsum(live) - 1, -1).astype(np.int32)


def _joined(first: TableWrites | None, second: TableWrites | None) -> TableWrites | None:
    if first is None or second is None:
        return first or second
    return TableWrites(
        slots=np.concatenate((first.slots, second.slots)),
        columns=np.concatenate((first.columns, second.columns)),
        blocks=np.concatenate((first.blocks, second.blocks)),
    )


def _occurrence(values: Int32Array) -> Int32Array:
    """How often each value `[n]` has come before."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    counts = np.empty(len(values), np.int32)
    counts[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return counts


def _bad_block(block: int, limits: Limits) -> str:
    return f"block {block} is none of this worker's blocks 1 to {limits.num_blocks - 1}"


def _fault(start: Start, limits: Limits) -> str | None:
    """What is wrong with a sequence, None if nothing is."""
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
    if len(blocks) and (blocks.min() < 1 or blocks.max() >= limits.num_blocks):
        return _bad_block(int(blocks[(blocks < 1) | (blocks >= limits.num_blocks)][0]), limits)
    if start.num_computed > len(blocks) * limits.block_size:
        return f"num_computed {start.num_computed} tokens do not fit into {len(blocks)} blocks"
    if start.copied_block >= limits.num_blocks:
        return _bad_block(start.copied_block, limits)
    if start.copied_block and start.num_computed % limits.block_size == 0:
        return f"copied_block is set, and num_computed {start.num_computed} is at a block's start"
    return _sampling_fault(start.sampling, limits)


def _copies(starts: list[Start], block_size: int) -> BlockCopies | None:
    copying = [start for start in starts if start.copied_block]
    if not copying:
        return None
    return BlockCopies(
        sources=np.array([start.copied_block for start in copying], np.int32),
        targets=np.array(
            [start.blocks[start.num_computed // block_size] for start in copying], np.int32
        ),
    )


def _sampling_fault(sampling: StepSampling, limits: Limits) -> str | None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature {sampling.temperature} is not a number of at least 0"
    if not 0 < sampling.top_p <= 1:
        return f"top_p {sampling.top_p} is not above 0 and at most 1"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p {sampling.min_p} is not between 0 and 1"
    if sampling.top_k > INT32_MAX or sampling.min_tokens > INT32_MAX:
        return f"top_k {sampling.top_k} or min_tokens {sampling.min_tokens} exceeds {INT32_MAX}"
    if len(sampling.stop_token_ids) > MAX_STOP_IDS:
        return f"{len(sampling.stop_token_ids)} stop_token_ids; {MAX_STOP_IDS} are the most"
    if any(token >= limits.vocab_size for token in sampling.stop_token_ids):
        return f"a stop token id is not in the vocabulary of {limits.vocab_size}"
    if (sampling.logprobs or 0) > min(MAX_LOGPROBS, limits.vocab_size):
        return f"logprobs {sampling.logprobs} exceeds {min(MAX_LOGPROBS, limits.vocab_size)}"
    return adjustment_fault(sampling, limits.vocab_size)


def _sampling(slots: Int32Array, starts: list[Start]) -> SlotStarts:
    drawn = [start.sampling for start in starts]
    stops = np.full((len(starts), MAX_STOP_IDS), -1, np.int32)
    for row, sampling in enumerate(drawn):
        stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
    return SlotStarts(
        slots=slots,
        temperature=np.array([s.temperature for s in drawn], np.float32),
        top_k=np.array([s.top_k for s in drawn], np.int32),
        top_p=np.array([s.top_p for s in drawn], np.float32),
        min_p=np.array([s.min_p for s in drawn], np.float32),
        seed=np.array([s.seed for s in drawn], np.int64),
        min_tokens=np.array([s.min_tokens for s in drawn], np.int32),
        stop_token_ids=stops,
        adjustment_kinds=np.array([adjustment_kinds(s) for s in drawn], np.int32),
        penalized=penalized_starts(starts),
        biased=biased_starts(starts),
    )
