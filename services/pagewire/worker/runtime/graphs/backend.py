"""The graph backend: a decode step is one copy to the device and one CUDA graph launch.

Steps with prefill chunks need two of each, see `mixed.py`. Steps with constrained rows have graphs
that wait for masks, see `mask_gate.py`.
"""

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.measurement.piggyback import measure_piggyback
from pagewire.worker.measurement.row_costs import measure_passes, measure_row_costs
from pagewire.worker.model.decoder import Batch, Decoder
from pagewire.worker.model.eagle.head import EagleHead
from pagewire.worker.ops.contract.drafts import NUM_RESULTS, OFFSETS, PLACES, TOKENS
from pagewire.worker.ops.contract.step import (
    INDICES,
    NUM_INPUTS,
    POSITIONS,
    SLOTS,
)
from pagewire.worker.protocol.backend import Outcome
from pagewire.worker.protocol.speculation.row_choice import RowCosts
from pagewire.worker.protocol.steps.device_plan import DevicePlan, TableWrites, dummy_plan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.protocol.steps.logprob_rows import LogprobRows
from pagewire.worker.protocol.steps.step import StepHostCopies
from pagewire.worker.runtime.device_logprobs import (
    WIDTHS,
    compute_logprobs,
    prompt_rows_at_once,
)
from pagewire.worker.runtime.eager import EagerBackend, EagerHandle
from pagewire.worker.runtime.graphs.captures import Captures
from pagewire.worker.runtime.graphs.draft_passes import DraftPasses
from pagewire.worker.runtime.graphs.drafts import DraftedHandle, offsets, outcome, places
from pagewire.worker.runtime.graphs.eagle_passes import passes_of
from pagewire.worker.runtime.graphs.mask_gate import NUM_INPUTS as NUM_MASK_INPUTS
from pagewire.worker.runtime.graphs.mask_gate import MaskGate
from pagewire.worker.runtime.graphs.mixed import SAMPLINGS, CapturedStep, Computed, MixedGraphs
from pagewire.worker.runtime.graphs.shared_prefixes import SharedPrefixes
from pagewire.worker.runtime.graphs.slot_changes import SlotChanges
from pagewire.worker.runtime.graphs.staging import ResultBuffers, Staging, pack_writes
from pagewire.worker.runtime.timer import DeviceTimer

log = logging.getLogger(__name__)

# Rows of the largest step with drafts. Larger steps are bound by computing, not by reading weights,
# so no draft pays.
MAX_DRAFTED_ROWS = 512
# With more rows of a prompt, the head has the same kernels as the bodies of mixed steps.
MAX_PROMPT_ROWS = 512
# Values of a row before its values for masks: a multiple of four, so that both have the same
# alignment for kernels.
MASK_INPUTS = -(-NUM_INPUTS // 4) * 4
# Timers that are kept for reuse; more than steps in flight.
KEPT_TIMERS = 64
# Numbers of rows for which steps with shared prefixes are captured.
SHARED_BUCKETS = (8, 16, *range(32, 1024, 32))


@dataclass(frozen=True, slots=True)
class Layers:
    """What the layers of a decode step depend on."""

    rows: int
    shared: bool = False  # whether rows share prefixes


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of decode step that a graph is captured for."""

    layers: Layers
    filtered: bool  # whether any row is filtered, see `DevicePlan`
    masked: bool = False  # whether any row is constrained


class GraphBackend(EagerBackend):
    """See `Backend`. It needs a GPU and the triton operations."""

    prefix_groups = True

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        dtype: torch.dtype,
        draft_model: Decoder | EagleHead | None = None,
    ) -> None:
        super().__init__(decoder, limits, dtype, draft_model)
        if decoder.config.latent is not None:  # each row reads its own positions
            self.prefix_groups = False
        self._buckets = row_buckets(limits)
        # Rows of decode steps, drafts included.
        self._decode_buckets = decode_buckets(limits)
        most_rows = self._decode_buckets[-1]
        size = (MASK_INPUTS + NUM_MASK_INPUTS) * most_rows
        self._staging = Staging(size)
        self._inputs = torch.zeros(size, dtype=torch.int32, device=self.device)
        values = 1 if self._slots.history is None else NUM_RESULTS
        self._results = ResultBuffers(values * most_rows)
        self._captured: dict[Variant, CapturedStep] = {}
        self._timers: deque[DeviceTimer] = deque(maxlen=KEPT_TIMERS)  # of steps that are done
        self._shared_buckets: list[int] = []
        self._shared: SharedPrefixes | None = None
        if self.prefix_groups:
            self._shared_buckets += [rows for rows in SHARED_BUCKETS if rows < most_rows]
            self._shared_buckets.append(most_rows)
            self._shared = SharedPrefixes(decoder, limits, dtype, most_rows)
        # All graphs write their logits here: valid until the next replay, for log probabilities.
        embedding = decoder.weights.embedding
        self._logits = embedding.new_empty(most_rows, decoder.config.vocab_size)
        # The passes of a draft model or a head, which run before decode steps.
        self._passes: DraftPasses | None = None
        if draft_model is not None and self.draft is not None:
            self._passes = passes_of(
                draft_model,
                self.draft.cache,
                self._slots,
                limits,
                self._buckets,
                self._decode_buckets,
            )
        self._changes = SlotChanges(decoder.ops, self._slots, self.device)
        assert self.mask_memory is not None
        self._gate = MaskGate(decoder.ops, self.mask_memory, self.device)
        self._mixed = MixedGraphs(
            decoder,
            self._slots,
            self._cache,
            limits,
            self._buckets,
            self._logits,
            self._gate,
            self._passes,
        )

    def dummy_run(self) -> None:
        """Runs every kind of step once without graphs, which loads every kernel.

        All inputs are 0. Slot 0 has no blocks yet, so KV goes to the scratch block.
        """
        with torch.inference_mode():
            passes = () if self._passes is None else self._passes.runs()
            for run in (self._changes.run, *self._mixed.runs(), *self._runs(), *passes):
                run()
        if self._host is not None:
            scratch = np.zeros(1, np.int32)
            self.copy(StepHostCopies(scratch, scratch, scratch, scratch))
        torch.cuda.synchronize(self.device)

    def warm_up(self) -> None:
        """Captures every graph, largest first, and measures. Kernels must be loaded before."""
        began = time.monotonic()
        with torch.inference_mode(), Captures() as captures:
            self._changes.capture(captures)
            self._mixed.capture(captures)
            if self._passes is not None:
                self._passes.capture(captures)
            for layers, variants in self._variants():
                start = captures.start(partial(self._layers, layers))
                for variant in variants:
                    begin = partial(self._begin_masks, variant) if variant.masked else None
                    graph, tokens = start.continued(partial(self._sample, variant), begin)
                    inputs = self._rows(layers.rows, variant.masked)
                    self._captured[variant] = CapturedStep(graph, inputs, tokens)
        log.info("captured the graphs of all steps in %.1f s", time.monotonic() - began)
        for width in WIDTHS:
            plan = dummy_plan(self.limits, decodes=1, chunks=0, chunk_length=0, num_top=width)
            self.wait(self.submit(plan))
        self._measure_costs()
        if self._slots.history is not None:
            self.row_costs = self._measure_rows()
        self.piggyback_tokens = measure_piggyback(self, self.limits, self.seconds_of)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # memory of these steps outside the graphs' pool

    def submit(self, plan: DevicePlan) -> EagerHandle:
        """See `Backend`."""
        if not plan.num_decodes and plan.chunks is None:
            return super().submit(plan)  # nothing to compute
        timer, prompt_logprobs = self._timer(), None
        with torch.inference_mode():
            if plan.chunks is not None:
                self._apply(plan)
                launched = self._mixed.launch(plan, plan.chunks, timer)
                # Separate launches after the graphs, which leave residual stream and queries.
                prompt_logprobs = self._prompt_logprobs(
                    self._mixed.residual, self._mixed.queries, plan
                )
            else:
                launched = self._launch_decode(plan, timer)
            tokens = self._sampled(plan, launched)
            drawn = tokens if self._slots.history is None else tokens[TOKENS]
            logprobs = self._logprobs(self._logits, drawn, plan.logprobs)
            read = self._results.copy(tokens)
            timer.stop()
            if self._passes is not None and launched is not None:
                self._passes.follow(tokens)  # no result waits for it
        indices = plan.sample_indices
        if self._slots.history is None:
            return EagerHandle(read, indices, timer, logprobs, prompt_logprobs)
        return DraftedHandle(read, indices, timer, logprobs, prompt_logprobs, plan=plan)

    def wait(self, handle: EagerHandle) -> Outcome:
        """See `Backend`."""
        if isinstance(handle, DraftedHandle):
            handle.timer.wait()
            result = outcome(handle)
        else:
            result = super().wait(handle)
        if isinstance(handle.timer, DeviceTimer):
            self._timers.append(handle.timer)
        return result

    def _change_slots(self, plan: DevicePlan) -> None:
        self._changes.launch(plan)
        if plan.starts is not None:
            self._slots.start_others(plan.starts)

    def _timer(self) -> DeviceTimer:
        """A timer that has begun."""
        try:
            timer = self._timers.popleft()
        except IndexError:
            return DeviceTimer()
        timer.restart()
        return timer

    def _sampled(self, plan: DevicePlan, launched: Tensor | None) -> Tensor:
        """The tokens `[rows]` int32 of a step that has `launched` them for its rows or more rows.

        With a history, the results `[5, rows or more]` instead. The next step overwrites both.
        """
        if launched is None:
            nothing = self._inputs[:0]
            return nothing if self._slots.history is None else nothing.view(NUM_RESULTS, 0)
        if self._slots.history is not None:
            return launched
        return launched[: len(plan.sample_slots)]

    def _launch_decode(self, plan: DevicePlan, timer: DeviceTimer) -> Tensor:
        """Queues a decode step; its tokens as in `CapturedStep`."""
        decodes, masked = plan.num_decodes, plan.masks is not None
        groups = () if masked or self._shared is None else plan.groups
        buckets = self._shared_buckets if groups else self._decode_buckets
        rows = buckets[bisect_left(buckets, decodes)]
        captured = self._captured[Variant(Layers(rows, bool(groups)), plan.filtered, masked)]
        if groups and self._shared is not None:
            self._shared.copy(groups, plan.decode_slots, rows)
        writes, fitting = plan.writes, rows
        if self._passes is not None:
            fitting = min(rows, self._passes.bucket(plan))
        if plan.starts is not None or (writes is not None and len(writes.slots) > fitting):
            self._apply(plan)
            writes = None
        if self._passes is not None:
            self._passes.launch(plan, writes)
        packed = self._pack(plan, rows, writes)
        if plan.masks is not None:
            self._gate.pack(packed[MASK_INPUTS:], plan.masks, timer)
        self._staging.copy_to(captured.inputs, packed)
        captured.graph.replay()
        return captured.tokens

    def _variants(self) -> Iterator[tuple[Layers, list[Variant]]]:
        """The keys of `_captured`, largest first, by their layers.

        Steps with constrained rows do not use shared prefixes, which would double their graphs.
        """
        for rows in reversed(self._shared_buckets):
            shared = Layers(rows, shared=True)
            yield shared, [Variant(shared, filtered) for filtered in (True, False)]
        for rows in reversed(self._decode_buckets):
            layers = Layers(rows)
            yield layers, [Variant(layers, *sampling) for sampling in SAMPLINGS]

    def _runs(self) -> Iterator[Callable[[], Tensor]]:
        """Functions that run every decode step and log probability width once."""
        for layers, variants in self._variants():
            yield partial(self._run_decodes, layers, variants)
        longest = min(self.limits.max_num_batched_tokens, self.limits.max_model_len)
        for width in WIDTHS:
            rows = LogprobRows(np.zeros(1, np.int32), width)
            yield partial(compute_logprobs, self._decoder.ops, self._logits, self._inputs, rows)
            yield partial(self._dummy_prompt_logprobs, longest, width)
        # The last piece of a chunk may have any number of rows, for which the head has kernels.
        vocabulary = self._decoder.config.vocab_size
        for count in _buckets(min(longest, prompt_rows_at_once(vocabulary), MAX_PROMPT_ROWS)):
            yield partial(self._dummy_prompt_logprobs, count, 0)

    def _dummy_prompt_logprobs(self, tokens: int, width: int) -> Tensor:
        """Log probabilities of the tokens of one chunk."""
        plan = dummy_plan(self.limits, 0, chunks=1, chunk_length=tokens, num_top=width)
        pending = self._prompt_logprobs(self._mixed.residual, self._mixed.queries, plan)
        assert pending is not None
        return pending.packed

    def _rows(self, rows: int, masked: bool) -> Tensor:
        """The input buffer of a decode step of `rows` rows, `[inputs, rows]`."""
        inputs = MASK_INPUTS + NUM_MASK_INPUTS if masked else NUM_INPUTS
        return self._inputs[: inputs * rows].view(inputs, rows)

    def _run_decodes(self, layers: Layers, variants: list[Variant]) -> Tensor:
        """Runs layers once, and what follows for each variant; the last tokens."""
        computed = self._layers(layers, lambda: None)
        for variant in variants:
            if variant.masked:
                self._begin_masks(variant)
            tokens = self._sample(variant, computed)
        return tokens

    def _layers(self, of: Layers, mark: Callable[[], None]) -> Computed:
        """The layers of a decode step and the head, from the slots' last tokens to logits.

        Calls `mark` where the wait for masks may begin. Not earlier: a program that waits for masks
        takes the place of one of decode attention.
        """
        rows, ops, state = of.rows, self._decoder.ops, self._slots
        inputs = self._rows(rows, masked=False)
        slots, positions = inputs[SLOTS], inputs[POSITIONS]
        embedding, located = self._decoder.weights.embedding, None
        if state.history is None:
            residual, lengths = ops.begin_decode(
                inputs, embedding, state.last_tokens, state.block_tables
            )
        else:
            residual, located = ops.begin_drafted(
                inputs, embedding, state.history, state.block_tables
            )
            slots, positions, lengths = located.slots, located.positions, located.lengths
        batch = Batch(
            token_ids=slots,  # not read: `residual` is embedded already
            positions=positions,
            slots=slots,
            num_decodes=len(slots),
            decode_lengths=lengths,
            prefill=None,
            shared=self._shared.items(rows) if of.shared and self._shared else None,
            inputs=None if self._passes is None else self._passes.layer_inputs(),
        )
        hidden = self._decoder.layers(residual, batch, self._cache, state.block_tables, mark)
        if self._passes is not None:
            self._passes.after_decode(batch, inputs[PLACES])
        logits = self._decoder.logits(hidden, out=self._logits[:rows])
        return Computed(hidden, logits, located)

    def _begin_masks(self, variant: Variant) -> None:
        self._gate.begin(self._rows(variant.layers.rows, masked=True)[MASK_INPUTS:])

    def _sample(self, variant: Variant, computed: Computed) -> Tensor:
        """Samples: the next tokens `[rows]` int32, or with a history the results `[5, rows]`."""
        ops, state, filtered = self._decoder.ops, self._slots, variant.filtered
        inputs = self._rows(variant.layers.rows, variant.masked)
        hidden, logits, located = computed.hidden, computed.logits, computed.located
        gate = self._gate.masks(inputs[MASK_INPUTS:]) if variant.masked else nullcontext()
        with gate as masks:
            if located is not None:
                places = inputs[PLACES]
                return state.sample_drafted(ops, logits, hidden, located, places, filtered, masks)
            slots, indices = inputs[SLOTS], inputs[INDICES]
            return state.sample(ops, logits, hidden, slots, indices, filtered, masks)

    def _measure_rows(self) -> RowCosts:
        """The time of rows of decode steps, measured with padding rows."""
        token_bytes = self._cache.nbytes / (self.limits.num_blocks * self.limits.block_size)
        steps = {
            rows: self._captured[Variant(Layers(rows), filtered=False)].graph.replay
            for rows in self._decode_buckets
        }
        with torch.inference_mode():
            self._inputs.zero_()
            costs = measure_row_costs(steps, self._cache.keys[0], token_bytes, self.seconds_of)
            if self._passes is None:
                return costs
            return replace(
                costs, passes=measure_passes(self._passes.passes(), costs, self.seconds_of)
            )

    def _pack(self, plan: DevicePlan, rows: int, writes: TableWrites | None) -> Int32Array:
        """The inputs of a plan, padded with rows of the padding slot.

        `[NUM_INPUTS, rows]`, or more rows with space for the inputs of masks.
        """
        inputs = NUM_INPUTS if plan.masks is None else MASK_INPUTS + NUM_MASK_INPUTS
        packed = np.zeros((inputs, rows), np.int32)
        decodes = plan.num_decodes
        packed[SLOTS, :decodes] = plan.decode_slots
        packed[SLOTS, decodes:] = self.limits.padding_slot
        if self._slots.history is None:
            packed[POSITIONS, :decodes] = plan.decode_positions
            packed[INDICES, :decodes] = plan.sample_indices
        else:
            packed[PLACES, :decodes] = places(plan)
            packed[OFFSETS, :decodes] = offsets(plan)
        pack_writes(packed, writes, self.limits.padding_slot)
        return packed


def row_buckets(limits: Limits) -> list[int]:
    """The numbers of rows of captured graphs with one row for each sequence."""
    return _buckets(min(limits.num_slots, limits.max_num_batched_tokens))


def decode_buckets(limits: Limits) -> list[int]:
    """The numbers of rows of captured decode graphs, rows of drafts included."""
    buckets = row_buckets(limits)
    if not limits.drafts_on_device:
        return buckets
    drafted = limits.num_slots * (1 + limits.max_drafts)
    most = min(drafted, max(MAX_DRAFTED_ROWS, buckets[-1]), limits.max_num_batched_tokens)
    return sorted({*buckets, *_buckets(most)})


def _buckets(max_rows: int) -> list[int]:
    """Numbers of rows up to a maximum, finer for small steps."""
    steps: Iterable[int] = (1, 2, 4, *range(8, 256, 8), *range(256, max_rows + 16, 16))
    return [rows for rows in steps if rows < max_rows] + [max_rows]
