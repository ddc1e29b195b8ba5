"""The graph backend: a pure decode step is one copy to the device and one graph launch.

Steps with prefill chunks or new sequences run eagerly on the same state and the same stream.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.decoder import Batch, Decoder
from pagewire.worker.eager import EagerBackend, EagerHandle
from pagewire.worker.limits import Limits
from pagewire.worker.ops.reference.step import (
    INDICES,
    NUM_INPUTS,
    POSITIONS,
    SLOTS,
    WRITE_BLOCKS,
    WRITE_COLUMNS,
    WRITE_SLOTS,
)
from pagewire.worker.plan import StepPlan, rehearsal
from pagewire.worker.timer import DeviceTimer

# Copies to the device that may be under way; run-ahead is far below it.
STAGING_BUFFERS = 16


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A decode step of `rows` rows, to be replayed: it reads `inputs` and writes `tokens`."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [6, rows] int32
    tokens: Tensor  # [rows] int32


class Staging:
    """Pinned host buffers for inputs on their way to the device, used in turn."""

    def __init__(self, size: int) -> None:
        self._buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(STAGING_BUFFERS)
        ]
        self._copied = [torch.cuda.Event() for _ in range(STAGING_BUFFERS)]
        self._next = 0

    def copy_to(self, target: Tensor, fill: Int32Array) -> None:
        """Copies `fill` to `target` (same number of elements) on the current stream."""
        turn = self._next
        self._next = (turn + 1) % STAGING_BUFFERS
        self._copied[turn].synchronize()
        buffer = self._buffers[turn][: fill.size]
        buffer.numpy()[:] = fill.ravel()
        target.view(-1).copy_(buffer, non_blocking=True)
        self._copied[turn].record()


class GraphBackend(EagerBackend):
    """See `Backend`; needs a GPU and the triton ops."""

    def __init__(self, decoder: Decoder, limits: Limits, dtype: torch.dtype) -> None:
        super().__init__(decoder, limits, dtype)
        self._buckets = batch_buckets(min(limits.num_slots, limits.max_num_batched_tokens))
        self._staging = Staging(NUM_INPUTS * self._buckets[-1])
        self._inputs = torch.zeros(
            NUM_INPUTS * self._buckets[-1], dtype=torch.int32, device=self.device
        )
        # By number of rows, and by whether a row filters its distribution.
        self._captured: dict[tuple[int, bool], CapturedStep] = {}

    def warm_up(self) -> None:
        """Compiles every kernel variant, then captures a graph for every bucket, largest first."""
        for plan in rehearsals(self.limits):
            self.wait(super().submit(plan))
        with torch.inference_mode():
            pool = None
            for rows in reversed(self._buckets):
                for filtered in (True, False):
                    captured = self._capture(rows, filtered, pool)
                    pool = captured.graph.pool()
                    self._captured[rows, filtered] = captured
        torch.cuda.synchronize(self.device)

    def submit(self, plan: StepPlan) -> EagerHandle:
        """See `Backend`."""
        decodes = plan.num_decodes
        if plan.chunks is not None or plan.starts is not None or not decodes:
            return super().submit(plan)
        rows = self._buckets[bisect_left(self._buckets, decodes)]
        if plan.writes is not None and len(plan.writes.slots) > rows:
            return super().submit(plan)
        captured = self._captured[rows, plan.filtered]
        timer = DeviceTimer()
        with torch.inference_mode():
            self._staging.copy_to(captured.inputs, self._pack(plan, rows))
            captured.graph.replay()
            tokens = torch.empty(decodes, dtype=torch.int32, pin_memory=True)
            tokens.copy_(captured.tokens[:decodes], non_blocking=True)
        timer.stop()
        return EagerHandle(tokens, plan.sample_indices, timer)

    def _capture(self, rows: int, filtered: bool, pool: tuple[int, int] | None) -> CapturedStep:
        inputs = self._inputs[: NUM_INPUTS * rows].view(NUM_INPUTS, rows)
        inputs.copy_(self._idle_inputs(rows).view(NUM_INPUTS, rows))
        self._decode(inputs, filtered)  # compiles what this bucket needs and nothing has yet
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            tokens = self._decode(inputs, filtered)
        return CapturedStep(graph, inputs, tokens)

    def _decode(self, inputs: Tensor, filtered: bool) -> Tensor:
        """A whole decode step, from the slots' last tokens to their next; `[rows]` int32."""
        ops, state = self._decoder.ops, self._slots
        slots = inputs[SLOTS]
        residual, lengths = ops.begin_decode(
            inputs, self._decoder.weights.embedding, state.last_tokens, state.block_tables
        )
        batch = Batch(
            token_ids=slots,  # embedded already
            positions=inputs[POSITIONS],
            slots=slots,
            num_decodes=len(slots),
            decode_lengths=lengths,
            prefill=None,
            rows=None,
        )
        hidden = self._decoder.layers(residual, batch, self._cache, state.block_tables)
        logits = self._decoder.logits(hidden)
        sampling = ops.gather_sampling(state.sampling, slots, inputs[INDICES])
        tokens = ops.sample(logits, sampling, filtered)
        return ops.end_decode(tokens, hidden, slots, state.last_tokens)

    def _pack(self, plan: StepPlan, rows: int) -> Int32Array:
        """The packed inputs `[6, rows]` of a plan; rows beyond its own are the padding slot's."""
        packed = np.zeros((NUM_INPUTS, rows), np.int32)
        decodes = plan.num_decodes
        packed[SLOTS, :decodes] = plan.decode_slots
        packed[SLOTS, decodes:] = self.limits.padding_slot
        packed[POSITIONS, :decodes] = plan.decode_positions
        packed[INDICES, :decodes] = plan.sample_indices
        packed[WRITE_SLOTS] = self.limits.padding_slot
        if plan.writes is not None:
            writes = len(plan.writes.slots)
            packed[WRITE_SLOTS, :writes] = plan.writes.slots
            packed[WRITE_COLUMNS, :writes] = plan.writes.columns
            packed[WRITE_BLOCKS, :writes] = plan.writes.blocks
        return packed

    def _idle_inputs(self, rows: int) -> Tensor:
        packed = torch.zeros(NUM_INPUTS, rows, dtype=torch.int32)
        packed[[SLOTS, WRITE_SLOTS]] = self.limits.padding_slot
        return packed.view(-1)


def rehearsals(limits: Limits) -> Iterator[StepPlan]:
    """Steps that between them need every variant of the kernels that eager steps use.

    Kernels differ by numbers of rows up to 8, and by powers of two of rows, chunks and lengths.
    """
    most_rows = min(limits.num_slots, limits.max_num_batched_tokens)
    counts = [*range(1, 9), *(2**n for n in range(4, 14))]
    sizes = {(decodes, 1, 1) for decodes in (0, *counts)}
    sizes |= {(1, chunks, length) for chunks in (1, 17, 65, 257) for length in counts}
    for decodes, chunks, length in sorted(sizes):
        fits = decodes + chunks * length <= limits.max_num_batched_tokens
        if fits and decodes + chunks <= most_rows and length <= limits.max_model_len:
            plan = rehearsal(limits, decodes, chunks, length)
            yield plan
            yield replace(plan, filtered=False)


def batch_buckets(most: int) -> list[int]:
    """Numbers of rows that graphs are captured for: fine where steps are short, then coarser."""
    steps: Iterable[int] = (1, 2, 4, *range(8, 256, 8), *range(256, most + 16, 16))
    return [rows for rows in steps if rows < most] + [most]
