"""Limits, counts and times the open HTTP requests."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.drain_rate import DrainRate
from pagewire.errors import Code, RequestError
from pagewire.gateway.answers.sse import SEND
from pagewire.gateway.api.messages.errors import is_anthropic
from pagewire.gateway.error_responses import error_response
from pagewire.gateway.errors import ApiError
from pagewire.gateway.http.model_shares import ModelShares
from pagewire.gateway.http.request_log import log_request
from pagewire.gateway.http.request_trace import TRACE, begin_trace, end_trace
from pagewire.gateway.metrics import GatewayMetrics
from pagewire.gateway.request_ids import STATE, answered_header, given_id
from pagewire.lifecycle.logs import set_request_id

if TYPE_CHECKING:
    from pagewire.tracing.otel import Tracing


# The model of a request and the bytes of its body, in the state of its scope.
_SHARE = "share"


class Traffic:
    """Tracks the begin and end of every HTTP request.

    Requests with a body, to the paths in `generating` and `others`, are limited: at most `max_open`
    at once, with bodies of at most `max_bytes` together. Requests to `generating` are timed. While
    `retry_after` returns seconds, the schedulers refuse requests to `generating`, and so does the
    gateway. It refuses them by the head, without reading the body. A body is refused while it is
    read, as soon as it exceeds `max_bytes`. Each of several models has an equal share of both
    limits.
    """

    def __init__(
        self,
        metrics: GatewayMetrics,
        generating: tuple[str, ...],
        max_open: int,
        max_bytes: int,
        retry_after: Callable[[], int] = lambda: 0,
        others: tuple[str, ...] = (),
        tracing: "Tracing | None" = None,
    ) -> None:
        self._metrics = metrics
        self._generating = generating
        self._others = others
        self._tracing = tracing
        self._max_open = max_open
        self._max_bytes = max_bytes
        self._shares = ModelShares(max_open, max_bytes)
        self._retry_after = retry_after
        self.num_generating = 0
        self._num_others = 0
        self._bytes = 0
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._drain_rate = DrainRate(time.perf_counter())

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """`app` with these limits and metrics."""

        async def with_limits(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            state = scope.setdefault("state", {})
            state[SEND] = send

            async def send_noting_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    state.setdefault("outcome", str(message["status"]))
                    name, value = answered_header(state)
                    answered = [*message.get("headers", ()), (name, value)]
                    if is_anthropic(scope):  # the name for Anthropic's clients
                        answered.append((b"request-id", value))
                    message["headers"] = answered
                await send(message)

            body_bytes = 0

            async def receive_counting_bytes() -> Message:
                nonlocal body_bytes
                message = await receive()
                size = len(message.get("body", b""))
                if self._bytes + size > self._max_bytes:
                    raise ApiError.of(self._too_large())
                body_bytes += size
                self._bytes += size
                return message

            posts = scope["method"] == "POST"
            generating = posts and scope["path"] in self._generating
            other = posts and scope["path"] in self._others
            refusal = self._refusal(generating) if generating or other else None
            try:
                state[STATE] = given_id(scope)
                set_request_id(state[STATE] or "")
            except RequestError as error:
                refusal = error
            if self._tracing is not None and (generating or other):
                state[TRACE] = begin_trace(self._tracing, scope)
            answering = app
            if refusal is not None:
                answering = error_response(ApiError.of(refusal), scope)
            began = time.perf_counter()
            if not self.num_generating:
                self._drain_rate.skip_idle_time(began)
            self._begin()
            self.num_generating += generating
            self._num_others += other
            try:
                receiving = receive_counting_bytes if generating or other else receive
                await answering(scope, receiving, send_noting_status)
            finally:
                self.num_generating -= generating
                self._num_others -= other
                self._bytes -= body_bytes
                if (share := state.get(_SHARE)) is not None:
                    self._shares.give_back(*share)
                if generating and refusal is None:
                    self._drain_rate.count_departure(time.perf_counter())
                self._end(scope, began, time.perf_counter() - began)

        return with_limits

    def count_for_model(
        self, state: dict[str, Any], model: str, num_bytes: int, num_models: int
    ) -> None:
        """Counts an open request for its model, after its body is parsed; RequestError if the model
        has too many. `state` is the state of the request's scope."""
        reason = self._shares.take(model, num_bytes, num_models)
        if reason is not None:
            raise _too_many(reason, self._seconds_until_drained())
        state[_SHARE] = model, num_bytes

    async def wait_until_idle(self, seconds: float) -> bool:
        """Waits until no request is open; False if some still are after `seconds`."""
        try:
            await asyncio.wait_for(self._none_open.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _refusal(self, generating: bool) -> RequestError | None:
        """Why a request with a body is refused; None if it is accepted."""
        num_open = self.num_generating + self._num_others
        if num_open >= self._max_open:
            reason = f"{num_open} requests are being answered already"
            return _too_many(reason, self._seconds_until_drained())
        if generating and (seconds := self._retry_after()):
            return too_many_waiting(seconds)
        return self._too_large() if self._bytes >= self._max_bytes else None

    def _too_large(self) -> RequestError:
        reason = f"the requests being answered have bodies of {self._bytes} bytes already"
        return _too_many(reason, self._seconds_until_drained())

    def _seconds_until_drained(self) -> float:
        """Estimates when the requests that are open now will have ended."""
        return self._drain_rate.retry_after(self.num_generating, time.perf_counter())

    def _begin(self) -> None:
        self._open += 1
        self._none_open.clear()
        self._metrics.open_requests.set(self._open)

    def _end(self, scope: Scope, began: float, seconds: float) -> None:
        self._open -= 1
        if self._open == 0:
            self._none_open.set()
        self._metrics.open_requests.set(self._open)
        known: bool = scope["path"] in self._generating or scope["path"] in self._others
        path = scope["path"] if known else "other"
        route = str(getattr(scope.get("route"), "path", path))
        outcome: str = scope["state"].get("outcome", "client_gone")
        self._metrics.requests.labels(route, outcome).inc()
        log_request(scope, route, outcome, began, seconds)
        if (span := scope["state"].get(TRACE)) is not None:
            end_trace(span, scope, outcome)
        if route not in self._generating:
            return
        if outcome == "200":
            self._metrics.request_seconds.labels(route).observe(seconds)
        elif outcome == "429":
            self._metrics.refusal_seconds.observe(seconds)


def too_many_waiting(seconds: float, model: str | None = None) -> RequestError:
    """The error while the schedulers, of one model or of all, refuse requests for `seconds`."""
    which = "requests" if model is None else f"requests for the model {model!r}"
    return _too_many(f"too many {which} are waiting already", seconds)


def _too_many(reason: str, seconds: float) -> RequestError:
    return RequestError(
        Code.RESOURCE_EXHAUSTED,
        f"{reason}; try again in {math.ceil(seconds)} s",
        retry_after=seconds,
    )
