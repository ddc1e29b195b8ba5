"""The connected workers: what runs on each, what it can take, how far ahead to plan for it."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.chunk_size import ChunkSize
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.requests.parsing import ModelLimits
from pagewire.scheduler.workers.link import WorkerLink
from pagewire.scheduler.workers.slot_streams import SlotStreams
from pagewire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

# A round trip to a worker takes about 1 ms, measured on an H200 machine: with two steps in
# flight the device would wait for steps that are shorter than that.
SHORT_STEP_SECONDS = 0.002
SHORT_STEP_RUN_AHEAD = 4


@dataclass(slots=True, eq=False)
class ReadyWorker:
    """A connected worker and what runs on it."""

    link: WorkerLink
    info: pb.WorkerInfo
    batch: WorkerBatch
    streams: SlotStreams
    step_seconds: float = 1.0
    # It gets no more sequences; it is left once it has none.
    draining: bool = False
    left: bool = False
    # Without a target chunks are as large as a step allows.
    chunks: ChunkSize | None = None

    def aim_at(self, tpot_ms: float) -> None:
        """Makes chunks as large as a step with decodes can take in so much time."""
        self.chunks = ChunkSize(int(tpot_ms * 1000))
        self.batch.chunk_tokens = self.chunks.tokens

    def observe(self, duration_us: int) -> None:
        """Learns from the oldest step in flight, which took so long."""
        self.step_seconds = duration_us / 1e6
        if self.chunks is None or not self.batch.in_flight:
            return
        plan = self.batch.in_flight[0]
        if len(plan.decode_slots):
            self.chunks.observe(sum(plan.prefill_counts), duration_us)
            self.batch.chunk_tokens = self.chunks.tokens

    def wants_step(self, run_ahead: int) -> bool:
        """Whether fewer steps are in flight than should be: short ones must cover the round trip
        between them."""
        short = self.step_seconds < SHORT_STEP_SECONDS
        return len(self.batch.in_flight) < max(run_ahead, SHORT_STEP_RUN_AHEAD if short else 0)


class ReadyWorkers:
    """The connected workers, those that drain included."""

    def __init__(self) -> None:
        self.by_link: dict[WorkerLink, ReadyWorker] = {}
        self._by_batch: dict[WorkerBatch, ReadyWorker] = {}
        # What they can take; None before the first of them was there. While all are lost it is
        # what they could take, so that requests wait for their return.
        self.limits: ModelLimits | None = None

    def __iter__(self) -> Iterator[ReadyWorker]:
        return iter(self.by_link.values())

    def add(self, worker: ReadyWorker) -> None:
        """A worker has connected."""
        self.by_link[worker.link] = self._by_batch[worker.batch] = worker
        self._update_limits()
        limits = worker.batch.limits
        log.info(
            "worker %s is ready: %s %s on %s, %d blocks of %d tokens, %d in the host's memory, "
            "%d sequences",
            worker.link.address,
            worker.info.model,
            worker.info.dtype,
            worker.info.device,
            limits.num_blocks - 1,
            limits.block_size,
            limits.host.num_blocks,
            limits.num_slots,
        )

    def remove(self, link: WorkerLink) -> ReadyWorker | None:
        """A connection is gone; what it led to, None if that was not ready."""
        worker = self.by_link.pop(link, None)
        if worker is not None:
            del self._by_batch[worker.batch]
            self._update_limits()
        return worker

    def of(self, batch: WorkerBatch) -> ReadyWorker:
        """The worker of a batch."""
        return self._by_batch[batch]

    def batches(self) -> list[WorkerBatch]:
        """What runs on each; may be asked on any thread."""
        return [worker.batch for worker in list(self.by_link.values())]

    def may_take(self, sequence: Sequence) -> bool:
        """Whether one of them takes the sequence at its longest, as far as any is connected."""
        return not self.by_link or any(worker.batch.fits(sequence) for worker in self)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it runs, if it does."""
        for worker in self:
            if worker.batch.slots.holds(sequence):
                worker.batch.finish(sequence.slot, State.CANCELLED)
                return

    def forget(self, sequences: list[Sequence]) -> None:
        """Nobody need keep the KV of these ended sequences any longer."""
        for worker in self:
            for sequence in sequences:
                worker.batch.forget(sequence.arrival)

    def _update_limits(self) -> None:
        infos = [worker.info for worker in self]
        if infos:
            self.limits = ModelLimits(
                max_model_len=max(info.max_model_len for info in infos),
                max_pool_tokens=max((info.num_blocks - 1) * info.block_size for info in infos),
                vocab_size=max(info.vocab_size for info in infos),
            )
