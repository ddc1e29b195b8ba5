"""A drafter with captured steps: its passes run before a step and make the step's drafts.

A pass computes one token of each sequence and drafts the next one. There is one graph for each
number of sequences and kind of pass. A replay changes the graph's inputs to those of the next pass.

Invariant: after each step, every block has the drafter's KV of the same positions as the target's
KV. A draft model and an EAGLE head keep the invariant in their own ways, see `ModelPasses` and
`EaglePasses`.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.model.decoder import Batch, Decoder, LayerInputs
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
from pagewire.worker.runtime.graphs.captures import Captures, Graph
from pagewire.worker.runtime.graphs.drafts import offsets
from pagewire.worker.runtime.graphs.staging import Staging, pack_writes

# The row after the inputs of `begin_drafted`: the place of each sequence in its last pass.
LASTS = NUM_INPUTS

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PassKind:
    """A kind of pass that graphs are captured for."""

    filtered: bool | None  # whether any row is filtered; None: it writes KV and drafts nothing
    first: bool = False  # whether the state that it drafts from is known already


class DraftPasses(ABC):
    """The graphs of a drafter's passes, and its KV cache.

    A backend calls `runs`, then `capture`. Its captured steps call `layer_inputs`, then
    `after_decode`, or `after_body` and `after_head`. It calls `launch` before each decode step, and
    `follow` after each step that samples.
    """

    kinds: tuple[PassKind, ...]
    layers: tuple[int, ...] = ()  # of the target, whose inputs are read

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
        size = (LASTS + 1) * row_buckets[-1]
        self._staging = Staging(size)
        embedding = decoder.weights.embedding
        self._inputs = torch.zeros(size, dtype=torch.int32, device=embedding.device)
        self._logits = embedding.new_empty(row_buckets[-1], limits.vocab_size)
        self._captured: dict[tuple[int, PassKind], Graph] = {}

    def runs(self) -> Iterator[Callable[[], Tensor]]:
        """Functions that run every graph once, largest first."""
        for variant in self._variants():
            yield partial(self._empty, partial(self._pass, *variant))

    def capture(self, captures: Captures) -> None:
        """Captures every graph, largest first."""
        for rows, kind in self._variants():
            run = partial(self._pass, rows, kind)
            self._captured[rows, kind], _ = self._empty(partial(captures.whole, run))

    def passes(self) -> dict[int, Callable[[], None]]:
        """Functions that run a pass, by number of rows; to time while no slot has a sequence."""
        return {
            rows: partial(self._empty, self._captured[rows, PassKind(False)].replay)
            for rows in self._row_buckets
        }

    def bucket(self, plan: DevicePlan) -> int:
        """The number of rows of the passes before a decode step."""
        return self._row_buckets[bisect_left(self._row_buckets, len(first_rows(plan)))]

    def launch(self, plan: DevicePlan, writes: TableWrites | None) -> None:
        """Queues the passes before a decode step; `writes` has at most one entry for each row."""
        rows = self.bucket(plan)
        packed = self._pack(plan, rows, writes)
        last = int(packed[LASTS].max())
        if last < 0:
            return
        self._staging.copy_to(self._rows(rows), packed)
        for place in range(last + 1):
            self._captured[rows, self._kind(place, last, plan.filtered)].replay()

    def layer_inputs(self) -> LayerInputs | None:
        """The inputs of layers that a step must keep; None if there are none."""
        return LayerInputs(self.layers) if self.layers else None

    @abstractmethod
    def after_decode(self, batch: Batch, places: Tensor) -> None:
        """Runs after the layers of a captured decode step; `places` as in `begin_drafted`."""

    @abstractmethod
    def after_body(self, batch: Batch, following: Tensor) -> None:
        """Writes the KV of all tokens of a captured body.

        `following [tokens]` int32 is the token after each, if the host has it.
        """

    @abstractmethod
    def after_head(self, located: LocatedRows, rows: Tensor) -> None:
        """Runs after the layers of a captured head; `rows` are its tokens in the body."""

    @abstractmethod
    def follow(self, results: Tensor) -> None:
        """Queues work after a step; `results [5, rows]` as in `end_drafted`, padding included."""

    @abstractmethod
    def _kind(self, place: int, last: int, filtered: bool) -> PassKind:
        """The kind of the pass at `place`; passes before the step have the places 0 to `last`."""

    @abstractmethod
    def _last_places(self, drafts: Int32Array) -> Int32Array:
        """The places `[n]` of the last passes of sequences with `drafts [n]` drafts; -1: none."""

    @abstractmethod
    def _hidden(
        self, kind: PassKind, embedded: Tensor, rows: LocatedRows, indexed: LocatedRows
    ) -> Tensor | None:
        """Computes one token of each sequence.

        Args:
            kind: the kind of the pass.
            embedded: `[rows, hidden]`, the embedded tokens.
            rows: the rows. Their values are undefined while kernels are collected.
            indexed: the same for torch's operations, whose indices must be valid then, too.

        Returns:
            The input of `_compute_logits`, `[rows, hidden]`; None for a pass that drafts nothing.
        """

    @abstractmethod
    def _compute_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The logits `[rows, vocab]` of `hidden [rows, hidden]`, in `out`."""

    def _empty(self, run: Callable[[], Result]) -> Result:
        """Runs a pass whose rows are all of slot 0, which has no sequence yet."""
        self._inputs.zero_()  # passes of other numbers of rows have another layout
        return run()

    def _variants(self) -> Iterator[tuple[int, PassKind]]:
        for rows in reversed(self._row_buckets):
            yield from ((rows, kind) for kind in self.kinds)

    def _rows(self, rows: int) -> Tensor:
        """The input buffer of a pass of `rows` rows, `[LASTS + 1, rows]`."""
        return self._inputs[: (LASTS + 1) * rows].view(LASTS + 1, rows)

    def _pack(self, plan: DevicePlan, rows: int, writes: TableWrites | None) -> Int32Array:
        """The inputs `[LASTS + 1, rows]` of the first pass before a step."""
        packed = np.zeros((LASTS + 1, rows), np.int32)
        firsts = first_rows(plan)
        count = len(firsts)
        lasts = self._last_places(np.diff(firsts, append=plan.num_decodes).astype(np.int32) - 1)
        packed[SLOTS] = self._padding_slot
        packed[SLOTS, :count] = np.where(lasts < 0, self._padding_slot, plan.decode_slots[firsts])
        packed[OFFSETS, :count] = offsets(plan)[firsts]
        packed[LASTS] = -1
        packed[LASTS, :count] = lasts
        pack_writes(packed, writes, self._padding_slot)
        return packed

    def _pass(self, rows: int, kind: PassKind) -> Tensor:
        """Runs a pass and returns its inputs, which it has changed to those of the next pass."""
        ops, slots, inputs = self._decoder.ops, self._slots, self._rows(rows)
        embedded, located = ops.begin_drafted(
            inputs[:NUM_INPUTS],
            self._decoder.weights.embedding,
            self._history,
            slots.block_tables,
        )
        # The values of `located` are undefined while kernels are collected, so not valid indices.
        indexed = self._history.locate(inputs[SLOTS], inputs[PLACES], inputs[OFFSETS])
        hidden = self._hidden(kind, embedded, located, indexed)
        if hidden is None or kind.filtered is None:
            return inputs
        logits = self._compute_logits(hidden, self._logits[:rows])
        state = ops.gather_sampling(slots.sampling, located.slots, located.indices)
        drawn = ops.sample(logits, state, kind.filtered)
        # Logits that are not finite may lead to a token outside the vocabulary.
        drawn = torch.where(hidden.isfinite().all(-1), drawn, 0)
        keep_drafts(self._history, indexed, inputs[PLACES], drawn)
        inputs[PLACES].add_(1)
        ended = inputs[PLACES] > inputs[LASTS]
        inputs[SLOTS].masked_fill_(ended, self._padding_slot)
        return inputs


class ModelPasses(DraftPasses):
    """Passes of a draft model, whose KV of a position is that of the token at this position.

    Pass 0 computes the last token, pass j the draft of pass j - 1. If k is the most drafts of a
    sequence in a step, k + 1 passes run before the step. The last one writes KV only. So the passes
    write the KV of the last token and of the drafts, which the step computes. If another drafter
    has made the drafts, passes compute them and draft nothing. Steps with prompts write the KV of
    all their tokens.
    """

    kinds = (PassKind(True), PassKind(False), PassKind(None))

    def after_body(self, batch: Batch, following: Tensor) -> None:
        """See `DraftPasses`."""
        residual = self._decoder.weights.embedding[batch.token_ids]
        self._decoder.body(residual, batch, self._cache, self._slots.block_tables)

    def after_decode(self, batch: Batch, places: Tensor) -> None:
        """Does nothing: the passes have written the KV."""

    def after_head(self, located: LocatedRows, rows: Tensor) -> None:
        """Does nothing: the body has written the KV."""

    def follow(self, results: Tensor) -> None:
        """Does nothing: no KV depends on the tokens drawn."""

    def _kind(self, place: int, last: int, filtered: bool) -> PassKind:
        return PassKind(filtered if place < last else None)

    def _last_places(self, drafts: Int32Array) -> Int32Array:
        return drafts

    def _hidden(
        self, kind: PassKind, embedded: Tensor, rows: LocatedRows, indexed: LocatedRows
    ) -> Tensor | None:
        batch = Batch(
            token_ids=rows.slots,  # not read: the tokens are embedded already
            positions=rows.positions,
            slots=rows.slots,
            num_decodes=len(rows.slots),
            decode_lengths=rows.lengths,
            prefill=None,
        )
        tables = self._slots.block_tables
        if kind.filtered is None:
            self._decoder.body(embedded, batch, self._cache, tables)
            return None
        return self._decoder.layers(embedded, batch, self._cache, tables)

    def _compute_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        return self._decoder.logits(hidden, out=out)


def keep_drafts(history: TokenHistory, rows: LocatedRows, places: Tensor, drawn: Tensor) -> None:
    """Keeps the drafts of sequences for which no other drafter has drafted.

    Args:
        history: written in place.
        rows: the rows, one of each sequence. Padding rows keep nothing.
        places: `[rows]` int32, the place of each row; the last token has place 0.
        drawn: `[rows]` int32, the drafts of the tokens after the rows.
    """
    slots, most = rows.slots, history.drafts.shape[1]
    own = (history.num_drafts[slots] == places) & (rows.lengths > 0)
    own &= (places == 0) | (history.drafters[slots] == MODEL)
    # All rows of the padding slot write back its present values.
    at = (slots, places.clamp(max=most - 1))
    history.drafts[at] = torch.where(own, drawn, history.drafts[at])
    history.num_drafts[slots] += own
    history.drafters[slots] = history.drafters[slots].masked_fill(own, MODEL)
