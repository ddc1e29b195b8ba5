"""Waiting sequences whose beginning a long prompt computes.

Such a sequence waits for the blocks, rather than compute them again. A long prompt takes seconds,
and the sequences behind in the queue need not wait for it.
"""

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.sequence import Sequence


@dataclass(slots=True)
class _Led:
    """The followers of a long prompt, by the number of tokens that they share with it."""

    batch: WorkerBatch
    # A heap of shared tokens, arrival and sequence.
    followers: list[tuple[int, int, Sequence]] = field(default_factory=list)


class Followers:
    """Sequences that wait for long prompts, until these have computed what both begin with."""

    def __init__(self) -> None:
        self._led: dict[Sequence, _Led] = {}

    def follow(self, sequence: Sequence, batches: Collection[WorkerBatch]) -> bool:
        """Lets a sequence wait for a long prompt; False if none computes its beginning.

        A suspect does not wait here: it must run alone.
        """
        if sequence.suspect:
            return False
        for batch in batches:
            if (found := batch.leader_of(sequence)) is not None:
                leader, shared = found
                led = self._led.setdefault(leader, _Led(batch))
                heapq.heappush(led.followers, (shared, sequence.arrival, sequence))
                return True
        return False

    def released(self, batches: Collection[WorkerBatch]) -> Iterator[Sequence]:
        """Takes out the sequences whose shared tokens are computed, or whose long prompt left."""
        for leader, led in list(self._led.items()):
            computed = led.batch.num_prefilled(leader) if led.batch in batches else None
            while led.followers and (computed is None or led.followers[0][0] <= computed):
                yield heapq.heappop(led.followers)[2]
            if not led.followers:
                del self._led[leader]
