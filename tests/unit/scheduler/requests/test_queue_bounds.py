"""When a queue refuses, by the test's clock."""

from types import SimpleNamespace
from typing import Any

import pytest

from pagewire.config import SchedulerConfig
from pagewire.scheduler.requests import queue_bounds
from pagewire.scheduler.requests.open_requests import OpenRequests
from pagewire.scheduler.requests.queue_bounds import QueueBounds


class Queue:
    """The bounds of a queue in which `waiting` requests wait, and in front of which some run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr(queue_bounds, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.waiting = 0
        self.running = 0
        waiting = _Waiting(self)
        batches = [_Batch(self)]
        admission: Any = SimpleNamespace(waiting=waiting, batches=batches)
        config = SchedulerConfig(workers="w", **settings)
        self.bounds = QueueBounds(config, admission, OpenRequests())

    def fill(self, waiting: int) -> None:
        """A number of requests wait while the workers are full."""
        self.waiting = waiting
        self.bounds.after_admission(True)

    def leave(self, count: int) -> None:
        """A number of requests are admitted."""
        for _ in range(count):
            request: Any = SimpleNamespace(queue_seconds=None, received=self.now)
            self.bounds.admitted(request, SimpleNamespace(prompt=[], cached_tokens=0))  # type: ignore[arg-type]
            self.waiting -= 1
        self.bounds.after_admission(True)

    def refuses(self) -> bool:
        return self.bounds.refusal(moved=False, tokens=1) is not None


class _Waiting:
    tokens = 0

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return self._queue.waiting


class _Batch:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    @property
    def num_running(self) -> int:
        return self._queue.running


def test_a_thousand_requests_at_once_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive within five seconds, in which no slot becomes free."""
    queue = Queue(monkeypatch)
    queue.running = 256
    for waiting in range(1, 745):
        queue.fill(waiting)
        queue.now += 5 / 744
        assert not queue.refuses(), waiting


def test_a_wait_of_a_minute_is_taken_and_a_longer_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten leave a second, for ten minutes."""
    queue = Queue(monkeypatch)
    queue.running = 32
    queue.fill(7000)
    for _ in range(600):
        queue.now += 1.0
        queue.leave(10)
    queue.fill(500)
    assert not queue.refuses()
    queue.fill(700)
    assert queue.refuses()


def test_slots_that_come_free_in_waves_are_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 requests of 40 s each run side by side: a few that wait have to wait 40 s at most."""
    queue = Queue(monkeypatch)
    queue.running = 256
    queue.fill(600)
    for wave in range(4):
        queue.now += 39.0
        queue.fill(60)
        assert not queue.refuses(), wave
        queue.fill(600)
        queue.now += 1.0
        queue.leave(256)


def test_a_queue_that_nothing_leaves_refuses_after_its_longest_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue(monkeypatch)
    queue.running = 8
    queue.fill(8)
    queue.now += 59.0
    assert not queue.refuses()
    queue.now += 2.0
    assert queue.refuses()


def test_an_objective_of_a_second_bounds_the_queue_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker serves 20 a second in 8 slots; after half a second no burst is allowed any more."""
    queue = Queue(monkeypatch, max_waiting_seconds=1.0)
    queue.running = 8
    queue.fill(5000)
    for _ in range(200):
        queue.now += 0.05
        queue.leave(1)
    queue.fill(15)
    assert not queue.refuses()
    queue.fill(30)
    assert queue.refuses()


@pytest.mark.parametrize(("longest", "most"), [(60.0, 75.0), (1.0, 5.5)])
def test_ten_times_the_load_waits_about_as_long_as_it_may(
    monkeypatch: pytest.MonkeyPatch, longest: float, most: float
) -> None:
    """A worker serves 20 a second in 16 slots, and 200 a second arrive for three minutes."""
    queue = Queue(monkeypatch, max_waiting_seconds=longest)
    queue.running = 16
    longest_queue = 0
    for tick in range(180 * 20):
        queue.now += 0.05
        if queue.waiting:
            queue.leave(1)
        for _ in range(10):
            if not queue.refuses():
                queue.fill(queue.waiting + 1)
        longest_queue = max(longest_queue, queue.waiting)
        if tick == 90 * 20:
            assert 0.7 * longest < queue.waiting / 20 < 1.3 * longest
    assert longest_queue / 20 < most
