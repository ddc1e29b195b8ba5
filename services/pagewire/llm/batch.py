"""Runs many prompts to their end."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from pagewire.errors import RequestError
from pagewire.gateway.api.job import Job, name_cause
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.prompt_log import PromptBudget, PromptLog
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.routing.schedulers import Schedulers

# Generations that are open at the scheduler at once. More would not run sooner, and the scheduler
# would tokenize their prompts while steps of others wait.
MAX_OPEN = 2048
_REPORT_SECONDS = 0.2


class Report(Protocol):
    """Receives the progress of a batch, on the thread of the stack."""

    def __call__(self, prompts: int, tokens: int) -> None:
        """`prompts` is the number that have ended, `tokens` the number generated for all."""


def generations_of(
    job: Job, updates: UpdateQueue[Generation], eager: bool, arrived: float
) -> list[Generation]:
    """The generations of a job; eager ones enter `updates` with each new token."""
    budget = PromptBudget(job.max_prompt_logprobs, job.n)
    prompt = PromptLog(job.prompts[0], budget) if job.prompts else None
    return [
        Generation(request, index, 0, updates, eager, job.common[0], arrived, prompt)
        for index, request in enumerate(job.requests)
    ]


class Batch:
    """The generations of some jobs, each of which has one prompt, submitted in order."""

    def __init__(self, schedulers: Schedulers, jobs: Sequence[Job], stop_at_failure: bool) -> None:
        """With `stop_at_failure` the first failure ends the whole batch."""
        self._schedulers = schedulers
        self._updates: UpdateQueue[Generation] = UpdateQueue()
        arrived = time.perf_counter()
        # By job.
        self.generations = [generations_of(job, self._updates, False, arrived) for job in jobs]
        self._given = jobs
        self._stop_at_failure = stop_at_failure
        self._waiting = iter(self.generations)
        self._num_open = 0
        self._num_left = [len(generations) for generations in self.generations]
        self._jobs = {
            generation: index
            for index, generations in enumerate(self.generations)
            for generation in generations
        }

    async def run(self, report: Report | None) -> None:
        """Returns when all generations have ended, failed ones included."""
        reporter = None if report is None else asyncio.create_task(self._report(report))
        try:
            self._submit()
            while self._num_open:
                for generation in await self._updates.take():
                    self._note_end(generation)
                self._submit()
        finally:
            if reporter is not None:
                reporter.cancel()
            for generation in self._all():
                if not generation.ended:
                    self._schedulers.abort(generation)
        if report is not None:
            report(*self._progress())

    def failure_of(self, index: int) -> RequestError | None:
        """The reason why a job has no output; None if it has one."""
        failures = (generation.failure for generation in self.generations[index])
        return next((failure for failure in failures if failure is not None), None)

    def _note_end(self, generation: Generation) -> None:
        self._num_open -= 1
        index = self._jobs[generation]
        self._num_left[index] -= 1
        if generation.failure is not None:
            name_cause(self._given[index], generation.failure)
            if self._stop_at_failure:
                raise JobFailedError(index, generation.failure)

    def _submit(self) -> None:
        while self._num_open < MAX_OPEN:
            candidates = next(self._waiting, None)
            if candidates is None:
                return
            self._num_open += len(candidates)
            try:
                self._schedulers.submit(candidates)
            except RequestError as error:
                for generation in candidates:
                    generation.fail(error)

    async def _report(self, report: Report) -> None:
        while True:
            report(*self._progress())
            await asyncio.sleep(_REPORT_SECONDS)

    def _progress(self) -> tuple[int, int]:
        tokens = sum(len(generation.tokens) for generation in self._all())
        return self._num_left.count(0), tokens

    def _all(self) -> Iterator[Generation]:
        return (generation for generations in self.generations for generation in generations)


class JobFailedError(Exception):
    """The job at `index` has failed, which ends the batch."""

    def __init__(self, index: int, failure: RequestError) -> None:
        super().__init__(str(failure))
        self.index = index
        self.failure = failure
