"""The schedulers that wait for a worker: each receives its holder, and claims it when free."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagewire.errors import Code, RequestError, invalid
from pagewire.v1 import worker_pb2 as pb

# Bounds on waiting schedulers; a fleet has far fewer schedulers, with far shorter names.
MAX_WAITING = 1024
MAX_NAME_LENGTH = 256


class Turn:
    """The place of one scheduler among those that wait."""

    def __init__(self, scheduler: str) -> None:
        self.scheduler = scheduler
        # Claims read so far.
        self.claims = 0
        # Why the scheduler waits no longer.
        self.error: RequestError | None = None
        # Set if something has changed since the last message to the scheduler.
        self.changed = asyncio.Event()
        self.changed.set()


class Turns:
    """The scheduler that holds a worker, and those that wait for it."""

    def __init__(self, tell_holder: Callable[[], None]) -> None:
        """`tell_holder` is called after every change."""
        self.holder = ""
        self._tell_holder = tell_holder
        self._turns: list[Turn] = []

    @contextmanager
    def wait(self, scheduler: str) -> Iterator[Turn]:
        """Lets a scheduler wait while this context is open; RequestError if it may not."""
        if not 0 < len(scheduler) <= MAX_NAME_LENGTH:
            raise invalid(
                "hello.scheduler",
                f"a scheduler that shares workers has a name of 1 to {MAX_NAME_LENGTH} characters; "
                f"this one has {len(scheduler)}",
            )
        if len(self._turns) >= MAX_WAITING:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED, f"{MAX_WAITING} schedulers wait for this worker already"
            )
        turn = Turn(scheduler)
        self._turns.append(turn)
        self.tell()
        try:
            yield turn
        finally:
            self._turns.remove(turn)
            self.tell()

    def end(self, error: RequestError) -> None:
        """Ends the waiting of every scheduler."""
        for turn in self._turns:
            turn.error = error
        self.tell()

    def tell(self) -> None:
        """Sends every scheduler the holder of the worker and the schedulers that wait."""
        for turn in self._turns:
            turn.changed.set()
        self._tell_holder()

    def standing(self, model: str, claims: int = 0) -> pb.Standing:
        """The message for a scheduler, of which `claims` claims were read so far."""
        waiting = sorted({turn.scheduler for turn in self._turns} - {self.holder})
        return pb.Standing(model=model, holder=self.holder, waiting=waiting, claims=claims)
