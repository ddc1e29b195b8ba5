"""How long the parts of a process's start took."""

import os
import time
from pathlib import Path


class Timeline:
    """From the start of this process on."""

    def __init__(self) -> None:
        self._last = time.monotonic() - _age()
        self._began = self._last
        self._parts: list[tuple[str, float]] = []

    def mark(self, part: str) -> None:
        """What lies between the last mark, or the start, and now was `part`."""
        now = time.monotonic()
        self._parts.append((part, now - self._last))
        self._last = now

    @property
    def seconds(self) -> float:
        """From the start to the last mark."""
        return self._last - self._began

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f}" for part, seconds in self._parts)


def _age() -> float:
    """Seconds since this process was started, to a hundredth; 0 where the system does not say."""
    try:
        # Field 22, counted from 1; the second one is a name that may hold anything but its end.
        fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return 0.0
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
