"""From the queue to the workers, driven with integers."""

from dataclasses import replace

import numpy as np

from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from pagewire.scheduler.core.routing import LeastLoaded
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.suspicion import Loss
from support.sequences import GREEDY


def limits(num_blocks: int = 33, num_slots: int = 4) -> WorkerLimits:
    return WorkerLimits(num_blocks, 4, num_slots, 64, memory_threshold=1.0)


def sequence(prompt: int, arrival: int, max_tokens: int = 8) -> Sequence:
    """Prompts of different arrivals share nothing: none waits for the prefill of another."""
    return Sequence(np.full(prompt, 10 + arrival, np.int32), GREEDY, max_tokens, (7,), arrival)


def admission(*workers: WorkerLimits) -> Admission:
    made = Admission(FirstComeFirstServed(), LeastLoaded())
    for batch in workers:
        made.add_worker(batch)
    return made


def test_nothing_leaves_the_queue_before_a_worker_is_there() -> None:
    made = admission()
    made.waiting.push(sequence(5, 0))
    assert list(made.admit()) == []
    made.add_worker(limits())
    assert [a.sequence.arrival for a in made.admit()] == [0]


def test_admissions_spread_and_end_when_all_slots_are_taken() -> None:
    made = admission(limits(num_slots=1), limits(num_slots=2))
    for arrival in range(5):
        made.waiting.push(sequence(5, arrival))
    admitted = list(made.admit())
    assert [a.sequence.arrival for a in admitted] == [0, 1, 2]
    assert {id(a.batch) for a in admitted} == {id(w) for w in made.batches}
    assert len(made.waiting) == 2


def test_a_sequence_too_large_for_every_worker_is_admitted_to_none() -> None:
    made = admission(limits(num_blocks=4), limits(num_blocks=6))
    large, small = sequence(30, 0), sequence(4, 1)
    made.waiting.push(large)
    made.waiting.push(small)
    first, second = made.admit()
    assert (first.sequence, first.batch) == (large, None)
    assert (second.sequence, second.batch) == (small, made.batches[0])


def test_a_sequence_too_long_for_one_worker_goes_to_another() -> None:
    made = admission(replace(limits(), max_model_len=37), replace(limits(), max_model_len=38))
    for arrival in range(3):
        made.waiting.push(sequence(30, arrival))
    assert [a.batch for a in made.admit()] == [made.batches[1]] * 3


def test_sequences_of_a_lost_worker_go_on_at_another() -> None:
    made = admission(limits())
    lost = made.batches[0]
    running = sequence(5, 0)
    made.waiting.push(running)
    list(made.admit())
    plan = lost.plan()
    lost.commit(plan.number, np.array([5], np.int32))
    assert made.lose_worker(lost, Loss(), 0.0) == [running]
    assert running.state is State.PENDING
    other = made.add_worker(limits())
    assert [a.batch for a in made.admit()] == [other]
    assert list(running.output) == [5]


def test_preemptions_are_counted_and_queued_again() -> None:
    made = admission(limits(num_blocks=5, num_slots=2))
    for arrival in range(2):
        made.waiting.push(sequence(7, arrival, 9))
    list(made.admit())
    batch = made.batches[0]
    for _ in range(4):
        plan = batch.plan()
        batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32))
    assert made.preemptions == 1
    assert made.waiting.head().arrival == 1


class LongPromptAhead:
    """A worker that computes a prompt of ten steps beside decodes, and sequences behind it."""

    def __init__(self) -> None:
        self.made = admission(
            WorkerLimits(2000, 4, 8, 64, memory_threshold=1.0, long_prompt_share=0.4)
        )
        self.arrivals = 0
        for _ in range(4):
            self.arrive([1 + self.arrivals], 1000)
        self.step()
        self.leader = self.arrive(list(range(640)), 8)
        self.step()
        assert self.leader.state is State.PREFILL

    def arrive(self, prompt: list[int], max_tokens: int = 8) -> Sequence:
        tokens = np.array(prompt, np.int32)
        arrived = Sequence(tokens, GREEDY, max_tokens, (7,), self.arrivals)
        self.arrivals += 1
        self.made.waiting.push(arrived)
        return arrived

    def step(self) -> None:
        list(self.made.admit())
        for batch in self.made.batches:
            if (plan := batch.plan()) is not None:
                batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32), 1)
            batch.check()

    def computed(self) -> int:
        found = self.made.batches[0].num_prefilled(self.leader)
        return self.leader.num_known if found is None else found


def test_only_those_that_begin_as_a_long_prompt_wait_for_it() -> None:
    ahead = LongPromptAhead()
    follower = ahead.arrive([*range(201), *[9] * 30])
    other = ahead.arrive([8] * 5)
    ahead.step()
    assert ahead.made.waiting.head() is None
    assert len(ahead.made.waiting) == 1
    assert (follower.state, other.slot >= 0) == (State.PENDING, True)
    while follower.state is State.PENDING:
        computed = ahead.computed()
        ahead.step()
        assert (follower.slot >= 0) is (computed >= 200)
    assert ahead.leader.state is State.PREFILL
    assert follower.num_computed == 200


def test_followers_go_on_when_their_long_prompt_leaves() -> None:
    ahead = LongPromptAhead()
    followers = [ahead.arrive([*range(600), *[9] * count]) for count in range(3)]
    ahead.step()
    assert ahead.made.waiting.head() is None
    assert ahead.made.remove(followers[1]), "it may leave meanwhile"
    ahead.made.batches[0].finish(ahead.leader.slot, State.COMPLETED)
    ahead.step()
    assert followers[0].slot >= 0, "the next one to compute it"
    assert followers[1].state is State.PENDING
    ahead.step()
    assert followers[2].state is State.PENDING, "it follows the other one"


def test_followers_go_elsewhere_when_the_worker_of_their_long_prompt_is_lost() -> None:
    ahead = LongPromptAhead()
    follower = ahead.arrive([*range(600), 9])
    ahead.step()
    [batch] = ahead.made.batches
    ahead.made.lose_worker(batch, Loss(), 0.0)
    assert ahead.made.waiting.head() is not None
    assert follower in ahead.made.runnable()
    ahead.made.add_worker(replace(batch.limits, num_slots=16))
    for _ in range(200):
        ahead.step()
    assert len(ahead.made.waiting) == 0
