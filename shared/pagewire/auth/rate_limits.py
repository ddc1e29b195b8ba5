"""Limits of an API key, and the token bucket that enforces them. The caller passes the time."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits of one API key; None: no limit."""

    requests_per_minute: int | None = None
    # Prompt and output tokens.
    tokens_per_minute: int | None = None
    # Prompts that run at once, in all requests together.
    max_concurrent: int | None = None


class TokenBucket:
    """A bucket that holds up to `per_minute` units, and regains `per_minute` units in a minute.

    Its level may be negative. Times are in seconds, on a clock that never goes back.
    """

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: float, now: float) -> None:
        """Takes units, even if there are too few; a negative amount gives some back."""
        self._level = min(self.level(now) - amount, float(self.per_minute))
        self._at = max(self._at, now)

    def resize(self, per_minute: int, now: float) -> None:
        """Changes the rate; units that are not regained yet stay taken."""
        missing = self.per_minute - self.level(now)
        self.per_minute = per_minute
        self._level, self._at = per_minute - missing, max(self._at, now)

    def level(self, now: float) -> float:
        """Units in the bucket; negative if more were taken than it held."""
        filled = self._level + max(0.0, now - self._at) * self.per_minute / 60
        return min(filled, float(self.per_minute))

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until the bucket holds `amount`, or is full if `amount` is larger than that."""
        missing = min(amount, float(self.per_minute)) - self.level(now)
        return max(0.0, missing) * 60 / self.per_minute
