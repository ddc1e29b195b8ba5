"""How much a key may ask for, and the buckets that keep count. Pure: the caller has the clock."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimits:
    """What one API key may ask for; None is no limit.

    A prompt's tokens are those it is made of and those generated for it.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    # Prompts being answered at once, over all requests.
    max_concurrent: int | None = None


class TokenBucket:
    """Fills with `per_minute` units a minute, up to as many; may be in debt.

    Times are in seconds on any clock that never goes back.
    """

    __slots__ = ("_at", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: float, now: float) -> None:
        """Takes units, whether they are there or not; a negative amount gives some back."""
        self._level = min(self.level(now) - amount, float(self.per_minute))
        self._at = max(self._at, now)

    def resize(self, per_minute: int, now: float) -> None:
        """Changes the rate; what has been taken and not filled up again stays taken."""
        missing = self.per_minute - self.level(now)
        self.per_minute = per_minute
        self._level, self._at = per_minute - missing, max(self._at, now)

    def level(self, now: float) -> float:
        """Units there are; below 0 in debt."""
        filled = self._level + max(0.0, now - self._at) * self.per_minute / 60
        return min(filled, float(self.per_minute))

    def seconds_until(self, amount: float, now: float) -> float:
        """How long until `amount` is there, or the bucket is full if it never holds as much."""
        missing = min(amount, float(self.per_minute)) - self.level(now)
        return max(0.0, missing) * 60 / self.per_minute
