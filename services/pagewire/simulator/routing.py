"""Routers by name: the scheduler's own, and baselines to compare them with."""

from collections.abc import Callable
from collections.abc import Sequence as Collection

from pagewire.scheduler.core.batch import WorkerBatch
from pagewire.scheduler.core.routing import LeastLoaded, Router
from pagewire.scheduler.core.sequence import Sequence


class RoundRobin:
    """Each worker in turn, whatever it holds; one that has no room is passed over."""

    def __init__(self) -> None:
        self._last: list[WorkerBatch] = []  # least recently chosen first

    def choose(self, sequence: Sequence, workers: Collection[WorkerBatch]) -> WorkerBatch:
        """See Router."""
        chosen = min(workers, key=self._turn)
        if chosen in self._last:
            self._last.remove(chosen)
        self._last.append(chosen)
        return chosen

    def _turn(self, worker: WorkerBatch) -> int:
        return self._last.index(worker) if worker in self._last else -1


ROUTERS: dict[str, Callable[[], Router]] = {
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
}
