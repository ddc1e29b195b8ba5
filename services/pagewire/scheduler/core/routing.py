"""Which worker takes a sequence."""

from collections.abc import Sequence as Collection
from typing import Protocol

from pagewire.scheduler.core.batch import WorkerBatch
from pagewire.scheduler.core.sequence import Sequence


class Router(Protocol):
    """The choice among the workers that have room for a sequence."""

    def choose(self, sequence: Sequence, workers: Collection[WorkerBatch]) -> WorkerBatch:
        """One of `workers`, which are not empty and can all admit the sequence now."""
        ...


class LeastLoaded:
    """The worker with the smallest part of its slots in use, then of its blocks."""

    def choose(self, sequence: Sequence, workers: Collection[WorkerBatch]) -> WorkerBatch:
        """See Router."""
        return min(workers, key=_load)


def _load(worker: WorkerBatch) -> tuple[float, float]:
    """How full it is: fraction of slots, then of blocks."""
    return (
        worker.num_running / worker.limits.num_slots,
        worker.pool.used / worker.pool.total,
    )
