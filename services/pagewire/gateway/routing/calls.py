"""Calls that generate nothing: any scheduler of the model returns the same answer."""

import asyncio
from collections.abc import Mapping

from pagewire.errors import Code, RequestError
from pagewire.gateway.routing.link import Link
from pagewire.gateway.routing.selection import least_loaded

# Bounded, because the call itself may end a scheduler.
MAX_ATTEMPTS = 3
# Seconds. A link may still count as connected after its call has failed.
_BACK_OFF = 0.1


class Calls:
    """Sends calls to ready schedulers; if a scheduler is lost meanwhile, again to another one."""

    def __init__(self, links: Mapping[str, Link], max_seconds: float) -> None:
        """A call waits for a ready scheduler for at most `max_seconds`."""
        self._links = links
        self._max_seconds = max_seconds
        self._changed = asyncio.Event()

    def link_changed(self) -> None:
        """Wakes waiting calls, which may find a scheduler now."""
        self._changed.set()

    async def call(self, method: str, model: str, request: bytes) -> bytes:
        """The serialized response of a method; RequestError if no scheduler returns one."""
        waits_until = asyncio.get_running_loop().time() + self._max_seconds
        for attempt in range(1, MAX_ATTEMPTS + 1):
            link = await self._link(model, waits_until)
            try:
                return await link.call(method, request)
            except RequestError as error:
                if error.code != Code.UNAVAILABLE or attempt == MAX_ATTEMPTS:
                    raise
            await asyncio.sleep(_BACK_OFF)
        raise AssertionError("the last attempt returns or raises")

    async def _link(self, model: str, waits_until: float) -> Link:
        while True:
            link = least_loaded([link for link in self._links.values() if link.answers(model)])
            if link is not None:
                return link
            self._changed.clear()
            try:
                async with asyncio.timeout_at(waits_until):
                    await self._changed.wait()
            except TimeoutError:
                raise RequestError(
                    Code.UNAVAILABLE,
                    f"no ready scheduler of {model!r} was there for {self._max_seconds:g} s; retry",
                ) from None
