"""How fast a queue empties, and so how long whoever is refused should wait."""

import math

MEMORY_SECONDS = 10.0
SHORTEST, LONGEST = 1.0, 60.0


class DrainRate:
    """Counts what leaves a queue; older departures count less. Times are given in, in seconds."""

    __slots__ = ("_at", "_began", "_recent")

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self._recent = 0.0

    def left(self, now: float) -> None:
        """Something has left the queue."""
        self._decay(now)
        self._recent += 1.0

    def seconds_for(self, count: int, now: float) -> float:
        """Until `count` more will have left, at the present rate; within SHORTEST and LONGEST."""
        self._decay(now)
        window = MEMORY_SECONDS * -math.expm1((self._began - now) / MEMORY_SECONDS)
        # Most of the first second of the process says little about its rate.
        rate = self._recent / max(window, 1.0)
        return min(max(count / rate if rate else LONGEST, SHORTEST), LONGEST)

    def _decay(self, now: float) -> None:
        self._recent *= math.exp((self._at - now) / MEMORY_SECONDS)
        self._at = now
