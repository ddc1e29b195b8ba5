"""Reservations: one gateway has the scheduler alone for some seconds.

The gateway then runs a request that may end the process, so that no other request is lost.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from pagewire.scheduler.requests.delivery import DeltaBuffer

# The longest reservation, and so the longest pause of the other clients.
MAX_SECONDS = 6.0
# Other clients run for at least this long before the next reservation.
PAUSE_SECONDS = 1.0


class Reservations:
    """The gateway for which the scheduler is reserved, and those that wait for it in order."""

    def __init__(self, on_begin: Callable[[], None]) -> None:
        """`on_begin` is called when a reservation begins, to hand back open requests."""
        # Grows when a reservation begins and when it ends, so it is odd during one.
        self.changes = 0
        self._on_begin = on_begin
        self._holder: DeltaBuffer | None = None
        self._waiting: deque[DeltaBuffer] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._gateways: set[DeltaBuffer] = set()
        self._free = asyncio.Event()
        self._free.set()

    def connect(self, gateway: DeltaBuffer) -> None:
        """Adds a gateway, whose stream is woken at every change."""
        self._gateways.add(gateway)

    def disconnect(self, gateway: DeltaBuffer) -> None:
        """Removes a gateway, and ends its reservation."""
        self._gateways.discard(gateway)
        self.end(gateway)

    def request(self, gateway: DeltaBuffer) -> None:
        """Reserves the scheduler for a gateway, at once or after those that wait already."""
        if gateway is not self._holder and gateway not in self._waiting:
            self._waiting.append(gateway)
            if self._timer is None:
                self._begin_next()

    def end(self, gateway: DeltaBuffer) -> None:
        """Ends the reservation of a gateway, or its wait for one."""
        if gateway in self._waiting:
            self._waiting.remove(gateway)
        if gateway is not self._holder:
            return
        self._holder = None
        self._free.set()
        self._wake_gateways()
        assert self._timer is not None
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._begin_next)

    def is_for(self, client: DeltaBuffer) -> bool:
        """Whether the scheduler is reserved for a client."""
        return client is self._holder

    def excludes(self, client: DeltaBuffer) -> bool:
        """Whether the scheduler is reserved for another client."""
        return self._holder is not None and client is not self._holder

    async def until_free(self) -> None:
        """Waits until there is no reservation."""
        await self._free.wait()

    def _begin_next(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        self._holder = holder = self._waiting.popleft()
        self._free.clear()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(MAX_SECONDS, self.end, holder)
        self._wake_gateways()
        self._on_begin()

    def _wake_gateways(self) -> None:
        self.changes += 1
        for gateway in self._gateways:
            gateway.ready.set()
