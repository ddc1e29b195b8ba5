"""Generations that wait for a scheduler."""

import asyncio
from collections.abc import Callable, Iterator

from pagewire.gateway.generation.generation import Generation


class WaitingGenerations:
    """Generations without a scheduler, in order of arrival; each has a limit on its wait."""

    def __init__(self, max_seconds: float, timed_out: Callable[[Generation], None]) -> None:
        """`timed_out` is called at a generation's limit; it must remove it or add it again."""
        self._max_seconds = max_seconds
        self._timed_out = timed_out
        self._timers: dict[Generation, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._timers))  # the caller may remove some meanwhile

    def add(self, generation: Generation) -> None:
        """Lets it wait, until its deadline at most. One that waits already keeps its place."""
        seconds = max(0.0, min(self._max_seconds, generation.seconds_left))
        self._timers[generation] = asyncio.get_running_loop().call_later(
            seconds, self._timed_out, generation
        )

    def remove(self, generation: Generation) -> bool:
        """Ends its wait; False if it does not wait."""
        timer = self._timers.pop(generation, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def close(self) -> None:
        """Stops all timers."""
        for timer in self._timers.values():
            timer.cancel()
