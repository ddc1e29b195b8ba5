"""Sequences and batches for tests of the scheduling core, and admission without a router."""

import numpy as np

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.cached_prefix import Restart
from pagewire.scheduler.core.batching.step_plan import StepPlan
from pagewire.scheduler.core.batching.worker_limits import WorkerLimits
from pagewire.scheduler.core.queue.policy import FirstComeFirstServed
from pagewire.scheduler.core.sequence import Sampling, Sequence

EOS = 7
GREEDY = Sampling(temperature=0, seed=0, min_tokens=0)


def can_admit(batch: WorkerBatch, sequence: Sequence) -> bool:
    """Whether the sequence may start now."""
    return batch.room_for(sequence) is not None


def admit(batch: WorkerBatch, sequence: Sequence) -> Restart | None:
    """Starts a sequence with its cached prefix, even if it should wait."""
    return batch.admit(sequence, batch.find_cached(sequence))


def sequence(prompt: int, max_tokens: int, arrival: int = 0, priority: int = 0) -> Sequence:
    """A prompt of `prompt` equal tokens: all prompts share their beginnings."""
    return Sequence(np.full(prompt, 3, np.int32), GREEDY, max_tokens, (EOS,), arrival, priority)


def counted(prompt: int, max_tokens: int, arrival: int) -> Sequence:
    """A prompt of the tokens 0, 1, 2 and so on."""
    return Sequence(np.arange(prompt, dtype=np.int32), GREEDY, max_tokens, (EOS,), arrival)


def new_batch(num_blocks: int = 9, num_slots: int = 2, budget: int = 64) -> WorkerBatch:
    """An empty batch with blocks of 4 tokens, whose preempted sequences are lost."""
    limits = WorkerLimits(num_blocks, 4, num_slots, budget, memory_threshold=1.0)
    return WorkerBatch(limits, FirstComeFirstServed(), lambda _: None)


def answer(batch: WorkerBatch, plan: StepPlan, token: int = 5) -> list[int]:
    """Answers a step with one token for every row; returns the slots that got it."""
    outcome = batch.commit(plan.number, np.full(len(plan.rows), token, np.int32))
    return outcome.slots.tolist()
