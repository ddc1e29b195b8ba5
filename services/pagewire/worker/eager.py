"""The eager backend: each step is a plain sequence of ops, on a CPU or a GPU."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.backend import Outcome, RowFailure, non_finite
from pagewire.worker.cpu_threads import CpuThreads
from pagewire.worker.decoder import Batch, Decoder, Prefill
from pagewire.worker.device_slots import DeviceSlots
from pagewire.worker.kv_cache import empty_cache
from pagewire.worker.limits import Limits
from pagewire.worker.ops.reference.step import FAILED
from pagewire.worker.plan import Chunks, StepPlan, rehearsal
from pagewire.worker.timer import DeviceTimer, HostTimer
from pagewire.worker.upload import upload


@dataclass(frozen=True, slots=True)
class EagerHandle:
    """A submitted step. On a GPU `tokens` is pinned memory, valid once `timer` has waited."""

    tokens: Tensor  # [rows] int32 on the host, FAILED for a row without a token
    indices: Int32Array  # [rows]
    timer: HostTimer | DeviceTimer


class EagerBackend:
    """See `Backend`. On a CPU `submit` computes the step, on a GPU it queues it."""

    def __init__(self, decoder: Decoder, limits: Limits, dtype: torch.dtype) -> None:
        """Takes memory for the slots and for the KV cache on the device of the weights."""
        self.limits = limits
        self.device = decoder.weights.embedding.device
        self.synchronous = self.device.type == "cpu"
        self._decoder = decoder
        self._slots = DeviceSlots(limits, self.device)
        self._cache = empty_cache(
            decoder.config, limits.num_blocks, limits.block_size, dtype, self.device
        )
        self.weight_bytes = decoder.weights.nbytes
        self.kv_cache_bytes = self._cache.nbytes
        parameters = self.weight_bytes // decoder.weights.embedding.itemsize
        self._threads = CpuThreads(torch.get_num_threads(), parameters)

    def warm_up(self) -> None:
        """One small step of both kinds of row."""
        self.wait(self.submit(rehearsal(self.limits, decodes=1, chunks=0, chunk_length=0)))
        self.wait(self.submit(rehearsal(self.limits, decodes=0, chunks=1, chunk_length=1)))

    def submit(self, plan: StepPlan) -> EagerHandle:
        """See `Backend`."""
        if self.synchronous:
            self._threads.adapt(plan.num_decodes + plan.num_prefilled)
        timer = HostTimer() if self.synchronous else DeviceTimer()
        with torch.inference_mode():
            self._slots.apply(plan)
            tokens = self._compute(plan)
            if not self.synchronous:
                pinned = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
                tokens = pinned.copy_(tokens, non_blocking=True)
        timer.stop()
        return EagerHandle(tokens, plan.sample_indices, timer)

    def wait(self, handle: EagerHandle) -> Outcome:
        """See `Backend`."""
        seconds = handle.timer.wait()
        tokens = handle.tokens.numpy()
        failures = tuple(
            RowFailure(int(row), non_finite(int(handle.indices[row])), retryable=False)
            for row in np.flatnonzero(tokens == FAILED)
        )
        return Outcome(tokens, failures, int(seconds * 1e6))

    def scrub(self, blocks: Int32Array) -> None:
        """See `Backend`."""
        with torch.inference_mode():
            self._cache.scrub(*upload(self.device, blocks))

    def _compute(self, plan: StepPlan) -> Tensor:
        """Forward pass and sampling; `[rows]` int32 tokens on the device."""
        if not plan.num_decodes + plan.num_prefilled:
            return torch.empty(0, dtype=torch.int32, device=self.device)
        batch, sample_slots, indices = self._batch(plan)
        hidden = self._decoder.hidden(batch, self._cache, self._slots.block_tables)
        if not len(plan.sample_slots):
            return indices  # [0]
        logits, ops = self._decoder.logits(hidden), self._decoder.ops
        state = ops.gather_sampling(self._slots.sampling, sample_slots, indices)
        tokens = ops.sample(logits, state, plan.filtered)
        return ops.end_decode(tokens, hidden, sample_slots, self._slots.last_tokens)

    def _batch(self, plan: StepPlan) -> tuple[Batch, Tensor, Tensor]:
        """The decoder's batch, and the slots and token indices `[rows]` of the sampling rows."""
        if plan.chunks is not None:
            return self._mixed_batch(plan, plan.chunks)
        positions, slots, lengths, indices = upload(
            self.device,
            plan.decode_positions,
            plan.decode_slots,
            plan.decode_positions + 1,
            plan.sample_indices,
        )
        batch = Batch(
            token_ids=self._slots.last_tokens[slots],  # what the steps before sampled
            positions=positions,
            slots=slots,
            num_decodes=plan.num_decodes,
            decode_lengths=lengths,
            prefill=None,
            rows=None,
        )
        return batch, slots, indices

    def _mixed_batch(self, plan: StepPlan, chunks: Chunks) -> tuple[Batch, Tensor, Tensor]:
        decodes = plan.num_decodes
        counts = np.diff(chunks.starts)
        last_tokens = chunks.starts[1:][chunks.samples] - 1 + decodes
        (
            positions,
            slots,
            lengths,
            indices,
            rows,
            sample_slots,
            prompt,
            chunk_slots,
            chunk_starts,
            chunk_lengths,
        ) = upload(
            self.device,
            np.concatenate((plan.decode_positions, chunks.positions)),
            np.concatenate((plan.decode_slots, np.repeat(chunks.slots, counts))),
            plan.decode_positions + 1,
            plan.sample_indices,
            np.concatenate((np.arange(decodes, dtype=np.int32), last_tokens)),
            plan.sample_slots,
            chunks.tokens,
            chunks.slots,
            chunks.starts + np.int32(decodes),
            chunks.lengths,
        )
        batch = Batch(
            token_ids=torch.cat((self._slots.last_tokens[slots[:decodes]], prompt)),
            positions=positions,
            slots=slots,
            num_decodes=decodes,
            decode_lengths=lengths,
            prefill=Prefill(chunk_slots, chunk_starts, chunk_lengths, int(counts.max())),
            rows=rows,
        )
        return batch, sample_slots, indices
