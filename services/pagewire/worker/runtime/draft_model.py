"""Drafters that compute drafts with a model, on the CPU, and have KV of their own."""

from abc import ABC, abstractmethod
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewire.packing import Int32Array
from pagewire.worker.model.decoder import Batch, Decoder
from pagewire.worker.model.kv_cache import empty_cache
from pagewire.worker.protocol.speculation.sequence_drafts import FROM_DEVICE
from pagewire.worker.protocol.steps.device_plan import NO_DRAFT, DevicePlan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.cpu_threads import CpuThreads
from pagewire.worker.runtime.device_slots import DeviceSlots


class Drafter(ABC):
    """A model that drafts the next tokens of sequences, and its KV.

    Invariant: after each step, every block has the drafter's KV of the same positions as the
    target's KV. So both models use the same block tables, and each operation on a block (sharing,
    copying, caching, saving) applies to both.

    After the end of a sequence there may be KV of wrong drafts, as in the target's cache. It is
    overwritten before it is read.
    """

    inputs: tuple[int, ...] = ()  # layers of the target whose inputs `follow` reads

    def __init__(
        self, decoder: Decoder, limits: Limits, dtype: torch.dtype, weight_bytes: int
    ) -> None:
        """Allocates a KV cache with the same number of blocks as the target's."""
        device = decoder.weights.embedding.device
        self._decoder = decoder
        self.cache = empty_cache(
            decoder.config, limits.num_blocks, limits.block_size, dtype, device
        )
        self.weight_bytes = weight_bytes
        parameters = weight_bytes // decoder.weights.embedding.itemsize
        self._threads = CpuThreads(torch.get_num_threads(), parameters)

    def propose(self, plan: DevicePlan, slots: DeviceSlots) -> DevicePlan:
        """The plan with a token in place of each draft that is FROM_DEVICE.

        A draft is sampled with the parameters and the noise of the token that it drafts. So, also
        with a temperature, it is right if both models have nearly the same logits.
        """
        following = _followed_by_draft(plan)
        if not following.any():
            return plan
        assert plan.drafts is not None
        drafts = plan.drafts.copy()
        inputs = np.flatnonzero(following)
        places = np.arange(len(drafts)) - np.maximum.accumulate(
            np.where(drafts == NO_DRAFT, np.arange(len(drafts)), 0)
        )
        for place in range(int(places[inputs].max()) + 1):
            rows = inputs[places[inputs] == place]
            of = torch.from_numpy(plan.decode_slots[rows])
            given = torch.from_numpy(drafts[rows]) if place else slots.last_tokens[of]
            indices = plan.sample_indices[rows]
            drafts[rows + 1] = self.next_tokens(
                place, given, of, plan.decode_positions[rows], indices, plan.filtered, slots
            )
        return replace(plan, drafts=drafts)

    def next_tokens(
        self,
        place: int,
        tokens: Tensor,
        of: Tensor,
        positions: Int32Array,
        indices: Int32Array,
        filtered: bool,
        slots: DeviceSlots,
    ) -> Int32Array:
        """The drafts `[n]` that follow `tokens [n]` at `positions [n]` of the slots `of [n]`.

        At place 0, `tokens` are the last tokens of their sequences, at place p the drafts of place
        p - 1. `indices [n]` are those of the next tokens in their outputs.
        """
        self._threads.adapt(len(of))
        ops, at = self._decoder.ops, torch.from_numpy(positions)
        hidden = self._hidden(place, tokens, of, at, slots.block_tables)
        state = ops.gather_sampling(slots.sampling, of, torch.from_numpy(indices))
        drawn = ops.sample(self._logits(hidden), state, filtered)
        self._scrub_broken(hidden, of, slots.block_tables)
        return drawn.numpy()

    @abstractmethod
    def follow(
        self,
        plan: DevicePlan,
        batch: Batch,
        tokens: Tensor,
        taken: NDArray[np.bool_] | None,
        block_tables: Tensor,
    ) -> None:
        """Writes the KV of the step's tokens, except KV that `propose` has written.

        Args:
            plan: the plan, as it was before `propose`.
            batch: the target's batch.
            tokens: `[rows]` int32, the sampled tokens.
            taken: which rows belong to an output, see `Outcome`; None: all.
            block_tables: of the slots.
        """

    @abstractmethod
    def _hidden(
        self, place: int, tokens: Tensor, of: Tensor, positions: Tensor, block_tables: Tensor
    ) -> Tensor:
        """The input of `_logits`, `[n, hidden]`; see `next_tokens`."""

    def _logits(self, hidden: Tensor) -> Tensor:
        """The logits `[n, vocab]` of drafts."""
        return self._decoder.logits(hidden)

    def _scrub_broken(self, states: Tensor, of: Tensor, block_tables: Tensor) -> None:
        """Makes the blocks finite that rows read, if their `states [rows, hidden]` are not finite.

        So a NaN of this model costs the sequence drafts, but no tokens. Later sequences with the
        same blocks lose nothing.
        """
        broken = ~torch.isfinite(states).all(-1)
        if broken.any():
            self.cache.scrub(block_tables[of[broken]].unique())


class DraftModel(Drafter):
    """A second, smaller model. Its KV of a position is that of the token at this position.

    `propose` writes the KV of each token from which it drafts the next. `follow` writes all other
    KV.
    """

    def __init__(self, decoder: Decoder, limits: Limits, dtype: torch.dtype) -> None:
        super().__init__(decoder, limits, dtype, decoder.weights.nbytes)

    def follow(
        self,
        plan: DevicePlan,
        batch: Batch,
        tokens: Tensor,
        taken: NDArray[np.bool_] | None,
        block_tables: Tensor,
    ) -> None:
        """See `Drafter`."""
        decodes = plan.num_decodes
        missing = ~_followed_by_draft(plan)
        if taken is not None:
            missing &= taken[:decodes]
        rows = torch.from_numpy(np.flatnonzero(missing))
        at = torch.cat((rows, torch.arange(decodes, len(batch.token_ids))))
        if not len(at):
            return
        prefill = batch.prefill
        if prefill is not None:
            prefill = replace(prefill, starts=prefill.starts - (decodes - len(rows)))
        followed = Batch(
            token_ids=batch.token_ids[at],
            positions=batch.positions[at],
            slots=batch.slots[at],
            num_decodes=len(rows),
            decode_lengths=batch.positions[rows] + 1,
            prefill=prefill,
        )
        self._threads.adapt(len(at))
        residual = self._decoder.weights.embedding[followed.token_ids]
        self._decoder.body(residual, followed, self.cache, block_tables)
        self._scrub_broken(residual, followed.slots, block_tables)

    def _hidden(
        self, place: int, tokens: Tensor, of: Tensor, positions: Tensor, block_tables: Tensor
    ) -> Tensor:
        batch = Batch(
            token_ids=tokens,
            positions=positions,
            slots=of,
            num_decodes=len(of),
            decode_lengths=positions + 1,
            prefill=None,
        )
        return self._decoder.hidden(batch, self.cache, block_tables)


def _followed_by_draft(plan: DevicePlan) -> NDArray[np.bool_]:
    """`[decodes]`, the rows of a plan whose next row is a draft that this model makes."""
    if plan.drafts is None:
        return np.zeros(plan.num_decodes, np.bool_)
    return np.append(plan.drafts[1:] == FROM_DEVICE, False)
