"""The state of the slots on the device: block tables, last tokens, sampling parameters."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pagewire.limits import MAX_BIASES, MAX_STOP_IDS
from pagewire.packing import Int32Array
from pagewire.sampling import SLOT_NUMBERS
from pagewire.worker.model.kv_cache import lazy_zeros
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract import step as contract
from pagewire.worker.ops.contract.drafts import LocatedRows
from pagewire.worker.ops.contract.sampling import Adjustments, SamplingState, TokenMasks
from pagewire.worker.protocol.steps.adjustments import BiasedStarts, PenalizedStarts
from pagewire.worker.protocol.steps.device_plan import DevicePlan, SlotStarts, TableWrites
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_drafts import start_histories, token_history
from pagewire.worker.runtime.upload import upload

# Columns of block tables and token counts are a multiple of this: Triton compiles another kernel
# variant for other strides. The number of columns depends on the free memory, which is known only
# after the kernels are compiled.
TABLE_ALIGNMENT = 16

# The types of parameters that are integers, and of the others.
_DTYPES = {True: torch.int32, False: torch.float32}
# Their columns in the values of a start.
_COLUMNS = {
    "temperature": contract.START_TEMPERATURE,
    "top_k": contract.START_TOP_K,
    "top_p": contract.START_TOP_P,
    "min_p": contract.START_MIN_P,
}


class DeviceSlots:
    """Tensors with one row for each slot, the padding slot included."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        slots = limits.num_slots + 1
        self._device = device
        self._limits = limits
        # [slots, columns] int32, at least `max_blocks` columns
        self.block_tables = zeros(limits.max_blocks + -limits.max_blocks % TABLE_ALIGNMENT)
        self.last_tokens = zeros()  # [slots] int32
        # [slots, longest + 1] int32, see forced_texts.py; None unless a benchmark forces texts.
        self.forced_tokens: Tensor | None = None
        if limits.forced is not None:
            self.forced_tokens = zeros(limits.forced.longest + 1).fill_(-1)
        vocabulary = limits.vocab_size + -limits.vocab_size % TABLE_ALIGNMENT
        self._adjustments = Adjustments(
            kinds=zeros(),
            slots=torch.arange(slots, dtype=torch.int32, device=device),
            token_counts=lazy_zeros((slots, vocabulary), torch.int16, device),
            penalties=zeros(3, dtype=torch.float32),
            bias_ids=zeros(MAX_BIASES),
            biases=zeros(MAX_BIASES, dtype=torch.float32),
        )
        # None: the host has every position.
        self.history = token_history(limits, device) if limits.drafts_on_device else None
        # `index` and `masks` belong to rows, not to slots: they are given for each step.
        self.sampling = SamplingState(
            **{
                number.name: zeros(dtype=_DTYPES[number.integer]).fill_(number.default)
                for number in SLOT_NUMBERS
            },
            seed=zeros(dtype=torch.int64),
            index=zeros(),
            min_tokens=zeros(),
            stop_token_ids=zeros(MAX_STOP_IDS).fill_(-1),
            adjustments=self._adjustments,
            masks=None,
        )

    def apply(self, ops: Ops, plan: DevicePlan) -> None:
        """Applies the starts and the block table writes of a plan."""
        if plan.starts is not None:
            (starts,) = upload(self._device, pack_starts(plan.starts).ravel())
            ops.start_slots(starts.view(-1, contract.START_VALUES), self.sampling)
            self.start_others(plan.starts)
        if plan.writes is not None:
            (writes,) = upload(self._device, pack_writes(plan.writes).ravel())
            ops.write_tables(writes.view(-1, contract.TABLE_VALUES), self.block_tables)

    def sample(
        self,
        ops: Ops,
        logits: Tensor,
        hidden: Tensor,
        slots: Tensor,
        indices: Tensor,
        filtered: bool,
        masks: TokenMasks | None = None,
    ) -> Tensor:
        """Samples tokens and keeps them as the last tokens of their slots.

        Args:
            ops: the operations.
            logits: `[rows, vocabulary]`.
            hidden: `[rows, hidden]`, the input of the head.
            slots: `[rows]` int32.
            indices: `[rows]` int32, the index of each token in its request's output.
            filtered: see `DevicePlan`.
            masks: of the rows.

        Returns:
            `[rows]` int32, the tokens; see `end_decode`.
        """
        state = replace(ops.gather_sampling(self.sampling, slots, indices), masks=masks)
        tokens = self.forced(ops.sample(logits, state, filtered), slots, indices)
        counted = self._adjustments if filtered else None
        return ops.end_decode(tokens, hidden, slots, self.last_tokens, counted)

    def forced(self, tokens: Tensor, slots: Tensor, indices: Tensor) -> Tensor:
        """The tokens `[rows]` that replace the drawn ones; see forced_texts.py.

        `slots [rows]` and `indices [rows]` as in `sample`.
        """
        if self.forced_tokens is None:
            return tokens
        known, length = self.forced_tokens.shape
        # The last place belongs to no output, so it forces nothing. While kernels are collected
        # they do not run, so slots and indices may be any numbers.
        slots, indices = slots.clamp(0, known - 1), indices.clamp(0, length - 1)
        given = self.forced_tokens[slots, indices]
        return torch.where(given >= 0, given, tokens)

    def sample_drafted(
        self,
        ops: Ops,
        logits: Tensor,
        hidden: Tensor,
        rows: LocatedRows,
        places: Tensor,
        filtered: bool,
        masks: TokenMasks | None = None,
    ) -> Tensor:
        """Samples tokens and keeps those that belong to the outputs; for slots with a history.

        Args:
            ops: the operations.
            logits: `[rows, vocabulary]`.
            hidden: `[rows, hidden]`, the input of the head.
            rows: the rows.
            places: `[rows]` int32, the place of each among the rows of its sequence.
            filtered: see `DevicePlan`.
            masks: of the rows.

        Returns:
            `[5, rows]` int32, see `end_drafted`.
        """
        assert self.history is not None
        state = ops.gather_sampling(self.sampling, rows.slots, rows.indices)
        state = replace(state, masks=masks)
        drawn = ops.sample(logits, state, filtered)
        tokens = self.forced(drawn, rows.slots, rows.indices)
        counted = self._adjustments if filtered else None
        return ops.end_drafted(
            tokens, hidden, rows.slots, places, self.history, self.last_tokens, counted
        )

    def start_others(self, starts: SlotStarts) -> None:
        """Applies what `StepOps.start_slots` does not store, which few sequences have."""
        if starts.forced is not None and self.forced_tokens is not None:
            slots, rows = upload(self._device, starts.slots, starts.forced.ravel())
            rows = rows.view(starts.forced.shape)
            self.forced_tokens[slots] = -1
            self.forced_tokens[slots, : rows.shape[1]] = rows
        if starts.penalized is not None:
            self._penalize(starts.penalized)
        if starts.biased is not None:
            self._bias(starts.biased)
        if self.history is not None:
            start_histories(self.history, starts.sequences, self._limits.max_model_len)

    def _penalize(self, starts: PenalizedStarts) -> None:
        slots, penalties, seen_slots, seen_ids, seen_counts = upload(
            self._device,
            starts.slots,
            starts.penalties.view(np.int32).ravel(),
            starts.seen_slots,
            starts.seen_ids,
            starts.seen_counts,
        )
        counts = self._adjustments.token_counts.index_fill_(0, slots.long(), 0)
        counts[seen_slots, seen_ids] = seen_counts.to(counts.dtype)
        self._adjustments.penalties[slots] = penalties.view(torch.float32).view(-1, 3)

    def _bias(self, starts: BiasedStarts) -> None:
        slots, ids, biases = upload(
            self._device, starts.slots, starts.ids.ravel(), starts.biases.view(np.int32).ravel()
        )
        self._adjustments.bias_ids[slots] = ids.view(-1, MAX_BIASES)
        self._adjustments.biases[slots] = biases.view(torch.float32).view(-1, MAX_BIASES)


def pack_starts(starts: SlotStarts | None) -> Int32Array:
    """The values `[starts, START_VALUES]` of `StepOps.start_slots`."""
    count = 0 if starts is None else len(starts.slots)
    packed = np.empty((count, contract.START_VALUES), np.int32)
    if starts is not None:
        packed[:, contract.START_SLOT] = starts.slots
        seeds = starts.seed.view(np.int32).reshape(-1, 2)
        packed[:, contract.START_SEED : contract.START_SEED + 2] = seeds
        packed[:, contract.START_MIN_TOKENS] = starts.min_tokens
        packed[:, contract.START_KINDS] = starts.adjustment_kinds
        for number in SLOT_NUMBERS:
            packed[:, _COLUMNS[number.name]] = starts.numbers[number.name].view(np.int32)
        packed[:, contract.START_STOPS :] = starts.stop_token_ids
    return packed


def pack_writes(writes: TableWrites | None) -> Int32Array:
    """The values `[writes, 3]` of `StepOps.write_tables`."""
    count = 0 if writes is None else len(writes.slots)
    packed = np.empty((count, contract.TABLE_VALUES), np.int32)
    if writes is not None:
        packed[:, contract.TABLE_SLOT] = writes.slots
        packed[:, contract.TABLE_COLUMN] = writes.columns
        packed[:, contract.TABLE_BLOCK] = writes.blocks
    return packed
