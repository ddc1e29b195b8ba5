"""Long prompts beside decodes and other prompts, on a worker whose step time depends on tokens."""

import numpy as np
import pytest

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.long_prompts import FULL_STEPS, PARTS_OF_STEP
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from pagewire.scheduler.core.sequence import Sequence, State
from support.sequences import admit, can_admit, counted

BUDGET = 64
CHUNK = BUDGET // PARTS_OF_STEP
LONG = 10 * BUDGET
SHARE = 0.4
RUN_AHEAD = 2


class Worker:
    """Runs steps two ahead; a step takes 10 us, and 5 us for each prompt token."""

    def __init__(self, share: float = SHARE, waiting: tuple[Sequence, ...] = ()) -> None:
        limits = WorkerLimits(
            2000, 4, 32, BUDGET, 1.0, prefix_caching=False, long_prompt_share=share
        )
        self.batch = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None, waiting)
        self.arrivals = 0
        self.knows_time = True
        # For each answered step: microseconds, decode rows, slots and tokens of prompts.
        self.steps: list[tuple[int, int, dict[int, int]]] = []

    def arrive(self, prompt: int, max_tokens: int = 1000) -> Sequence:
        sequence = counted(prompt, max_tokens, self.arrivals)
        self.arrivals += 1
        admit(self.batch, sequence)
        return sequence

    def step(self) -> None:
        while len(self.batch.in_flight) < RUN_AHEAD and self.batch.plan() is not None:
            pass
        plan = self.batch.in_flight[0]
        duration = 10 + 5 * sum(plan.prefill_counts)
        prompts = dict(zip(plan.prefill_slots, plan.prefill_counts, strict=True))
        self.steps.append((duration, len(plan.decode_slots), prompts))
        tokens = np.full(len(plan.rows), 5, np.int32)
        outcome = self.batch.commit(plan.number, tokens, duration if self.knows_time else 0)
        for row in outcome.ended:
            self.batch.finish(int(outcome.slots[row]), State.COMPLETED)
        self.batch.check()

    def decode(self, number: int) -> None:
        """Lets a number of short sequences decode."""
        for _ in range(number):
            self.arrive(4)
        while not self.steps or self.steps[-1][1] < number:
            self.step()
        self.steps.clear()

    def compute(self, sequence: Sequence) -> None:
        """Runs until the prompt is computed."""
        while sequence.state is State.PREFILL:
            self.step()
        for _ in range(RUN_AHEAD):
            self.step()

    def chunks(self) -> list[int]:
        """Prompt tokens of each step that had some."""
        return [sum(prompts.values()) for *_, prompts in self.steps if prompts]

    def share_of(self, sequence: Sequence) -> float:
        """Computes the prompt; returns the share of time of its steps."""
        slot = sequence.slot
        self.compute(sequence)
        chunks = [duration for duration, _, prompts in self.steps if slot in prompts]
        return sum(chunks) / sum(duration for duration, *_ in self.steps)


def test_a_long_prompt_gets_its_share_of_the_time() -> None:
    worker = Worker()
    worker.decode(8)
    long = worker.arrive(LONG)
    assert worker.share_of(long) == pytest.approx(SHARE, abs=0.05)
    assert max(max(prompts.values(), default=0) for *_, prompts in worker.steps) == CHUNK


def test_one_decode_and_one_long_prompt_share_the_time_equally() -> None:
    worker = Worker()
    worker.decode(1)
    assert worker.share_of(worker.arrive(LONG)) == pytest.approx(0.5, abs=0.05)


def waiting(number: int) -> tuple[Sequence, ...]:
    return tuple(counted(4, 1, 100 + i) for i in range(number))


def test_waiting_requests_hasten_long_prompts() -> None:
    worker = Worker(waiting=waiting(3))
    worker.decode(4)
    assert worker.share_of(worker.arrive(LONG)) == pytest.approx(0.5, abs=0.05)


def test_decodes_that_are_outnumbered_wait_for_each_chunk() -> None:
    worker = Worker(waiting=waiting(4))
    worker.decode(4)
    worker.compute(worker.arrive(LONG))
    chunks = worker.chunks()
    assert chunks[:-1] == [BUDGET - 4] * (len(chunks) - 1)


def test_without_decodes_long_prompts_take_whole_steps() -> None:
    worker = Worker()
    worker.compute(worker.arrive(LONG))
    assert worker.chunks() == [BUDGET] * (LONG // BUDGET)


def test_with_a_share_of_one_decodes_wait_for_each_chunk() -> None:
    worker = Worker(share=1.0)
    worker.decode(8)
    worker.compute(worker.arrive(LONG))
    chunks = worker.chunks()
    assert chunks[:-1] == [BUDGET - 8] * (len(chunks) - 1)


def test_prompts_of_a_few_steps_are_not_long() -> None:
    worker = Worker()
    worker.decode(8)
    worker.compute(worker.arrive(FULL_STEPS * BUDGET))
    assert worker.chunks() == [BUDGET - 8] * FULL_STEPS + [FULL_STEPS * 8]


def test_others_are_admitted_and_computed_beside_a_long_prompt() -> None:
    worker = Worker()
    long = worker.arrive(LONG)
    worker.step()
    assert can_admit(worker.batch, counted(30, 5, 50))
    short = worker.arrive(30, 5)
    worker.compute(short)
    beside = [prompts for *_, prompts in worker.steps if prompts]
    # Two steps were planned before it arrived.
    assert beside[:3] == [{0: BUDGET}, {0: BUDGET}, {long.slot: CHUNK, short.slot: 30}]


def test_outnumbered_decodes_leave_room_for_others_beside_a_long_prompt() -> None:
    """Otherwise the prompts that wait behind it would outnumber decodes until it ends."""
    worker = Worker(waiting=waiting(9))
    worker.decode(4)
    worker.arrive(LONG)
    worker.step()
    short = worker.arrive(30, 5)
    begin = len(worker.steps)
    worker.compute(short)
    assert len(worker.steps) - begin < 8


def test_long_prompts_are_admitted_until_their_chunks_fill_a_step() -> None:
    worker = Worker()
    for _ in range(PARTS_OF_STEP):
        assert can_admit(worker.batch, counted(4, 5, 50))
        worker.arrive(LONG)
    assert not can_admit(worker.batch, counted(4, 5, 50))


def test_long_prompts_are_computed_one_after_the_other() -> None:
    worker = Worker()
    worker.decode(8)
    first, second = worker.arrive(LONG), worker.arrive(LONG)
    slots = [first.slot, second.slot]
    worker.compute(second)
    order = [slot for *_, prompts in worker.steps for slot in prompts]
    assert order == sorted(order)
    assert set(order) == set(slots)


def test_a_long_prompt_that_leaves_owes_nothing() -> None:
    worker = Worker()
    worker.decode(8)
    first = worker.arrive(LONG)
    slot = first.slot
    while not any(slot in prompts for *_, prompts in worker.steps):
        worker.step()
    worker.batch.finish(slot, State.CANCELLED)
    worker.batch.check()
    assert worker.share_of(worker.arrive(LONG)) == pytest.approx(SHARE, abs=0.05)


def test_steps_of_unknown_time_pay_what_is_owed() -> None:
    worker = Worker()
    worker.decode(8)
    long = worker.arrive(LONG)
    while not worker.chunks():
        worker.step()
    worker.knows_time = False
    begin = len(worker.steps)
    worker.compute(long)
    assert len(worker.steps) - begin < 4 * LONG // CHUNK
