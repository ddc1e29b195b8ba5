"""The time without a ready worker, and how long requests wait for one."""

import asyncio
from collections.abc import Callable


class Outage:
    """Lasts from the loss of the last ready worker until any worker is ready.

    Requests that a gateway can send elsewhere wait for `hand_back_after` seconds, others for
    `give_up_after`. `on_overdue` is called when either time has passed.
    """

    def __init__(
        self, hand_back_after: float, give_up_after: float, on_overdue: Callable[[], None]
    ) -> None:
        self._hand_back_after = hand_back_after
        self._give_up_after = give_up_after
        self._on_overdue = on_overdue
        self._passed: set[float] = set()
        self._timers: list[asyncio.TimerHandle] = []

    def update(self, ready: bool) -> None:
        """Begins or ends the outage; `ready` is whether any worker is ready now."""
        if ready:
            for timer in self._timers:
                timer.cancel()
            self._timers.clear()
            self._passed.clear()
        elif not self._timers:
            loop = asyncio.get_running_loop()
            self._timers = [
                loop.call_later(seconds, self._pass, seconds)
                for seconds in {self._hand_back_after, self._give_up_after}
            ]

    def longest_wait(self, moves: bool) -> float | None:
        """The longest time, in seconds, that a request waits; None if it has not passed yet.

        `moves` is whether the request's client continues it elsewhere.
        """
        seconds = self._hand_back_after if moves else self._give_up_after
        return seconds if seconds in self._passed else None

    def _pass(self, seconds: float) -> None:
        self._passed.add(seconds)
        self._on_overdue()
