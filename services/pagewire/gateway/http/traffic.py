"""HTTP requests being answered: counted, timed, and awaited at the end."""

import asyncio
import math
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.drain_rate import DrainRate
from pagewire.errors import Code, RequestError
from pagewire.gateway.errors import ApiError
from pagewire.gateway.metrics import GatewayMetrics


class Traffic:
    """Sees every HTTP request begin and end.

    `generating` are the routes that are timed, of which at most `most_generating` requests are let
    in at once, with bodies of at most `most_bytes` together, and none while `retry_after` says for
    how many seconds schedulers refuse them. What is refused here is refused by its head: its body
    is neither awaited nor parsed, save that one which is on its way may grow too large.
    """

    def __init__(
        self,
        metrics: GatewayMetrics,
        generating: tuple[str, ...],
        most_generating: int,
        most_bytes: int,
        retry_after: Callable[[], int] = lambda: 0,
    ) -> None:
        self._metrics = metrics
        self._generating = generating
        self._most_generating = most_generating
        self._most_bytes = most_bytes
        self._retry_after = retry_after
        self._num_generating = 0
        self._bytes = 0
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._drain_rate = DrainRate(time.perf_counter())

    def watch(self, app: ASGIApp) -> ASGIApp:
        """`app`, watched."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            state = scope.setdefault("state", {})

            async def noting_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    state.setdefault("outcome", str(message["status"]))
                await send(message)

            held = 0

            async def counting_bytes() -> Message:
                nonlocal held
                message = await receive()
                size = len(message.get("body", b""))
                if self._bytes + size > self._most_bytes:
                    raise ApiError.of(self._too_large())
                held += size
                self._bytes += size
                return message

            generating = scope["path"] in self._generating and scope["method"] == "POST"
            refusal = self._refusal() if generating else None
            answering = app if refusal is None else ApiError.of(refusal).response()
            began = time.perf_counter()
            if not self._num_generating:
                self._drain_rate.skip_idle_time(began)
            self._begin()
            self._num_generating += generating
            try:
                await answering(scope, counting_bytes if generating else receive, noting_status)
            finally:
                self._num_generating -= generating
                self._bytes -= held
                if generating and refusal is None:
                    self._drain_rate.count_departure(time.perf_counter())
                self._end(scope, time.perf_counter() - began)

        return watched

    async def wait_until_idle(self, seconds: float) -> bool:
        """Waits for the open requests; False if some are left after so many seconds."""
        try:
            await asyncio.wait_for(self._none_open.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _refusal(self) -> RequestError | None:
        """Why a generating request is not let in, if it is not."""
        if self._num_generating >= self._most_generating:
            reason = f"{self._num_generating} requests are being answered already"
            return _too_many(reason, self._seconds())
        if seconds := self._retry_after():
            return _too_many("too many requests are waiting already", seconds)
        return self._too_large() if self._bytes >= self._most_bytes else None

    def _too_large(self) -> RequestError:
        reason = f"the requests being answered have bodies of {self._bytes} bytes already"
        return _too_many(reason, self._seconds())

    def _seconds(self) -> float:
        """After which those that are being answered now will have been."""
        return self._drain_rate.retry_after(self._num_generating, time.perf_counter())

    def _begin(self) -> None:
        self._open += 1
        self._none_open.clear()
        self._metrics.open_requests.set(self._open)

    def _end(self, scope: Scope, seconds: float) -> None:
        self._open -= 1
        if self._open == 0:
            self._none_open.set()
        self._metrics.open_requests.set(self._open)
        known = scope["path"] if scope["path"] in self._generating else "other"
        route = getattr(scope.get("route"), "path", known)
        outcome = scope["state"].get("outcome", "client_gone")
        self._metrics.requests.labels(route, outcome).inc()
        if route not in self._generating:
            return
        if outcome == "200":
            self._metrics.request_seconds.labels(route).observe(seconds)
        elif outcome == "429":
            self._metrics.refusal_seconds.observe(seconds)


def _too_many(reason: str, seconds: float) -> RequestError:
    return RequestError(
        Code.RESOURCE_EXHAUSTED,
        f"{reason}; try again in {math.ceil(seconds)} s",
        retry_after=seconds,
    )
