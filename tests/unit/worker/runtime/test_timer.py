"""Timers count work, without excluded waits."""

import itertools

import pytest
import torch

from pagewire.worker.runtime import timer
from pagewire.worker.runtime.timer import DeviceTimer, HostTimer


def test_a_host_timer_leaves_out_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 21.0])
    monkeypatch.setattr(timer.time, "perf_counter", lambda: next(times))
    timed = HostTimer()
    timed.leave_out(lambda: 6.0)
    timed.stop()
    assert timed.wait() == pytest.approx(5)


class Event:
    """Stands in for a CUDA event: two events are 10 ms apart."""

    numbers = itertools.count()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, _stream: object) -> None:
        self.ms = 10.0 * next(self.numbers)
        self.synchronized = False

    def synchronize(self) -> None:
        self.synchronized = True

    def elapsed_time(self, end: "Event") -> float:
        return end.ms - self.ms


@pytest.mark.parametrize(("waited", "seconds"), [(0.0, 0.01), (0.004, 0.006), (0.02, 0.0)])
def test_a_device_timer_leaves_out_waits(
    monkeypatch: pytest.MonkeyPatch, waited: float, seconds: float
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timer, "step_stream", lambda: None)
    timed = DeviceTimer()

    def known() -> float:
        assert timed._end.synchronized  # the device writes it with the step
        return waited

    timed.leave_out(known)
    timed.stop()
    assert timed.wait() == pytest.approx(seconds)


def test_without_waits_all_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timer, "step_stream", lambda: None)
    timed = DeviceTimer()
    timed.stop()
    assert timed.wait() == pytest.approx(0.01)


def test_a_timer_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timer, "step_stream", lambda: None)
    timed = DeviceTimer()
    timed.leave_out(lambda: 1.0)
    timed.stop()
    timed.restart()
    timed.stop()
    assert timed.wait() == pytest.approx(0.01)
