"""The rate at which a queue empties, which determines the Retry-After of refused requests."""

import math

# Usual time constant of the exponential average over departures.
MEMORY_SECONDS = 10.0
# Requests leave in batches, so a queue younger than this has no meaningful rate.
MIN_OBSERVED_SECONDS = 0.25
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class DrainRate:
    """Counts departures from a queue; older ones count less. The caller passes the time in seconds.

    One departure is added to the count. So a young queue counts as fast, and the estimated rate
    falls while no request leaves.
    """

    __slots__ = ("_at", "_began", "_memory", "_recent")

    def __init__(self, now: float, memory: float = MEMORY_SECONDS) -> None:
        """`memory` is the time constant, in seconds, with which departures decay."""
        self._memory = memory
        self._began = self._at = now
        self._recent = 0.0

    def count_departure(self, now: float) -> None:
        """One request has left the queue."""
        self._decay(now)
        self._recent += 1.0

    def skip_idle_time(self, now: float) -> None:
        """The queue has been empty since the last call: that time does not count."""
        self._began += now - self._at
        self._at = now

    def seconds_for(self, count: int, now: float, leaving: int = 1) -> float:
        """Seconds until `count` more requests have left, at the present rate.

        `leaving` requests are added to the departures.
        """
        self._decay(now)
        if now - self._began < MIN_OBSERVED_SECONDS:
            return 0.0
        window = self._memory * -math.expm1((self._began - now) / self._memory)
        return count * window / (self._recent + leaving)

    def retry_after(self, count: int, now: float) -> float:
        """Seconds until a refused request should be sent again if `count` are ahead of it."""
        return min(max(self.seconds_for(count, now), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)

    def _decay(self, now: float) -> None:
        self._recent *= math.exp((self._at - now) / self._memory)
        self._at = now
