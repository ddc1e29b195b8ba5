"""The backend of a model that pools: each prompt becomes one vector, and no token is sampled.

Steps are eager on every device. They have no decode rows, and the shapes of prefill chunks differ
from step to step, so CUDA graphs would save little.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pagewire.v1 import worker_pb2 as pb
from pagewire.worker.model.decoder import Decoder
from pagewire.worker.model.pooling import PoolingConfig
from pagewire.worker.protocol.backend import Outcome, RowFailure
from pagewire.worker.protocol.constraints.mask_memory import MaskMemory
from pagewire.worker.protocol.steps.device_plan import Chunks, DevicePlan, dummy_plan
from pagewire.worker.protocol.steps.limits import Limits
from pagewire.worker.runtime.eager import EagerBackend
from pagewire.worker.runtime.timer import DeviceTimer, HostTimer

_NOT_FINITE = (
    "the model's hidden states for this prompt are not finite (NaN or infinity), so it has no "
    "vector; a wider --dtype may help"
)


@dataclass(frozen=True, slots=True)
class PoolingHandle:
    """A submitted step. On a GPU `vectors` is pinned memory, valid after `timer.wait`."""

    vectors: Tensor  # [rows, size] float32 on the host
    timer: HostTimer | DeviceTimer


class PoolingBackend(EagerBackend):
    """See `Backend`. A row's token is 0, its result is in `Outcome.pooled`.

    A mean is a sum over the chunks of a prompt. It is kept in float64, so that its float32 value
    hardly depends on where the chunks end.
    """

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        dtype: torch.dtype,
        pooling: PoolingConfig,
        head: Tensor | None,
    ) -> None:
        """`head [1, hidden]` float32 maps a vector to a score; None for embeddings."""
        super().__init__(decoder, limits, dtype)
        hidden = decoder.config.hidden_size
        self._size = hidden if head is None else 1
        self.pooling = pb.Pooling(
            task=pooling.task,
            size=self._size,
            activation=pooling.activation,
            whole_prompt=pooling.kind != "last",
            pair_format="qwen3" if pooling.head == "tokens" else "tokenizer",
        )
        self._kind = pooling.kind
        self._head = head
        # By slot: the tokens that `_states` covers.
        self._covered = np.zeros(limits.num_slots + 1, np.int64)
        # By slot: the sum of the hidden states so far, or the first one. [slots + 1, hidden]
        self._states = torch.zeros(
            (limits.num_slots + 1, hidden) if pooling.kind != "last" else (0, hidden),
            dtype=torch.float64,
            device=self.device,
        )

    def warm_up(self) -> None:
        """Runs steps with one chunk; measures costs. On a GPU chunks of several sizes compile the
        kernels that are chosen by size."""
        limits = self.limits
        longest = min(limits.max_num_batched_tokens, limits.max_model_len)
        for length in (1,) if self.synchronous else (1, 16, 64, 256, 1024, longest):
            chunk = min(length, longest)
            self.wait(self.submit(dummy_plan(limits, decodes=0, chunks=1, chunk_length=chunk)))
        self._measure_costs()

    def submit(self, plan: DevicePlan) -> PoolingHandle:  # type: ignore[override]
        """See `Backend`. ValueError for a plan with decode rows, which fails the step."""
        if plan.num_decodes:
            raise ValueError(f"{plan.num_decodes} decode rows, and this worker generates nothing")
        if self.synchronous:
            self._threads.adapt(plan.num_prefilled)
        timer = HostTimer() if self.synchronous else DeviceTimer()
        with torch.inference_mode():
            self._apply(plan)
            vectors = self._to_host(self._vectors(plan))
        timer.stop()
        return PoolingHandle(vectors, timer)

    def wait(self, handle: PoolingHandle) -> Outcome:  # type: ignore[override]
        """See `Backend`."""
        seconds = handle.timer.wait()
        vectors = handle.vectors.numpy()
        finite = np.isfinite(vectors).all(axis=1)
        failures = tuple(
            RowFailure(int(row), _NOT_FINITE, retryable=False) for row in np.flatnonzero(~finite)
        )
        tokens = np.where(finite, 0, -1).astype(np.int32)
        return Outcome(tokens, failures, int(seconds * 1e6), pooled=vectors)

    def _mask_memory(self) -> MaskMemory | None:
        """None: nothing is sampled, so nothing is constrained."""
        return None

    def _vectors(self, plan: DevicePlan) -> Tensor:
        """The vectors `[rows, size]` float32 of the prompts that end in this step."""
        chunks = plan.chunks
        if chunks is None:
            return torch.empty((0, self._size), device=self.device)
        batch, slots, _ = self._mixed_batch(plan, chunks)
        decoder, cache, tables = self._decoder, self._cache, self._slots.block_tables
        if self._kind == "last":
            vectors = self._normed(decoder.hidden(batch, cache, tables))
        else:
            every = replace(batch, sampled=None)
            self._collect(chunks, self._normed(decoder.hidden(every, cache, tables)))
            vectors = self._states[slots]
            if self._kind == "mean":
                assert batch.sampled is not None
                vectors = vectors / batch.sampled.lengths[:, None]
        vectors = vectors.float()
        return vectors if self._head is None else vectors @ self._head.T

    def _normed(self, residual: Tensor) -> Tensor:
        """The model's last hidden states `[tokens, hidden]`, from its final residual stream."""
        if not len(residual):  # no prompt ends in this step; a kernel needs at least one row
            return residual
        return self._decoder.last_states(residual)

    def _collect(self, chunks: Chunks, hidden: Tensor) -> None:
        """Adds the chunks' hidden states `[tokens, hidden]` to the states of their slots.

        One sum for each chunk: adding rows by index has no fixed order on a GPU. ValueError for a
        chunk that does not follow the slot's last one.
        """
        starts = chunks.starts.tolist()
        for index, slot in enumerate(chunks.slots.tolist()):
            rows = hidden[starts[index] : starts[index + 1]]
            begin = int(chunks.positions[starts[index]])
            begins = begin == 0
            follows = begins or begin == self._covered[slot]
            if not follows and slot != self.limits.padding_slot:
                raise ValueError(
                    f"slot {slot} goes on at token {begin}, and its vector has "
                    f"{self._covered[slot]} tokens: num_computed must be 0"
                )
            self._covered[slot] = begin + len(rows)
            if self._kind == "mean":
                total = rows.sum(0, dtype=torch.float64)
                self._states[slot] = total if begins else self._states[slot] + total
            elif begins:
                self._states[slot] = rows[0]
