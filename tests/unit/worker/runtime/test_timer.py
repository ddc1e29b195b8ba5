"""Timers count work, not pauses."""

import itertools

import pytest
import torch

from pagewire.worker.runtime import timer
from pagewire.worker.runtime.timer import DeviceTimer, HostTimer


def test_a_host_timer_leaves_out_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 15.0, 18.0, 20.0, 21.0])
    monkeypatch.setattr(timer.time, "perf_counter", lambda: next(times))
    timed = HostTimer()
    timed.pause()  # at 11
    timed.resume()  # at 15
    timed.pause()
    timed.resume()  # at 20
    timed.stop()
    assert timed.wait() == pytest.approx(1 + 3 + 1)


class Event:
    """Stands in for a CUDA event: events are 1, 10, 100, ... ms apart, in their order."""

    numbers = itertools.count()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, _stream: object) -> None:
        self.ms = sum(10.0**i for i in range(next(self.numbers)))

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.ms - self.ms


@pytest.mark.parametrize(("pauses", "ms"), [(0, 1), (1, 101), (2, 10101)])
def test_a_device_timer_leaves_out_pauses(
    monkeypatch: pytest.MonkeyPatch, pauses: int, ms: int
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timer, "step_stream", lambda: None)
    monkeypatch.setattr(Event, "numbers", itertools.count())
    timed = DeviceTimer()
    for _ in range(pauses):
        timed.pause()
        timed.resume()
    timed.stop()
    assert timed.wait() == pytest.approx(ms / 1e3)
