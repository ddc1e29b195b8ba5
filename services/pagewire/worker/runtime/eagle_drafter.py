"""Drafts by an EAGLE-3 head, in a chain."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.worker.model.decoder import Batch, Decoder
from pagewire.worker.model.eagle.head import EagleHead
from pagewire.worker.protocol.steps.device_plan import NO_DRAFT, DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.draft_model import Drafter, DraftModel


class EagleDrafter(Drafter):
    """A head, its KV, and its output at the end of each sequence.

    Its KV of a position depends on the target's state there and on the next token, which is part of
    the prompt or sampled in the same step. So `follow` writes the KV of all tokens that the target
    has computed. It also replaces the KV of `propose`, which came from the head's own states.

    The KV of the last position of a cached prefix depends on the next token of the sequence that
    wrote it. A sequence that reads the KV may have another next token. This changes only drafts.

    `follow` also keeps the output of each sequence's last position, for the first draft.
    """

    def __init__(self, head: EagleHead, limits: Limits, dtype: torch.dtype) -> None:
        super().__init__(head.decoder, limits, dtype, head.weight_bytes)
        self._head = head
        self.inputs = head.inputs
        # [slots + 1, hidden], with the padding slot; while `propose` runs, outputs of its drafts.
        embedding = head.decoder.weights.embedding
        self._outputs = embedding.new_zeros(limits.num_slots + 1, head.config.hidden_size)

    def follow(
        self,
        plan: DevicePlan,
        batch: Batch,
        tokens: Tensor,
        taken: NDArray[np.bool_] | None,
        block_tables: Tensor,
    ) -> None:
        """See `Drafter`."""
        assert batch.inputs is not None
        assert batch.inputs.states is not None
        computed = np.ones(len(batch.token_ids), np.bool_)
        if taken is not None:
            computed[: plan.num_decodes] = taken[: plan.num_decodes]
        at = torch.from_numpy(np.flatnonzero(computed))
        if not len(at):
            return
        self._threads.adapt(len(at))
        slots, positions = batch.slots[at], batch.positions[at]
        states = self._head.fused(batch.inputs.states[at])
        following = _following(plan, batch, tokens)[at]
        queries = self._write(following, states, positions, slots, block_tables)
        self._scrub_broken(states, slots, block_tables)
        # The rest of the layer is computed only for the last row of each sequence that continues.
        rows = (np.cumsum(computed) - 1)[plan.sample_rows()[_last_rows(plan, taken)]]
        if len(rows):
            last = torch.from_numpy(rows)
            self._finish(states[last], queries[last], slots[last], positions[last], block_tables)

    def _hidden(
        self, place: int, tokens: Tensor, of: Tensor, positions: Tensor, block_tables: Tensor
    ) -> Tensor:
        states = self._outputs[of]
        if place == 0:
            return states
        before = positions - 1
        queries = self._write(tokens, states, before, of, block_tables)
        return self._finish(states, queries, of, before, block_tables)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(hidden)

    def _write(
        self,
        following: Tensor,
        states: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_tables: Tensor,
    ) -> Tensor:
        """Writes the KV of `positions [n]`; returns queries `[n, heads, head_dim]`.

        `following [n]` are the tokens after the positions, `states [n, hidden]` the states there.
        """
        batch = Batch(following, positions, slots, 0, positions[:0], prefill=None)
        pairs = self._head.pairs(following, states)
        return self._decoder.body(pairs, batch, self.cache, block_tables)

    def _finish(
        self,
        states: Tensor,
        queries: Tensor,
        slots: Tensor,
        positions: Tensor,
        block_tables: Tensor,
    ) -> Tensor:
        """Computes the outputs `[n, hidden]` of some positions and keeps them by slot.

        `states [n, hidden]` is changed in place.
        """
        hidden = self._decoder.finish_last_layer(
            states, queries, slots, positions + 1, self.cache, block_tables
        )
        self._scrub_broken(hidden, slots, block_tables)
        self._outputs[slots] = hidden.nan_to_num()
        return hidden


def drafter_of(model: Decoder | EagleHead, limits: Limits, dtype: torch.dtype) -> Drafter:
    """The drafter of a draft model or a head."""
    if isinstance(model, EagleHead):
        return EagleDrafter(model, limits, dtype)
    return DraftModel(model, limits, dtype)


def _following(plan: DevicePlan, batch: Batch, tokens: Tensor) -> Tensor:
    """The token after each token of a step, `[tokens]`; see `Drafter.follow`."""
    following = batch.token_ids.roll(-1)
    if plan.chunks is not None:
        ends = plan.chunks.starts[1:] + (plan.num_decodes - 1)
        following[torch.from_numpy(ends)] = torch.from_numpy(plan.chunks.following)
    # A row without a token ends its sequence.
    following[torch.from_numpy(plan.sample_rows())] = tokens.clamp(min=0)
    return following


def _last_rows(plan: DevicePlan, taken: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Which sampling rows `[rows]` are the last of their sequences among rows of the outputs."""
    last = np.ones(len(plan.sample_slots), np.bool_)
    if taken is not None and plan.drafts is not None:
        right = np.zeros(len(last) + 1, np.bool_)
        right[: plan.num_decodes] = (plan.drafts != NO_DRAFT) & taken[: plan.num_decodes]
        last = taken & ~right[1:]
    return last
