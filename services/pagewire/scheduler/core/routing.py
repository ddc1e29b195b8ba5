"""Which worker takes a sequence.

A router sees the workers' state as it is now: what was admitted a moment ago counts already,
because admission itself changes the state, before any worker has heard of it. Workers that failed
or drain are not among those it is given.
"""

from collections.abc import Sequence as Collection
from typing import Protocol
from weakref import WeakKeyDictionary

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.sequence import Sequence

# What a sequence that runs on a worker costs, in tokens to be computed: it adds a token to every
# step to come, and its KV is read in each. At 16, a cached prefix of 500 tokens outweighs 31
# sequences more. (KV in use counted beside it cost cached prefixes on replayed conversations.)
COST_OF_RUNNING = 16


class Router(Protocol):
    """The choice among the workers that have room for a sequence."""

    def choose(self, sequence: Sequence, workers: Collection[WorkerBatch]) -> WorkerBatch:
        """One of `workers`, which are not empty and can all admit the sequence now."""
        ...


class PrefixAware:
    """The worker on which the sequence costs least.

    The cost counts the tokens that would be computed (those of the sequence after its cached
    prefix, those queued on the worker before it, and what loading from the host takes) and the
    sequences that run there. Of equal workers it is the one with the most blocks that hold nothing,
    so that caches spread.
    """

    def choose(self, sequence: Sequence, workers: Collection[WorkerBatch]) -> WorkerBatch:
        """See Router."""
        return min(workers, key=lambda worker: (self._cost(sequence, worker), -worker.pool.free))

    def _cost(self, sequence: Sequence, worker: WorkerBatch) -> float:
        computed = worker.prefill_cost(sequence) + worker.backlog
        return computed + COST_OF_RUNNING * worker.num_running


class LeastLoaded:
    """The worker with the smallest part of its slots in use, then of its blocks."""

    def choose(self, sequence: Sequence, workers: Collection[WorkerBatch]) -> WorkerBatch:
        """See Router."""
        return min(workers, key=_load)


class RoundRobin:
    """The worker that was chosen least recently."""

    def __init__(self) -> None:
        self._turn = 0
        # Weak, so that workers that are gone are forgotten.
        self._chosen: WeakKeyDictionary[WorkerBatch, int] = WeakKeyDictionary()

    def choose(self, sequence: Sequence, workers: Collection[WorkerBatch]) -> WorkerBatch:
        """See Router."""
        chosen = min(workers, key=lambda worker: self._chosen.get(worker, -1))
        self._turn += 1
        self._chosen[chosen] = self._turn
        return chosen


ROUTERS: dict[str, type[Router]] = {
    "prefix-aware": PrefixAware,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}


def _load(worker: WorkerBatch) -> tuple[float, float]:
    """How full it is: fraction of slots, then of blocks."""
    return (
        worker.num_running / worker.limits.num_slots,
        worker.pool.used / worker.pool.total,
    )
