"""The connected workers: the sequences and limits of each, and how far ahead to plan for it."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pagewire.config import SchedulerConfig
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.chunk_size import ChunkSize
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.pooling import ModelPooling
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.requests.prompt import ModelLimits
from pagewire.scheduler.requests.slot_streams import SlotStreams
from pagewire.scheduler.text.token_texts import TokenTexts
from pagewire.scheduler.workers.link import WorkerLink
from pagewire.scheduler.workers.outage import Outage
from pagewire.scheduler.workers.step_codec import encode_step
from pagewire.scheduler.workers.worker_info import (
    model_pooling,
    pool_tokens,
    unlike,
    worker_limits,
)
from pagewire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

# A round trip to a worker takes about 1 ms, measured on an H200 machine: with two steps in
# flight the device would wait for steps that are shorter than that.
SHORT_STEP_SECONDS = 0.002
SHORT_STEP_RUN_AHEAD = 4


@dataclass(slots=True, eq=False)
class ReadyWorker:
    """A connected worker and its sequences."""

    link: WorkerLink
    info: pb.WorkerInfo
    batch: WorkerBatch
    streams: SlotStreams
    # Of the latest step; the first steps count as long ones.
    step_seconds: float = 1.0
    # It gets no more sequences, and is disconnected once it has none.
    draining: bool = False
    leaving: bool = False
    # None without a target for the time of a step: chunks are as large as a step allows.
    chunks: ChunkSize | None = None
    # The pooling that it computes instead of tokens; None if it generates.
    pooling: ModelPooling | None = None

    def aim_at(self, tpot_ms: float) -> None:
        """Makes chunks as large as steps with decodes can compute in `tpot_ms`."""
        self.chunks = ChunkSize(int(tpot_ms * 1000))
        self.batch.chunk_tokens = self.chunks.tokens

    def observe(self, duration_us: int) -> None:
        """Takes the duration of the oldest step in flight, and adapts the size of chunks."""
        self.step_seconds = duration_us / 1e6
        if self.chunks is None or not self.batch.in_flight:
            return
        plan = self.batch.in_flight[0]
        if len(plan.decode_slots):
            self.chunks.observe(sum(plan.prefill_counts), duration_us)
            self.batch.chunk_tokens = self.chunks.tokens

    def wants_step(self, run_ahead: int) -> bool:
        """Whether fewer steps are in flight than should be.

        Short steps need more in flight, to cover the round trip.
        """
        short = self.step_seconds < SHORT_STEP_SECONDS
        return len(self.batch.in_flight) < max(run_ahead, SHORT_STEP_RUN_AHEAD if short else 0)

    def send(self, plan: StepPlan) -> None:
        """Sends a step; call it before anything else changes the sequences."""
        self.link.send(encode_step(plan, self.batch.limits.max_drafts > 0))

    def leave_if_drained(self) -> None:
        """Disconnects from a draining worker that has no sequence any more."""
        if self.draining and self.batch.idle and not self.leaving:
            self.leaving = True
            self.link.leave()


class ReadyWorkers:
    """The connected workers, draining ones included. Admission has those that accept sequences."""

    def __init__(
        self,
        config: SchedulerConfig,
        model: str,
        texts: TokenTexts,
        admission: Admission,
        plan_soon: Callable[[], None],
    ) -> None:
        """`texts` are those of the model's tokens; `plan_soon` is called when requests have waited
        for too long without a worker."""
        self.by_link: dict[WorkerLink, ReadyWorker] = {}
        # The limits of the connected workers; None before the first worker was ready. While all are
        # lost the last limits stay, so that requests wait for their return.
        self.limits: ModelLimits | None = None
        self.outage = Outage(config.hand_back_after, config.no_worker_timeout, plan_soon)
        self._config = config
        self._model = model
        self._texts = texts
        self._admission = admission
        self._by_batch: dict[WorkerBatch, ReadyWorker] = {}

    def __iter__(self) -> Iterator[ReadyWorker]:
        return iter(self.by_link.values())

    def connect(self, link: WorkerLink, info: pb.WorkerInfo) -> None:
        """Adds a worker that accepts sequences; ValueError if it cannot serve the model."""
        if info.model != self._model:
            raise ValueError(f"it serves the model {info.model!r}, this scheduler {self._model!r}")
        limits, pooling = worker_limits(self._config, info), model_pooling(info)
        if self.limits is not None and pooling != self.limits.pooling:
            raise ValueError(
                f"its pooling is {pooling}, that of this scheduler's model {self.limits.pooling}; "
                "start all workers of a model with the same --task"
            )
        if (difference := unlike(info, [worker.info for worker in self])) is not None:
            log.warning("worker %s %s", link.address, difference)
        batch = self._admission.add_worker(limits, time.monotonic())
        streams = SlotStreams(limits.num_slots, self._texts)
        worker = ReadyWorker(link, info, batch, streams, pooling=pooling)
        if self._config.tpot_slo_ms is not None:
            worker.aim_at(self._config.tpot_slo_ms)
        self.by_link[link] = self._by_batch[batch] = worker
        self._update()
        log.info(
            "worker %s is ready: %s %s on %s, %d blocks of %d tokens, %d blocks in host memory, "
            "%d slots",
            link.address,
            info.model,
            info.dtype,
            info.device,
            limits.num_blocks - 1,
            limits.block_size,
            limits.host.num_blocks,
            limits.num_slots,
        )

    def drain(self, link: WorkerLink) -> bool:
        """Admits no more sequences to a worker; False if it is draining already."""
        worker = self.by_link.get(link)
        if worker is None or worker.draining:
            return False
        worker.draining = True
        self._admission.drain_worker(worker.batch)
        self._update()
        return True

    def resume(self, link: WorkerLink) -> bool:
        """Admits sequences to a draining worker again; False if it is not draining, or leaving."""
        worker = self.by_link.get(link)
        if worker is None or not worker.draining or worker.leaving:
            return False
        log.info("worker %s takes sequences again", link.address)
        worker.draining = False
        self._admission.resume_worker(worker.batch)
        self._update()
        return True

    def remove(self, link: WorkerLink) -> ReadyWorker | None:
        """Removes the worker of a broken link, which keeps its sequences; None if there is none."""
        worker = self.by_link.pop(link, None)
        if worker is not None:
            del self._by_batch[worker.batch]
            self._admission.drain_worker(worker.batch)
            self._update()
        return worker

    def of(self, batch: WorkerBatch) -> ReadyWorker:
        """The worker of a batch."""
        return self._by_batch[batch]

    def batches(self) -> list[WorkerBatch]:
        """The batch of each worker; may be called on any thread."""
        return [worker.batch for worker in list(self.by_link.values())]

    def may_take(self, sequence: Sequence) -> bool:
        """Whether some worker can run the sequence at its longest; True if none is connected."""
        return not self.by_link or any(worker.batch.fits(sequence) for worker in self)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence on the worker that runs it, if any does."""
        for worker in self:
            if worker.batch.slots.holds(sequence):
                worker.batch.finish(sequence.slot, State.CANCELLED)
                return

    def forget(self, sequences: list[Sequence]) -> None:
        """Releases the kept KV of ended sequences on all workers."""
        for worker in self:
            for sequence in sequences:
                worker.batch.forget(sequence.arrival)

    def _update(self) -> None:
        self.outage.update(bool(self._admission.batches))
        infos = [worker.info for worker in self]
        if infos:
            self.limits = ModelLimits(
                max_model_len=max(info.max_model_len for info in infos),
                max_pool_tokens=max(pool_tokens(info) for info in infos),
                vocab_size=max(info.vocab_size for info in infos),
                constraints=all(info.constraints for info in infos),
                pooling=next(iter(self)).pooling,
            )
