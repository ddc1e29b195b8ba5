"""One gateway has the scheduler alone for a while, to try a request that may take it down."""

import asyncio
from collections import deque
from collections.abc import Callable

from pagewire.scheduler.requests.delivery import DeltaBuffer

# The longest that a gateway has the scheduler alone, and so the longest pause of others for it.
SOLITUDE_SECONDS = 6.0
# Others run at least so long before the next one.
REST_SECONDS = 1.0


class Solitude:
    """Who has the scheduler alone, and who has asked for it; granted in turns."""

    def __init__(self, on_begin: Callable[[], None]) -> None:
        """`on_begin` ends or gives back what is open when somebody gets the scheduler."""
        # Odd while a gateway has the scheduler.
        self.count = 0
        self._on_begin = on_begin
        self._holder: DeltaBuffer | None = None
        self._asked: deque[DeltaBuffer] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._clients: set[DeltaBuffer] = set()
        self._free = asyncio.Event()
        self._free.set()

    def join(self, client: DeltaBuffer) -> None:
        """A gateway is there, and hears of every change."""
        self._clients.add(client)

    def part(self, client: DeltaBuffer) -> None:
        """A gateway has gone."""
        self._clients.discard(client)
        self.give_up(client)

    def ask(self, client: DeltaBuffer) -> None:
        """A gateway wants the scheduler alone."""
        if client is not self._holder and client not in self._asked:
            self._asked.append(client)
            if self._timer is None:
                self._next()

    def give_up(self, client: DeltaBuffer) -> None:
        """It does not need it any longer."""
        if client in self._asked:
            self._asked.remove(client)
        if client is not self._holder:
            return
        self._holder = None
        self._free.set()
        self._change()
        assert self._timer is not None
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(REST_SECONDS, self._next)

    def is_for(self, client: DeltaBuffer) -> bool:
        """Whether a gateway has the scheduler alone."""
        return client is self._holder

    def excludes(self, client: DeltaBuffer) -> bool:
        """Whether another one has."""
        return self._holder is not None and client is not self._holder

    async def over(self) -> None:
        """Waits until no gateway has the scheduler alone."""
        await self._free.wait()

    def _next(self) -> None:
        self._timer = None
        if not self._asked:
            return
        self._holder = holder = self._asked.popleft()
        self._free.clear()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SOLITUDE_SECONDS, self.give_up, holder)
        self._change()
        self._on_begin()

    def _change(self) -> None:
        self.count += 1
        for client in self._clients:
            client.ready.set()
