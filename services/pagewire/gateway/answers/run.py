"""The generations of one job, from submission to their end."""

import asyncio
from itertools import count, groupby

from starlette.types import Receive

from pagewire.errors import Code, RequestError
from pagewire.gateway.answers.disconnect import wait_for_disconnect
from pagewire.gateway.api.job import Job
from pagewire.gateway.errors import ClientGoneError
from pagewire.gateway.generation.generation import Generation
from pagewire.gateway.generation.pacer import Pacer
from pagewire.gateway.generation.prompt_log import PromptBudget, PromptLog
from pagewire.gateway.generation.updates import UpdateQueue
from pagewire.gateway.routing.schedulers import Schedulers

# Numbers for jobs with several generations; a scheduler admits or refuses all of a job together.
_numbers = count(1)


class Run:
    """Submits a job's generations. They are aborted when the client disconnects, or by `close`."""

    def __init__(self, job: Job, schedulers: Schedulers, arrived: float | None = None) -> None:
        self._updates: UpdateQueue[Generation] = UpdateQueue()
        self._schedulers = schedulers
        self._disconnect: asyncio.Task[None] | None = None
        self._num_unfinished = len(job.requests)
        budget = PromptBudget(job.max_prompt_logprobs, job.n)
        number = next(_numbers) if len(job.requests) > 1 else 0
        prompts = [PromptLog(wishes, budget) for wishes in job.prompts]
        self.generations = [
            Generation(
                request,
                index,
                index // job.candidates,
                self._updates,
                job.stream,
                job.common_of(index),
                arrived,
                prompts[index // job.candidates] if prompts else None,
                number,
            )
            for index, request in enumerate(job.requests)
        ]

    @property
    def finished(self) -> bool:
        """Whether every generation has been completed."""
        return self._num_unfinished == 0

    async def start(self, receive: Receive) -> None:
        """Submits everything; RequestError if it cannot be sent, or if the deadline has passed."""
        self._disconnect = asyncio.create_task(self._abort_on_disconnect(receive))
        pacer = Pacer()
        try:
            if self.generations[0].seconds_left <= 0:
                given = self.generations[0].request.deadline_ms
                raise RequestError(
                    Code.DEADLINE_EXCEEDED,
                    f"the deadline_ms of {given} ms passed while the request was parsed; give it "
                    "more time",
                    "deadline_ms",
                )
            for _, candidates in groupby(self.generations, key=lambda g: g.prompt_index):
                if self._updates.client_gone:
                    raise ClientGoneError
                self._schedulers.submit(list(candidates))
                await pacer.pause_if_due()
        except BaseException:
            self.close()
            raise

    async def next_updates(self) -> list[Generation]:
        """Waits for generations that have new output or have ended.

        Raises ClientGoneError, or the RequestError of a generation that has failed.
        """
        updated = await self._updates.take()
        for generation in updated:
            if generation.failure is not None:
                raise generation.failure
            if generation.finish is not None:
                self._num_unfinished -= 1
        return updated

    def close(self) -> None:
        """Aborts the generations that have not ended."""
        if self._disconnect is not None:
            self._disconnect.cancel()
        self._abort()

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
        self._updates.client_left()
        self._abort()

    def _abort(self) -> None:
        for generation in self.generations:
            if not generation.ended:
                self._schedulers.abort(generation)
