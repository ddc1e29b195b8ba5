"""Sampling for steps with constrained rows, in graphs of its own behind those of the layers."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.ops import Ops
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory
from pagewire.worker.protocol.steps.device_plan import DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_slots import DeviceSlots
from pagewire.worker.runtime.graphs.drafts import offsets, places
from pagewire.worker.runtime.graphs.mask_gate import MaskGate
from pagewire.worker.runtime.graphs.staging import Staging
from pagewire.worker.runtime.timer import DeviceTimer

# Rows of the inputs.
SLOTS, INDICES, MASK_ROWS, PLACES = range(4)
NUM_INPUTS = 4

Capture = Callable[[Callable[[], Tensor]], tuple[torch.cuda.CUDAGraph, Tensor]]


class MaskedSampling:
    """Masks and samples the logits that the graphs of the layers leave in a buffer."""

    def __init__(
        self,
        ops: Ops,
        slots: DeviceSlots,
        limits: Limits,
        row_buckets: list[int],
        logits: Tensor,
        hidden: Tensor,
        inputs: Tensor,
        behind: int,
    ) -> None:
        """`logits [rows, vocab]` and `hidden [rows, hidden]`, the input of the head, are read.

        Inputs are in `inputs`, `behind` values a row for the layers of a decode step: one copy has
        both.
        """
        self._ops = ops
        self._slots = slots
        self._padding_slot = limits.padding_slot
        self._row_buckets = row_buckets
        self._logits = logits
        self._hidden = hidden
        words = -(-limits.vocab_size // 32)
        self.memory = MaskMemory(limits.num_slots, words)
        self._gate = MaskGate(self.memory, logits.device)
        self._staging = Staging(NUM_INPUTS * row_buckets[-1])
        self._inputs, self._behind = inputs, behind
        # Keys: number of rows, whether any is filtered, see `DevicePlan`.
        self._captured: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def runs(self) -> Iterator[Callable[[], Tensor]]:
        """Functions that run every variant once, largest first."""
        yield from (partial(self._sample, *variant) for variant in self._variants())

    def capture(self, capture: Capture) -> None:
        """Captures every variant, largest first."""
        for rows, filtered in self._variants():
            self._captured[rows, filtered] = capture(partial(self._sample, rows, filtered))

    def pack(self, plan: DevicePlan, rows: int) -> Int32Array:
        """The inputs `[NUM_INPUTS, rows]` of a plan, padded."""
        masks, count = plan.masks, len(plan.sample_slots)
        assert masks is not None
        packed = np.zeros((NUM_INPUTS, rows), np.int32)
        packed[SLOTS, :count] = plan.sample_slots
        packed[SLOTS, count:] = self._padding_slot
        if self._slots.history is None:
            packed[INDICES, :count] = plan.sample_indices
        else:
            packed[INDICES, :count], packed[PLACES, :count] = offsets(plan), places(plan)
        packed[MASK_ROWS] = -1
        packed[MASK_ROWS, masks.rows] = masks.slots
        return packed

    def launch(
        self, plan: DevicePlan, rows: int, timer: DeviceTimer, copied: bool
    ) -> tuple[Tensor, Tensor]:
        """Queues the sampling of a step whose layers ran with `rows` rows, padding included.

        Returns the tokens `[rows]` int32, or with a history the results `[5, rows]`; and the logits
        `[rows, vocabulary]` without masks if the plan needs log probabilities. The next step
        overwrites them. `copied`: `pack` is where the inputs are. `timer` does not count the time
        in which the device waits for masks: the scheduler has more steps in flight where they are
        short.
        """
        assert plan.masks is not None
        if not copied:
            self._staging.copy_to(self._rows(rows), self.pack(plan, rows))
        logits = self._logits[:rows]
        unmasked = logits if plan.logprobs is None else logits.clone()
        timer.pause()
        self._gate.hold(plan.masks)
        timer.resume()
        graph, tokens = self._captured[rows, plan.filtered]
        graph.replay()
        self._gate.release()
        return tokens, unmasked

    def _variants(self) -> Iterator[tuple[int, bool]]:
        for rows in reversed(self._row_buckets):
            yield from ((rows, filtered) for filtered in (True, False))

    def _rows(self, rows: int) -> Tensor:
        """The input buffer for `rows` rows, `[NUM_INPUTS, rows]`."""
        begin, size = self._behind * rows, NUM_INPUTS * rows
        return self._inputs[begin : begin + size].view(NUM_INPUTS, rows)

    def _sample(self, rows: int, filtered: bool) -> Tensor:
        inputs, logits, hidden = self._rows(rows), self._logits[:rows], self._hidden[:rows]
        self._ops.mask_logits(logits, inputs[MASK_ROWS], self._gate.masks)
        slots, indices = inputs[SLOTS], inputs[INDICES]
        if self._slots.history is None:
            return self._slots.sample(self._ops, logits, hidden, slots, indices, filtered)
        located = self._slots.history.locate(slots, inputs[PLACES], indices)
        return self._slots.sample_drafted(
            self._ops, logits, hidden, located, inputs[PLACES], filtered
        )
