"""The bounds of the queue, and what is told to those whom they keep out."""

import math
import time

from pagewire.config import SchedulerConfig
from pagewire.drain_rate import DrainRate
from pagewire.errors import Code, RequestError
from pagewire.scheduler.core.waiting import WaitingQueue


class QueueBounds:
    """Requests, tokens and, if asked for, the time to wait: bounded, and refused with a remedy."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue) -> None:
        self._config = config
        self._waiting = waiting
        self._drain_rate = DrainRate(time.monotonic())
        # Whether requests waited when all that could be admitted had been.
        self._saturated = False
        # Requests that are on their way into the queue.
        self.parsing = 0

    def refusal(self, resumed: bool, tokens: int) -> RequestError | None:
        """Why a request of so many tokens cannot be queued now.

        One that was running elsewhere may find room where new ones do not: its client has seen
        the beginning.
        """
        requests = len(self._waiting) + self.parsing
        now = time.monotonic()
        self.rest(now)
        expected = self._drain_rate.seconds_for(requests, now)
        longest = self._config.max_waiting_seconds
        factor = 2 if resumed else 1
        if requests >= factor * self._config.max_waiting_requests:
            reason = f"{requests} requests are waiting already"
        elif (
            len(self._waiting)
            and self._waiting.tokens + tokens > factor * self._config.max_waiting_tokens
        ):
            reason = f"requests of {self._waiting.tokens} tokens are waiting already"
        elif longest is not None and self._saturated and not resumed and expected > longest:
            reason = f"requests wait for about {expected:.1f} s already"
        else:
            return None
        seconds = self._drain_rate.retry_after(requests, now)
        return RequestError(
            Code.RESOURCE_EXHAUSTED,
            f"{reason}; try again in {math.ceil(seconds)} s",
            retry_after=seconds,
        )

    def rest(self, now: float) -> None:
        """The time up to now says nothing about the queue's speed if nothing waited in it."""
        if not self._saturated:
            self._drain_rate.rest(now)

    def left(self, now: float) -> None:
        """A request was admitted for the first time."""
        if self._saturated:
            self._drain_rate.left(now)

    def settle(self) -> None:
        """All that can be admitted has been."""
        self._saturated = len(self._waiting) > 0
