"""Long computations on the event loop, cut into turns."""

import asyncio
import time

TURN_SECONDS = 0.005


class Turns:
    """Lets the event loop go on between the pieces of a computation."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + TURN_SECONDS

    @property
    def over(self) -> bool:
        """Whether it is time for others."""
        return time.perf_counter() >= self._until

    async def give(self) -> None:
        """To be called after each piece; waits for a turn of the loop when it is time."""
        if self.over:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + TURN_SECONDS
