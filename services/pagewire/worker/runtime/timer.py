"""Timers for the computation of a step, on the host or on the device."""

import time
from collections.abc import Callable

import torch

from pagewire.worker.ops.device import step_stream


class HostTimer:
    """Times work on the host, from construction or `restart` to `stop`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Starts again."""
        self._waited = no_wait
        self._begin = time.perf_counter()

    def leave_out(self, waited: Callable[[], float]) -> None:
        """`waited` returns the seconds of the work that do not count, once the work is done."""
        self._waited = waited

    def stop(self) -> None:
        """Call when the work is done."""
        self._end = time.perf_counter()

    def wait(self) -> float:
        """The seconds of work."""
        return self._end - self._begin - self._waited()


class DeviceTimer:
    """Times work on the stream of steps that is queued from construction or `restart` to `stop`."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self.restart()

    def restart(self) -> None:
        """Starts again, after `wait`. Creating new events would take longer than a small copy."""
        self._waited = no_wait
        self._begin.record(step_stream())

    def leave_out(self, waited: Callable[[], float]) -> None:
        """`waited` returns the seconds of the work that do not count, once the work is done."""
        self._waited = waited

    def stop(self) -> None:
        """Call when all work is queued."""
        self._end.record(step_stream())

    def wait(self) -> float:
        """Waits for the work; returns the seconds that it took on the device."""
        self._end.synchronize()
        return max(float(self._begin.elapsed_time(self._end)) / 1e3 - self._waited(), 0.0)


def no_wait() -> float:
    """Returns 0 seconds: all of the work counts."""
    return 0.0
