"""What tests of the scheduling core share: greedy sampling, and admission without a router."""

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.cached_prefix import Restart
from pagewire.scheduler.core.sequence import Sampling, Sequence

GREEDY = Sampling(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, min_tokens=0)


def can_admit(batch: WorkerBatch, sequence: Sequence) -> bool:
    """Whether the sequence may start now."""
    return batch.room_for(sequence) is not None


def admit(batch: WorkerBatch, sequence: Sequence) -> Restart | None:
    """Starts a sequence with what is cached of it, whether or not it should wait."""
    return batch.admit(sequence, batch.find_cached(sequence))
