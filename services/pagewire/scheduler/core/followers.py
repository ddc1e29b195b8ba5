"""Waiting sequences that share their first tokens with a long prompt in prefill.

Such a follower waits until the long prompt has computed the shared blocks, and then uses them. A
long prompt takes seconds. So its followers leave the order of the queue meanwhile, and the
sequences behind them are admitted.
"""

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.sequence import Sequence


@dataclass(slots=True)
class _Led:
    """The followers of one long prompt, which is in a slot of `batch`."""

    batch: WorkerBatch
    # A heap of (number of shared tokens, arrival, sequence).
    followers: list[tuple[int, int, Sequence]] = field(default_factory=list)


class Followers:
    """The followers of all long prompts."""

    def __init__(self) -> None:
        self._led: dict[Sequence, _Led] = {}

    def follow(self, sequence: Sequence, batches: Collection[WorkerBatch]) -> bool:
        """Adds a waiting sequence; returns False if no long prompt will compute blocks for it.

        Suspects do not follow: they run alone.
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
        """Removes and returns the followers that need not wait any more.

        Their shared blocks are computed, or their long prompt has left its slot.
        """
        for leader, led in list(self._led.items()):
            computed = led.batch.num_prefilled(leader) if led.batch in batches else None
            while led.followers and (computed is None or led.followers[0][0] <= computed):
                yield heapq.heappop(led.followers)[2]
            if not led.followers:
                del self._led[leader]
