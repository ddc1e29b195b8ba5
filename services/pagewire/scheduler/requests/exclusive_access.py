"""Exclusive access: one gateway has the scheduler alone for some seconds.

It tries a request then that may end the scheduler's process, so that no other request is lost.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from pagewire.scheduler.requests.delivery import DeltaBuffer

# The longest exclusive access, and so the longest pause of the other clients.
MAX_ACCESS_SECONDS = 6.0
# Others run for at least so long before the next one.
PAUSE_SECONDS = 1.0


class ExclusiveAccess:
    """The gateway that has exclusive access, and those that wait for it in order."""

    def __init__(self, on_begin: Callable[[], None]) -> None:
        """`on_begin` is called when a gateway gets access, to end or give back what is open."""
        # How often access has begun or ended; odd while a gateway has it.
        self.count = 0
        self._on_begin = on_begin
        self._holder: DeltaBuffer | None = None
        self._asked: deque[DeltaBuffer] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._gateways: set[DeltaBuffer] = set()
        self._free = asyncio.Event()
        self._free.set()

    def connect(self, gateway: DeltaBuffer) -> None:
        """Adds a gateway, whose stream is woken at every change."""
        self._gateways.add(gateway)

    def disconnect(self, gateway: DeltaBuffer) -> None:
        """Removes a gateway, and ends its access."""
        self._gateways.discard(gateway)
        self.release(gateway)

    def ask(self, gateway: DeltaBuffer) -> None:
        """Gives a gateway access, at once or after those that asked before."""
        if gateway is not self._holder and gateway not in self._asked:
            self._asked.append(gateway)
            if self._timer is None:
                self._begin_next()

    def release(self, gateway: DeltaBuffer) -> None:
        """Ends the access of a gateway, or forgets that it asked."""
        if gateway in self._asked:
            self._asked.remove(gateway)
        if gateway is not self._holder:
            return
        self._holder = None
        self._free.set()
        self._wake_gateways()
        assert self._timer is not None
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._begin_next)

    def held_by(self, client: DeltaBuffer) -> bool:
        """Whether a client has access."""
        return client is self._holder

    def excludes(self, client: DeltaBuffer) -> bool:
        """Whether another client has access."""
        return self._holder is not None and client is not self._holder

    async def until_free(self) -> None:
        """Waits until no gateway has access."""
        await self._free.wait()

    def _begin_next(self) -> None:
        self._timer = None
        if not self._asked:
            return
        self._holder = holder = self._asked.popleft()
        self._free.clear()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(MAX_ACCESS_SECONDS, self.release, holder)
        self._wake_gateways()
        self._on_begin()

    def _wake_gateways(self) -> None:
        self.count += 1
        for gateway in self._gateways:
            gateway.ready.set()
