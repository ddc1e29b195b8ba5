"""The generations of one HTTP request, from submission to their last news."""

import asyncio
from itertools import groupby

from starlette.types import Receive

from pagewire.errors import Code, RequestError
from pagewire.gateway.api.job import Job
from pagewire.gateway.errors import ClientGoneError
from pagewire.gateway.generation.generation import Generation, Mailbox
from pagewire.gateway.generation.turns import Turns
from pagewire.gateway.routing.schedulers import Schedulers


class Run:
    """Submits the prompts of a request; aborts them when the client hangs up or on `close`."""

    def __init__(self, job: Job, schedulers: Schedulers, arrived: float | None = None) -> None:
        self._mailbox = Mailbox()
        self._schedulers = schedulers
        self._watch: asyncio.Task[None] | None = None
        self._unfinished = len(job.requests)
        self.generations = [
            Generation(
                request,
                index,
                index // job.candidates,
                self._mailbox,
                job.stream,
                job.input_of(index),
                arrived,
            )
            for index, request in enumerate(job.requests)
        ]

    @property
    def finished(self) -> bool:
        """Whether every generation has been completed."""
        return self._unfinished == 0

    async def start(self, receive: Receive) -> None:
        """Sends everything; RequestError for what cannot be sent, or if the deadline has passed."""
        self._watch = asyncio.create_task(self._hang_up_with_client(receive))
        turns = Turns()
        try:
            if self.generations[0].seconds_left <= 0:
                raise RequestError(
                    Code.DEADLINE_EXCEEDED, "deadline_ms passed while the request was parsed"
                )
            for _, siblings in groupby(self.generations, key=lambda g: g.prompt):
                if self._mailbox.gone:
                    raise ClientGoneError
                self._schedulers.submit(list(siblings))
                await turns.give()
        except BaseException:
            self.close()
            raise

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
