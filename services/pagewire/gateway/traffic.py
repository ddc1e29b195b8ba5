"""HTTP requests being answered: counted, timed, and awaited at the end."""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewire.gateway.metrics import Metrics


class Traffic:
    """Sees every HTTP request begin and end. `generating` are the routes that are timed."""

    def __init__(self, metrics: Metrics, generating: tuple[str, ...]) -> None:
        self._metrics = metrics
        self._generating = generating
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()

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

            began = time.perf_counter()
            self._begin()
            try:
                await app(scope, receive, noting_status)
            finally:
                self._end(scope, time.perf_counter() - began)

        return watched

    async def wait_until_idle(self, seconds: float) -> bool:
        """Waits for the open requests; False if some are left after so many seconds."""
        try:
            await asyncio.wait_for(self._none_open.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _begin(self) -> None:
        self._open += 1
        self._none_open.clear()
        self._metrics.open_requests.set(self._open)

    def _end(self, scope: Scope, seconds: float) -> None:
        self._open -= 1
        if self._open == 0:
            self._none_open.set()
        self._metrics.open_requests.set(self._open)
        route = getattr(scope.get("route"), "path", "other")
        outcome = scope["state"].get("outcome", "client_gone")
        self._metrics.requests.labels(route, outcome).inc()
        if route in self._generating and outcome == "200":
            self._metrics.request_seconds.labels(route).observe(seconds)
