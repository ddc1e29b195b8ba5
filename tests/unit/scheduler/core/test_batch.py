"""Single cases of a batch; the random walk is in tests/property."""

import numpy as np
import pytest

from pagewire.packing import unpack
from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from pagewire.scheduler.core.sequence import Sequence, State
from pagewire.scheduler.workers.step_codec import encode_step
from support.sequences import EOS, admit, answer, can_admit, new_batch, sequence


@pytest.mark.parametrize("max_tokens", [10, 2])  # the second step is the last one of its own
def test_a_slot_is_free_again_only_when_steps_that_name_it_are_answered(max_tokens: int) -> None:
    batch = new_batch(num_slots=1)
    admit(batch, sequence(3, max_tokens))
    first, second = batch.plan(), batch.plan()
    assert first is not None
    assert second is not None
    batch.finish(0, State.CANCELLED)
    assert not can_admit(batch, sequence(1, 1, arrival=1))
    assert answer(batch, first) == []
    assert batch.pool.used == 1
    assert answer(batch, second) == []
    assert batch.idle
    assert batch.pool.used == 0


def test_tokens_after_a_stop_are_dropped() -> None:
    batch = new_batch()
    running = sequence(3, 10)
    admit(batch, running)
    plans = [batch.plan() for _ in range(3)]
    outcome = batch.commit(1, np.array([EOS], np.int32))
    assert outcome.stopped == [0]
    batch.finish(0, State.COMPLETED)
    assert answer(batch, plans[1]) == []
    assert answer(batch, plans[2]) == []
    assert list(running.output) == [EOS]


def test_a_token_stops_those_sequences_that_have_it_for_a_stop_id() -> None:
    batch = new_batch(num_slots=4)
    both, one, none = sequence(3, 10, 0), sequence(3, 10, 1), sequence(3, 10, 2)
    both.stop_ids, none.stop_ids = (9, EOS), (-1,)
    for running in (both, one, none):
        admit(batch, running)
    plans = [batch.plan() for _ in range(3)]
    outcome = batch.commit(1, np.array([5, 9, EOS], np.int32))
    assert outcome.stopped == []
    assert batch.commit(2, np.array([9, EOS, 9], np.int32)).stopped == [0, 1]
    for slot in (0, 1):
        batch.finish(slot, State.COMPLETED)
    assert plans[2] is not None
    assert batch.commit(3, np.array([9, EOS, EOS], np.int32)).stopped == []


def test_outputs_grow_with_their_sequences() -> None:
    batch = new_batch(num_blocks=400)
    long, late = sequence(3, 1000, 0), sequence(3, 1000, 1)
    admit(batch, long)
    for token in range(600):
        plan = batch.plan()
        assert plan is not None
        if token == 250:
            late.output.extend(range(254))
            admit(batch, late)
        batch.commit(plan.number, np.full(len(plan.rows), token, np.int32))
    batch.finish(long.slot, State.COMPLETED)
    assert list(long.output) == list(range(600))
    batch.finish(late.slot, State.COMPLETED)
    assert list(late.output)[:254] == list(range(254))
    assert list(late.output)[254:] == list(range(600 - len(late.output) + 254, 600))


def test_the_last_token_by_length_needs_no_further_step() -> None:
    batch = new_batch()
    admit(batch, sequence(3, 2))
    first, second = batch.plan(), batch.plan()
    assert batch.plan() is None
    assert batch.commit(first.number, np.array([5], np.int32)).ended == []
    assert batch.commit(second.number, np.array([5], np.int32)).ended == [0]


def test_a_sequence_larger_than_the_pool_is_never_admitted() -> None:
    batch = new_batch(num_blocks=4)
    assert batch.fits(sequence(4, 9))
    assert not batch.fits(sequence(4, 10))
    assert not can_admit(batch, sequence(4, 10))


def test_the_decode_list_is_sent_only_when_it_has_changed() -> None:
    batch = new_batch(num_blocks=30)
    admit(batch, sequence(3, 10))
    changed = [batch.plan().decode_changed for _ in range(4)]
    assert changed == [False, True, False, False]


def test_the_latest_arrival_is_preempted() -> None:
    preempted: list[Sequence] = []
    limits = WorkerLimits(5, 4, 2, 64, memory_threshold=1.0)
    batch = WorkerBatch(limits, FirstComeFirstServed(), preempted.append)
    early, late = sequence(7, 9), sequence(7, 9, arrival=1)
    admit(batch, early)
    admit(batch, late)
    for _ in range(4):
        answer(batch, batch.plan())
    assert preempted == [late]
    assert late.state is State.PENDING
    assert len(late.output) > 0
    assert early.slot == 0


def test_an_answer_of_the_wrong_size_or_number_is_refused() -> None:
    batch = new_batch()
    admit(batch, sequence(3, 10))
    plan = batch.plan()
    with pytest.raises(ValueError, match="not the oldest"):
        batch.commit(plan.number + 1, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="1 rows, its answer 2"):
        batch.commit(plan.number, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="slot 2 has failed, and there are 2"):
        batch.slot_failed(2)


def test_groups_are_sent_when_they_change_to_a_worker_that_uses_them() -> None:
    limits = WorkerLimits(40, 4, 4, 64, memory_threshold=1.0, prefix_groups=True)
    batch = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    first, second = sequence(18, 20), sequence(19, 20, 1)
    admit(batch, first)
    batch.plan()
    admit(batch, second)
    plans = [batch.plan() for _ in range(4)]
    assert [plan.groups_changed for plan in plans] == [False, True, False, False]
    [group] = plans[-1].groups
    assert (group.blocks, group.slots) == (4, (first.slot, second.slot))
    assert encode_step(plans[0]).HasField("group_sizes") is False
    step = encode_step(plans[1])
    arrays = [unpack(a).tolist() for a in (step.group_sizes, step.group_blocks, step.group_slots)]
    assert arrays == [[2], [4], [first.slot, second.slot]]
    batch.finish(first.slot, State.CANCELLED)
    last = batch.plan()
    assert (last.groups_changed, last.groups) == (True, [])
    assert encode_step(last).HasField("group_sizes")


def test_tokens_of_predictions_are_counted_up_to_the_end_of_an_output() -> None:
    limits = WorkerLimits(20, 4, 2, 64, memory_threshold=1.0, max_drafts=3)
    batch = WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)
    both = [sequence(3, 12, 0), sequence(3, 12, 1)]
    for running in both:
        admit(batch, running)
    rows = np.arange(2)
    while not batch.in_flight or not len(batch.in_flight[-1].decode_slots):
        batch.plan()
    while len(batch.in_flight) > 1:
        plan = batch.in_flight[0]
        batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32))
        batch.settle()
    # Each row has three drafts of a prediction: two are right in the first row, all in the second.
    batch.commit(batch.in_flight[0].number, np.array([5, 5], np.int32))
    batch.note_rejected(rows[:1], np.array([1], np.int32))
    batch.note_accepted(rows)
    outcome = batch.commit_more(rows, np.array([5, EOS], np.int32))
    batch.note_accepted(rows)
    assert outcome.stopped == [1]
    batch.finish(int(outcome.slots[1]), State.COMPLETED)
    batch.commit_more(rows, np.array([5, 5], np.int32))
    batch.note_accepted(rows[1:])  # it has ended before this token
    batch.commit_more(rows[1:], np.array([5], np.int32))
    batch.settle()
    assert (both[1].accepted_prediction, both[1].rejected_prediction) == (2, 0)
    # It continues after a preemption, and the counts are kept.
    batch.finish(both[0].slot, State.PENDING)
    assert (both[0].accepted_prediction, both[0].rejected_prediction) == (2, 1)
    while batch.in_flight:
        plan = batch.in_flight[0]
        batch.commit(plan.number, np.full(len(plan.rows), 5, np.int32))
        batch.settle()
    admit(batch, both[0])
    batch.finish(both[0].slot, State.COMPLETED)
    assert (both[0].accepted_prediction, both[0].rejected_prediction) == (2, 1)


def test_a_worker_that_speculates_gets_salt_and_prediction() -> None:
    batch = new_batch()
    predicted = sequence(3, 10)
    predicted.cache_salt, predicted.prediction = "a tenant", np.array([4, 5], np.int32)
    admit(batch, predicted)
    plan = batch.plan()
    assert plan is not None
    (start,) = encode_step(plan, drafts=True).starts
    assert (start.cache_salt, unpack(start.prediction).tolist()) == ("a tenant", [4, 5])
    (start,) = encode_step(plan).starts
    assert (start.cache_salt, start.prediction) == ("", b"")
