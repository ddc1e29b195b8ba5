"""How fast a queue empties, and so how long whoever is refused should wait."""

import math

MEMORY_SECONDS = 10.0
UNKNOWN_SECONDS = 0.25  # what leaves does so in steps: less time with a queue tells nothing
SHORTEST, LONGEST = 1.0, 60.0


class DrainRate:
    """Counts what leaves a queue; older departures count less. Times are given in, in seconds.

    One departure more than there were is counted, so that a queue about which nothing is known yet
    is taken to be fast, and the less so the longer nothing leaves it.
    """

    __slots__ = ("_at", "_began", "_recent")

    def __init__(self, now: float) -> None:
        self._began = self._at = now
        self._recent = 0.0

    def left(self, now: float) -> None:
        """Something has left the queue."""
        self._decay(now)
        self._recent += 1.0

    def rest(self, now: float) -> None:
        """Since the last call nothing waited: that time says nothing about the rate."""
        self._began += now - self._at
        self._at = now

    def seconds_for(self, count: int, now: float) -> float:
        """Until `count` more will have left, at the present rate."""
        self._decay(now)
        if now - self._began < UNKNOWN_SECONDS:
            return 0.0
        window = MEMORY_SECONDS * -math.expm1((self._began - now) / MEMORY_SECONDS)
        return count * window / (self._recent + 1)

    def retry_after(self, count: int, now: float) -> float:
        """When to try again if `count` are ahead: the same within SHORTEST and LONGEST."""
        return min(max(self.seconds_for(count, now), SHORTEST), LONGEST)

    def _decay(self, now: float) -> None:
        self._recent *= math.exp((self._at - now) / MEMORY_SECONDS)
        self._at = now
