"""Passes of an EAGLE-3 head before captured steps, and its work after them."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.model.decoder import Batch, Decoder
from pagewire.worker.model.eagle.head import EagleHead
from pagewire.worker.model.kv_cache import KVCache
from pagewire.worker.ops.contract.drafts import COUNTS, NUM_RESULTS, TOKENS, LocatedRows
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_slots import DeviceSlots
from pagewire.worker.runtime.graphs.captures import Captures, Graph
from pagewire.worker.runtime.graphs.draft_passes import (
    DraftPasses,
    ModelPasses,
    PassKind,
)


class EaglePasses(DraftPasses):
    """Passes of a head, whose KV of a position is that of the target's state and the next token.

    The head's output at the end of each sequence is kept by slot. Pass 0 drafts from this output
    and runs no layer. Pass j computes the draft of pass j - 1 at the position before it, with the
    kept output, and keeps its own output. So k drafts take k passes, and a step without drafts
    takes none.

    After each step, a graph writes the KV of all its tokens that belong to outputs, from the
    target's states and the drawn tokens. It replaces the KV of the passes, which came from the
    head's own states. Bodies of steps with prompts write the KV of tokens whose next token the host
    has.
    """

    kinds = (
        PassKind(True),
        PassKind(False),
        PassKind(True, first=True),
        PassKind(False, first=True),
    )

    def __init__(
        self,
        head: EagleHead,
        cache: KVCache,
        slots: DeviceSlots,
        limits: Limits,
        row_buckets: list[int],
        step_buckets: list[int],
    ) -> None:
        """See `DraftPasses`. `step_buckets` are numbers of rows of steps that sample."""
        super().__init__(head.decoder, cache, slots, limits, row_buckets)
        self._head = head
        self.layers = head.inputs
        self._logits.fill_(-torch.inf)
        embedding, hidden = head.decoder.weights.embedding, head.config.hidden_size
        # [slots + 1, hidden], with the padding slot; before a step, outputs of its drafts.
        self._outputs = embedding.new_zeros(limits.num_slots + 1, hidden)
        # The fused states of the tokens of a body, until its head has run.
        self._of_body = embedding.new_zeros(limits.max_num_batched_tokens, hidden)
        # Of the step's rows, padding included. Each is a tensor of its own, so that places are
        # valid for any number of rows while kernels are collected.
        self._step_buckets = step_buckets
        most, device = step_buckets[-1], embedding.device
        self._states = embedding.new_zeros(most, hidden)
        self._row_slots, self._positions, self._places, self._numbers = (
            torch.zeros(most, dtype=torch.int32, device=device) for _ in range(4)
        )
        self._numbers += torch.arange(most, dtype=torch.int32, device=device)
        self._results = torch.zeros(NUM_RESULTS, most, dtype=torch.int32, device=device)
        self._following: dict[int, Graph] = {}

    def runs(self) -> Iterator[Callable[[], Tensor]]:
        """See `DraftPasses`."""
        yield from super().runs()
        yield from (partial(self._follow, rows) for rows in reversed(self._step_buckets))

    def capture(self, captures: Captures) -> None:
        """See `DraftPasses`."""
        super().capture(captures)
        for rows in reversed(self._step_buckets):
            self._following[rows], _ = captures.whole(partial(self._follow, rows))

    def after_decode(self, batch: Batch, places: Tensor) -> None:
        """See `DraftPasses`."""
        assert batch.inputs is not None
        assert batch.inputs.states is not None
        states = self._head.fused(batch.inputs.states)
        self._take(states, batch.slots, batch.positions, places)

    def after_body(self, batch: Batch, following: Tensor) -> None:
        """See `DraftPasses`."""
        assert batch.inputs is not None
        assert batch.inputs.states is not None
        states = self._of_body[: len(following)]
        states.copy_(self._head.fused(batch.inputs.states))
        self._write(self._head.pairs(following, states), batch.slots, batch.positions)

    def after_head(self, located: LocatedRows, rows: Tensor) -> None:
        """See `DraftPasses`."""
        self._take(self._of_body[rows], located.slots, located.positions, None)

    def follow(self, results: Tensor) -> None:
        """See `DraftPasses`."""
        rows = results.shape[1]
        self._results[:, :rows].copy_(results)
        self._following[rows].replay()

    def _kind(self, place: int, last: int, filtered: bool) -> PassKind:
        return PassKind(filtered, first=place == 0)

    def _last_places(self, drafts: Int32Array) -> Int32Array:
        return drafts - 1

    def _hidden(
        self, kind: PassKind, embedded: Tensor, rows: LocatedRows, indexed: LocatedRows
    ) -> Tensor | None:
        # Kernels read positions and lengths before the preceding kernel has ended, so these are
        # computed first.
        positions, lengths = (rows.positions - 1).clamp(min=0), (rows.lengths - 1).clamp(min=0)
        states = self._outputs[indexed.slots]
        if kind.first:
            return states
        queries = self._write(torch.cat((embedded, states), -1), rows.slots, positions)
        hidden = self._finish(states, queries, rows.slots, lengths)
        self._outputs[indexed.slots] = hidden.nan_to_num()
        return hidden

    def _compute_logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        return self._head.logits(hidden, out)

    def _take(
        self, states: Tensor, slots: Tensor, positions: Tensor, places: Tensor | None
    ) -> None:
        """Keeps the values of a step's rows for `_follow`; `places` None: all are 0."""
        rows = len(states)
        self._states[:rows] = states
        self._row_slots[:rows] = slots
        self._positions[:rows] = positions
        self._places[:rows] = 0 if places is None else places

    def _follow(self, rows: int) -> Tensor:
        """Writes the KV of the rows that belong to outputs; returns the kept outputs by slot."""
        places, results = self._places[:rows], self._results[:, :rows]
        counts = results[COUNTS][self._numbers[:rows] - places]
        taken = places < counts
        # Clamped, because these values are undefined while kernels are collected.
        slots = torch.where(taken, self._row_slots[:rows], self._padding_slot)
        slots = slots.clamp(0, self._padding_slot)
        positions = self._positions[:rows] * taken
        lengths = (positions + 1) * (slots < self._padding_slot)
        # A row without a token ends its sequence.
        tokens = results[TOKENS].clamp(0, self._head.vocab_size - 1)
        states = self._states[:rows]
        queries = self._write(self._head.pairs(tokens, states), slots, positions)
        hidden = self._finish(states, queries, slots, lengths)
        kept = torch.where(places == counts - 1, slots, self._padding_slot)
        self._outputs[kept] = hidden.nan_to_num()
        return self._outputs

    def _write(self, pairs: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Writes the KV of some positions; returns queries `[rows, heads, head_dim]`."""
        batch = Batch(slots, positions, slots, 0, positions[:0], prefill=None)
        return self._decoder.body(pairs, batch, self._cache, self._slots.block_tables)

    def _finish(self, states: Tensor, queries: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """The outputs of some positions; `states [rows, hidden]` is changed in place."""
        return self._decoder.finish_last_layer(
            states, queries, slots, lengths, self._cache, self._slots.block_tables
        )


def passes_of(
    model: Decoder | EagleHead,
    cache: KVCache,
    slots: DeviceSlots,
    limits: Limits,
    row_buckets: list[int],
    step_buckets: list[int],
) -> DraftPasses:
    """The passes of a draft model or a head; see `DraftPasses` and `EaglePasses`."""
    if isinstance(model, EagleHead):
        return EaglePasses(model, cache, slots, limits, row_buckets, step_buckets)
    return ModelPasses(model, cache, slots, limits, row_buckets)
