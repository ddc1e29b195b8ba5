"""The bounds of the queue, and what is told to those whom they keep out."""

import math
import time

from pagewire.config import SchedulerConfig
from pagewire.drain_rate import DrainRate
from pagewire.errors import Code, RequestError
from pagewire.scheduler.core.queue.waiting import WaitingQueue

# So many times longer than in a queue that stands may the wait seem to be in one that has just
# begun: it may be a burst, which workers take in faster than the rate of a long queue says.
BURST = 4


class QueueBounds:
    """Requests, tokens and the time to wait: bounded, and refused with a remedy."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue) -> None:
        self._config = config
        self._waiting = waiting
        self._drain_rate = DrainRate(time.monotonic())
        # Since when requests wait, all that could be having been admitted; None if there are none,
        # or no worker for them: how long that takes tells nothing about the queue.
        self._full_since: float | None = None
        # Requests that are on their way into the queue.
        self.parsing = 0

    def refusal(self, moved: bool, tokens: int) -> RequestError | None:
        """Why a request of so many tokens cannot be queued now.

        One that has run or waited elsewhere may find room where new ones do not: it was taken
        once, and its client may have seen the beginning.
        """
        requests = len(self._waiting) + self.parsing
        now = time.monotonic()
        self.rest(now)
        expected = self._drain_rate.seconds_for(requests, now)
        longest = self._config.max_waiting_seconds
        stands = self._full_since is not None and now - self._full_since > longest / 2
        bound = longest if stands else BURST * longest
        factor = 2 if moved else 1
        if requests >= factor * self._config.max_waiting_requests:
            reason = f"{requests} requests are waiting already"
        elif (
            len(self._waiting)
            and self._waiting.tokens + tokens > factor * self._config.max_waiting_tokens
        ):
            reason = f"requests of {self._waiting.tokens} tokens are waiting already"
        elif self._full_since is not None and not moved and expected > bound:
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
        if self._full_since is None:
            self._drain_rate.skip_idle_time(now)

    def left(self, now: float) -> None:
        """A request was admitted for the first time."""
        if self._full_since is not None:
            self._drain_rate.count_departure(now)

    def settle(self, ready: bool) -> None:
        """All that can be admitted has been; `ready` is whether there is a worker to admit to."""
        if not len(self._waiting) or not ready:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = time.monotonic()
