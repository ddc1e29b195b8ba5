"""A fleet that several tests use one after the other."""

import contextlib

from support.processes.fleet import Fleet, running_fleet


class SharedFleet:
    """A fleet for all tests of a module that follow each other and need the same processes."""

    def __init__(self, worker_command: tuple[str, ...]) -> None:
        self._worker_command = worker_command
        self._stack = contextlib.AsyncExitStack()
        self._fleet: Fleet | None = None
        self._size: tuple[int, int, int] | None = None

    async def get(self, workers: int, schedulers: int = 1, gateways: int = 1) -> Fleet:
        """The previous test's fleet if it has this size and is idle, otherwise a new one."""
        size = (workers, schedulers, gateways)
        if self._fleet is None or size != self._size or not await self._fleet.is_idle(workers):
            await self.stop()
            fleet = running_fleet(*size, worker_command=self._worker_command)
            self._fleet = await self._stack.enter_async_context(fleet)
            self._size = size
        return self._fleet

    async def stop(self) -> None:
        """Ends the fleet, if there is one."""
        self._fleet = None
        await self._stack.aclose()
