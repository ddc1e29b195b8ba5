"""Blocks behind a window: when sequences release them, and the blocks that prefills may hold."""

from collections import deque

import numpy as np
import pytest

from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.block_pool import BlockPool
from pagewire.scheduler.core.kv.host_tier import HostMemory
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from pagewire.scheduler.core.routing import LeastLoaded
from pagewire.scheduler.core.sequence import Sequence, State
from support.sequences import GREEDY, admit, answer, can_admit, counted

# A token sees itself and the 5 before it: its own block of 4 tokens and two more.
WINDOW = 6


def windowed(
    num_blocks: int, budget: int = 8, window: int = WINDOW, num_slots: int = 3
) -> tuple[WorkerBatch, list[Sequence]]:
    """An empty batch, and the sequences that it preempts."""
    again: list[Sequence] = []
    limits = WorkerLimits(num_blocks, 4, num_slots, budget, memory_threshold=1.0, window=window)
    return WorkerBatch(limits, FirstComeFirstServed(), again.append), again


def of_nines(prompt: int, max_tokens: int, arrival: int) -> Sequence:
    """A prompt without a prefix in common with others."""
    return Sequence(np.full(prompt, 9, np.int32), GREEDY, max_tokens, (), arrival)


def finish_ended(batch: WorkerBatch, plan: StepPlan) -> None:
    """Answers a step, and finishes the sequences that end with it."""
    outcome = batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32))
    for slot in outcome.slots[outcome.ended].tolist():
        batch.finish(slot, State.COMPLETED)
    batch.check()


def run(batch: WorkerBatch, ahead: int = 2) -> list[StepPlan]:
    """Plans and answers until nothing is left; ended sequences are finished."""
    plans: list[StepPlan] = []
    flying: deque[StepPlan] = deque()
    while True:
        while len(flying) < ahead and (plan := batch.plan()) is not None:
            plans.append(plan)
            flying.append(plan)
        if not flying:
            return plans
        finish_ended(batch, flying.popleft())


def test_blocks_that_a_token_sees() -> None:
    limits = [WorkerLimits(9, 4, 1, 8, 1.0, window=window) for window in (0, 1, 2, 5, 6, 9, 10)]
    assert [each.reach for each in limits] == [None, 0, 1, 1, 2, 2, 3]
    assert [each.least_blocks(100) for each in limits] == [25, 1, 2, 2, 3, 3, 4]
    # Beside the window two chunks of 8 tokens, and no more than the pool.
    assert [each.most_blocks(100) for each in limits] == [25, 5, 6, 6, 7, 7, 8]
    assert [each.most_blocks(7) for each in limits] == [2] * 7


def test_a_block_is_given_up_once_the_steps_that_see_it_are_answered() -> None:
    batch, _ = windowed(20)
    running = counted(8, 20, 0)
    admit(batch, running)
    first = batch.plan()
    plans = [batch.plan() for _ in range(6)]  # decodes up to position 13, far ahead of the answers
    assert all(not plan.freed_slots for plan in plans)
    blocks = list(running.blocks)
    answer(batch, first)
    for plan in plans[:3]:
        answer(batch, plan)
        assert running.num_freed == 0, "position 11 sees the one at 6, in the block from 4 on"
    answer(batch, plans[3])
    # 12 tokens are computed: those of the block from 12 on see two blocks before it.
    assert (running.num_freed, running.blocks[0]) == (1, 0)
    assert running.held == blocks[1:]
    step = batch.plan()
    assert (step.freed_slots, step.freed_counts) == ([running.slot], [1])
    assert not batch.plan().freed_slots, "it is sent once"
    batch.check()


def test_a_sequence_longer_than_the_pool_runs_in_its_window() -> None:
    batch, again = windowed(4)  # its window fits, and nothing more
    long = counted(50, 30, 0)
    assert batch.limits.blocks_for(long.max_computed) > 4 * batch.pool.total
    assert batch.fits(long)
    assert can_admit(batch, long)
    admit(batch, long)
    run(batch)
    assert (long.state, len(long.output)) == (State.COMPLETED, 30)
    assert not again
    assert batch.pool.used == 0


def test_a_pool_without_room_for_a_window_takes_what_fits_whole() -> None:
    batch, _ = windowed(3)
    assert batch.fits(counted(5, 4, 0))
    assert not batch.fits(counted(6, 4, 1))


def test_a_prefill_holds_its_window_and_two_chunks() -> None:
    batch, _ = windowed(40, budget=8)
    running = counted(100, 2, 0)
    admit(batch, running)
    assert len(running.held) == 7
    while (plan := batch.plan()) is not None and running.state is State.PREFILL:
        assert plan.prefill_counts[0] <= 8
        assert len(running.held) <= 7
        answer(batch, plan)
    answer(batch, plan)
    assert running.num_freed == 25 - 2, "the first token to come is in the block from 100 on"


def test_an_admission_leaves_what_running_prefills_want_again() -> None:
    """Otherwise the long one would preempt the short one, which is admitted again, forever."""
    admission = Admission(FirstComeFirstServed(), LeastLoaded())
    batch = admission.add_worker(WorkerLimits(4, 4, 2, 5, memory_threshold=1.0, window=WINDOW))
    long, short = counted(26, 1, 0), of_nines(1, 5, 1)
    for each in (long, short):
        admission.waiting.push(each)
    for _ in range(40):
        list(admission.admit())
        if (plan := batch.plan()) is None:
            break
        finish_ended(batch, plan)
    assert (long.state, short.state) == (State.COMPLETED, State.COMPLETED)
    assert admission.preemptions == 0


def test_prefills_that_hold_all_blocks_do_not_stop_each_other() -> None:
    batch, again = windowed(5, budget=4)
    first, second = counted(60, 2, 0), counted(60, 2, 1)
    second.prompt[16:] = 9
    admit(batch, first)
    for _ in range(4):
        answer(batch, batch.plan())
    assert not can_admit(batch, second)
    admit(batch, second)  # it shares the window of the first, which then gets no block
    assert second.held[:2] == first.held
    for _ in range(2):
        answer(batch, batch.plan())
    assert (len(first.held), len(second.held), batch.pool.available) == (2, 2, 0)
    run(batch)
    assert first.state is State.COMPLETED
    assert again == [second]


def test_a_text_goes_on_where_the_blocks_of_its_window_are_cached() -> None:
    pool = BlockPool(10, 1, reach=2)
    data = np.arange(6, dtype=np.int32).tobytes()
    blocks = pool.allocate(6)
    pool.cache(blocks, data)
    pool.release(blocks[:3])  # as the window passes
    pool.release(blocks[3:])
    assert pool.match(data) == [0, 0, 0, 0, *blocks[4:]]
    assert pool.match(data[: 4 * 3]) == [0, *blocks[1:3]]
    taken = pool.allocate(pool.free + 3)  # evicts the first three, which were released first
    assert {*taken} >= {*blocks[:3]}
    assert pool.match(data) == [0, 0, 0, 0, *blocks[4:]]
    assert pool.match(data[: 4 * 4]) == [], "the third block is gone, and the fourth is not enough"
    assert pool.match(data[: 4 * 5]) == [0, 0, 0, *blocks[3:5]]
    pool.check()


def test_host_memory_beside_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks in host memory beside a window"):
        BlockPool(10, 1, HostMemory(3), reach=2)


def test_the_end_of_a_text_is_found_after_its_beginning_was_given_up() -> None:
    batch, _ = windowed(8)
    first = counted(40, 9, 0)
    admit(batch, first)
    run(batch)
    known = [*first.prompt.tolist(), *first.output]
    batch.pool.release(batch.pool.allocate(4))  # evicts what was cached longest ago
    again = Sequence(np.array([*known, 1], np.int32), first.sampling, 2, (), 1)
    cached = batch.find_cached(again)
    assert cached.num_tokens == 48, "the last token of the output has no KV"
    assert (cached.num_freed, len(cached.held)) == (10, 2)
    admit(batch, again)
    assert again.blocks[:10] == [0] * 10
    assert run(batch)[0].prefill_counts == [2]
    assert batch.pool.used == 0


def test_the_copy_of_a_last_block_is_not_offered_behind_a_block_given_up() -> None:
    """Its number would then stand for another block."""
    batch, _ = windowed(30, window=2)
    first = counted(6, 20, 0)
    admit(batch, first)
    follower = counted(7, 2, 1)
    answer(batch, batch.plan())
    while not first.num_freed:
        assert batch.find_cached(follower).partial is not None
        answer(batch, batch.plan())
    assert batch.find_cached(follower).partial is None
    batch.check()


def test_a_sequence_that_leaves_sends_no_more_of_its_blocks() -> None:
    batch, _ = windowed(20)
    running, other = counted(30, 20, 0), of_nines(3, 9, 1)
    admit(batch, running)
    admit(batch, other)
    for _ in range(3):
        answer(batch, batch.plan())
    assert running.num_freed > 0
    batch.finish(running.slot, State.CANCELLED)
    plan = batch.plan()
    assert plan.freed_slots == []
    batch.check()


def test_a_failed_step_gives_up_no_blocks() -> None:
    batch, _ = windowed(20, budget=32)
    running = counted(30, 20, 0)
    admit(batch, running)
    plan = batch.plan()
    batch.slot_failed(running.slot)
    batch.commit(plan.number, np.array([-1], np.int32))
    assert running.num_freed == 0, "the worker scrubs the blocks that it knows of"
    batch.finish(running.slot, State.PENDING, sound=False)
    assert (batch.pool.used, batch.pool.idle) == (0, 0)
    batch.check()
