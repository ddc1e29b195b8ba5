"""The health of a worker: it serves while its steps get on and it does not drain."""

import asyncio
from collections.abc import Callable

from pagewire.rpc import Health
from pagewire.watchdog import Watchdog
from pagewire.worker.engine import Engine
from pagewire.worker.service import WorkerService


class WorkerHealth:
    """Keeps what a worker says of itself true, from its readiness to its end."""

    def __init__(self, health: Health, service: WorkerService) -> None:
        self._health = health
        self._service = service
        self._moving = True
        self._leaving = False

    async def serve(
        self, engine: Engine, step_timeout: float, on_fatal: Callable[[BaseException], None]
    ) -> Watchdog:
        """The worker is ready; from now on a step that takes too long shows."""
        loop = asyncio.get_running_loop()

        def on_change(moving: bool) -> None:
            asyncio.run_coroutine_threadsafe(self._set_moving(moving), loop)

        watchdog = Watchdog(engine.watched(), step_timeout, on_fatal, on_change)
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

    async def _publish(self) -> None:
        await self._health.set_serving(self._moving and not self._leaving)
