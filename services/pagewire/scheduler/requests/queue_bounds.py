"""The bounds of the queue, and when a refused client should try again."""

import math
import time

from pagewire.config import SchedulerConfig
from pagewire.drain_rate import DrainRate
from pagewire.errors import Code, RequestError
from pagewire.scheduler import metrics
from pagewire.scheduler.core.queue.waiting import WaitingQueue
from pagewire.scheduler.core.sequence import Sequence
from pagewire.scheduler.requests.open_request import Request
from pagewire.scheduler.requests.open_requests import OpenRequests

# Burst allowance over max_waiting_seconds while the queue is young: workers take in a burst faster
# than the rate of a long queue predicts.
BURST = 4


class QueueBounds:
    """Bounds the waiting requests, their tokens, and the time that they are expected to wait."""

    def __init__(
        self, config: SchedulerConfig, waiting: WaitingQueue, opened: OpenRequests
    ) -> None:
        """`opened` are the open requests: those that are being parsed count as waiting."""
        self._config = config
        self._waiting = waiting
        self._open = opened
        self._drain_rate = DrainRate(time.monotonic())
        # Since when requests wait because the workers are full; None while none wait. Also None
        # without a worker, because an outage says nothing about the rate of the queue.
        self._full_since: float | None = None

    def refusal(self, moved: bool, tokens: int) -> RequestError | None:
        """The error of a request of so many tokens if it cannot be queued now.

        One that has `moved` from another scheduler has twice the room, and no bound on its wait:
        it was taken once, and its client may have seen the beginning.
        """
        requests = len(self._waiting) + self._open.num_parsing
        now = time.monotonic()
        self.skip_idle_time(now)
        expected = self._drain_rate.seconds_for(requests, now)
        longest = self._config.max_waiting_seconds
        old = self._full_since is not None and now - self._full_since > longest / 2
        bound = longest if old else BURST * longest
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

    def skip_idle_time(self, now: float) -> None:
        """Leaves the time up to now out of the queue's rate if no request waited in it."""
        if self._full_since is None:
            self._drain_rate.skip_idle_time(now)

    def admitted(self, request: Request, sequence: Sequence) -> None:
        """A sequence of the request was admitted; counts the first one."""
        if request.queue_seconds is not None:
            return
        now = time.monotonic()
        if self._full_since is not None:
            self._drain_rate.count_departure(now)
        request.queue_seconds = now - request.received
        metrics.PROMPT_TOKENS.inc(len(sequence.prompt))
        metrics.CACHED_TOKENS.inc(sequence.cached_tokens or 0)
        metrics.QUEUE_SECONDS.observe(request.queue_seconds)

    def after_admission(self, ready: bool) -> None:
        """What waits now has no room on a worker; `ready` is whether there is a worker."""
        if not len(self._waiting) or not ready:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = time.monotonic()
