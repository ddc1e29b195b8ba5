"""CUDA graphs of mixed steps: prefill chunks beside decode rows.

Launched one by one, the 300 kernels of a mixed step cost the host 7 to 15 ms. Most such steps take
less on the device. Here a step is two graph launches. A *body* embeds the tokens and runs the
layers up to the queries and KV of the last one. A *head* runs the rest for the sampling rows and
samples. Bodies are captured for numbers of tokens, heads for numbers of rows. The residual stream
and the queries pass from body to head in buffers.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.kv_cache import KVCache
from pagewire.worker.ops.contract.drafts import LocatedRows
from pagewire.worker.protocol.steps.device_plan import Chunks, DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.device_slots import DeviceSlots
from pagewire.worker.runtime.graphs.captures import Captures, Graph
from pagewire.worker.runtime.graphs.draft_passes import DraftPasses
from pagewire.worker.runtime.graphs.drafts import offsets
from pagewire.worker.runtime.graphs.mask_gate import NUM_INPUTS as NUM_MASK_INPUTS
from pagewire.worker.runtime.graphs.mask_gate import MaskGate
from pagewire.worker.runtime.graphs.mixed_layout import (
    BodySize,
    body_batch,
    body_length,
    body_sizes,
    located_body,
    pack_body,
    split_body,
)
from pagewire.worker.runtime.graphs.staging import Staging
from pagewire.worker.runtime.timer import DeviceTimer

# Rows of the inputs of a head. The rows for masks follow them.
ROWS, SLOTS, INDICES, LENGTHS = range(4)
NUM_INPUTS = 4

# The kinds of sampling: whether any row is filtered, and whether any is constrained.
SAMPLINGS = ((True, False), (False, False), (True, True), (False, True))


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured graph that ends with sampling."""

    graph: Graph
    inputs: Tensor  # [inputs, rows] int32
    tokens: Tensor  # [rows] int32, or [5, rows] with a history


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step has computed before it samples."""

    hidden: Tensor  # [rows, hidden], the input of the head
    logits: Tensor  # [rows, vocabulary]
    located: LocatedRows | None  # the rows, with a history


class MixedGraphs:
    """The graphs of mixed steps of one backend, whose slots and cache they use."""

    def __init__(
        self,
        decoder: Decoder,
        slots: DeviceSlots,
        cache: KVCache,
        limits: Limits,
        row_buckets: list[int],
        logits: Tensor,
        gate: MaskGate,
        passes: DraftPasses | None = None,
    ) -> None:
        """Heads write their logits to the first rows of `logits [rows, vocab]`.

        Bodies also write the KV of a drafter that has `passes`.
        """
        weights, config = decoder.weights, decoder.config
        self._decoder = decoder
        self._slots = slots
        self._cache = cache
        self._limits = limits
        self._sizes = body_sizes(limits)
        self._row_buckets = row_buckets
        self._logits = logits
        self._gate = gate
        self._passes = passes
        longest = max(body_length(size) for size in self._sizes)
        rows = row_buckets[-1]
        device = weights.embedding.device
        head_size = (NUM_INPUTS + NUM_MASK_INPUTS) * rows
        self._staging = Staging(max(longest, head_size))
        self._body_inputs = torch.zeros(longest, dtype=torch.int32, device=device)
        self._head_inputs = torch.zeros(head_size, dtype=torch.int32, device=device)
        tokens = limits.max_num_batched_tokens
        # The residual stream [tokens, hidden] and the queries [tokens, heads, query_dim] between
        # body and head; they stay until the next launch.
        self.residual = weights.embedding.new_zeros(tokens, config.hidden_size)
        self.queries = weights.embedding.new_zeros(tokens, config.num_heads, config.query_dim)
        self._bodies: dict[BodySize, Graph] = {}
        # Keys: number of rows, whether any is filtered, whether any is constrained.
        self._heads: dict[tuple[int, bool, bool], CapturedStep] = {}

    def runs(self) -> Iterator[Callable[[], Tensor]]:
        """Functions that run every body and head once, largest first."""
        yield from (partial(self._body, size) for size in reversed(self._sizes))
        yield from (partial(self._run_heads, rows) for rows in reversed(self._row_buckets))

    def capture(self, captures: Captures) -> None:
        """Captures every body and head, largest first."""
        for size in reversed(self._sizes):
            self._bodies[size], _ = captures.whole(partial(self._body, size))
        for rows in reversed(self._row_buckets):
            start = captures.start(partial(self._head, rows))
            for filtered, masked in SAMPLINGS:
                begin = partial(self._begin_masks, rows) if masked else None
                sample = partial(self._sample, rows, filtered, masked)
                graph, tokens = start.continued(sample, begin)
                step = CapturedStep(graph, self._rows(rows, masked), tokens)
                self._heads[rows, filtered, masked] = step

    def launch(self, plan: DevicePlan, chunks: Chunks, timer: DeviceTimer) -> Tensor | None:
        """Queues a step; its tokens as in `CapturedStep`, or None if it has no sampling rows."""
        size = next(size for size in self._sizes if size.holds(plan))
        packed = pack_body(plan, chunks, size, self._limits.padding_slot)
        self._staging.copy_to(self._body_inputs[: len(packed)], packed)
        self._bodies[size].replay()
        rows = len(plan.sample_slots)
        if not rows:
            return None
        bucket = self._row_buckets[bisect_left(self._row_buckets, rows)]
        head = self._heads[bucket, plan.filtered, plan.masks is not None]
        packed = self._pack_head(plan, bucket)
        if plan.masks is not None:
            self._gate.pack(packed[NUM_INPUTS:], plan.masks, timer)
        self._staging.copy_to(head.inputs, packed)
        head.graph.replay()
        return head.tokens

    def _rows(self, rows: int, masked: bool) -> Tensor:
        """The input buffer of the head of `rows` rows, `[inputs, rows]`."""
        inputs = NUM_INPUTS + masked * NUM_MASK_INPUTS
        return self._head_inputs[: inputs * rows].view(inputs, rows)

    def _body(self, size: BodySize) -> Tensor:
        """Embedding and layers up to the last queries: `[tokens, heads, head_dim]`."""
        state = self._slots
        inputs = split_body(self._body_inputs, size)
        if state.history is not None:
            inputs = located_body(inputs, state.history)
        batch = body_batch(inputs, size, state.last_tokens)
        residual = self.residual[: size.tokens]
        torch.index_select(self._decoder.weights.embedding, 0, batch.token_ids, out=residual)
        if self._passes is not None:
            batch = replace(batch, inputs=self._passes.layer_inputs())
        queries = self.queries[: size.tokens]
        self._decoder.body(residual, batch, self._cache, state.block_tables, out=queries)
        if self._passes is not None:
            self._passes.after_body(batch, inputs.following)
        return queries

    def _run_heads(self, rows: int) -> Tensor:
        """Runs the head of some rows once, and each kind of sampling; the last tokens."""
        computed = self._head(rows, lambda: None)
        for filtered, masked in SAMPLINGS:
            if masked:
                self._begin_masks(rows)
            tokens = self._sample(rows, filtered, masked, computed)
        return tokens

    def _begin_masks(self, rows: int) -> None:
        self._gate.begin(self._rows(rows, masked=True)[NUM_INPUTS:])

    def _head(self, rows: int, mark: Callable[[], None]) -> Computed:
        """Last layer and logits of some rows. Calls `mark` where the wait for masks may begin."""
        mark()
        inputs = self._rows(rows, masked=False)
        slots, lengths, located = inputs[SLOTS], inputs[LENGTHS], None
        if self._slots.history is not None:
            places = torch.zeros_like(slots)
            located = self._slots.history.locate(slots, places, inputs[INDICES])
            slots, lengths = located.slots, located.lengths
        hidden = self._decoder.finish_last_layer(
            self.residual[inputs[ROWS]],
            self.queries[inputs[ROWS]],
            slots,
            lengths,
            self._cache,
            self._slots.block_tables,
        )
        if self._passes is not None and located is not None:
            self._passes.after_head(located, inputs[ROWS])
        logits = self._decoder.logits(hidden, out=self._logits[: len(hidden)])
        return Computed(hidden, logits, located)

    def _sample(self, rows: int, filtered: bool, masked: bool, computed: Computed) -> Tensor:
        """Samples: tokens `[rows]` int32, or with a history the results `[5, rows]`."""
        inputs, ops, state = self._rows(rows, masked), self._decoder.ops, self._slots
        hidden, logits, located = computed.hidden, computed.logits, computed.located
        with self._gate.masks(inputs[NUM_INPUTS:]) if masked else nullcontext() as masks:
            if located is not None:
                places = torch.zeros_like(inputs[SLOTS])
                return state.sample_drafted(ops, logits, hidden, located, places, filtered, masks)
            slots, indices = inputs[SLOTS], inputs[INDICES]
            return state.sample(ops, logits, hidden, slots, indices, filtered, masks)

    def _pack_head(self, plan: DevicePlan, bucket: int) -> Int32Array:
        """The inputs `[inputs, bucket]` of a plan without its masks.

        They are padded with rows of the padding slot.
        """
        rows = len(plan.sample_slots)
        inputs = NUM_INPUTS + (plan.masks is not None) * NUM_MASK_INPUTS
        packed = np.zeros((inputs, bucket), np.int32)
        packed[ROWS, :rows] = plan.sample_rows()
        packed[LENGTHS, :rows] = plan.sample_lengths()
        packed[SLOTS, :rows] = plan.sample_slots
        packed[SLOTS, rows:] = self._limits.padding_slot
        indices = plan.sample_indices if self._slots.history is None else offsets(plan)
        packed[INDICES, :rows] = indices
        return packed
