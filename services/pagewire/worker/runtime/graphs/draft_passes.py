"""A draft model beside captured steps: passes of it run before a step and guess its drafts.

A pass computes one token of each sequence with the draft model and guesses the next one. Pass 0
computes the last token, pass j the guess of pass j - 1. There is one graph for each number of
sequences. A replay of it changes its inputs to those of the next pass. If a sequence of a step has
k drafts and none has more, k + 1 passes run before the step. The last one writes KV only.

Invariant: after each step every block has the draft model's KV of the tokens of which it has the
target's. A step computes the last token and the guesses, and the passes have written the KV of
these. If another drafter has made the guesses, passes compute those and guess nothing. Steps with
prompts write the KV of all their tokens for both models, see `write`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.model.decoder import Batch, Decoder
from pagewire.worker.model.kv_cache import KVCache
from pagewire.worker.ops.contract.drafts import (
    MODEL,
    OFFSETS,
    PLACES,
    SLOTS,
    LocatedRows,
    TokenHistory,
)
from pagewire.worker.ops.contract.step import (
    NUM_INPUTS,
)
from pagewire.worker.protocol.steps.device_plan import DevicePlan, TableWrites
from pagewire.worker.protocol.steps.draft_rows import first_rows
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_slots import DeviceSlots
from pagewire.worker.runtime.graphs.drafts import offsets
from pagewire.worker.runtime.graphs.staging import Staging, pack_writes

# The row after the inputs of `begin_drafted`: how many drafts each sequence has.
DEPTHS = NUM_INPUTS

Result = TypeVar("Result")
Capture = Callable[[Callable[[], Tensor]], tuple[torch.cuda.CUDAGraph, Tensor]]


class DraftPasses:
    """The graphs of a draft model's passes, and its KV cache."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        slots: DeviceSlots,
        limits: Limits,
        row_buckets: list[int],
    ) -> None:
        """`cache` has as many blocks as the target's. `row_buckets` are numbers of sequences."""
        assert slots.history is not None
        self._decoder = decoder
        self._cache = cache
        self._slots = slots
        self._history: TokenHistory = slots.history
        self._padding_slot = limits.padding_slot
        self._row_buckets = row_buckets
        size = (DEPTHS + 1) * row_buckets[-1]
        self._staging = Staging(size)
        embedding = decoder.weights.embedding
        self._inputs = torch.zeros(size, dtype=torch.int32, device=embedding.device)
        self._logits = embedding.new_empty(row_buckets[-1], decoder.config.vocab_size)
        # Keys: number of rows, and whether any is filtered, or None for a pass that only writes KV.
        self._captured: dict[tuple[int, bool | None], torch.cuda.CUDAGraph] = {}

    def runs(self) -> Iterator[Callable[[], Tensor]]:
        """Functions that run every pass once, largest first."""
        for variant in self._variants():
            yield partial(self._empty, partial(self._pass, *variant))

    def capture(self, capture: Capture) -> None:
        """Captures every pass, largest first."""
        for rows, filtered in self._variants():
            run = partial(self._pass, rows, filtered)
            self._captured[rows, filtered], _ = self._empty(partial(capture, run))

    def passes(self) -> dict[int, Callable[[], None]]:
        """What runs a pass, by its number of rows; to be timed while no slot has a sequence."""
        return {
            rows: partial(self._empty, self._captured[rows, False].replay)
            for rows in self._row_buckets
        }

    def bucket(self, plan: DevicePlan) -> int:
        """The number of rows of the passes before a decode step."""
        return self._row_buckets[bisect_left(self._row_buckets, len(first_rows(plan)))]

    def launch(self, plan: DevicePlan, writes: TableWrites | None) -> None:
        """Queues the passes before a decode step. `writes` are at most as many as their rows."""
        rows = self.bucket(plan)
        packed = self._pack(plan, rows, writes)
        self._staging.copy_to(self._rows(rows), packed)
        for _ in range(int(packed[DEPTHS].max())):
            self._captured[rows, plan.filtered].replay()
        self._captured[rows, None].replay()

    def write(self, batch: Batch) -> None:
        """Writes the draft model's KV of all tokens of a batch."""
        residual = self._decoder.weights.embedding[batch.token_ids]
        self._decoder.body(residual, batch, self._cache, self._slots.block_tables)

    def _empty(self, run: Callable[[], Result]) -> Result:
        """Runs a pass whose rows are all of slot 0, which has no sequence yet."""
        self._inputs.zero_()  # passes of other numbers of rows have another layout
        return run()

    def _variants(self) -> Iterator[tuple[int, bool | None]]:
        for rows in reversed(self._row_buckets):
            yield from ((rows, filtered) for filtered in (True, False, None))

    def _rows(self, rows: int) -> Tensor:
        """The input buffer of a pass of `rows` rows, `[DEPTHS + 1, rows]`."""
        return self._inputs[: (DEPTHS + 1) * rows].view(DEPTHS + 1, rows)

    def _pack(self, plan: DevicePlan, rows: int, writes: TableWrites | None) -> Int32Array:
        """The inputs `[DEPTHS + 1, rows]` of the first pass before a step."""
        packed = np.zeros((DEPTHS + 1, rows), np.int32)
        firsts = first_rows(plan)
        count = len(firsts)
        packed[SLOTS, :count] = plan.decode_slots[firsts]
        packed[SLOTS, count:] = self._padding_slot
        packed[OFFSETS, :count] = offsets(plan)[firsts]
        packed[DEPTHS, :count] = np.diff(firsts, append=plan.num_decodes) - 1
        pack_writes(packed, writes, self._padding_slot)
        return packed

    def _pass(self, rows: int, filtered: bool | None) -> Tensor:
        """Runs a pass and returns its inputs, which it has changed to those of the next pass."""
        decoder, slots, inputs = self._decoder, self._slots, self._rows(rows)
        residual, located = decoder.ops.begin_drafted(
            inputs[:NUM_INPUTS], decoder.weights.embedding, self._history, slots.block_tables
        )
        batch = Batch(
            token_ids=located.slots,  # not read: `residual` is embedded already
            positions=located.positions,
            slots=located.slots,
            num_decodes=rows,
            decode_lengths=located.lengths,
            prefill=None,
        )
        if filtered is None:
            decoder.body(residual, batch, self._cache, slots.block_tables)
            return inputs
        hidden = decoder.layers(residual, batch, self._cache, slots.block_tables)
        logits = decoder.logits(hidden, out=self._logits[:rows])
        state = decoder.ops.gather_sampling(slots.sampling, located.slots, located.indices)
        drawn = decoder.ops.sample(logits, state, filtered)
        # Logits that are not finite may give a token that is not in the vocabulary.
        drawn = torch.where(hidden.isfinite().all(-1), drawn, 0)
        # The values of `located` are undefined while kernels are collected, so they are no indices.
        rows_kept = self._history.locate(inputs[SLOTS], inputs[PLACES], inputs[OFFSETS])
        keep_guesses(self._history, rows_kept, inputs[PLACES], drawn)
        inputs[PLACES].add_(1)
        ended = inputs[PLACES] > inputs[DEPTHS]
        inputs[SLOTS].masked_fill_(ended, self._padding_slot)
        return inputs


def keep_guesses(history: TokenHistory, rows: LocatedRows, places: Tensor, drawn: Tensor) -> None:
    """Keeps the guesses of sequences for which no other drafter has guessed.

    Args:
        history: written in place.
        rows: the rows, one of each sequence. Padding rows keep nothing.
        places: `[rows]` int32, the place of each row; the last token has place 0.
        drawn: `[rows]` int32, the guesses of the tokens after the rows.
    """
    slots, most = rows.slots, history.guesses.shape[1]
    own = (history.guessed[slots] == places) & (rows.lengths > 0)
    own &= (places == 0) | (history.drafters[slots] == MODEL)
    # All rows of the padding slot write the values that it has.
    at = (slots, places.clamp(max=most - 1))
    history.guesses[at] = torch.where(own, drawn, history.guesses[at])
    history.guessed[slots] += own
    history.drafters[slots] = history.drafters[slots].masked_fill(own, MODEL)
