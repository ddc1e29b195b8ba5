"""Routing: which worker runs a sequence.

An admission changes the state of the worker's batch at once, so a router counts it before the
worker receives the sequence. Lost and draining workers are not among the candidates.
"""

from collections.abc import Sequence as Collection
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.cached_prefix import CachedPrefix
from pagewire.scheduler.core.sequence import Sequence

# The cost of a running sequence, in tokens to compute: it adds a token to every later step, and
# its KV is read in each. At 16, a cached prefix of 500 tokens outweighs 31 more sequences.
# (Counting the KV in use too made replayed conversations find less of their prefixes.)
COST_OF_RUNNING = 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can admit a sequence now, and what it has cached of the sequence."""

    batch: WorkerBatch
    cached: CachedPrefix


class Router(Protocol):
    """The choice among the workers that can admit a sequence."""

    def choose(self, sequence: Sequence, candidates: Collection[Candidate]) -> Candidate:
        """One of the candidates; there is at least one."""
        ...


class PrefixAware:
    """Chooses the worker on which the sequence costs least.

    The cost counts tokens to compute and running sequences. The tokens are those of the sequence
    after its cached prefix, the worker's backlog, and those that take as long as loads from host
    memory. Among equal workers, the one with the most free blocks wins, so that caches spread.
    """

    def choose(self, sequence: Sequence, candidates: Collection[Candidate]) -> Candidate:
        """See Router."""
        return min(candidates, key=lambda each: (_cost(sequence, each), -each.batch.pool.free))


class LeastLoaded:
    """Chooses the worker with the smallest share of its slots in use, then of its blocks."""

    def choose(self, sequence: Sequence, candidates: Collection[Candidate]) -> Candidate:
        """See Router."""
        return min(candidates, key=lambda each: _load(each.batch))


class RoundRobin:
    """Chooses the worker that was chosen least recently."""

    def __init__(self) -> None:
        self._turn = 0
        # Weak, so that lost workers are forgotten.
        self._chosen: WeakKeyDictionary[WorkerBatch, int] = WeakKeyDictionary()

    def choose(self, sequence: Sequence, candidates: Collection[Candidate]) -> Candidate:
        """See Router."""
        chosen = min(candidates, key=lambda each: self._chosen.get(each.batch, -1))
        self._turn += 1
        self._chosen[chosen.batch] = self._turn
        return chosen


ROUTERS: dict[str, type[Router]] = {
    "prefix-aware": PrefixAware,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
}


def _cost(sequence: Sequence, candidate: Candidate) -> float:
    batch = candidate.batch
    computed = batch.prefill_cost(sequence, candidate.cached) + batch.backlog
    return computed + COST_OF_RUNNING * batch.num_running


def _load(batch: WorkerBatch) -> tuple[float, float]:
    return (
        batch.num_running / batch.limits.num_slots,
        batch.pool.used / batch.pool.total,
    )
