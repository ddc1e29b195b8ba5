"""From the queue to the workers: who is admitted next, and where.

No clock and no I/O: whoever drives it (the engine, a simulator) calls `admit` after every event
and then plans the steps of each worker.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.prefix_sharing import Return
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.queue.waiting import WaitingQueue
from pagewire.scheduler.core.routing import Router
from pagewire.scheduler.core.sequence import Sequence
from pagewire.suspicion import Loss, Suspicion


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that has left the queue: to a worker, or to none as none can ever take it."""

    sequence: Sequence
    worker: WorkerBatch | None
    # How it comes back if it was preempted.
    returned: Return | None = None


class Admission:
    """The waiting sequences of one model and the workers that take them.

    A sequence that was among those in the steps of `max_losses` lost workers in a row is a suspect:
    its steps run alone, so that whatever else runs is never blamed for it. One that was alone when
    a worker was lost is held until that is explained and some worker has lived without it for a
    while; if two workers have ended with it alone, and none without it meanwhile, it is guilty.

    Times are seconds of the caller's clock.
    """

    def __init__(self, policy: SchedulingPolicy, router: Router, max_losses: int = 2) -> None:
        self.waiting = WaitingQueue(policy)
        # Suspects that must not run yet.
        self.held: list[Sequence] = []
        self._max_losses = max_losses
        # Suspects with trials behind them, wherever they are, and some that are none any more.
        self._accused: list[Sequence] = []
        # Those that take sequences.
        self.workers: list[WorkerBatch] = []
        # Sequences that gave their blocks back, over all workers, those lost included.
        self.preemptions = 0
        self._policy = policy
        self._router = router

    def add_worker(self, limits: WorkerLimits, now: float = 0.0) -> WorkerBatch:
        """A worker joins, empty."""
        worker = WorkerBatch(limits, self._policy, self._requeue_preempted)
        worker.joined = now
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

    def lose_worker(self, worker: WorkerBatch, loss: Loss | None, now: float) -> list[Sequence]:
        """A worker is gone; its sequences, which wait again with what they have.

        To blame are those in its steps in flight, unless it was to leave: then there is no `loss`.
        Call `judge` when the loss has been explained.
        """
        self.drain_worker(worker)
        named = worker.named_slots()
        blamed = {sequence for sequence in worker.running() if sequence.slot in named}
        tried = worker.tried
        again = worker.evacuate()
        if loss is not None:
            for sequence in blamed:
                sequence.note_loss(loss)
                self._suspect(sequence)
            if tried in blamed and tried is not None and tried.suspicion is not None:
                tried.suspicion.add_trial(loss, now, now - tried.tried_at)
                self._accused = [s for s in self._accused if not s.state.final and s is not tried]
                self._accused.append(tried)
            else:
                self._lose_without(blamed)
        for sequence in again:
            self.waiting.push(sequence)
        return again

    def take_up(self, sequence: Sequence, suspicion: Suspicion) -> None:
        """What is known of a sequence that has run elsewhere; to be called before it waits."""
        sequence.suspicion = suspicion
        sequence.failed_at = len(sequence.output)
        self._suspect(sequence)
        if sequence.accused:
            self._accused.append(sequence)

    def judge(self) -> list[Sequence]:
        """What became of a lost worker is known: takes out the sequences that are guilty."""
        guilty = []
        for sequence in [*self.held, *self.waiting]:
            if sequence.suspicion is not None:
                self._suspect(sequence)
                if sequence.accused and sequence.suspicion.confirmed:
                    self.remove(sequence)
                    guilty.append(sequence)
        return guilty

    def remove(self, sequence: Sequence) -> bool:
        """Takes out a sequence that waits or is held; False if it is neither."""
        if sequence in self.held:
            self.held.remove(sequence)
            return True
        return self.waiting.remove(sequence)

    def stranded(self) -> list[Sequence]:
        """All that could run if there were a worker for it, here or elsewhere."""
        return [s for s in (*self.waiting, *self.held) if not s.undecided]

    def admit(self, now: float = 0.0) -> Iterator[Admitted]:
        """Takes from the head of the queue while some worker has room for it.

        Lazy: a sequence is admitted when it is yielded, so the caller must exhaust it.
        """
        self._release(now)
        while self.waiting and (head := self._next()) is not None:
            if self.workers and not any(worker.fits(head) for worker in self.workers):
                self.waiting.remove(head)
                yield Admitted(head, None)
                continue
            if head.accused and not self._may_run(head, now):
                self.waiting.remove(head)
                self.held.append(head)
                continue
            able = [worker for worker in self.workers if worker.can_admit(head)]
            if head.suspect:
                able = [worker for worker in able if head.may_be_tried(worker.joined, now)]
                head.tried_at = now
            if not able:
                return
            chosen = self._router.choose(head, able)
            self.waiting.remove(head)
            yield Admitted(head, chosen, chosen.admit(head))

    def _release(self, now: float) -> None:
        """Lets suspects wait again that may run at some worker now."""
        for sequence in [held for held in self.held if self._may_run(held, now)]:
            self.held.remove(sequence)
            self.waiting.push(sequence)

    def _may_run(self, suspect: Sequence, now: float) -> bool:
        return any(suspect.may_be_tried(worker.joined, now) for worker in self.workers)

    def _suspect(self, sequence: Sequence) -> None:
        """Whether enough workers are, or may be, lost through it."""
        assert sequence.suspicion is not None
        sequence.suspect = sequence.suspicion.losses >= self._max_losses

    def _lose_without(self, blamed: Collection[Sequence]) -> None:
        """A worker was lost that computed several sequences, or none: the losses of those that were
        not among them may be of the same kind."""
        for sequence in self._accused:
            if sequence not in blamed and sequence.suspicion is not None:
                sequence.suspicion.discard_trials()
        self._accused = [s for s in self._accused if s in blamed and not s.state.final]

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
