"""Timers for the computation of a step, on the host or on the device."""

import time

import torch

from pagewire.worker.ops.device import step_stream


class HostTimer:
    """Times work on the host, from construction to `stop`, without pauses."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def pause(self) -> None:
        """What follows is no work."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """The pause is over."""
        self._begin += time.perf_counter() - self._paused

    def stop(self) -> None:
        """Call when the work is done."""
        self._end = time.perf_counter()

    def wait(self) -> float:
        """The seconds of work between construction and `stop`."""
        return self._end - self._begin


class DeviceTimer:
    """Times work on the stream of steps that is queued between construction and `stop`.

    What the stream does in a pause does not count.
    """

    def __init__(self) -> None:
        self._pauses: list[torch.cuda.Event] = []  # the begin and end of each
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._begin.record(step_stream())

    def pause(self) -> None:
        """What is queued next is no work."""
        self._pauses.append(torch.cuda.Event(enable_timing=True))
        self._pauses[-1].record(step_stream())

    def resume(self) -> None:
        """The pause is over."""
        self.pause()

    def stop(self) -> None:
        """Call when all work is queued."""
        self._end.record(step_stream())

    def wait(self) -> float:
        """Waits for the work; returns the seconds that it took on the device."""
        self._end.synchronize()
        times = [self._begin, *self._pauses, self._end]
        pairs = zip(times[::2], times[1::2], strict=True)
        return sum(float(begin.elapsed_time(end)) for begin, end in pairs) / 1e3
