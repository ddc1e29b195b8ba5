"""Suspects: a sequence that crashes workers is found, and no other."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from pagewire.scheduler.core.routing import LeastLoaded
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.suspicion import SURVIVAL_SECONDS, Loss, Suspicion
from support.sequences import GREEDY, admit

LIMITS = WorkerLimits(33, 4, 8, 16, memory_threshold=1.0)
RUN_AHEAD = 3
MAX_LOSSES = 2


def sequence(arrival: int, prompt: int = 6, max_tokens: int = 20) -> Sequence:
    return Sequence(np.full(prompt, arrival, np.int32), GREEDY, max_tokens, (-5,), arrival)


class Fleet:
    """Workers that compute one step at a time, and are lost when `deadly(batch, plan)` is true.

    Where `returns` is true, only the connection was lost: the same process returns.
    """

    def __init__(self, workers: int, deadly: Callable[[WorkerBatch, StepPlan], bool]) -> None:
        self.admission = Admission(FirstComeFirstServed(), LeastLoaded(), MAX_LOSSES)
        self.now = 0.0
        for _ in range(workers):
            self.admission.add_worker(LIMITS, self.now)
        self.deadly = deadly
        self.returns: Callable[[], bool] = lambda: False
        self.losses = 0
        self.failed: list[Sequence] = []
        # How many sequences were in the steps of each lost worker.
        self.beside: list[int] = []

    def run(self, sequences: list[Sequence], most: int = 20000) -> None:
        """Runs until all have ended; a round lasts 10 ms."""
        for waiting in sequences:
            self.admission.waiting.push(waiting)
        for _ in range(most):
            if all(s.state.final or s in self.failed for s in sequences):
                return
            self.now += 0.01
            list(self.admission.admit(self.now))
            for batch in list(self.admission.batches):
                self._advance(batch)
        raise AssertionError("some sequences have not ended")

    def lose(self, batch: WorkerBatch) -> None:
        """A worker is lost; another process takes its place."""
        self.losses += 1
        self.beside.append(len(batch.slots_in_flight()))
        loss = Loss("process")
        self.admission.lose_worker(batch, loss, self.now)
        self.admission.add_worker(LIMITS, self.now)
        loss.resolve("process" if self.returns() else "another")
        self.failed += self.admission.remove_deadly()

    def _advance(self, batch: WorkerBatch) -> None:
        while len(batch.in_flight) < RUN_AHEAD and batch.plan() is not None:
            pass
        batch.check()
        if not batch.in_flight:
            return
        plan = batch.in_flight[0]
        if self.deadly(batch, plan):
            self.lose(batch)
            return
        outcome = batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32))
        for slot in outcome.slots[outcome.ended].tolist():
            batch.finish(slot, State.COMPLETED)


def computed(batch: WorkerBatch, slots: list[int]) -> list[Sequence]:
    return [s for slot in slots if (s := batch.slots.sequences[slot]) is not None]


def deadly_in_prefill(bad: Sequence) -> Callable[[WorkerBatch, StepPlan], bool]:
    return lambda batch, plan: bad in computed(batch, plan.prefill_slots)


def deadly_in_decode(bad: Sequence) -> Callable[[WorkerBatch, StepPlan], bool]:
    return lambda batch, plan: bad in computed(batch, plan.decode_slots.tolist())


def deadly_from_token(bad: Sequence, index: int) -> Callable[[WorkerBatch, StepPlan], bool]:
    def deadly(batch: WorkerBatch, plan: StepPlan) -> bool:
        rows = computed(batch, plan.rows.tolist())
        return bad in rows and bool(batch.slots.received[bad.slot] >= index)

    return deadly


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "deadly",
    [deadly_in_prefill, deadly_in_decode, lambda bad: deadly_from_token(bad, 9)],
    ids=["prefill", "decode", "later"],
)
def test_a_deadly_sequence_alone_fails_after_four_workers(deadly: Callable, workers: int) -> None:
    bad, others = sequence(4), [sequence(n, 3 + n % 7) for n in range(12) if n != 4]
    fleet = Fleet(workers, deadly(bad))
    fleet.run([bad, *others])
    assert fleet.failed == [bad]
    assert fleet.losses == 4  # twice among others, then twice alone
    assert fleet.beside[2:] == [1, 1]
    assert fleet.now > SURVIVAL_SECONDS, "some worker has lived without it in between"
    assert all(len(s.output) == 20 for s in others)


def test_a_deadly_sequence_that_is_always_alone_takes_four_workers_too() -> None:
    bad = sequence(0)
    fleet = Fleet(2, deadly_in_prefill(bad))
    fleet.run([bad])
    assert fleet.failed == [bad]
    assert fleet.losses == 4


def test_a_sequence_alone_on_lost_workers_by_chance_completes() -> None:
    """A machine with workers is lost, and one request runs."""
    only = sequence(0)
    fleet = Fleet(4, lambda _worker, _plan: fleet.losses < 3)
    fleet.run([only])
    assert fleet.failed == []
    assert len(only.output) == 20
    assert not only.suspect


def test_a_suspect_alone_twice_goes_on_if_a_worker_is_lost_without_it_meanwhile() -> None:
    only = sequence(0)
    fleet = Fleet(1, lambda batch, plan: only in computed(batch, plan.rows.tolist()))
    for expected in (1, 2, 3):
        fleet.admission.waiting.push(only) if expected == 1 else None
        list(fleet.admission.admit(fleet.now))
        [batch] = fleet.admission.batches
        assert batch.plan() is not None
        fleet.lose(batch)
        assert fleet.losses == expected
    assert only.lost_alone
    fleet.now += SURVIVAL_SECONDS / 2
    assert list(fleet.admission.admit(fleet.now)) == [], "a worker must live without it first"
    fleet.lose(fleet.admission.batches[0])  # idle
    assert not only.lost_alone
    fleet.now += 0.1
    list(fleet.admission.admit(fleet.now))
    [batch] = fleet.admission.batches
    assert batch.plan() is not None
    fleet.lose(batch)
    assert fleet.failed == [], "trials are counted from zero"
    assert only.lost_alone


def test_broken_connections_make_no_suspects() -> None:
    """The same process returns each time; until then the loss is unexplained, and the request is
    held."""
    only, other = sequence(0), sequence(1)
    fleet = Fleet(2, lambda _worker, _plan: fleet.losses < 30)
    fleet.returns = lambda: True
    fleet.run([only, other])
    assert fleet.losses == 30
    assert fleet.failed == []
    assert not only.suspect


def test_a_suspect_waits_until_a_loss_is_explained() -> None:
    suspect = sequence(0)
    fleet = Fleet(2, lambda _worker, _plan: False)
    for _ in range(MAX_LOSSES):
        suspect.note_loss(Loss(ended=True))
    suspect.suspect = True
    fleet.admission.waiting.push(suspect)
    [admitted] = fleet.admission.admit(fleet.now)
    assert admitted.batch.plan() is not None
    loss = Loss("process")
    fleet.admission.lose_worker(admitted.batch, loss, fleet.now)
    fleet.now += 100
    assert fleet.admission.runnable() == [], "it does not go elsewhere either"
    assert list(fleet.admission.admit(fleet.now)) == []
    assert fleet.admission.held == [suspect]
    assert fleet.admission.runnable() == [], "no other scheduler may run it either"
    loss.resolve("process")
    assert fleet.admission.remove_deadly() == []
    assert [each.sequence for each in fleet.admission.admit(fleet.now)] == [suspect]


def test_a_worker_that_was_to_leave_is_no_loss() -> None:
    running = sequence(0)
    fleet = Fleet(1, lambda _worker, _plan: False)
    fleet.admission.waiting.push(running)
    list(fleet.admission.admit())
    [batch] = fleet.admission.batches
    batch.plan()
    assert fleet.admission.lose_worker(batch, None, 1.0) == [running]
    assert running.suspicion is None


def test_losses_at_another_scheduler_count() -> None:
    bad = sequence(0)
    fleet = Fleet(1, deadly_in_prefill(bad))
    fleet.admission.set_suspicion(bad, Suspicion.from_report(3, [0.1], fleet.now))
    assert bad.suspect
    assert bad.lost_alone
    fleet.run([bad])
    assert fleet.failed == [bad]
    assert fleet.losses == 1
    assert fleet.now > SURVIVAL_SECONDS


def test_two_deadly_sequences_are_told_apart() -> None:
    first, second = sequence(1), sequence(5)
    others = [sequence(n) for n in (0, 2, 3, 4, 6)]
    in_first, in_second = deadly_in_prefill(first), deadly_in_decode(second)
    fleet = Fleet(2, lambda batch, plan: in_first(batch, plan) or in_second(batch, plan))
    fleet.run([first, second, *others])
    assert set(fleet.failed) == {first, second}
    assert fleet.losses <= 10
    assert all(len(s.output) == 20 for s in others)


@settings(max_examples=60, deadline=None)
@given(
    bad_numbers=st.sets(st.integers(0, 9), max_size=2),
    workers=st.integers(1, 3),
    kills=st.lists(st.integers(1, 120), max_size=25),
    cuts=st.sets(st.integers(0, 24)),
)
def test_random_losses_fail_the_deadly_sequences_and_no_others(
    bad_numbers: set[int], workers: int, kills: list[int], cuts: set[int]
) -> None:
    """Workers are also lost at random, after a number of steps; some only lose a connection."""
    sequences = [sequence(n, 2 + n % 5, 12) for n in range(10)]
    left = list(kills)

    def deadly(batch: WorkerBatch, plan: StepPlan) -> bool:
        rows = {*computed(batch, plan.rows.tolist()), *computed(batch, plan.prefill_slots)}
        if any(sequences[number] in rows for number in bad_numbers):
            return True
        if left:
            left[0] -= 1
            if left[0] <= 0:
                left.pop(0)
                # Never while a suspect is alone: two such losses in a row would be evidence.
                return batch.isolated is None
        return False

    fleet = Fleet(workers, deadly)
    fleet.returns = lambda: fleet.losses in cuts
    fleet.run(sequences)
    assert {sequences.index(failed) for failed in fleet.failed} == bad_numbers
    # Four each; a loss beside others discards the trials of each deadly sequence.
    bad, by_chance = len(bad_numbers), len(kills) + len(cuts)
    assert fleet.losses <= 4 * bad * bad + (1 + 2 * bad) * by_chance


@pytest.mark.parametrize("seed", range(8))
def test_rare_losses_fail_no_sequence(seed: int) -> None:
    rng = random.Random(seed)
    steps_left = rng.randint(1, 60)

    def deadly(_worker: WorkerBatch, _plan: StepPlan) -> bool:
        nonlocal steps_left
        steps_left = steps_left - 1 if steps_left else rng.randint(60, 150)
        return steps_left == 0

    fleet = Fleet(3, deadly)
    sequences = [sequence(n, rng.randint(1, 12), rng.randint(1, 40)) for n in range(100)]
    fleet.run(sequences)
    assert fleet.losses > 2
    assert fleet.failed == []
    assert all(len(s.output) == s.max_tokens for s in sequences)


def test_a_sequence_in_no_step_is_not_suspected() -> None:
    fleet = Fleet(1, lambda _worker, _plan: False)
    batch = fleet.admission.batches[0]
    computing, queued = sequence(0, 16), sequence(1, 6)  # the first fills the step's budget
    for waiting in (computing, queued):
        fleet.admission.waiting.push(waiting)
    list(fleet.admission.admit())
    batch.plan()
    for admitted in list(fleet.admission.admit()):
        assert admitted.batch is batch
    fleet.admission.lose_worker(batch, Loss(), 0.0)
    assert computing.suspicion is not None
    assert (computing.suspicion.losses, queued.suspicion) == (1, None)


def test_others_go_on_once_a_suspect_has_recovered() -> None:
    fleet = Fleet(1, lambda _worker, _plan: False)
    suspect, other = sequence(0), sequence(1)
    suspect.record_failure()
    suspect.suspect = True
    batch = fleet.admission.batches[0]
    alone: list[bool] = []
    fleet.deadly = lambda _worker, _plan: bool(alone.append(len(batch.slots_in_flight()) == 1))
    fleet.run([other, suspect])
    assert not suspect.suspect
    assert sum(alone) < len(alone)  # they have been together, too
    assert alone[0]
    assert len(other.output) == len(suspect.output) == 20


def test_a_suspect_that_moved_to_a_larger_worker_stops_no_others() -> None:
    small = WorkerBatch(WorkerLimits(33, 4, 1, 16, 1.0), FirstComeFirstServed(), lambda _: None)
    large = WorkerBatch(LIMITS, FirstComeFirstServed(), lambda _: None)
    suspect = sequence(0)
    suspect.suspect = True
    admit(small, suspect)
    small.finish(suspect.slot, State.PENDING)
    admit(large, sequence(1))
    admit(large, suspect)
    assert suspect.slot >= small.limits.num_slots
    assert small.plan() is None
    admit(small, sequence(2))
    assert small.plan() is not None


def test_a_preempted_suspect_stops_no_others() -> None:
    """The pool is too small for both, and the policy preempts the suspect."""
    limits = WorkerLimits(5, 4, 2, 16, memory_threshold=1.0, prefix_caching=False)
    admission = Admission(FirstComeFirstServed(), LeastLoaded())
    batch = admission.add_worker(limits)
    first, suspect = sequence(0, 7, 8), sequence(1, 7, 8)
    suspect.record_failure()
    suspect.suspect = True
    for waiting in (first, suspect):
        admission.waiting.push(waiting)
    while not first.state.final:
        list(admission.admit())
        plan = batch.plan()
        assert plan is not None, "no sequence goes on"
        outcome = batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32))
        for slot in outcome.slots[outcome.ended].tolist():
            batch.finish(slot, State.COMPLETED)
    assert admission.preemptions > 0
