"""The generations of one HTTP request, from submission to their last news."""

import asyncio
from itertools import groupby

from starlette.types import Receive

from pagewire.gateway.generation import Generation, Mailbox
from pagewire.gateway.job import Job
from pagewire.gateway.schedulers import Schedulers


class Run:
    """Submits the prompts of a request; aborts them when the client hangs up or on `close`."""

    def __init__(self, job: Job, schedulers: Schedulers) -> None:
        self._mailbox = Mailbox()
        self._schedulers = schedulers
        self._watch: asyncio.Task[None] | None = None
        self._unfinished = len(job.requests)
        self.generations = [
            Generation(request, index, index // job.candidates, self._mailbox, job.stream)
            for index, request in enumerate(job.requests)
        ]

    @property
    def finished(self) -> bool:
        """Whether every generation has been completed."""
        return self._unfinished == 0

    def start(self, receive: Receive) -> None:
        """Sends everything; RequestError if no scheduler is ready."""
        try:
            for _, siblings in groupby(self.generations, key=lambda g: g.prompt):
                self._schedulers.submit(list(siblings))
        except BaseException:
            self.close()
            raise
        self._watch = asyncio.create_task(self._hang_up_with_client(receive))

    async def news(self) -> list[Generation]:
        """Generations with news. Raises ClientGoneError, or the RequestError of one that failed."""
        news = await self._mailbox.take()
        for generation in news:
            if generation.failure is not None:
                raise generation.failure
            if generation.finish is not None:
                self._unfinished -= 1
        return news

    def close(self) -> None:
        """Aborts what has not ended."""
        if self._watch is not None:
            self._watch.cancel()
        self._abort()

    async def _hang_up_with_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._mailbox.hang_up()
        self._abort()

    def _abort(self) -> None:
        for generation in self.generations:
            if not generation.ended:
                self._schedulers.abort(generation)
