"""A queue of the generations of an HTTP request that have changed."""

import asyncio
from typing import Generic, Protocol, TypeVar

from pagewire.gateway.errors import ClientGoneError


class Queueable(Protocol):
    """An item of an UpdateQueue. The queue sets `queued`: whether the item is in it now."""

    queued: bool


Item = TypeVar("Item", bound=Queueable)


class UpdateQueue(Generic[Item]):
    """The generations of one HTTP request that have changed; one reader waits for them.

    It holds generations, not pieces of output. So a slow reader gets fewer and larger pieces, and
    the memory held is bounded by the requests' max_tokens.
    """

    __slots__ = ("_changed", "_client_gone", "_waiter")

    def __init__(self) -> None:
        self._changed: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self._client_gone = False

    def put(self, generation: Item) -> None:
        """Adds a generation; until the next `take` the queue has it only once."""
        if not generation.queued:
            generation.queued = True
            self._changed.append(generation)
            self._wake()

    def client_left(self) -> None:
        """Makes `take` raise ClientGoneError from now on."""
        self._client_gone = True
        self._wake()

    @property
    def client_gone(self) -> bool:
        """Whether the client has closed its connection."""
        return self._client_gone

    async def take(self) -> list[Item]:
        """Waits for a changed generation, and removes all that have changed, in order of `put`."""
        if not self._changed and not self._client_gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._client_gone:
            raise ClientGoneError
        changed, self._changed = self._changed, []
        for generation in changed:
            generation.queued = False
        return changed

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
