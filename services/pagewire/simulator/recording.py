"""The record of a replay: each request's times, and the state of the workers over time."""

from collections import Counter
from dataclasses import dataclass, field

from pagewire.scheduler.core.batching.cached_prefix import Restart


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. Times are seconds of the replay, None while the event has not happened."""

    arrival: float
    input_length: int
    output_length: int
    hash_blocks: int
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    cached_tokens: int = 0
    # The cached tokens that were loaded from host memory.
    loaded_tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        assert self.first_token is not None
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None if there is only one token."""
        assert self.first_token is not None
        assert self.last_token is not None
        if self.output_length < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_length - 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of all workers together; counts of tokens and seconds are since the start."""

    time: float
    waiting: int
    running: int
    used_blocks: int
    # Empty places for tokens in the blocks of running sequences.
    wasted_tokens: int
    output_tokens: int
    busy_seconds: float


_SUMMED = (
    "waiting",
    "running",
    "used_blocks",
    "wasted_tokens",
    "output_tokens",
    "busy_seconds",
)


@dataclass(slots=True)
class Recording:
    """The record of a whole replay."""

    workers: int
    total_blocks: int
    block_size: int
    requests: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    # Requests that are too large for every worker.
    refused: int = 0
    preemptions: int = 0
    # Preempted requests that started again, by where most of their KV came from.
    restarts: Counter[Restart] = field(default_factory=Counter)
    saved_blocks: int = 0
    loaded_blocks: int = 0
    # The longest time between two tokens of a request, in seconds.
    longest_pause: float = 0.0
    steps: int = 0
    busy_seconds: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of_all(cls, parts: "list[Recording]") -> "Recording":
        """Merges the records of simultaneous replays, which have samples at the same times."""
        merged = cls(
            sum(part.workers for part in parts),
            sum(part.total_blocks for part in parts),
            parts[0].block_size,
        )
        for part in parts:
            merged.requests += part.requests
            merged.refused += part.refused
            merged.preemptions += part.preemptions
            merged.restarts += part.restarts
            merged.saved_blocks += part.saved_blocks
            merged.loaded_blocks += part.loaded_blocks
            merged.steps += part.steps
            merged.busy_seconds += part.busy_seconds
        merged.longest_pause = max(part.longest_pause for part in parts)
        merged.seconds = max(part.seconds for part in parts)
        for at in zip(*(part.samples for part in parts), strict=True):
            sums = (sum(getattr(each, name) for each in at) for name in _SUMMED)
            merged.samples.append(Sample(at[0].time, *sums))
        return merged

    @property
    def finished(self) -> list[RequestRecord]:
        """Requests that ran to their end."""
        return [request for request in self.requests if request.last_token is not None]
