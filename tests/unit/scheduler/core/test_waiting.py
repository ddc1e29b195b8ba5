"""The waiting queue: its order, and removed sequences."""

import numpy as np

from pagewire.scheduler.core.queue.policy import Priority
from pagewire.scheduler.core.queue.waiting import WaitingQueue
from support.sequences import sequence


def test_the_queue_follows_its_policy_and_drops_removed_sequences() -> None:
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


def test_predictions_count_among_the_tokens_that_wait() -> None:
    queue, waiting = WaitingQueue(Priority()), sequence(3, 1)
    waiting.prediction = np.zeros(500, np.int32)
    queue.push(waiting)
    assert queue.tokens == 503
    queue.remove(waiting)
    assert queue.tokens == 0


def test_the_queue_frees_sequences_removed_from_behind_its_head() -> None:
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


def test_a_parked_sequence_waits_but_is_not_in_the_order() -> None:
    queue = WaitingQueue(Priority())
    first, second = sequence(1, 1, 0), sequence(2, 1, 1)
    queue.push(first)
    queue.park(first)
    assert queue.head() is None
    queue.push(second)
    assert queue.head() is second
    assert queue.first(3) == [second]
    assert (len(queue), queue.tokens, list(queue)) == (2, 3, [first, second])
    queue.unpark(first)
    assert queue.first(3) == [first, second]
    queue.park(first)
    queue.unpark(first)
    queue.unpark(first)
    assert queue.first(3) == [first, second], "it is there once"
    assert queue.remove(first)
    assert queue.first(3) == [second]


def test_a_parked_sequence_may_leave_the_queue() -> None:
    queue = WaitingQueue(Priority())
    parked = sequence(1, 1, 0)
    queue.push(parked)
    queue.park(parked)
    assert queue.remove(parked)
    queue.unpark(parked)
    assert (len(queue), queue.tokens, queue.head()) == (0, 0, None)


def test_the_queue_frees_entries_of_parked_sequences_behind_its_head() -> None:
    queue = WaitingQueue(Priority())
    head, last = sequence(1, 1, 0, -5), sequence(1, 1, 1, 9)
    queue.push(head)
    queue.push(last)
    for _ in range(1000):
        queue.park(last)
        queue.unpark(last)
    assert sum(map(len, queue._groups.values())) <= 20
    assert queue.first(3) == [head, last]
