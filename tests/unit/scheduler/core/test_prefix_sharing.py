"""Shared, copied and kept blocks, and what happens to them when a sequence fails."""

import numpy as np
import pytest

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from pagewire.scheduler.core.sequence import Sequence, State
from support.sequences import admit, answer, can_admit, counted, new_batch, sequence


def test_a_fully_cached_prompt_still_computes_a_token() -> None:
    batch = new_batch(num_blocks=30)
    for arrival in range(2):
        running = sequence(8, 1, arrival)
        admit(batch, running)
        plan = batch.plan()
        answer(batch, plan)
        batch.finish(running.slot, State.COMPLETED)
    assert running.cached_tokens == 4
    assert plan.prefill_counts == [4]


def test_blocks_of_a_failed_sequence_are_not_cached() -> None:
    batch = new_batch(num_blocks=30)
    admit(batch, sequence(8, 9))
    plan = batch.plan()
    batch.commit(plan.number, np.array([-1], np.int32))
    batch.finish(0, State.PENDING, sound=False)
    assert (batch.pool.used, batch.pool.idle) == (0, 0)


def test_a_block_is_shared_as_soon_as_its_step_is_planned() -> None:
    batch = new_batch(num_blocks=30, num_slots=4)
    leader, follower, salted = sequence(13, 2), sequence(13, 2, 1), sequence(13, 2, 2)
    salted.cache_salt = "another tenant"
    admit(batch, leader)
    assert not can_admit(batch, follower), "it would compute what the leader is about to"
    assert can_admit(batch, salted)
    first = batch.plan()
    assert first.prefill_counts == [13]
    assert can_admit(batch, follower)
    admit(batch, follower)
    admit(batch, salted)
    second = batch.plan()
    assert second.prefill_counts == [1, 13]
    assert follower.blocks[:3] == leader.blocks[:3]
    assert not {*salted.blocks} & {*leader.blocks}
    assert (follower.cached_tokens, salted.cached_tokens) == (12, 0)
    batch.check()


def test_a_sequence_waits_for_a_prefix_only_until_it_is_planned() -> None:
    batch = new_batch(num_blocks=40, num_slots=4, budget=12)
    admit(batch, sequence(20, 2))
    follower = sequence(9, 2, 1)
    assert not can_admit(batch, follower)
    batch.plan()
    assert can_admit(batch, follower), "the leader goes on, but with nothing that is shared"


@pytest.mark.parametrize("aborted", [False, True])
def test_sequences_that_share_a_failed_prefill_run_again(aborted: bool) -> None:
    again: list[Sequence] = []
    limits = WorkerLimits(40, 4, 4, 8, memory_threshold=1.0)
    batch = WorkerBatch(limits, FirstComeFirstServed(), again.append)
    leader, follower, other = sequence(11, 5), sequence(9, 5, 1), sequence(3, 5, 2)
    admit(batch, leader)
    first = batch.plan()
    admit(batch, follower)
    admit(batch, other)
    second = batch.plan()
    assert second.prefill_slots == [leader.slot, follower.slot, other.slot]
    failed = leader.slot
    if aborted:
        batch.finish(leader.slot, State.CANCELLED)
    batch.slot_failed(failed)
    batch.commit(first.number, np.zeros(0, np.int32))
    if not aborted:
        batch.finish(leader.slot, State.PENDING, sound=False)
    batch.check()
    assert again == [follower]
    assert follower.state is State.PENDING
    assert other.state is State.DECODE
    assert batch.pool.match(follower.known_bytes(8)) == []
    outcome = batch.commit(second.number, np.full(len(second.rows), 5, np.int32))
    assert outcome.slots.tolist() == [other.slot]
    batch.check()


def test_proven_blocks_stay_cached_when_another_sequence_fails() -> None:
    batch = new_batch(num_blocks=40, num_slots=4, budget=8)
    leader, follower = sequence(30, 5), sequence(9, 5, 1)
    admit(batch, leader)
    batch.commit(batch.plan().number, np.zeros(0, np.int32))
    admit(batch, follower)
    batch.plan()  # the leader's budget has precedence
    while follower.state is State.PREFILL:
        batch.plan()
    for plan in list(batch.in_flight):
        tokens = np.full(len(plan.rows), 5, np.int32)
        tokens[plan.rows == leader.slot] = -1
        batch.commit(plan.number, tokens)
    batch.finish(leader.slot, State.PENDING, sound=False)
    assert follower.state is State.DECODE
    assert batch.pool.match(leader.known_bytes(28)) == follower.blocks[:2]


def test_caching_can_be_switched_off() -> None:
    limits = WorkerLimits(30, 4, 2, 64, memory_threshold=1.0, prefix_caching=False)
    batch = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    admit(batch, sequence(8, 1))
    answer(batch, batch.plan())
    batch.finish(0, State.COMPLETED)
    assert batch.pool.idle == 0


def test_siblings_share_full_blocks_and_copy_the_last() -> None:
    """16 choices of a prompt of 1000 tokens share 62 blocks and hold one more each."""
    limits = WorkerLimits(600, 16, 16, 2000, memory_threshold=1.0)
    batch = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    leader = counted(1000, 8, 0)
    siblings = [counted(1000, 8, arrival) for arrival in range(1, 16)]
    admit(batch, leader)
    assert not can_admit(batch, siblings[0]), "its prompt is about to be computed"
    first = batch.plan()
    for sibling in siblings:
        assert can_admit(batch, sibling)
        admit(batch, sibling)
    assert batch.pool.used == 62 + 16
    batch.check()
    plan = batch.plan()
    assert plan.prefill_counts == [1] * 15, "one token each is computed"
    assert {s.copied_block for s in plan.starts} == {leader.blocks[62]}
    assert len({s.blocks[62] for s in [leader, *siblings]}) == 16
    batch.check()
    # The leader's block holds 8 prompt tokens and the first drawn one, a sibling's the prompt's.
    assert batch.unused_places == 15 * 8 + 7
    for slot in range(16):
        batch.finish(slot, State.COMPLETED)
    answer(batch, first)
    answer(batch, plan)
    assert batch.pool.used == 0
    batch.check()


def test_a_copied_block_is_held_until_its_step_is_planned() -> None:
    batch = new_batch(num_slots=3, num_blocks=4, budget=8)
    admit(batch, counted(3, 2, 0))
    answer(batch, batch.plan())
    sibling = counted(3, 2, 1)
    admit(batch, sibling)
    source = sibling.copied_block
    batch.finish(0, State.CANCELLED)
    assert batch.pool.references(source) == 1
    batch.check()
    plan = batch.plan()
    assert [s.copied_block for s in plan.starts] == [source]
    assert batch.pool.references(source) == 0
    third = counted(3, 2, 2)
    admit(batch, third)
    assert third.copied_block == sibling.blocks[0]
    batch.finish(third.slot, State.CANCELLED)
    batch.check()
    assert batch.pool.references(sibling.blocks[0]) == 1


def test_copies_of_a_failed_sequence_and_copies_of_those_run_again() -> None:
    preempted: list[Sequence] = []
    limits = WorkerLimits(20, 4, 4, 64, memory_threshold=1.0)
    batch = WorkerBatch(limits, FirstComeFirstServed(), preempted.append)
    leader, copier, third = counted(6, 9, 0), counted(6, 9, 1), counted(7, 9, 2)
    plans = []
    for one in (leader, copier, third):
        admit(batch, one)
        plans.append(batch.plan())
    assert copier.copied_block == leader.blocks[1]
    assert third.copied_block in (leader.blocks[1], copier.blocks[1])
    batch.slot_failed(leader.slot)
    batch.commit(plans[0].number, np.array([-1], np.int32))
    batch.finish(leader.slot, State.PENDING, sound=False)
    assert sorted(s.arrival for s in preempted) == [1, 2]
    batch.check()
    for plan in plans[1:]:
        assert answer(batch, plan) == []
    assert batch.idle
    admit(batch, leader)
    assert (leader.num_computed, leader.copied_block) == (0, 0), "nothing sound is cached"


def test_a_copy_of_a_proven_block_stays() -> None:
    preempted: list[Sequence] = []
    limits = WorkerLimits(20, 4, 4, 64, memory_threshold=1.0)
    batch = WorkerBatch(limits, FirstComeFirstServed(), preempted.append)
    leader, copier = counted(6, 9, 0), counted(6, 9, 1)
    admit(batch, leader)
    plans = [batch.plan()]
    admit(batch, copier)
    plans.append(batch.plan())
    answer(batch, plans[0])
    batch.slot_failed(leader.slot)
    batch.commit(plans[1].number, np.array([-1, 5], np.int32))
    batch.finish(leader.slot, State.PENDING, sound=False)
    assert preempted == []
    assert batch.slots.live[copier.slot]


def test_without_a_prefix_cache_nothing_is_copied() -> None:
    limits = WorkerLimits(20, 4, 2, 64, memory_threshold=1.0, prefix_caching=False)
    batch = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    admit(batch, counted(6, 4, 0))
    answer(batch, batch.plan())
    sibling = counted(6, 4, 1)
    admit(batch, sibling)
    assert (sibling.num_computed, sibling.copied_block) == (0, 0)


def test_a_sequence_that_continues_a_kept_one_computes_one_token() -> None:
    batch = new_batch(num_slots=4, num_blocks=9)
    admit(batch, counted(6, 1, 0))
    outcome = batch.commit(batch.plan().number, np.array([5], np.int32))
    assert outcome.ended == [0]
    parent = batch.finish(0, State.COMPLETED, keep=True)
    assert batch.pool.used == 2
    children = [counted(6, 2, arrival) for arrival in (1, 2)]
    for child, token in zip(children, (5, 8), strict=True):
        child.output.append(token)
        admit(batch, child)
    batch.check()
    plan = batch.plan()
    assert plan.prefill_counts == [1, 1]
    assert [s.num_computed for s in plan.starts] == [6, 6]
    assert batch.pool.used == 4, "a full block of all, a last one of each"
    batch.forget(parent.arrival)
    assert batch.pool.used == 3
    batch.forget(parent.arrival)
    batch.check()


def test_kept_blocks_are_released_for_a_sequence_that_needs_them() -> None:
    batch = new_batch(num_slots=2, num_blocks=4)
    admit(batch, counted(6, 1, 0))
    batch.commit(batch.plan().number, np.array([5], np.int32))
    batch.finish(0, State.COMPLETED, keep=True)
    large = sequence(11, 2, 1)
    assert not can_admit(batch, large)
    batch.make_room(large)
    assert can_admit(batch, large)
    admit(batch, large)
    assert batch.pool.used == 3
    batch.check()


def test_kept_blocks_are_released_when_a_running_sequence_grows() -> None:
    preempted: list[Sequence] = []
    limits = WorkerLimits(4, 4, 2, 64, memory_threshold=1.0)
    batch = WorkerBatch(limits, FirstComeFirstServed(), preempted.append)
    running = sequence(4, 9, 0)
    admit(batch, running)
    admit(batch, counted(6, 1, 1))
    plan = batch.plan()
    batch.commit(plan.number, np.array([5, 5], np.int32))
    batch.finish(1, State.COMPLETED, keep=True)
    for _ in range(6):
        answer(batch, batch.plan())
    assert preempted == []
    assert len(running.blocks) == 3
