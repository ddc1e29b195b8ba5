"""Single cases of the scheduling core; the random walk is in tests/property."""

import numpy as np
import pytest

from pagewire.packing import unpack
from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.prefill_queue import MAX_PIGGYBACKED_STEPS
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.kv.block_pool import BlockPool, OutOfBlocksError
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed, Priority
from pagewire.scheduler.core.queue.waiting import WaitingQueue
from pagewire.scheduler.core.sequence import RECOVERED_AFTER, Sequence, State
from pagewire.scheduler.workers.step_codec import encode_step
from support.sequences import GREEDY, admit, can_admit

EOS = 7


def sequence(prompt: int, max_tokens: int, arrival: int = 0, priority: int = 0) -> Sequence:
    tokens = np.full(prompt, 3, dtype=np.int32)
    return Sequence(tokens, GREEDY, max_tokens, (EOS,), arrival, priority)


def batch(num_blocks: int = 9, num_slots: int = 2, budget: int = 64) -> WorkerBatch:
    limits = WorkerLimits(num_blocks, 4, num_slots, budget, memory_threshold=1.0)
    return WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)


def answer(worker: WorkerBatch, plan: StepPlan, token: int = 5) -> list[int]:
    outcome = worker.commit(plan.number, np.full(len(plan.rows), token, np.int32))
    return outcome.slots.tolist()


def test_the_pool_never_hands_out_the_scratch_block() -> None:
    pool = BlockPool(4, 2)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    with pytest.raises(OutOfBlocksError, match="1 blocks wanted, 0 available"):
        pool.allocate(1)


def test_a_block_released_twice_is_an_error() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released but not held"):
        pool.release(blocks[:1])
    pool.check()


@pytest.mark.parametrize("max_tokens", [10, 2])  # the second step is the last one of its own
def test_a_slot_is_free_again_only_when_steps_that_name_it_are_answered(max_tokens: int) -> None:
    worker = batch(num_slots=1)
    admit(worker, sequence(3, max_tokens))
    first, second = worker.plan(), worker.plan()
    assert first is not None
    assert second is not None
    worker.finish(0, State.CANCELLED)
    assert not can_admit(worker, sequence(1, 1, arrival=1))
    assert answer(worker, first) == []
    assert worker.pool.used == 1
    assert answer(worker, second) == []
    assert worker.idle
    assert worker.pool.used == 0


def test_tokens_after_a_stop_are_dropped() -> None:
    worker = batch()
    running = sequence(3, 10)
    admit(worker, running)
    plans = [worker.plan() for _ in range(3)]
    outcome = worker.commit(1, np.array([EOS], np.int32))
    assert outcome.stopped == [0]
    worker.finish(0, State.COMPLETED)
    assert answer(worker, plans[1]) == []
    assert answer(worker, plans[2]) == []
    assert list(running.output) == [EOS]


def test_a_token_stops_those_sequences_that_have_it_for_a_stop_id() -> None:
    worker = batch(num_slots=4)
    both, one, none = sequence(3, 10, 0), sequence(3, 10, 1), sequence(3, 10, 2)
    both.stop_ids, none.stop_ids = (9, EOS), (-1,)
    for running in (both, one, none):
        admit(worker, running)
    plans = [worker.plan() for _ in range(3)]
    outcome = worker.commit(1, np.array([5, 9, EOS], np.int32))
    assert outcome.stopped == []
    assert worker.commit(2, np.array([9, EOS, 9], np.int32)).stopped == [0, 1]
    for slot in (0, 1):
        worker.finish(slot, State.COMPLETED)
    assert plans[2] is not None
    assert worker.commit(3, np.array([9, EOS, EOS], np.int32)).stopped == []


def test_outputs_grow_with_their_sequences() -> None:
    worker = batch(num_blocks=400)
    long, late = sequence(3, 1000, 0), sequence(3, 1000, 1)
    admit(worker, long)
    for token in range(600):
        plan = worker.plan()
        assert plan is not None
        if token == 250:
            late.output.extend(range(254))
            admit(worker, late)
        worker.commit(plan.number, np.full(len(plan.rows), token, np.int32))
    worker.finish(long.slot, State.COMPLETED)
    assert list(long.output) == list(range(600))
    worker.finish(late.slot, State.COMPLETED)
    assert list(late.output)[:254] == list(range(254))
    assert list(late.output)[254:] == list(range(600 - len(late.output) + 254, 600))


def test_the_last_token_by_length_needs_no_further_step() -> None:
    worker = batch()
    admit(worker, sequence(3, 2))
    first, second = worker.plan(), worker.plan()
    assert worker.plan() is None
    assert worker.commit(first.number, np.array([5], np.int32)).ended == []
    assert worker.commit(second.number, np.array([5], np.int32)).ended == [0]


def test_a_sequence_larger_than_the_pool_is_never_admitted() -> None:
    worker = batch(num_blocks=4)
    assert worker.fits(sequence(4, 9))
    assert not worker.fits(sequence(4, 10))
    assert not can_admit(worker, sequence(4, 10))


def test_chunks_keep_to_the_budget_beside_decodes() -> None:
    worker = batch(num_blocks=30, budget=8)
    admit(worker, sequence(3, 10))
    worker.plan()
    admit(worker, counted(20, 10, 1))
    chunks = []
    while not chunks or sum(chunks) < 20:
        plan = worker.plan()
        assert plan.decode_slots.tolist() == [0]
        assert plan.num_tokens <= 8
        chunks += plan.prefill_counts
    assert chunks == [7, 7, 6]


def test_the_decode_list_travels_when_it_changes_only() -> None:
    worker = batch(num_blocks=30)
    admit(worker, sequence(3, 10))
    changed = [worker.plan().decode_changed for _ in range(4)]
    assert changed == [False, True, False, False]


def test_the_latest_arrival_gives_way() -> None:
    preempted: list[Sequence] = []
    limits = WorkerLimits(5, 4, 2, 64, memory_threshold=1.0)
    worker = WorkerBatch(limits, FirstComeFirstServed(), preempted.append)
    early, late = sequence(7, 9), sequence(7, 9, arrival=1)
    admit(worker, early)
    admit(worker, late)
    for _ in range(4):
        answer(worker, worker.plan())
    assert preempted == [late]
    assert late.state is State.PENDING
    assert len(late.output) > 0
    assert early.slot == 0


def test_an_answer_of_the_wrong_size_or_number_is_refused() -> None:
    worker = batch()
    admit(worker, sequence(3, 10))
    plan = worker.plan()
    with pytest.raises(ValueError, match="not the oldest"):
        worker.commit(plan.number + 1, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="1 rows, its answer 2"):
        worker.commit(plan.number, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="slot 2 has failed, and there are 2"):
        worker.slot_failed(2)


def test_the_queue_follows_its_policy_and_forgets_what_left() -> None:
    queue = WaitingQueue(Priority())
    low, high, other = sequence(1, 1, 0, 5), sequence(2, 1, 1, -5), sequence(3, 1, 2, 5)
    for waiting in (low, high, other):
        queue.push(waiting)
    assert queue.tokens == 6
    assert queue.remove(low)
    assert not queue.remove(low)
    assert queue.head() is high
    queue.remove(high)
    assert queue.head() is other
    assert (len(queue), queue.tokens) == (1, 3)


def test_the_queue_lets_go_of_what_left_from_behind_its_head() -> None:
    queue = WaitingQueue(Priority())
    head, last = sequence(1, 1, 0, -5), sequence(1, 1, 1, 9)
    queue.push(head)
    queue.push(last)
    for arrival in range(2, 1000):
        impatient = sequence(1, 1, arrival, 5)
        queue.push(impatient)
        assert queue.remove(impatient)
    assert sum(map(len, queue._groups.values())) <= 20
    assert queue.first(3) == [head, last]


def test_failures_count_anew_after_recovery() -> None:
    failing = sequence(1, 10)
    assert [failing.record_failure() for _ in range(2)] == [1, 2]
    failing.output.append(5)  # as the prefill alone gives one
    assert failing.record_failure() == 3
    failing.output.extend([5] * RECOVERED_AFTER)
    assert failing.record_failure() == 1


def data(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def test_a_prefix_is_found_by_its_tokens_only() -> None:
    pool = BlockPool(10, 2)
    blocks = pool.allocate(3)
    pool.cache(blocks, data(1, 2, 3, 4, 5, 6))
    assert pool.match(data(1, 2, 3, 4, 9, 9)) == blocks[:2]
    assert pool.match(data(3, 4, 5, 6)) == []
    assert pool.match(data(1, 2, 3)) == blocks[:1]
    pool.check()


def test_a_match_inside_a_run_ends_at_the_first_difference() -> None:
    """What hangs below a run belongs to texts with all of the run, not with its beginning."""
    pool = BlockPool(10, 2)
    run = pool.allocate(3)
    pool.cache(run, data(1, 1, 2, 2, 3, 3))
    tail = pool.allocate(1)
    pool.cache([*run, *tail], data(1, 1, 2, 2, 3, 3, 4, 4))
    assert pool.match(data(1, 1, 4, 4)) == run[:1]
    assert pool.match(data(1, 1, 2, 2, 4, 4)) == run[:2]


def test_idle_blocks_are_evicted_from_the_least_recently_used_leaf() -> None:
    pool = BlockPool(6, 2)
    old, new = pool.allocate(2), pool.allocate(2)
    pool.cache(old, data(1, 1, 2, 2))
    pool.cache(new, data(3, 3, 4, 4))
    pool.release(old)
    pool.release(new)
    assert (pool.free, pool.idle, pool.available, pool.used) == (1, 4, 5, 0)
    pool.allocate(2)
    assert pool.match(data(1, 1, 2, 2)) == old[:1]
    assert pool.match(data(3, 3, 4, 4)) == new
    pool.check()


def test_what_is_held_is_not_evicted() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.cache(blocks, data(1, 1, 2, 2))
    pool.acquire(blocks)
    pool.release(blocks)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    pool.release(blocks)
    assert len(pool.allocate(3)) == 3
    assert pool.match(data(1, 1)) == []
    pool.check()


def test_a_duplicate_keeps_its_own_block() -> None:
    pool = BlockPool(9, 2)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.cache(first, data(1, 1, 2, 2))
    pool.cache(second, data(1, 1, 2, 2, 3, 3))
    pool.release(first)
    pool.release(second)
    assert (pool.used, pool.idle) == (0, 2)
    assert pool.match(data(1, 1, 2, 2, 3, 3)) == first
    pool.check()


def test_a_fully_cached_prompt_still_computes_a_token() -> None:
    worker = batch(num_blocks=30)
    for arrival in range(2):
        running = sequence(8, 1, arrival)
        admit(worker, running)
        plan = worker.plan()
        answer(worker, plan)
        worker.finish(running.slot, State.COMPLETED)
    assert running.cached_tokens == 4
    assert plan.prefill_counts == [4]


def test_blocks_of_a_failed_sequence_are_not_cached() -> None:
    worker = batch(num_blocks=30)
    admit(worker, sequence(8, 9))
    plan = worker.plan()
    worker.commit(plan.number, np.array([-1], np.int32))
    worker.finish(0, State.PENDING, sound=False)
    assert (worker.pool.used, worker.pool.idle) == (0, 0)


def test_a_block_is_shared_from_the_plan_on_in_which_it_is_computed() -> None:
    worker = batch(num_blocks=30, num_slots=4)
    leader, follower, salted = sequence(13, 2), sequence(13, 2, 1), sequence(13, 2, 2)
    salted.cache_salt = "another tenant"
    admit(worker, leader)
    assert not can_admit(worker, follower), "it would compute what the leader is about to"
    assert can_admit(worker, salted)
    first = worker.plan()
    assert first.prefill_counts == [13]
    assert can_admit(worker, follower)
    admit(worker, follower)
    admit(worker, salted)
    second = worker.plan()
    assert second.prefill_counts == [1, 13]
    assert follower.blocks[:3] == leader.blocks[:3]
    assert not {*salted.blocks} & {*leader.blocks}
    assert (follower.cached_tokens, salted.cached_tokens) == (12, 0)
    worker.check()


def test_a_prefix_is_waited_for_only_until_it_is_planned() -> None:
    worker = batch(num_blocks=40, num_slots=4, budget=12)
    admit(worker, sequence(20, 2))
    follower = sequence(9, 2, 1)
    assert not can_admit(worker, follower)
    worker.plan()
    assert can_admit(worker, follower), "the leader goes on, but with nothing that is shared"


@pytest.mark.parametrize("aborted", [False, True])
def test_when_a_prefill_fails_those_who_share_it_run_again(aborted: bool) -> None:
    again: list[Sequence] = []
    limits = WorkerLimits(40, 4, 4, 8, memory_threshold=1.0)
    worker = WorkerBatch(limits, FirstComeFirstServed(), again.append)
    leader, follower, other = sequence(11, 5), sequence(9, 5, 1), sequence(3, 5, 2)
    admit(worker, leader)
    first = worker.plan()
    admit(worker, follower)
    admit(worker, other)
    second = worker.plan()
    assert second.prefill_slots == [leader.slot, follower.slot, other.slot]
    failed = leader.slot
    if aborted:
        worker.finish(leader.slot, State.CANCELLED)
    worker.slot_failed(failed)
    worker.commit(first.number, np.zeros(0, np.int32))
    if not aborted:
        worker.finish(leader.slot, State.PENDING, sound=False)
    worker.check()
    assert again == [follower]
    assert follower.state is State.PENDING
    assert other.state is State.DECODE
    assert worker.pool.match(follower.known_bytes(8)) == []
    outcome = worker.commit(second.number, np.full(len(second.rows), 5, np.int32))
    assert outcome.slots.tolist() == [other.slot]
    worker.check()


def test_what_a_token_was_sampled_from_outlives_the_failure_of_another() -> None:
    worker = batch(num_blocks=40, num_slots=4, budget=8)
    leader, follower = sequence(30, 5), sequence(9, 5, 1)
    admit(worker, leader)
    worker.commit(worker.plan().number, np.zeros(0, np.int32))
    admit(worker, follower)
    worker.plan()  # the leader's budget comes first
    while follower.state is State.PREFILL:
        worker.plan()
    for plan in list(worker.in_flight):
        tokens = np.full(len(plan.rows), 5, np.int32)
        tokens[plan.rows == leader.slot] = -1
        worker.commit(plan.number, tokens)
    worker.finish(leader.slot, State.PENDING, sound=False)
    assert follower.state is State.DECODE
    assert worker.pool.match(leader.known_bytes(28)) == follower.blocks[:2]


def test_groups_travel_when_they_change_and_the_worker_wants_them() -> None:
    limits = WorkerLimits(40, 4, 4, 64, memory_threshold=1.0, prefix_groups=True)
    worker = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    first, second = sequence(18, 20), sequence(19, 20, 1)
    admit(worker, first)
    worker.plan()
    admit(worker, second)
    plans = [worker.plan() for _ in range(4)]
    assert [plan.groups_changed for plan in plans] == [False, True, False, False]
    [group] = plans[-1].groups
    assert (group.blocks, group.slots) == (4, (first.slot, second.slot))
    assert encode_step(plans[0]).HasField("group_sizes") is False
    step = encode_step(plans[1])
    arrays = [unpack(a).tolist() for a in (step.group_sizes, step.group_blocks, step.group_slots)]
    assert arrays == [[2], [4], [first.slot, second.slot]]
    worker.finish(first.slot, State.CANCELLED)
    last = worker.plan()
    assert (last.groups_changed, last.groups) == (True, [])
    assert encode_step(last).HasField("group_sizes")


def test_caching_can_be_switched_off() -> None:
    limits = WorkerLimits(30, 4, 2, 64, memory_threshold=1.0, prefix_caching=False)
    worker = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    admit(worker, sequence(8, 1))
    answer(worker, worker.plan())
    worker.finish(0, State.COMPLETED)
    assert worker.pool.idle == 0


def counted(tokens: int, max_tokens: int, arrival: int) -> Sequence:
    prompt = np.arange(tokens, dtype=np.int32)
    return Sequence(prompt, GREEDY, max_tokens, (EOS,), arrival)


def test_siblings_share_full_blocks_and_copy_the_last() -> None:
    """16 choices of a prompt of 1000 tokens that come together hold 62 blocks, and one each."""
    limits = WorkerLimits(600, 16, 16, 2000, memory_threshold=1.0)
    worker = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    leader = counted(1000, 8, 0)
    siblings = [counted(1000, 8, arrival) for arrival in range(1, 16)]
    admit(worker, leader)
    assert not can_admit(worker, siblings[0]), "its prompt is about to be computed"
    first = worker.plan()
    for sibling in siblings:
        assert can_admit(worker, sibling)
        admit(worker, sibling)
    assert worker.pool.used == 62 + 16
    worker.check()
    plan = worker.plan()
    assert plan.prefill_counts == [1] * 15, "one token each is computed"
    assert {s.copied_block for s in plan.starts} == {leader.blocks[62]}
    assert len({s.blocks[62] for s in [leader, *siblings]}) == 16
    worker.check()
    # The leader's block holds 8 prompt tokens and the first drawn one, a sibling's the prompt's.
    assert worker.unused_places == 15 * 8 + 7
    for slot in range(16):
        worker.finish(slot, State.COMPLETED)
    answer(worker, first)
    answer(worker, plan)
    assert worker.pool.used == 0
    worker.check()


def test_a_copied_block_is_held_until_its_step_is_planned() -> None:
    worker = batch(num_slots=3, num_blocks=4, budget=8)
    admit(worker, counted(3, 2, 0))
    answer(worker, worker.plan())
    sibling = counted(3, 2, 1)
    admit(worker, sibling)
    source = sibling.copied_block
    worker.finish(0, State.CANCELLED)
    assert worker.pool.references(source) == 1
    worker.check()
    plan = worker.plan()
    assert [s.copied_block for s in plan.starts] == [source]
    assert worker.pool.references(source) == 0
    third = counted(3, 2, 2)
    admit(worker, third)
    assert third.copied_block == sibling.blocks[0]
    worker.finish(third.slot, State.CANCELLED)
    worker.check()
    assert worker.pool.references(sibling.blocks[0]) == 1


def test_who_copied_from_a_failed_sequence_runs_again_and_who_copied_from_them() -> None:
    preempted: list[Sequence] = []
    limits = WorkerLimits(20, 4, 4, 64, memory_threshold=1.0)
    worker = WorkerBatch(limits, FirstComeFirstServed(), preempted.append)
    leader, copier, third = counted(6, 9, 0), counted(6, 9, 1), counted(7, 9, 2)
    plans = []
    for one in (leader, copier, third):
        admit(worker, one)
        plans.append(worker.plan())
    assert copier.copied_block == leader.blocks[1]
    assert third.copied_block in (leader.blocks[1], copier.blocks[1])
    worker.slot_failed(leader.slot)
    worker.commit(plans[0].number, np.array([-1], np.int32))
    worker.finish(leader.slot, State.PENDING, sound=False)
    assert sorted(s.arrival for s in preempted) == [1, 2]
    worker.check()
    for plan in plans[1:]:
        assert answer(worker, plan) == []
    assert worker.idle
    admit(worker, leader)
    assert (leader.num_computed, leader.copied_block) == (0, 0), "nothing sound is cached"


def test_who_copied_what_was_proven_stays() -> None:
    preempted: list[Sequence] = []
    limits = WorkerLimits(20, 4, 4, 64, memory_threshold=1.0)
    worker = WorkerBatch(limits, FirstComeFirstServed(), preempted.append)
    leader, copier = counted(6, 9, 0), counted(6, 9, 1)
    admit(worker, leader)
    plans = [worker.plan()]
    admit(worker, copier)
    plans.append(worker.plan())
    answer(worker, plans[0])
    worker.slot_failed(leader.slot)
    worker.commit(plans[1].number, np.array([-1, 5], np.int32))
    worker.finish(leader.slot, State.PENDING, sound=False)
    assert preempted == []
    assert worker.slots.live[copier.slot]


def test_without_a_prefix_cache_nothing_is_copied() -> None:
    limits = WorkerLimits(20, 4, 2, 64, memory_threshold=1.0, prefix_caching=False)
    worker = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    admit(worker, counted(6, 4, 0))
    answer(worker, worker.plan())
    sibling = counted(6, 4, 1)
    admit(worker, sibling)
    assert (sibling.num_computed, sibling.copied_block) == (0, 0)


def test_whoever_goes_on_from_a_kept_sequence_computes_one_token() -> None:
    worker = batch(num_slots=4, num_blocks=9)
    admit(worker, counted(6, 1, 0))
    outcome = worker.commit(worker.plan().number, np.array([5], np.int32))
    assert outcome.ended == [0]
    parent = worker.finish(0, State.COMPLETED, keep=True)
    assert worker.pool.used == 2
    children = [counted(6, 2, arrival) for arrival in (1, 2)]
    for child, token in zip(children, (5, 8), strict=True):
        child.output.append(token)
        admit(worker, child)
    worker.check()
    plan = worker.plan()
    assert plan.prefill_counts == [1, 1]
    assert [s.num_computed for s in plan.starts] == [6, 6]
    assert worker.pool.used == 4, "a full block of all, a last one of each"
    worker.forget(parent.arrival)
    assert worker.pool.used == 3
    worker.forget(parent.arrival)
    worker.check()


def test_what_was_kept_gives_way_to_whoever_needs_the_memory() -> None:
    worker = batch(num_slots=2, num_blocks=4)
    admit(worker, counted(6, 1, 0))
    worker.commit(worker.plan().number, np.array([5], np.int32))
    worker.finish(0, State.COMPLETED, keep=True)
    large = sequence(11, 2, 1)
    assert not can_admit(worker, large)
    worker.make_room(large)
    assert can_admit(worker, large)
    admit(worker, large)
    assert worker.pool.used == 3
    worker.check()


def test_a_running_sequence_grows_into_what_was_kept() -> None:
    preempted: list[Sequence] = []
    limits = WorkerLimits(4, 4, 2, 64, memory_threshold=1.0)
    worker = WorkerBatch(limits, FirstComeFirstServed(), preempted.append)
    running = sequence(4, 9, 0)
    admit(worker, running)
    admit(worker, counted(6, 1, 1))
    plan = worker.plan()
    worker.commit(plan.number, np.array([5, 5], np.int32))
    worker.finish(1, State.COMPLETED, keep=True)
    for _ in range(6):
        answer(worker, worker.plan())
    assert preempted == []
    assert len(running.blocks) == 3


def chunks_beside(num_decodes: int, *prompts: int) -> list[int]:
    """Prompt tokens of each step in which prompts are computed beside decodes, with
    `piggyback_tokens` of 16."""
    limits = WorkerLimits(800, 16, 16, 2000, 1.0, prefix_caching=False, piggyback_tokens=16)
    worker = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    for arrival in range(num_decodes):
        admit(worker, counted(4, 500, arrival))
    if num_decodes:
        answer(worker, worker.plan())
    for arrival, prompt in enumerate(prompts, num_decodes):
        admit(worker, counted(prompt, 100, arrival))
    chunks = []
    while sum(chunks) < sum(prompts):
        plan = worker.plan()
        chunks.append(sum(plan.prefill_counts))
        answer(worker, plan)
        worker.check()
    return chunks


def test_prompts_are_piggybacked_on_few_decodes() -> None:
    assert chunks_beside(4, 30) == [12, 12, 6]
    assert chunks_beside(8, 20) == [8, 8, 4]


def test_a_prompt_that_begins_to_decode_leaves_less_room_for_the_next() -> None:
    assert chunks_beside(4, 12, 22) == [12, 11, 11]


def test_a_prompt_is_piggybacked_for_a_limited_number_of_steps() -> None:
    steps = MAX_PIGGYBACKED_STEPS
    assert chunks_beside(4, 1000) == [1000 - steps * 12] + [12] * steps


def test_prompts_are_computed_at_once_beside_many_decodes_or_none() -> None:
    assert chunks_beside(9, 1000) == [1000]
    assert chunks_beside(0, 1000) == [1000]


def test_prompts_are_computed_at_once_while_more_is_queued_than_a_step_holds() -> None:
    assert chunks_beside(4, 1999, 10) == [1996, 12, 1]
