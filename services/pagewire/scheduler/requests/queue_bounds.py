"""The bounds of the queue, and when a refused client should try again."""

import math
import time

from pagewire.config import SchedulerConfig
from pagewire.drain_rate import MEMORY_SECONDS, DrainRate
from pagewire.errors import Code, RequestError
from pagewire.scheduler import metrics
from pagewire.scheduler.core.admission import Admission
from pagewire.scheduler.core.sequence import Sequence
from pagewire.scheduler.requests.open_request import Request
from pagewire.scheduler.requests.open_requests import OpenRequests

# Burst allowance over max_waiting_seconds while the queue is young: workers admit a burst faster
# than the rate of a long queue predicts. It is for one burst, so it ends after some seconds.
BURST = 4
BURST_SECONDS = 5.0


class QueueBounds:
    """Bounds the waiting requests, their tokens, and the time that they are expected to wait."""

    def __init__(self, config: SchedulerConfig, admission: Admission, opened: OpenRequests) -> None:
        """`opened` are the open requests: those that are being parsed count as waiting."""
        self._config = config
        self._admission = admission
        self._waiting = admission.waiting
        self._open = opened
        # A bound of a minute needs the rate of about a minute: slots come free in waves.
        longest = config.max_waiting_seconds
        memory = max(MEMORY_SECONDS, longest) if math.isfinite(longest) else MEMORY_SECONDS
        self._drain_rate = DrainRate(time.monotonic(), memory)
        # Since when requests wait because the workers are full; None while none wait. Also None
        # without a worker, because an outage says nothing about the rate of the queue.
        self._full_since: float | None = None
        self._left_since_full = False

    def refusal(self, moved: bool, tokens: int) -> RequestError | None:
        """The error of a request of `tokens` tokens if it cannot be queued now.

        A request that has `moved` from another scheduler has twice the room, and no bound on its
        wait: it was accepted before, and its client may have received the beginning.
        """
        requests = len(self._waiting) + self._open.num_parsing
        now = time.monotonic()
        self.skip_idle_time(now)
        expected, bound = self._expected_wait(requests, now)
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

    def _expected_wait(self, requests: int, now: float) -> tuple[float, float]:
        """The expected wait of this number of requests, and its bound; in seconds.

        The rate of a young queue is not known yet: all running sequences may be about to end.
        """
        longest = self._config.max_waiting_seconds
        age = 0.0 if self._full_since is None else now - self._full_since
        if age > (longest / 2 if self._left_since_full else longest):
            return self._drain_rate.seconds_for(requests, now), longest
        running = sum(batch.num_running for batch in self._admission.batches)
        bound = BURST * longest if age <= min(longest / 2, BURST_SECONDS) else longest
        return self._drain_rate.seconds_for(requests, now, 1 + running), bound

    def skip_idle_time(self, now: float) -> None:
        """Leaves the time up to now out of the queue's rate if no request waited in it."""
        if self._full_since is None:
            self._drain_rate.skip_idle_time(now)

    def admitted(self, request: Request, sequence: Sequence) -> None:
        """Counts the first admission of a sequence of the request."""
        if request.queue_seconds is not None:
            return
        now = time.monotonic()
        if self._full_since is not None:
            self._drain_rate.count_departure(now)
            self._left_since_full = True
        request.queue_seconds = now - request.received
        metrics.PROMPT_TOKENS.inc(len(sequence.prompt))
        metrics.CACHED_TOKENS.inc(sequence.cached_tokens or 0)
        metrics.QUEUE_SECONDS.observe(request.queue_seconds)

    def after_admission(self, ready: bool) -> None:
        """Notes that waiting requests have no room; `ready` is whether there is a worker."""
        if not len(self._waiting) or not ready:
            self._full_since, self._left_since_full = None, False
        elif self._full_since is None:
            self._full_since = time.monotonic()
