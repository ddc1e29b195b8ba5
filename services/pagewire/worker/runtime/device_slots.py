"""The state of the slots on the device."""

import numpy as np
import torch
from torch import Tensor

from pagewire.limits import MAX_BIASES, MAX_STOP_IDS
from pagewire.worker.model.kv_cache import zeros as lazy_zeros
from pagewire.worker.ops import Ops
from pagewire.worker.ops.contract.sampling import Adjustments, SamplingState
from pagewire.worker.protocol.steps.adjustments import BiasedStarts, PenalizedStarts
from pagewire.worker.protocol.steps.device_plan import DevicePlan, SlotStarts
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.upload import upload

# Columns of block tables and token counts. Triton compiles a kernel anew for a stride that is no
# multiple of 16, and how long the longest sequence is hangs on the memory that is left, when
# kernels have long been compiled.
TABLE_ALIGNMENT = 16


class DeviceSlots:
    """By slot, the padding slot included: block table, last token, sampling parameters."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        slots = limits.num_slots + 1
        self._device = device
        self.block_tables = zeros(limits.max_blocks + -limits.max_blocks % TABLE_ALIGNMENT)
        self.last_tokens = zeros()
        vocabulary = limits.vocab_size + -limits.vocab_size % TABLE_ALIGNMENT
        self._adjustments = Adjustments(
            kinds=zeros(),
            slots=torch.arange(slots, dtype=torch.int32, device=device),
            token_counts=lazy_zeros((slots, vocabulary), torch.int16, device),
            penalties=zeros(3, dtype=torch.float32),
            bias_ids=zeros(MAX_BIASES),
            biases=zeros(MAX_BIASES, dtype=torch.float32),
        )
        # By slot; `index` belongs to a row, not to its slot, and is never read here.
        self.sampling = SamplingState(
            temperature=zeros(dtype=torch.float32),
            top_k=zeros(),
            top_p=zeros(dtype=torch.float32).fill_(1.0),
            min_p=zeros(dtype=torch.float32),
            seed=zeros(dtype=torch.int64),
            index=zeros(),
            min_tokens=zeros(),
            stop_token_ids=zeros(MAX_STOP_IDS).fill_(-1),
            adjustments=self._adjustments,
        )

    def apply(self, plan: DevicePlan) -> None:
        """Takes over what a plan changes."""
        if plan.starts is not None:
            self._start(plan.starts)
        if plan.writes is not None:
            writes = plan.writes
            slots, columns, blocks = upload(
                self._device, writes.slots, writes.columns, writes.blocks
            )
            self.block_tables[slots, columns] = blocks

    def draw(
        self,
        ops: Ops,
        logits: Tensor,
        hidden: Tensor,
        slots: Tensor,
        indices: Tensor,
        filtered: bool,
    ) -> Tensor:
        """Draws tokens and keeps them for the next step; `[rows]` int32, see `end_decode`.

        Args:
            ops: the backend's operations.
            logits: `[rows, vocabulary]`.
            hidden: `[rows, hidden]`, what they were computed from.
            slots: `[rows]` int32.
            indices: `[rows]` int32, each token's index in its request.
            filtered: see `DevicePlan`.
        """
        state = ops.gather_sampling(self.sampling, slots, indices)
        tokens = ops.sample(logits, state, filtered)
        counted = self._adjustments if filtered else None
        return ops.end_decode(tokens, hidden, slots, self.last_tokens, counted)

    def _start(self, starts: SlotStarts) -> None:
        # All as int32 bits, so that they travel together; the seed first, at an aligned address.
        seed, slots, temperature, top_k, top_p, min_p, min_tokens, kinds, stops = upload(
            self._device,
            starts.seed.view(np.int32),
            starts.slots,
            starts.temperature.view(np.int32),
            starts.top_k,
            starts.top_p.view(np.int32),
            starts.min_p.view(np.int32),
            starts.min_tokens,
            starts.adjustment_kinds,
            starts.stop_token_ids.ravel(),
        )
        state = self.sampling
        state.seed[slots] = seed.view(torch.int64)
        state.temperature[slots] = temperature.view(torch.float32)
        state.top_k[slots] = top_k
        state.top_p[slots] = top_p.view(torch.float32)
        state.min_p[slots] = min_p.view(torch.float32)
        state.min_tokens[slots] = min_tokens
        state.stop_token_ids[slots] = stops.view(-1, MAX_STOP_IDS)
        self._adjustments.kinds[slots] = kinds
        if starts.penalized is not None:
            self._penalize(starts.penalized)
        if starts.biased is not None:
            self._bias(starts.biased)

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
