"""Long computations on the event loop, interrupted so that other tasks can run."""

import asyncio
import time

MAX_BLOCKING_SECONDS = 0.005


class Pacer:
    """Limits how long a computation keeps the event loop to itself."""

    __slots__ = ("_pause_at",)

    def __init__(self) -> None:
        self._pause_at = time.perf_counter() + MAX_BLOCKING_SECONDS

    async def pause_if_due(self) -> None:
        """Lets other tasks run if MAX_BLOCKING_SECONDS have passed. Call it after each piece."""
        if time.perf_counter() >= self._pause_at:
            await asyncio.sleep(0)
            self._pause_at = time.perf_counter() + MAX_BLOCKING_SECONDS
