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
