"""The health of a worker: ready while its steps make progress, until it drains."""

import asyncio
import logging
from collections.abc import Callable

from pagewire.lifecycle.watchdog import Watchdog
from pagewire.rpc.transport import Health
from pagewire.worker.protocol.executor import StepExecutor
from pagewire.worker.protocol.service import WorkerService

log = logging.getLogger(__name__)


class WorkerHealth:
    """Publishes the health of a worker, from its readiness to its end.

    A slow step makes it unready; a stalled one ends the stream too.
    """

    def __init__(self, health: Health, service: WorkerService) -> None:
        self._health = health
        self._service = service
        self._stalled = False
        self._slow = False
        self._draining = False

    async def serve(
        self,
        executor: StepExecutor,
        step_timeout: float,
        on_fatal: Callable[[BaseException], None],
        unready_after: float | None = None,
    ) -> Watchdog:
        """Publishes that the worker is ready, and starts to watch its steps.

        A step of more than `unready_after` seconds makes the worker unready until it ends. The
        default is `step_timeout`. A step of more than `step_timeout` seconds ends the stream, and
        after twice that time `on_fatal` is called.
        """
        loop = asyncio.get_running_loop()

        def on_change(moving: bool) -> None:
            asyncio.run_coroutine_threadsafe(self._set_stalled(not moving), loop)

        def on_slow(slow: bool) -> None:
            asyncio.run_coroutine_threadsafe(self._set_slow(slow), loop)

        watchdog = Watchdog(
            executor.watched(),
            step_timeout,
            on_fatal,
            on_change,
            slow_seconds=min(unready_after or step_timeout, step_timeout),
            on_slow=on_slow,
        )
        await self._publish()
        return watchdog

    async def drain(self) -> None:
        """Publishes that the worker is no longer ready."""
        self._draining = True
        await self._publish()

    async def _set_stalled(self, stalled: bool) -> None:
        self._stalled = stalled
        self._service.set_stalled(stalled)
        await self._publish()

    async def _set_slow(self, slow: bool) -> None:
        self._slow = slow
        if slow:
            log.warning("a step is slow: not ready until it ends")
        await self._publish()

    async def _publish(self) -> None:
        unready = self._stalled or self._slow or self._draining
        await self._health.set_serving(not unready)
