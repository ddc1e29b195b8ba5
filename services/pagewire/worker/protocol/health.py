"""The health of a worker: it serves while its steps get on and it does not drain."""

import asyncio
import logging
from collections.abc import Callable

from pagewire.lifecycle.watchdog import Watchdog
from pagewire.rpc.transport import Health
from pagewire.worker.protocol.executor import StepExecutor
from pagewire.worker.protocol.service import WorkerService

log = logging.getLogger(__name__)


class WorkerHealth:
    """Keeps what a worker says of itself true, from its readiness to its end."""

    def __init__(self, health: Health, service: WorkerService) -> None:
        self._health = health
        self._service = service
        self._moving = True
        self._doubted = False
        self._leaving = False

    async def serve(
        self,
        engine: StepExecutor,
        step_timeout: float,
        on_fatal: Callable[[BaseException], None],
        unready_after: float | None = None,
    ) -> Watchdog:
        """The worker is ready; from now on a step that takes too long shows.

        One of `unready_after` seconds, by default `step_timeout`, keeps new sequences away until
        it has ended; one of `step_timeout` ends the stream.
        """
        loop = asyncio.get_running_loop()

        def on_change(moving: bool) -> None:
            asyncio.run_coroutine_threadsafe(self._set_moving(moving), loop)

        def on_doubt(doubted: bool) -> None:
            asyncio.run_coroutine_threadsafe(self._set_doubted(doubted), loop)

        watchdog = Watchdog(
            engine.watched(),
            step_timeout,
            on_fatal,
            on_change,
            slow_seconds=min(unready_after or step_timeout, step_timeout),
            on_slow=on_doubt,
        )
        await self._publish()
        return watchdog

    async def leave(self) -> None:
        """The worker drains: it does not serve any more, whatever its steps do."""
        self._leaving = True
        await self._publish()

    async def _set_moving(self, moving: bool) -> None:
        self._moving = moving
        self._service.set_moving(moving)
        await self._publish()

    async def _set_doubted(self, doubted: bool) -> None:
        self._doubted = doubted
        if doubted:
            log.warning("a step does not get on: not ready until it does")
        await self._publish()

    async def _publish(self) -> None:
        serving = self._moving and not self._doubted and not self._leaving
        await self._health.set_serving(serving)
