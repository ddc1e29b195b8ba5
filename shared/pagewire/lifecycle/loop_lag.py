"""The lateness of an event loop's calls, and its cause: the loop itself or the machine."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, Histogram

INTERVAL_SECONDS = 0.02
LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def measure_loop_lag(registry: CollectorRegistry = REGISTRY) -> None:
    """Measures the running event loop until it is closed. Must be called on the loop's thread.

    A call is due every 20 ms. The time in which the thread was ready to run but had no CPU has the
    cause "machine". The rest of the lateness has the cause "loop": a long call, a lock, or another
    thread that holds the interpreter's lock. A blocked loop is measured up to 20 ms too short.
    """
    LoopLag(asyncio.get_running_loop(), _cpu_wait(), registry).start()


class LoopLag:
    """Measures the lateness of a call that schedules itself again and again."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cpu_wait: Callable[[], float],
        registry: CollectorRegistry,
    ) -> None:
        """`cpu_wait` returns the seconds that the loop's thread has waited for a CPU so far."""
        self._loop = loop
        self._cpu_wait = cpu_wait
        lag = Histogram(
            "pagewire_loop_lag_seconds",
            "Lateness of a call that the event loop should make every 20 ms, by cause: the loop "
            "itself, or the machine, which had no CPU for it.",
            ["cause"],
            buckets=LAG_SECONDS,
            registry=registry,
        )
        longest = Gauge(
            "pagewire_loop_lag_max_seconds",
            "The longest pagewire_loop_lag_seconds so far.",
            ["cause"],
            registry=registry,
        )
        self._observe = {cause: lag.labels(cause).observe for cause in ("loop", "machine")}
        self._longest = dict.fromkeys(self._observe, 0.0)
        for cause in self._observe:
            longest.labels(cause).set_function(partial(self._longest.__getitem__, cause))
        self._due = self._waited = 0.0

    def start(self) -> None:
        """Schedules the first call."""
        self._waited = self._cpu_wait()
        self._schedule()

    def _schedule(self) -> None:
        self._due = time.monotonic() + INTERVAL_SECONDS
        self._loop.call_later(INTERVAL_SECONDS, self._measure)

    def _measure(self) -> None:
        late = max(0.0, time.monotonic() - self._due)
        waited = self._cpu_wait()
        machine = min(late, waited - self._waited)
        self._waited = waited
        self._add("machine", machine)
        self._add("loop", late - machine)
        self._schedule()

    def _add(self, cause: str, seconds: float) -> None:
        self._observe[cause](seconds)
        if seconds > self._longest[cause]:
            self._longest[cause] = seconds


def _cpu_wait() -> Callable[[], float]:
    """A function that returns how long this thread has been ready to run without a CPU, in seconds.

    It returns 0 if the kernel has no /proc/PID/task/TID/schedstat.
    """
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    with contextlib.suppress(OSError, ValueError, IndexError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

        def read() -> float:
            return (
                int(os.pread(descriptor, 64, 0).split()[1]) / 1e9
            )  # time on a CPU, time waiting for one, time slices

        read()
        return read
    return lambda: 0.0
