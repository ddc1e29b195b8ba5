"""The time of each phase of a process's start."""

import os
import time
from pathlib import Path

from pagewire.lifecycle.watchdog import Watched


class StartupPhases:
    """Records the seconds of each phase since the process started."""

    def __init__(self) -> None:
        self._last = time.monotonic() - _age()
        self._began = self._last
        self._phases: list[tuple[str, float]] = []

    def end(self, phase: str) -> None:
        """Ends `phase`, which began at the end of the previous phase."""
        now = time.monotonic()
        self._phases.append((phase, now - self._last))
        self._last = now

    @property
    def seconds(self) -> float:
        """Seconds from the start of the process to the end of the last phase."""
        return self._last - self._began

    def watched(self) -> Watched:
        """For a watchdog: a start in which no phase ends."""
        return Watched("the start", lambda: len(self._phases), lambda: True)

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self._phases)


def _age() -> float:
    """Seconds since this process was started, to a hundredth; 0 where /proc is missing."""
    try:
        # Field 22, counted from 1. Field 2 is the name in brackets, which may contain any text.
        fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
