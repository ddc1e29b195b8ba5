"""The state of the slots on the device."""

import numpy as np
import torch
from torch import Tensor

from pagewire.limits import MAX_STOP_IDS
from pagewire.worker.limits import Limits
from pagewire.worker.ops.reference.sampling import SamplingState
from pagewire.worker.plan import SlotStarts, StepPlan
from pagewire.worker.upload import upload

# Columns. Triton compiles a kernel anew for a stride that is no multiple of 16, and how long the
# longest sequence is hangs on the memory that is left, when kernels have long been compiled.
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
        )

    def apply(self, plan: StepPlan) -> None:
        """Takes over what a plan changes."""
        if plan.starts is not None:
            self._start(plan.starts)
        if plan.writes is not None:
            writes = plan.writes
            slots, columns, blocks = upload(
                self._device, writes.slots, writes.columns, writes.blocks
            )
            self.block_tables[slots, columns] = blocks

    def _start(self, starts: SlotStarts) -> None:
        # All as int32 bits, so that they travel together; the seed first, at an aligned address.
        seed, slots, temperature, top_k, top_p, min_p, min_tokens, stops = upload(
            self._device,
            starts.seed.view(np.int32),
            starts.slots,
            starts.temperature.view(np.int32),
            starts.top_k,
            starts.top_p.view(np.int32),
            starts.min_p.view(np.int32),
            starts.min_tokens,
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
