"""How late the event loops of a fleet's processes were between two readings of the metrics."""

import asyncio
import math
import re
from collections import Counter
from dataclasses import dataclass, field

from support.processes.fleet import Fleet

_BUCKET = re.compile(r'pagewire_loop_lag_seconds_bucket{cause="(loop|machine)",le="(.*)"}')


@dataclass(frozen=True)
class Lag:
    """Lags of one process by one cause, in seconds, since it started.

    `below` counts them by upper bound, cumulatively.
    """

    longest: float = 0.0
    total: float = 0.0
    below: dict[float, int] = field(default_factory=dict)

    def since(self, before: "Lag") -> tuple[float, float]:
        """A lower and an upper bound of the longest lag after an earlier reading."""
        if self.longest > before.longest:
            return self.longest, self.longest
        bounds = sorted(self.below)
        new = Counter({bound: self.below[bound] - before.below[bound] for bound in bounds})
        if not new[math.inf]:
            return 0.0, 0.0
        above = next(bound for bound in bounds if new[bound] == new[math.inf])
        least = max((bound for bound in bounds if bound < above), default=0.0)
        return least, min(above, self.longest, self.total - before.total)


@dataclass(frozen=True)
class LoopLags:
    """The lags of all processes of a fleet, by name and cause."""

    lags: dict[tuple[str, str], Lag]

    @classmethod
    async def read(cls, fleet: Fleet) -> "LoopLags":
        """Reads the metrics, in threads: the caller's event loop is not blocked."""
        names = list(fleet.metrics)
        found = await asyncio.gather(*(asyncio.to_thread(fleet.samples, name) for name in names))
        return cls(
            {
                (name, cause): _lag_of(samples, cause)
                for name, samples in zip(names, found, strict=True)
                for cause in ("loop", "machine")
            }
        )

    def at_least(self, before: "LoopLags", cause: str) -> dict[str, float]:
        """A lower bound of each process's longest lag after an earlier reading."""
        return {
            name: lag.since(before.lags[name, of])[0]
            for (name, of), lag in self.lags.items()
            if of == cause
        }

    def at_most(self, before: "LoopLags", cause: str) -> dict[str, float]:
        """An upper bound of each process's longest lag after an earlier reading."""
        return {
            name: lag.since(before.lags[name, of])[1]
            for (name, of), lag in self.lags.items()
            if of == cause
        }


def _lag_of(samples: dict[str, float], cause: str) -> Lag:
    below = {}
    for name, value in samples.items():
        match = _BUCKET.fullmatch(name)
        if match and match[1] == cause:
            below[float(match[2])] = int(value)
    return Lag(
        samples[f'pagewire_loop_lag_max_seconds{{cause="{cause}"}}'],
        samples[f'pagewire_loop_lag_seconds_sum{{cause="{cause}"}}'],
        below,
    )
