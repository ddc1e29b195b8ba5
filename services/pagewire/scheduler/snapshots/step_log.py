"""The latest steps of all workers, recorded while a view asks for them."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from pagewire.scheduler.core.batching.batch import WorkerBatch
from pagewire.scheduler.core.batching.step_plan import StepPlan

MAX_STEPS = 512
# Recording ends when no view has asked for this long.
_ASKED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """An answered step: when its answer arrived, how long it took, and what it computed."""

    batch: WorkerBatch
    ended: float
    duration_us: int
    decodes: int
    prefills: int
    copies: int


class StepLog:
    """Keeps the latest `MAX_STEPS` steps. Steps are numbered from 1."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.last = 0  # the number of the latest step
        self._records: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._until = 0.0

    def note(self, batch: WorkerBatch, plan: StepPlan, duration_us: int) -> None:
        """Records a step whose answer has arrived; does nothing while no view asks."""
        if not self._until:
            return
        now = self.clock()
        if now > self._until:
            self._until = 0.0
            self._records.clear()
            return
        copies = plan.copies
        self.last += 1
        self._records.append(
            StepRecord(
                batch,
                now,
                duration_us,
                len(plan.decode_slots),
                sum(plan.prefill_counts),
                0 if copies is None else len(copies.saved) + len(copies.loaded),
            )
        )

    def after(self, number: int) -> Iterator[StepRecord]:
        """The kept steps after step `number`; recording continues."""
        self._until = self.clock() + _ASKED_SECONDS
        wanted = max(0, min(len(self._records), self.last - number))
        return islice(self._records, len(self._records) - wanted, None)
