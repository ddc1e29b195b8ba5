"""Admission: which waiting sequence starts next, and on which worker.

No clock and no I/O: the caller (the engine, a simulator) calls `admit` after every event and then
plans the steps of each batch.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.cached_prefix import Restart
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.followers import Followers
from pagewire.scheduler.core.queue.policy import SchedulingPolicy
from pagewire.scheduler.core.queue.waiting import WaitingQueue
from pagewire.scheduler.core.routing import Candidate, Router
from pagewire.scheduler.core.sequence import Sequence
from pagewire.suspicion import Loss, Suspicion


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence that has left the queue, and the batch that it has joined.

    `batch` is None if the sequence is too large for every worker.
    """

    sequence: Sequence
    batch: WorkerBatch | None
    # How it starts again if it was preempted.
    restart: Restart | None = None


class Admission:
    """The waiting sequences of one model, and the batches that admit them.

    A sequence in the steps of `max_losses` lost workers in a row is a suspect. Its steps run alone,
    so that no other sequence is suspected for its losses. If a worker is lost while a suspect runs
    there alone, the suspect is held until the loss is explained, and until some worker has lived
    without it for a while. If two workers have ended while it ran alone, and none has ended without
    it in between, the suspect is known to take workers down.

    Times are seconds of the caller's clock.
    """

    def __init__(self, policy: SchedulingPolicy, router: Router, max_losses: int = 2) -> None:
        self.waiting = WaitingQueue(policy)
        # Suspects that must not run yet.
        self.held: list[Sequence] = []
        # The batches that admit sequences.
        self.batches: list[WorkerBatch] = []
        self._followers = Followers()
        # Called with each preempted sequence.
        self.on_preempted: Callable[[Sequence], object] = lambda sequence: None
        # Preemptions of all workers, lost ones included.
        self.preemptions = 0
        self._max_losses = max_losses
        # Suspects that were alone on lost workers, wherever they are now. Some may have recovered.
        self._lost_alone: list[Sequence] = []
        self._policy = policy
        self._router = router

    # Workers

    def add_worker(self, limits: WorkerLimits, now: float = 0.0) -> WorkerBatch:
        """The empty batch of a worker that joins."""
        batch = WorkerBatch(limits, self._policy, self._requeue_preempted, self.waiting)
        batch.joined = now
        self.batches.append(batch)
        return batch

    def drain_worker(self, batch: WorkerBatch) -> None:
        """Admits no more sequences to a batch; those that it has continue."""
        if batch in self.batches:
            self.batches.remove(batch)

    def resume_worker(self, batch: WorkerBatch) -> None:
        """Admits sequences again to a batch that was drained."""
        if batch not in self.batches:
            self.batches.append(batch)

    def lose_worker(self, batch: WorkerBatch, loss: Loss | None, now: float) -> list[Sequence]:
        """Requeues the sequences of a lost worker, with the tokens they have.

        The sequences in its steps in flight may be the cause. `loss` is None if the worker was to
        leave. Call `remove_deadly` once the loss has been explained.
        """
        self.drain_worker(batch)
        named = batch.slots_in_flight()
        possible_causes = {sequence for sequence in batch.running() if sequence.slot in named}
        alone = batch.isolated
        again = batch.remove_all()
        if loss is not None:
            for sequence in possible_causes:
                sequence.note_loss(loss)
                self._update_suspect(sequence)
            if alone in possible_causes and alone is not None and alone.suspicion is not None:
                alone.suspicion.add_trial(loss, now, now - alone.admitted_at)
                self._lost_alone = [
                    s for s in self._lost_alone if not s.state.final and s is not alone
                ]
                self._lost_alone.append(alone)
            else:
                self._note_loss_without(possible_causes)
        for sequence in again:
            self.waiting.push(sequence)
        return again

    # Sequences

    def set_suspicion(self, sequence: Sequence, suspicion: Suspicion) -> None:
        """Sets the suspicion of a sequence that ran elsewhere, before the sequence waits."""
        sequence.suspicion = suspicion
        sequence.failed_at = len(sequence.output)
        self._update_suspect(sequence)
        if sequence.lost_alone:
            self._lost_alone.append(sequence)

    def remove_deadly(self) -> list[Sequence]:
        """Removes and returns the sequences that are known to take workers down.

        Call it when it has become known whether a lost worker has ended.
        """
        deadly = []
        for sequence in [*self.held, *self.waiting]:
            if sequence.suspicion is not None:
                self._update_suspect(sequence)
                if sequence.lost_alone and sequence.suspicion.confirmed:
                    self.remove(sequence)
                    deadly.append(sequence)
        return deadly

    def remove(self, sequence: Sequence) -> bool:
        """Removes a waiting or held sequence; False if it is neither."""
        if sequence in self.held:
            self.held.remove(sequence)
            return True
        return self.waiting.remove(sequence)

    def runnable(self) -> list[Sequence]:
        """The sequences that could run if a worker were available, here or elsewhere."""
        return [s for s in (*self.waiting, *self.held) if not s.unresolved]

    def admit(self, now: float = 0.0) -> Iterator[Admitted]:
        """Starts sequences from the head of the queue while some worker has room for it.

        Lazy: a sequence starts when it is yielded, so the caller must exhaust the iterator.
        """
        self._release_held(now)
        for sequence in self._followers.released(self.batches):
            self.waiting.unpark(sequence)
        while self.waiting and (head := self._next()) is not None:
            if self.batches and not any(batch.fits(head) for batch in self.batches):
                self.waiting.remove(head)
                yield Admitted(head, None)
                continue
            if head.lost_alone and not self._may_run(head, now):
                self.waiting.remove(head)
                self.held.append(head)
                continue
            candidates = self._candidates(head, now)
            if not candidates:
                if self._followers.follow(head, self.batches):
                    self.waiting.park(head)
                    continue
                return
            chosen = self._router.choose(head, candidates)
            self.waiting.remove(head)
            head.admitted_at = now
            yield Admitted(head, chosen.batch, chosen.batch.admit(head, chosen.cached))

    def _candidates(self, sequence: Sequence, now: float) -> list[Candidate]:
        """The batches that can admit the sequence now, after they have made room for it."""
        found = []
        for batch in self.batches:
            if sequence.suspect and not sequence.may_run_on(batch.joined, now):
                continue
            batch.make_room(sequence)
            cached = batch.room_for(sequence)
            if cached is not None:
                found.append(Candidate(batch, cached))
        return found

    def _next(self) -> Sequence | None:
        """The next sequence to admit, by the policy."""
        if self._policy.lookahead == 1 or not any(batch.open for batch in self.batches):
            return self.waiting.head()
        first = self.waiting.first(self._policy.lookahead)
        return self._policy.choose(first, self._most_cached_tokens) if first else None

    def _most_cached_tokens(self, sequence: Sequence) -> int:
        return max(batch.find_cached(sequence).num_tokens for batch in self.batches)

    def _requeue_preempted(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.num_preemptions += 1
        self.waiting.push(sequence)
        self.on_preempted(sequence)

    # Suspects

    def _release_held(self, now: float) -> None:
        """Requeues the held suspects that may run on some worker now."""
        for sequence in [held for held in self.held if self._may_run(held, now)]:
            self.held.remove(sequence)
            self.waiting.push(sequence)

    def _may_run(self, suspect: Sequence, now: float) -> bool:
        return any(suspect.may_run_on(batch.joined, now) for batch in self.batches)

    def _update_suspect(self, sequence: Sequence) -> None:
        """Sets whether the sequence may have been the cause of `max_losses` losses."""
        assert sequence.suspicion is not None
        sequence.suspect = sequence.suspicion.losses >= self._max_losses

    def _note_loss_without(self, possible_causes: Collection[Sequence]) -> None:
        """Notes the loss of a worker with several possible causes, or none.

        So workers are lost for other reasons too. Earlier losses prove nothing against the
        sequences that this worker did not run.
        """
        for sequence in self._lost_alone:
            if sequence not in possible_causes and sequence.suspicion is not None:
                sequence.suspicion.discard_trials()
        self._lost_alone = [
            s for s in self._lost_alone if s in possible_causes and not s.state.final
        ]
