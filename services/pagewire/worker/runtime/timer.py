"""Timers for the computation of a step, on the host or on the device."""

import time

import torch


class HostTimer:
    """Times work on the host, from construction to `stop`."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """Call when the work is done."""
        self._end = time.perf_counter()

    def wait(self) -> float:
        """The seconds between construction and `stop`."""
        return self._end - self._begin


class DeviceTimer:
    """Times work on the current CUDA stream that is queued between construction and `stop`."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        """Call when all work is queued."""
        self._end.record()

    def wait(self) -> float:
        """Waits for the work; returns the seconds that it took on the device."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3
