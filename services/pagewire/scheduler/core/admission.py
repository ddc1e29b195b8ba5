"""From the queue to the workers: who is admitted next, and where.

No clock and no I/O: whoever drives it (the engine, a simulator) calls `admit` after every event
and then plans the steps of each worker.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pagewire.scheduler.core.batch import WorkerBatch
from pagewire.scheduler.core.policy import SchedulingPolicy
from pagewire.scheduler.core.prefix_sharing import Return
from pagewire.scheduler.core.routing import Router
from pagewire.scheduler.core.sequence import Sequence
from pagewire.scheduler.core.waiting import WaitingQueue
from pagewire.scheduler.core.worker_limits import WorkerLimits


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that has left the queue: to a worker, or to none as none can ever take it."""

    sequence: Sequence
    worker: WorkerBatch | None
    # How it comes back if it was preempted.
    returned: Return | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """The sequences of a lost worker: those that wait again, and those that took it down."""

    again: list[Sequence]
    guilty: list[Sequence]


class Admission:
    """The waiting sequences of one model and the workers that take them."""

    def __init__(self, policy: SchedulingPolicy, router: Router) -> None:
        self.waiting = WaitingQueue(policy)
        # Those that take sequences.
        self.workers: list[WorkerBatch] = []
        # Sequences that gave their blocks back, over all workers, those lost included.
        self.preemptions = 0
        self._policy = policy
        self._router = router

    def add_worker(self, limits: WorkerLimits) -> WorkerBatch:
        """A worker joins, empty."""
        worker = WorkerBatch(limits, self._policy, self._requeue_preempted)
        self.workers.append(worker)
        return worker

    def drain_worker(self, worker: WorkerBatch) -> None:
        """A worker takes no more sequences; those that it has go on."""
        if worker in self.workers:
            self.workers.remove(worker)

    def resume_worker(self, worker: WorkerBatch) -> None:
        """A worker that was drained takes sequences again."""
        if worker not in self.workers:
            self.workers.append(worker)

    def lose_worker(self, worker: WorkerBatch, max_failures: int) -> Loss:
        """A worker is gone; its sequences wait again with what they have.

        To blame are those in its steps in flight. One that has failed `max_failures` times
        without recovery runs alone from then on, so that whatever else runs is never blamed for
        it; if it fails once more before it has recovered it is guilty. Who was alone by chance
        is not: workers that share a machine are lost one after the other.
        """
        self.drain_worker(worker)
        named = worker.named_slots()
        blamed = {sequence for sequence in worker.running() if sequence.slot in named}
        loss = Loss([], [])
        for sequence in worker.evacuate():
            if sequence in blamed and sequence.record_failure() >= max_failures:
                if sequence.suspect:
                    loss.guilty.append(sequence)
                    continue
                sequence.suspect = True
            self.waiting.push(sequence)
            loss.again.append(sequence)
        return loss

    def admit(self) -> Iterator[Admitted]:
        """Takes from the head of the queue while some worker has room for it.

        Lazy: a sequence is admitted when it is yielded, so the caller must exhaust it.
        """
        while self.waiting and (head := self._next()) is not None:
            if self.workers and not any(worker.fits(head) for worker in self.workers):
                self.waiting.remove(head)
                yield Admitted(head, None)
                continue
            able = [worker for worker in self.workers if worker.can_admit(head)]
            if not able:
                return
            chosen = self._router.choose(head, able)
            self.waiting.remove(head)
            yield Admitted(head, chosen, chosen.admit(head))

    def _next(self) -> Sequence | None:
        """Who is next by the policy."""
        if self._policy.lookahead == 1 or not any(worker.open for worker in self.workers):
            return self.waiting.head()
        first = self.waiting.first(self._policy.lookahead)
        return self._policy.choose(first, self._cached_tokens) if first else None

    def _cached_tokens(self, sequence: Sequence) -> int:
        return max(worker.cached_tokens(sequence) for worker in self.workers)

    def _requeue_preempted(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.waiting.push(sequence)
