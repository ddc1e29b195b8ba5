"""The host's copy of the slot state: checks every step and turns it into a plan for the backend.

A steady decode step takes a few array operations. Python handles a single sequence only when it
starts, prefills or fails.

There are two kinds of fault. A malformed step breaks the protocol: it raises RequestError
INVALID_ARGUMENT before any state has changed. A bad sequence fails alone with one SlotError. Steps
that the scheduler sent before it received the error may still name the slot; their rows for it are
answered with -1.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagewire.packing import Int32Array
from pagewire.worker.protocol.constraints.slot_masks import MaskedRows, SlotMasks, StepMasks
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.checks import check_step
from pagewire.worker.protocol.steps.device_drafts import DeviceDrafts
from pagewire.worker.protocol.steps.device_plan import (
    BlockCopies,
    Chunks,
    DevicePlan,
    SlotStarts,
    TableWrites,
)
from pagewire.worker.protocol.steps.draft_rows import first_rows
from pagewire.worker.protocol.steps.drafts import Drafts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows
from pagewire.worker.protocol.steps.prefix_groups import PrefixGroups
from pagewire.worker.protocol.steps.prompt_rows import PromptRows, PromptRowsBuilder
from pagewire.worker.protocol.steps.starts import (
    block_copies,
    block_fault,
    first_seen,
    is_filtered,
    num_freed,
    slot_starts,
    start_fault,
    table_writes,
)
from pagewire.worker.protocol.steps.step import Start, Step

_EMPTY, _RUNNING, _FAILED = 0, 1, 2
_NONE = np.empty(0, np.int32)
_NO_ROWS = np.empty(0, np.bool_)
_NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True)
class SlotFailure:
    """A sequence that failed; see `SlotError` in worker.proto."""

    slot: int
    message: str
    retryable: bool
    field: str = ""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and how to answer the step."""

    plan: DevicePlan
    # [rows of the answer], the sampling row of the plan for each, -1 for a failed sequence. None:
    # the rows are the same.
    rows: Int32Array | None
    failures: tuple[SlotFailure, ...]


class Slots:
    """The state of all slots of one stream. All arrays have one element for each slot."""

    def __init__(
        self,
        limits: Limits,
        masks: SlotMasks | None = None,
        row_costs: RowCosts | None = None,
    ) -> None:
        """`masks` None: sequences with a constraint fail. `row_costs` of a device that drafts."""
        self.limits = limits
        self._masks = masks
        self._drafts: Drafts | DeviceDrafts | None = None
        if row_costs is not None:
            self._drafts = DeviceDrafts(limits, row_costs)
        elif limits.max_drafts:
            self._drafts = Drafts(limits)
        n = limits.num_slots
        self._state = np.zeros(n, np.int8)
        self._known = np.zeros(n, np.int32)  # tokens given at the start
        self._computed = np.zeros(n, np.int32)  # tokens whose KV is written
        self._generated = np.zeros(n, np.int32)  # index of the next token to sample
        self._num_blocks = np.zeros(n, np.int32)
        self._num_freed = np.zeros(n, np.int32)  # of these, the first ones, which it has given up
        self._room = np.zeros(n, np.int32)  # tokens that fit into the blocks and max_model_len
        self._filtered = np.zeros(n, np.bool_)
        self._constrained = np.zeros(n, np.bool_)
        # The constrained rows of a step, and the slots of that step; None: not known.
        self._masked_of: Int32Array | None = None
        self._masked_rows: MaskedRows
        self._logprobs = np.full(n, _NO_LOGPROBS, np.int8)  # likeliest tokens to return
        # For prompt tokens: the likeliest tokens to return, and the positions of the first wanted
        # row and of the row after the last one.
        self._prompt_top = np.full(n, _NO_LOGPROBS, np.int8)
        self._prompt_begin = np.zeros(n, np.int32)
        self._prompt_end = np.zeros(n, np.int32)
        self._tables = np.zeros((n, limits.max_blocks), np.int32)  # block tables
        self._tokens: list[Int32Array] = [_NONE] * n  # known tokens until all are computed
        self._decodes = _NONE  # [decodes], the slots that decode
        self._groups = PrefixGroups(n)
        self._failures: list[SlotFailure] = []

    def plan(self, step: Step) -> PlannedStep:
        """Applies a step; RequestError INVALID_ARGUMENT, and no change, if it is malformed."""
        decodes = self._decodes if step.decode_slots is None else step.decode_slots.copy()
        check_step(step, decodes, self.limits)
        arriving = step.starts
        if isinstance(self._drafts, DeviceDrafts):
            for settled, more in self._drafts.settle():
                self._advance(settled, more)
            arriving = self._drafts.with_recent(arriving, decodes)
        self._failures, self._decodes = [], decodes
        starts, given, copies = self._start(arriving)
        given = _joined_writes(given, self._free(step.freed_slots, step.freed_counts))
        writes = _joined_writes(given, self._append(step.append_slots, step.append_blocks))
        # Before the chunks: a chunk that ends in this step has no sampled token to decode yet.
        slots, positions, decoded = self._decode()
        chunks, prompt_rows, rows, answered = self._prefill(step.prefill_slots, step.prefill_counts)

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
            logprobs=self._logprob_rows(sample_slots),
            prompt_rows=prompt_rows,
            groups=self._groups.apply(step.groups, slots, self._tables, self._num_blocks),
            copies=copies,
            host_copies=step.host_copies,
            masks=self._step_masks(sample_slots, indices),
        )
        if self._drafts is not None:
            plan = self._drafts.draft(plan, self._room)
        return PlannedStep(plan, _answer_rows(decoded, answered), tuple(self._failures))

    def take(
        self,
        plan: DevicePlan,
        tokens: Int32Array,
        taken: NDArray[np.bool_] | None,
        right: NDArray[np.bool_] | None = None,
    ) -> None:
        """Takes the tokens of a step, for the drafts and positions of later steps.

        `tokens [rows]`, `taken [rows]` and `right` as in the step's outcome. If the device drafts,
        another thread may run `plan`.
        """
        if isinstance(self._drafts, DeviceDrafts):
            if right is not None:  # the step has sampled
                self._drafts.take(plan, tokens, taken, right)
        elif self._drafts is not None:
            counts = self._drafts.take(plan, tokens, taken)
            self._advance(plan.sample_slots[first_rows(plan)], counts - 1)

    def _advance(self, slots: Int32Array, more: Int32Array) -> None:
        """Adds `more [n]` tokens to `slots [n]`; `plan` has counted one token of each already."""
        self._computed[slots] += more
        self._generated[slots] += more

    def fail(self, slot: int) -> bool:
        """Marks a sequence as failed; False if it was already. Another thread may run `plan`."""
        if self._state[slot] == _FAILED:
            return False
        self._state[slot] = _FAILED
        return True

    def failed(self, slots: Int32Array) -> NDArray[np.bool_]:
        """Which of `slots [n]` hold a failed sequence."""
        failed: NDArray[np.bool_] = self._state[slots] == _FAILED
        return failed

    def blocks(self, slot: int) -> Int32Array:
        """The blocks of a slot's sequence that it has not given up."""
        return self._tables[slot, self._num_freed[slot] : self._num_blocks[slot]].copy()

    def _fail(self, slot: int, message: str) -> None:
        """Fails a sequence. Running it again would fail again."""
        if self.fail(slot):
            self._failures.append(SlotFailure(slot, message, retryable=False))

    def _start(
        self, starts: tuple[Start, ...]
    ) -> tuple[SlotStarts | None, TableWrites | None, BlockCopies | None]:
        """Puts sequences into their slots, except invalid ones."""
        if (texts := self.limits.forced) is not None:
            starts = tuple(
                replace(start, forced=texts.of(start.token_ids[: start.num_prompt]))
                for start in starts
            )
        taken = [start for start in starts if self._take(start)]
        if not taken:
            return None, None, None
        copies = block_copies(taken, self.limits.block_size)
        return slot_starts(taken), table_writes(taken), copies

    def _take(self, start: Start) -> bool:
        slot = start.slot
        self._state[slot] = _RUNNING
        # For invalid sequences too: these values decide which chunks have a row in the answer.
        self._known[slot] = len(start.token_ids)
        self._computed[slot] = min(start.num_computed, len(start.token_ids))
        self._generated[slot] = min(start.num_generated, len(start.token_ids))
        fault = start_fault(start, self.limits)
        if start.constraint is not None and self._masks is None:
            fault = "this worker has no tokenizer, so it takes no constraints"
        if fault:
            self._set_blocks(slot, 0)
            self._num_freed[slot] = 0
            self._fail(slot, fault)
            return False
        self._set_blocks(slot, len(start.blocks))
        self._num_freed[slot] = num_freed(start)
        self._tables[slot, : len(start.blocks)] = start.blocks
        self._tokens[slot] = start.token_ids
        if self._drafts is not None:
            self._drafts.start(start)
        self._filtered[slot] = is_filtered(start.sampling)
        num_top = start.sampling.logprobs
        self._logprobs[slot] = _NO_LOGPROBS if num_top is None else num_top
        self._constrained[slot] = start.constraint is not None
        self._masked_of = None
        if start.constraint is not None and self._masks is not None:
            prompt = len(start.token_ids) - start.num_generated
            known = start.token_ids
            self._masks.start(slot, start.constraint, known[:prompt], known[prompt:])
        num_top = start.prompt_logprobs
        self._prompt_top[slot] = _NO_LOGPROBS if num_top is None else num_top
        self._prompt_begin[slot] = start.first_prompt_logprob - 1
        self._prompt_end[slot] = start.num_prompt - 1
        return True

    def _logprob_rows(self, slots: Int32Array) -> LogprobRows | None:
        """The sampling rows that need log probabilities; None if there are none."""
        num_top = self._logprobs[slots]
        rows = np.flatnonzero(num_top > _NO_LOGPROBS)
        return LogprobRows(rows.astype(np.int32), int(num_top[rows].max())) if len(rows) else None

    def _step_masks(self, slots: Int32Array, indices: Int32Array) -> StepMasks | None:
        """The masks of the constrained sampling rows; None if there are none."""
        if self._masks is None:
            return None
        # Steady decode steps have the same array of slots.
        if slots is not self._masked_of:
            constrained = np.flatnonzero(self._constrained[slots]).astype(np.int32)
            self._masked_rows = self._masks.of_rows(constrained, slots[constrained])
            self._masked_of = slots
        masked = self._masked_rows
        return masked.at(indices) if len(masked.rows) else None

    def _set_blocks(self, slots: int | Int32Array, counts: int | Int32Array) -> None:
        self._num_blocks[slots] = counts
        room = np.minimum(np.multiply(counts, self.limits.block_size), self.limits.max_model_len)
        self._room[slots] = room

    def _free(self, slots: Int32Array, counts: Int32Array) -> TableWrites | None:
        """Replaces the first blocks of sequences by block 0 in their tables.

        A kernel may read a little before the window, and ignores those values if they are finite.
        Another sequence may fail and leave other values in a block that was given up.
        """
        if not len(slots):
            return None
        self._fail_empty(slots)
        writes = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            if self._state[slot] != _RUNNING:
                continue
            position, begin = int(self._computed[slot]), int(self._num_freed[slot])
            seen = first_seen(position, self.limits)
            if not begin < count <= seen:
                self._fail(
                    slot,
                    f"slot {slot} gives up its first {count} blocks; it has given up {begin}, and "
                    f"its token {position} sees those from number {seen} on",
                )
                continue
            self._num_freed[slot] = count
            self._tables[slot, begin:count] = 0
            columns = np.arange(begin, count, dtype=np.int32)
            writes.append((np.full_like(columns, slot), columns))
        if not writes:
            return None
        freed, columns = (np.concatenate(part) for part in zip(*writes, strict=True))
        return TableWrites(freed, columns, np.zeros_like(columns))

    def _append(self, slots: Int32Array, blocks: Int32Array) -> TableWrites | None:
        """Appends blocks to sequences, in order."""
        if not len(slots):
            return None
        self._fail_empty(slots)
        for i in np.flatnonzero((blocks < 1) | (blocks >= self.limits.num_blocks)):
            self._fail(int(slots[i]), block_fault(int(blocks[i]), self.limits))
        columns = self._num_blocks[slots] + _occurrences(slots)
        for slot in slots[columns >= self.limits.max_blocks]:
            self._fail(
                int(slot),
                f"slot {slot} got more than {self.limits.max_blocks} blocks, enough for "
                f"max_model_len {self.limits.max_model_len}",
            )
        live = self._state[slots] == _RUNNING
        slots, columns, blocks = slots[live], columns[live], blocks[live]
        self._tables[slots, columns] = blocks
        # If a slot gets several blocks, the last one has the highest column and is written last.
        self._set_blocks(slots, columns + 1)
        return TableWrites(slots, columns, blocks)

    def _decode(self) -> tuple[Int32Array, Int32Array, NDArray[np.bool_]]:
        """Slots and positions of the decode rows.

        Also a mask of `_decodes`: the slots that have a row.
        """
        slots = self._decodes
        position, state = self._computed[slots], self._state[slots]
        live = (state == _RUNNING) & (position >= self._known[slots])
        reached = position
        if isinstance(self._drafts, DeviceDrafts):
            reached = self._drafts.reached(slots, position)
        live &= reached < self._room[slots]
        if self._drafts is not None:
            ended = self._drafts.ended(slots, self._generated[slots])
            live, state = live & ~ended, np.where(ended, _FAILED, state)
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
    ) -> tuple[Chunks | None, PromptRows | None, Int32Array, NDArray[np.bool_]]:
        """The chunks, their prompt rows, and the slots `[sampling chunks]` of those that sample.

        Each chunk that ends at the last known token has a row in the answer. The last result is a
        mask of these chunks: those that are computed.
        """
        if not len(slots):
            return None, None, _NONE, _NO_ROWS
        self._fail_empty(slots)
        begins, known, room = self._computed[slots], self._known[slots], self._room[slots]
        ends = begins + counts
        self._computed[slots] = ends
        for i in np.flatnonzero((ends > known) | (ends > room)):
            limit = f"{known[i]} known tokens" if ends[i] > known[i] else f"room for {room[i]}"
            self._fail(int(slots[i]), f"slot {slots[i]} has {limit}; a chunk ends at {ends[i]}")
        live, samples = self._state[slots] == _RUNNING, ends >= known
        answered = live[samples]
        if not live.any():
            return None, None, _NONE, answered
        slots, samples = slots[live], samples[live]
        begins, ends = begins[live], ends[live]
        prompt_rows = self._prompt_rows(slots, begins, ends)  # before the tokens are dropped
        chunks = self._chunks(slots, begins, ends, samples)
        return chunks, prompt_rows, slots[samples], answered

    def _chunks(
        self, slots: Int32Array, begins: Int32Array, ends: Int32Array, samples: NDArray[np.bool_]
    ) -> Chunks:
        tokens, positions, following = [], [], np.zeros(len(slots), np.int32)
        spans = zip(slots.tolist(), begins.tolist(), ends.tolist(), strict=True)
        for i, (slot, begin, end) in enumerate(spans):
            known = self._tokens[slot]
            tokens.append(known[begin:end])
            positions.append(np.arange(begin, end, dtype=np.int32))
            if end == self._known[slot]:
                self._tokens[slot] = _NONE
            else:
                following[i] = known[end]
        starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(ends - begins, out=starts[1:])
        return Chunks(
            slots=slots,
            starts=starts,
            tokens=np.concatenate(tokens),
            positions=np.concatenate(positions),
            lengths=ends,
            samples=samples,
            following=following,
        )

    def _prompt_rows(
        self, slots: Int32Array, begins: Int32Array, ends: Int32Array
    ) -> PromptRows | None:
        """The chunk rows that need log probabilities of prompt tokens; None if there are none."""
        wanting = self._prompt_top[slots] > _NO_LOGPROBS
        if not wanting.any():
            return None
        rows, starts = PromptRowsBuilder(), np.cumsum(ends - begins) - (ends - begins)
        for i in np.flatnonzero(wanting).tolist():
            slot, begin = int(slots[i]), int(begins[i])
            first = max(begin, int(self._prompt_begin[slot]))
            last = min(int(ends[i]), int(self._prompt_end[slot]))
            if first < last:
                tokens = self._tokens[slot][first : last + 1]
                row = int(starts[i]) + first - begin
                rows.add(slot, first, tokens, row, int(self._prompt_top[slot]))
        return rows.build()

    def _fail_empty(self, slots: Int32Array) -> None:
        for slot in slots[self._state[slots] == _EMPTY]:
            self._fail(int(slot), f"slot {slot} holds no sequence")


def _answer_rows(decoded: NDArray[np.bool_], chunked: NDArray[np.bool_]) -> Int32Array | None:
    """The sampling row of each row of the answer, -1 if it is not computed; None if all are."""
    if decoded.all() and chunked.all():
        return None
    live = np.concatenate((decoded, chunked))
    return np.where(live, np.cumsum(live) - 1, -1).astype(np.int32)


def _joined_writes(first: TableWrites | None, second: TableWrites | None) -> TableWrites | None:
    if first is None or second is None:
        return first or second
    return TableWrites(
        slots=np.concatenate((first.slots, second.slots)),
        columns=np.concatenate((first.columns, second.columns)),
        blocks=np.concatenate((first.blocks, second.blocks)),
    )


def _occurrences(values: Int32Array) -> Int32Array:
    """For each of `values [n]`, the number of equal values before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    counts = np.empty(len(values), np.int32)
    counts[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return counts
