"""Latency objectives of a request. Requests that meet them count for goodput."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objectives:
    """Maximum milliseconds to the first token (TTFT) and for each later token (TPOT).

    None: no limit.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met_by(self, ttft_seconds: float, tpot_seconds: float | None) -> bool:
        """Whether a request met both. Without a second token it has no TPOT, and meets that
        objective."""
        return (self.ttft_ms is None or ttft_seconds * 1e3 <= self.ttft_ms) and (
            self.tpot_ms is None or (tpot_seconds or 0.0) * 1e3 <= self.tpot_ms
        )
