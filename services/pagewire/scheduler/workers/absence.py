"""How long no worker has been ready, and who has waited long enough for one."""

import asyncio
from collections.abc import Callable


class Absence:
    """Time without a ready worker, from the loss of the last one to the return of any.

    Requests that a gateway can send elsewhere wait for `hand_back_after` seconds, others for
    `give_up_after`. `on_time` is called when either has passed.
    """

    def __init__(
        self, hand_back_after: float, give_up_after: float, on_time: Callable[[], object]
    ) -> None:
        self._hand_back_after = hand_back_after
        self._give_up_after = give_up_after
        self._on_time = on_time
        self._passed: set[float] = set()
        self._timers: list[asyncio.TimerHandle] = []

    def note(self, ready: bool) -> None:
        """Whether some worker is ready now."""
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

    def too_long_for(self, moves: bool) -> float | None:
        """The seconds that a request has waited long enough after; None if it waits on.

        `moves` is whether its client continues it elsewhere.
        """
        seconds = self._hand_back_after if moves else self._give_up_after
        return seconds if seconds in self._passed else None

    def _pass(self, seconds: float) -> None:
        self._passed.add(seconds)
        self._on_time()
