"""Timing a step's computation where it runs."""

import time

import torch


class HostTimer:
    """From construction to `stop`, for work done in between."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """The work is done."""
        self._end = time.perf_counter()

    def wait(self) -> float:
        """Seconds."""
        return self._end - self._begin


class DeviceTimer:
    """The same for work queued on the current CUDA stream in between."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        """The work is queued."""
        self._end.record()

    def wait(self) -> float:
        """Waits for the work; seconds that it took on the device."""
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3
