"""The eager backend: runs each step operation by operation, on a CPU or a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.measurement.host_costs import measure_costs
from pagewire.worker.model.decoder import Batch, Decoder, LayerInputs, Prefill, SampledTokens
from pagewire.worker.model.eagle.head import EagleHead
from pagewire.worker.model.kv_cache import empty_cache
from pagewire.worker.ops.contract.step import FAILED
from pagewire.worker.protocol.backend import HostCosts, Outcome, RowFailure, non_finite
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.device_plan import NO_DRAFT, Chunks, DevicePlan, dummy_plan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows
from pagewire.worker.protocol.steps.step import StepHostCopies
from pagewire.worker.runtime import device_errors
from pagewire.worker.runtime.cpu_threads import CpuThreads
from pagewire.worker.runtime.device_logprobs import (
    PendingLogprobs,
    PendingPromptLogprobs,
    compute_logprobs,
    compute_prompt_logprobs,
)
from pagewire.worker.runtime.device_masks import token_masks
from pagewire.worker.runtime.device_slots import DeviceSlots
from pagewire.worker.runtime.draft_checks import sample_with_drafts
from pagewire.worker.runtime.draft_model import Drafter
from pagewire.worker.runtime.eagle_drafter import drafter_of
from pagewire.worker.runtime.host_cache import HostCache
from pagewire.worker.runtime.timer import DeviceTimer, HostTimer
from pagewire.worker.runtime.upload import upload


@dataclass(frozen=True, slots=True)
class EagerHandle:
    """A submitted step. On a GPU its results are pinned memory, valid after `timer.wait`."""

    # Called once: [rows] int32, FAILED for a row without a token.
    read: Callable[[], Int32Array]
    indices: Int32Array  # [rows]
    timer: HostTimer | DeviceTimer
    logprobs: PendingLogprobs | None
    prompt_logprobs: PendingPromptLogprobs | None = None
    taken: NDArray[np.bool_] | None = None  # see `Outcome`


class EagerBackend:
    """See `Backend`. On a CPU `submit` computes the step, on a GPU it queues it."""

    prefix_groups = False
    pooling: pb.Pooling | None = None
    row_costs: RowCosts | None = None
    # 0, as it is never faster: a CPU is bound by computing, eager steps by kernel launches.
    piggyback_tokens = 0

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        dtype: torch.dtype,
        draft_model: Decoder | EagleHead | None = None,
    ) -> None:
        """Allocates slots and KV cache on the device of the weights.

        `draft_model` makes drafts, on a CPU.
        """
        self.limits = limits
        self.device = decoder.weights.embedding.device
        self.synchronous = self.device.type == "cpu"
        self._decoder = decoder
        self._slots = DeviceSlots(limits, self.device)
        self._cache = empty_cache(
            decoder.config, limits.num_blocks, limits.block_size, dtype, self.device
        )
        self.draft: Drafter | None = None
        if draft_model is not None:
            self.draft = drafter_of(draft_model, limits, dtype)
        # All KV that belongs to blocks: each operation on a block applies to both models.
        self._caches = (self._cache,) if self.draft is None else (self._cache, self.draft.cache)
        self._host = (
            HostCache(self._caches, limits.host_blocks, decoder.ops) if limits.host_blocks else None
        )
        self.host_costs: HostCosts | None = None
        self.mask_memory = self._mask_memory()
        self.weight_bytes = decoder.weights.nbytes
        self.kv_cache_bytes = sum(cache.nbytes for cache in self._caches)
        parameters = self.weight_bytes // decoder.weights.embedding.itemsize
        self._threads = CpuThreads(torch.get_num_threads(), parameters)
        if self.draft is not None:
            self.weight_bytes += self.draft.weight_bytes

    def warm_up(self) -> None:
        """Runs one small step with a decode row and one with a chunk; measures costs."""
        self.wait(self.submit(dummy_plan(self.limits, decodes=1, chunks=0, chunk_length=0)))
        self.wait(self.submit(dummy_plan(self.limits, decodes=0, chunks=1, chunk_length=1)))
        self._measure_costs()

    def copy(self, copies: StepHostCopies) -> None:
        """See `Backend`."""
        if self._host is None:
            raise RuntimeError(
                "this worker has no blocks in the host's memory; set --host-memory-gb"
            )
        with torch.inference_mode():
            self._host.copy(copies)

    def submit(self, plan: DevicePlan) -> EagerHandle:
        """See `Backend`."""
        timer = HostTimer() if self.synchronous else DeviceTimer()
        with torch.inference_mode():
            self._apply(plan)
            tokens, logprobs, prompt_logprobs, taken = self._compute(plan)
            tokens = self._to_host(tokens)
        timer.stop()
        return EagerHandle(
            tokens.numpy, plan.sample_indices, timer, logprobs, prompt_logprobs, taken
        )

    def wait(self, handle: EagerHandle) -> Outcome:
        """See `Backend`."""
        seconds = handle.timer.wait()
        tokens = handle.read()
        failures = tuple(
            RowFailure(int(row), non_finite(int(handle.indices[row])), retryable=False)
            for row in np.flatnonzero(tokens == FAILED)
        )
        logprobs = None if handle.logprobs is None else handle.logprobs.read()
        scored = None if handle.prompt_logprobs is None else handle.prompt_logprobs.read()
        duration = int(seconds * 1e6)
        return Outcome(tokens, failures, duration, logprobs, scored, taken=handle.taken)

    def scrub(self, blocks: Int32Array) -> None:
        """See `Backend`."""
        with torch.inference_mode():
            for cache in self._caches:
                cache.scrub(*upload(self.device, blocks))

    def is_fatal(self, error: BaseException) -> bool:
        """See `Backend`."""
        return device_errors.is_fatal(error)

    def _mask_memory(self) -> MaskMemory | None:
        """See `Backend.mask_memory`; the system allocates its pages at the first write."""
        return MaskMemory(self.limits.num_slots, -(-self.limits.vocab_size // 32))

    def _measure_costs(self) -> None:
        if self._host is not None:
            self.host_costs = measure_costs(self, self.limits, self.seconds_of)

    def seconds_of(self, run: Callable[[], None]) -> float:
        """The seconds that the work of `run` takes on the device."""
        timer = HostTimer() if self.synchronous else DeviceTimer()
        run()
        timer.stop()
        return timer.wait()

    def _apply(self, plan: DevicePlan) -> None:
        """Applies starts, block table writes and block copies of a plan."""
        self._change_slots(plan)
        if plan.copies is not None:
            copies = plan.copies
            for cache in self._caches:
                cache.copy(*upload(self.device, copies.sources, copies.targets))

    def _change_slots(self, plan: DevicePlan) -> None:
        """Applies starts and block table writes."""
        self._slots.apply(self._decoder.ops, plan)

    def _to_host(self, results: Tensor) -> Tensor:
        """`results` on the host. With a GPU it does not wait: valid once the step is done."""
        if self.synchronous:
            return results
        pinned = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        return pinned.copy_(results, non_blocking=True)

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, rows: LogprobRows | None
    ) -> PendingLogprobs | None:
        """The log probabilities of some rows of `logits [all rows, vocab]`."""
        if rows is None:
            return None
        packed = compute_logprobs(self._decoder.ops, logits, tokens, rows)
        return PendingLogprobs(rows, self._to_host(packed))

    def _prompt_logprobs(
        self, residual: Tensor, queries: Tensor, plan: DevicePlan
    ) -> PendingPromptLogprobs | None:
        """The log probabilities of `DevicePlan.prompt_rows`; None if it has no such rows.

        `residual [tokens, hidden]` and `queries [tokens, heads, head_dim]` are as `Decoder.body`
        left them.
        """
        rows = plan.prompt_rows
        if rows is None:
            return None
        packed = compute_prompt_logprobs(
            self._decoder,
            residual,
            queries,
            self._cache,
            self._slots.block_tables,
            rows,
            plan.num_decodes,
        )
        return PendingPromptLogprobs(rows, self._to_host(packed))

    def _compute(
        self, plan: DevicePlan
    ) -> tuple[
        Tensor, PendingLogprobs | None, PendingPromptLogprobs | None, NDArray[np.bool_] | None
    ]:
        """Runs the model and samples.

        Returns tokens `[rows]` int32 on the device, log probabilities, and `Outcome.taken`.
        """
        if not plan.num_decodes + plan.num_prefilled:
            return torch.empty(0, dtype=torch.int32, device=self.device), None, None, None
        given = plan
        if self.draft is not None:
            plan = self.draft.propose(plan, self._slots)
        if self.synchronous:
            self._threads.adapt(plan.num_decodes + plan.num_prefilled)
        batch, sample_slots, indices = self._batch(plan)
        if self.draft is not None and self.draft.inputs:
            batch = replace(batch, inputs=LayerInputs(self.draft.inputs))
        hidden, prompt_logprobs = self._hidden(plan, batch)
        if not len(plan.sample_slots):
            self._follow(given, batch, indices, None)
            return indices, None, prompt_logprobs, None  # [0]
        logits = self._decoder.logits(hidden)
        ops, taken = self._decoder.ops, None
        if plan.drafts is None:
            masks = token_masks(plan.masks, len(logits), self.device)
            tokens = self._slots.sample(
                ops, logits, hidden, sample_slots, indices, plan.filtered, masks
            )
        else:
            tokens, taken = sample_with_drafts(self._slots, ops, logits, hidden, plan)
        self._follow(given, batch, tokens, taken)
        return tokens, self._logprobs(logits, tokens, plan.logprobs), prompt_logprobs, taken

    def _follow(
        self, plan: DevicePlan, batch: Batch, tokens: Tensor, taken: NDArray[np.bool_] | None
    ) -> None:
        """Makes a drafter write the KV of the step's tokens; see `Drafter.follow`."""
        if self.draft is not None:
            self.draft.follow(plan, batch, tokens, taken, self._slots.block_tables)

    def _hidden(
        self, plan: DevicePlan, batch: Batch
    ) -> tuple[Tensor, PendingPromptLogprobs | None]:
        """The final residual stream of the sampling rows, `[rows, hidden]`."""
        decoder, cache, tables = self._decoder, self._cache, self._slots.block_tables
        if plan.prompt_rows is None or batch.sampled is None:
            return decoder.hidden(batch, cache, tables), None
        residual = decoder.weights.embedding[batch.token_ids]  # [tokens, hidden]
        queries = decoder.body(residual, batch, cache, tables)
        hidden = decoder.sampled_hidden(residual, queries, batch.sampled, cache, tables)
        return hidden, self._prompt_logprobs(residual, queries, plan)

    def _batch(self, plan: DevicePlan) -> tuple[Batch, Tensor, Tensor]:
        """The batch for the decoder, and the slots and indices `[rows]` of the sampled tokens."""
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
            token_ids=self._decode_tokens(slots, plan),
            positions=positions,
            slots=slots,
            num_decodes=plan.num_decodes,
            decode_lengths=lengths,
            prefill=None,
        )
        return batch, slots, indices

    def _decode_tokens(self, slots: Tensor, plan: DevicePlan) -> Tensor:
        """The inputs `[decodes]` of the decode rows, of `slots [decodes]`."""
        tokens = self._slots.last_tokens[slots]  # sampled by earlier steps
        if plan.drafts is None:
            return tokens
        (drafts,) = upload(self.device, plan.drafts)
        return torch.where(drafts == NO_DRAFT, tokens, drafts)

    def _mixed_batch(self, plan: DevicePlan, chunks: Chunks) -> tuple[Batch, Tensor, Tensor]:
        decodes = plan.num_decodes
        counts = np.diff(chunks.starts)
        (
            positions,
            slots,
            indices,
            sample_rows,
            sample_slots,
            sample_lengths,
            prompt,
            chunk_slots,
            chunk_starts,
            chunk_lengths,
        ) = upload(
            self.device,
            np.concatenate((plan.decode_positions, chunks.positions)),
            np.concatenate((plan.decode_slots, np.repeat(chunks.slots, counts))),
            plan.sample_indices,
            plan.sample_rows(),
            plan.sample_slots,
            plan.sample_lengths(),
            chunks.tokens,
            chunks.slots,
            chunks.starts + np.int32(decodes),
            chunks.lengths,
        )
        batch = Batch(
            token_ids=torch.cat((self._decode_tokens(slots[:decodes], plan), prompt)),
            positions=positions,
            slots=slots,
            num_decodes=decodes,
            decode_lengths=sample_lengths[:decodes],  # decode rows come first
            prefill=Prefill(chunk_slots, chunk_starts, chunk_lengths, int(counts.max())),
            sampled=SampledTokens(sample_rows, sample_slots, sample_lengths),
        )
        return batch, sample_slots, indices
